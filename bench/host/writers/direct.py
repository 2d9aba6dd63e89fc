"""Our own writer behind torch's hook: one thread fills a pinned buffer while another writes the last one.

What it shows is how much of DeepSpeed's rate comes from libaio and how much from the idea: storages in one
call, page-locked memory, O_DIRECT, copying and writing at the same time. Every write's result is looked at.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.host.workloads.base import Saved
from bench.host.writers.base import Writer

PAGE_BYTES = mmap.PAGESIZE
FALLOC_FL_KEEP_SIZE = 1  # linux/falloc.h
LENGTH_BYTES = 8


class DirectWriter(Writer):
    """Hook, pinned buffer (two halves in turns with ``double_buffer``), a thread that writes with O_DIRECT."""

    def prepare(self) -> None:
        options = self.context.options
        # Memory for O_DIRECT must be aligned too; a page suits every device that this kernel can have.
        self._alignment = math.lcm(self.context.logical_block_bytes, PAGE_BYTES)
        count = 2 if options.double_buffer else 1
        size = options.io_buffer_bytes // count // self._alignment * self._alignment
        if size == 0:
            raise ValueError(
                f"an I/O buffer of {options.io_buffer_bytes} bytes is too small: the direct writer needs "
                f"{count} x {self._alignment} bytes at least"
            )
        on_gpu = self.context.device.type == "cuda"
        self._buffers = [_pinned(size) if on_gpu else _paged(size) for _ in range(count)]
        self._block_bytes = self.context.handle_options()["block_size"]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="direct-writer")
        # Started here, so that no save pays for it.
        self._thread.submit(int).result()

    def save(self, obj: Any, path: Path) -> Saved:
        file = DirectFile(path, self._buffers, self._thread, self._alignment, self._block_bytes)
        try:
            torch.save(obj, file, _use_new_zipfile_serialization=self.context.options.zipfile)
        except BaseException:
            file.abandon()
            raise
        file.close()
        return Saved(
            files=[path],
            promised_bytes=file.size,
            statistics=file.statistics(),
            hook_storages=file.storages,
        )

    def close(self) -> None:
        if hasattr(self, "_thread"):
            self._thread.shutdown()


class DirectFile:
    """A file object for ``torch.save`` with the hook's method.

    ``buffers``: page-aligned uint8 tensors in host memory, equally large and a multiple of ``alignment``,
    used in turns. ``thread`` writes them, ``block_bytes`` at a time. Raises OSError with the errno of the
    first write that failed, at the next write or at the latest in :meth:`close`.
    """

    def __init__(
        self, path: Path, buffers: list[torch.Tensor], thread: ThreadPoolExecutor, alignment: int, block_bytes: int
    ) -> None:
        self.path = path
        self.size = 0
        self.storages = 0
        self._buffers = buffers
        self._views = [_view(buffer) for buffer in buffers]
        self._thread = thread
        self._alignment = alignment
        self._block_bytes = max(alignment, block_bytes // alignment * alignment)
        self._turn = 0
        self._filled = 0
        self._written = 0
        self._pending: list[Future[None]] = []
        self._fill_seconds = self._wait_seconds = self._write_seconds = 0.0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)

    def write(self, data: Any) -> int:
        """Append bytes; what torch pickles, a little at a time."""
        piece = memoryview(data).cast("B")
        done = 0
        while done < len(piece):
            take = min(len(piece) - done, self._room())
            self._views[self._turn][self._filled : self._filled + take] = piece[done : done + take]
            done += take
            self._advance(take)
        return len(piece)

    def flush(self) -> None:
        """Nothing to do: what is written is in order, and :meth:`close` writes the rest."""

    def save_torch_storage_object_list(self, storages: list[tuple[Any, torch.dtype]], save_size: bool) -> None:
        """Append the storages as the legacy format has them: element count (int64, little-endian), then bytes."""
        self._reserve(self.size + sum(storage.nbytes() + LENGTH_BYTES * save_size for storage, _ in storages))
        for storage, dtype in storages:
            if save_size:
                count = storage.nbytes() // torch._utils._element_size(dtype)
                self.write(count.to_bytes(LENGTH_BYTES, "little"))
            self._copy(_bytes_of(storage))
            self.storages += 1

    def close(self) -> None:
        """Write the rest, padded to the device's block, and cut the file to its true size."""
        try:
            if self._filled:
                padded = math.ceil(self._filled / self._alignment) * self._alignment
                self._views[self._turn][self._filled : padded] = bytes(padded - self._filled)
                self._submit(padded)
            self._wait(0)
            os.ftruncate(self._descriptor, self.size)
        except BaseException:
            self.abandon()
            raise
        self._close()

    def abandon(self) -> None:
        """Close after an error; nothing more is written."""
        for future in self._pending:
            future.cancel()
        for future in self._pending:
            if not future.cancelled():
                future.exception()
        self._pending.clear()
        self._close()

    def statistics(self) -> dict[str, Any]:
        """Counts and seconds: filling buffers, waiting for the writing thread, and that thread's own writes."""
        return {
            "save_storage": self.storages,
            "bytes": self.size,
            "fill_buffer_secs": self._fill_seconds,
            "wait_secs": self._wait_seconds,
            "write_secs": self._write_seconds,
        }

    def _copy(self, source: torch.Tensor) -> None:
        done, count = 0, source.numel()
        while done < count:
            take = min(count - done, self._room())
            start = time.perf_counter()
            # From a GPU this returns when the bytes have arrived: the buffer may be written at once.
            self._buffers[self._turn][self._filled : self._filled + take].copy_(source[done : done + take])
            self._fill_seconds += time.perf_counter() - start
            done += take
            self._advance(take)

    def _room(self) -> int:
        return self._buffers[self._turn].numel() - self._filled

    def _advance(self, count: int) -> None:
        self._filled += count
        self.size += count
        if not self._room():
            self._submit(self._filled)

    def _submit(self, count: int) -> None:
        """Hand the current buffer to the writing thread and wait until the next one is free."""
        self._pending.append(self._thread.submit(self._write_out, self._views[self._turn][:count], self._written))
        self._written += count
        self._filled = 0
        self._turn = (self._turn + 1) % len(self._buffers)
        self._wait(len(self._buffers) - 1)

    def _wait(self, allowed: int) -> None:
        """Until at most ``allowed`` buffers are being written; raises what a write raised."""
        start = time.perf_counter()
        while len(self._pending) > allowed:
            self._pending.pop(0).result()
        self._wait_seconds += time.perf_counter() - start

    def _write_out(self, view: memoryview, offset: int) -> None:
        """In the writing thread: all of ``view`` at ``offset``, or OSError."""
        start = time.perf_counter()
        done = 0
        while done < len(view):
            count = os.pwrite(self._descriptor, view[done : done + self._block_bytes], offset + done)
            # A short write on a full or failing device; going on from an unaligned offset would give EINVAL.
            if count == 0 or count % self._alignment:
                raise OSError(
                    errno.EIO, f"wrote {count} of {min(self._block_bytes, len(view) - done)} bytes", str(self.path)
                )
            done += count
        self._write_seconds += time.perf_counter() - start

    def _reserve(self, size: int) -> None:
        """Ask for the space before the first byte, without growing the file: a full disk shows at once."""
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (ctypes.c_int(self._descriptor), FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size))
        if libc.fallocate64(*arguments) == 0:
            return
        number = ctypes.get_errno()
        # A filesystem without space keeps what it could find: give it back at once.
        os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size)
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
            raise OSError(number, os.strerror(number), str(self.path))

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _bytes_of(storage: Any) -> torch.Tensor:
    """The bytes of a storage as a uint8 tensor that shares its memory."""
    untyped = storage._untyped_storage if hasattr(storage, "_untyped_storage") else storage
    return torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped, 0, (untyped.nbytes(),), (1,))


def _pinned(size: int) -> torch.Tensor:
    """Page-locked host memory that the GPU copies to at full speed; CUDA aligns it to pages."""
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)


def _paged(size: int) -> torch.Tensor:
    """Host memory on page boundaries, touched so that no save pays for its pages."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).zero_()


def _view(buffer: torch.Tensor) -> memoryview:
    """The tensor's memory for os.pwrite."""
    array = (ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr())
    return memoryview(array).cast("B")
