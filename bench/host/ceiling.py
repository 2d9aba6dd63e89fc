"""What the folder can do: fio, sequential, O_DIRECT, the same folder in the same run."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench import stats
from bench.results import Ceiling
from bench.words import gib_per_second

BLOCK_BYTES = 8 * 1024**2
QUEUE_DEPTH = 8
FILE_BYTES = 2 * 1024**3
RUNTIME_SECONDS = 3
TIMEOUT_SECONDS = 300


def measure_ceiling(folder: Path, free_bytes: int, direct: bool = True) -> Ceiling:
    """Measure sequential write and read rates of ``folder`` with fio, in bytes per second.

    Writes one file of at most 2 GiB (a quarter of the free space if that is less) and removes it. The
    write rate includes the final fsync. Without fio, or when it fails, the rates are None and ``reason`` says why.
    """
    blocks = max(1, min(FILE_BYTES, free_bytes // 4) // BLOCK_BYTES)
    command = fio_command(folder, blocks * BLOCK_BYTES, direct)
    if shutil.which("fio") is None:
        return Ceiling(tool="fio", command=command, reason="fio is not installed here; make provision installs it")
    scratch = folder / "ceiling.fio"
    try:
        rates = [
            _rate(subprocess.run([*command, f"--rw={mode}"], capture_output=True, text=True,
                                 timeout=TIMEOUT_SECONDS, check=True).stdout, mode)
            for mode in ("write", "read")
        ]  # fmt: skip
    except subprocess.CalledProcessError as error:
        return Ceiling(tool="fio", command=command, reason=f"fio failed: {_last_line(error.stderr or error.stdout)}")
    except subprocess.TimeoutExpired:
        return Ceiling(tool="fio", command=command, reason=f"fio did not end within {TIMEOUT_SECONDS} s")
    except (ValueError, KeyError, IndexError) as error:
        return Ceiling(tool="fio", command=command, reason=f"fio's output could not be read: {error}")
    finally:
        scratch.unlink(missing_ok=True)
    return Ceiling(
        tool="fio",
        command=command,
        write_bytes_per_second=rates[0] or None,
        read_bytes_per_second=rates[1] or None,
    )


def with_drift(before: Ceiling, after: Ceiling) -> tuple[Ceiling, str | None]:
    """Both measurements as one, and a warning when the folder's write rate moved by more than 10 percent."""
    first, second = before.write_bytes_per_second, after.write_bytes_per_second
    if first is None or second is None:
        return before, None
    drift = (second - first) / first
    both = before.model_copy(
        update={
            "write_bytes_per_second": max(first, second),
            "read_bytes_per_second": max(
                filter(None, (before.read_bytes_per_second, after.read_bytes_per_second)), default=None
            ),
            "before_write_bytes_per_second": first,
            "after_write_bytes_per_second": second,
            "drift": drift,
        }
    )
    if abs(drift) <= stats.CEILING_DRIFT:
        return both, None
    return both, (
        f"the folder itself moved from {gib_per_second(first)} before the cases to {gib_per_second(second)} after "
        "them: other load, a drive's full cache or heat; rates in between are not comparable"
    )


def fio_command(folder: Path, size: int, direct: bool) -> list[str]:
    """The command line, less its mode."""
    return [
        "fio",
        "--name=ceiling",
        f"--filename={folder / 'ceiling.fio'}",
        f"--size={size}",
        f"--bs={BLOCK_BYTES}",
        "--ioengine=libaio",
        f"--iodepth={QUEUE_DEPTH}",
        f"--direct={int(direct)}",
        "--time_based",
        f"--runtime={RUNTIME_SECONDS}",
        "--end_fsync=1",
        # The same incompressible data as the benchmark: some drives compress or recognise zeros.
        "--refill_buffers",
        "--output-format=json",
    ]


def _rate(output: str, mode: str) -> float:
    # fio may print notes before its JSON.
    job = json.loads(output[output.index("{") :])["jobs"][0]
    return float(job[mode]["bw_bytes"])


def _last_line(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
