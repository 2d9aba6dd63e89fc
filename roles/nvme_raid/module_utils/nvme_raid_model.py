"""The words that the nvme_raid modules share: facts, drives, arrays, decisions.

The facts are a dict as nvme_raid_facts.py reads it, JSON all the way down, so that a test can hold the
story of a real machine:

    lsblk        output of ``lsblk --json --bytes`` with the columns LSBLK_COLUMNS
    by_id        name in /dev/disk/by-id -> kernel name
    nvme         kernel name -> serial, model, firmware, transport, wwid, hidden
    holders      kernel name -> names in /sys/block/NAME/holders
    mounts       of every mount namespace: device, mount_point, source, type, options, namespace, process
    unseen       processes whose mounts may not be looked at
    swaps        path and device (major:minor) of everything in /proc/swaps
    signatures   kernel name -> output of ``wipefs --no-act --json``, its signatures
    exclusive    kernel name -> the kernel's words where an exclusive open failed
    open_by      kernel name -> processes that have the device open
    members      kernel name -> ``mdadm --examine --export`` and chunk_bytes of md members
    arrays       kernel name -> ``mdadm --detail --export``, chunk_bytes, state and signatures of md arrays
    programs     names of the programs that were found
    files        fstab, mdadm_conf and array (array.json): path and text
    initramfs_tool   update-initramfs, dracut or empty
    initramfs_stale  an initramfs is older than mdadm.conf
    mount_point  of the wanted mount point: exists, entries (names in it)
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

Facts = Dict[str, Any]

LSBLK_COLUMNS = "NAME,KNAME,PATH,MAJ:MIN,TYPE,SIZE,LOG-SEC,RO,MODEL,SERIAL,FSTYPE"
FILESYSTEMS = ("xfs", "ext4")
# The md 1.2 superblock has 32 bytes for the name, of which "any:" takes four.
NAME_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,27}")
KERNEL_NAME_PATTERN = re.compile(r"(/dev/)?(nvme\d+(c\d+)?n\d+(p\d+)?|sd[a-z]+\d*|vd[a-z]+\d*|md\d+)")
SYSTEM_MOUNTS = ("/", "/boot", "/boot/efi", "/usr", "/var")
# Filesystem UUIDs are derived from the array's, so that a filesystem can be told to be this role's.
FILESYSTEM_NAMESPACE = uuid.UUID("6d1f7a0e-9f0b-5c37-8f44-3b8f3a5d2c11")
# Stands in check mode for a UUID that is drawn when the array is made.
NEW_ARRAY = "new-array"


@dataclass(frozen=True)
class Wanted:
    """What the role's variables ask for. Chunk in KiB; ``devices`` are serials or /dev/disk/by-id names."""

    devices: Tuple[str, ...] = ()
    match: str = ""
    count: int = 0
    name: str = "fastpersist"
    chunk_kib: int = 512
    filesystem: str = "xfs"
    mount_point: str = "/mnt/fastpersist"
    mount_options: str = "noatime,nofail,x-systemd.device-timeout=30s"
    blkdiscard: bool = False


@dataclass(frozen=True)
class Drive:
    """One NVMe namespace. ``kname`` is valid until the next boot only, ``path`` for good."""

    kname: str
    path: str
    serial: str
    model: str = ""
    firmware: str = ""
    size_bytes: int = 0
    sector_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.path} (serial {self.serial}, now {self.kname})"


@dataclass(frozen=True)
class Step:
    """One thing to do: ``do`` names it for the program, ``say`` for a person."""

    do: str
    say: str


@dataclass(frozen=True)
class Array:
    """An array found on this host. ``kname`` is empty while it isn't assembled; ``present`` are its members here."""

    uuid: str
    level: str
    metadata: str
    devices: int
    chunk_bytes: int
    kname: str
    state: str
    present: Tuple[str, ...]
    filesystem: Optional[Dict[str, Any]] = None


@dataclass
class Decision:
    """What is to be done, or why nothing may be: with refusals there are no steps."""

    drives: List[Drive] = field(default_factory=list)
    refusals: List[str] = field(default_factory=list)
    steps: List[Step] = field(default_factory=list)
    array: Optional[Array] = None
    array_uuid: str = ""
    notes: List[str] = field(default_factory=list)
    # New texts, by the names that facts["files"] has.
    files: Dict[str, str] = field(default_factory=dict)


def short_name(md_name: str) -> str:
    """The array's own name: md 1.x puts the home host, or "any", before a colon."""
    return md_name.rpartition(":")[2]


def filesystem_uuid(array_uuid: str) -> str:
    """The UUID that this role gives to the filesystem on an array of that UUID."""
    if array_uuid == NEW_ARRAY:
        return "new-filesystem"
    return str(uuid.uuid5(FILESYSTEM_NAMESPACE, array_uuid.replace(":", "").lower()))


def mounted_uuid(array: Optional[Array], array_uuid: str) -> str:
    """The UUID by which the filesystem is mounted: the one it has, or the one it will get."""
    if array is not None and array.filesystem and array.filesystem.get("uuid"):
        return str(array.filesystem["uuid"])
    return filesystem_uuid(array_uuid)


def drive_of(kname: str, facts: Facts) -> Drive:
    disk = next((d for d in facts["lsblk"]["blockdevices"] if d["kname"] == kname), {})
    nvme = facts["nvme"].get(kname, {})
    return Drive(
        kname=kname,
        path=by_id_of(kname, facts),
        serial=nvme.get("serial") or disk.get("serial") or "unknown",
        model=nvme.get("model") or (disk.get("model") or "").strip(),
        firmware=nvme.get("firmware", ""),
        size_bytes=int(disk.get("size") or 0),
        sector_bytes=int(disk.get("log-sec") or 0),
    )


def by_id_of(kname: str, facts: Facts) -> str:
    """The name for good of a drive: the shortest that udev made from model and serial, else any, else the kernel's."""
    names = sorted((n for n, target in facts["by_id"].items() if target == kname), key=lambda n: (len(n), n))
    told = [n for n in names if not n.startswith(("nvme-eui.", "nvme-nvme.", "nvme-uuid.", "wwn-"))]
    return f"/dev/disk/by-id/{(told or names)[0]}" if names else f"/dev/{kname}"


def walk(devices: Iterable[Dict[str, Any]]) -> Iterator[Dict[str, Any]]:
    for device in devices:
        yield device
        yield from walk(device.get("children", []))


def stack_of(kname: str, facts: Facts) -> List[Dict[str, Any]]:
    """A drive and everything that stands on it, the drive first."""
    everything = {device["kname"]: device for device in walk(facts["lsblk"]["blockdevices"])}
    disk = everything.get(kname)
    if disk is None:
        return [{"kname": kname, "path": f"/dev/{kname}", "maj:min": "", "type": "disk"}]
    found = {d["kname"]: d for d in walk([disk])}
    todo = list(found)
    # lsblk shows a volume on several drives below one of them only, depending on its version.
    while todo:
        for holder in facts["holders"].get(todo.pop(), []):
            for device in walk([everything[holder]] if holder in everything else []):
                if device["kname"] not in found:
                    found[device["kname"]] = device
                    todo.append(device["kname"])
    return list(found.values())


def number_of(kname: str, facts: Facts) -> Optional[str]:
    return next((d["maj:min"] for d in walk(facts["lsblk"]["blockdevices"]) if d["kname"] == kname), None)
