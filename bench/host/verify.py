"""Is what lies on the drive what was saved? Read back cold and compared, never trusted.

Three ways, each flat in memory:

- the legacy format is replayed: torch.save writes the same object once more, not to a file but to a
  reader that compares every byte with the next byte of the file. Equal to the last byte means the
  file is what unpatched torch would have written.
- the zip format is loaded with mmap and compared tensor by tensor.
- other formats are loaded by their own reader and compared the same way.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.host.workloads.base import NotVerifiedError

CHUNK_BYTES = 8 * 1024**2
# How many chunks are being read while one is compared: enough to keep an array of drives busy.
CHUNKS_AHEAD = 3
# O_DIRECT goes on at multiples of the logical block size only; 4096 is the largest in use.
BLOCK_BYTES = 4096


def drop_cache(path: Path) -> None:
    """Ask the kernel to forget the cached pages of a file, after writing back what is dirty."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class ColdReader:
    """Reads a file from its beginning without the page cache (O_DIRECT where the filesystem has it).

    ``sha256`` is the digest of what was read so far. The next chunks are read, and those already read are
    hashed, while the caller compares: the drive, the digest and the comparison do not wait for each other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        drop_cache(path)
        self._direct = True
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # EINVAL: no O_DIRECT here; the cache was dropped above
            self._descriptor = os.open(path, os.O_RDONLY)
            self._direct = False
        # An anonymous map is page-aligned, which O_DIRECT asks of the buffer.
        self._buffers = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(CHUNKS_AHEAD + 1)]
        self._views = [memoryview(buffer) for buffer in self._buffers]
        self._reading: deque[tuple[int, int, Future[int]]] = deque()
        self._hashing: list[Future[None] | None] = [None] * len(self._buffers)
        self._readers = ThreadPoolExecutor(CHUNKS_AHEAD, "cold-read")
        self._hasher = ThreadPoolExecutor(1, "sha256")
        self._hash = hashlib.sha256()
        self._view = self._views[0]
        self._start = self._end = 0
        self._asked = 0  # the offset of the next chunk to ask for
        self.offset = 0
        for number in range(CHUNKS_AHEAD):
            self._ask(number)

    def read(self, count: int) -> memoryview:
        """Up to ``count`` next bytes, fewer at a chunk's end, none at the end of the file."""
        if self._start == self._end:
            self._next_chunk()
        piece = self._view[self._start : min(self._end, self._start + count)]
        self._start += len(piece)
        self.offset += len(piece)
        return piece

    def _ask(self, number: int) -> None:
        """Start reading the next chunk into a buffer that is compared, once it is hashed too."""
        wanted = min(CHUNK_BYTES, self.size - self._asked)
        if wanted > 0:
            self._reading.append((number, wanted, self._readers.submit(self._fill, number, self._asked, wanted)))
            self._asked += wanted

    def _fill(self, number: int, offset: int, wanted: int) -> int:
        hashed = self._hashing[number]
        if hashed is not None:
            hashed.result()
        done = 0
        while done < wanted and not (self._direct and done % BLOCK_BYTES):
            got = os.preadv(self._descriptor, [self._views[number][done:]], offset + done)
            if got == 0:
                break
            done += got
        return min(done, wanted)

    def _next_chunk(self) -> None:
        if not self._reading:
            self._start = self._end = 0
            return
        number, wanted, reading = self._reading.popleft()
        self._start, self._end = 0, reading.result()
        if self._end < wanted:
            raise NotVerifiedError(f"{self.path.name} was cut to less than {self.size} bytes while it was read")
        self._view = self._views[number]
        self._hashing[number] = self._hasher.submit(self._hash.update, self._view[: self._end])
        # The buffer before this one has been compared: the caller asks for more only when it is done with it.
        self._ask((number - 1) % len(self._buffers))

    def sha256(self) -> str:
        """Digest of all that was read, in hex."""
        for hashing in self._hashing:
            if hashing is not None:
                hashing.result()
        return self._hash.hexdigest()

    def close(self) -> None:
        """Close the file and free the buffers."""
        for pool in (self._readers, self._hasher):
            pool.shutdown(cancel_futures=True)
        os.close(self._descriptor)
        # A piece may still be referenced by the traceback of a failed comparison: freed with it.
        self._buffers.clear()
        self._views.clear()

    def __enter__(self) -> ColdReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ReplaySink:
    """A writable file object that compares what is written to it with a file that exists."""

    def __init__(self, reader: ColdReader) -> None:
        self._reader = reader

    def write(self, data: Any) -> int:
        expected = memoryview(data).cast("B")
        done = 0
        while done < len(expected):
            piece = self._reader.read(len(expected) - done)
            if not len(piece):
                raise NotVerifiedError(
                    f"{self._reader.path.name} ends after {self._reader.size} bytes, "
                    "before the whole checkpoint: the file is short"
                )
            wanted = expected[done : done + len(piece)]
            if not _equal(piece, wanted):
                where = self._reader.offset - len(piece) + _first_difference(piece, wanted)
                raise NotVerifiedError(f"{self._reader.path.name} differs from what was saved at byte {where}")
            done += len(piece)
        return len(expected)

    def flush(self) -> None:
        """torch.save flushes between the pickle and the storages; nothing is buffered here."""


def replay_legacy(obj: Any, path: Path) -> str:
    """Check that ``path`` holds exactly what unpatched torch.save (legacy format) writes for ``obj``.

    Must run in the process that saved: the legacy format names storages by their address. Returns the
    file's sha256 in hex; raises NotVerifiedError with the first differing byte, or a short or long file.
    """
    with ColdReader(path) as reader:
        torch.save(obj, _ReplaySink(reader), _use_new_zipfile_serialization=False)
        if reader.offset != reader.size:
            raise NotVerifiedError(
                f"{path.name} is {reader.size - reader.offset} bytes longer than the checkpoint: "
                "something was appended, or an older file was not replaced"
            )
        return reader.sha256()


def file_sha256(path: Path) -> str:
    """Digest of a file, read cold, in hex."""
    with ColdReader(path) as reader:
        while len(reader.read(CHUNK_BYTES)):
            pass
        return reader.sha256()


def files_sha256(root: Path, files: Sequence[Path]) -> str:
    """One digest of a folder: sha256 over the lines of ``sha256sum`` for its files, sorted by name."""
    lines = (f"{file_sha256(path)}  {path.relative_to(root)}\n" for path in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def compare(expected: Any, actual: Any, where: str = "checkpoint") -> None:
    """Compare two nested objects bit by bit: types of containers, keys, dtype, shape and bytes of tensors.

    Raises NotVerifiedError naming the first difference.
    """
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor):
            raise NotVerifiedError(f"{where} is a {type(actual).__name__}, not a tensor")
        compare_tensors(expected, actual, where)
    elif isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or list(map(repr, expected)) != list(map(repr, actual)):
            raise NotVerifiedError(f"{where} has other keys than were saved")
        for key, value in expected.items():
            compare(value, actual[key], f"{where}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        if not isinstance(actual, Sequence) or len(expected) != len(actual):
            raise NotVerifiedError(f"{where} has another length than was saved")
        for index, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
            compare(wanted, got, f"{where}[{index}]")
    elif expected != actual:
        raise NotVerifiedError(f"{where} is {actual!r}, saved was {expected!r}")


def compare_tensors(expected: torch.Tensor, actual: torch.Tensor, where: str) -> None:
    """Compare two tensors: dtype, shape, then bytes (so NaN equals the same NaN and -0.0 is not 0.0)."""
    if expected.dtype != actual.dtype:
        raise NotVerifiedError(f"{where} has dtype {actual.dtype}, saved was {expected.dtype}")
    if expected.shape != actual.shape:
        raise NotVerifiedError(f"{where} has shape {tuple(actual.shape)}, saved was {tuple(expected.shape)}")
    for start, wanted, got in _byte_chunks(expected, actual):
        if not torch.equal(wanted, got):
            first = start + int((wanted != got).nonzero()[0])
            raise NotVerifiedError(f"{where} differs from what was saved at byte {first} of the tensor")


def unique_storage_bytes(obj: Any) -> int:
    """Bytes of all tensor storages in a nested object, each counted once however many tensors share it."""
    storages: dict[int, int] = {}
    for tensor in tensors_in(obj):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def tensors_in(obj: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested mappings and sequences, in order."""
    if isinstance(obj, torch.Tensor):
        yield obj
    elif isinstance(obj, Mapping):
        for value in obj.values():
            yield from tensors_in(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            yield from tensors_in(value)


def _byte_chunks(expected: torch.Tensor, actual: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    wanted, got = _as_bytes(expected), _as_bytes(actual)
    for start in range(0, wanted.numel(), CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, wanted.numel())
        yield start, wanted[start:end].cpu(), got[start:end].cpu()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # resolve_conj and resolve_neg: a lazy conjugate shares bytes with its base but means others.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _equal(piece: memoryview, wanted: memoryview) -> bool:
    # memoryview's own == walks item by item; torch compares at memory speed.
    return torch.equal(torch.frombuffer(piece, dtype=torch.uint8), _readable(wanted))


def _first_difference(piece: memoryview, wanted: memoryview) -> int:
    return int((torch.frombuffer(piece, dtype=torch.uint8) != _readable(wanted)).nonzero()[0])


def _readable(view: memoryview) -> torch.Tensor:
    if view.readonly:
        # frombuffer warns about memory it could write to; we only read it.
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(view, dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8)
