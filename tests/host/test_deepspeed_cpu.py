"""DeepSpeed's fast writer on a host without an accelerator, and what its own parts get wrong."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.host import deepspeed_cpu

DTYPES = [
    torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.fixture(scope="module")
def handle(ready_ops: None):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load(verbose=False).aio_handle(1024**2, 8, False, False, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_cast_shows_every_byte_without_a_copy(dtype: torch.dtype, count: int) -> None:
    raw = torch.arange(count * torch.empty(0, dtype=dtype).element_size(), dtype=torch.uint8)
    tensor = torch.empty(0, dtype=dtype).set_(raw.untyped_storage())
    flat = deepspeed_cpu.cast_to_byte_tensor(tensor)
    assert flat.dtype == torch.uint8
    assert torch.equal(flat, raw)
    assert flat.data_ptr() == raw.data_ptr()


def test_cast_keeps_the_size_header_alive() -> None:
    # Freed size headers are overwritten by the next allocations of eight bytes (TRAPS 1).
    headers = deepspeed_cpu.cast_to_byte_tensor([torch.tensor(n, dtype=torch.int64) for n in range(500)])
    gc.collect()
    overwriting = [torch.full((), -1, dtype=torch.int64) for _ in range(2000)]
    assert [int(header.view(torch.int64)) for header in headers] == list(range(500))
    del overwriting


def test_cast_of_a_slice_starts_at_its_offset() -> None:
    tensor = torch.arange(10, dtype=torch.int16)[3:6]
    assert deepspeed_cpu.cast_to_byte_tensor(tensor).tolist() == [3, 0, 4, 0, 5, 0]


def test_cast_refuses_what_has_holes() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        deepspeed_cpu.cast_to_byte_tensor(torch.zeros(4, 4).t())


@pytest.mark.parametrize(("block", "expected"), [(512, 1024), (4096, 8192), (520, 2 * 33280)])
def test_alignment_covers_every_thread_and_the_device(handle, block: int, expected: int) -> None:
    aligned = deepspeed_cpu.AlignedHandle(handle, block)
    assert aligned.get_alignment() == expected
    assert aligned.get_queue_depth() == 8


def test_locked_buffer_is_page_locked(handle) -> None:
    buffer = deepspeed_cpu.locked_buffer(handle, 1024**2)
    assert handle.is_pinned(buffer)
    assert buffer.numel() == 1024**2
    assert not buffer.any()
    assert handle.free_cpu_locked_tensor(buffer)


def test_too_small_a_memlock_limit_is_told_and_does_not_abort(ready_ops: None) -> None:
    program = (
        "import os, resource\n"
        "from bench import layout\n"
        "from bench.host import deepspeed_cpu as d, ops\n"
        "ops.activate(layout.default_runtime_root())\n"
        "from deepspeed.ops.op_builder import AsyncIOBuilder\n"
        "handle = AsyncIOBuilder().load(verbose=False).aio_handle(1 << 20, 8, False, False, 1)\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "os.setuid(65534) if os.getuid() == 0 else None\n"
        "try:\n    d.locked_buffer(handle, 1 << 20)\n"
        "except d.IoBufferError as error:\n    print('TOLD', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "RLIMIT_MEMLOCK is 65536 bytes" in done.stdout
    assert "ulimit -l 1024" in done.stdout
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != 65536


@pytest.mark.parametrize(("nbytes", "double"), [(0, False), (-8, True), (1000, False), (8192 + 1024, True)])
def test_a_buffer_that_does_not_divide_is_refused_with_the_right_size(handle, nbytes: int, double: bool) -> None:
    aligned = deepspeed_cpu.AlignedHandle(handle, 4096)
    with pytest.raises(deepspeed_cpu.IoBufferError, match=r"for example \d+") as refused:
        deepspeed_cpu.check_buffer(nbytes, aligned, double)
    deepspeed_cpu.check_buffer(int(str(refused.value).rsplit(" ", 1)[1]), aligned, double)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("block", [512, 4096])
def test_fast_writer_writes_true_files(handle, tmp_path: Path, double: bool, block: int) -> None:
    deepspeed_cpu.install(block)
    from deepspeed.io import FastFileWriter, FastFileWriterConfig

    aligned = deepspeed_cpu.AlignedHandle(handle, block)
    buffer = deepspeed_cpu.locked_buffer(handle, 4 * aligned.get_alignment())
    storages = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (0, 1, 7, 100_003)]
    path = tmp_path / "file"
    writer = FastFileWriter(str(path), FastFileWriterConfig(aligned, buffer, double))
    writer.write(b"head")
    objects = [(tensor.untyped_storage(), torch.uint8) for tensor in storages]
    writer.save_torch_storage_object_list(objects, True)
    writer.close()
    expected = b"head" + b"".join(len(tensor).to_bytes(8, "little") + bytes(tensor.tolist()) for tensor in storages)
    assert path.read_bytes() == expected
    handle.free_cpu_locked_tensor(buffer)
