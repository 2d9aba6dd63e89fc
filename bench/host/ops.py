"""DeepSpeed's compiled ops: built once into a keyed cache, proved to work, then only loaded.

DeepSpeed compiles its ops at first use, through torch's just-in-time loader, and looks at the
compiler again at every later use. An audit can afford neither: the first use is inside a timed
save, a stale lock of that loader hangs for ever, and the loader compiles anew whenever the path of
the environment differs. So :func:`bench.host.ops_build.build` compiles into ``<ops>/<key>``, a key for everything the
machine code depends on, and :func:`activate` loads the shared objects from there straight into
DeepSpeed's table of loaded ops.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.host.cuda import nvidia_packages
from bench.layout import ops_root

MANIFEST = "manifest.json"
# DeepSpeed's own mark that it has warned about writes to consumer drives (csrc/aio, io_op_desc_t).
WARNED = "_deepspeed_nvme_write_warning_emitted"
SMOKE_BYTES = 1 << 20
SMOKE_SECONDS = 120.0


class OpsError(ValueError):
    """Ops that cannot be built or do not work; the message has the compiler's own words and what to do."""


class OpsMissingError(OpsError):
    """The ops for this environment are not in the cache; the message says where and how to build them."""


@dataclass(frozen=True)
class Target:
    """Everything the machine code depends on.

    ``accelerator`` is ``cpu`` or ``cuda``; ``cuda`` is torch's CUDA version and ``capabilities`` the
    compute capabilities of the GPUs present, such as ``("9.0",)``; both empty on the CPU.
    """

    torch: str
    deepspeed: str
    python: str
    machine: str
    libc: str
    cpu_flags: str
    accelerator: str = "cpu"
    cuda: str = ""
    capabilities: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The cache folder's name: readable in front, a hash of everything behind."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:10]
        where = f"cuda{self.cuda}" if self.accelerator == "cuda" else "cpu"
        return f"torch{self.torch}-ds{self.deepspeed}-py{self.python}-{where}-{digest}"


@dataclass
class OpsState:
    """What ``bench ops build`` and ``bench ops check`` say.

    ``built``: whether this call compiled. ``missing``: ops that some rows want and that could not be built.
    """

    key: str
    folder: Path
    ops: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    built: bool = False
    seconds: float = 0.0
    smoke: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {**asdict(self), "folder": str(self.folder)}


def cpu_flags(cpuinfo: str) -> str:
    """A hash of what the compiler's -march=native sees, from the text of /proc/cpuinfo."""
    lines = re.findall(r"(?m)^(?:flags|Features|CPU part|model name)\s*:\s*(.+)$", cpuinfo)
    return hashlib.sha256("\n".join(sorted(set(lines))).encode()).hexdigest()[:16]


def refuse_optimized() -> None:
    """Raise OpsError under python -O: DeepSpeed's I/O calls are inside assert statements."""
    if sys.flags.optimize or os.environ.get("PYTHONOPTIMIZE"):
        raise OpsError("refusing to work under python -O or PYTHONOPTIMIZE: DeepSpeed's I/O calls are inside asserts")


def this_target() -> Target:
    """What the ops of this interpreter depend on. Imports torch only where there may be a GPU.

    Raises OpsError where torch or DeepSpeed is not installed in this environment.
    """
    try:
        torch_version, deepspeed_version = (importlib.metadata.version(name) for name in ("torch", "deepspeed"))
    except importlib.metadata.PackageNotFoundError as error:
        raise OpsError(
            f"{error.name} is not installed in {sys.prefix}: run 'make provision', or the bench of a runtime"
        ) from error
    on_cpu = Target(
        torch=torch_version,
        deepspeed=deepspeed_version,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        machine=platform.machine(),
        libc="-".join(platform.libc_ver()),
        cpu_flags=cpu_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")),
    )
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not Path("/proc/driver/nvidia").exists():
        return on_cpu
    import torch

    if not torch.cuda.is_available():
        return on_cpu
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return replace(
        on_cpu,
        accelerator="cuda",
        cuda=str(torch.version.cuda),
        capabilities=tuple(f"{major}.{minor}" for major, minor in sorted(found)),
    )


def op_file(folder: Path, op: str) -> Path:
    """The shared object of one op, where torch's loader puts it."""
    return folder / op / f"{op}.so"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What was built there, or None where nothing whole is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = all(op_file(folder, op).stat().st_size == size for op, size in manifest["ops"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def check(root: Path) -> OpsState:
    """Are the ops built, and do they work? Loads and tries them in a fresh process.

    Raises OpsMissingError where they are not built, OpsError where they do not work.
    """
    refuse_optimized()
    started = time.perf_counter()
    target = this_target()
    folder = ops_root(root) / target.key
    if read_manifest(folder) is None:
        raise OpsMissingError(_missing(folder))
    smoke = try_out(folder, root)
    return state_of(target, folder, False, started, smoke)


def _missing(folder: Path) -> str:
    return (
        f"DeepSpeed's compiled ops for this environment are not in {folder}: "
        f"run '{Path(sys.prefix) / 'bin' / 'bench'} ops build' here, or 'make provision' on the controller"
    )


def state_of(target: Target, folder: Path, built: bool, started: float, smoke: str) -> OpsState:
    manifest = read_manifest(folder) or {"ops": {}}
    seconds = time.perf_counter() - started
    return OpsState(target.key, folder, list(manifest["ops"]), manifest.get("missing", []), built, seconds, smoke)


def load_modules(folder: Path, ops: Sequence[str]) -> dict[str, ModuleType]:
    """Load the shared objects of some ops, in order; torch is imported first.

    Raises OpsError where one does not load.
    """
    import torch  # noqa: F401  the ops link against its libraries

    modules = {}
    for op in ops:
        path = op_file(folder, op)
        try:
            if op == "pin_memory":
                # The others resolve the shared pin manager against this one.
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            if op == "gds":
                _load_packaged_cufile()
            loader = importlib.machinery.ExtensionFileLoader(op, str(path))
            spec = importlib.util.spec_from_file_location(op, path, loader=loader)
            if spec is None:
                raise ImportError(f"no loader for {path}")
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except (ImportError, OSError) as error:
            raise OpsError(f"the compiled op {path} does not load ({error}): run 'bench ops build' again") from error
        modules[op] = module
    return modules


def _load_packaged_cufile() -> None:
    """Load cuFile where it came as a Python package: the dynamic linker does not look there."""
    for package in nvidia_packages():
        for library in (package / "lib").glob("libcufile.so.*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def activate(root: Path) -> Path:
    """Give this process's DeepSpeed the ops that were built, so that it compiles nothing; their folder.

    Raises OpsMissingError where they are not built, OpsError under python -O or where they do not load.
    """
    refuse_optimized()
    target = this_target()
    folder = ops_root(root) / target.key
    manifest = read_manifest(folder)
    if manifest is None:
        raise OpsMissingError(_missing(folder))
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    os.environ["PATH"] = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    modules = load_modules(folder, list(manifest["ops"]))
    from deepspeed.ops.op_builder.builder import OpBuilder

    table = getattr(OpBuilder, "_loaded_ops", None)
    if not isinstance(table, dict):
        raise OpsError(f"DeepSpeed {target.deepspeed} keeps its loaded ops elsewhere than bench knows: pin 0.19.8")
    table.update(modules)
    import deepspeed.utils

    # Said already, so that no first save has to say it: the warning about the endurance of consumer drives.
    setattr(deepspeed.utils, WARNED, True)
    # DeepSpeed remembers pin_memory here, beside the table.
    sys._deepspeed_pin_memory_op_module = modules["pin_memory"]  # type: ignore[attr-defined]
    return folder


def try_out(folder: Path, root: Path) -> str:
    """Load the ops in a fresh process and write and read back a file with them; what was done.

    A fresh process, since a broken op ends its process. Raises OpsError with its last words.
    """
    place = _direct_folder([folder.parent, root, Path(tempfile.gettempdir())])
    command = [sys.executable, "-m", "bench.host.ops", str(folder), str(place or "")]
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_EXTENSIONS_DIR"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SMOKE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OpsError(f"the compiled ops in {folder} hang: no answer in {SMOKE_SECONDS:.0f} s") from error
    if done.returncode != 0:
        end = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        words = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise OpsError(f"the compiled ops in {folder} do not work ({end}):\n{words}")
    return done.stdout.strip()


def _direct_folder(candidates: Sequence[Path]) -> Path | None:
    """The first folder that takes a new file opened with O_DIRECT."""
    for place in candidates:
        probe = place / f".direct-{secrets.token_hex(4)}"
        try:
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600))
        except OSError:
            continue
        finally:
            probe.unlink(missing_ok=True)
        return place
    return None


def _try_here(folder: Path, place: Path | None) -> str:
    """In the fresh process: load, write, read, compare."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise OpsMissingError(_missing(folder))
    modules = load_modules(folder, list(manifest["ops"]))
    if place is None:
        return "loaded; no folder here takes O_DIRECT, so nothing was written"
    import torch

    # The op warns once about the endurance of consumer drives, through DeepSpeed's logger, at its first write.
    # This stands in for DeepSpeed, whose import would take longer than all the rest.
    quiet = ModuleType("deepspeed.utils")
    setattr(quiet, WARNED, True)
    sys.modules.setdefault("deepspeed.utils", quiet)
    # Block size, queue depth, single submit, overlap events, parallelism; one page a block.
    handle = modules["async_io"].aio_handle(4096, 8, False, False, 1)
    written = handle.new_cpu_locked_tensor(SMOKE_BYTES, torch.empty(0, dtype=torch.uint8))
    read = handle.new_cpu_locked_tensor(SMOKE_BYTES, torch.empty(0, dtype=torch.uint8))
    written.copy_(torch.randint(0, 256, (SMOKE_BYTES,), dtype=torch.uint8))
    read.zero_()
    path = place / f".smoke-{secrets.token_hex(4)}"
    try:
        path.touch(mode=0o600)
        handle.sync_pwrite(written, str(path), 0)
        handle.sync_pread(read, str(path), 0)
        if path.stat().st_size != SMOKE_BYTES or not torch.equal(written, read):
            raise OpsError(f"async_io did not read back what it wrote in {place}")
    finally:
        path.unlink(missing_ok=True)
        handle.free_cpu_locked_tensor(written)
        handle.free_cpu_locked_tensor(read)
    return f"loaded {', '.join(modules)}; wrote and read back {SMOKE_BYTES} bytes with O_DIRECT in {place}"


def _main(folder: str, place: str) -> int:
    """Entry of the fresh process of :func:`try_out`."""
    try:
        print(_try_here(Path(folder), Path(place) if place else None))
    except OpsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
