"""What makes the wanted array, keeps it, or takes it apart: decided from recorded facts alone."""

from __future__ import annotations

import json
import posixpath
import re
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ansible.module_utils.nvme_raid_choice import choose, refuse_unlike, refuse_unseen, refuse_used, uses
from ansible.module_utils.nvme_raid_files import (
    conf_arrays,
    fstab_entries,
    with_array,
    with_mount,
    without_array,
    without_mount,
)
from ansible.module_utils.nvme_raid_model import (
    FILESYSTEMS,
    KERNEL_NAME_PATTERN,
    NAME_PATTERN,
    SYSTEM_MOUNTS,
    Array,
    Decision,
    Drive,
    Facts,
    Step,
    Wanted,
    drive_of,
    filesystem_uuid,
    mounted_uuid,
    number_of,
    short_name,
)


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
        decision.refusals += refuse_unseen(facts)
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
    refusals += refuse_name(wanted.name)
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


def refuse_name(name: str) -> List[str]:
    """Refuse a name that can't be an array's own: an empty one would be that of every array without a name."""
    if NAME_PATTERN.fullmatch(name) and not KERNEL_NAME_PATTERN.fullmatch(name):
        return []
    return [
        f"nvme_raid_name {name!r}: use letters, digits, - and _, a letter first, 28 characters at most, "
        "and no kernel name such as md0, which changes between boots"
    ]


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
        there = ", ".join(str(drive_of(kname, facts)) for kname in array.present)
        refusals.append(
            f"{head} is degraded: {len(array.present)} of its {array.devices} members are here ({there}); "
            "RAID-0 has no copy of what was on the others. Bring the drive back, or tear the array down"
        )
    elif array.kname and array.state == "inactive":
        refusals.append(f"{head} is {array.state} as {array.kname}; see /proc/mdstat, and stop it: mdadm --stop")
    for kname in sorted(set(array.present) - chosen):
        refusals.append(f"{drive_of(kname, facts)}: is a member of {head}, but isn't chosen")
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
    number = number_of(array.kname, facts) if array and array.kname else None
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
    decision = Decision(refusals=refuse_name(wanted.name))
    array, refusals = find_array(wanted.name, facts)
    decision.array = array
    decision.refusals += refusals
    if array is not None:
        decision.array_uuid = array.uuid
        decision.drives = [drive_of(kname, facts) for kname in array.present]
        decision.refusals += _refuse_teardown(wanted, array, facts)
    if decision.refusals:
        return decision
    _plan_teardown(wanted, facts, decision)
    return decision


def _refuse_teardown(wanted: Wanted, array: Array, facts: Facts) -> Iterator[str]:
    head = f"the array {wanted.name} (UUID {array.uuid})"
    yield from refuse_unseen(facts)
    if "mdadm" not in facts["programs"]:
        yield "mdadm is not installed"
    if (array.level, array.metadata) != ("raid0", "1.2"):
        yield f"{head} is {array.level} with metadata {array.metadata}: this role makes only raid0 with metadata 1.2"
    if wanted.devices or wanted.match:
        chosen = {drive.kname for drive in choose(wanted, facts)[0]}
        for kname in array.present:
            if kname not in chosen:
                yield f"{drive_of(kname, facts)}: is a member of {head}, but isn't chosen for this host"
    for kname in array.present:
        others = [holder for holder in facts["holders"].get(kname, []) if holder != array.kname]
        if others:
            yield f"{drive_of(kname, facts)}: is also held by {', '.join(others)}"
    if array.kname:
        yield from _stands_on(wanted, array, facts, head)


def _stands_on(wanted: Wanted, array: Array, facts: Facts, head: str) -> Iterator[str]:
    """What has to be taken off an assembled array by whoever put it there."""
    number = number_of(array.kname, facts)
    for holder in facts["holders"].get(array.kname, []):
        yield f"{head} is held by {holder}; take that apart first"
    if any(swap["device"] == number for swap in facts["swaps"]):
        yield f"{head} backs swap"
    for mount in facts["mounts"]:
        if mount["device"] == number and mount["mount_point"] != wanted.mount_point:
            point, process = mount["mount_point"], mount["process"]
            yield f"{head} is mounted at {point}, as process {process} sees it; unmount it first"
    if array.filesystem is not None and array.filesystem["type"] not in FILESYSTEMS:
        yield f"{head} holds {array.filesystem['type']}, which this role didn't make; take that apart first"


def _plan_teardown(wanted: Wanted, facts: Facts, decision: Decision) -> None:
    array, steps = decision.array, decision.steps
    number = number_of(array.kname, facts) if array and array.kname else None
    if number and any(mount["own"] and mount["device"] == number for mount in facts["mounts"]):
        steps.append(Step("unmount", f"unmount {wanted.mount_point}"))
    _plan_forgetting(wanted, facts, decision)
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


def _plan_forgetting(wanted: Wanted, facts: Facts, decision: Decision) -> None:
    """Take the array out of every file, by the UUIDs that its superblocks, mdadm.conf and array.json know."""
    array, steps = decision.array, decision.steps
    fstab, conf, record = (facts["files"][name] for name in ("fstab", "mdadm_conf", "array"))
    recorded = _recorded(record["text"], wanted.name)
    arrays = {line.uuid for line in conf_arrays(conf["text"]) if line.name == wanted.name and line.uuid}
    arrays |= {array.uuid} if array else set()
    arrays |= {recorded["uuid"]} if recorded else set()
    filesystems = {filesystem_uuid(array_uuid) for array_uuid in arrays}
    filesystems |= {recorded["filesystem_uuid"]} if recorded else set()
    filesystems |= {mounted_uuid(array, array.uuid)} if array else set()
    text = fstab["text"]
    for fs_uuid in sorted(filesystems):
        text = without_mount(text, f"UUID={fs_uuid}")
    if text != fstab["text"]:
        decision.files["fstab"] = text
        steps.append(Step("fstab", f"take the mount out of {fstab['path']}"))
    text = conf["text"]
    for array_uuid in sorted(arrays):
        text = without_array(text, array_uuid)
    if text != conf["text"]:
        decision.files["mdadm_conf"] = text
        steps.append(Step("mdadm_conf", f"take the array out of {conf['path']}"))
        if facts["initramfs_tool"]:
            steps.append(Step("initramfs", "rebuild the initramfs without it"))
    if recorded:
        steps.append(Step("forget", f"remove {record['path']}"))


def _recorded(text: str, name: str) -> Optional[Dict[str, str]]:
    """The array of that name as array.json describes it; None where it describes another, or nothing."""
    try:
        described = json.loads(text)
        if described["name"] != name:
            return None
        return {key: str(described[key]) for key in ("uuid", "filesystem_uuid")}
    except (ValueError, KeyError, TypeError):
        return None
