"""fstab and mdadm.conf: the one line of ours, and every other byte as it was."""

from __future__ import annotations

import pytest
from nvme_raid_machine import files, reads

SPEC = "UUID=ab-cd"
LINE = "UUID=ab-cd /mnt/a xfs noatime,nofail 0 0"
UUID = "11111111:22222222:33333333:44444444"
OTHER = "99999999:22222222:33333333:44444444"
ARRAY = f"ARRAY /dev/md/a metadata=1.2 UUID={UUID}"


def with_mount(text: str) -> str:
    return files.with_mount(text, SPEC, "/mnt/a", "xfs", "noatime,nofail")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", f"{LINE}\n"),
        ("# c\nUUID=x / ext4 defaults 0 1\n", f"# c\nUUID=x / ext4 defaults 0 1\n{LINE}\n"),
        ("UUID=x / ext4 defaults 0 1", f"UUID=x / ext4 defaults 0 1\n{LINE}\n"),
        # Other options: replaced where the line was.
        ("UUID=ab-cd /mnt/a xfs defaults 0 0\n# end\n", f"{LINE}\n# end\n"),
        ('UUID="ab-cd" /mnt/a xfs defaults 0 0\n', f"{LINE}\n"),
        # Twice: once.
        (f"{LINE}\n# between\n{LINE}\n", f"{LINE}\n# between\n"),
        # A commented line and a longer UUID are somebody else's.
        (f"#{LINE}\n", f"#{LINE}\n{LINE}\n"),
        ("UUID=ab-cdef /mnt/b xfs defaults 0 0\n", f"UUID=ab-cdef /mnt/b xfs defaults 0 0\n{LINE}\n"),
    ],
)
def test_a_mount_has_one_line(text: str, expected: str) -> None:
    assert with_mount(text) == expected
    assert with_mount(expected) == expected


def test_a_line_with_other_spacing_is_left_as_it_is() -> None:
    text = "UUID=ab-cd\t/mnt/a   xfs noatime,nofail\t0 0\n"
    assert with_mount(text) == text


def test_a_mount_is_taken_out_and_nothing_else() -> None:
    text = f"# UUID=ab-cd\nUUID=ab-cdef /mnt/b xfs d 0 0\n{LINE}\n\n/mnt/a/file /x none bind 0 0\n"
    assert files.without_mount(text, SPEC) == text.replace(f"{LINE}\n", "")


def test_mount_points_with_spaces_are_read_as_they_are() -> None:
    assert files.fstab_entries("UUID=1 /mnt/a\\040b xfs d 0 0\n")[0].mount_point == "/mnt/a b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", f"{ARRAY}\n"),
        ("HOMEHOST <system>\n", f"HOMEHOST <system>\n{ARRAY}\n"),
        (f"ARRAY /dev/md/b UUID={OTHER}\n", f"ARRAY /dev/md/b UUID={OTHER}\n{ARRAY}\n"),
        # mdadm --detail --scan's own form of the same array is good enough.
        (f"ARRAY /dev/md/a metadata=1.2 name=any:a UUID={UUID}\n",) * 2,
        (f"array /dev/md/a uuid={UUID.upper().replace(':', '-')}\n",) * 2,
        # Appended blindly by somebody, twice, with a continuation line: one line, in the first one's place.
        (
            f"ARRAY /dev/md0 UUID={UUID}\n  devices=/dev/x\nMAILADDR root\nARRAY /dev/md127 UUID={UUID}\n",
            f"{ARRAY}\nMAILADDR root\n",
        ),
        (f"#{ARRAY}\n", f"#{ARRAY}\n{ARRAY}\n"),
    ],
)
def test_an_array_has_one_line(text: str, expected: str) -> None:
    assert files.with_array(text, "a", UUID) == expected
    assert files.with_array(expected, "a", UUID) == expected


def test_an_array_is_taken_out_with_its_continuation_lines() -> None:
    text = f"MAILADDR root\nARRAY /dev/md/a\n   UUID={UUID}\n   metadata=1.2\nARRAY /dev/md/b UUID={OTHER}\n"
    assert files.without_array(text, UUID) == f"MAILADDR root\nARRAY /dev/md/b UUID={OTHER}\n"


def test_array_lines_are_read_by_name_and_uuid() -> None:
    (line,) = files.conf_arrays(f"# x\nARRAY <ignore> name=host:data UUID={UUID}\n")
    assert (line.number, line.name, line.uuid) == (2, "data", UUID)


def test_mountinfo_of_a_namespace() -> None:
    text = (
        "25 30 0:23 / /proc rw,nosuid shared:5 - proc proc rw\n"
        "96 25 259:3 / /mnt/with\\040space rw,noatime shared:1 master:2 - xfs /dev/nvme1n1 rw,attr2\n"
    )
    mount = reads.parse_mountinfo(text, "mnt:[1]", "7 (sh)", True)[1]
    assert (mount["device"], mount["mount_point"], mount["source"]) == ("259:3", "/mnt/with space", "/dev/nvme1n1")
