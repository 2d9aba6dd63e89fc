"""Collecting: whole and checked, or a reason; one host's trouble is nobody else's."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pytest
from synthetic import BEGIN, CASES, RUN, report

from bench.fleet import collect as collecting
from bench.fleet.collect import collect, fetch_checked, load, read_report
from bench.fleet.inventory import Target
from bench.fleet.ssh import FileTooLargeError, HostUnreachableError, LocalHost, RemoteError
from bench.fleet.store import RunStore, Start, Targets
from bench.fleet.verdict import NoReport, judge
from bench.plan import Plan
from bench.results import ReportError

PLAN = Plan.model_validate({"name": "standard", "benchmarks": [{"workload": "model", "writers": ["torch_save"]}]})


def targets(*hosts: str) -> Targets:
    return Targets(
        run_id=RUN, plan="standard", cases=CASES, started_at=BEGIN, inventory=["i"], pattern="all", hosts=list(hosts)
    )


def made_store(tmp_path, *hosts: str) -> RunStore:
    store = RunStore(tmp_path / "results", RUN)
    store.create(targets(*hosts), PLAN)
    return store


def started(store: RunStore, host: str, folder: Path) -> None:
    line = {"host": host, "event": "started", "run_folder": str(folder), "work_folder": None, "pid": 1}
    with store.start_file.open("a") as file:
        file.write(json.dumps(line) + "\n")


def host_on_disk(store: RunStore, tmp_path, host: str, content: bytes | None) -> Path:
    folder = tmp_path / "hosts" / hashlib.md5(host.encode()).hexdigest()
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "report.json").write_bytes(content)
    (folder / "bench.log").write_text(f"log of {host}\n")
    started(store, host, folder)
    return folder


def whole(host: str) -> bytes:
    return json.dumps(report(host)).encode()


class Breaking(LocalHost):
    """A host whose connection breaks after ``allowed`` bytes of each transfer."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.fetched = []

    def fetch(self, path, partial, limit):
        data = Path(path).read_bytes()
        begin = partial.stat().st_size if partial.exists() else 0
        piece = data[begin : begin + self.allowed]
        self.fetched.append(len(piece))
        with partial.open("ab") as file:
            file.write(piece)
        if begin + len(piece) < len(data):
            raise HostUnreachableError("the connection broke: reset by peer")


def test_reports_and_logs_of_many_hosts_arrive_whole(tmp_path):
    names = [f"gpu-node-{n}" for n in range(40)]
    store = made_store(tmp_path, *names)
    for name in names:
        host_on_disk(store, tmp_path, name, whole(name))
    found = collect(store, [Target(name) for name in names], lambda _: LocalHost())
    assert [one.missing for one in found] == [None] * 40
    assert (store.host_folder(names[7]) / "bench.log").read_text() == "log of gpu-node-7\n"
    digests, without = load(store, targets(*names), {})
    assert (len(digests), without) == (40, [])
    assert list(store.folder.glob("*/.*")) == []


def test_whatever_a_server_makes_paramiko_raise_costs_its_own_host(tmp_path):
    class Odd(LocalHost):
        def fetch(self, path, partial, limit):
            raise AttributeError("'NoneType' object has no attribute 'get_id'")

    store = made_store(tmp_path, "odd", "good")
    for name in ("odd", "good"):
        host_on_disk(store, tmp_path, name, whole(name))
    found = collect(store, [Target("odd"), Target("good")], lambda t: Odd() if t.name == "odd" else LocalHost())
    assert found[1].missing is None
    assert "AttributeError" in found[0].missing.reason


def test_hosts_are_asked_at_the_same_time(tmp_path):
    names = [f"n{n}" for n in range(8)]
    store = made_store(tmp_path, *names)
    for name in names:
        host_on_disk(store, tmp_path, name, whole(name))
    together = threading.Barrier(8, timeout=10)

    def connect(_):
        together.wait()
        return LocalHost()

    assert all(one.missing is None for one in collect(store, [Target(name) for name in names], connect))


def test_a_broken_transfer_goes_on_where_it_ended(tmp_path):
    store = made_store(tmp_path, "n")
    host_on_disk(store, tmp_path, "n", whole("n"))
    size = len(whole("n"))
    host = Breaking(size // 2 + 1)
    assert collect(store, [Target("n")], lambda _: host)[0].missing is None
    assert host.fetched == [size // 2 + 1, size - size // 2 - 1], "the second transfer brought only the rest"
    assert store.report_file("n").read_bytes() == whole("n")


def test_a_connection_that_always_breaks_is_unreachable_and_the_next_call_goes_on(tmp_path):
    store = made_store(tmp_path, "n")
    host_on_disk(store, tmp_path, "n", whole("n"))
    weak = Breaking(200)
    missing = collect(store, [Target("n")], lambda _: weak)[0].missing
    assert missing == NoReport("n", "the connection broke: reset by peer", unreachable=True)
    assert not store.report_file("n").exists()
    assert collect(store, [Target("n")], lambda _: Breaking(10**9))[0].missing is None


def test_half_of_another_file_is_found_by_its_sha256_and_fetched_anew(tmp_path):
    source = tmp_path / "report.json"
    source.write_bytes(whole("n"))
    to = tmp_path / "here.json"
    to.with_name(".here.json.part").write_bytes(b"x" * 300)
    fetch_checked(LocalHost(), str(source), to)
    assert to.read_bytes() == whole("n")


def test_a_file_that_arrives_damaged_twice_is_not_taken(tmp_path):
    class Lying(LocalHost):
        def sha256(self, path):
            return "0" * 64

    (tmp_path / "report.json").write_bytes(whole("n"))
    with pytest.raises(RemoteError, match="arrived twice with another sha256"):
        fetch_checked(Lying(), str(tmp_path / "report.json"), tmp_path / "here.json")
    assert not (tmp_path / "here.json").exists()


def test_a_huge_report_is_refused_before_it_is_fetched(tmp_path):
    huge = tmp_path / "report.json"
    with huge.open("wb") as file:
        file.truncate(collecting.MAX_REPORT_BYTES + 1)
    with pytest.raises(FileTooLargeError, match=r"report\.json"):
        fetch_checked(LocalHost(), str(huge), tmp_path / "here.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json"]


def test_of_a_huge_log_the_end_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "MAX_LOG_BYTES", 10)
    store = made_store(tmp_path, "n")
    folder = host_on_disk(store, tmp_path, "n", whole("n"))
    (folder / "bench.log").write_text("a" * 100 + "the end\n")
    collect(store, [Target("n")], lambda _: LocalHost())
    assert (store.host_folder("n") / "bench.log").read_text() == "aathe end\n"


def status(**changes) -> str:
    known = {
        "schema_version": 1, "run_id": RUN, "host": "n", "pid": 2**22 + 1, "state": "running", "progress": 0.4,
        "started_at": BEGIN.isoformat(), "updated_at": BEGIN.isoformat(),
    }  # fmt: skip
    return json.dumps({**known, **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no run in"),
        (status(state="interrupted", reason="interrupted by a signal"), "was interrupted: interrupted by a signal"),
        (status(state="failed", reason="folder /x is full"), "failed: folder /x is full"),
        (status(state="finished"), "left no report"),
        (status(), "ended without a report, 40% done: killed, out of memory"),
        ("{", "not JSON"),
        (status(pid="x" * 10**6), "larger than"),
    ],
)
def test_a_host_without_a_report_says_why(tmp_path, text, words):
    store = made_store(tmp_path, "n")
    folder = host_on_disk(store, tmp_path, "n", None)
    if text is not None:
        (folder / "status.json").write_text(text)
    missing = collect(store, [Target("n")], lambda _: LocalHost())[0].missing
    assert words in missing.reason
    assert not missing.unreachable


def test_every_targeted_host_has_a_row_whatever_became_of_it(tmp_path):
    """Never started, unreachable for Ansible, failed to start, connection refused, and one that is fine."""
    names = ["never", "away", "unfit", "refused", "fine"]
    store = made_store(tmp_path, *names)
    for name in ("refused", "fine"):
        host_on_disk(store, tmp_path, name, whole(name))
    with store.start_file.open("a") as file:
        file.write(json.dumps({"host": "away", "event": "unreachable", "message": "no route to host"}) + "\n")
        file.write(json.dumps({"host": "unfit", "event": "failed", "message": "not provisioned"}) + "\n")
        file.write('{"host": "never", "event": "sta')  # the controller was killed while it wrote

    def connect(target):
        if target.name == "refused":
            raise HostUnreachableError("connection refused")
        return LocalHost()

    found = collect(store, [Target(name) for name in names], connect)
    store.write_missing([one.missing for one in found if one.missing])
    outcomes = judge(*load(store, store.targets(), store.missing()))
    assert {one.name: (one.verdict, one.reason) for one in outcomes} == {
        "away": ("UNREACHABLE", "no route to host"),
        "fine": ("PASS", None),
        "never": ("FAILED", "it was never started: the controller stopped before its turn; `make run RETRY=last`"),
        "refused": ("UNREACHABLE", "connection refused"),
        "unfit": ("FAILED", "not provisioned"),
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps({**report("n"), "run_id": "20200101T000000Z-0000"}), "another run, 20200101T000000Z-0000"),
        (json.dumps(report("m")), "another host, m"),
        (json.dumps({**report("n"), "schema_version": 7}), "schema version 7"),
        (json.dumps({**report("n"), "cases": report("n")["cases"][:2]}), "lacks 2 of the plan's rows, such as engine"),
        (json.dumps(report("n"))[:900], "not JSON"),
    ],
)
def test_a_report_that_cannot_be_used_fails_its_host_with_the_reason(tmp_path, content, words):
    store = made_store(tmp_path, "n", "good")
    host_on_disk(store, tmp_path, "n", content.encode())
    host_on_disk(store, tmp_path, "good", whole("good"))
    collect(store, [Target("n"), Target("good")], lambda _: LocalHost())
    outcomes = {one.name: one for one in judge(*load(store, store.targets(), {}))}
    assert outcomes["n"].verdict == "FAILED"
    assert words in outcomes["n"].reason
    assert outcomes["good"].verdict == "PASS"


def test_names_that_are_paths_stay_below_the_runs_folder(tmp_path):
    names = ["../../etc/cron.d/x", "/etc/passwd", "..", ".", "<b>x</b>", "a/b", "fleet.json", "ok", "x" * 300, "Ünï"]
    store = made_store(tmp_path, *names)
    for name in names:
        host_on_disk(store, tmp_path, name, whole(name))
    collect(store, [Target(name) for name in names], lambda _: LocalHost())
    digests, without = load(store, targets(*names), {})
    assert without == []
    assert sorted(one.host for one in digests) == sorted(names)
    folders = {path.name for path in store.folder.iterdir() if path.is_dir()}
    assert len(folders) == len(names)
    assert all(store.host_folder(name).parent == store.folder for name in names)
    assert {path.name for path in tmp_path.iterdir()} == {"results", "hosts"}


def test_a_report_with_the_same_row_twice_does_not_stand_in_for_a_missing_one(tmp_path):
    path = tmp_path / "report.json"
    data = report("n")
    data["cases"][1] = data["cases"][0]
    path.write_text(json.dumps(data))
    with pytest.raises(ReportError, match="lacks 1 of the plan's rows"):
        read_report(path, targets("n"), "n")
    twice = targets("n").model_copy(update={"cases": [*CASES, CASES[0]]})
    path.write_text(json.dumps(report("n")))
    with pytest.raises(ReportError, match="lacks 1 of the plan's rows"):
        read_report(path, twice, "n")


def test_an_event_after_the_start_does_not_make_the_host_unstarted(tmp_path):
    store = made_store(tmp_path, "n")
    started(store, "n", tmp_path)
    with store.start_file.open("a") as file:
        file.write(json.dumps({"host": "n", "event": "unreachable", "message": "dropped"}) + "\n")
    assert store.starts()["n"] == Start(event="started", run_folder=str(tmp_path), pid=1)


@pytest.mark.parametrize(
    ("events", "kept"),
    [
        (["starting", "started"], "started"),
        (["starting", "failed"], "failed"),
        (["starting", "unreachable"], "starting"),
        (["unreachable"], "unreachable"),
    ],
)
def test_a_host_that_was_lost_while_it_was_being_started_is_asked(tmp_path, events, kept):
    store = made_store(tmp_path, "n")
    with store.start_file.open("a") as file:
        file.writelines(json.dumps({"host": "n", "event": event, "run_folder": "/r"}) + "\n" for event in events)
    assert store.starts()["n"].event == kept
