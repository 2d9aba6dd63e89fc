"""``bench`` as a user runs it: what it prints, writes, leaves behind, and says when something is wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benching import CHECKOUT, Bench, await_phase, bench_environment, report_of, rows_of, started, write_plan

from bench.results import parse_status

SMALL = ["--mb_size", "16", "--repetitions", "2"]
LOG_LINE = re.compile(r"^ ?\d+\.\d\d GB,  ?\d+\.\d\d secs,  ?\d+\.\d\d GB/s$")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoints"
    place.mkdir()
    return place


def test_the_tensor_benchmark_measures_verifies_and_cleans_up(bench: Bench, folder: Path, tmp_path: Path) -> None:
    done = bench("torch-save-tensor", "--folder", str(folder), *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    for tag in ("test_save", "test_ds_mock_save", "test_ds_py_save", "test_ds_aio_fast_save"):
        assert LOG_LINE.match(rows[tag]), rows[tag]
    assert rows["test_ds_gds_fast_save"].startswith("skipped: GPUDirect Storage needs a GPU")
    assert not list(folder.iterdir())
    report = report_of(tmp_path)
    cases = {case.writer: case for case in report.cases}
    assert cases["ds_aio"].statistics["save_storage"] == 1
    assert cases["ds_mock"].verified is None
    for name in ("torch_save", "ds_python", "ds_aio"):
        case = cases[name]
        assert case.status == "ok"
        assert case.verified is True
        assert case.payload_bytes == 16 * 1024**2
        assert case.file_bytes > case.payload_bytes
        assert [sample.warmup for sample in case.samples] == [True, False, False]
        assert all(0 < sample.ack_seconds <= sample.durable_seconds for sample in case.samples)
        assert re.fullmatch(r"[0-9a-f]{64}", case.sha256)


def test_statistics_are_printed_unless_asked_not_to(bench: Bench, folder: Path) -> None:
    writer = ["--folder", str(folder), *SMALL, "--writer", "ds_aio"]
    assert "save_storage" in bench("torch-save-tensor", *writer).stdout
    assert "save_storage" not in bench("torch-save-tensor", *writer, "--no-statistics").stdout


@pytest.mark.parametrize("option", ["--io_buffer_mb", "--io-buffer-mb"])
def test_both_spellings_of_the_buffer_size_reach_the_writer(
    option: str, bench: Bench, folder: Path, tmp_path: Path
) -> None:
    done = bench(
        "torch-save-tensor", "--folder", str(folder), *SMALL, option, "2", "--single_io_buffer", "--writer", "ds_aio",
        "--block_mb", "1", "--queue_depth", "4", "--intra_op_parallelism", "2", "--single_submit", "--overlap_events",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = report_of(tmp_path).cases
    assert case.options["io_buffer_bytes"] == 2 * 1024**2
    assert case.options["double_buffer"] is False
    # 16 MiB through one buffer of 2 MiB: at least eight fills.
    assert case.statistics["fill_buffer_count"] >= 8


def test_zipfile_goes_around_the_hook_and_still_verifies(bench: Bench, folder: Path, tmp_path: Path) -> None:
    done = bench("torch-save-tensor", "--folder", str(folder), *SMALL, "--zipfile", "--writer", "ds_aio")
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = report_of(tmp_path).cases
    assert case.verified is True
    assert case.statistics["save_storage"] == 0


def test_models_and_optimizers_are_saved_whole(bench: Bench, folder: Path, tmp_path: Path) -> None:
    done = bench("torch-save-model", "--folder", str(folder), "--repetitions", "1", "--optimizer")
    assert done.returncode == 0, done.stdout + done.stderr
    sizes = {case.payload_bytes for case in report_of(tmp_path).cases if case.status == "ok"}
    assert len(sizes) == 1
    # Weights and Adam's two moments in fp32, and a step count for each parameter.
    assert sizes.pop() > 3 * 4 * 15_000_000


def test_half_halves_the_payload(bench: Bench, folder: Path, tmp_path: Path) -> None:
    done = bench("torch-save-model", "--folder", str(folder), "--half", "--writer", "ds_aio", "--repetitions", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = report_of(tmp_path).cases
    assert 2 * 15_000_000 < case.payload_bytes < 2 * 17_000_000


def test_a_round_trip_gives_the_model_back(bench: Bench, folder: Path, tmp_path: Path) -> None:
    done = bench("torch-save-load-model", "--folder", str(folder), "--safetensors", "--regular_torch_save")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = report_of(tmp_path).cases
    assert {case.writer for case in cases} == {"ds_aio", "torch_save", "safetensors"}
    assert all(case.verified for case in cases)


def test_a_dry_run_counts_the_bytes_and_writes_nothing(bench: Bench, folder: Path, tmp_path: Path) -> None:
    done = bench("torch-save-tensor", "--folder", str(folder), "--mb_size", "1024", "--repetitions", "3", "--dry-run")
    assert done.returncode == 0
    assert "torch_save        4 x 1.000 GiB" in done.stdout
    assert "writes 12.00 GiB in all" in done.stdout
    assert not list(folder.iterdir())
    assert not (tmp_path / "runtime").exists()


def test_a_dry_run_refuses_when_the_folder_lacks_the_space(bench: Bench, folder: Path) -> None:
    done = bench("torch-save-tensor", "--folder", str(folder), "--mb_size", str(10**9), "--dry-run")
    assert done.returncode != 0
    assert "of space" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torch-save-tensor", "--folder", "/nowhere/at/all"], "folder /nowhere/at/all does not exist; create it"),
        (["torch-save-tensor", "--folder", "/etc/hostname"], "is not a folder"),
        (["torch-save-tensor", "--folder", "/proc"], "cannot write in folder /proc"),
        (["torch-save-tensor", "--mb_size", "-5"], "--mb_size"),
        (["torch-save-tensor", "--io_buffer_mb", "0"], "--io_buffer_mb"),
        (["torch-save-tensor", "--writer", "ds_aoi"], "unknown writer 'ds_aoi' (did you mean ds_aio?)"),
        (["torch-save-model", "--model", "gpt2-lrage"], "unknown model 'gpt2-lrage' (did you mean gpt2-large?)"),
        (["torch-save-model", "--optimizer", "--half"], "optimizer with half needs gpu"),
        (["deepspeed-save-model", "--zero_stage", "4"], "--zero_stage"),
        (["run", "quik"], "unknown plan 'quik' (did you mean quick?)"),
        (["run", "quick", "--run-id", "../evil"], "run id '../evil' is not of the form"),
    ],
)
def test_bad_input_is_one_clear_line_and_a_non_zero_exit(bench: Bench, arguments: list[str], words: str) -> None:
    done = bench(*arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_where_nothing_can_run_the_last_line_says_so(bench: Bench, folder: Path) -> None:
    done = bench("torch-save-tensor", "--folder", str(folder), "--writer", "ds_gds")
    assert done.returncode == 4
    *_, told, report = done.stdout.splitlines()
    assert told.startswith("SKIPPED: nothing could be run here; the first reason: GPUDirect Storage needs a GPU")
    assert report.startswith("report: ")


def test_a_typo_in_a_plan_names_the_near_key(bench: Bench, tmp_path: Path) -> None:
    done = bench("run", str(write_plan(tmp_path / "my.yml", repetition=3)))
    assert done.returncode != 0
    assert "unknown key repetition (did you mean repetitions?)" in done.stderr


def test_a_buffer_that_does_not_fit_fails_its_row_with_one_that_does(
    bench: Bench, folder: Path, tmp_path: Path
) -> None:
    benchmark = {
        "workload": "tensor",
        "writers": ["torch_save", "ds_aio"],
        "options": {"size_bytes": 1_000_000, "io_buffer_bytes": 1000},
    }
    plan = write_plan(tmp_path / "my.yml", benchmarks=[benchmark])
    done = bench("run", str(plan), "--folder", str(folder), "--no-ceiling")
    rows = rows_of(done.stdout)
    assert LOG_LINE.match(rows["test_save"])
    assert re.search(r"failed: .*multiple of \d+ bytes, for example \d+", rows["test_ds_aio_fast_save"])
    assert "FAILED: 1 of 2 rows; the first: tensor, io_buffer_bytes 1000: ds_aio: " in done.stdout.splitlines()[-2]
    assert done.returncode == 4


@pytest.mark.parametrize("how", [["-O"], []])
def test_python_without_asserts_is_refused(how: list[str], tmp_path: Path, runtime_root: Path) -> None:
    more = {} if how else {"PYTHONOPTIMIZE": "1"}
    done = subprocess.run(
        [sys.executable, *how, "-m", "bench", "run", "quick"],
        env=bench_environment(tmp_path, runtime_root, **more),
        cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "refusing to run under python -O" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_half_written_and_says_so(
    number: signal.Signals, tmp_path: Path, folder: Path, runtime_root: Path
) -> None:
    arguments = ["torch-save-tensor", "--folder", str(folder), "--mb_size", "256", "--repetitions", "500"]
    with started(tmp_path, runtime_root, *arguments) as process:
        await_phase(tmp_path, "save")
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in output
    assert "Traceback" not in output
    assert not list(folder.iterdir())
    (status,) = (tmp_path / "runtime").glob("runs/*/status.json")
    assert parse_status(status.read_bytes(), str(status)).state == "interrupted"
    report = report_of(tmp_path)
    assert report.interrupted is True
    assert {case.reason for case in report.cases if case.status == "failed"} == {"the run was interrupted"}


def test_a_killed_case_costs_its_own_row_only(tmp_path: Path, folder: Path, runtime_root: Path) -> None:
    arguments = ["--folder", str(folder), "--mb_size", "64", "--repetitions", "8"]
    with started(
        tmp_path, runtime_root, "torch-save-tensor", *arguments, "--writer", "torch_save", "--writer", "ds_python"
    ) as process:
        await_phase(tmp_path, "save")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
    rows = rows_of(output)
    assert process.returncode == 4
    assert "killed by SIGKILL; out of memory? see dmesg" in rows["test_save"]
    assert LOG_LINE.match(rows["test_ds_py_save"])


def test_a_second_run_on_the_same_host_is_told_who_runs(
    bench: Bench, tmp_path: Path, folder: Path, runtime_root: Path
) -> None:
    arguments = ["torch-save-tensor", "--folder", str(folder), "--mb_size", "64", "--repetitions", "500"]
    with started(tmp_path, runtime_root, *arguments) as process:
        status = await_phase(tmp_path, "save")
        second = bench("torch-save-tensor", "--folder", str(folder), *SMALL)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert second.returncode == 1
    assert status.run_id in second.stderr
    assert str(process.pid) in second.stderr


def test_until_stable_goes_on_to_its_cap_or_to_five_that_agree(bench: Bench, folder: Path, tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "my.yml", repetitions=3, until_stable=True, max_repetitions=9)
    done = bench("run", str(plan), "--folder", str(folder), "--no-ceiling")
    assert done.returncode == 0, done.stdout + done.stderr
    for case in report_of(tmp_path).cases:
        seconds = [sample.durable_seconds for sample in case.samples]
        assert 6 <= len(seconds) <= 9
        if len(seconds) < 9:
            # The sample that is verified comes after the five that agreed.
            assert (max(seconds[-6:-1]) - min(seconds[-6:-1])) / sorted(seconds[-6:-1])[2] <= 0.05
        assert case.verified is True


def test_sustained_counts_the_second_half_and_keeps_the_rate_over_time(
    bench: Bench, folder: Path, tmp_path: Path
) -> None:
    plan = write_plan(tmp_path / "my.yml")
    done = bench("run", str(plan), "--folder", str(folder), "--no-ceiling", "--sustained", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    for case in report_of(tmp_path).cases:
        moments = [sample.at_seconds for sample in case.samples]
        assert moments == sorted(moments)
        assert moments[-1] - moments[0] >= 3
        for sample in case.samples[:-1]:
            assert sample.warmup == (sample.at_seconds - moments[0] < 1.5)


def test_the_report_has_the_ceiling_before_and_after_and_the_share_of_it(
    bench: Bench, folder: Path, tmp_path: Path
) -> None:
    done = bench("run", str(write_plan(tmp_path / "my.yml")), "--folder", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(tmp_path)
    assert report.ceiling is not None
    assert report.ceiling.before_write_bytes_per_second
    assert report.ceiling.after_write_bytes_per_second
    assert report.ceiling.read_bytes_per_second
    for case in report.cases:
        share = case.durable_bytes_per_second / report.ceiling.write_bytes_per_second
        assert case.ceiling_share == pytest.approx(share)
    assert set(report.time_spent) >= {"ceiling", "setup", "saves", "verify", "rest"}
    assert not list(folder.iterdir())
