"""Can this case run here, and into this folder? Answers before anything is built or written."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.host.estimate import file_bytes, gpu_memory_bytes, memory_bytes
from bench.host.facts import gpu_free_bytes
from bench.plan import GIB, Case
from bench.results import Status

ACTIVITY_SECONDS = 0.5
# More than this by others on the drive disturbs what we measure.
BUSY_BYTES_PER_SECOND = 20 * 1024**2


class FolderError(ValueError):
    """The benchmark folder can't be used; the message says why and what to do."""


@dataclass(frozen=True)
class Refusal:
    """A row that won't run, its status and the reason a person can act on."""

    status: Status
    reason: str


@dataclass(frozen=True)
class Host:
    """What the checks look at. ``gpu_count`` GPUs, ``direct`` whether the folder takes O_DIRECT.

    ``gpu_free_bytes``: free memory of each GPU, empty where nvidia-smi does not say.
    ``free_bytes`` is None where the filesystem does not say (ramfs), ``aio_slots`` where the kernel does not.
    """

    memory_available_bytes: int
    free_bytes: int | None
    gpu_count: int
    direct: bool
    aio_slots: int | None
    gpu_free_bytes: tuple[int, ...] = ()


def check_folder(folder: Path) -> None:
    """Raise FolderError unless ``folder`` is a folder that we can write to."""
    if not folder.exists():
        raise FolderError(f"folder {folder} does not exist; create it, or give another one with --folder")
    if not folder.is_dir():
        raise FolderError(f"{folder} is not a folder; give one with --folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FolderError(
            f"cannot write in folder {folder}: {error.strerror}; give another one with --folder"
        ) from error


def takes_direct_io(folder: Path) -> bool:
    """Whether a file in ``folder`` can be opened with O_DIRECT; tried, since it depends on kernel and filesystem."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".direct-")
    os.close(descriptor)
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        os.unlink(name)
    return True


def space_needed(cases: Sequence[Case]) -> int:
    """Bytes of free space a run needs: checkpoints are deleted after each sample, so the largest one counts."""
    return max((file_bytes(case) for case in cases), default=0)


def look_at_host(folder: Path, gpu_count: int) -> Host:
    """Read what the checks need from this host."""
    space = os.statvfs(folder)
    return Host(
        memory_available_bytes=memory_available(),
        free_bytes=space.f_frsize * space.f_bavail if space.f_blocks else None,
        gpu_count=gpu_count,
        direct=takes_direct_io(folder),
        aio_slots=_aio_slots(),
        gpu_free_bytes=tuple(gpu_free_bytes()) if gpu_count else (),
    )


def check_case(case: Case, host: Host) -> Refusal | None:
    """None when the case can run here, else why not. A row that the hardware can't do is skipped, not failed."""
    return next(_refusals(case, host), None)


def _refusals(case: Case, host: Host) -> Iterator[Refusal]:
    options = case.options
    if case.writer == "ds_gds" and not options.gpu:
        yield Refusal("skipped", "GPUDirect Storage needs a GPU; give --gpu on a host that has one")
    if options.gpu and host.gpu_count == 0:
        yield Refusal("skipped", "needs a GPU, and nvidia-smi shows none here; leave --gpu out, or use plan quick")
    if options.gpu and options.device >= host.gpu_count:
        yield Refusal("failed", f"--device {options.device} is not there: this host has {host.gpu_count} GPUs, from 0")
    if case.writer in ("ds_aio", "ds_gds", "direct") and not host.direct:
        yield Refusal("skipped", "the folder's filesystem refuses O_DIRECT; this writer needs it (try ext4 or xfs)")
    if case.writer == "ds_aio" and host.aio_slots is not None and host.aio_slots < needed_aio_slots(case):
        yield Refusal(
            "failed",
            f"only {host.aio_slots} of the kernel's asynchronous I/O slots are free, {needed_aio_slots(case)} are "
            "needed; close what holds them or raise fs.aio-max-nr with sysctl",
        )
    need, memory = file_bytes(case), memory_bytes(case)
    if host.free_bytes is not None and need > host.free_bytes:
        yield Refusal("failed", f"needs {need / GIB:.2f} GiB of space, {host.free_bytes / GIB:.2f} GiB are free")
    if memory > host.memory_available_bytes:
        available = host.memory_available_bytes / GIB
        yield Refusal("skipped", f"needs about {memory / GIB:.1f} GiB of memory, {available:.1f} GiB are available")
    on_gpu = gpu_memory_bytes(case)
    if options.device < len(host.gpu_free_bytes) and on_gpu > host.gpu_free_bytes[options.device]:
        yield Refusal(
            "skipped",
            f"needs about {on_gpu / GIB:.1f} GiB on GPU {options.device}, "
            f"{host.gpu_free_bytes[options.device] / GIB:.1f} GiB are free; end what holds it (nvidia-smi), or use "
            "a smaller model",
        )


def needed_aio_slots(case: Case) -> int:
    """Slots that io_setup takes for the case's handle: one queue for the handle and one a thread."""
    depth = case.options.queue_depth or 8
    threads = case.options.intra_op_parallelism or 2
    return depth * (threads + 1)


def memory_available() -> int:
    """MemAvailable of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _aio_slots() -> int | None:
    try:
        used, limit = (int(Path(f"/proc/sys/fs/aio-{name}").read_text()) for name in ("nr", "max-nr"))
    except (OSError, ValueError):
        return None
    return limit - used


def drive_activity(folder: Path, seconds: float = ACTIVITY_SECONDS) -> float | None:
    """Bytes per second that others read and write on the device below ``folder`` while we do nothing.

    None where the filesystem has no single block device. Source: /sys/dev/block/MAJOR:MINOR/stat, whose
    third and seventh figures count sectors of 512 bytes (Documentation/block/stat.rst in the kernel).
    """
    number = os.stat(folder).st_dev
    counters = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    try:
        before = _sectors(counters.read_text())
        time.sleep(seconds)
        return (_sectors(counters.read_text()) - before) * 512 / seconds
    except (OSError, IndexError, ValueError):
        return None


def _sectors(text: str) -> int:
    figures = text.split()
    return int(figures[2]) + int(figures[6])
