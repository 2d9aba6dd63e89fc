"""The rules that make test itself keeps: no skip without need, every stage runs, times are shown."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def run_suite(tmp_path: Path, test: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(TESTS / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "test_it.py").write_text(f"import pytest\n{test}\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "test",
    [
        "def test_a(): pytest.skip('flaky today')",
        "pytest.importorskip('no_such_module_at_all')\ndef test_a(): pass",
        "@pytest.mark.skipif(True, reason='slow')\ndef test_a(): pass",
    ],
)
def test_a_skip_for_no_accepted_reason_fails_the_suite(tmp_path: Path, test: str) -> None:
    done = run_suite(tmp_path, test)
    assert done.returncode != 0
    assert "skipped for no accepted reason" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the reason is untrue only for root")
def test_a_skip_that_is_untrue_here_fails_the_suite(tmp_path: Path) -> None:
    done = run_suite(tmp_path, "def test_a(): pytest.skip('needs root: to mount')")
    assert done.returncode != 0
    assert "skipped although this machine has it" in done.stdout


def test_a_skip_for_what_this_machine_lacks_is_fine(tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia-fs").exists():
        test = "def test_a(): pass"
    else:
        test = "def test_b(): pass\n@pytest.mark.skip(reason='needs nvidia-fs: to register a file')\ndef test_a(): pass"
    assert run_suite(tmp_path, test).returncode == 0


def test_every_stage_runs_and_one_failure_fails_all(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "ran $2"\n[ "$2" != second ]\n')
    make.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(TESTS / "stages.py"), str(make), "first", "second", "third"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("ran")] == [
        "ran first",
        "ran second",
        "ran third",
    ]
    assert "second" in done.stdout.partition("where the time went")[2]
    assert "FAILED (1)" in done.stdout
