"""make gpu-check and the GPU plans: one command on a node that has nothing but its own Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.plan import GIB, WRITER_TAGS, load_plan

CHECKOUT = Path(__file__).resolve().parents[2]


def dry(*arguments: str) -> str:
    command = ["make", "--dry-run", "--no-print-directory", "gpu-check", *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout


def test_it_builds_the_ops_and_runs_the_plan_without_touching_torch() -> None:
    lines = dry("GPU_PYTHON=/opt/python").splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("'/opt/python' -m bench ops build")
    assert "'/opt/python' -m bench run 'gpu' --gpu --no-patch" in lines[1]


def test_it_installs_nothing_on_the_node() -> None:
    text = dry("GPU_PYTHON=/opt/python")
    assert "controller-venv" not in text
    assert "pip" not in text


def test_a_python_without_what_bench_needs_is_told_in_one_line() -> None:
    # -S leaves out the installed packages.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "bench"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "lacks the Python package" in done.stderr
    assert "requirements/host.in" in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_folder_and_arguments_are_passed_on() -> None:
    text = dry("GPU_PYTHON=p", "PLAN=gpu-phi3", "FOLDER=/mnt/array", "ARGS=--device 3")
    assert "run 'gpu-phi3' --gpu --no-patch --folder '/mnt/array' --device 3" in text


@pytest.mark.parametrize("name", ["gpu", "gpu-phi3"])
def test_the_gpu_plans_have_every_writer_side_by_side_on_the_gpu(name: str) -> None:
    plan = load_plan(name)
    first = plan.benchmarks[0]
    alike = [benchmark for benchmark in plan.benchmarks if benchmark.options == first.options]
    assert {writer for benchmark in alike for writer in benchmark.writers} == set(WRITER_TAGS)
    assert all(case.options.gpu for case in plan.cases())


def test_the_gpu_plan_has_what_only_a_gpu_can_do() -> None:
    options = [case.options for case in load_plan("gpu").cases()]
    assert {one.zero_stage for one in options} == {0, 1, 2, 3}
    assert any(one.half and one.optimizer and one.fused for one in options)
    assert any(one.cpu_offload for one in options)


def test_phi3_is_the_published_size() -> None:
    from bench.host.estimate import gpu_memory_bytes, payload_bytes

    (case, *_) = load_plan("gpu-phi3").cases()
    size = payload_bytes(case)
    assert size is not None
    assert round(size / GIB, 3) == 14.235
    assert gpu_memory_bytes(case) > size


def test_all_that_write_phi3_are_taken_in_turns_on_an_h200() -> None:
    from bench.host.estimate import gpu_memory_bytes
    from bench.host.run import GPU_MEMORY_SHARE

    plan = load_plan("gpu-phi3")
    writing = [case for case in plan.cases() if case.writer in plan.benchmarks[0].writers]
    assert len(writing) == 8
    h200_free_bytes = 149_600_000_000  # what nvidia-smi calls free on an idle one
    assert sum(map(gpu_memory_bytes, writing)) < GPU_MEMORY_SHARE * h200_free_bytes


def test_what_could_not_be_built_is_named_with_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.cli import _print_ops
    from bench.host.ops import OpsState

    _print_ops(OpsState("key", Path("/ops/key"), ["pin_memory", "async_io", "utils"], ["gds", "fused_adam"]), False)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("gds could not be built")]
    assert "cuFile's headers" in lines[-2]
    assert "nvcc" in lines[-1]
