"""What the nvme_raid modules decide, from recorded facts alone: no file is opened and no program is run here.

The facts are a dict as nvme_raid_facts.py reads it, JSON all the way down, so that a test can hold the
story of a real machine:

    lsblk        output of ``lsblk --json --bytes`` with the columns LSBLK_COLUMNS
    by_id        name in /dev/disk/by-id -> kernel name
    nvme         kernel name -> serial, model, firmware, transport, wwid, hidden
    holders      kernel name -> names in /sys/block/NAME/holders
    mounts       of every mount namespace: device, mount_point, source, type, options, namespace, process
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

import fnmatch
import json
import posixpath
import re
import uuid
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

from ansible.module_utils.nvme_raid_files import conf_arrays, fstab_entries, with_array, with_mount, without_array, without_mount

Facts = Dict[str, Any]

LSBLK_COLUMNS = "NAME,KNAME,PATH,MAJ:MIN,TYPE,SIZE,LOG-SEC,RO,MODEL,SERIAL,FSTYPE"
FILESYSTEMS = ("xfs", "ext4")
# The md 1.2 superblock has 32 bytes for the name, of which "any:" takes four.
NAME_PATTERN = re.compile(r"^[A-Za-z][A-Za-z0-9_-]{0,27}$")
KERNEL_NAME_PATTERN = re.compile(r"^(/dev/)?(nvme\d+(c\d+)?n\d+(p\d+)?|sd[a-z]+\d*|vd[a-z]+\d*|md\d+)$")
SYSTEM_MOUNTS = ("/", "/boot", "/boot/efi", "/usr", "/var")
# Filesystem UUIDs are derived from the array's, so that a filesystem can be told to be this role's.
FILESYSTEM_NAMESPACE = uuid.UUID("6d1f7a0e-9f0b-5c37-8f44-3b8f3a5d2c11")
# Stands in check mode for a UUID that is drawn when the array is made.
NEW_ARRAY = "new-array"
KNOWN_SIGNATURES = {
    "LVM2_member": "is an LVM physical volume",
    "linux_raid_member": "is a member of an md array",
    "zfs_member": "is part of a zfs pool",
    "crypto_LUKS": "holds a LUKS container",
    "ceph_bluestore": "is a ceph OSD",
    "swap": "holds swap space",
}


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


def decide(wanted: Wanted, facts: Facts, new_uuid: str) -> Decision:
    """Decide what makes the wanted array, mounted and kept over reboots, out of what is there.

    ``new_uuid`` is the UUID that an array made now would get. All reasons to refuse come at once.
    """
    decision = Decision(refusals=refuse_settings(wanted))
    decision.drives, refusals = choose(wanted, facts)
    decision.refusals += refusals
    existing, refusals = find_array(wanted.name, facts)
    decision.refusals += refusals
    decision.array = existing
    if existing is None:
        decision.array_uuid = new_uuid
        # A name that is taken twice says nothing about which of the two the drives belong to.
        decision.refusals += refuse_used(decision.drives, facts)
        decision.refusals += refuse_unlike(decision.drives)
    else:
        decision.array_uuid = existing.uuid
        decision.refusals += refuse_differing(wanted, decision.drives, existing, facts)
    decision.refusals += refuse_places(wanted, decision.array_uuid, existing, facts)
    if decision.refusals:
        decision.refusals = list(dict.fromkeys(decision.refusals))
        return decision
    _plan(wanted, facts, decision)
    return decision


def refuse_settings(wanted: Wanted) -> List[str]:
    """Refuse variables that contradict each other or can't be right on any machine."""
    refusals = []
    if wanted.devices and wanted.match:
        refusals.append("nvme_raid_devices and nvme_raid_match are both set: choose the drives in one way")
    if wanted.match and wanted.count < 2:
        refusals.append("nvme_raid_match needs nvme_raid_count, the exact number of drives it must match, 2 or more")
    if not NAME_PATTERN.match(wanted.name) or KERNEL_NAME_PATTERN.match(wanted.name):
        refusals.append(
            f"nvme_raid_name {wanted.name!r}: use letters, digits, - and _, a letter first, 28 characters at most, "
            "and no kernel name such as md0, which changes between boots"
        )
    if wanted.chunk_kib < 4 or wanted.chunk_kib & (wanted.chunk_kib - 1):
        refusals.append(f"nvme_raid_chunk_kib {wanted.chunk_kib}: a chunk is a power of two of KiB, 4 or more")
    if wanted.filesystem not in FILESYSTEMS:
        refusals.append(f"nvme_raid_filesystem {wanted.filesystem!r}: one of {', '.join(FILESYSTEMS)}")
    point = wanted.mount_point
    if not point.startswith("/") or posixpath.normpath(point) != point or point in SYSTEM_MOUNTS:
        refusals.append(f"nvme_raid_mount_point {point!r}: give a clean absolute path that is not part of the system")
    if re.search(r"\s", point + wanted.mount_options):
        refusals.append("nvme_raid_mount_point and nvme_raid_mount_options can't hold white space")
    return refusals


def choose(wanted: Wanted, facts: Facts) -> Tuple[List[Drive], List[str]]:
    """Resolve serials, by-id names or a model pattern to drives, each once, with a refusal for what doesn't resolve."""
    refusals: List[str] = []
    knames: List[str] = []
    if wanted.match:
        visible = [k for k, nvme in facts["nvme"].items() if not nvme["hidden"]]
        knames = [k for k in visible if fnmatch.fnmatchcase(facts["nvme"][k]["model"], wanted.match)]
        expected = wanted.count
    else:
        for name in wanted.devices:
            found, refusal = _resolve(name, facts)
            knames += found
            refusals += refusal
        expected = wanted.count
    drives = [_drive(kname, facts) for kname in dict.fromkeys(knames)]
    drives.sort(key=lambda drive: (drive.serial, drive.path))
    if expected and len(drives) != expected:
        asked = f"the model pattern {wanted.match!r} matches" if wanted.match else "nvme_raid_devices names"
        listed = "".join(f"\n    {drive}, {drive.model}" for drive in drives)
        refusals.append(f"{asked} {len(drives)} drives, nvme_raid_count is {expected}{':' if drives else ''}{listed}")
    elif len(drives) < 2 and not refusals:
        refusals.append(f"RAID-0 needs two drives or more, {len(drives)} chosen")
    for drive in drives:
        refusals += [f"{drive}: {reason}" for reason in _unfit(drive, drives, facts)]
    return drives, refusals


def _resolve(name: str, facts: Facts) -> Tuple[List[str], List[str]]:
    if KERNEL_NAME_PATTERN.match(name):
        return [], [
            f"{name}: a kernel name can mean another drive after the next boot; "
            "use the serial or the name in /dev/disk/by-id"
        ]
    prefix = "/dev/disk/by-id/"
    if name.startswith("/") and not name.startswith(prefix):
        return [], [f"{name}: use the serial or the name in {prefix}"]
    short = name[len(prefix) :] if name.startswith(prefix) else name
    if short in facts["by_id"]:
        kname = facts["by_id"][short]
        disks = {disk["kname"]: disk for disk in facts["lsblk"]["blockdevices"]}
        if kname not in disks or disks[kname]["type"] != "disk":
            return [], [f"{name} (now {kname}): is a partition or a volume, not a whole drive"]
        return [kname], []
    with_serial = [kname for kname, nvme in facts["nvme"].items() if nvme["serial"] == name]
    shown = [kname for kname in with_serial if not facts["nvme"][kname]["hidden"]]
    if len(shown) > 1:
        ids = ", ".join(sorted(_by_id(kname, facts) for kname in shown))
        return [], [f"serial {name}: is on {len(shown)} namespaces ({ids}); name the one in /dev/disk/by-id"]
    if shown or with_serial:
        return (shown or with_serial)[:1], []
    disks = [disk for disk in facts["lsblk"]["blockdevices"] if disk["serial"] == name and disk["type"] == "disk"]
    if disks:
        return [disks[0]["kname"]], []
    return [], [f"{name}: no drive with this serial or by-id name on this host"]


def _drive(kname: str, facts: Facts) -> Drive:
    disk = next((d for d in facts["lsblk"]["blockdevices"] if d["kname"] == kname), {})
    nvme = facts["nvme"].get(kname, {})
    return Drive(
        kname=kname,
        path=_by_id(kname, facts),
        serial=nvme.get("serial") or disk.get("serial") or "unknown",
        model=nvme.get("model") or (disk.get("model") or "").strip(),
        firmware=nvme.get("firmware", ""),
        size_bytes=disk.get("size") or 0,
        sector_bytes=disk.get("log-sec") or 0,
    )


def _by_id(kname: str, facts: Facts) -> str:
    """The name for good of a drive: the shortest that udev made from model and serial, else any, else the kernel's."""
    names = sorted((n for n, target in facts["by_id"].items() if target == kname), key=lambda n: (len(n), n))
    told = [n for n in names if not n.startswith(("nvme-eui.", "nvme-nvme.", "nvme-uuid.", "wwn-"))]
    return f"/dev/disk/by-id/{(told or names)[0]}" if names else f"/dev/{kname}"


def _unfit(drive: Drive, drives: List[Drive], facts: Facts) -> Iterator[str]:
    """What no array member may be, of this role's array or not."""
    nvme = facts["nvme"].get(drive.kname)
    if nvme is None:
        yield "is not an NVMe drive"
        return
    if nvme["hidden"]:
        yield "is the hidden path of a multipath namespace; choose the namespace itself"
    if nvme["transport"] not in ("pcie", ""):
        yield f"is NVMe over {nvme['transport']}, not a local drive: another host may be using it"
    if not drive.path.startswith("/dev/disk/by-id/"):
        yield "has no name in /dev/disk/by-id; is udev running?"
    twins = [d for d in drives if d.kname != drive.kname and facts["nvme"].get(d.kname, {}).get("wwid") == nvme["wwid"]]
    if nvme["wwid"] and twins:
        yield f"is the same namespace as {twins[0].kname}, reached by another path"


def refuse_used(drives: Iterable[Drive], facts: Facts) -> List[str]:
    """Refuse every drive that isn't provably unused, with all reasons."""
    return [f"{drive}: {reason}" for drive in drives for reason in uses(drive.kname, facts)]


def uses(kname: str, facts: Facts) -> List[str]:
    """Everything that says that a drive is in use or holds something."""
    reasons = []
    stack = _stack(kname, facts)
    for device in stack:
        through = "" if device["kname"] == kname else f" through {device['path']}"
        points: Dict[str, str] = {}
        for mount in facts["mounts"]:
            # btrfs, overlay and the like show a device number of their own: then the source tells.
            if mount["device"] == device["maj:min"] or mount["source"] == device["path"]:
                points.setdefault(mount["mount_point"], mount["process"])
        for point, process in points.items():
            if point in SYSTEM_MOUNTS:
                reasons.append(f"backs {point}{through}")
            else:
                reasons.append(f"is mounted at {point}{through}, as process {process} sees it")
        if any(s["device"] == device["maj:min"] or s["path"] == device["path"] for s in facts["swaps"]):
            reasons.append(f"backs swap{through}")
    partitions = [device for device in stack[1:] if device["type"] == "part"]
    table = "unknown type" if partitions else ""
    for signature in facts["signatures"].get(kname, []):
        kind = signature["type"]
        if signature.get("usage") == "partition-table" or kind in ("gpt", "dos", "PMBR"):
            table = kind if kind != "PMBR" or not table else table
            continue
        reasons.append(_signature_reason(kname, signature, facts))
    if table:
        reasons.append(f"has a partition table ({table})")
    for holder in facts["holders"].get(kname, []):
        reasons.append(f"is held by {holder}")
    if stack[0].get("ro"):
        reasons.append("is read-only")
    if kname in facts["exclusive"]:
        reasons.append(f"can't be opened exclusively: {facts['exclusive'][kname]}")
    for process in facts["open_by"].get(kname, []):
        reasons.append(f"is open in process {process}")
    return reasons


def _signature_reason(kname: str, signature: Dict[str, Any], facts: Facts) -> str:
    kind = signature["type"]
    told = KNOWN_SIGNATURES.get(kind, f"holds {kind}")
    member = facts["members"].get(kname)
    if kind == "linux_raid_member" and member:
        return f"{told}, {member['MD_NAME']}, UUID {member['MD_UUID']}"
    named = ", ".join(str(signature[key]) for key in ("label", "uuid") if signature.get(key))
    hint = "" if "mdadm" in facts["programs"] or kind != "linux_raid_member" else "; install mdadm to see which"
    return f"{told} ({named}){hint}" if named else f"{told}{hint}"


def refuse_unlike(drives: List[Drive]) -> List[str]:
    """Refuse drives of different sizes or sector sizes.

    Members of unequal size make zones of fewer drives at the end of the array, and kernels from 5.4 on
    want their layout recorded; a stripe over unlike drives is also no fair measurement.
    """
    refusals = []
    for what, unit in (("size_bytes", "bytes"), ("sector_bytes", "byte sectors")):
        values = {getattr(drive, what) for drive in drives}
        if len(values) > 1:
            listed = "".join(f"\n    {drive}: {getattr(drive, what)} {unit}" for drive in drives)
            refusals.append(f"the chosen drives are not alike in {what.split('_', maxsplit=1)[0]}:{listed}")
    return refusals


def find_array(name: str, facts: Facts) -> Tuple[Optional[Array], List[str]]:
    """The array of that name, assembled or not, wherever its members are; a refusal where there are two."""
    found: Dict[str, List[str]] = {}
    for kname, array in facts["arrays"].items():
        if short_name(array["detail"].get("MD_NAME", "")) == name:
            found.setdefault(array["detail"]["MD_UUID"], []).append(kname)
    for kname, member in facts["members"].items():
        if short_name(member.get("MD_NAME", "")) == name:
            found.setdefault(member["MD_UUID"], []).append(kname)
    if not found:
        return None, []
    if len(found) > 1:
        listed = "".join(f"\n    UUID {uid} on {', '.join(sorted(names))}" for uid, names in sorted(found.items()))
        return None, [f"{len(found)} arrays are called {name}:{listed}"]
    return _array(next(iter(found)), facts), []


def _array(array_uuid: str, facts: Facts) -> Array:
    members = {k: m for k, m in facts["members"].items() if m["MD_UUID"] == array_uuid}
    assembled = [k for k, a in facts["arrays"].items() if a["detail"].get("MD_UUID") == array_uuid]
    running = facts["arrays"][assembled[0]] if assembled else None
    # The superblocks first: of an array that didn't start, the kernel counts only the members it has.
    told = {**(running["detail"] if running else {}), **next(iter(members.values()), {})}
    chunk = told.get("chunk_bytes") or (running["chunk_bytes"] if running else 0)
    signatures = running["signatures"] if running else []
    return Array(
        uuid=array_uuid,
        level=told.get("MD_LEVEL", ""),
        metadata=told.get("MD_METADATA", "1.2"),
        devices=int(told.get("MD_DEVICES", 0)),
        chunk_bytes=chunk,
        kname=assembled[0] if assembled else "",
        state=running["state"] if running else "stopped",
        present=tuple(sorted(members)),
        filesystem=signatures[0] if signatures else None,
    )


def short_name(md_name: str) -> str:
    """The array's own name: md 1.x puts the home host, or "any", before a colon."""
    return md_name.rpartition(":")[2]


def filesystem_uuid(array_uuid: str) -> str:
    """The UUID that this role gives to the filesystem on an array of that UUID."""
    if array_uuid == NEW_ARRAY:
        return "new-filesystem"
    return str(uuid.uuid5(FILESYSTEM_NAMESPACE, array_uuid.replace(":", "").lower()))


def refuse_differing(wanted: Wanted, drives: List[Drive], array: Array, facts: Facts) -> List[str]:
    """Refuse an array of that name which isn't exactly the wanted one; nothing is ever grown, shrunk or remade."""
    head = f"the array {wanted.name} (UUID {array.uuid})"
    refusals = []
    if array.level != "raid0":
        refusals.append(f"{head} is {array.level or 'of unknown level'}, not raid0")
    if array.metadata != "1.2":
        refusals.append(f"{head} has metadata {array.metadata}, not 1.2")
    if array.chunk_bytes != wanted.chunk_kib * 1024:
        refusals.append(
            f"{head} has a chunk of {array.chunk_bytes // 1024} KiB, nvme_raid_chunk_kib is {wanted.chunk_kib}"
        )
    chosen = {drive.kname for drive in drives}
    if len(array.present) < array.devices:
        there = ", ".join(str(_drive(kname, facts)) for kname in array.present)
        refusals.append(
            f"{head} is degraded: {len(array.present)} of its {array.devices} members are here ({there}); "
            "RAID-0 has no copy of what was on the others. Bring the drive back, or tear the array down"
        )
    elif array.kname and array.state == "inactive":
        refusals.append(f"{head} is {array.state} as {array.kname}; see /proc/mdstat, and stop it: mdadm --stop")
    for kname in sorted(set(array.present) - chosen):
        refusals.append(f"{_drive(kname, facts)}: is a member of {head}, but isn't chosen")
    for drive in drives:
        if drive.kname not in array.present:
            refusals.append(f"{drive}: is chosen, but isn't a member of {head}")
            refusals += [f"{drive}: {reason}" for reason in uses(drive.kname, facts)]
    if array.kname and facts["holders"].get(array.kname):
        refusals.append(f"{head} is held by {', '.join(facts['holders'][array.kname])}")
    if array.kname and not refusals:
        refusals += _refuse_filesystem(wanted, array, facts, head)
    return refusals


def _refuse_filesystem(wanted: Wanted, array: Array, facts: Facts, head: str) -> Iterator[str]:
    remedy = f"nothing on an existing array is ever formatted: tear it down (CONFIRM={wanted.name}) and run again"
    if array.filesystem is None:
        yield f"{head} holds no filesystem that can be recognised; {remedy}"
        return
    kind, fs_uuid = array.filesystem["type"], array.filesystem.get("uuid") or ""
    if kind != wanted.filesystem:
        yield f"{head} holds {kind}, nvme_raid_filesystem is {wanted.filesystem}; {remedy}"
    elif fs_uuid != filesystem_uuid(array.uuid):
        entries = fstab_entries(facts["files"]["fstab"]["text"])
        if not any(e.spec == f"UUID={fs_uuid}" and e.mount_point == wanted.mount_point for e in entries):
            yield (
                f"{head} holds an {kind} (UUID {fs_uuid}) that this role didn't make. To keep it, mount it in fstab: "
                f"UUID={fs_uuid} {wanted.mount_point} {kind} {wanted.mount_options} 0 0; else {remedy}"
            )


def refuse_places(wanted: Wanted, array_uuid: str, array: Optional[Array], facts: Facts) -> List[str]:
    """Refuse a mount point or a configuration line that belongs to something else."""
    refusals = []
    spec = f"UUID={mounted_uuid(array, array_uuid)}"
    fstab = facts["files"]["fstab"]
    for entry in fstab_entries(fstab["text"]):
        if entry.mount_point == wanted.mount_point and entry.spec != spec:
            refusals.append(
                f"{fstab['path']} line {entry.number} mounts {entry.spec} at {wanted.mount_point}; "
                "remove the line, or choose another nvme_raid_mount_point"
            )
        elif entry.spec == spec and entry.mount_point != wanted.mount_point:
            refusals.append(
                f"{fstab['path']} line {entry.number} mounts the array at {entry.mount_point}, "
                f"nvme_raid_mount_point is {wanted.mount_point}"
            )
    conf = facts["files"]["mdadm_conf"]
    for line in conf_arrays(conf["text"]):
        if line.name == wanted.name and line.uuid and line.uuid != array_uuid:
            refusals.append(
                f"{conf['path']} line {line.number} gives the name {wanted.name} to the array {line.uuid}, which is "
                f"{'not this one' if array else 'not on this host'}; remove the line, or choose another nvme_raid_name"
            )
    number = _number(array.kname, facts) if array and array.kname else None
    mounts = [m for m in facts["mounts"] if m["own"]]
    there = [m for m in mounts if m["mount_point"] == wanted.mount_point]
    for mount in there:
        if mount["device"] != number:
            refusals.append(f"{mount['source']} is already mounted at {wanted.mount_point}")
    for mount in mounts:
        if number and mount["device"] == number and mount["mount_point"] != wanted.mount_point:
            refusals.append(
                f"the array is mounted at {mount['mount_point']}, nvme_raid_mount_point is {wanted.mount_point}"
            )
    if not there and facts["mount_point"]["entries"]:
        names = ", ".join(facts["mount_point"]["entries"][:3])
        refusals.append(f"{wanted.mount_point} is not empty ({names}): the mount would hide what is in it")
    return refusals


def mounted_uuid(array: Optional[Array], array_uuid: str) -> str:
    """The UUID by which the filesystem is mounted: the one it has, or the one it will get."""
    if array is not None and array.filesystem and array.filesystem.get("uuid"):
        return str(array.filesystem["uuid"])
    return filesystem_uuid(array_uuid)


def programs_needed(wanted: Wanted) -> List[str]:
    """The programs that making or checking the array calls, by the package that has them."""
    return ["mdadm", f"mkfs.{wanted.filesystem}"]


def _plan(wanted: Wanted, facts: Facts, decision: Decision) -> None:
    array, steps = decision.array, decision.steps
    paths = ", ".join(f"{d.path} ({d.serial})" for d in decision.drives)
    if array is None:
        if wanted.blkdiscard:
            steps.append(Step("discard", f"discard every block of {paths}"))
        steps.append(Step("create", f"make the RAID-0 array {wanted.name}, chunk {wanted.chunk_kib} KiB, of {paths}"))
        steps.append(Step("format", f"make an {wanted.filesystem} filesystem on it"))
    elif not array.kname:
        steps.append(Step("assemble", f"assemble the array {wanted.name} (UUID {array.uuid})"))
    conf = facts["files"]["mdadm_conf"]
    text = with_array(conf["text"], wanted.name, decision.array_uuid)
    if text != conf["text"]:
        decision.files["mdadm_conf"] = text
        steps.append(Step("mdadm_conf", f"name the array in {conf['path']}"))
    if facts["initramfs_tool"] and (text != conf["text"] or facts["initramfs_stale"]):
        steps.append(Step("initramfs", "rebuild the initramfs with it"))
    fstab = facts["files"]["fstab"]
    entry = f"UUID={mounted_uuid(array, decision.array_uuid)}"
    text = with_mount(fstab["text"], entry, wanted.mount_point, wanted.filesystem, wanted.mount_options)
    if text != fstab["text"]:
        decision.files["fstab"] = text
        steps.append(Step("fstab", f"mount it by UUID in {fstab['path']}"))
    if not any(m["own"] and m["mount_point"] == wanted.mount_point for m in facts["mounts"]):
        steps.append(Step("mount", f"mount it at {wanted.mount_point}"))
    record = facts["files"]["array"]
    text = json.dumps(describe(wanted, decision), indent=2) + "\n"
    if text != record["text"]:
        decision.files["array"] = text
        steps.append(Step("record", f"describe it for the benchmark in {record['path']}"))


def describe(wanted: Wanted, decision: Decision) -> Dict[str, Any]:
    """The array for array.json, in words that hold after the next boot too: no kernel name is among them."""
    return {
        "schema_version": 1,
        "name": wanted.name,
        "uuid": decision.array_uuid,
        "level": "raid0",
        "chunk_bytes": wanted.chunk_kib * 1024,
        "filesystem": wanted.filesystem,
        "filesystem_uuid": mounted_uuid(decision.array, decision.array_uuid),
        "mount_point": wanted.mount_point,
        "mount_options": wanted.mount_options,
        "members": [
            {
                "path": drive.path,
                "serial": drive.serial,
                "model": drive.model,
                "firmware": drive.firmware,
                "size_bytes": drive.size_bytes,
                "logical_block_bytes": drive.sector_bytes,
            }
            for drive in decision.drives
        ],
    }


def decide_teardown(wanted: Wanted, facts: Facts) -> Decision:
    """Decide what takes the array of that name apart, and its traces where it is gone already.

    Configuration goes first and superblocks last: until its last member is wiped, an interrupted teardown finds the
    array by its name again.
    """
    decision = Decision()
    array, refusals = find_array(wanted.name, facts)
    decision.array = array
    decision.refusals += refusals
    if array is not None:
        decision.array_uuid = array.uuid
        decision.drives = [_drive(kname, facts) for kname in array.present]
        decision.refusals += _refuse_teardown(wanted, array, facts)
    if decision.refusals:
        return decision
    _plan_teardown(wanted, facts, decision)
    return decision


def _refuse_teardown(wanted: Wanted, array: Array, facts: Facts) -> Iterator[str]:
    head = f"the array {wanted.name} (UUID {array.uuid})"
    if "mdadm" not in facts["programs"]:
        yield "mdadm is not installed"
    if (array.level, array.metadata) != ("raid0", "1.2"):
        yield f"{head} is {array.level} with metadata {array.metadata}: this role makes only raid0 with metadata 1.2"
    if wanted.devices or wanted.match:
        chosen = {drive.kname for drive in choose(wanted, facts)[0]}
        for kname in array.present:
            if kname not in chosen:
                yield f"{_drive(kname, facts)}: is a member of {head}, but isn't chosen for this host"
    for kname in array.present:
        others = [holder for holder in facts["holders"].get(kname, []) if holder != array.kname]
        if others:
            yield f"{_drive(kname, facts)}: is also held by {', '.join(others)}"
    if not array.kname:
        return
    number = _number(array.kname, facts)
    for holder in facts["holders"].get(array.kname, []):
        yield f"{head} is held by {holder}; take that apart first"
    if any(swap["device"] == number for swap in facts["swaps"]):
        yield f"{head} backs swap"
    for mount in facts["mounts"]:
        if mount["device"] == number and mount["mount_point"] != wanted.mount_point:
            yield f"{head} is mounted at {mount['mount_point']}, as process {mount['process']} sees it; unmount it first"
    if array.filesystem is not None and array.filesystem["type"] not in FILESYSTEMS:
        yield f"{head} holds {array.filesystem['type']}, which this role didn't make; take that apart first"


def _plan_teardown(wanted: Wanted, facts: Facts, decision: Decision) -> None:
    array, steps = decision.array, decision.steps
    fstab, conf, record = (facts["files"][name] for name in ("fstab", "mdadm_conf", "array"))
    recorded = _recorded(record["text"], wanted.name)
    uuids = {line.uuid for line in conf_arrays(conf["text"]) if line.name == wanted.name and line.uuid}
    uuids |= {array.uuid} if array else set()
    uuids |= {recorded["uuid"]} if recorded else set()
    filesystems = {filesystem_uuid(array_uuid) for array_uuid in uuids}
    filesystems |= {recorded["filesystem_uuid"]} if recorded else set()
    filesystems |= {mounted_uuid(array, array.uuid)} if array else set()
    number = _number(array.kname, facts) if array and array.kname else None
    if number and any(m["own"] and m["device"] == number for m in facts["mounts"]):
        steps.append(Step("unmount", f"unmount {wanted.mount_point}"))
    text = fstab["text"]
    for fs_uuid in sorted(filesystems):
        text = without_mount(text, f"UUID={fs_uuid}")
    if text != fstab["text"]:
        decision.files["fstab"] = text
        steps.append(Step("fstab", f"take the mount out of {fstab['path']}"))
    text = conf["text"]
    for array_uuid in sorted(uuids):
        text = without_array(text, array_uuid)
    if text != conf["text"]:
        decision.files["mdadm_conf"] = text
        steps.append(Step("mdadm_conf", f"take the array out of {conf['path']}"))
        if facts["initramfs_tool"]:
            steps.append(Step("initramfs", "rebuild the initramfs without it"))
    if recorded:
        steps.append(Step("forget", f"remove {record['path']}"))
    if array is None:
        return
    if array.kname and array.filesystem:
        told = f"{array.filesystem['type']}, UUID {array.filesystem.get('uuid')}"
        steps.append(Step("wipe", f"wipe the signature of the array's filesystem ({told})"))
    if array.kname:
        steps.append(Step("stop", f"stop the array {wanted.name} (UUID {array.uuid})"))
    if decision.drives:
        paths = ", ".join(str(drive) for drive in decision.drives)
        steps.append(Step("zero", f"wipe the md superblocks of {paths}"))
    if len(array.present) < array.devices:
        decision.notes.append(
            f"{array.devices - len(array.present)} of {array.devices} members are not on this host: what they hold, "
            "their md superblocks too, stays as it is"
        )


def _recorded(text: str, name: str) -> Optional[Dict[str, str]]:
    """The array of that name as array.json describes it; None where it describes another, or nothing."""
    try:
        described = json.loads(text)
        if described["name"] != name:
            return None
        return {key: str(described[key]) for key in ("uuid", "filesystem_uuid")}
    except (ValueError, KeyError, TypeError):
        return None


def _number(kname: str, facts: Facts) -> Optional[str]:
    return next((d["maj:min"] for d in _walk(facts["lsblk"]["blockdevices"]) if d["kname"] == kname), None)


def _walk(devices: Iterable[Dict[str, Any]]) -> Iterator[Dict[str, Any]]:
    for device in devices:
        yield device
        yield from _walk(device.get("children", []))


def _stack(kname: str, facts: Facts) -> List[Dict[str, Any]]:
    """A drive and everything that stands on it, the drive first."""
    everything = {device["kname"]: device for device in _walk(facts["lsblk"]["blockdevices"])}
    disk = everything.get(kname)
    if disk is None:
        return [{"kname": kname, "path": f"/dev/{kname}", "maj:min": "", "type": "disk"}]
    found = {d["kname"]: d for d in _walk([disk])}
    todo = list(found)
    # lsblk shows a volume on several drives below one of them only, depending on its version.
    while todo:
        for holder in facts["holders"].get(todo.pop(), []):
            for device in _walk([everything[holder]] if holder in everything else []):
                if device["kname"] not in found:
                    found[device["kname"]] = device
                    todo.append(device["kname"])
    return list(found.values())
