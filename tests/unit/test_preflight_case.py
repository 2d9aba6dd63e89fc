"""Can a case run on a host? From what the host says of itself, one story a test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.host.preflight import FolderError, Host, check_case, check_folder, needed_aio_slots, space_needed
from bench.plan import GIB, Case, Options

HOST = Host(memory_available_bytes=64 * GIB, free_bytes=100 * GIB, gpu_count=0, direct=True, aio_slots=65536)


def case(writer: str = "ds_aio", **options: object) -> Case:
    return Case(workload="tensor", writer=writer, options=Options(**options))  # type: ignore[arg-type]


def test_a_case_that_fits_may_run() -> None:
    assert check_case(case(), HOST) is None


@pytest.mark.parametrize(
    ("wanted", "host", "status", "words"),
    [
        (case("ds_gds"), HOST, "skipped", "needs a GPU"),
        (case("torch_save", gpu=True), HOST, "skipped", "nvidia-smi shows none"),
        (case("torch_save", gpu=True, device=2), replace(HOST, gpu_count=2), "failed", "this host has 2 GPUs"),
        (case("ds_aio"), replace(HOST, direct=False), "skipped", "refuses O_DIRECT"),
        (case("ds_aio", queue_depth=128), replace(HOST, aio_slots=200), "failed", "fs.aio-max-nr"),
        (case(size_bytes=200 * GIB), replace(HOST, memory_available_bytes=900 * GIB), "failed", "of space"),
        (case(size_bytes=80 * GIB), HOST, "skipped", "of memory"),
        (
            case(size_bytes=60 * GIB, gpu=True, device=1),
            replace(HOST, gpu_count=2, gpu_free_bytes=(140 * GIB, 20 * GIB)),
            "skipped",
            "on GPU 1, 20.0 GiB are free",
        ),
    ],
)
def test_a_case_that_does_not_fit_is_refused_with_its_reason(wanted: Case, host: Host, status: str, words: str) -> None:
    refusal = check_case(wanted, host)
    assert refusal is not None
    assert refusal.status == status
    assert words in refusal.reason


def test_data_on_the_gpu_needs_its_memory_and_not_the_hosts() -> None:
    on_gpu = case(size_bytes=80 * GIB, gpu=True)
    assert check_case(on_gpu, replace(HOST, gpu_count=1, gpu_free_bytes=(140 * GIB,))) is None
    # nvidia-smi did not say: torch will.
    assert check_case(on_gpu, replace(HOST, gpu_count=1)) is None


def test_plain_torch_needs_no_direct_io() -> None:
    assert check_case(case("torch_save"), replace(HOST, direct=False)) is None


def test_mock_writes_nothing_so_needs_no_space() -> None:
    assert space_needed([case("ds_mock", size_bytes=10 * GIB)]) == 0
    assert space_needed([case("ds_mock"), case("torch_save", size_bytes=10 * GIB)]) > 10 * GIB


def test_slots_grow_with_depth_and_threads() -> None:
    assert needed_aio_slots(case(queue_depth=32, intra_op_parallelism=4)) > needed_aio_slots(case(queue_depth=8))


def test_a_folder_that_is_missing_or_a_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"does not exist; create it"):
        check_folder(tmp_path / "none")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FolderError, match="is not a folder"):
        check_folder(file)
    check_folder(tmp_path)
