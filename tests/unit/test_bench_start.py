"""The module that starts a run on a host: what it decides, and what it really starts."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import role_module
from fake_bench import FAKE

from bench.host.lock import run_lock

CHECKOUT = Path(__file__).resolve().parents[2]
MODULE = CHECKOUT / "roles" / "bench_run" / "library" / "bench_start.py"
RUN = "20261129T174442Z-3f9c"

bench_start = role_module.load("bench_run/library/bench_start.py")


@pytest.fixture
def root(tmp_path):
    """A runtime root with a stand-in for bench; what was started is ended."""
    program = tmp_path / "root" / "venv" / "bin" / "bench"
    program.parent.mkdir(parents=True)
    program.write_text(FAKE)
    program.chmod(0o755)
    yield tmp_path / "root"
    for file in (tmp_path / "root" / "runs").glob("*/status.json"):
        os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)


def call(root, check=False, **changes):
    """Run the module as Ansible does; its answer."""
    arguments = {
        "run_id": RUN, "host": "n1", "root": str(root), "folder": str(root.parent / "work"), "plan": "name: x\n",
        "wait_seconds": 10, "_ansible_check_mode": check, "_ansible_remote_tmp": str(root.parent), **changes,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(MODULE)], input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}), text=True,
        capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )  # fmt: skip
    return json.loads(done.stdout)


def test_it_starts_a_session_of_its_own_that_outlives_who_started_it(root):
    answer = call(root, arguments=["--gpu"], ops_cache="/shared/ops")
    assert answer["changed"], answer
    status = json.loads((root / "runs" / RUN / "status.json").read_text())
    assert answer["pid"] == status["pid"] == status["session"]
    assert status["argv"][1:] == [
        "run", str(root / "runs" / RUN / "plan.yml"), "--folder", str(root.parent / "work"), "--run-id", RUN,
        "--host", "n1", "--gpu",
    ]  # fmt: skip
    assert (status["plan"], status["ops"]) == ("name: x\n", "/shared/ops")
    os.kill(answer["pid"], 0)


def test_the_same_run_is_started_once(root):
    first = call(root)
    again = call(root)
    assert (first["changed"], again["changed"]) == (True, False)
    assert again["pid"] == first["pid"]


def test_check_mode_shows_the_command_and_touches_nothing(root):
    answer = call(root, check=True)
    assert answer["changed"]
    assert answer["command"][1:3] == ["run", str(root / "runs" / RUN / "plan.yml")]
    assert not (root / "runs").exists()


def test_a_dry_run_prints_and_leaves_nothing(root):
    answer = call(root, dry_run=True)
    assert answer["lines"] == ["would write 1 GiB"]
    assert not answer["changed"]
    assert sorted(path.name for path in root.iterdir()) == ["venv"]
    assert not (root.parent / "work").exists()


def test_a_benchmark_that_ends_at_once_is_quoted(root):
    answer = call(root, arguments=["--fail"])
    assert answer["failed"]
    assert "the benchmark ended without a status" in answer["msg"]
    assert "work is full" in answer["msg"]


def test_a_host_that_is_not_provisioned_says_so(tmp_path):
    answer = call(tmp_path / "root")
    assert answer["failed"]
    assert "not provisioned; `make provision HOSTS=n1`" in answer["msg"]


def test_a_host_where_a_benchmark_runs_is_busy_and_nothing_is_started(root):
    with run_lock(root / "run.lock", "20261129T170000Z-0001"):
        answer = call(root)
    assert answer["failed"]
    assert answer["busy"]
    assert f"run 20261129T170000Z-0001, pid {os.getpid()}, for " in answer["msg"]
    assert "make cancel RUN=20261129T170000Z-0001" in answer["msg"]
    assert not (root / "runs").exists()


def test_a_lock_whose_owner_died_is_no_hindrance(root):
    (root / "run.lock").write_text('{"run_id": "old", "pid": 1, "since": "2026-01-01T00:00:00+00:00"}')
    assert call(root)["changed"]


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_as_root_it_runs_as_the_login_user_who_owns_what_it_writes(root):
    nobody = pwd.getpwnam("nobody")
    for folder in (root.parent, *root.parents[1:4]):
        folder.chmod(folder.stat().st_mode | 0o055)
    answer = call(root, user="nobody")
    assert "pid" in answer, answer
    assert os.stat(f"/proc/{answer['pid']}").st_uid == nobody.pw_uid
    for path in (root / "runs" / RUN, root / "run.lock", root.parent / "work"):
        assert path.stat().st_uid == nobody.pw_uid


def test_an_unknown_user_is_named(root):
    assert call(root, user="nobody-here")["msg"] == "there is no user nobody-here on this host"


def test_under_systemd_it_is_a_unit_of_the_user_with_locked_memory():
    command = bench_start.detached_command(["bench", "run"], {"B": "2", "A": "1 x"}, "unit-1", "ops", "/r/console.log")
    assert command == [
        "--quiet", "--collect", "--unit=unit-1", "--uid=ops", "--property=LimitMEMLOCK=infinity",
        "--property=KillMode=mixed", "--property=WorkingDirectory=/r", "--setenv=A=1 x", "--setenv=B=2",
        "/bin/sh", "-c", 'exec "$@" >>"$0" 2>&1', "/r/console.log", "bench", "run",
    ]  # fmt: skip


def test_as_root_under_systemd_the_unit_is_started_and_its_early_end_is_noticed(root, monkeypatch):
    """systemd-run and systemctl are stood in for: the first runs its command and is done, the second knows nothing."""
    tools = root.parent / "tools"
    tools.mkdir()
    (tools / "systemd-run").write_text('#!/bin/sh\nwhile [ "$1" != /bin/sh ]; do shift; done\n"$@"\nexit 0\n')
    (tools / "systemctl").write_text("#!/bin/sh\nexit 3\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    params = {
        "run_id": RUN, "host": "n1", "root": str(root), "folder": str(root.parent / "work"), "plan": "name: x\n",
        "user": "", "arguments": ["--fail"], "wait_seconds": 30,
    }  # fmt: skip
    monkeypatch.setattr(bench_start.os, "geteuid", lambda: 0)
    monkeypatch.setattr(bench_start.os, "chown", lambda *_, **__: None)
    begin = time.monotonic()
    folder = root / "runs" / RUN
    with pytest.raises(bench_start.StartError, match=r"the benchmark ended without a status: bench: folder .* is full"):
        bench_start.start_detached(
            params, bench_start.bench_command(params, str(folder / "plan.yml")), str(folder),
            str(folder / "plan.yml"), str(tools / "systemd-run"),
        )  # fmt: skip
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("owner", [{}, {"since": "never"}, {"since": 7}, {"run_id": None}])
def test_a_lock_file_of_nonsense_still_gives_a_sentence(owner):
    assert bench_start.busy_message(owner, datetime.now(timezone.utc)).startswith("a benchmark is already running here")


def test_the_age_of_a_lock_is_told():
    now = datetime.now(timezone.utc)
    owner = {"run_id": RUN, "pid": 7, "since": (now - timedelta(seconds=65)).isoformat()}
    assert f"run {RUN}, pid 7, for 65 s" in bench_start.busy_message(owner, now)


def test_it_does_not_wait_for_a_benchmark_that_is_gone(root):
    begin = time.monotonic()
    call(root, arguments=["--fail"], wait_seconds=60)
    assert time.monotonic() - begin < 30
