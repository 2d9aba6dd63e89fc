"""DeepSpeed's file writers behind torch.save: mock, Python, and FastPersist over libaio or cuFile."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from bench.host import deepspeed_cpu
from bench.host.workloads.base import Saved, SkipCaseError
from bench.host.writers.base import Writer

# Names of the counters in DeepSpeed's writers (deepspeed/io/constants.py, 0.19.8).
STORAGES_COUNT = "save_storage"
BYTES_COUNT = "bytes"


class DeepSpeedWriter(Writer):
    """A writer object of DeepSpeed's, made anew for every save as its users make it."""

    def save(self, obj: Any, path: Path) -> Saved:
        file = self._open(path)
        try:
            torch.save(obj, file, _use_new_zipfile_serialization=self.context.options.zipfile)
        finally:
            file.close()
        return saved_by(file, path)

    def _open(self, path: Path) -> Any:
        raise NotImplementedError


class Mock(DeepSpeedWriter):
    """Counts bytes and writes none: how fast serialization alone is. Never a storage rate."""

    def _open(self, path: Path) -> Any:
        from deepspeed.io import MockFileWriter

        return MockFileWriter(str(path))


class Python(DeepSpeedWriter):
    """Python's own buffered file behind DeepSpeed's interface; has no hook method, so torch writes it."""

    def _open(self, path: Path) -> Any:
        from deepspeed.io import PyFileWriter

        return PyFileWriter(str(path))


class FastPersist(DeepSpeedWriter):
    """DeepSpeed's FastFileWriter: storages copied through a pinned buffer, written with O_DIRECT."""

    def prepare(self) -> None:
        options = self.context.options
        deepspeed_cpu.install(self.context.logical_block_bytes)
        self._handle = deepspeed_cpu.AlignedHandle(self._make_handle(), self.context.logical_block_bytes)
        deepspeed_cpu.check_buffer(options.io_buffer_bytes, self._handle, options.double_buffer)
        self._buffer = self._make_buffer(options.io_buffer_bytes)

    def _open(self, path: Path) -> Any:
        from deepspeed.io import FastFileWriter, FastFileWriterConfig

        config = FastFileWriterConfig(
            dnvme_handle=self._handle,
            pinned_tensor=self._buffer,
            double_buffer=self.context.options.double_buffer,
            num_parallel_writers=1,
            writer_rank=0,
        )
        return FastFileWriter(file_path=str(path), config=config)

    def _make_handle(self) -> Any:
        raise NotImplementedError

    def _make_buffer(self, size: int) -> torch.Tensor:
        raise NotImplementedError


class Aio(FastPersist):
    """FastPersist over libaio with a page-locked buffer in host memory."""

    def _make_handle(self) -> Any:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return AsyncIOBuilder().load(verbose=False).aio_handle(**self.context.handle_options())

    def _make_buffer(self, size: int) -> torch.Tensor:
        if self.context.device.type == "cuda":
            return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        return deepspeed_cpu.locked_buffer(self._handle, size)

    def close(self) -> None:
        if self.context.device.type != "cuda":
            with contextlib.suppress(AttributeError):  # prepare() did not get that far
                self._handle.free_cpu_locked_tensor(self._buffer)


class Gds(FastPersist):
    """FastPersist over NVIDIA GPUDirect Storage with a registered buffer in GPU memory."""

    def prepare(self) -> None:
        if self.context.device.type != "cuda":
            raise SkipCaseError("GPUDirect Storage needs a GPU; give --gpu on a host that has one")
        super().prepare()

    def _make_handle(self) -> Any:
        from deepspeed.ops.op_builder import GDSBuilder

        return GDSBuilder().load(verbose=False).gds_handle(**self.context.handle_options())

    def _make_buffer(self, size: int) -> torch.Tensor:
        buffer = torch.zeros(size, dtype=torch.uint8, device=self.context.device)
        self._handle.pin_device_tensor(buffer)
        return buffer

    def close(self) -> None:
        with contextlib.suppress(AttributeError):  # prepare() did not get that far
            self._handle.unpin_device_tensor(self._buffer)


WRITERS: dict[str, type[DeepSpeedWriter]] = {"ds_mock": Mock, "ds_python": Python, "ds_aio": Aio, "ds_gds": Gds}


def saved_by(file: Any, path: Path) -> Saved:
    """What a DeepSpeed writer, already closed, says it did."""
    statistics = {key: value for key, value in file._stats.items() if key != "path"}
    _add_speeds(statistics)
    return Saved(
        files=[path],
        promised_bytes=None if type(file).__name__ == "MockFileWriter" else int(statistics[BYTES_COUNT]),
        statistics=statistics,
        hook_storages=int(statistics[STORAGES_COUNT]) if STORAGES_COUNT in statistics else None,
    )


def _add_speeds(statistics: dict[str, Any]) -> None:
    # The writer computes these only while it prints them; the unit in their names is 1024^3 bytes.
    for speed, size, seconds in (
        ("write_GB/s", "bytes", "write_secs"),
        ("aio_GB/s", "aio_bytes", "aio_write_secs"),
        ("fill_buffer_GB/s", "aio_bytes", "fill_buffer_secs"),
    ):
        if statistics.get(seconds):
            statistics[speed] = statistics[size] / statistics[seconds] / 1024**3
