"""One case in its own process: prepare once, save per sample, then prove what was saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Saved:
    """What one save left behind.

    ``files``: every file of the checkpoint, for fsync and size. ``promised_bytes``: what the writer
    says it wrote, summed over the files, or None when it does not say. ``statistics``: the writer's
    own. ``hook_storages``: storages that came through torch's hook, or None when no hook is expected.
    """

    files: list[Path]
    promised_bytes: int | None = None
    statistics: dict[str, Any] = field(default_factory=dict)
    hook_storages: int | None = None


class NotVerifiedError(Exception):
    """What was read back differs from what was saved; the message names the first difference."""


class SkipCaseError(Exception):
    """This host can't run this case; the message says why and what would be needed."""


class Workload(ABC):
    """One workload saved by one writer.

    Call order: ``prepare()`` once, then for every sample ``arm(target)``, ``save(target)`` (the only
    timed call) and ``disarm()``; after the last sample ``verify(saved)`` and ``resume(saved)``; at
    the end ``close()``. ``target`` is a path that does not exist yet; a workload may make it a file
    or a folder.
    """

    payload_bytes: int = 0

    @abstractmethod
    def prepare(self) -> None:
        """Build the data, allocate pinned buffers, load ops. Raises SkipCaseError when this host can't."""

    def arm(self, target: Path) -> None:
        """Untimed work before one save, such as creating parent folders."""

    @abstractmethod
    def save(self, target: Path) -> Saved:
        """Save and close; returns when the writer acknowledges. Timed."""

    def disarm(self) -> None:
        """Untimed work after one save."""

    @abstractmethod
    def verify(self, saved: Saved) -> None:
        """Read back and compare bit by bit (dtype, shape, bytes); raises NotVerifiedError."""

    def resume(self, saved: Saved) -> tuple[bool | None, str | None]:
        """Can training resume from it, and why not; ``(None, None)`` where the question does not apply."""
        return None, None

    def close(self) -> None:
        """Release what prepare() took."""
