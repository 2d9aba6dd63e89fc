"""Reads the facts that decisions are made from. Nothing here changes a host; what can't be read is an error."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import stat
import subprocess
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from ansible.module_utils.nvme_raid_model import LSBLK_COLUMNS, Facts, Wanted, short_name, walk

SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"
PROGRAMS = ("mdadm", "mkfs.xfs", "mkfs.ext4", "lsblk", "wipefs", "udevadm", "blkdiscard", "systemctl")
FSTAB = "/etc/fstab"


class FactsError(Exception):
    """Something that has to be known before a decision can't be read; the message says what."""


def run(*command: str, timeout: float = 120) -> str:
    """Run a program without a shell and without input, give its standard output; raises FactsError when it fails."""
    program = which(command[0])
    if not program:
        raise FactsError(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            [program, *command[1:]],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            timeout=timeout,
            env={**os.environ, "LC_ALL": "C", "PATH": SEARCH_PATH},
        )
    except subprocess.TimeoutExpired:
        raise FactsError(f"{' '.join(command)} did not end within {timeout:g} s") from None
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip() or "nothing"
        raise FactsError(f"{' '.join(command)} exited {done.returncode} and said: {said}")
    return done.stdout


def which(program: str) -> Optional[str]:
    """Where a program is, also in the folders that only root's PATH has."""
    return shutil.which(program, path=SEARCH_PATH)


def read_facts(wanted: Wanted, array_file: str, closely: Callable[[Facts], Iterable[str]]) -> Facts:
    """Everything about this host's drives, arrays, mounts and configuration.

    ``closely`` is called with the facts so far and gives the kernel names of the drives that are to be
    looked at closely: signatures, an exclusive open, processes that have them open.
    """
    programs = sorted(name for name in PROGRAMS if which(name))
    if "udevadm" in programs:
        run("udevadm", "settle", "--timeout=30")
    mounts, unseen = read_mounts()
    facts: Facts = {
        "programs": programs,
        "lsblk": json.loads(run("lsblk", "--json", "--bytes", "--output", LSBLK_COLUMNS)),
        "by_id": _by_id(),
        "nvme": read_nvme(),
        "holders": _holders(),
        "mounts": mounts,
        "unseen": unseen,
        "swaps": _swaps(),
        "arrays": _arrays(wanted.name) if "mdadm" in programs else {},
        "mount_point": _mount_point(wanted.mount_point),
    }
    conf = _mdadm_conf()
    facts["files"] = {
        "fstab": {"path": FSTAB, "text": read_text(FSTAB)},
        "mdadm_conf": {"path": conf, "text": read_text(conf)},
        "array": {"path": array_file, "text": read_text(array_file)},
    }
    facts["initramfs_tool"] = next((tool for tool in ("update-initramfs", "dracut") if which(tool)), "")
    facts["initramfs_stale"] = _initramfs_stale(conf)
    chosen = sorted(set(closely(facts)))
    facts["signatures"] = {kname: signatures(f"/dev/{kname}") for kname in chosen if os.path.exists(f"/dev/{kname}")}
    facts["exclusive"] = not_exclusive(chosen)
    facts["open_by"] = _open_by(chosen)
    marked = {kname for kname, found in facts["signatures"].items() if _is_member(found)}
    marked |= {d["kname"] for d in walk(facts["lsblk"]["blockdevices"]) if d.get("fstype") == "linux_raid_member"}
    examined = {kname: examine(kname) for kname in sorted(marked)} if "mdadm" in programs else {}
    facts["members"] = {kname: member for kname, member in examined.items() if member}
    return facts


def signatures(path: str) -> List[Dict[str, Any]]:
    """Everything that libblkid recognises on a device, which is left as it is."""
    output = run("wipefs", "--no-act", "--json", "--output", "DEVICE,OFFSET,TYPE,USAGE,UUID,LABEL", path)
    return list(json.loads(output)["signatures"]) if output.strip() else []


def _is_member(found: Iterable[Dict[str, Any]]) -> bool:
    return any(signature["type"] == "linux_raid_member" for signature in found)


def export(text: str) -> Dict[str, str]:
    """The ``MD_KEY=value`` lines that mdadm --export prints."""
    return dict(line.split("=", 1) for line in text.splitlines() if line.startswith("MD_") and "=" in line)


def examine(kname: str) -> Dict[str, Any]:
    """What a member's superblock says; empty when there is none any more."""
    try:
        member: Dict[str, Any] = export(run("mdadm", "--examine", "--export", f"/dev/{kname}"))
        text = run("mdadm", "--examine", f"/dev/{kname}")
    except FactsError as error:
        if "No md superblock" in str(error):
            return {}
        raise
    if not member.get("MD_UUID"):
        return {}
    member.setdefault("MD_NAME", "")
    member["chunk_bytes"] = _chunk_bytes(text)
    version = re.search(r"^\s*Version : (\S+)", text, re.MULTILINE)
    member["MD_METADATA"] = version[1] if version else ""
    return member


def _chunk_bytes(text: str) -> int:
    chunk = re.search(r"^\s*Chunk Size : (\d+)([KMG])", text, re.MULTILINE)
    return int(chunk[1]) * {"K": 1024, "M": 1024**2, "G": 1024**3}[chunk[2]] if chunk else 0


def _arrays(name: str) -> Dict[str, Any]:
    """Every md array; only the one of that name is looked into, the others may be somebody's broken ones."""
    arrays = {}
    for folder in sorted(glob.glob("/sys/block/md*/md")):
        kname = folder.split("/")[3]
        state = read_text(f"{folder}/array_state").strip()
        # A device node that was opened once stays behind as an array with nothing in it.
        if state == "clear":
            continue
        detail = export(run("mdadm", "--detail", "--export", f"/dev/{kname}"))
        running = short_name(detail.get("MD_NAME", "")) == name and state != "inactive"
        arrays[kname] = {
            "detail": detail,
            "state": state,
            "chunk_bytes": int(read_text(f"{folder}/chunk_size") or 0),
            "signatures": signatures(f"/dev/{kname}") if running else [],
        }
    return arrays


def _by_id() -> Dict[str, str]:
    links = sorted(glob.glob("/dev/disk/by-id/*"))
    return {os.path.basename(link): os.path.basename(os.path.realpath(link)) for link in links}


def read_nvme() -> Dict[str, Any]:
    """Every NVMe namespace and every hidden path to one. A namespace's device is its controller, or, under
    native multipath, its subsystem."""
    found = {}
    for block in sorted(glob.glob("/sys/block/nvme*")):
        kname = os.path.basename(block)
        device = os.path.realpath(f"{block}/device")
        controllers = [device, *glob.glob(f"{device}/nvme[0-9]*")]
        transports = {read_text(f"{controller}/transport").strip() for controller in controllers} - {""}
        found[kname] = {
            "serial": read_text(f"{device}/serial").strip(),
            "model": read_text(f"{device}/model").strip(),
            "firmware": read_text(f"{device}/firmware_rev").strip(),
            "transport": next((t for t in sorted(transports) if t != "pcie"), "pcie" if transports else ""),
            "wwid": read_text(f"{block}/wwid").strip(),
            "hidden": read_text(f"{block}/hidden").strip() == "1",
        }
    return found


def _holders() -> Dict[str, List[str]]:
    folders = glob.glob("/sys/class/block/*/holders")
    held = {folder.split("/")[4]: sorted(os.listdir(folder)) for folder in sorted(folders)}
    return {kname: names for kname, names in held.items() if names}


def read_mounts() -> Tuple[List[Dict[str, Any]], List[str]]:
    """The mounts of every mount namespace, each read once through one of its processes, and the processes whose
    mounts may not be looked at, as in a container."""
    own = os.readlink("/proc/self/ns/mnt")
    pids = ["self", *sorted((name for name in os.listdir("/proc") if name.isdigit()), key=int)]
    seen: Set[str] = set()
    mounts: List[Dict[str, Any]] = []
    unseen = []
    for pid in pids:
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace in seen:
                continue
            with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
                text = file.read()
        except PermissionError:
            unseen.append(process(pid))
            continue
        except OSError as error:
            # Processes come and go, and kernel threads have no mounts.
            if error.errno in (errno.ENOENT, errno.ESRCH, errno.EINVAL):
                continue
            raise FactsError(f"can't read the mounts of process {process(pid)}: {error.strerror}") from error
        seen.add(namespace)
        mounts += parse_mountinfo(text, namespace, process(pid), namespace == own)
    return mounts, unseen


def parse_mountinfo(text: str, namespace: str, process_name: str, own: bool) -> List[Dict[str, Any]]:
    """The mounts in one mountinfo."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        after = fields.index("-") + 1
        mounts.append(
            {
                "device": fields[2],
                "mount_point": _unescape(fields[4]),
                "source": _unescape(fields[after + 1]),
                "type": fields[after],
                "options": fields[5],
                "namespace": namespace,
                "process": process_name,
                "own": own,
            }
        )
    return mounts


def process(pid: str) -> str:
    """A process as a person knows it: number and name."""
    number = str(os.getpid()) if pid == "self" else pid
    return f"{number} ({read_text(f'/proc/{pid}/comm').strip()})"


def _swaps() -> List[Dict[str, str]]:
    swaps = []
    for line in read_text("/proc/swaps").splitlines()[1:]:
        path = _unescape(line.split()[0])
        try:
            status = os.stat(path)
        except OSError:
            swaps.append({"path": path, "device": ""})
            continue
        # A swap file keeps the drive below its filesystem busy.
        number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
        swaps.append({"path": os.path.realpath(path), "device": f"{os.major(number)}:{os.minor(number)}"})
    return swaps


def not_exclusive(knames: Iterable[str]) -> Dict[str, str]:
    """Devices that can't be opened exclusively, with the kernel's words."""
    refused = {}
    for kname in knames:
        try:
            os.close(os.open(f"/dev/{kname}", os.O_RDONLY | os.O_EXCL))
        except OSError as error:
            refused[kname] = error.strerror or str(error)
    return refused


def _open_by(knames: Iterable[str]) -> Dict[str, List[str]]:
    """Which processes have a drive, or a part of it, open: a database on a raw drive needs no exclusive open."""
    numbers: Dict[int, str] = {}
    for kname in knames:
        parts = [os.path.basename(path) for path in glob.glob(f"/sys/block/{kname}/{kname}*")]
        for node in (f"/dev/{name}" for name in [kname, *parts]):
            if os.path.exists(node):
                numbers[os.stat(node).st_rdev] = kname
    found: Dict[str, List[str]] = {}
    for pid, link, path in _links("fd"):
        if path.startswith("/dev/"):
            try:
                kname = numbers.get(os.stat(link).st_rdev, "")
            except OSError:
                continue
            if kname and process(pid) not in found.setdefault(kname, []):
                found[kname].append(process(pid))
    return {kname: names for kname, names in found.items() if names}


def users_of(mount_point: str) -> List[str]:
    """Processes that keep a mount busy, with an open file, as their folder or as their root."""
    inside = mount_point.rstrip("/") + "/"
    pids = {pid for pid, _, path in _links("fd", "cwd", "root") if f"{path}/".startswith(inside)}
    return [process(pid) for pid in sorted(pids, key=int)]


def _links(*kinds: str) -> Iterable[Any]:
    """Process number, link and target of the links below /proc/PID that can be read."""
    for pid in (name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
        for kind in kinds:
            folder = f"/proc/{pid}/{kind}"
            try:
                links = [f"{folder}/{name}" for name in os.listdir(folder)] if kind == "fd" else [folder]
            except OSError:
                continue
            for link in links:
                try:
                    yield pid, link, os.readlink(link)
                except OSError:
                    continue


def _mount_point(path: str) -> Dict[str, Any]:
    try:
        return {"exists": True, "entries": sorted(os.listdir(path))}
    except FileNotFoundError:
        return {"exists": False, "entries": []}
    except OSError as error:
        raise FactsError(f"can't look into {path}: {error.strerror}") from error


def _mdadm_conf() -> str:
    """Debian keeps mdadm.conf in a folder of its own."""
    debian = os.path.isdir("/etc/mdadm") or os.path.exists("/etc/debian_version")
    return "/etc/mdadm/mdadm.conf" if debian else "/etc/mdadm.conf"


def _initramfs_stale(conf: str) -> bool:
    """Whether an initramfs was last built before mdadm.conf was written, as after an interrupted run."""
    images = [
        path
        for path in [*glob.glob("/boot/initrd.img-*"), *glob.glob("/boot/initramfs-*.img")]
        if "rescue" not in path and not path.endswith("kdump.img")
    ]
    try:
        written = os.stat(conf).st_mtime
        return any(os.stat(path).st_mtime < written for path in images)
    except FileNotFoundError:
        return False


def read_text(path: str) -> str:
    """The text of a small file, empty when there is none; other errors are raised."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _unescape(text: str) -> str:
    # The kernel writes space, tab, newline and backslash as octal.
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), text)
