"""Keeps the benchmark on the array: what ``array.json`` describes, and whether a folder really lies there.

The role nvme_raid writes the file into the runtime root. A mount that is missing, as after a boot without one of the
drives, leaves an empty folder on the root disk in its place: the benchmark would then measure the wrong drive.
Standard library only, so that it runs on a host before anything is installed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.results import Array

ARRAY_FILE = "array.json"
SCHEMA_VERSION = 1


class ArrayError(ValueError):
    """The array's description can't be used, or a folder isn't on the array; the message says what to do."""


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo; ``device`` is major:minor, ``options`` the mount's, then the filesystem's."""

    device: str
    point: Path
    type: str
    source: str
    options: str


@dataclass(frozen=True)
class Member:
    """A drive of the array; ``path`` is its name in /dev/disk/by-id, which outlives a boot."""

    path: str
    serial: str
    model: str
    firmware: str
    size_bytes: int
    logical_block_bytes: int


@dataclass(frozen=True)
class ArrayFile:
    """The array that the role nvme_raid made on this host. ``uuid`` as mdadm prints it."""

    name: str
    uuid: str
    level: str
    chunk_bytes: int
    filesystem: str
    filesystem_uuid: str
    mount_point: str
    mount_options: str
    members: tuple[Member, ...]

    def holds(self, folder: Path) -> bool:
        """Whether a path is meant to be on the array: its mount point or below it, mounted or not."""
        point = Path(self.mount_point)
        return folder == point or point in folder.parents

    def facts(self) -> Array:
        """The array for a report: named as on every boot, its members by serial."""
        from bench.results import Array

        return Array(
            name=self.name,
            uuid=self.uuid,
            level=self.level,
            chunk_bytes=self.chunk_bytes,
            members=[member.serial for member in self.members],
        )


def load_array_file(root: Path) -> ArrayFile | None:
    """The array described below a runtime root, None where there is none.

    Raises ArrayError, naming the file, when it can't be read or is of another version.
    """
    path = root / ARRAY_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ArrayError(f"{path} can't be read ({error}); run make provision again") from error
    return _parse(data, path)


def require_array(root: Path, folder: Path) -> None:
    """Raise ArrayError unless this host has an array and ``folder`` is meant to be on it.

    For hosts with chosen drives: without the array their mount point is an empty folder on the root disk.
    """
    array = load_array_file(root)
    if array is None:
        raise ArrayError(f"drives are chosen for this host, but {root / ARRAY_FILE} describes no array: make provision")
    if not array.holds(folder):
        raise ArrayError(
            f"drives are chosen for this host, but {folder} is not on the array {array.name} ({array.mount_point}): "
            "leave the folder out"
        )


def _parse(data: Any, path: Path) -> ArrayFile:
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ArrayError(
            f"{path} has schema version {version!r}, this bench reads version {SCHEMA_VERSION}; "
            "run make provision again"
        )
    try:
        fields = {key: value for key, value in data.items() if key != "schema_version"}
        members = tuple(Member(**member) for member in fields.pop("members"))
        return ArrayFile(members=members, **fields)
    except (KeyError, TypeError) as error:
        raise ArrayError(f"{path} is not a description of an array ({error}); run make provision again") from error


def array_device(array: ArrayFile) -> str | None:
    """The device number (major:minor) of the assembled array, found by its UUID; None when it isn't there."""
    try:
        number = os.stat(f"/dev/disk/by-id/md-uuid-{array.uuid}").st_rdev
    except OSError:
        return None
    return f"{os.major(number)}:{os.minor(number)}"


def check_mount(
    folder: Path,
    array: ArrayFile,
    mountinfo: str | None = None,
    device_of: Callable[[ArrayFile], str | None] = array_device,
) -> None:
    """Raise ArrayError unless ``folder`` lies on the array's own filesystem.

    Call it before a run and after: a mount can go away meanwhile. ``mountinfo`` is the text of
    /proc/self/mountinfo; ``folder`` need not exist yet.
    """
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8") if mountinfo is None else mountinfo
    mount = find_mount(folder.resolve(), text)
    if mount is None:
        raise ArrayError(f"{folder} lies on no mounted filesystem")
    wanted = device_of(array)
    if wanted is not None and mount.device == wanted:
        return
    missing = "" if wanted else ", which is not assembled here"
    serials = ", ".join(member.serial for member in array.members)
    raise ArrayError(
        f"{folder} lies on {mount.source} ({mount.type}, mounted at {mount.point}), "
        f"not on the array {array.name}{missing}. Are all of its drives here ({serials})? "
        f"See /proc/mdstat and findmnt {array.mount_point}; then run make provision again"
    )


def find_mount(folder: Path, mountinfo: str) -> Mount | None:
    """The mount that holds a resolved path, from the text of /proc/self/mountinfo; None where none does."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        point = Path(_unescape(fields[4]))
        # Of mounts at the same point the last one lies on top.
        if folder.is_relative_to(point) and (best is None or len(point.parts) >= len(best.point.parts)):
            kind, source, *more = fields[fields.index("-") + 1 :]
            best = Mount(fields[2], point, kind, _unescape(source), ",".join([fields[5], *more[:1]]))
    return best


def _unescape(text: str) -> str:
    # The kernel writes space, tab, newline and backslash as octal.
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), text)
