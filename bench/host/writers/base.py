"""What every save mechanism does for the benchmark."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.host.verify import compare, drop_cache, file_sha256, replay_legacy
from bench.host.workloads.base import Saved
from bench.plan import Options, handle_defaults


@dataclass(frozen=True)
class WriterContext:
    """What a writer needs to know: the case's options, where the data is, and the folder's block size.

    ``logical_block_bytes`` is the smallest unit the device below the folder can write.
    """

    workload: str
    options: Options
    device: torch.device
    folder: Path
    logical_block_bytes: int

    def handle_options(self) -> dict[str, Any]:
        """Arguments of an I/O handle: the published values for this workload, overridden by the options."""
        defaults = handle_defaults(self.workload)
        given = {key: getattr(self.options, key) for key in defaults}
        chosen = {key: defaults[key] if value is None else value for key, value in given.items()}
        chosen["block_size"] = chosen.pop("block_bytes")
        return chosen


class Writer(ABC):
    """One save mechanism. ``prepare`` once, untimed; ``save`` timed; ``verify`` after the last sample."""

    def __init__(self, context: WriterContext) -> None:
        self.context = context

    def prepare(self) -> None:
        """Load ops and allocate buffers. Raises SkipCaseError when this host can't."""

    def check(self, obj: Any) -> None:
        """Raise SkipCaseError when this mechanism has no form for ``obj``; untimed."""

    @abstractmethod
    def save(self, obj: Any, path: Path) -> Saved:
        """Save ``obj`` into ``path``, which does not exist, and close it."""

    def verify(self, obj: Any, saved: Saved) -> str | None:
        """Compare what lies on the drive with ``obj``; returns the file's sha256, raises NotVerifiedError."""
        (path,) = saved.files
        if not self.context.options.zipfile:
            return replay_legacy(obj, path)
        verify_zip(obj, path)
        return file_sha256(path)

    def load(self, path: Path) -> Any:
        """Read a checkpoint back the way a user would, on the CPU, weights only."""
        return torch.load(path, map_location="cpu", weights_only=True)

    def close(self) -> None:
        """Free what prepare() took."""


def verify_zip(obj: Any, path: Path) -> None:
    """Compare a checkpoint in torch's zip format with ``obj``, memory-mapped so that memory stays flat."""
    drop_cache(path)
    compare(obj, torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def logical_block_bytes(folder: Path) -> int:
    """Logical block size of the device below ``folder``, 512 where the filesystem has no single device.

    Source: /sys/dev/block/MAJOR:MINOR/queue/logical_block_size; a partition's queue is its disk's.
    """
    number = os.stat(folder).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for place in (device / "queue", device.resolve().parent / "queue"):
        try:
            return int((place / "logical_block_size").read_text())
        except (OSError, ValueError):
            continue
    return 512
