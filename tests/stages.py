"""Runs make targets one after the other, all of them whatever fails, and says where the time went.

Usage: stages.py MAKE TARGET...    Exit code 1 when any target failed.
"""

from __future__ import annotations

import subprocess
import sys
import time


def table(rows: list[tuple[str, float, int]]) -> str:
    """Lines of target, seconds and outcome; ``rows`` hold (target, seconds, exit code)."""
    lines = [
        f"  {name:<12} {seconds:7.1f} s  {'ok' if code == 0 else f'FAILED ({code})'}" for name, seconds, code in rows
    ]
    return "\n".join([*lines, f"  {'all':<12} {sum(seconds for _, seconds, _ in rows):7.1f} s"])


def main(make: str, *targets: str) -> int:
    """Run the targets; 1 when one failed, else 0."""
    rows = []
    for target in targets:
        print(f"== make {target}", flush=True)
        begin = time.monotonic()
        code = subprocess.run([make, "--no-print-directory", target], check=False).returncode
        rows.append((target, time.monotonic() - begin, code))
    print(f"== where the time went\n{table(rows)}", flush=True)
    return int(any(code for _, _, code in rows))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
