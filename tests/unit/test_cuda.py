"""What DeepSpeed's ops are built against on a host with a GPU. No GPU here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.host import cuda


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (("9.0",), "9.0"),
        (("10.0a",), "10.0"),
        (("9.0", "8.0", "9.0"), "8.0;9.0"),
        (("12.0f", "9.0a"), "9.0;12.0"),
    ],
)
def test_the_architecture_list_is_of_the_gpus_present_and_in_plain_numbers(
    capabilities: tuple[str, ...], expected: str
) -> None:
    assert cuda.architecture_list(capabilities) == expected


def toolkit(home: Path, version: int) -> Path:
    (home / "include").mkdir(parents=True)
    (home / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    return home


def test_a_toolkit_of_torchs_own_major_version_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda-13.0", 13000)))
    monkeypatch.setenv("CUDA_PATH", str(toolkit(tmp_path / "cuda-12.6", 12060)))
    found = cuda.find_cuda("12.4", tmp_path / "ours")
    assert found.home == tmp_path / "cuda-12.6"


def test_without_a_toolkit_torchs_own_packages_are_linked_into_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, header, library in (
        ("cuda_runtime", "cuda_runtime.h", "libcudart.so.12"),
        ("cufile", "cufile.h", "libcufile.so.0"),
        ("cuda_nvcc", "crt/host_config.h", "libnothing.so.1"),
    ):
        (tmp_path / package / "include" / header).parent.mkdir(parents=True)
        (tmp_path / package / "include" / header).touch()
        (tmp_path / package / "lib").mkdir()
        (tmp_path / package / "lib" / library).touch()
    packages = [tmp_path / name for name in ("cuda_runtime", "cufile", "cuda_nvcc")]
    monkeypatch.setattr(cuda, "nvidia_packages", lambda: packages)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    found = cuda.find_cuda("11.8", tmp_path / "ours")
    assert (found.home / "include" / "cuda_runtime.h").exists()
    assert (found.home / "lib64" / "libcudart.so").exists()
    assert (found.compiler, found.cufile) == (False, True)
    version = subprocess.run([found.home / "bin" / "nvcc", "-V"], capture_output=True, text=True, check=True).stdout
    assert "release 11.8" in version
    # Without the headers that CUDA's own include, the gds op would not compile: it is not tried.
    monkeypatch.setattr(cuda, "nvidia_packages", lambda: packages[:2])
    bare = cuda.find_cuda("11.8", tmp_path / "bare")
    assert not bare.cufile


def test_a_toolkit_without_cufile_gets_it_from_torchs_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = toolkit(tmp_path / "cuda-12.6", 12060)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(cuda, "nvidia_packages", lambda: [])
    plain = cuda.find_cuda("12.4", tmp_path / "plain")
    assert (plain.home, plain.cufile) == (home, False)
    package = tmp_path / "cufile"
    (package / "include").mkdir(parents=True)
    (package / "include" / "cufile.h").touch()
    (package / "lib").mkdir()
    (package / "lib" / "libcufile.so.0").touch()
    monkeypatch.setattr(cuda, "nvidia_packages", lambda: [package])
    joined = cuda.find_cuda("12.4", tmp_path / "joined")
    assert joined.cufile
    assert (joined.home / "include" / "cuda_runtime_api.h").exists()
    assert joined.compiler == plain.compiler


def test_a_gpu_without_toolkit_or_packages_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "nvidia_packages", lambda: [])
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(cuda.CudaMissingError, match=r"CUDA 11\.8 toolkit"):
        cuda.find_cuda("11.8", tmp_path)
