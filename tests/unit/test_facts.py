"""Facts about the machine, from recorded kernel files."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.host.facts import filesystem_of

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 9:127 / {array} rw,noatime - xfs /dev/md127 rw,sunit=1024
31 22 0:40 / {spaced} rw - tmpfs tmpfs rw
32 30 259:3 / {array} rw,noatime - ext4 /dev/nvme0n1 rw
"""


def test_the_innermost_and_last_mount_holds_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "array" / "checkpoints"
    folder.mkdir(parents=True)
    text = MOUNTS.format(array=tmp_path / "array", spaced="/elsewhere")
    found = filesystem_of(folder, text)
    # Two filesystems are mounted on the same point; the kernel shows the later one on top.
    assert (found.type, found.source, found.mount_point) == ("ext4", "/dev/nvme0n1", str(tmp_path / "array"))
    assert filesystem_of(tmp_path, text).source == "/dev/vda"


def test_a_mount_point_with_a_space_is_understood(tmp_path: Path) -> None:
    folder = tmp_path / "my drive"
    folder.mkdir()
    text = MOUNTS.format(array="/elsewhere", spaced=str(folder).replace(" ", "\\040"))
    assert filesystem_of(folder, text).type == "tmpfs"


def test_a_similar_name_is_not_the_mount(tmp_path: Path) -> None:
    (tmp_path / "array2").mkdir()
    text = MOUNTS.format(array=tmp_path / "array", spaced="/elsewhere")
    assert filesystem_of(tmp_path / "array2", text).source == "/dev/vda"


def test_no_mount_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no mounted filesystem"):
        filesystem_of(tmp_path, "")
