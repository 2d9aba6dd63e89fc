"""Our own writer: the errno of a failing write reaches the user, nothing is called saved that was not written."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.host.randomness import fill_random_
from bench.host.writers import direct, make_writer
from bench.host.writers.base import WriterContext
from bench.plan import Options

pytestmark = pytest.mark.usefixtures("ready_ops")
MIB = 1024**2


def writer_in(folder: Path, **options: object) -> direct.DirectWriter:
    chosen = Options.model_validate({"io_buffer_bytes": MIB, **options})
    writer = make_writer("direct", WriterContext("model", chosen, torch.device("cpu"), folder, 512))
    assert isinstance(writer, direct.DirectWriter)
    writer.prepare()
    return writer


def noise(count: int) -> torch.Tensor:
    return fill_random_(torch.empty(count, dtype=torch.uint8), 7)


@pytest.mark.parametrize("double_buffer", [True, False])
def test_an_io_error_in_the_middle_reaches_the_user_with_its_errno(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double_buffer: bool
) -> None:
    writer = writer_in(tmp_path, double_buffer=double_buffer)
    real = os.pwrite

    def failing(descriptor: int, data: memoryview, offset: int) -> int:
        if offset >= 2 * MIB:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, data, offset)

    monkeypatch.setattr(direct.os, "pwrite", failing)
    with pytest.raises(OSError) as caught:
        writer.save(noise(5 * MIB), tmp_path / "one.pt")
    assert caught.value.errno == errno.EIO
    monkeypatch.undo()
    # The writer is fit for the next save, and no descriptor is left open.
    obj = noise(3 * MIB + 1)
    writer.verify(obj, writer.save(obj, tmp_path / "two.pt"))
    assert not [name for name in os.listdir("/proc/self/fd") if _target(name) == str(tmp_path / "one.pt")]
    writer.close()


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


def test_a_short_write_is_an_error_and_an_aligned_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    obj = noise(2 * MIB)
    writer = writer_in(tmp_path)
    monkeypatch.setattr(direct.os, "pwrite", lambda fd, data, at: real(fd, data[:4096], at))
    writer.verify(obj, writer.save(obj, tmp_path / "aligned.pt"))
    monkeypatch.setattr(direct.os, "pwrite", lambda fd, data, at: real(fd, data[:4096], at) - 1)
    with pytest.raises(OSError, match="wrote 4095 of"):
        writer.save(obj, tmp_path / "short.pt")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own with some 20 MiB of space."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a loop device")
    image, mount = tmp_path / "disk.img", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(32 * MIB)
    mount.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_space_is_asked_for_first_and_given_back_when_there_is_not_enough(small_disk: Path) -> None:
    writer = writer_in(small_disk)
    before = os.statvfs(small_disk).f_bfree
    with pytest.raises(OSError) as caught:
        writer.save(noise(64 * MIB), small_disk / "big.pt")
    assert caught.value.errno == errno.ENOSPC
    # Nothing of it was written, and what the filesystem had set aside is free again.
    assert (small_disk / "big.pt").stat().st_size == 0
    assert os.statvfs(small_disk).f_bfree >= before - 8
    obj = noise(4 * MIB + 3)
    writer.verify(obj, writer.save(obj, small_disk / "fits.pt"))


def test_a_buffer_too_small_for_the_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too small"):
        writer_in(tmp_path, io_buffer_bytes=100)


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        writer_in(tmp_path).save(noise(10), tmp_path / "old.pt")
    assert (tmp_path / "old.pt").read_bytes() == b"old"


def test_it_counts_what_it_did(tmp_path: Path) -> None:
    obj = {"a": noise(3 * MIB), "b": noise(5)}
    saved = writer_in(tmp_path).save(obj, tmp_path / "counted.pt")
    assert saved.hook_storages == 2
    assert saved.statistics["bytes"] == (tmp_path / "counted.pt").stat().st_size
    assert saved.statistics["write_secs"] > 0
