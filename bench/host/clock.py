"""Acknowledged and durable time of one save, by the same rules for every writer.

Both clocks start at the same instant, after the GPU has finished earlier work and after the
filesystem has written back what earlier writers left dirty. Acknowledged stops when the save call
and its close have returned; durable stops when fsync of every file and of every folder that gained
an entry has returned too: only then does the checkpoint survive a power cut.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.host.workloads.base import Saved


@dataclass(frozen=True)
class Timing:
    """Seconds from the start of a save until it was acknowledged, and until it was durable."""

    ack_seconds: float
    durable_seconds: float


def time_save(save: Callable[[Path], Saved], target: Path, synchronize: Callable[[], None]) -> tuple[Saved, Timing]:
    """Time one save into ``target``, which must not exist.

    ``synchronize`` waits for the device that holds the data. Uses the monotonic clock: a stepping
    wall clock changes nothing. Raises what the save raises, and OSError when a sync fails, because
    that is where the kernel reports a write that never reached the drive.
    """
    synchronize()
    start = time.perf_counter()
    saved = save(target)
    acknowledged = time.perf_counter()
    make_durable(saved.files, target)
    durable = time.perf_counter()
    return saved, Timing(acknowledged - start, durable - start)


def make_durable(files: Iterable[Path], target: Path) -> None:
    """Fsync every file, then every folder from the files up to the one that holds ``target``."""
    folders = {target.parent}
    for file in files:
        fsync_path(file)
        for folder in file.parents:
            if folder == target.parent or target.parent not in folder.parents:
                break
            folders.add(folder)
    # Deepest first, so that no folder is durable before what it names.
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        fsync_path(folder)


def settle(folder: Path) -> float:
    """Write back everything dirty on the filesystem of ``folder``; returns the seconds it took.

    Without this the pages that one writer left dirty are written while the next one is timed.
    """
    start = time.perf_counter()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"syncfs: {os.strerror(number)}", str(folder))
    finally:
        os.close(descriptor)
    return time.perf_counter() - start


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
