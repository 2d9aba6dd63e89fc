"""torch.distributed.checkpoint in a single process: a folder of files, written by several threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bench.host.verify import compare, drop_cache, files_sha256
from bench.host.workloads.base import NotVerifiedError, Saved
from bench.host.writers.base import Writer

MAX_THREADS = 8
# Tensors that verify() reads back at a time.
BATCH_BYTES = 256 * 1024**2


class Dcp(Writer):
    """``dcp.save`` of a state dict with FileSystemWriter and one file for each of its threads.

    The format stores every tensor under its dotted name, tied ones once for each name, and syncs its files
    itself. A bare tensor is saved as the state dict ``{"tensor": ...}``.
    """

    def prepare(self) -> None:
        self._threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))
        # Imported here, so that the first save does not pay for it.
        import torch.distributed.checkpoint  # noqa: F401

    def save(self, obj: Any, path: Path) -> Saved:
        import torch.distributed.checkpoint as dcp

        dcp.save(
            state_dict(obj),
            storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=True, thread_count=self._threads),
        )
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return Saved(files=files, statistics={"threads": self._threads, "files": len(files)})

    def verify(self, obj: Any, saved: Saved) -> str | None:
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        root = saved.files[0].parent
        for file in saved.files:
            drop_cache(file)
        wanted, _ = flatten_state_dict(state_dict(obj))
        stored = FileSystemReader(root).read_metadata().state_dict_metadata
        if set(stored) != set(wanted):
            other = sorted(set(stored) ^ set(wanted))[0]
            raise NotVerifiedError(f"{root.name} has other names than were saved, the first: {other}")
        for names in _batches(wanted):
            part = {name: _empty_like(stored[name]) for name in names}
            _read(part, root)
            for name in names:
                compare(wanted[name], part[name], name)
        return files_sha256(root, saved.files)

    def load(self, path: Path) -> Any:
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

        metadata = FileSystemReader(path).read_metadata()
        flat = {name: _empty_like(stored) for name, stored in metadata.state_dict_metadata.items()}
        _read(flat, path)
        return unflatten_state_dict(flat, metadata.planner_data)


def state_dict(obj: Any) -> dict[str, Any]:
    """``obj`` as a mapping with names, which is all that torch.distributed.checkpoint takes."""
    return dict(obj) if isinstance(obj, Mapping) else {"tensor": obj}


def _batches(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Names of about :data:`BATCH_BYTES` of tensors each: memory stays flat, and the index is read a few times only."""
    names: list[str] = []
    size = 0
    for name, value in tensors.items():
        names.append(name)
        size += value.nbytes if isinstance(value, torch.Tensor) else 0
        if size >= BATCH_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names


def _empty_like(stored: Any) -> torch.Tensor | None:
    """Where the reader puts a tensor with the dtype and shape of the checkpoint's index; None for other objects."""
    properties = getattr(stored, "properties", None)
    return None if properties is None else torch.empty(stored.size, dtype=properties.dtype)


def _read(into: dict[str, Any], path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(into, storage_reader=dcp.FileSystemReader(path))
