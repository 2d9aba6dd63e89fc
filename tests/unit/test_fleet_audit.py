"""Runs on the controller: their folders, the latest one, retries, and what the commands exit with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from synthetic import BEGIN, CASES, RUN, report, row
from typer.testing import CliRunner

from bench.fleet import audit as auditing
from bench.fleet.audit import Controller, NothingStartedError, Order, new_run, report_run, start
from bench.fleet.commands import app
from bench.fleet.inventory import InventoryError
from bench.fleet.store import RunStore, StoreError, Targets, open_run, safe_folder
from bench.plan import Plan, PlanError

PLAN = Plan.model_validate({"name": "standard", "benchmarks": [{"workload": "model", "writers": ["torch_save"]}]})
LATER = "20261130T000000Z-0000"


def made(tmp_path: Path, reports: dict[str, dict | None], run_id: str = RUN) -> RunStore:
    """A run that was collected: a report for each host, or None."""
    store = RunStore(tmp_path / "results", run_id)
    inventory = tmp_path / "inventory.ini"
    inventory.write_text("\n".join(reports) + "\n")
    targets = Targets(
        run_id=run_id, plan="standard", cases=CASES, started_at=BEGIN, inventory=[str(inventory)], pattern="all",
        hosts=sorted(reports),
    )  # fmt: skip
    store.create(targets, PLAN)
    for host, data in reports.items():
        if data is not None:
            store.host_folder(host).mkdir()
            store.report_file(host).write_text(json.dumps({**data, "run_id": run_id}))
    return store


def failing(host: str) -> dict:
    cases = [row(workload, writer, 1, status="failed", reason="EIO") for workload, writer in CASES]
    return report(host, cases=cases)


def controller(tmp_path: Path) -> Controller:
    return Controller(tmp_path / "results", tmp_path / "known_hosts")


def test_report_writes_every_page_and_the_link(tmp_path):
    store = made(tmp_path, {"a": report("a"), "b": None})
    fleet, _ = report_run(store)
    assert [(host.name, host.verdict) for host in fleet.hosts] == [("a", "PASS"), ("b", "FAILED")]
    data = json.loads((store.folder / "fleet.json").read_text())
    assert data["hosts"][0] == {"name": "a", "verdict": "PASS", "reason": None, "report": "a/report.json"}
    assert data["hosts"][1]["report"] is None
    assert "make collect" in data["hosts"][1]["reason"]
    assert "| b | FAILED |" in (store.folder / "report.md").read_text()
    assert os.readlink(tmp_path / "results" / "latest") == RUN


@pytest.mark.parametrize(
    ("reports", "code", "words"),
    [
        ({"a": report("a"), "b": report("b")}, 0, "PASS: all 2 hosts"),
        ({"a": report("a"), "b": failing("b")}, 4, "FAILED: 1 FAILED, 1 PASS of 2 hosts"),
        ({"a": report("a"), "b": None}, 4, "b  FAILED"),
        ({f"n{n}": report(f"n{n}", 0.5 if n == 5 else 1.0) for n in range(6)}, 3, "SLOW: 1 SLOW, 5 PASS of 6 hosts"),
    ],
)
def test_report_exits_with_the_fleets_verdict(tmp_path, reports, code, words):
    made(tmp_path, reports)
    done = CliRunner().invoke(app, ["report", "--results", str(tmp_path / "results"), "--run", RUN])
    assert done.exit_code == code, done.output
    assert words in done.output


def test_a_run_that_is_not_there_names_those_that_are(tmp_path):
    with pytest.raises(StoreError, match=r"there is no run in .* yet; `make run` starts one"):
        open_run(tmp_path, None)
    made(tmp_path, {"a": None})
    with pytest.raises(StoreError, match=f"no run '{LATER}' in .*; the last ones: {RUN}"):
        open_run(tmp_path / "results", LATER)
    with pytest.raises(StoreError, match=r"no run '\.\./\.\./etc'"):
        open_run(tmp_path / "results", "../../etc")


def test_retry_takes_the_hosts_that_did_not_pass_and_are_still_there(tmp_path):
    store = made(tmp_path, {"a": report("a"), "b": failing("b"), "c": None, "gone": None})
    report_run(store)
    (tmp_path / "inventory.ini").write_text("a\nb\nc\nnew\n")
    again, targets = new_run(controller(tmp_path), Order("quick", ["ignored"], "ignored", retry="last"))
    assert targets.hosts == ["b", "c"]
    assert again.hosts_file.read_text() == "b\nc\n"
    assert targets.inventory == [str(tmp_path / "inventory.ini")]


def test_retry_without_verdicts_or_without_failures_says_so(tmp_path):
    store = made(tmp_path, {"a": report("a")})
    store.link_latest()
    order = Order("quick", [], "", retry="last")
    with pytest.raises(StoreError, match=f"run {RUN} has no verdicts yet; `make collect report RUN={RUN}`"):
        new_run(controller(tmp_path), order)
    report_run(store)
    with pytest.raises(StoreError, match=f"all 1 hosts of run {RUN} passed"):
        new_run(controller(tmp_path), order)


def test_nothing_is_left_of_a_run_that_could_not_be_ordered(tmp_path):
    inventory = tmp_path / "inventory.ini"
    inventory.write_text("a\n")
    with pytest.raises(PlanError, match="did you mean quick"):
        new_run(controller(tmp_path), Order("qick", [str(inventory)], "a"))
    with pytest.raises(InventoryError, match="nope"):
        new_run(controller(tmp_path), Order("quick", [str(inventory)], "nope"))
    assert not (tmp_path / "results").exists()


def ansible(monkeypatch, *events: dict):
    """Stand in for ansible-playbook: leave these events and end with status 4."""

    def run(_controller, _order, store, _targets):
        with store.start_file.open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)
        return 4

    monkeypatch.setattr(auditing, "run_playbook", run)


def test_a_refused_second_run_leaves_the_first_as_the_latest(tmp_path, monkeypatch):
    made(tmp_path, {"a": None}).link_latest()
    second = made(tmp_path, {"a": None}, LATER)
    ansible(monkeypatch, {"host": "a", "event": "failed", "message": "a benchmark is already running", "busy": True})
    with pytest.raises(NothingStartedError, match="a: a benchmark is already running"):
        start(controller(tmp_path), Order("quick", [], "a"), second, second.targets())
    assert not second.folder.exists()
    assert os.readlink(tmp_path / "results" / "latest") == RUN


def test_a_run_is_the_latest_while_it_is_being_started(tmp_path, monkeypatch):
    """Killed now, `make watch` has to find it."""
    made(tmp_path, {"a": None}).link_latest()
    second = made(tmp_path, {"a": None}, LATER)
    seen = []

    def run(_controller, _order, _store, _targets):
        seen.append(os.readlink(tmp_path / "results" / "latest"))
        raise KeyboardInterrupt

    monkeypatch.setattr(auditing, "run_playbook", run)
    with pytest.raises(KeyboardInterrupt):
        start(controller(tmp_path), Order("quick", [], "a"), second, second.targets())
    assert seen == [LATER]


@pytest.mark.parametrize(
    ("event", "started"),
    [
        ({"event": "started", "run_folder": "/r"}, True),
        ({"event": "starting", "run_folder": "/r"}, True),
        ({"event": "failed", "message": "no venv"}, False),
        ({"event": "unreachable", "message": "no route"}, False),
    ],
)
def test_whether_anything_runs_is_known_after_the_start(tmp_path, monkeypatch, event, started):
    store = made(tmp_path, {"a": None})
    ansible(monkeypatch, {"host": "a", **event})
    assert start(controller(tmp_path), Order("quick", [], "a"), store, store.targets()) is started


def test_an_ansible_that_reached_nobody_is_an_error(tmp_path, monkeypatch):
    store = made(tmp_path, {"a": None})
    ansible(monkeypatch)
    with pytest.raises(NothingStartedError, match="ended with 4 before it reached a host"):
        start(controller(tmp_path), Order("quick", [], "a"), store, store.targets())


@pytest.mark.parametrize("name", ["gpu-node-1", "node.example.org", "10.0.0.1", "A_b-9"])
def test_ordinary_host_names_are_folder_names(name):
    assert safe_folder(name) == name


def test_other_names_become_plain_and_stay_apart():
    names = ["../x", "..", ".", "", "a/b", "a\\b", "<b>", "a b", "report.md", "Fleet.JSON", "host-x", "\udcff", "\n"]
    folders = [safe_folder(name) for name in names]
    assert len(set(folders)) == len(names)
    assert all(folder.startswith("host-") and "/" not in folder and folder.isprintable() for folder in folders)


def test_accepting_new_keys_reaches_ansible(tmp_path):
    asked = Controller(tmp_path, tmp_path / "k", accept_new_keys=True)
    assert "accept-new" in auditing.ansible_environment(asked)["ANSIBLE_SSH_EXTRA_ARGS"]
    plain = Controller(tmp_path, tmp_path / "k")
    assert "accept-new" not in auditing.ansible_environment(plain).get("ANSIBLE_SSH_EXTRA_ARGS", "")


def test_the_help_tells_the_exit_codes():
    for command in ("audit", "report"):
        text = " ".join(CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output.split())
        assert "0 every host passed, 1 could not run, 2 wrong usage, 3 some hosts slow, 4 some hosts failed" in text
