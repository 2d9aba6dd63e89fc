"""DeepSpeed's compiled ops as a provisioned runtime has them: loaded without a compiler, and really writing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.host import ops
from bench.layout import default_runtime_root, ops_root

ROOT = default_runtime_root()
FOLDER = ops_root(ROOT) / ops.this_target().key


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A runtime root of its own with a copy of the ops, to be damaged."""
    shutil.copytree(FOLDER, tmp_path / "ops" / FOLDER.name)
    return tmp_path


def in_fresh_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


ACTIVATE = f"""if True:
    import os, sys
    from pathlib import Path
    from bench.host import ops
    ops.activate(Path({str(ROOT)!r}))
    from deepspeed.ops.op_builder import AsyncIOBuilder
    module = AsyncIOBuilder().load(verbose=False)
    print(module.__file__)
"""


def test_deepspeed_takes_the_built_ops_and_starts_no_compiler(tmp_path: Path) -> None:
    # Any compiler or ninja that is started leaves a mark here and fails.
    for name in ("c++", "g++", "gcc", "cc", "ninja", "x86_64-linux-gnu-gcc"):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho "$0 $*" >> {tmp_path}/started\nexit 1\n')
        tool.chmod(0o755)
    done = in_fresh_process(ACTIVATE, PATH=f"{tmp_path}:{os.environ['PATH']}", CXX=str(tmp_path / "g++"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(ops.op_file(FOLDER, "async_io"))
    # DeepSpeed itself asks compilers for their version when it is imported; that is all they are asked.
    started = (tmp_path / "started").read_text() if (tmp_path / "started").exists() else ""
    assert " -c " not in started
    assert "ninja" not in started


def test_a_stale_lock_of_torchs_loader_hangs_nobody(copied: Path) -> None:
    for op in ("pin_memory", "async_io"):
        (copied / "ops" / FOLDER.name / op / "lock").touch()
    done = in_fresh_process(ACTIVATE.replace(str(ROOT), str(copied)))
    assert done.returncode == 0, done.stderr


def test_missing_ops_say_where_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_OPS_CACHE", raising=False)
    with pytest.raises(ops.OpsMissingError, match="bench ops build") as caught:
        ops.activate(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_check_loads_writes_and_reads_back(tmp_path: Path) -> None:
    state = ops.check(ROOT)
    assert state.folder == FOLDER
    assert not state.built
    assert "read back" in state.smoke
    assert "O_DIRECT" in state.smoke
    assert len(state.smoke.splitlines()) == 1


def test_a_damaged_op_is_found_by_check(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_OPS_CACHE", raising=False)
    damaged = ops.op_file(copied / "ops" / FOLDER.name, "async_io")
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    with pytest.raises(ops.OpsError, match="do not work") as caught:
        ops.check(copied)
    assert "async_io.so" in str(caught.value)


def test_an_op_that_kills_its_process_is_told_by_its_signal(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No compiler to build it again with: the fresh process's end is what is to be told.
    monkeypatch.setattr(ops.sys, "executable", str(_killer(copied)))
    with pytest.raises(ops.OpsError, match="signal 11"):
        ops.try_out(copied / "ops" / FOLDER.name, copied)


def _killer(folder: Path) -> Path:
    path = folder / "python"
    path.write_text("#!/bin/sh\nkill -SEGV $$\n")
    path.chmod(0o755)
    return path


def test_a_failing_compiler_speaks_and_leaves_the_cache_clean(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    words = "aio.h:1:10: fatal error: libaio.h: No such file or directory"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo "{words}" >&2; exit 1;; *) exec g++ "$@";; esac\n')
    compiler.chmod(0o755)
    root = tmp_path / "root"
    done = subprocess.run(
        [sys.executable, "-m", "bench", "ops", "build", "--root", str(root)],
        env={**os.environ, "CXX": str(compiler), "BENCH_OPS_CACHE": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "fatal error: libaio.h: No such file" in done.stderr
    assert "What to do: install libaio's headers" in done.stderr
    assert "Traceback" not in done.stderr.partition("The compiler's words")[0]
    left = [path.name for path in (root / "ops").iterdir()]
    assert not [name for name in left if "building" in name or (root / "ops" / name).is_dir()]


@pytest.mark.parametrize("flags", [["-O"], []])
def test_python_without_asserts_is_refused(flags: list[str]) -> None:
    environment = {**os.environ} if flags else {**os.environ, "PYTHONOPTIMIZE": "1"}
    done = subprocess.run(
        [sys.executable, *flags, "-m", "bench", "ops", "check"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "PYTHONOPTIMIZE" in done.stderr


def test_json_is_one_line_of_facts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "ops", "build", "--json", "--root", str(ROOT)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    state = json.loads(done.stdout.splitlines()[-1])
    assert state["built"] is False
    assert state["folder"] == str(FOLDER)
    assert state["ops"][:2] == ["pin_memory", "async_io"]
