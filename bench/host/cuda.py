"""What to build DeepSpeed's ops against on a host with a GPU: a CUDA toolkit, or torch's own CUDA packages."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Where NVIDIA's driver packages put libcuda.so.1.
LIBRARY_FOLDERS = (
    f"/usr/lib/{platform.machine()}-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
)


class CudaMissingError(ValueError):
    """There is neither a toolkit nor packages; the message says what to install."""


@dataclass(frozen=True)
class Cuda:
    """What to build against: CUDA_HOME, further folders of libraries, whether nvcc and cuFile are there."""

    home: Path
    libraries: tuple[Path, ...] = ()
    compiler: bool = False
    cufile: bool = False


def architecture_list(capabilities: Sequence[str]) -> str:
    """TORCH_CUDA_ARCH_LIST from the GPUs present.

    Plain major.minor only: DeepSpeed's builder takes each part for a number and dies of forms such
    as 10.0a, wherever they come from.
    """
    numbers = {tuple(int(part) for part in re.findall(r"\d+", text)[:2]) for text in capabilities}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(numbers))


def find_cuda(version: str, folder: Path) -> Cuda:
    """What to build with for torch's CUDA ``version``, such as ``12.4``.

    A toolkit of the same major version is used as it is. Without one, a tree of links is made
    below ``folder`` from the CUDA packages that torch itself depends on: all ops but fused_adam are plain
    C++ and need headers and libraries, not nvcc. Raises CudaMissingError where there is neither.
    """
    driver = folder / "driver"
    driver.mkdir(parents=True, exist_ok=True)
    for place in (*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *LIBRARY_FOLDERS):
        if place and (library := Path(place) / "libcuda.so.1").exists():
            _link(driver / "libcuda.so", library)
    major = version.partition(".")[0]
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), f"/usr/local/cuda-{version}"]
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
    return _cuda_of_packages(version, folder / "cuda", driver)


def nvidia_packages() -> Iterator[Path]:
    """Folders of the CUDA packages that torch depends on."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or [] if spec else []:
        yield from sorted(path for path in Path(place).iterdir() if path.is_dir())


def _toolkit_major(home: Path) -> str:
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", _read(home / "include" / "cuda_runtime_api.h"))
    return str(int(match.group(1)) // 1000) if match else ""


def _cuda_of_packages(version: str, home: Path, driver: Path) -> Cuda:
    for name in ("include", "lib64", "bin"):
        (home / name).mkdir(parents=True, exist_ok=True)
    for package in nvidia_packages():
        for header in sorted((package / "include").glob("*")):
            _link(home / "include" / header.name, header)
        for library in sorted((package / "lib").glob("lib*.so*")):
            _link(home / "lib64" / library.name, library)
            _link(home / "lib64" / (library.name.partition(".so")[0] + ".so"), library)
    if not (home / "include" / "cuda_runtime.h").exists():
        raise CudaMissingError(
            f"torch is built for CUDA {version}, and neither a CUDA {version} toolkit nor torch's own CUDA "
            "packages are here: install the toolkit and set CUDA_HOME to it"
        )
    # DeepSpeed asks nvcc for its version, and nothing else for these ops.
    answer = home / "bin" / "nvcc"
    answer.write_text(
        f'#!/bin/sh\n[ "$1" = -V ] && echo "Cuda tools, release {version}, V{version}" && exit 0\n'
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
    for package in nvidia_packages():
        for header in (package / "include").glob("cufile.h"):
            _link(home / "include" / header.name, header)
        for library in (package / "lib").glob("libcufile.so*"):
            _link(home / "lib64" / "libcufile.so", library)
    return home


def _link(link: Path, to: Path) -> None:
    if not link.is_symlink() and not link.exists():
        link.symlink_to(to)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
