"""How time and memory of validation, verdict and report grow with the fleet, on synthetic reports.

Usage: python tests/fleet/scale.py [HOSTS ...]     prints a table for docs/fleet.md; default 1000 10000

Every fleet is measured in a process of its own. Some hosts are slow, some failed, some are missing,
some sent nonsense, as in life.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests" / "unit")]

from synthetic import BEGIN, CASES, RUN, report, row  # noqa: E402

from bench.fleet.audit import report_reader, report_run  # noqa: E402
from bench.fleet.store import RunStore, Targets  # noqa: E402
from bench.plan import Plan  # noqa: E402
from bench.report.text import fleet_lines  # noqa: E402

PLAN = {"name": "standard", "benchmarks": [{"workload": "model", "writers": ["torch_save"]}]}


def make_fleet(results: Path, count: int) -> RunStore:
    """A collected run of ``count`` hosts on disk."""
    chance = random.Random(count)
    hosts = [f"gpu-node-{number:05}" for number in range(count)]
    store = RunStore(results, RUN)
    targets = Targets(
        run_id=RUN, plan="standard", cases=CASES, started_at=BEGIN, inventory=["inventory"], pattern="all", hosts=hosts
    )
    store.create(targets, Plan.model_validate(PLAN))
    for host in hosts:
        fate = chance.random()
        if fate < 0.01:
            continue
        speed = 0.5 if fate < 0.03 else chance.gauss(1.0, 0.02)
        changes = {"cases": [row(*case, 1, status="failed", reason="EIO") for case in CASES]} if fate > 0.99 else {}
        text = json.dumps(report(host, speed, **changes))
        store.host_folder(host).mkdir()
        store.report_file(host).write_text(text[: len(text) // 2] if 0.03 < fate < 0.035 else text)
    return store


def measure(count: int) -> dict[str, float]:
    """Judge and render a fleet: seconds, peak memory in MiB, and what came out."""
    with tempfile.TemporaryDirectory() as folder:
        store = make_fleet(Path(folder), count)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.monotonic()
        fleet, rates = report_run(store)
        lines = fleet_lines(fleet, rates, report_reader(store, store.targets()), 140, "report.md")
        seconds = time.monotonic() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "hosts": count,
        "seconds": round(seconds, 2),
        "peak_mib": round(peak / 1024),
        "grown_mib": round((peak - before) / 1024, 1),
        "lines": len(lines),
        "verdict": lines[-1].split("   ")[0],
    }


def main(*counts: str) -> None:
    """Measure each size in its own process, print one row each."""
    print(
        "| hosts | seconds | ms a host | peak memory | of it for the fleet | verdict |\n|---:|---:|---:|---:|---:|---|"
    )
    for count in counts or ("1000", "10000"):
        done = subprocess.run([sys.executable, __file__, "--one", count], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        print(
            f"| {found['hosts']:,} | {found['seconds']:.1f} | {1000 * found['seconds'] / found['hosts']:.2f} "
            f"| {found['peak_mib']} MiB | {found['grown_mib']} MiB | {found['verdict']} |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(int(sys.argv[2]))))
    else:
        main(*sys.argv[1:])
