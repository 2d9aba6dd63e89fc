"""Which drives are meant, and what says that one is in use: decided from recorded facts alone."""

from __future__ import annotations

import fnmatch
from typing import Any, Dict, Iterable, Iterator, List, Tuple

from ansible.module_utils.nvme_raid_model import (
    KERNEL_NAME_PATTERN,
    SYSTEM_MOUNTS,
    Drive,
    Facts,
    Wanted,
    by_id_of,
    drive_of,
    stack_of,
)

KNOWN_SIGNATURES = {
    "LVM2_member": "is an LVM physical volume",
    "linux_raid_member": "is a member of an md array",
    "zfs_member": "is part of a zfs pool",
    "crypto_LUKS": "holds a LUKS container",
    "ceph_bluestore": "is a ceph OSD",
    "swap": "holds swap space",
}


def choose(wanted: Wanted, facts: Facts) -> Tuple[List[Drive], List[str]]:
    """Resolve serials, by-id names or a model pattern to drives, each once, with a refusal for what doesn't resolve."""
    refusals: List[str] = []
    knames: List[str] = []
    if wanted.match:
        visible = [k for k, nvme in facts["nvme"].items() if not nvme["hidden"]]
        knames = [k for k in visible if fnmatch.fnmatchcase(facts["nvme"][k]["model"], wanted.match)]
    else:
        for name in wanted.devices:
            found, refusal = _resolve(name, facts)
            knames += found
            refusals += refusal
    drives = [drive_of(kname, facts) for kname in dict.fromkeys(knames)]
    drives.sort(key=lambda drive: (drive.serial, drive.path))
    if wanted.count and len(drives) != wanted.count:
        asked = f"the model pattern {wanted.match!r} matches" if wanted.match else "nvme_raid_devices names"
        listed = "".join(f"\n    {drive}, {drive.model}" for drive in drives)
        refusals.append(
            f"{asked} {len(drives)} drives, nvme_raid_count is {wanted.count}{':' if drives else ''}{listed}"
        )
    elif len(drives) < 2 and not refusals:
        refusals.append(f"RAID-0 needs two drives or more, {len(drives)} chosen")
    for drive in drives:
        refusals += [f"{drive}: {reason}" for reason in _unfit(drive, drives, facts)]
    return drives, refusals


def _resolve(name: str, facts: Facts) -> Tuple[List[str], List[str]]:
    """Kernel names of what one entry of nvme_raid_devices means, or why it means nothing."""
    if KERNEL_NAME_PATTERN.fullmatch(name):
        remedy = "use the serial or the name in /dev/disk/by-id"
        return [], [f"{name}: a kernel name can mean another drive after the next boot; {remedy}"]
    prefix = "/dev/disk/by-id/"
    if name.startswith("/") and not name.startswith(prefix):
        return [], [f"{name}: use the serial or the name in {prefix}"]
    short = name[len(prefix) :] if name.startswith(prefix) else name
    if short in facts["by_id"]:
        kname = facts["by_id"][short]
        whole = {disk["kname"] for disk in facts["lsblk"]["blockdevices"] if disk["type"] == "disk"}
        return ([kname], []) if kname in whole else ([], [f"{name} (now {kname}): is not a whole drive"])
    return _with_serial(name, facts)


def _with_serial(serial: str, facts: Facts) -> Tuple[List[str], List[str]]:
    paths = [kname for kname, nvme in facts["nvme"].items() if nvme["serial"] == serial]
    # A multipath namespace shares its serial with the hidden paths to it.
    found = [kname for kname in paths if not facts["nvme"][kname]["hidden"]] or paths[:1]
    if not found:
        disks = [disk for disk in facts["lsblk"]["blockdevices"] if disk["type"] == "disk"]
        found = [disk["kname"] for disk in disks if disk["serial"] == serial][:1]
    if len(found) > 1:
        ids = ", ".join(sorted(by_id_of(kname, facts) for kname in found))
        return [], [f"serial {serial}: is on {len(found)} namespaces ({ids}); name the one in /dev/disk/by-id"]
    return found, [] if found else [f"{serial}: no drive with this serial or by-id name on this host"]


def _unfit(drive: Drive, drives: List[Drive], facts: Facts) -> Iterator[str]:
    """What no array member may be, of this role's array or not."""
    nvme = facts["nvme"].get(drive.kname)
    if nvme is None:
        yield "is not an NVMe drive"
        return
    if nvme["hidden"]:
        yield "is the hidden path of a multipath namespace; choose the namespace itself"
    if nvme["transport"] != "pcie":
        transport = nvme["transport"] or "an unknown transport"
        yield f"is NVMe over {transport}, not a local drive: another host may be using it"
    if not drive.path.startswith("/dev/disk/by-id/"):
        yield "has no name in /dev/disk/by-id; is udev running?"
    twins = [d for d in drives if d.kname != drive.kname and facts["nvme"].get(d.kname, {}).get("wwid") == nvme["wwid"]]
    if nvme["wwid"] and twins:
        yield f"is the same namespace as {twins[0].kname}, reached by another path"


def refuse_unseen(facts: Facts) -> List[str]:
    """Refuse where mounts can't be seen: an unseen one may be of a chosen drive."""
    unseen = facts["unseen"]
    if not unseen:
        return []
    told = ", ".join(unseen[:3]) + (", ..." if len(unseen) > 3 else "")
    return [f"the mounts of {len(unseen)} processes can't be seen ({told}); is this root of the whole host?"]


def refuse_used(drives: Iterable[Drive], facts: Facts) -> List[str]:
    """Refuse every drive that isn't provably unused, with all reasons."""
    return [f"{drive}: {reason}" for drive in drives for reason in uses(drive.kname, facts)]


def uses(kname: str, facts: Facts) -> List[str]:
    """Everything that says that a drive is in use or holds something."""
    stack = stack_of(kname, facts)
    reasons = [reason for device in stack for reason in _in_use(device, kname, facts)]
    reasons += _written_on(kname, stack, facts)
    reasons += [f"is held by {holder}" for holder in facts["holders"].get(kname, [])]
    # util-linux before 2.33 writes every value as a string.
    if str(stack[0].get("ro")) in ("1", "True"):
        reasons.append("is read-only")
    if kname in facts["exclusive"]:
        reasons.append(f"can't be opened exclusively: {facts['exclusive'][kname]}")
    reasons += [f"is open in process {process}" for process in facts["open_by"].get(kname, [])]
    return reasons


def _in_use(device: Dict[str, Any], kname: str, facts: Facts) -> Iterator[str]:
    """Mounts and swap on one device of the stack on a drive."""
    through = "" if device["kname"] == kname else f" through {device['path']}"
    points: Dict[str, str] = {}
    for mount in facts["mounts"]:
        # btrfs, overlay and the like show a device number of their own: then the source tells.
        if mount["device"] == device["maj:min"] or mount["source"] == device["path"]:
            points.setdefault(mount["mount_point"], mount["process"])
    for point, process in points.items():
        if point in SYSTEM_MOUNTS:
            yield f"backs {point}{through}"
        else:
            yield f"is mounted at {point}{through}, as process {process} sees it"
    if any(swap["device"] == device["maj:min"] or swap["path"] == device["path"] for swap in facts["swaps"]):
        yield f"backs swap{through}"


def _written_on(kname: str, stack: List[Dict[str, Any]], facts: Facts) -> Iterator[str]:
    """Signatures and partition tables on a drive."""
    tables = []
    for signature in facts["signatures"].get(kname, []):
        if signature.get("usage") == "partition-table" or signature["type"] in ("gpt", "dos", "PMBR"):
            tables.append(signature["type"])
        else:
            yield _signature_reason(kname, signature, facts)
    if not tables and any(device["type"] == "part" for device in stack[1:]):
        tables.append("unknown type")
    if tables:
        # A GPT also has a protective MBR in front.
        yield f"has a partition table ({next((table for table in tables if table != 'PMBR'), 'PMBR')})"


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
