"""Edits of fstab and mdadm.conf as text: one line is put in, replaced or taken out, every other byte stays."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import List


@dataclass(frozen=True)
class FstabEntry:
    """A line of fstab that mounts something; ``number`` counts from 1."""

    number: int
    spec: str
    mount_point: str


@dataclass(frozen=True)
class ConfArray:
    """An ARRAY line of mdadm.conf with its continuation lines, from ``number`` on, ``lines`` of them."""

    number: int
    lines: int
    name: str
    uuid: str


def fstab_entries(text: str) -> List[FstabEntry]:
    """The entries of an fstab, without comments."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if len(fields) >= 2 and not fields[0].startswith("#"):
            spec = re.sub(r'^(UUID|LABEL|PARTUUID)="?([^"]*)"?$', r"\1=\2", fields[0])
            entries.append(FstabEntry(number, spec, _unescape(fields[1])))
    return entries


def with_mount(text: str, spec: str, mount_point: str, kind: str, options: str) -> str:
    """The fstab in which ``spec`` is mounted by exactly one line, in the place of the first that did so before."""
    wanted = f"{spec} {mount_point} {kind} {options} 0 0"
    numbers = [entry.number for entry in fstab_entries(text) if entry.spec == spec]
    lines = text.splitlines(keepends=True)
    if numbers and lines[numbers[0] - 1].split() == wanted.split() and len(numbers) == 1:
        return text
    return _replace(lines, [(number, 1) for number in numbers], wanted)


def without_mount(text: str, spec: str) -> str:
    """The fstab without any line that mounts ``spec``."""
    numbers = {entry.number for entry in fstab_entries(text) if entry.spec == spec}
    return "".join(line for number, line in enumerate(text.splitlines(keepends=True), 1) if number not in numbers)


def conf_arrays(text: str) -> List[ConfArray]:
    """The ARRAY lines of an mdadm.conf. White space at the start of a line continues the one before."""
    found: List[ConfArray] = []
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if not re.match(r"ARR(AY?)?\s", line, re.IGNORECASE):
            continue
        words = line.split("#")[0].split()
        end = index + 1
        while end < len(lines) and re.match(r"\s+\S", lines[end]):
            words += lines[end].split("#")[0].split()
            end += 1
        keys = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        keys = {key.lower(): value for key, value in keys.items()}
        device = words[1] if len(words) > 1 and "=" not in words[1] else ""
        name = device[len("/dev/md/") :] if device.startswith("/dev/md/") else keys.get("name", "").rpartition(":")[2]
        found.append(ConfArray(index + 1, end - index, name, array_uuid(keys.get("uuid", ""))))
    return found


def array_uuid(text: str) -> str:
    """An array's UUID as mdadm prints it, four groups of eight digits, however it was written."""
    digits = re.sub(r"[^0-9a-f]", "", text.lower())
    return ":".join(digits[start : start + 8] for start in range(0, len(digits), 8))


def with_array(text: str, name: str, uuid: str) -> str:
    """The mdadm.conf in which the array of that UUID has exactly one ARRAY line."""
    wanted = f"ARRAY /dev/md/{name} metadata=1.2 UUID={uuid}"
    present = [array for array in conf_arrays(text) if array.uuid == uuid]
    lines = text.splitlines(keepends=True)
    if len(present) == 1 and present[0].name == name:
        return text
    return _replace(lines, [(array.number, array.lines) for array in present], wanted)


def without_array(text: str, uuid: str) -> str:
    """The mdadm.conf without any ARRAY line of that UUID."""
    lines = text.splitlines(keepends=True)
    gone = {
        number
        for array in conf_arrays(text)
        if array.uuid == uuid
        for number in range(array.number, array.number + array.lines)
    }
    return "".join(line for number, line in enumerate(lines, 1) if number not in gone)


def _replace(lines: List[str], places: "list[tuple[int, int]]", wanted: str) -> str:
    """Put ``wanted`` where the first of ``places`` (line number, count) was, or at the end; take the others out."""
    gone = {number for first, count in places for number in range(first, first + count)}
    kept: List[str] = []
    for number, line in enumerate(lines, 1):
        if places and number == places[0][0]:
            kept.append(wanted + "\n")
        if number not in gone:
            kept.append(line)
    if not places:
        if kept and not kept[-1].endswith("\n"):
            kept[-1] += "\n"
        kept.append(wanted + "\n")
    return "".join(kept)


def _unescape(text: str) -> str:
    # fstab writes space, tab and backslash as octal.
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), text)
