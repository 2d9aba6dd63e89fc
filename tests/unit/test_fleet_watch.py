"""The live view: what it shows of whom, and when it ends."""

from __future__ import annotations

import io
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from bench.fleet.inventory import Target
from bench.fleet.ssh import HostKeyRefusedError, HostUnreachableError
from bench.fleet.store import Start
from bench.fleet.watch import SILENT_SECONDS, View, Watcher, bar, done, heard, host_line, lost, screen, watch
from bench.results import RunStatus

RUN = "20261129T174442Z-3f9c"
NOW = datetime(2026, 11, 29, 18, 0, tzinfo=timezone.utc)


def status(**changes) -> RunStatus:
    known = {
        "run_id": RUN, "host": "n", "pid": 4242, "state": "running", "started_at": NOW, "updated_at": NOW,
        "progress": 0.5, "case": "model ds_aio", "phase": "save", "repetition": 3, "repetitions": 5,
        "last_bytes_per_second": 17.9 * 1024**3, "seconds_left": 75.0,
    }  # fmt: skip
    return RunStatus(**{**known, **changes})


def view(host="gpu-node-1", **changes) -> View:
    return heard(View(host), status(**changes), 100.0)


def test_a_line_has_bar_case_repetition_rate_and_time_left():
    line = host_line(view(), 10, 120)
    assert line == "gpu-node-1 ██████████··········  50% model ds_aio  save  3/5  17.9 GiB/s  1:15 left"


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_lines_fit_the_terminal(width):
    views = [view("a-host-with-quite-a-long-name.rack-17.example.org"), lost(view("b"), "no route to host " * 20)]
    assert all(len(line) <= width for line in screen(views, width, 24))


@pytest.mark.parametrize(("share", "drawn"), [(0, "····"), (0.5, "██··"), (1, "████"), (7, "████"), (-1, "····")])
def test_the_bar_stays_in_its_bounds(share, drawn):
    assert bar(share, 4) == drawn


def test_two_hundred_hosts_failed_first_then_lost_then_the_slowest_and_the_rest_counted():
    views = [view(f"run{n:03}", progress=n / 200) for n in range(150)]
    views += [view(f"end{n:02}", state="finished", progress=1.0) for n in range(48)]
    views += [view("bad", state="failed", reason="EIO"), lost(view("away"), "timed out")]
    lines = screen(views, 100, 30)
    assert len(lines) == 30
    assert lines[0].startswith("200 hosts: 1 failed, 1 lost, 150 running, 48 finished; ")
    assert lines[1].startswith("bad ")
    assert "failed: EIO" in lines[1]
    assert lines[2].startswith("away ")
    assert lines[3].startswith("run000")
    assert lines[-1] == "and 172 more: 124 running, 48 finished"


def test_one_host_more_than_lines_is_still_counted_right():
    views = [view(f"n{n}") for n in range(10)]
    lines = screen(views, 100, 10)
    assert len(lines) == 10
    assert lines[-1] == "and 2 more: 2 running"
    assert len(screen(views, 100, 11)) == 11


def test_silence_is_noticed_by_our_clock_not_by_theirs():
    first = heard(View("n"), status(updated_at=NOW - timedelta(days=400)), 100.0)
    assert first.reason is None
    again = heard(first, first.status, 100.0 + SILENT_SECONDS + 1)
    assert again.state == "running"
    assert "no sign of life for 31 s" in again.reason
    alive = heard(again, status(updated_at=NOW), 140.0)
    assert alive.reason is None


def test_it_ends_when_all_have_ended_or_were_lost_for_too_long():
    ended = view(state="finished")
    away = lost(view("b"), "timed out")
    assert done([ended], 101, 300)
    assert not done([ended, view("c")], 9999, 300)
    assert not done([ended, away], 399, 300)
    assert done([ended, away], 401, 300)


class Remote:
    """A host whose status file is a list of answers, the last one repeated."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.closed = 0

    def read(self, path, limit):
        if path.startswith("/proc/"):
            raise FileNotFoundError(path)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer.model_dump_json().encode() if isinstance(answer, RunStatus) else answer

    def close(self):
        self.closed += 1


def watcher(remotes, monkeypatch):
    monkeypatch.setattr("bench.fleet.watch.POLL_SECONDS", 0.0)
    monkeypatch.setattr("bench.fleet.watch.LOST_EVERY_SECONDS", 0.0)
    starts = {name: Start(event="started", run_folder=f"/r/runs/{RUN}") for name in remotes}
    return Watcher([Target(name) for name in remotes], starts, lambda target: remotes[target.name])


def test_a_host_that_drops_off_and_comes_back_is_followed_to_its_end(monkeypatch):
    host = Remote(
        status(), HostUnreachableError("the connection broke"), status(progress=0.9), status(state="finished")
    )
    seen = watcher({"n": host}, monkeypatch)
    said = io.StringIO()
    watch(seen, 300, said)
    assert [line.split()[3] for line in said.getvalue().splitlines()[:-1]] == ["model", "lost:", "model", "finished"]
    assert host.closed >= 1


def test_what_a_host_answers_is_not_trusted(monkeypatch):
    hosts = {
        "junk": Remote(b"\x1b[2J{"),
        "deep": Remote(b"[" * 60000),
        "refused": Remote(HostKeyRefusedError("the host key has CHANGED")),
        "good": Remote(status(state="finished", progress=1.0)),
        "gone": Remote(FileNotFoundError("status.json")),
        "odd": Remote(AttributeError("paramiko's own")),
    }
    seen = watcher(hosts, monkeypatch)
    watch(seen, 0, io.StringIO())
    states = {name: one.state for name, one in seen.views.items()}
    assert states == {
        "junk": "failed",
        "deep": "failed",
        "refused": "failed",
        "good": "finished",
        "gone": "failed",
        "odd": "lost",
    }
    assert "CHANGED" in seen.views["refused"].reason


def test_a_host_that_hangs_holds_up_no_other(monkeypatch):
    let_go = threading.Event()

    class Hanging(Remote):
        def read(self, path, limit):
            let_go.wait(30)
            raise HostUnreachableError("timed out")

    seen = watcher({"slow": Hanging(), "quick": Remote(status(state="finished"))}, monkeypatch)
    try:
        begin = time.monotonic()
        seen.poll(seconds=0.5)
        assert {name: one.state for name, one in seen.views.items()} == {"slow": "waiting", "quick": "finished"}
        seen.poll(seconds=0.1)
        assert time.monotonic() - begin < 10
    finally:
        let_go.set()
    seen.poll(seconds=10)
    assert seen.views["slow"].state == "lost"
    seen.close()


def test_a_process_that_is_gone_without_a_report_is_told_from_a_silent_one(monkeypatch):
    seen = watcher({"n": Remote(status())}, monkeypatch)
    seen.poll()
    seen.views["n"] = replace(seen.views["n"], changed=seen.views["n"].changed - SILENT_SECONDS - 1)
    seen.poll()
    assert seen.views["n"].state == "failed"
    assert "pid 4242" in seen.views["n"].reason


def test_hosts_that_were_never_started_are_shown_as_failed_and_not_asked(monkeypatch):
    starts = {
        "a": Start(event="unreachable", message="no route"),
        "b": Start(event="failed", message="not provisioned"),
    }

    def connect(target):
        raise AssertionError(f"asked {target}")

    seen = Watcher([Target(name) for name in "abc"], starts, connect)
    seen.poll()
    assert {name: one.reason for name, one in seen.views.items()} == {
        "a": "no route",
        "b": "not provisioned",
        "c": "it was never started: the controller stopped before its turn; `make run RETRY=last`",
    }
