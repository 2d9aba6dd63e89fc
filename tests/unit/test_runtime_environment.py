"""What the environment of a host needs: decisions of roles/bench_runtime, and its behaviour when pip or uv fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import role_module

module = role_module.load("bench_runtime/library/bench_runtime_environment.py")

PINS = """\
torch==2.6.0 \\
    --hash=sha256:00
deepspeed==0.19.8 \\
    --hash=sha256:00
typing_extensions==4.16.0 \\
    --hash=sha256:00
triton==3.2.0 ; platform_machine == 'x86_64' \\
    --hash=sha256:00
    # via torch
"""
WANTED = {
    "python": "/usr/bin/python3.11",
    "python_required": False,
    "pins_sha256": "p1",
    "wheel_sha256": "w1",
    "versions": module.pinned([PINS]),
}
STAMP = {"pins_sha256": "p1", "wheel_sha256": "w1"}


def seen(**differences: Any) -> dict[str, Any]:
    answer = {
        "version": [3, 11, 2],
        "base": "/usr/bin/python3.11",
        "packages": {"torch": "2.6.0", "deepspeed": "0.19.8", "typing-extensions": "4.16.0"},
        "importable": ["torch", "deepspeed", "transformers", "bench"],
    }
    return {**answer, **differences}


def steps(*arguments: Any) -> list[str]:
    return [step for step, _ in module.plan(*arguments)]


def test_pins_that_hold_everywhere_are_read_by_normal_name() -> None:
    assert module.pinned([PINS]) == {"torch": "2.6.0", "deepspeed": "0.19.8", "typing-extensions": "4.16.0"}


def test_a_whole_environment_is_left_alone() -> None:
    assert steps(seen(), STAMP, WANTED) == []


@pytest.mark.parametrize(
    ("answer", "stamp", "wanted", "expected"),
    [
        (None, STAMP, WANTED, ["create", "pins", "wheel"]),
        (seen(version=[3, 9, 2]), STAMP, WANTED, ["create", "pins", "wheel"]),
        (seen(base="/usr/bin/python3.10"), STAMP, WANTED, []),
        (seen(base="/usr/bin/python3.10"), STAMP, {**WANTED, "python_required": True}, ["create", "pins", "wheel"]),
        (seen(), {}, WANTED, ["pins", "wheel"]),
        (seen(), {**STAMP, "pins_sha256": "p0"}, WANTED, ["pins"]),
        (seen(), {**STAMP, "wheel_sha256": "w0"}, WANTED, ["wheel"]),
        # The stamp says all is well, the environment says otherwise.
        (seen(packages={"torch": "2.7.1", "deepspeed": "0.19.8"}), STAMP, WANTED, ["pins"]),
        (seen(importable=["deepspeed", "transformers", "bench"]), STAMP, WANTED, ["pins"]),
        (seen(importable=["torch", "deepspeed", "transformers"]), STAMP, WANTED, ["wheel"]),
    ],
)
def test_only_what_is_wrong_is_done(answer: Any, stamp: Any, wanted: Any, expected: list[str]) -> None:
    assert steps(answer, stamp, wanted) == expected


PIP = """\
:env:.disable-pip-version-check='1'
global.extra-index-url='https://b.example/packages\\nhttps://c.example/packages'
global.index-url='https://a.example/packages'
install.cert='/etc/site.pem'
"""


def test_an_index_that_only_pip_knows_reaches_uv() -> None:
    settings = module.parse_pip_settings(PIP)
    extra = module.uv_environment({}, "", settings)
    assert extra["UV_DEFAULT_INDEX"] == "https://a.example/packages"
    assert extra["UV_INDEX"] == "https://b.example/packages https://c.example/packages"
    assert extra["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert extra["SSL_CERT_FILE"] == "/etc/site.pem"


def test_a_sites_own_certificate_authority_reaches_uv() -> None:
    assert module.uv_environment({}, "", {}, True)["UV_SYSTEM_CERTS"] == "true"
    assert "UV_SYSTEM_CERTS" not in module.uv_environment({"UV_SYSTEM_CERTS": "false"}, "", {}, True)


def test_the_environment_wins_in_pips_settings() -> None:
    text = PIP + ":env:.index-url='https://env.example/packages'\n"
    assert module.parse_pip_settings(text)["index-url"] == "https://env.example/packages"


def test_uvs_own_index_wins_over_pips() -> None:
    extra = module.uv_environment({"UV_DEFAULT_INDEX": "https://u.example"}, "", module.parse_pip_settings(PIP))
    assert "UV_DEFAULT_INDEX" not in extra
    assert "UV_INDEX" not in extra


def test_a_wheel_folder_wins_over_an_index() -> None:
    assert module.index_options("https://x.example", "") == ["--index-url", "https://x.example"]
    assert module.index_options("https://x.example", "/mnt/wheels") == ["--no-index", "--find-links", "/mnt/wheels"]


def test_a_password_in_an_index_is_not_shown(tmp_path: Path) -> None:
    environment = module.Environment(parameters(tmp_path))
    with pytest.raises(module.StepError) as caught:
        environment.run(["sh", "-c", "echo cannot reach $0; exit 1", "https://me:secret@index.example/packages"])
    assert "secret" not in str(caught.value)
    assert "https://***@index.example/packages" in str(caught.value)


@pytest.mark.parametrize(
    ("output", "wheel_dir", "words"),
    [
        ("error: No space left on device (os error 28)", "", "make room"),
        ("Failed to fetch: dns error: failed to lookup address", "", "bench_runtime_index"),
        ("Hash mismatch for torch==2.6.0", "", "not the one that was pinned"),
        ("no version of torch==2.6.0", "/mnt/wheels", "/mnt/wheels"),
    ],
)
def test_a_failed_installation_says_what_to_do(output: str, wheel_dir: str, words: str) -> None:
    assert words in module.advice(output, wheel_dir)


def parameters(root: Path, **differences: Any) -> dict[str, Any]:
    return {
        "root": str(root),
        "python": "/nowhere/python3",
        "wheel_dir": "",
        "index": "",
        "uv_cache": "",
        **differences,
    }


def test_a_failed_step_has_the_commands_words(tmp_path: Path) -> None:
    environment = module.Environment(parameters(tmp_path))
    with pytest.raises(module.StepError, match=r"exit code 3:\nno such thing\nWhat to do"):
        environment.run(["sh", "-c", "echo no such thing; exit 3"])


def test_a_folder_that_is_no_environment_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").write_text("mine")
    with pytest.raises(module.StepError, match="not a Python environment"):
        module.Environment(parameters(tmp_path)).create()
    assert (tmp_path / "venv" / "thesis.tex").exists()


def test_a_stamp_that_was_cut_off_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "runtime.json"
    path.write_text('{"pins_sha')
    assert module.read_stamp(str(path)) == {}
