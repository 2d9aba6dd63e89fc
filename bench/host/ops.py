"""DeepSpeed's compiled ops: built once into a keyed cache, proved to work, then only loaded.

DeepSpeed compiles its ops at first use, through torch's just-in-time loader, and looks at the
compiler again at every later use. An audit can afford neither: the first use is inside a timed
save, a stale lock of that loader hangs for ever, and the loader compiles anew whenever the path of
the environment differs. So :func:`build` compiles into ``<ops>/<key>``, a key for everything the
machine code depends on, and :func:`activate` loads the shared objects from there straight into
DeepSpeed's table of loaded ops.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.layout import ops_root

MANIFEST = "manifest.json"
# DeepSpeed's own mark that it has warned about writes to consumer drives (csrc/aio, io_op_desc_t).
WARNED = "_deepspeed_nvme_write_warning_emitted"
DEFAULT_TIMEOUT_SECONDS = 1800.0
# One compiler process takes about this much on torch's headers.
BYTES_PER_JOB = 1_500_000_000
# An op is some ten source files; with fewer compilers than this, ops are built one after the other.
JOBS_PER_OP = 4
POLL_SECONDS = 0.1
SMOKE_BYTES = 1 << 20
SMOKE_SECONDS = 120.0
# Ops for some rows on a GPU only; a host that can't build one skips or fails those rows, with the reason.
OPTIONAL_GPU_OPS = ("gds", "fused_adam")
# Where NVIDIA's driver packages put libcuda.so.1.
LIBRARY_FOLDERS = (
    f"/usr/lib/{platform.machine()}-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
)


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


@dataclass(frozen=True)
class Cuda:
    """What to build against: CUDA_HOME, further folders of libraries, whether nvcc and cuFile are there."""

    home: Path
    libraries: tuple[Path, ...] = ()
    compiler: bool = False
    cufile: bool = False


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


# --- decisions: pure ---------------------------------------------------------------------------


def cpu_flags(cpuinfo: str) -> str:
    """A hash of what the compiler's -march=native sees, from the text of /proc/cpuinfo."""
    lines = re.findall(r"(?m)^(?:flags|Features|CPU part|model name)\s*:\s*(.+)$", cpuinfo)
    return hashlib.sha256("\n".join(sorted(set(lines))).encode()).hexdigest()[:16]


def ops_for(accelerator: str, cuda: Cuda | None) -> tuple[list[str], list[str]]:
    """(needed ops, wanted ops), in the order they are loaded: pin_memory holds symbols that async_io needs.

    A wanted op that does not compile costs its own rows only.
    """
    if accelerator != "cuda":
        return ["pin_memory", "async_io"], []
    wanted = ["gds"] if cuda and cuda.cufile else []
    wanted += ["fused_adam"] if cuda and cuda.compiler else []
    return ["pin_memory", "async_io", "utils"], wanted


def architecture_list(capabilities: Sequence[str]) -> str:
    """TORCH_CUDA_ARCH_LIST from the GPUs present.

    Plain major.minor only: DeepSpeed's builder takes each part for a number and dies of forms such
    as 10.0a, wherever they come from.
    """
    numbers = {tuple(int(part) for part in re.findall(r"\d+", text)[:2]) for text in capabilities}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(numbers))


def jobs(cpus: int, available_bytes: int) -> int:
    """How many compilers may run at once without running out of memory."""
    return max(1, min(cpus, available_bytes // BYTES_PER_JOB))


def build_environment(
    environment: Mapping[str, str], target: Target, folder: Path, prefix: Path, cuda: Cuda | None
) -> dict[str, str]:
    """The environment that ops are compiled in.

    The venv's bin comes first on PATH (ninja is there). NDEBUG would make failed I/O set-up silent,
    so flags that carry it are dropped. The user's architecture list and pre-built switches are not
    ours.
    """
    ours = {
        key: value
        for key, value in environment.items()
        if key not in ("TORCH_CUDA_ARCH_LIST", "PYTHONOPTIMIZE") and not key.startswith("DS_BUILD_")
    }
    for name in ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "CXX", "CC"):
        if "NDEBUG" in ours.get(name, ""):
            ours[name] = " ".join(word for word in ours[name].split() if not re.fullmatch(r"-DNDEBUG(=.*)?", word))
    ours["TORCH_EXTENSIONS_DIR"] = str(folder)
    ours["PATH"] = f"{prefix / 'bin'}{os.pathsep}{ours.get('PATH', os.defpath)}"
    if target.capabilities:
        ours["TORCH_CUDA_ARCH_LIST"] = architecture_list(target.capabilities)
    if cuda is not None:
        ours["CUDA_HOME"] = str(cuda.home)
        inherited = [ours["LIBRARY_PATH"]] if ours.get("LIBRARY_PATH") else []
        ours["LIBRARY_PATH"] = os.pathsep.join([*map(str, cuda.libraries), *inherited])
        if not cuda.compiler:
            # torch's loader imports what it has built, and torch before 2.7 does not load cuFile itself.
            loaded = [ours["LD_LIBRARY_PATH"]] if ours.get("LD_LIBRARY_PATH") else []
            ours["LD_LIBRARY_PATH"] = os.pathsep.join([str(cuda.home / "lib64"), *loaded])
    return ours


def compiler_words(log: str, lines: int = 30) -> str:
    """The part of a build log that says what is wrong: from the first error on, else its end."""
    rows = log.strip().splitlines()
    wanted = re.compile(r"\b(fatal error|error|undefined reference|cannot find)\b\s*:?", re.IGNORECASE)
    skip = re.compile(r"^\s*(Traceback|File \"|raise |subprocess\.CalledProcessError|RuntimeError: Error building)")
    for number, row in enumerate(rows):
        if wanted.search(row) and not skip.search(row):
            return "\n".join(rows[number : number + lines])
    return "\n".join(rows[-lines:])


# (words of a failed build, what to do about them), the first that fits.
ADVICE = (
    (
        "libaio.h|cannot find -laio|requires the dev libaio",
        "install libaio's headers (libaio-dev, libaio-devel)",
    ),
    (
        "io_pgetevents",
        "libaio 0.3.112 or newer is needed (EL9 has 0.3.111); name a newer one in CPATH and LIBRARY_PATH",
    ),
    (r"python\.h", "install this Python's headers (python3-dev, python3-devel)"),
    ("killed|cannot allocate memory", "the compiler ran out of memory: set MAX_JOBS=1 or give the host more"),
    ("no space left", "make room on the disk, or set BENCH_OPS_CACHE (bench_runtime_ops_cache) to another"),
    (
        "cuda_home|cuda_runtime|-lcudart|nvcc",
        "install the CUDA toolkit of torch's CUDA version, or set CUDA_HOME to it",
    ),
    (
        r"[gc]\+\+'?: (command )?not found|no such file or directory: '[gc]\+\+'",
        "install a C++ compiler (g++, gcc-c++)",
    ),
)


def advice(log: str) -> str:
    """What to do about a failed build, from its log."""
    lowered = log.lower()
    return next((text for words, text in ADVICE if re.search(words, lowered)), "see the words above and the log")


# --- what this machine is ----------------------------------------------------------------------


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


def available_bytes() -> int:
    """Memory that is free for compilers, in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def find_cuda(target: Target, folder: Path) -> Cuda | None:
    """What to build with on a host with GPUs; None on the CPU.

    A toolkit of torch's own CUDA major version is used as it is. Without one, a tree of links is made
    below ``folder`` from the CUDA packages that torch itself depends on: all ops but fused_adam are plain
    C++ and need headers and libraries, not nvcc. Raises OpsError where there is neither.
    """
    if target.accelerator != "cuda":
        return None
    driver = folder / "driver"
    driver.mkdir(parents=True, exist_ok=True)
    for place in (*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *LIBRARY_FOLDERS):
        if place and (library := Path(place) / "libcuda.so.1").exists():
            _link(driver / "libcuda.so", library)
    major = target.cuda.partition(".")[0]
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), f"/usr/local/cuda-{target.cuda}"]
    for home in (Path(name) for name in [*named, "/usr/local/cuda"] if name):
        if _toolkit_major(home) == major:
            compiler = (home / "bin" / "nvcc").exists()
            libraries = (driver, home / "lib64", home / "lib64" / "stubs")
            if _has_cufile(home):
                return Cuda(home, libraries, compiler, cufile=True)
            # A toolkit can come without cuFile; torch's own packages have it.
            joined = _toolkit_with_packages(home, folder / "cuda")
            if _has_cufile(joined):
                return Cuda(joined, (driver, joined / "lib64", home / "lib64" / "stubs"), compiler, cufile=True)
            return Cuda(home, libraries, compiler)
    return _cuda_of_packages(target, folder / "cuda", driver)


def _toolkit_major(home: Path) -> str:
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", _read(home / "include" / "cuda_runtime_api.h"))
    return str(int(match.group(1)) // 1000) if match else ""


def _cuda_of_packages(target: Target, home: Path, driver: Path) -> Cuda:
    for name in ("include", "lib64", "bin"):
        (home / name).mkdir(parents=True, exist_ok=True)
    for package in map(Path, _nvidia_packages()):
        for header in sorted((package / "include").glob("*")):
            _link(home / "include" / header.name, header)
        for library in sorted((package / "lib").glob("lib*.so*")):
            _link(home / "lib64" / library.name, library)
            _link(home / "lib64" / (library.name.partition(".so")[0] + ".so"), library)
    if not (home / "include" / "cuda_runtime.h").exists():
        raise OpsError(
            f"torch is built for CUDA {target.cuda}, and neither a CUDA {target.cuda} toolkit nor torch's own CUDA "
            "packages are here: install the toolkit and set CUDA_HOME to it"
        )
    # DeepSpeed asks nvcc for its version, and nothing else for these ops.
    answer = home / "bin" / "nvcc"
    answer.write_text(
        f'#!/bin/sh\n[ "$1" = -V ] && echo "Cuda tools, release {target.cuda}, V{target.cuda}" && exit 0\n'
        'echo "no CUDA toolkit on this host: only ops without device code can be built" >&2\nexit 1\n'
    )
    answer.chmod(0o755)
    # CUDA's headers include those of the compiler's runtime, which are in a package of their own.
    whole = (home / "include" / "crt" / "host_config.h").exists()
    return Cuda(home, (driver, home / "lib64"), cufile=whole and _has_cufile(home))


def _has_cufile(home: Path) -> bool:
    return (home / "include" / "cufile.h").exists() and (home / "lib64" / "libcufile.so").exists()


def _toolkit_with_packages(toolkit: Path, home: Path) -> Path:
    """A tree of links to the toolkit, and to cuFile of torch's own packages."""
    home.mkdir(parents=True, exist_ok=True)
    ours = ("include", "lib64", "bin")
    for entry in sorted(toolkit.glob("*")):
        if entry.name not in ours:
            _link(home / entry.name, entry)
    for name in ours:
        (home / name).mkdir(parents=True, exist_ok=True)
        for entry in sorted((toolkit / name).glob("*")):
            _link(home / name / entry.name, entry)
    for package in map(Path, _nvidia_packages()):
        for header in (package / "include").glob("cufile.h"):
            _link(home / "include" / header.name, header)
        for library in (package / "lib").glob("libcufile.so*"):
            _link(home / "lib64" / "libcufile.so", library)
    return home


def _nvidia_packages() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or [] if spec else []:
        yield from sorted(str(path) for path in Path(place).iterdir() if path.is_dir())


def _link(link: Path, to: Path) -> None:
    if not link.is_symlink() and not link.exists():
        link.symlink_to(to)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- the cache ---------------------------------------------------------------------------------


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
    return _state(target, folder, False, started, smoke)


def _missing(folder: Path) -> str:
    return (
        f"DeepSpeed's compiled ops for this environment are not in {folder}: "
        f"run '{Path(sys.prefix) / 'bin' / 'bench'} ops build' here, or 'make provision' on the controller"
    )


def build(root: Path, timeout_seconds: float | None = None) -> OpsState:
    """Make sure that the ops are built and work; compile only where they are not.

    Raises OpsError with the compiler's words, or when the time limit (``BENCH_OPS_TIMEOUT`` or
    :data:`DEFAULT_TIMEOUT_SECONDS`) passes.
    """
    refuse_optimized()
    started = time.perf_counter()
    limit = timeout_seconds or float(os.environ.get("BENCH_OPS_TIMEOUT") or DEFAULT_TIMEOUT_SECONDS)
    target = this_target()
    cache = ops_root(root)
    folder = cache / target.key
    if read_manifest(folder) is not None:
        try:
            return check(root)
        except OpsError:
            # Built once, does not work now (a damaged file, a replaced library): build it again.
            if not os.access(cache, os.W_OK):
                raise
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OpsError(f"cannot make the folder of compiled ops {cache}: {error.strerror}") from error
    deadline = time.monotonic() + limit
    before = _built_at(folder)
    with _locked(cache / f".{target.key}.lock", deadline):
        if read_manifest(folder) is None or _built_at(folder) == before:
            _compile(target, folder, deadline)
            built = True
        else:
            built = False
    smoke = try_out(folder, root)
    return _state(target, folder, built, started, smoke)


def _state(target: Target, folder: Path, built: bool, started: float, smoke: str) -> OpsState:
    manifest = read_manifest(folder) or {"ops": {}}
    seconds = time.perf_counter() - started
    return OpsState(target.key, folder, list(manifest["ops"]), manifest.get("missing", []), built, seconds, smoke)


def _built_at(folder: Path) -> str:
    manifest = read_manifest(folder)
    return str(manifest.get("build")) if manifest else ""


@contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    """Hold a kernel lock: it ends with its owner, so none is ever stale. Raises OpsError at the deadline."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OpsError(
                        f"another process has been building the ops (lock {path}) for the whole time limit; "
                        "look for a hanging compiler, or raise bench_runtime_ops_timeout"
                    ) from None
                time.sleep(0.2)
        yield


def _compile(target: Target, folder: Path, deadline: float) -> None:
    """Compile into a new folder beside the final one and rename: nobody ever loads half a build."""
    for old in folder.parent.glob(f".{target.key}.building-*"):
        shutil.rmtree(old, ignore_errors=True)
    stage = folder.parent / f".{target.key}.building-{secrets.token_hex(4)}"
    stage.mkdir()
    try:
        cuda = find_cuda(target, folder.parent / f".{target.key}.toolkit")
        needed, wanted = ops_for(target.accelerator, cuda)
        environment = build_environment(os.environ, target, stage, Path(sys.prefix), cuda)
        missing = _compile_all(needed, wanted, environment, stage, deadline)
        built = [op for op in (*needed, *wanted) if op not in missing]
        if cuda is not None:
            missing = [op for op in OPTIONAL_GPU_OPS if op not in built]
        for op in built:
            _refuse_without_asserts(op_file(stage, op))
        manifest = {
            "build": secrets.token_hex(8),
            "target": asdict(target),
            "ops": {op: op_file(stage, op).stat().st_size for op in built},
            "missing": missing,
        }
        (stage / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        stage.rename(folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _compile_all(
    needed: Sequence[str], wanted: Sequence[str], environment: Mapping[str, str], stage: Path, deadline: float
) -> list[str]:
    """Compile the needed ops, and the wanted ones beside them where there are cores enough.

    Returns the wanted ops that did not compile; raises OpsError for a needed one.
    """
    asked = environment.get("MAX_JOBS", "")
    free = int(asked) if asked.isdecimal() and int(asked) else jobs(os.cpu_count() or 1, available_bytes())
    batches = [list(needed), *([op] for op in wanted)]
    together = max(1, min(len(batches), free // JOBS_PER_OP))
    commands = {
        stage / f"build-{batch[-1]}.log": [sys.executable, "-m", "bench.host.ops", "compile", *batch]
        for batch in batches
    }
    environment = {**environment, "MAX_JOBS": str(max(1, free // together))}
    codes = run_logged(commands, environment, deadline, together)
    missing = []
    for batch, log in zip(batches, commands, strict=True):
        if codes[log] == 0 and all(op_file(stage, op).exists() for op in batch):
            continue
        kept = stage.parent / f"failed-{batch[-1]}.log"
        if log.exists():
            shutil.copyfile(log, kept)
        if batch == needed:
            ended = "took longer than the time limit" if codes[log] is None else "failed"
            text = _read(log)
            raise OpsError(
                f"compiling {', '.join(batch)} {ended} (log: {kept}). The compiler's words:\n{compiler_words(text)}\n"
                f"What to do: {advice(text)}"
            )
        missing += batch
    return missing


def run_logged(
    commands: Mapping[Path, Sequence[str]], environment: Mapping[str, str], deadline: float, together: int
) -> dict[Path, int | None]:
    """Run some commands, ``together`` at once, each with all output in the log that is its key.

    The exit codes; None for one that was killed, or not started, because the deadline passed or because
    the first of them, without which the others are of no use, failed.
    """
    codes: dict[Path, int | None] = dict.fromkeys(commands)
    waiting = list(commands)
    first = waiting[0]
    running: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        while (waiting or running) and time.monotonic() < deadline and not codes[first]:
            while waiting and len(running) < together:
                log = waiting.pop(0)
                with log.open("ab") as output:
                    running[log] = subprocess.Popen(
                        commands[log],
                        env=dict(environment),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        cwd=log.parent,
                    )
            time.sleep(POLL_SECONDS)
            for log, process in list(running.items()):
                codes[log] = process.poll()
                if codes[log] is not None:
                    del running[log]
    finally:
        for process in running.values():
            # The compilers too, not only the Python that started them.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return codes


def _refuse_without_asserts(path: Path) -> None:
    """DeepSpeed checks its I/O calls by assert only; an async_io without them loses data silently."""
    if path.stem in ("async_io", "gds") and b"__assert_fail" not in path.read_bytes():
        raise OpsError(
            f"{path.stem} was compiled with NDEBUG, which removes DeepSpeed's checks of its own I/O; "
            "remove NDEBUG from the compiler's flags (CXX, a wrapper or a spec file) and build again"
        )


def _run_logged(command: Sequence[str], environment: Mapping[str, str], log: Path, deadline: float) -> int | None:
    """Run with all output in ``log``; the exit code, or None when the deadline passed and all was killed."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=log.parent,
        )
        try:
            return process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                # The compilers too, not only the Python that started them.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# --- loading -----------------------------------------------------------------------------------


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
    for package in map(Path, _nvidia_packages()):
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


# --- trying ------------------------------------------------------------------------------------


def try_out(folder: Path, root: Path) -> str:
    """Load the ops in a fresh process and write and read back a file with them; what was done.

    A fresh process, since a broken op ends its process. Raises OpsError with its last words.
    """
    place = _direct_folder([folder.parent, root, Path(tempfile.gettempdir())])
    command = [sys.executable, "-m", "bench.host.ops", "try", str(folder), str(place or "")]
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


def _compile_here(ops: Sequence[str]) -> None:
    """In the build process: let DeepSpeed compile each op into TORCH_EXTENSIONS_DIR."""
    from deepspeed.accelerator import get_accelerator

    builders = {
        "pin_memory": "PinMemoryBuilder",
        "async_io": "AsyncIOBuilder",
        "utils": "UtilsBuilder",
        "gds": "GDSBuilder",
        "fused_adam": "FusedAdamBuilder",
    }
    for op in ops:
        builder = get_accelerator().create_op_builder(builders[op])
        # DeepSpeed asks for debug information, which takes more than half of the compiler's time.
        builder.cxx_args = partial(_without_debug_information, builder.cxx_args)
        builder.load(verbose=True)


def _without_debug_information(arguments: Callable[[], list[str]]) -> list[str]:
    return [*arguments(), "-g0"]


def _main(arguments: Sequence[str]) -> int:
    """Entry of the fresh processes: ``compile OP...`` or ``try FOLDER PLACE``."""
    try:
        if arguments[0] == "compile":
            _compile_here(arguments[1:])
        else:
            print(_try_here(Path(arguments[1]), Path(arguments[2]) if arguments[2] else None))
    except OpsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
