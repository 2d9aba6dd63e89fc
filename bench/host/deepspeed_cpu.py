"""What DeepSpeed's fast writer needs to be safe everywhere and to work without an accelerator.

Nothing of DeepSpeed's is written to: :func:`install` swaps names inside the running process.

* The byte cast. DeepSpeed's C++ cast views memory that it does not own (a freed size header is then
  written as garbage), hands a storage of one byte on uncast, and has no build for hosts without an
  accelerator. :func:`cast_to_byte_tensor` is a view that owns its storage; it copies nothing, so it
  takes the place of the C++ one on every host.
* The page-locked buffer. ``Tensor.pin_memory`` needs an accelerator; the I/O handle's own allocator
  (``mlock``) does not. Hosts with a GPU keep CUDA's pinned memory, which is faster to copy to.
* The alignment. The handle says 512 bytes a thread whatever the device; :class:`AlignedHandle` says
  what the device needs.
* The shared-memory collective, compiled for half a minute when an engine starts on a CPU. A single
  process has no use for it.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import mmap
import os
import resource
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HANDLE_SECTOR_BYTES = 512
# Our attribute on DeepSpeed's writer factory: the block size its handles are to be aligned to.
_BLOCK_BYTES = "_bench_logical_block_bytes"


class IoBufferError(ValueError):
    """An I/O buffer that can't be used; the message says what size or which limit would be right."""


class AlignedHandle:
    """A DeepSpeed I/O handle whose alignment suits a device's logical block size.

    The handle gives each of its threads an equal slice of a write, so a write must be a multiple of
    threads x block for every slice to start and end on a block. Everything else is the handle's own.
    """

    def __init__(self, handle: Any, logical_block_bytes: int) -> None:
        if logical_block_bytes <= 0:
            raise ValueError(f"a logical block size of {logical_block_bytes} bytes is not possible")
        self._handle = handle
        self._sector_bytes = math.lcm(HANDLE_SECTOR_BYTES, logical_block_bytes)

    def get_alignment(self) -> int:
        """Bytes that offset and size of a write must be a multiple of."""
        return int(self._handle.get_intra_op_parallelism()) * self._sector_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def install(logical_block_bytes: int = HANDLE_SECTOR_BYTES) -> None:
    """Prepare this process for DeepSpeed's fast writer; call it before any writer is built.

    ``logical_block_bytes`` is that of the device below the target folder, for the writers that
    DeepSpeed's engine makes. Calling it again only changes that number.
    """
    from deepspeed.io import fast_file_writer
    from deepspeed.runtime.model_checkpointing import writer_factory

    fast_file_writer.UtilsBuilder = _OwningCast
    # By its full name: the package's attribute "torch" is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = _nothing_to_share  # type: ignore[attr-defined]
    factory = writer_factory.CheckpointWriterFactory
    installed = hasattr(factory, _BLOCK_BYTES)
    setattr(factory, _BLOCK_BYTES, logical_block_bytes)
    if installed:
        return
    factory._setup_for_aio = _with_alignment(factory._setup_for_aio if _has_cuda() else _setup_without_accelerator)
    factory._setup_for_gds = _with_alignment(factory._setup_for_gds)


def use_accelerator(gpu: bool) -> None:
    """Make DeepSpeed work on the CPU, or on the GPU, whatever it found when it was imported.

    On a host with a GPU it takes the GPU by itself, also for a case that is about the CPU.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if not gpu and get_accelerator().device_name() != "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())


def release_factory(factory: Any) -> None:
    """Free the I/O buffer of a CheckpointWriterFactory that will not be used again."""
    handle, buffer = factory._dnvme_handle, factory._io_buffer
    factory._dnvme_handle = factory._io_buffer = None
    if buffer is not None and factory._use_gds:
        handle.unpin_device_tensor(buffer)
    elif buffer is not None:
        # False, and nothing done, for memory that CUDA pinned: that goes with the tensor.
        handle.free_cpu_locked_tensor(buffer)


def cast_to_byte_tensor(tensors: Any) -> Any:
    """Every byte of a contiguous tensor (or of each one in a list) as a flat uint8 view that owns its storage.

    Works for any dtype, 0-dim and empty tensors; copies nothing.
    """
    if isinstance(tensors, (list, tuple)):
        return [cast_to_byte_tensor(tensor) for tensor in tensors]
    import torch

    if not tensors.is_contiguous():
        raise ValueError("only a contiguous tensor can be viewed as bytes")
    width = tensors.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensors.device)
    return flat.set_(tensors.untyped_storage(), tensors.storage_offset() * width, (tensors.numel() * width,), (1,))


def locked_buffer(handle: Any, nbytes: int) -> torch.Tensor:
    """A zeroed uint8 tensor of page-locked host memory, ``nbytes`` long, from the handle's own allocator.

    It lives until ``handle.free_cpu_locked_tensor(tensor)`` or the end of the process.
    Raises IoBufferError when the memory can't be locked: the allocator itself would abort the process.
    """
    import torch

    if nbytes <= 0:
        raise IoBufferError(f"an I/O buffer of {nbytes} bytes is not possible; give a size above zero")
    error = _mlock_errno(nbytes)
    if error:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        raise IoBufferError(
            f"cannot lock an I/O buffer of {nbytes} bytes ({os.strerror(error)}; RLIMIT_MEMLOCK is {allowed}); "
            f"raise it with 'ulimit -l {math.ceil(nbytes / 1024)}' or LimitMEMLOCK=, or use a smaller buffer"
        )
    buffer = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    return buffer.zero_()


def check_buffer(nbytes: int, handle: Any, double: bool) -> None:
    """Raise IoBufferError when a buffer does not divide into whole aligned writes, naming the next size that does."""
    unit = handle.get_alignment() * (2 if double else 1)
    if nbytes <= 0 or nbytes % unit:
        right = max(1, math.ceil(nbytes / unit)) * unit
        kind = "double" if double else "single"
        raise IoBufferError(
            f"an I/O buffer of {nbytes} bytes does not fit: as a {kind} buffer on this device it must be a "
            f"multiple of {unit} bytes, for example {right}"
        )


class _OwningCast:
    """Stands in for DeepSpeed's builder of the C++ cast."""

    def load(self, verbose: bool = False) -> _OwningCast:
        return self

    cast_to_byte_tensor = staticmethod(cast_to_byte_tensor)


def _nothing_to_share() -> None:
    """In place of the shared-memory collective, an op compiled at engine start: one rank has no peer to share with."""


def _with_alignment(setup: Any) -> Any:
    def aligned(self: Any, aio_config: dict[str, Any]) -> None:
        setup(self, aio_config)
        self._dnvme_handle = AlignedHandle(self._dnvme_handle, getattr(self, _BLOCK_BYTES))
        check_buffer(self._io_buffer_size, self._dnvme_handle, self._io_buffer_double)

    return aligned


def _setup_without_accelerator(self: Any, aio_config: dict[str, Any]) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    names = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
    self._dnvme_handle = AsyncIOBuilder().load(verbose=False).aio_handle(*(aio_config[name] for name in names))
    self._io_buffer = locked_buffer(self._dnvme_handle, self._io_buffer_size)


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _mlock_errno(nbytes: int) -> int:
    """Try to lock that much memory and give it back; 0, or the errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, nbytes) as memory:
        view = (ctypes.c_char * nbytes).from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(view))
        failed = libc.mlock(address, ctypes.c_size_t(nbytes)) != 0
        error = ctypes.get_errno() if failed else 0
        if not failed:
            libc.munlock(address, ctypes.c_size_t(nbytes))
        del view
    return error
