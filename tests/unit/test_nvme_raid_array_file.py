"""The benchmark's side: array.json, and whether a folder really lies on the array."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nvme_raid_machine import SERIALS, made

from bench.host import array

ROOT = "24 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1 rw\n"
MOUNTED = ROOT + "88 24 9:127 / /mnt/fastpersist rw,noatime shared:2 - xfs /dev/md127 rw,attr2\n"
OVERMOUNTED = MOUNTED + "99 88 259:1 /somewhere /mnt/fastpersist rw shared:1 - ext4 /dev/nvme0n1 rw\n"


@pytest.fixture
def described(tmp_path: Path) -> array.ArrayFile:
    (tmp_path / "array.json").write_text(made().text("array"), encoding="utf-8")
    loaded = array.load_array_file(tmp_path)
    assert loaded is not None
    return loaded


def check(described: array.ArrayFile, folder: str, mountinfo: str, device: str | None = "9:127") -> None:
    array.check_mount(Path(folder), described, mountinfo, lambda _: device)


def test_what_the_role_writes_is_what_the_benchmark_reads(described: array.ArrayFile) -> None:
    assert (described.name, described.chunk_bytes, described.filesystem) == ("fastpersist", 524288, "xfs")
    facts = described.facts()
    assert facts.members == list(SERIALS)
    assert (facts.name, facts.level) == ("fastpersist", "raid0")


def test_no_array_no_check(tmp_path: Path) -> None:
    assert array.load_array_file(tmp_path) is None


@pytest.mark.parametrize("folder", ["/mnt/fastpersist", "/mnt/fastpersist/run/7"])
def test_a_folder_on_the_array(described: array.ArrayFile, folder: str) -> None:
    check(described, folder, MOUNTED)


@pytest.mark.parametrize("folder", ["/", "/mnt", "/mnt/fastpersist2", "/var/tmp"])
def test_a_folder_elsewhere_is_refused(described: array.ArrayFile, folder: str) -> None:
    with pytest.raises(array.ArrayError, match=r"lies on /dev/nvme0n1 \(ext4, mounted at /\), not on the array"):
        check(described, folder, MOUNTED)


def test_a_missing_mount_is_refused(described: array.ArrayFile) -> None:
    with pytest.raises(array.ArrayError, match="not on the array fastpersist, which is not assembled here"):
        check(described, "/mnt/fastpersist", ROOT, device=None)


def test_something_mounted_over_the_array_is_refused(described: array.ArrayFile) -> None:
    with pytest.raises(array.ArrayError, match="lies on /dev/nvme0n1"):
        check(described, "/mnt/fastpersist", OVERMOUNTED)


def test_a_link_out_of_the_mount_is_followed(described: array.ArrayFile, tmp_path: Path) -> None:
    inside = f"88 24 9:127 / {tmp_path}/mount rw - xfs /dev/md127 rw\n"
    (tmp_path / "mount").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mount/link").symlink_to(tmp_path / "elsewhere")
    check(described, f"{tmp_path}/mount/new", ROOT + inside)
    with pytest.raises(array.ArrayError):
        check(described, f"{tmp_path}/mount/link", ROOT + inside)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "can't be read"),
        ("[]", "schema version None"),
        ('{"schema_version": 2}', "schema version 2, this bench reads version 1"),
        ('{"schema_version": 1}', "is not a description of an array"),
        (json.dumps({**json.loads(made().text("array")), "extra": 1}), "is not a description of an array"),
    ],
)
def test_a_file_that_can_not_be_used(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "array.json").write_text(text, encoding="utf-8")
    with pytest.raises(array.ArrayError, match=said):
        array.load_array_file(tmp_path)


def test_chosen_drives_without_an_array_refuse_every_folder(tmp_path: Path) -> None:
    # After a teardown the mount point is an empty folder on the root disk.
    with pytest.raises(array.ArrayError, match="describes no array: make provision"):
        array.require_array(tmp_path, tmp_path)


def test_chosen_drives_refuse_a_folder_elsewhere(described: array.ArrayFile, tmp_path: Path) -> None:
    array.require_array(tmp_path, Path(described.mount_point) / "below")
    with pytest.raises(array.ArrayError, match="is not on the array"):
        array.require_array(tmp_path, Path("/var/tmp/elsewhere"))
