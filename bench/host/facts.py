"""What this machine is: read from /proc, /sys and package metadata; imports no torch."""

from __future__ import annotations

import csv
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from bench.host.array import find_mount
from bench.results import Array, Drive, Facts, Filesystem, Gpu

SYS_BLOCK = Path("/sys/class/block")


def collect_facts(folder: Path) -> Facts:
    """Facts about this host and about the filesystem, array and drives below ``folder``."""
    filesystem = filesystem_of(folder)
    top = Path(os.path.realpath(filesystem.source)).name if filesystem.source.startswith("/dev/") else None
    names = _stack(top) if top else []
    return Facts(
        kernel=platform.release(),
        distribution=_os_release().get("PRETTY_NAME"),
        cpu=_cpu_name(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus(),
        drives=[_drive(name) for name in names if not _slaves(name) and not _is_partition(name)],
        array=next((_array(name) for name in names if (SYS_BLOCK / name / "md").is_dir()), None),
        filesystem=filesystem,
        software=_software(),
    )


def filesystem_of(folder: Path, mountinfo: str | None = None) -> Filesystem:
    """The filesystem that holds ``folder``, from the last matching line of /proc/self/mountinfo."""
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    mount = find_mount(folder.resolve(), text)
    if mount is None:
        raise FileNotFoundError(f"{folder} lies on no mounted filesystem")
    space = os.statvfs(folder)
    return Filesystem(
        type=mount.type,
        source=mount.source,
        mount_point=str(mount.point),
        options=mount.options,
        size_bytes=space.f_frsize * space.f_blocks,
        free_bytes=space.f_frsize * space.f_bavail,
    )


def _stack(name: str) -> list[str]:
    """A block device and everything below it: partitions to disks, arrays and volumes to members."""
    found = [name]
    below = _slaves(name)
    if _is_partition(name):
        below = [*below, (SYS_BLOCK / name).resolve().parent.name]
    for lower in below:
        found += [other for other in _stack(lower) if other not in found]
    return found


def _slaves(name: str) -> list[str]:
    folder = SYS_BLOCK / name / "slaves"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _is_partition(name: str) -> bool:
    return (SYS_BLOCK / name / "partition").exists()


def _drive(name: str) -> Drive:
    block = SYS_BLOCK / name
    device = block / "device"
    # A namespace's device is its controller, whose device in turn is the PCIe function.
    speed, width = (_read(device / "device" / f"current_link_{what}") for what in ("speed", "width"))
    scheduler = re.search(r"\[(.+?)\]", _read(block / "queue" / "scheduler") or "")
    sectors = _read(block / "size")
    logical = _read(block / "queue" / "logical_block_size")
    return Drive(
        name=name,
        model=_read(device / "model"),
        serial=_read(device / "serial") or _read(block / "serial"),
        firmware=_read(device / "firmware_rev") or _read(device / "rev"),
        link=f"{speed} x{width}" if speed and width else None,
        size_bytes=int(sectors) * 512 if sectors else None,
        logical_block_bytes=int(logical) if logical else None,
        scheduler=scheduler[1] if scheduler else None,
    )


def _array(name: str) -> Array:
    folder = SYS_BLOCK / name / "md"
    chunk = _read(folder / "chunk_size")
    return Array(
        name=name,
        uuid=_read(folder / "uuid"),
        level=_read(folder / "level") or "unknown",
        chunk_bytes=int(chunk) if chunk else None,
        members=_slaves(name),
    )


def gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi shows, none without it."""
    return [
        Gpu(name=name, memory_bytes=int(memory) * 1024**2, driver=driver)
        for name, memory, driver in _nvidia_smi("name", "memory.total", "driver_version")
        if memory.isdigit()
    ]


def gpu_free_bytes() -> list[int]:
    """Free memory of each GPU in bytes, by PCI address, as the cases number them.

    Empty where it is not known: no nvidia-smi, or a CUDA_VISIBLE_DEVICES that gives the GPUs other numbers.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return []
    return [int(free) * 1024**2 for (free,) in _nvidia_smi("memory.free") if free.isdigit()]


def _nvidia_smi(*fields: str) -> list[list[str]]:
    """What nvidia-smi says, a list a GPU; nothing where it is not installed or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    rows = [[cell.strip() for cell in row] for row in csv.reader(output.splitlines())]
    return [row for row in rows if len(row) == len(fields)]


def _software() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "deepspeed", "transformers")},
        "cuda": _torch_cuda(),
        "libaio": _libaio(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """The CUDA version torch was built for, from torch/version.py, None for a CPU build."""
    try:
        files = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    text = _read(Path(str(files.locate_file("torch/version.py")))) or ""
    match = re.search(r"^cuda(?:: [^=]+)? = '(.+)'", text, re.MULTILINE)
    return match[1] if match else None


def _libaio() -> str | None:
    """The version of the libaio package, by whichever package manager owns it."""
    for query in (
        ["dpkg-query", "--show", "--showformat=${Version}\n", "libaio1*"],
        ["rpm", "--query", "--queryformat=%{VERSION}\n", "libaio"],
    ):
        if shutil.which(query[0]):
            found = subprocess.run(query, capture_output=True, text=True, check=False)
            versions = found.stdout.split() if found.returncode == 0 else []
            return versions[0] if versions else None
    return None


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _os_release() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None
