"""A run under a real systemd: a unit of its own, as the login user, with locked memory, that ends when told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vm_guest import Guest, environment
from vm_image import cached_image

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.append(str(CHECKOUT / "tests" / "unit"))

from fake_bench import FAKE  # noqa: E402

RUN = "20261129T174442Z-3f9c"
UNIT = f"fastpersist-bench-{RUN}.service"


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A guest without drives, with a user who is not root and a stand-in for the benchmark."""
    guest = Guest(cached_image(), tmp_path_factory.mktemp("systemd"), [])
    program = guest.folder / "bench"
    program.write_text(FAKE)
    try:
        guest.start()
        guest.run("mkdir -p /opt/r/venv/bin && useradd -m ops")
        guest.put(program, "/opt/r/venv/bin/bench")
        guest.run("chmod 755 /opt/r/venv/bin/bench")
        yield guest
    finally:
        guest.kill()


def start(guest: Guest, **changes) -> tuple[dict, str]:
    """Call the module over SSH; what it answers, and ansible's output."""
    arguments = {
        "run_id": RUN, "host": "guest", "root": "/opt/r", "folder": "/var/tmp/w", "plan": "name: x\n", "user": "ops",
        **changes,
    }  # fmt: skip
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible"), "--inventory", str(guest.inventory), "all",
            "--module-path", str(CHECKOUT / "roles" / "bench_run" / "library"),
            "--module-name", "bench_start", "--args", json.dumps(arguments),
        ],
        cwd=CHECKOUT, check=False, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=300,
        env={**environment(), "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"),
             "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
    )  # fmt: skip
    return json.loads(done.stdout.partition(" => ")[2]), done.stdout + done.stderr


def test_it_is_a_unit_of_the_login_user_with_locked_memory(host):
    answer, output = start(host)
    assert answer["changed"], output
    pid = answer["pid"]
    assert UNIT in host.run(f"cat /proc/{pid}/cgroup"), "it must not be part of the SSH session, which ends"
    assert host.run(f"stat -c %U /proc/{pid}").strip() == "ops"
    assert "unlimited" in host.run(f"grep 'Max locked memory' /proc/{pid}/limits")
    assert host.run(f"readlink /proc/{pid}/cwd").strip() == f"/opt/r/runs/{RUN}"
    assert start(host)[0]["changed"] is False
    host.run(f"kill -TERM {pid}; for n in $(seq 50); do test -e /proc/{pid} || break; sleep 0.2; done")
    assert host.run(f"systemctl list-units --all --no-legend '{UNIT}'").strip() == "", "an ended unit is collected"


def test_a_benchmark_that_ends_at_once_is_noticed_and_quoted(host):
    host.run("rm -rf /opt/r/runs")
    begin = time.monotonic()
    answer, output = start(host, arguments=["--fail"], wait_seconds=200)
    assert answer["msg"] == "the benchmark ended without a status: bench: folder /var/tmp/w is full", output
    assert time.monotonic() - begin < 100
