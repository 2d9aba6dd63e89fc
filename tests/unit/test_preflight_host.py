"""Which hosts may be provisioned: decisions of roles/preflight on small recorded facts, one per story."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import role_module

probe = role_module.load("preflight/library/preflight_probe.py")

OPTIONS = {
    "python": "",
    "free_bytes": 7_000_000_000,
    "memory_bytes": 3_500_000_000,
    "memlock_bytes": 256 * 1024**2,
    "aio_events": 1024,
}


def python(path: str, *version: int, venv: bool = True, header: bool = True) -> dict[str, Any]:
    return {"path": path, "version": list(version), "venv": venv, "header": header}


def host(**differences: Any) -> dict[str, Any]:
    """A Debian 12 server that has everything, with differences."""
    facts = {
        "os_release": {"ID": "debian", "VERSION_ID": "12"},
        "family": "debian",
        "machine": "x86_64",
        "root": True,
        "sudo": False,
        "pythons": [python("/usr/bin/python3.11", 3, 11, 2)],
        "compiler": "/usr/bin/g++",
        "libaio_header": True,
        "aio_probe": {"ok": True, "output": ""},
        "fio": "/usr/bin/fio",
        "provisioned": False,
        "free_where": "/opt",
        "free_bytes": 50_000_000_000,
        "memory_bytes": 16_000_000_000,
        "memlock_bytes": -1,
        "aio_nr": 0,
        "aio_max_nr": 65536,
        "python_optimize": "",
        "gpu": {"devices": 0, "driver": "", "toolkit": ""},
    }
    return {**facts, **differences}


def test_a_host_with_everything_has_no_problem() -> None:
    assert probe.decide(host(), OPTIONS) == ([], [], [])


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (host(machine="ppc64le"), "x86_64 and aarch64 only"),
        (host(free_bytes=3_000_000_000), "/opt has 3.0 GB free, the runtime needs 7.0 GB"),
        (host(memory_bytes=1_000_000_000), "1.0 GB of memory"),
        (host(python_optimize="1"), "PYTHONOPTIMIZE is set"),
        (host(aio_nr=65500), "sysctl -w fs.aio-max-nr=1048576"),
        (
            host(aio_probe={"ok": False, "output": "undefined reference to `io_pgetevents'"}),
            "undefined reference to `io_pgetevents'",
        ),
        (host(pythons=[python("/usr/bin/python3.9", 3, 9, 2)], family=""), "seen: /usr/bin/python3.9 (3.9.2)"),
        (host(pythons=[python("/usr/bin/python3.14", 3, 14, 0)], family=""), "no Python from 3.10 to 3.13"),
    ],
)
def test_what_cannot_be_helped_is_a_problem_with_its_figures(facts: dict[str, Any], words: str) -> None:
    problems, _, _ = probe.decide(facts, OPTIONS)
    assert len(problems) == 1
    assert words in problems[0]


def test_a_provisioned_host_needs_no_room() -> None:
    assert probe.decide(host(free_bytes=1_000_000, provisioned=True), OPTIONS)[0] == []


def test_all_problems_are_named_at_once() -> None:
    problems, _, _ = probe.decide(host(free_bytes=0, memory_bytes=0, machine="riscv64"), OPTIONS)
    assert len(problems) == 3


BARE = {
    "compiler": "",
    "libaio_header": False,
    "aio_probe": {"ok": False, "output": ""},
    "fio": "",
    "pythons": [python("/usr/bin/python3.11", 3, 11, 2, venv=False, header=False)],
}


def test_root_on_a_bare_debian_gets_packages_and_no_problem() -> None:
    problems, _, packages = probe.decide(host(**BARE), OPTIONS)
    assert problems == []
    assert packages == ["python3.11-venv", "python3.11-dev", "g++", "libaio-dev", "fio"]


def test_bare_rhel_gets_its_own_names_and_a_newer_python() -> None:
    facts = host(**{**BARE, "pythons": [python("/usr/bin/python3.9", 3, 9, 18)]}, family="rhel")
    problems, _, packages = probe.decide(facts, OPTIONS)
    assert problems == []
    assert packages == ["python3.11", "python3.11-devel", "gcc-c++", "libaio-devel", "fio"]


def test_without_root_one_line_names_the_packages_and_the_command() -> None:
    problems, _, _ = probe.decide(host(**BARE, root=False), OPTIONS)
    assert len(problems) == 1
    assert "run `apt-get install -y python3.11-venv python3.11-dev g++ libaio-dev fio` as root" in problems[0]
    assert "\n" not in problems[0]


def test_sudo_is_tried_before_anything_is_called_impossible() -> None:
    assert probe.decide(host(**BARE, root=False, sudo=True), OPTIONS)[0] == []


def test_an_unknown_distribution_that_lacks_things_says_what() -> None:
    facts = host(**{**BARE, "pythons": host()["pythons"]}, family="", os_release={"ID": "alpine"})
    problems, _, _ = probe.decide(facts, OPTIONS)
    assert len(problems) == 1
    assert "alpine" in problems[0]


def test_a_named_python_that_does_not_run_is_named() -> None:
    problems, _, _ = probe.decide(host(pythons=[]), {**OPTIONS, "python": "/opt/py/bin/python3"})
    assert problems == ["bench_runtime_python is /opt/py/bin/python3, which does not run here"]


@pytest.mark.parametrize(
    ("pythons", "expected"),
    [
        ([python("/usr/bin/python3.11", 3, 11), python("/opt/bin/python3.13", 3, 13)], "/opt/bin/python3.13"),
        ([python("/usr/bin/python3.14", 3, 14), python("/usr/bin/python3.12", 3, 12)], "/usr/bin/python3.12"),
        # Complete before newer: headers of a Python from elsewhere are in no package.
        ([python("/usr/bin/python3.11", 3, 11), python("/opt/python3.13", 3, 13, header=False)], "/usr/bin/python3.11"),
        ([python("/usr/bin/python3.11", 3, 11, venv=False), python("/opt/python3.9", 3, 9)], "/usr/bin/python3.11"),
        ([python("/opt/bin/python3.12", 3, 12, header=False)], None),
    ],
)  # fmt: skip
def test_the_newest_complete_python_is_chosen(pythons: list[dict[str, Any]], expected: str | None) -> None:
    chosen = probe.choose_python(pythons, "debian")
    assert (chosen and chosen["path"]) == expected


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (host(gpu={"devices": 8, "driver": "", "toolkit": ""}), "driver is not loaded"),
        (host(gpu={"devices": 8, "driver": "470.57.02", "toolkit": "nvcc"}), "470.57.02 is older than 525.60.13"),
        (host(gpu={"devices": 8, "driver": "550.54", "toolkit": ""}), "no CUDA toolkit"),
        (host(root=False, memlock_bytes=8 * 1024**2), "8 MB may be page-locked (ulimit -l), 268 MB are needed"),
    ],
)
def test_what_only_limits_rows_is_a_warning(facts: dict[str, Any], words: str) -> None:
    problems, warnings, _ = probe.decide(facts, OPTIONS)
    assert problems == []
    assert len(warnings) == 1
    assert words in warnings[0]


def test_root_locks_what_it_wants() -> None:
    assert probe.decide(host(memlock_bytes=65536), OPTIONS)[1] == []


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n', "debian"),
        ("ID=debian\n", "debian"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "rhel"),
        ("ID=arch\n", ""),
    ],
)
def test_distribution_families(text: str, family: str) -> None:
    assert probe.family_of(probe.parse_os_release(text)) == family


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    facts = probe.gather(str(tmp_path / "not" / "there"), "")
    assert facts["free_where"] == str(tmp_path)
    assert facts["memory_bytes"] > 0
    assert any(probe.in_range(candidate["version"]) for candidate in facts["pythons"])


def test_a_compiler_that_cannot_link_speaks_for_itself(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho \"undefined reference to 'io_pgetevents'\" >&2\nexit 1\n")
    compiler.chmod(0o755)
    assert probe.probe_aio(str(compiler)) == {"ok": False, "output": "undefined reference to 'io_pgetevents'"}
