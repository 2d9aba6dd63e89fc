"""What a person sees of make: help, the controller's environment, hosts that do not exist. Real make, real shell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
VENV_SCRIPT = CHECKOUT / "requirements" / "controller-venv.sh"
TOOLS = ("sh", "dirname", "mktemp", "rm", "tail", "sed", "cat", "mkdir", "make", "awk", "grep", "printf")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=CHECKOUT,
        env={"HOME": os.environ["HOME"], "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def empty_path(tmp_path: Path) -> Path:
    """A PATH with a shell's tools and no Python at all."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    return folder


def fake(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def make_venv(tmp_path: Path, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(
        str(VENV_SCRIPT), str(tmp_path / "venv"), str(tmp_path / "venv" / ".whole"), PATH=str(path), **environment
    )


def test_make_alone_prints_every_target_that_has_a_comment() -> None:
    done = run("make")
    assert done.returncode == 0
    makefile = (CHECKOUT / "Makefile").read_text()
    targets = re.findall(r"(?m)^([a-z][a-z-]*):.*## (.+)$", makefile)
    assert {"provision", "run", "rollback", "teardown", "test", "lint"} <= {name for name, _ in targets}
    for name, words in targets:
        assert re.search(rf"(?m)^  {name} +{re.escape(words)}$", done.stdout), name


def test_every_target_a_person_may_type_is_phony() -> None:
    makefile = (CHECKOUT / "Makefile").read_text()
    phony = set(" ".join(re.findall(r"(?m)^\.PHONY: (.+)$", makefile)).split())
    assert set(re.findall(r"(?m)^([a-z][a-z-]*):.*## ", makefile)) <= phony


def test_no_python_at_all_is_one_clear_line(tmp_path: Path, empty_path: Path) -> None:
    done = make_venv(tmp_path, empty_path)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_old_python_is_named(tmp_path: Path, empty_path: Path) -> None:
    fake(empty_path, "python3", 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac')
    done = make_venv(tmp_path, empty_path)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer; found Python 3.9.2" in done.stderr


def test_a_python_without_venv_names_the_package(tmp_path: Path, empty_path: Path) -> None:
    fake(
        empty_path,
        "python3",
        f"""case "$*" in
        *'import venv'*) echo "ModuleNotFoundError: No module named 'venv'" >&2; exit 1;;
        *realpath*) echo {empty_path}/python3;;
        *) exec {sys.executable} "$@";;
        esac""",
    )
    done = make_venv(tmp_path, empty_path)
    assert done.returncode != 0
    assert "has no venv module" in done.stderr
    assert f"apt-get install python3.{sys.version_info.minor}-venv" in done.stderr


@pytest.mark.parametrize("rest", ["", "half"])
def test_no_network_is_one_clear_line_and_leaves_nothing_that_looks_whole(
    tmp_path: Path, empty_path: Path, rest: str
) -> None:
    if rest:
        (tmp_path / "venv" / "bin").mkdir(parents=True)
        (tmp_path / "venv" / ".whole").touch()
    base = Path(sys.base_prefix) / "bin" / "python{}.{}".format(*sys.version_info[:2])
    (empty_path / "python3").symlink_to(base)
    done = make_venv(
        tmp_path,
        empty_path,
        PIP_CONFIG_FILE=os.devnull,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path / "none"),
        XDG_CONFIG_DIRS=str(tmp_path),
    )
    assert done.returncode != 0
    assert "No network? " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "venv" / ".whole").exists()


def test_a_whole_environment_is_not_made_again() -> None:
    done = run("make", ".venv")
    assert done.returncode == 0
    assert "making" not in done.stdout


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (("HOSTS=no-such-host",), "HOSTS=no-such-host does not name hosts"),
        (("HOSTS=localhost,no-such-host",), "HOSTS=localhost,no-such-host does not name hosts"),
        (("HOSTS=web*",), "HOSTS=web* does not name hosts"),
        (("INVENTORY=/no/such/inventory",), "INVENTORY=/no/such/inventory"),
    ],
)
@pytest.mark.parametrize("target", ["provision", "rollback"])
def test_hosts_that_do_not_exist_are_an_error_before_anything_happens(
    target: str, variables: tuple[str, ...], words: str
) -> None:
    done = run("make", target, *variables)
    assert done.returncode != 0
    assert words in done.stderr
    assert "PLAY" not in done.stdout


def test_no_index_address_is_in_any_tracked_pin() -> None:
    for path in (CHECKOUT / "requirements").glob("*.txt"):
        text = path.read_text()
        assert "://" not in text, path
        assert str(CHECKOUT) not in text, path
        pins = re.findall(r"(?m)^[A-Za-z0-9].*==", text)
        assert pins, path
        assert text.count("--hash=sha256:") >= len(pins), path
