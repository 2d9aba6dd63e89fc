"""Compiles DeepSpeed's ops once into the cache that :mod:`bench.host.ops` loads them from."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bench.host.cuda import Cuda, CudaMissingError, architecture_list, find_cuda
from bench.host.ops import (
    MANIFEST,
    OpsError,
    OpsState,
    Target,
    check,
    op_file,
    read_manifest,
    refuse_optimized,
    state_of,
    this_target,
    try_out,
)
from bench.host.preflight import memory_available
from bench.layout import ops_root

DEFAULT_TIMEOUT_SECONDS = 1800.0
# One compiler process takes about this much on torch's headers.
BYTES_PER_JOB = 1_500_000_000
# An op is some ten source files; with fewer compilers than this, ops are built one after the other.
JOBS_PER_OP = 4
POLL_SECONDS = 0.1
# Ops for some rows on a GPU only; a host that can't build one skips or fails those rows, with the reason.
OPTIONAL_GPU_OPS = ("gds", "fused_adam")


def ops_for(accelerator: str, cuda: Cuda | None) -> tuple[list[str], list[str]]:
    """(needed ops, wanted ops), in the order they are loaded: pin_memory holds symbols that async_io needs.

    A wanted op that does not compile costs its own rows only.
    """
    if accelerator != "cuda":
        return ["pin_memory", "async_io"], []
    wanted = ["gds"] if cuda and cuda.cufile else []
    wanted += ["fused_adam"] if cuda and cuda.compiler else []
    return ["pin_memory", "async_io", "utils"], wanted


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
    return state_of(target, folder, built, started, smoke)


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
        cuda = _cuda(target, folder.parent / f".{target.key}.toolkit")
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


def _cuda(target: Target, folder: Path) -> Cuda | None:
    if target.accelerator != "cuda":
        return None
    try:
        return find_cuda(target.cuda, folder)
    except CudaMissingError as error:
        raise OpsError(str(error)) from error


def _compile_all(
    needed: Sequence[str], wanted: Sequence[str], environment: Mapping[str, str], stage: Path, deadline: float
) -> list[str]:
    """Compile the needed ops, and the wanted ones beside them where there are cores enough.

    Returns the wanted ops that did not compile; raises OpsError for a needed one.
    """
    asked = environment.get("MAX_JOBS", "")
    free = int(asked) if asked.isdecimal() and int(asked) else jobs(os.cpu_count() or 1, memory_available())
    batches = [list(needed), *([op] for op in wanted)]
    together = max(1, min(len(batches), free // JOBS_PER_OP))
    commands = {
        stage / f"build-{batch[-1]}.log": [sys.executable, "-m", "bench.host.ops_build", *batch] for batch in batches
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
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
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


if __name__ == "__main__":
    _compile_here(sys.argv[1:])
