"""Faults of the parts below, injected for real: each ends in the right status and reason, never in a rate."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from benching import CHECKOUT, Bench, await_phase, bench_environment, report_of, rows_of, started, write_plan

from bench.host import patching
from bench.host.randomness import fill_random_
from bench.host.workloads.base import NotVerifiedError
from bench.host.writers import make_writer
from bench.host.writers.base import WriterContext, logical_block_bytes
from bench.plan import Options
from bench.results import CaseResult

FAULTS = Path(__file__).parent / "faults"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: loop devices and mounts")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoints"
    place.mkdir()
    return place


@pytest.fixture(scope="session")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("preload") / "faults.so"
    subprocess.run(
        [
            "cc",
            "-shared",
            "-fPIC",
            "-O1",
            "-o",
            library,
            FAULTS / "preload.c",
            *["-Wl,--no-as-needed", "-laio", "-ldl"],
        ],
        check=True,
    )
    return library


@contextmanager
def loop_mount(tmp_path: Path, mebibytes: int, sector: int = 512) -> Iterator[Path]:
    image, place = tmp_path / "image", tmp_path / "mounted"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(mebibytes * 1024**2)
    device = run("losetup", "--find", "--show", "--sector-size", str(sector), str(image)).strip()
    try:
        run("mkfs.ext4", "-q", "-m", "0", device)
        run("mount", device, str(place))
        shutil.rmtree(place / "lost+found")
        try:
            yield place
        finally:
            run("umount", str(place))
    finally:
        run("losetup", "--detach", device)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def cases_of(tmp_path: Path) -> dict[str, CaseResult]:
    return {case.writer: case for case in report_of(tmp_path).cases}


def assert_no_rate(case: CaseResult, status: str = "failed") -> None:
    assert case.status == status, case
    assert case.durable_bytes_per_second is None
    assert case.ceiling_share is None
    assert case.verified is not True


@needs_root
def test_a_disk_that_another_process_fills_fails_every_row_that_writes(tmp_path: Path, runtime_root: Path) -> None:
    with loop_mount(tmp_path, 200) as mounted:
        arguments = ["torch-save-tensor", "--folder", str(mounted), "--mb_size", "32", "--repetitions", "1000"]
        with started(tmp_path, runtime_root, *arguments) as process:
            await_phase(tmp_path, "save")
            filler = mounted / "filler"
            deadline = time.monotonic() + 120
            # To the last byte, and again what deleted checkpoints give back.
            while process.poll() is None and time.monotonic() < deadline:
                with suppress(OSError), filler.open("ab", buffering=0) as file:
                    while file.write(bytes(1024**2)):
                        pass
            output = process.communicate(timeout=60)[0]
        assert process.returncode == 4, output
        cases = cases_of(tmp_path)
        for writer in ("torch_save", "ds_python", "ds_aio"):
            assert_no_rate(cases[writer])
            assert "No space left" in (cases[writer].reason or ""), cases[writer].reason
        assert [path.name for path in mounted.iterdir()] == ["filler"]


@needs_root
@pytest.mark.usefixtures("ready_ops")
def test_sectors_of_4096_bytes_get_whole_sectors(tmp_path: Path) -> None:
    with loop_mount(tmp_path, 200, sector=4096) as mounted:
        assert logical_block_bytes(mounted) == 4096
        # 513 bytes past a whole number of sectors: with 512-byte alignment the last write would be refused.
        tensor = fill_random_(torch.empty(20 * 1024**2 + 4096 + 513, dtype=torch.uint8), 3)
        for blocks, right in ((4096, True), (512, False)):
            context = WriterContext(
                "tensor", Options(io_buffer_bytes=8 * 1024**2), torch.device("cpu"), mounted, blocks
            )
            writer = make_writer("ds_aio", context)
            writer.prepare()
            path = mounted / f"{blocks}.pt"
            saved = writer.save(tensor, path)
            if right:
                writer.verify(tensor, saved)
            else:
                # DeepSpeed alone believes in 512 bytes, loses the last write and reports success.
                with pytest.raises(NotVerifiedError):
                    writer.verify(tensor, saved)
            writer.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("eio", "the writer reported success, but|differs from what was saved"),
        ("setup", "killed by SIGABRT|exited with code"),
        ("fsync", r"EIO: Input/output error"),
    ],
)
def test_an_error_of_the_drive_or_kernel_is_a_failed_row(
    fault: str, words: str, bench: Bench, folder: Path, tmp_path: Path, preload: Path
) -> None:
    done = bench(
        "torch-save-tensor", "--folder", str(folder), "--mb_size", "9", "--repetitions", "1", "--writer", "ds_aio",
        LD_PRELOAD=str(preload), FAULT=fault,
    )  # fmt: skip
    assert done.returncode == 4, done.stdout + done.stderr
    case = cases_of(tmp_path)["ds_aio"]
    assert_no_rate(case)
    assert re.search(words, case.reason or ""), case.reason
    assert not list(folder.iterdir())


@needs_root
def test_a_memlock_limit_below_the_buffer_names_the_limit_that_is_needed(
    tmp_path: Path, folder: Path, runtime_root: Path
) -> None:
    limited = ["prlimit", "--memlock=65536:65536", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
    arguments = ["torch-save-tensor", "--folder", str(folder), "--mb_size", "9", "--repetitions", "1"]
    done = subprocess.run(
        [*limited, sys.executable, "-m", "bench", *arguments, "--writer", "ds_aio", "--writer", "torch_save"],
        env=bench_environment(tmp_path, runtime_root), cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    cases = cases_of(tmp_path)
    assert_no_rate(cases["ds_aio"])
    assert "ulimit -l 65536" in (cases["ds_aio"].reason or ""), cases["ds_aio"].reason
    assert cases["torch_save"].status == "ok"
    assert done.returncode == 4


@needs_root
def test_a_filesystem_without_direct_io_skips_what_needs_it(bench: Bench, tmp_path: Path) -> None:
    place = tmp_path / "ram"
    place.mkdir()
    # ramfs has no O_DIRECT on any kernel; tmpfs has since 6.6.
    run("mount", "-t", "ramfs", "ramfs", str(place))
    try:
        done = bench("torch-save-tensor", "--folder", str(place), "--mb_size", "9", "--repetitions", "1")
    finally:
        run("umount", str(place))
    rows = rows_of(done.stdout)
    assert "refuses O_DIRECT" in rows["test_ds_aio_fast_save"]
    assert " GB/s" in rows["test_save"]


def inside(fault: str) -> dict[str, str]:
    return {"PYTHONPATH": f"{FAULTS}{os.pathsep}{CHECKOUT}", "FAULT": fault}


TWO = ["--mb_size", "9", "--repetitions", "1", "--writer", "torch_save", "--writer", "ds_python"]


def test_a_native_exit_costs_its_row_and_leaves_its_last_words(bench: Bench, folder: Path, tmp_path: Path) -> None:
    done = bench("torch-save-tensor", "--folder", str(folder), *TWO, **inside("exit"))
    assert done.returncode == 4
    cases = cases_of(tmp_path)
    assert_no_rate(cases["torch_save"])
    assert "exited with code 7; its last words: the driver says: no" in (cases["torch_save"].reason or "")
    assert cases["ds_python"].status == "ok"


def test_a_writer_that_hangs_is_ended_at_its_limit(bench: Bench, folder: Path, tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "my.yml", case_timeout_seconds=25)
    done = bench("run", str(plan), "--folder", str(folder), "--no-ceiling", **inside("hang"))
    assert done.returncode == 4
    cases = cases_of(tmp_path)
    assert_no_rate(cases["torch_save"], "timeout")
    assert "took over 25 s and was ended" in (cases["torch_save"].reason or "")
    assert cases["ds_aio"].status == "ok"
    assert not list(folder.iterdir())


def test_output_of_what_a_writer_forks_stays_in_its_log_and_ends_with_it(
    bench: Bench, folder: Path, tmp_path: Path
) -> None:
    done = bench("torch-save-tensor", "--folder", str(folder), *TWO, **inside("chatter"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert cases_of(tmp_path)["torch_save"].verified is True
    assert '"event": "sampled"' not in done.stdout
    (log,) = (tmp_path / "runtime").glob("runs/*/cases/*torch_save.log")
    assert '"event": "sampled"' in log.read_text()
    size = log.stat().st_size
    time.sleep(0.3)
    assert log.stat().st_size == size, "the forked process still writes"


def test_a_stepping_clock_changes_no_duration(bench: Bench, folder: Path, tmp_path: Path) -> None:
    done = bench("torch-save-tensor", "--folder", str(folder), *TWO, **inside("clock"))
    assert done.returncode == 0, done.stdout + done.stderr
    for case in cases_of(tmp_path).values():
        assert all(0 < sample.durable_seconds < 60 for sample in case.samples)


def without_hook(source: bytes) -> bytes:
    original = patching.remove_hook(source)
    assert original is not None
    return original


def half_hook(source: bytes) -> bytes:
    # The condition is there, the call is not: what an edit by hand or a merge leaves behind.
    return re.sub(rb"take_storages\(.*\)\n", b"pass\n", source)


@pytest.mark.parametrize("change", [without_hook, half_hook])
def test_a_patch_that_is_missing_or_half_applied_fails_the_fastpersist_rows_only(
    change: Callable[[bytes], bytes], bench: Bench, folder: Path, tmp_path: Path
) -> None:
    real = Path(torch.__file__).parent
    overlay = tmp_path / "overlay" / "torch"
    overlay.mkdir(parents=True)
    for entry in real.iterdir():
        (overlay / entry.name).symlink_to(entry)
    file = overlay / "serialization.py"
    file.unlink()
    source = (real / "serialization.py").read_bytes()
    changed = change(source)
    assert changed != source
    file.write_bytes(changed)
    done = bench(
        "torch-save-tensor", "--folder", str(folder), "--mb_size", "9", "--repetitions", "1",
        PYTHONPATH=f"{overlay.parent}{os.pathsep}{CHECKOUT}",
    )  # fmt: skip
    assert done.returncode == 4, done.stdout + done.stderr
    cases = cases_of(tmp_path)
    for writer in ("ds_mock", "ds_aio"):
        assert_no_rate(cases[writer])
        assert "no FastPersist hook" in (cases[writer].reason or "")
    assert cases["torch_save"].status == "ok"
    assert report_of(tmp_path).patch.state in ("original", "foreign")


def test_a_run_whose_parent_is_killed_leaves_no_process_and_the_next_run_removes_its_files(
    bench: Bench, tmp_path: Path, folder: Path, runtime_root: Path
) -> None:
    arguments = ["torch-save-tensor", "--folder", str(folder), "--mb_size", "64", "--repetitions", "500"]
    with started(tmp_path, runtime_root, *arguments) as process:
        await_phase(tmp_path, "save")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a case outlived its parent"
        time.sleep(0.1)
    (left,) = folder.iterdir()
    (folder / "mine.pt").touch()
    done = bench("torch-save-tensor", "--folder", str(folder), *TWO)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"removed {left}, which run" in done.stdout
    assert [path.name for path in folder.iterdir()] == ["mine.pt"]
