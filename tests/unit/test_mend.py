"""Mending names of a DeepSpeed checkpoint: all or nothing, never over a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.host.mend import MendError, mend_checkpoint, plan_renames

MODEL = "mp_rank_00_model_states.pt"
STATE = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def checkpoint(folder: Path, *names: str) -> Path:
    tag = folder / "global_step1"
    tag.mkdir()
    (folder / "latest").write_text("global_step1")
    for name in names:
        (tag / name).write_text(name)
    return tag


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_complete_fragments_get_the_names_deepspeed_looks_for(tmp_path: Path) -> None:
    tag = checkpoint(tmp_path, f"{MODEL}-0.1", f"{STATE}-0.1", "other.pt")
    renames = mend_checkpoint(tmp_path)
    assert renames == {tag / f"{name}-0.1": tag / name for name in (MODEL, STATE)}
    assert names_in(tag) == sorted([MODEL, STATE, "other.pt"])
    assert (tag / MODEL).read_text() == f"{MODEL}-0.1"
    assert mend_checkpoint(tmp_path) == {}


def test_dry_run_changes_nothing(tmp_path: Path) -> None:
    tag = checkpoint(tmp_path, f"{MODEL}-0.1")
    assert len(mend_checkpoint(tmp_path, dry_run=True)) == 1
    assert names_in(tag) == [f"{MODEL}-0.1"]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([f"{STATE}-0.1", f"{MODEL}-0.2", f"{MODEL}-1.2"], "one of 2 parts"),
        ([f"{STATE}-0.1", f"{MODEL}-1.4"], "one of 4 parts"),
        ([f"{STATE}-0.1", f"{MODEL}-0.1", MODEL], "two saves went into one folder"),
    ],
)
def test_what_renaming_would_not_mend_is_refused_before_anything_is_renamed(
    tmp_path: Path, names: list[str], reason: str
) -> None:
    tag = checkpoint(tmp_path, *names)
    with pytest.raises(MendError, match=reason):
        mend_checkpoint(tmp_path)
    assert names_in(tag) == sorted(names)


def test_a_name_taken_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tag = checkpoint(tmp_path, f"{MODEL}-0.1")
    planned = plan_renames(tag.iterdir())
    (tag / MODEL).write_text("somebody else's")
    monkeypatch.setattr("bench.host.mend.plan_renames", lambda _: planned)
    with pytest.raises(MendError, match="has appeared"):
        mend_checkpoint(tmp_path)
    assert (tag / MODEL).read_text() == "somebody else's"


def test_command_says_what_it_did_and_what_it_would_do(tmp_path: Path) -> None:
    tag = checkpoint(tmp_path, f"{MODEL}-0.1")
    run = CliRunner().invoke
    would = run(app, ["mend-checkpoint", str(tmp_path), "--dry-run"])
    assert "would rename" in would.stdout
    assert names_in(tag) == [f"{MODEL}-0.1"]
    did = run(app, ["mend-checkpoint", str(tmp_path)])
    assert f"renamed {tag / MODEL}-0.1 to {MODEL}" in did.stdout
    again = run(app, ["mend-checkpoint", str(tmp_path)])
    assert again.exit_code == 0
    assert "nothing to rename" in again.stdout


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint folder"):
        mend_checkpoint(tmp_path / "no")
