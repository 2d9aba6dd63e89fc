"""Where things lie. The one place that knows the folders of a host's runtime and of the controller's results.

On a host, everything but system packages and the array is below ``bench_runtime_root``::

    <root>/venv/            the Python environment; <root>/venv/bin/bench is the benchmark
    <root>/ops/<key>/       compiled DeepSpeed ops, keyed by what they depend on
    <root>/backups/         original serialization.py files, with their manifests
    <root>/runs/<run-id>/   one run: plan.json, status.json, report.json, bench.log, cases/
    <root>/run.lock         who is running a benchmark here

On the controller::

    results/<run-id>/fleet.json, report.md
    results/<run-id>/<host>/report.json, bench.log
    results/latest          a link to the newest
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

STATUS_FILE = "status.json"
REPORT_FILE = "report.json"
LOG_FILE = "bench.log"
PLAN_FILE = "plan.json"
CASES_FOLDER = "cases"
FLEET_FILE = "fleet.json"
MARKDOWN_FILE = "report.md"
LATEST_LINK = "latest"


def default_runtime_root() -> Path:
    """The runtime root: ``BENCH_RUNTIME_ROOT``, else the folder around the running venv, else in the user's data."""
    named = os.environ.get("BENCH_RUNTIME_ROOT")
    if named:
        return Path(named)
    around = Path(sys.prefix).parent
    if Path(sys.prefix).name == "venv" and (around / "ops").is_dir():
        return around
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return data / "fastpersist-bench"


def default_bench_folder() -> Path:
    """Where checkpoints are written when nobody says: ``BENCH_FOLDER``, else a folder below the user's cache."""
    named = os.environ.get("BENCH_FOLDER")
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fastpersist-bench"


def runs_folder(root: Path) -> Path:
    """The folder of all runs below a runtime root."""
    return root / "runs"


def run_folder(root: Path, run_id: str) -> Path:
    """The folder of one run below a runtime root."""
    return runs_folder(root) / run_id


def ops_root(root: Path) -> Path:
    """The folder of compiled ops: ``BENCH_OPS_CACHE`` (a shared cache), else below the runtime root."""
    named = os.environ.get("BENCH_OPS_CACHE")
    return Path(named) if named else root / "ops"


def lock_file(root: Path) -> Path:
    """The lock that lets one benchmark run at a time on a host."""
    return root / "run.lock"


def patches_folder() -> Path:
    """The hook and its manifest: inside an installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_patches"
    return installed if installed.is_dir() else package.parent / "patches"
