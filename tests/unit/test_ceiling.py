"""The ceiling before and after the cases: one figure, and a warning when the folder itself moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.host.ceiling import fio_command, with_drift
from bench.results import Ceiling

GIB = 1024**3


def ceiling(write: float | None, read: float | None = 2.0 * GIB) -> Ceiling:
    return Ceiling(tool="fio", command=["fio"], write_bytes_per_second=write, read_bytes_per_second=read)


def test_the_larger_rate_counts_and_both_are_kept() -> None:
    both, warning = with_drift(ceiling(1.00 * GIB), ceiling(1.05 * GIB, 3.0 * GIB))
    assert both.write_bytes_per_second == 1.05 * GIB
    assert both.read_bytes_per_second == 3.0 * GIB
    assert both.before_write_bytes_per_second == 1.00 * GIB
    assert both.after_write_bytes_per_second == 1.05 * GIB
    assert both.drift == pytest.approx(0.05)
    assert warning is None


@pytest.mark.parametrize("after", [0.85, 1.2])
def test_more_than_ten_percent_in_either_direction_is_a_warning(after: float) -> None:
    _, warning = with_drift(ceiling(1.0 * GIB), ceiling(after * GIB))
    assert warning is not None
    assert "1.00 GiB/s" in warning
    assert f"{after:.2f} GiB/s" in warning


def test_a_second_measurement_that_failed_leaves_the_first() -> None:
    first = ceiling(1.0 * GIB)
    assert with_drift(first, ceiling(None)) == (first, None)


def test_fio_is_asked_for_what_the_documentation_says() -> None:
    command = fio_command(Path("/mnt/x"), 1024, True)
    for word in ("--bs=8388608", "--iodepth=8", "--direct=1", "--refill_buffers", "--end_fsync=1", "--size=1024"):
        assert word in command
    assert "--direct=0" in fio_command(Path("/mnt/x"), 1024, False)
