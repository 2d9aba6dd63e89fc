"""Running ``bench`` as a user does, for tests: its environment, what it prints, what it reports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import layout
from bench.results import HostReport, RunStatus, parse_host_report, parse_status

CHECKOUT = Path(__file__).resolve().parents[2]
Bench = Callable[..., "subprocess.CompletedProcess[str]"]


def bench_environment(tmp_path: Path, runtime_root: Path, **more: str) -> dict[str, str]:
    """The environment of a bench process: this checkout, runs below ``tmp_path``, the built ops."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")])),
        "BENCH_RUNTIME_ROOT": str(tmp_path / "runtime"),
        "BENCH_OPS_CACHE": str(layout.ops_root(runtime_root)),
        "COLUMNS": "160",
        **more,
    }


def rows_of(output: str) -> dict[str, str]:
    """The rest of each log line of a run, by tag."""
    return dict(re.findall(r"^(test_\w+) -- (.*)$", output, re.MULTILINE))


def report_of(tmp_path: Path) -> HostReport:
    """The report of the only run that was made below ``tmp_path``."""
    (path,) = (tmp_path / "runtime").glob("runs/*/report.json")
    return parse_host_report(path.read_bytes(), str(path))


def write_plan(path: Path, **changes: Any) -> Path:
    """A small plan, written as JSON, which is YAML."""
    plan = {
        "name": "mine",
        "repetitions": 1,
        "warmup": 0,
        "benchmarks": [
            {"workload": "tensor", "writers": ["torch_save", "ds_aio"], "options": {"size_bytes": 3_000_001}}
        ],
        **changes,
    }
    path.write_text(json.dumps(plan))
    return path


@contextmanager
def started(tmp_path: Path, runtime_root: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A bench process that goes on while the block acts on it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", *arguments],
        env=bench_environment(tmp_path, runtime_root), cwd=CHECKOUT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def await_phase(tmp_path: Path, phase: str, timeout: float = 120) -> RunStatus:
    """The status of the run below ``tmp_path`` once it has come to ``phase``."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for path in (tmp_path / "runtime").glob("runs/*/status.json"):
            status = parse_status(path.read_bytes(), str(path))
            if status.phase == phase:
                return status
        time.sleep(0.05)
    raise AssertionError(f"no run came to the phase {phase!r}")
