"""A host's environment made for real by roles/bench_runtime: without a network, and where nothing answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import role_module

CHECKOUT = Path(__file__).resolve().parents[2]
NOBODY = "http://127.0.0.1:9/packages"
module = role_module.load("bench_runtime/library/bench_runtime_environment.py")


def pins(name: str) -> str:
    return (CHECKOUT / "requirements" / name).read_text()


def one_pin(package: str) -> str:
    """One package's lines of host.txt."""
    lines = pins("host.txt").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(package + "=="))
    end = next(number for number in range(start + 1, len(lines)) if not lines[number].startswith(" "))
    return "\n".join(lines[start:end]) + "\n"


def environment(root: Path, **differences: object) -> object:
    base = Path(sys.base_prefix) / "bin" / "python{}.{}".format(*sys.version_info[:2])
    params = {
        "root": str(root),
        "python": str(base),
        "uv_pins": pins("uv.txt"),
        "build_pins": pins("host-build.txt"),
        "pins": [one_pin("hjson"), one_pin("safetensors")],
        "index": "",
        "wheel_dir": "",
        "uv_cache": str(root / "cache"),
        "keep_cache": False,
    }
    return module.Environment({**params, **differences})


@pytest.fixture(scope="module")
def wheel_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    listed = folder / "pins.txt"
    listed.write_text(pins("uv.txt") + pins("host-build.txt") + one_pin("hjson") + one_pin("safetensors"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, "-r", str(listed)], check=True)
    return folder


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every configured index is one where nobody answers."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, NOBODY)
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_index")
def test_a_wheel_folder_is_enough(tmp_path: Path, wheel_dir: Path) -> None:
    made = environment(tmp_path, wheel_dir=str(wheel_dir))
    made.create()
    made.install_pins()
    seen = module.ask(made.python)
    wanted = module.pinned([pins("uv.txt"), pins("host-build.txt"), one_pin("hjson"), one_pin("safetensors")])
    assert {name: seen["packages"].get(name) for name in wanted} == wanted
    # Nothing is left of the installation: no pin files, no download cache on a host.
    assert sorted(os.listdir(tmp_path)) == ["venv"]


@pytest.mark.usefixtures("no_index")
def test_a_wheel_folder_that_lacks_a_file_is_named(tmp_path: Path, wheel_dir: Path) -> None:
    made = environment(tmp_path, wheel_dir=str(wheel_dir), pins=[one_pin("torch")])
    made.create()
    with pytest.raises(module.StepError, match="must hold every file of the pins") as caught:
        made.install_pins()
    assert str(wheel_dir) in str(caught.value)


def test_an_index_where_nobody_answers_says_what_to_set(tmp_path: Path) -> None:
    made = environment(tmp_path, index=NOBODY)
    made.create()
    with pytest.raises(module.StepError, match="bench_runtime_index"):
        made.install_pins()


def test_a_file_that_is_not_the_pinned_one_is_refused(tmp_path: Path, wheel_dir: Path) -> None:
    wrong = one_pin("hjson").replace("--hash=sha256:", "--hash=sha256:0")
    wrong = "\n".join(
        line[: line.index("sha256:") + 71] + line[-2:] if "sha256:" in line else line for line in wrong.splitlines()
    )
    made = environment(tmp_path, wheel_dir=str(wheel_dir), pins=[wrong])
    made.create()
    with pytest.raises(module.StepError):
        made.install_pins()
    assert "hjson" not in module.ask(made.python)["packages"]
