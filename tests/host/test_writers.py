"""Every writer, every kind of storage: what lies in the file is what was saved, and a wrong file is found out."""

from __future__ import annotations

import errno
import hashlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.host.randomness import fill_random_
from bench.host.verify import CHUNK_BYTES, ColdReader, compare, file_sha256, replay_legacy
from bench.host.workloads.base import NotVerifiedError, SkipCaseError
from bench.host.writers import make_writer
from bench.host.writers.base import Writer, WriterContext, logical_block_bytes
from bench.plan import Options

pytestmark = pytest.mark.usefixtures("ready_ops")

IO_BUFFER_BYTES = 1024**2
CPU = torch.device("cpu")


def noise(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    # Not fill_random_ on the tensor itself for bool: a byte other than 0 or 1 is no bool.
    return fill_random_(torch.empty(count, dtype=dtype), 7)


def shared() -> dict[str, torch.Tensor]:
    whole = noise(3000, torch.float32)
    return {"whole": whole, "view": whole[1000:], "again": whole}


def tied() -> dict[str, torch.Tensor]:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(64, 16)
            self.head = torch.nn.Linear(16, 64, bias=False)
            self.head.weight = self.embed.weight

    return Tied().state_dict()


OBJECTS: dict[str, Callable[[], Any]] = {
    "one byte": lambda: noise(1),
    "zero bytes": lambda: torch.empty(0),
    "nothing but zero bytes and a scalar": lambda: {"a": torch.empty(0, dtype=torch.int64), "b": torch.tensor(3.5)},
    "0-dim": lambda: torch.tensor(1.25, dtype=torch.float64),
    "0-dim byte": lambda: torch.tensor(200, dtype=torch.uint8),
    "bool": lambda: torch.tensor([True, False, True]),
    "bfloat16": lambda: noise(1000, torch.bfloat16),
    "float16": lambda: noise(1001, torch.float16),
    "float64": lambda: noise(77, torch.float64),
    "complex64": lambda: noise(333, torch.complex64),
    "conjugate": lambda: noise(9, torch.complex64).conj(),
    "int8": lambda: noise(511, torch.int8),
    "shared": shared,
    "tied": tied,
    "non-contiguous": lambda: noise(600, torch.float32).reshape(20, 30).t(),
    "every second": lambda: noise(1000)[::2],
    "slice of a larger one": lambda: noise(100_000)[5000:5100],
    "nested": lambda: {"a": [noise(3), {"b": (noise(5), 1, "x", None)}], 7: noise(11)},
    "many small": lambda: {str(index): noise(index % 9 + 1) for index in range(300)},
    "one buffer": lambda: noise(IO_BUFFER_BYTES),
    "one buffer and a byte": lambda: noise(IO_BUFFER_BYTES + 1),
    "several buffers": lambda: noise(5 * IO_BUFFER_BYTES + 4097),
    **{f"{size} bytes": lambda size=size: noise(size) for size in (2, 511, 512, 513, 4095, 4096, 4097)},
}
WRITERS = {
    "torch_save": Options(),
    "torch_save_zip": Options(),
    "ds_python": Options(),
    "ds_aio": Options(io_buffer_bytes=IO_BUFFER_BYTES),
    "ds_aio single buffer": Options(io_buffer_bytes=IO_BUFFER_BYTES, double_buffer=False),
    "ds_aio two threads": Options(io_buffer_bytes=IO_BUFFER_BYTES, intra_op_parallelism=2, overlap_events=True),
    "ds_aio zip": Options(io_buffer_bytes=IO_BUFFER_BYTES, zipfile=True),
    "safetensors": Options(),
    "torch_save_tuned": Options(),
    "dcp": Options(),
    "direct": Options(io_buffer_bytes=IO_BUFFER_BYTES),
    "direct single buffer": Options(io_buffer_bytes=IO_BUFFER_BYTES, double_buffer=False),
    "direct zip": Options(io_buffer_bytes=IO_BUFFER_BYTES, zipfile=True),
}
# Formats that name tensors, so that a bare one or a list comes back in another form.
NAMED = ("safetensors", "dcp")
THROUGH_THE_HOOK = [name for name in WRITERS if name.startswith(("ds_aio", "direct")) and not name.endswith("zip")]


def writer_for(name: str, folder: Path, options: Options | None = None) -> Writer:
    writer = make_writer(
        name.split(maxsplit=1)[0],
        WriterContext("model", options or WRITERS[name], CPU, folder, logical_block_bytes(folder)),
    )
    writer.prepare()
    return writer


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_saved_lies_in_the_file(name: str, tmp_path: Path) -> None:
    writer = writer_for(name, tmp_path)
    for number, (what, make) in enumerate(OBJECTS.items()):
        obj = make()
        path = tmp_path / f"{number}.pt"
        try:
            writer.check(obj)
        except SkipCaseError:
            # Not a skipped test: the format has no form for lists, and says so.
            assert name == "safetensors", what
            assert what == "nested"
            continue
        saved = writer.save(obj, path)
        assert saved.promised_bytes in (None, sum(file.stat().st_size for file in saved.files)), what
        writer.verify(obj, saved)
        if name not in NAMED:
            compare(obj, writer.load(path))
        if name in THROUGH_THE_HOOK:
            assert saved.hook_storages, what
    writer.close()


@pytest.mark.parametrize("name", ["ds_python", *THROUGH_THE_HOOK])
def test_the_file_is_byte_for_byte_what_plain_torch_save_writes(name: str, tmp_path: Path) -> None:
    obj = {"weights": noise(3 * IO_BUFFER_BYTES + 5), "tied": tied(), "scalar": torch.tensor(2)}
    writer_for(name, tmp_path).save(obj, tmp_path / "theirs.pt")
    torch.save(obj, tmp_path / "plain.pt", _use_new_zipfile_serialization=False)
    assert (tmp_path / "theirs.pt").read_bytes() == (tmp_path / "plain.pt").read_bytes()


def test_mock_hands_over_every_storage_and_writes_nothing(tmp_path: Path) -> None:
    saved = writer_for("ds_mock", tmp_path, Options()).save(shared(), tmp_path / "mock.pt")
    # Two of the three tensors share the first one's storage.
    assert saved.hook_storages == 1
    assert (tmp_path / "mock.pt").stat().st_size == 0


def test_without_the_hook_the_fast_writer_admits_that_no_storage_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_for("ds_aio", tmp_path)
    from deepspeed.io import FastFileWriter

    # What an unpatched torch sees: a file object without the method.
    monkeypatch.delattr(FastFileWriter, "save_torch_storage_object_list")
    saved = writer.save(noise(5000), tmp_path / "unhooked.pt")
    assert saved.hook_storages == 0


def test_saving_over_a_larger_file_is_found_out(tmp_path: Path) -> None:
    # DeepSpeed opens without O_TRUNC and appends the tail at the old end: the reason for fresh names.
    writer = writer_for("ds_aio", tmp_path)
    path = tmp_path / "old.pt"
    path.write_bytes(bytes(3 * IO_BUFFER_BYTES))
    obj = noise(IO_BUFFER_BYTES + 5)
    saved = writer.save(obj, path)
    with pytest.raises(NotVerifiedError):
        writer.verify(obj, saved)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "name", ["torch_save", "torch_save_zip", "ds_aio", "safetensors", "direct", "torch_save_tuned"]
)
@pytest.mark.parametrize("harm", ["a bit flipped", "cut short", "zeros at the end"])
def test_a_wrong_file_is_found_out(name: str, harm: str, tmp_path: Path) -> None:
    writer = writer_for(name, tmp_path)
    obj = {"first": noise(3 * IO_BUFFER_BYTES), "second": noise(4097)}
    path = tmp_path / "wrong.pt"
    saved = writer.save(obj, path)
    size = path.stat().st_size
    if harm == "a bit flipped":
        flip(path, size // 2)
    elif harm == "cut short":
        with path.open("r+b") as file:
            file.truncate(size - 4096)
    else:
        with path.open("r+b") as file:
            file.truncate(size // 2)
            file.truncate(size)
    # A zip or safetensors reader may refuse the file before we compare; both ways it is not verified.
    with pytest.raises(Exception) as caught:
        writer.verify(obj, saved)
    if name in ("torch_save", "ds_aio", "direct"):
        assert isinstance(caught.value, NotVerifiedError)


def test_a_garbled_size_header_is_found_out_at_its_byte(tmp_path: Path) -> None:
    obj = noise(5000)
    path = tmp_path / "header.pt"
    torch.save(obj, path, _use_new_zipfile_serialization=False)
    header = path.stat().st_size - 5000 - 8
    assert int.from_bytes(path.read_bytes()[header : header + 8], "little") == 5000
    flip(path, header + 7)
    with pytest.raises(NotVerifiedError, match=f"at byte {header + 7}"):
        replay_legacy(obj, path)


def test_bytes_appended_are_found_out(tmp_path: Path) -> None:
    obj = noise(5000)
    path = tmp_path / "long.pt"
    torch.save(obj, path, _use_new_zipfile_serialization=False)
    with path.open("ab") as file:
        file.write(b"tail")
    with pytest.raises(NotVerifiedError, match="4 bytes longer"):
        replay_legacy(obj, path)


def test_a_file_of_many_chunks_is_compared_and_hashed_to_its_last_byte(tmp_path: Path) -> None:
    obj = [noise(7 * CHUNK_BYTES + 1234), noise(3), noise(2 * CHUNK_BYTES)]
    path = tmp_path / "chunks.pt"
    torch.save(obj, path, _use_new_zipfile_serialization=False)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert replay_legacy(obj, path) == digest == file_sha256(path)
    for where in (path.stat().st_size - 1, 5 * CHUNK_BYTES):
        flip(path, where)
        with pytest.raises(NotVerifiedError, match=f"at byte {where}"):
            replay_legacy(obj, path)
        flip(path, where)


def test_a_filesystem_without_direct_io_that_reads_in_odd_pieces_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pieces.pt"
    path.write_bytes(bytes(noise(2 * CHUNK_BYTES + 77).numpy()))
    real_open, real_read = os.open, os.preadv

    def open_without_direct(name: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(name, flags, *more, **named)

    monkeypatch.setattr(os, "open", open_without_direct)
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real_read(fd, [views[0][:1_000_003]], offset))
    assert file_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_is_cut_while_it_is_read_is_not_verified(tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    path.write_bytes(bytes(8 * CHUNK_BYTES))
    with ColdReader(path) as reader:
        reader.read(1)
        os.truncate(path, 6 * CHUNK_BYTES + 17)
        with pytest.raises(NotVerifiedError, match="was cut to less than"):
            deque(iter(lambda: len(reader.read(CHUNK_BYTES)), 0))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda tensor: tensor.to(torch.float64), "dtype"),
        (lambda tensor: tensor.reshape(2, 2), "shape"),
        (lambda tensor: torch.tensor([0.0, 1.0, float("nan"), 2.0]), "at byte"),
    ],
)
def test_compare_sees_dtype_shape_and_the_sign_of_zero(other: Callable[[torch.Tensor], Any], words: str) -> None:
    tensor = torch.tensor([-0.0, 1.0, float("nan"), 2.0])
    compare({"a": tensor}, {"a": tensor.clone()})
    with pytest.raises(NotVerifiedError, match=words):
        compare({"a": tensor}, {"a": other(tensor)})


def test_a_buffer_that_does_not_fit_the_alignment_names_one_that_does(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"multiple of \d+ bytes, for example \d+"):
        writer_for("ds_aio", tmp_path, Options(io_buffer_bytes=1000))
