"""One benchmark at a time on a host.

The lock is a kernel ``flock`` on ``<bench_runtime_root>/run.lock``; the file's JSON says who holds it.
The kernel drops the lock when its owner dies, however it dies, so a dead owner's lock is simply taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

# A process that was killed a moment ago may still be on its way out, with its files open.
GRACE_SECONDS = 2.0


class LockError(ValueError):
    """The lock can't be used at all; the message names the file and what to do."""


class HostBusyError(LockError):
    """Another benchmark runs here; the message names its run, its process and its age."""


@dataclass(frozen=True)
class Owner:
    """Who holds the lock. ``since`` is an ISO instant in UTC."""

    run_id: str
    pid: int
    since: str

    def age_seconds(self, now: datetime) -> float:
        """Seconds since the lock was taken, never negative (clocks step)."""
        return max(0.0, (now - datetime.fromisoformat(self.since)).total_seconds())


def read_owner(path: Path) -> Owner | None:
    """The owner that the lock file names, or None when there is none or it makes no sense."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        owner = Owner(run_id=str(data["run_id"]), pid=int(data["pid"]), since=str(data["since"]))
        owner.age_seconds(datetime.now(timezone.utc))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return owner


@contextlib.contextmanager
def run_lock(path: Path, run_id: str, grace_seconds: float = GRACE_SECONDS) -> Iterator[Owner | None]:
    """Hold the lock for the block; gives the owner that died without giving it back, if there is one.

    Raises HostBusyError when a live process holds it, LockError when the file can't be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LockError(
            f"cannot open the lock {path}: {error.strerror}; it must be writable by the user that runs the "
            "benchmark (make provision sets that up; a file left by another user can be deleted while nothing runs)"
        ) from error
    try:
        _take(descriptor, path, grace_seconds)
        died = read_owner(path)
        owner = Owner(run_id, os.getpid(), datetime.now(timezone.utc).isoformat())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(owner)).encode(), 0)
        try:
            yield died
        finally:
            # Emptied, not deleted: deleting would let two processes lock two files of the same name.
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path, grace_seconds: float) -> None:
    deadline = time.monotonic() + grace_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            owner = read_owner(path)
            alive = owner is not None and _alive(owner.pid)
            if alive or time.monotonic() >= deadline:
                raise HostBusyError(_busy_message(owner, alive, path)) from None
            time.sleep(0.05)


def _busy_message(owner: Owner | None, alive: bool, path: Path) -> str:
    if owner is None:
        return f"a benchmark is just starting here ({path} is locked); try again in a moment"
    age = owner.age_seconds(datetime.now(timezone.utc))
    if not alive:
        return (
            f"run {owner.run_id} (pid {owner.pid}) died, but a process it left behind still holds {path}; "
            f"find it with `fuser {path}` and end it"
        )
    return (
        f"a benchmark is already running here: run {owner.run_id}, pid {owner.pid}, for {age:.0f} s; "
        f"attach with `make watch RUN={owner.run_id}`, stop it with `make cancel RUN={owner.run_id}`"
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
