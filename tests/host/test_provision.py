"""make provision, by the real playbook, on the runtime that these tests run in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
ROOT = Path(sys.prefix).parent
SITE = next(Path(path) for path in sys.path if path.endswith("site-packages") and path.startswith(sys.prefix))


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """This machine twice: once as it is, once with an interpreter that does not exist."""
    common = {"ansible_connection": "local", "ansible_python_interpreter": "{{ ansible_playbook_python }}"}
    common |= {"ansible_become": False, "bench_runtime_uv_cache": "", "bench_runtime_root": str(ROOT)}
    # The link or folder stays what it is.
    common |= {"bench_runtime_ops_cache": str((ROOT / "ops").resolve())}
    common |= {"bench_runtime_extra_pins": [str(CHECKOUT / "requirements" / "test-host.txt")]}
    hosts = {"good": common, "bad": {**common, "bench_runtime_python": "/no/such/python3"}}
    path = tmp_path / "hosts.yml"
    path.write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    return path


def provision(inventory: Path, hosts: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "provision", f"HOSTS={hosts}", f"INVENTORY={inventory}", f"ARGS={' '.join(arguments)}"],
        cwd=CHECKOUT,
        env={**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def recap(output: str) -> dict[str, dict[str, int]]:
    rows: dict[str, Any] = {}
    for host, counts in re.findall(r"(?m)^(\w+) +: (ok=.*)$", output):
        rows[host] = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", counts)}
    return rows


def test_a_damaged_environment_is_repaired_and_then_left_alone(inventory: Path) -> None:
    shutil.rmtree(next(SITE.glob("hjson-*.dist-info")))
    first = provision(inventory, "good")
    assert first.returncode == 0, first.stdout + first.stderr
    assert list(SITE.glob("hjson-*.dist-info"))
    assert recap(first.stdout)["good"]["changed"] > 0
    second = provision(inventory, "good")
    assert second.returncode == 0, second.stdout + second.stderr
    assert recap(second.stdout)["good"]["changed"] == 0


def test_check_mode_says_what_it_would_do_and_does_nothing(inventory: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    done = provision(inventory, "good", "--check", "--diff", f"-e bench_runtime_root={root}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "create: no working environment" in done.stdout
    assert not root.exists()


def test_a_host_that_cannot_be_provisioned_stops_no_other(inventory: Path) -> None:
    done = provision(inventory, "all")
    assert done.returncode != 0
    assert "bad cannot be provisioned" in done.stdout + done.stderr
    assert "/no/such/python3, which does not run here" in " ".join((done.stdout + done.stderr).split())
    rows = recap(done.stdout)
    assert rows["bad"]["failed"] == 1
    assert rows["good"]["failed"] == 0
    assert rows["good"]["ok"] > rows["bad"]["ok"]
