"""Running ``bench`` as a user does, for tests: its environment, what it prints, what it reports."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench import layout
from bench.results import HostReport, parse_host_report

CHECKOUT = Path(__file__).resolve().parents[2]
Bench = Callable[..., "subprocess.CompletedProcess[str]"]


def bench_environment(tmp_path: Path, runtime_root: Path, **more: str) -> dict[str, str]:
    """The environment of a bench process: this checkout, runs below ``tmp_path``, the built ops."""
    return {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
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
