"""One benchmark at a time a host: refused while the owner lives, taken over when it died."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.host.lock import HostBusyError, LockError, read_owner, run_lock

RUN = "20261129T174442Z-3f9c"
OTHER = "20261129T180000Z-0001"
CHECKOUT = Path(__file__).resolve().parents[2]

HOLD = """
import sys, time
from pathlib import Path
from bench.host.lock import run_lock
with run_lock(Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    path = tmp_path / "run.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), OTHER], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    )
    assert process.stdout.readline() == "held\n"
    yield path, process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_and_told_who_runs(holder):
    path, process = holder
    with (
        pytest.raises(HostBusyError, match=f"run {OTHER}, pid {process.pid}, for \\d+ s.*make watch RUN={OTHER}"),
        run_lock(path, RUN),
    ):
        pass
    assert read_owner(path).run_id == OTHER


def test_a_killed_owners_lock_is_taken_over(holder):
    path, process = holder
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert read_owner(path).run_id == OTHER
    with run_lock(path, RUN):
        assert read_owner(path) is not None
        assert read_owner(path).run_id == RUN
        assert read_owner(path).pid == os.getpid()


def test_it_is_free_again_after_the_run_also_after_an_error(tmp_path):
    path = tmp_path / "deep" / "run.lock"
    with pytest.raises(RuntimeError, match="boom"), run_lock(path, RUN):
        raise RuntimeError("boom")
    assert read_owner(path) is None
    with run_lock(path, OTHER):
        pass


def test_a_child_that_outlived_its_killed_owner_is_named(tmp_path):
    """A forked child keeps the flock: starting beside it would measure two writers at once."""
    path = tmp_path / "run.lock"
    script = HOLD.replace("time.sleep(60)", "import os\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)")
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path), OTHER], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    )
    assert process.stdout.readline() == "held\n"
    process.wait()
    try:
        with (
            pytest.raises(HostBusyError, match=f"run {OTHER} .*died, but a process it left behind"),
            run_lock(path, RUN, grace_seconds=0.2),
        ):
            pass
    finally:
        _kill_holders(path)


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"run_id": 1}', '{"run_id":"a","pid":1,"since":"never"}'])
def test_a_lock_file_full_of_nonsense_does_no_harm(tmp_path, text):
    path = tmp_path / "run.lock"
    path.write_text(text)
    assert read_owner(path) is None
    with run_lock(path, RUN):
        assert json.loads(path.read_text())["run_id"] == RUN


def test_a_lock_that_cannot_be_opened_says_what_to_do(tmp_path):
    (tmp_path / "run.lock").mkdir()
    with (
        pytest.raises(LockError, match=r"cannot open the lock .*run\.lock.*make provision"),
        run_lock(tmp_path / "run.lock", RUN),
    ):
        pass


def _kill_holders(path):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for proc in Path("/proc").glob("[0-9]*"):
            try:
                if any(os.readlink(fd) == str(path) for fd in (proc / "fd").iterdir()):
                    os.kill(int(proc.name), signal.SIGKILL)
                    return
            except OSError:
                continue
        time.sleep(0.05)


def test_whoever_takes_over_is_told_whose_lock_it_was(tmp_path):
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"run_id": "20261129T174442Z-3f9c", "pid": 1, "since": "2026-11-29T17:44:42+00:00"}))
    with run_lock(path, "20261129T180000Z-0000") as died:
        assert died is not None
        assert died.run_id == "20261129T174442Z-3f9c"
    with run_lock(path, "20261129T180001Z-0000") as died:
        assert died is None
