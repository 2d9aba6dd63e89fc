"""On a GPU: every writer against every kind of storage, the gds op end to end, and what a host without one is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from benching import CHECKOUT, Bench, report_of, rows_of

from bench.host import gpu, hook, models, ops
from bench.host.cuda import find_cuda
from bench.host.verify import compare
from bench.host.workloads.base import SkipCaseError
from bench.host.writers import make_writer
from bench.host.writers.base import Writer, WriterContext, logical_block_bytes
from bench.plan import Options

HAS_GPU = Path("/proc/driver/nvidia").exists() and torch.cuda.is_available()
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs GPU: data on one, copied through pinned memory")
IO_BUFFER_BYTES = 1024**2
OPTIONS = {
    "torch_save": Options(gpu=True),
    "torch_save_zip": Options(gpu=True),
    "torch_save_tuned": Options(gpu=True),
    "ds_python": Options(gpu=True),
    "ds_aio": Options(gpu=True, io_buffer_bytes=IO_BUFFER_BYTES),
    "direct": Options(gpu=True, io_buffer_bytes=IO_BUFFER_BYTES),
    "safetensors": Options(gpu=True),
    "dcp": Options(gpu=True),
}


@pytest.fixture
def hooked(runtime_root: Path) -> None:
    """The ops and the hook in this process, also where torch's file is not patched."""
    ops.activate(runtime_root)
    hook.install_in_process()


def noise(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    from bench.host.randomness import fill_random_

    return fill_random_(torch.empty(count, dtype=dtype, device="cuda"), 7)


def objects() -> dict[str, object]:
    whole = noise(3000, torch.float32)
    return {
        "one byte": noise(1),
        "0-dim": torch.tensor(1.25, device="cuda", dtype=torch.float64),
        "bfloat16": noise(1001, torch.bfloat16),
        "bool": torch.tensor([True, False, True], device="cuda"),
        "zero bytes and a scalar": {"a": torch.empty(0, device="cuda"), "b": torch.tensor(3.5)},
        "shared": {"whole": whole, "view": whole[1000:], "again": whole},
        "GPU and host": {"gpu": noise(4097), "host": noise(513).cpu()},
        "non-contiguous": noise(600, torch.float32).reshape(20, 30).t(),
        "several buffers and a byte": noise(5 * IO_BUFFER_BYTES + 1),
    }


def writer_for(name: str, folder: Path) -> Writer:
    context = WriterContext("model", OPTIONS[name], torch.device("cuda:0"), folder, logical_block_bytes(folder))
    writer = make_writer(name, context)
    writer.prepare()
    return writer


@on_gpu
@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("name", OPTIONS)
def test_what_lies_on_the_gpu_is_what_lies_in_the_file(name: str, tmp_path: Path) -> None:
    writer = writer_for(name, tmp_path)
    for number, (what, obj) in enumerate(objects().items()):
        path = tmp_path / f"{number}.pt"
        saved = writer.save(obj, path)
        assert saved.promised_bytes in (None, sum(file.stat().st_size for file in saved.files)), what
        writer.verify(obj, saved)
        if name not in ("safetensors", "dcp"):
            compare(obj, writer.load(path))
    writer.close()


@on_gpu
@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("name", ["ds_aio", "direct"])
def test_from_the_gpu_the_file_is_byte_for_byte_what_plain_torch_writes(name: str, tmp_path: Path) -> None:
    obj = objects()
    writer_for(name, tmp_path).save(obj, tmp_path / "theirs.pt")
    torch.save(obj, tmp_path / "plain.pt", _use_new_zipfile_serialization=False)
    assert (tmp_path / "theirs.pt").read_bytes() == (tmp_path / "plain.pt").read_bytes()


@on_gpu
@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("name", ["ds_aio", "direct"])
def test_the_buffer_is_memory_that_the_gpu_copies_to_directly(name: str, tmp_path: Path) -> None:
    writer = writer_for(name, tmp_path)
    buffers = writer._buffers if name == "direct" else [writer._buffer]
    assert all(buffer.is_pinned() for buffer in buffers)


@on_gpu
def test_tuned_copies_through_pinned_memory_where_this_torch_can(tmp_path: Path) -> None:
    saved = writer_for("torch_save_tuned", tmp_path).save(noise(5000), tmp_path / "tuned.pt")
    newer = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) >= (2, 7)
    assert saved.statistics == {"crc32": False, "pinned_copies": newer}


@on_gpu
def test_random_data_on_the_gpu_is_given_by_its_seed_and_full_range() -> None:
    from bench.host.randomness import fill_random_

    once, again = (fill_random_(torch.empty(100_003, dtype=torch.uint8, device="cuda"), 11) for _ in range(2))
    assert torch.equal(once, again)
    assert len(once.unique()) == 256


@pytest.mark.skipif(not HAS_GPU or shutil.which("nvcc") is None, reason="needs GPU and nvcc: fused Adam is a CUDA op")
@pytest.mark.usefixtures("hooked")
def test_the_fused_optimizer_that_provisioning_built_has_its_moments_on_the_gpu() -> None:
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = models.make_optimizer(model, fused=True, seed=3)
    state = optimizer.state_dict()["state"]
    assert all(moment["exp_avg"].is_cuda for moment in state.values())


@on_gpu
def test_a_device_that_is_not_there_is_named(bench: Bench, tmp_path: Path) -> None:
    done = bench("torch-save-tensor", "--gpu", "--device", "63", "--mb_size", "1", "--folder", str(tmp_path),
                 "--no-patch", "--writer", "torch_save")  # fmt: skip
    assert done.returncode == 4
    assert "--device 63 is not there" in done.stdout


# --- GPUDirect Storage ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def cufile_double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for cuFile, compiled against the CUDA headers that the ops were built with."""
    folder = tmp_path_factory.mktemp("double")
    cuda = find_cuda(ops.this_target().cuda, folder / "cuda")
    library = folder / "libcufile_double.so"
    source = CHECKOUT / "tests" / "host" / "cufile_double" / "cufile_double.c"
    # Not linked with CUDA: it is loaded before torch, and takes torch's CUDA when it is first called.
    command = ["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Wl,-z,lazy", f"-I{cuda.home / 'include'}",
               str(source), "-o", str(library)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


GDS = ("--gpu", "--writer", "ds_gds", "--no-patch", "--repetitions", "1", "--warmup", "1", "--io_buffer_mb", "8")


@on_gpu
def test_real_cufile_is_told_truthfully(bench: Bench, tmp_path: Path) -> None:
    before = set(os.listdir(CHECKOUT))
    done = bench("torch-save-tensor", *GDS, "--mb_size", "24", "--folder", str(tmp_path))
    (row,) = report_of(tmp_path).cases
    if row.status == "ok":
        assert row.verified
        assert row.statistics["mechanism"] in ("gds", "gds-compat")
    else:
        assert row.status == "skipped", done.stdout
        assert "cuFile says" in (row.reason or "")
        assert "docs/gds.md" in (row.reason or "")
        assert "test_ds_gds_fast_save -- skipped" in done.stdout
    # DeepSpeed and cuFile write files into the working directory: the case's own, not the user's.
    assert set(os.listdir(CHECKOUT)) == before


@on_gpu
@pytest.mark.parametrize("single", [False, True])
def test_deepspeeds_gds_op_end_to_end_against_the_double(
    bench: Bench, tmp_path: Path, cufile_double: Path, single: bool
) -> None:
    calls = tmp_path / "calls"
    arguments = ["torch-save-tensor", *GDS, "--mb_size", "25", "--folder", str(tmp_path)]
    arguments += ["--single_io_buffer"] * single
    done = bench(*arguments, LD_PRELOAD=str(cufile_double), CUFILE_DOUBLE_LOG=str(calls))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = report_of(tmp_path).cases
    assert row.status == "ok"
    assert row.verified
    assert row.statistics["save_storage"] == 1
    # Never called GDS: the table, the log line and the report say what stood in for cuFile.
    assert row.mechanism == "gds-compat"
    assert str(cufile_double) in row.warnings[0]
    assert "test_ds_gds_compat_fast_save" in rows_of(done.stdout)
    assert "test_ds_gds_fast_save" not in rows_of(done.stdout)
    assert str(cufile_double) in done.stdout
    noted = calls.read_text().split("\n")
    assert f"register {8 * 1024**2} 0" in noted
    assert sum(line.startswith("write ") for line in noted) >= 2 * 3


@on_gpu
def test_cufiles_refusal_of_a_file_skips_the_row(bench: Bench, tmp_path: Path, cufile_double: Path) -> None:
    done = bench("torch-save-tensor", *GDS, "--mb_size", "8", "--folder", str(tmp_path),
                 LD_PRELOAD=str(cufile_double), CUFILE_DOUBLE_REFUSE="5027")  # fmt: skip
    (row,) = report_of(tmp_path).cases
    assert row.status == ("failed" if Path("/proc/driver/nvidia-fs/stats").exists() else "skipped"), done.stdout
    assert "file register error:file descriptor is not registered" in (row.reason or "")


@on_gpu
def test_a_short_write_that_the_op_does_not_notice_fails_the_row(
    bench: Bench, tmp_path: Path, cufile_double: Path
) -> None:
    done = bench("torch-save-tensor", *GDS, "--mb_size", "8", "--folder", str(tmp_path),
                 LD_PRELOAD=str(cufile_double), CUFILE_DOUBLE_SHORT="4096")  # fmt: skip
    (row,) = report_of(tmp_path).cases
    assert done.returncode == 4
    assert row.status == "failed"
    assert row.durable_bytes_per_second is None


@on_gpu
def test_an_engine_through_the_gds_op_against_the_double(bench: Bench, tmp_path: Path, cufile_double: Path) -> None:
    done = bench("deepspeed-save-model", *GDS, "--folder", str(tmp_path), LD_PRELOAD=str(cufile_double))
    (row,) = report_of(tmp_path).cases
    assert row.status == "ok", done.stdout + done.stderr
    assert row.verified
    assert row.mechanism == "gds-compat"


# --- hosts without a GPU -------------------------------------------------------------------------


def test_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(gpu.GpuError, match=r"built without CUDA.*leave out --gpu"):
        gpu.take(0)


def test_a_driver_that_does_not_answer_is_told_in_cudas_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(gpu.GpuError, match=r"Found no NVIDIA driver on your system\.; look at nvidia-smi"):
        gpu.take(0)


@pytest.mark.usefixtures("ready_ops")
def test_gds_asks_for_a_gpu(tmp_path: Path) -> None:
    context = WriterContext("tensor", Options(), torch.device("cpu"), tmp_path, 512)
    with pytest.raises(SkipCaseError, match="needs a GPU"):
        make_writer("ds_gds", context).prepare()


def test_zip_rows_of_fastpersist_warn_in_report_and_terminal(bench: Bench, tmp_path: Path) -> None:
    done = bench("torch-save-tensor", "--zipfile", "--mb_size", "3", "--folder", str(tmp_path), "--no-patch",
                 "--writer", "ds_aio", "--writer", "torch_save", "--repetitions", "1", "--warmup", "0")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    warned = {row.writer: row.warnings for row in report_of(tmp_path).cases}
    assert "not FastPersist" in warned["ds_aio"][0]
    assert warned["torch_save"] == []
    assert done.stdout.count("this is not FastPersist") == 2
