"""The hook in torch's serialization.py: where it goes in, how it comes out, and which state a file is in.

Standard library only, Python 3.9 and newer, no import from this package: the same file is the package's
and, through a link in roles/torch_patch/module_utils, runs inside Ansible on hosts where nothing else is
installed. torch is never imported here; its version and its wheel's RECORD are read as text.

States of a file: ``original`` (as released: the manifest's pristine hash, or the hash in the wheel's
RECORD), ``patched`` (exactly original plus our hook, the manifest's hash) and ``foreign`` (anything else).
"""

from __future__ import annotations

import ast
import base64
import difflib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

FUNCTION = "_legacy_save"
LOOP_OVER = "serialized_storage_keys"
MARK_BEGIN = b"# >>> fastpersist-bench hook"
MARK_END = b"# <<< fastpersist-bench hook"
HOOK_FILE = "legacy_save_hook.py.txt"
MANIFEST_FILE = "manifest.json"
BACKUP_SCHEMA = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"[0-9][\w.+]*")  # becomes part of a backup's path


class PatchError(ValueError):
    """A file that can't be patched or restored; the message names path, version, hashes and what to do."""


@dataclass(frozen=True)
class Known:
    """A torch version the hook is validated for: sha256 of its file without and with the hook."""

    pristine_sha256: str
    patched_sha256: str


@dataclass(frozen=True)
class TorchFile:
    """torch's serialization.py as it lies on disk.

    ``recorded_sha256`` is the hash its wheel recorded at install time, None without a RECORD.
    ``links`` above 1 means that other names (a package cache, other environments) share its inode.
    """

    path: str
    version: str
    data: bytes
    recorded_sha256: str | None
    links: int

    @property
    def base_version(self) -> str:
        """The version without its build label: 2.6.0 for 2.6.0+cu124. The text of the file is the same."""
        return self.version.split("+", 1)[0]

    @property
    def sha256(self) -> str:
        return sha256_of(self.data)

    @property
    def reinstall_command(self) -> str:
        """What brings the original back whatever happened to the file."""
        prefix = os.path.join(os.path.dirname(self.path), *[os.pardir] * 4)
        python = os.path.join(os.path.normpath(prefix), "bin", "python")
        return f"{python} -m pip install --force-reinstall --no-deps torch=={self.base_version}"


@dataclass(frozen=True)
class Change:
    """What is to be done to one file. ``new`` equals the file's data when there is nothing to do.

    ``original`` is the pristine text, checked by hash. ``notes`` are for the person who asked.
    """

    file: TorchFile
    state_before: str
    state_after: str
    new: bytes
    original: bytes
    notes: list[str] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        return self.new != self.file.data

    def diff(self) -> str:
        """A unified diff of what the file becomes, empty when it stays."""
        before, after = (data.decode("utf-8", "replace").splitlines(True) for data in (self.file.data, self.new))
        names = (f"{self.file.path} ({self.state_before})", f"{self.file.path} ({self.state_after})")
        return "".join(difflib.unified_diff(before, after, *names))


def sha256_of(data: bytes) -> str:
    """Lower-case hexadecimal sha256."""
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------------------------
# The text: pure functions


def parse_manifest(data: Any, where: str = MANIFEST_FILE) -> dict[str, Known]:
    """The manifest's versions; raises PatchError, naming ``where``, for any other shape."""
    versions = data.get("versions") if isinstance(data, Mapping) else None
    if not isinstance(versions, Mapping) or not versions:
        raise PatchError(f"{where} has no versions; take the file that came with this release")
    known = {}
    for version, entry in versions.items():
        hashes = [
            str(entry.get(key, "")) if isinstance(entry, Mapping) else ""
            for key in ("pristine_sha256", "patched_sha256")
        ]
        if not all(_SHA256.fullmatch(digest) for digest in hashes):
            raise PatchError(f"{where}: version {version} needs pristine_sha256 and patched_sha256, 64 hex digits each")
        known[str(version)] = Known(*hashes)
    return known


def insert_hook(source: bytes, hook: str, where: str = "serialization.py") -> bytes:
    """``source`` with the hook before the last loop of ``_legacy_save``, at the loop's indentation.

    Raises PatchError when the text doesn't parse here, doesn't have that shape, or has a hook already.
    """
    hook_lines = hook.encode().strip(b"\n").split(b"\n")
    if not (hook_lines[0].startswith(MARK_BEGIN) and hook_lines[-1].startswith(MARK_END)):
        raise PatchError(f"the hook must begin and end with its marker comments ({MARK_BEGIN.decode()} ...)")
    if remove_hook(source) is not None:
        raise PatchError(f"{where} has a hook already")
    loop = _last_loop(source, where)
    lines = source.split(b"\n")
    indent = b" " * loop.col_offset
    lines[loop.lineno - 1 : loop.lineno - 1] = [indent + line if line else line for line in hook_lines]
    patched = b"\n".join(lines)
    compile(patched, where, "exec", dont_inherit=True)
    return patched


def remove_hook(source: bytes) -> bytes | None:
    """``source`` without the lines from one marker to the other; None when there is no single such block.

    Whether the rest is the original is for the caller to check by hash.
    """
    lines = source.split(b"\n")
    begins = [number for number, line in enumerate(lines) if line.lstrip().startswith(MARK_BEGIN)]
    ends = [number for number, line in enumerate(lines) if line.lstrip().startswith(MARK_END)]
    if len(begins) != 1 or len(ends) != 1 or begins[0] > ends[0]:
        return None
    return b"\n".join(lines[: begins[0]] + lines[ends[0] + 1 :])


def manifest_entry(file: TorchFile, hook: str) -> dict[str, dict[str, str]]:
    """The manifest's entry of an unchanged file; PatchError as insert_hook, or when RECORD says otherwise."""
    if file.recorded_sha256 not in (None, file.sha256):
        raise PatchError(
            f"{file.path} was changed: sha256 {file.sha256}, its wheel's RECORD says {file.recorded_sha256}"
        )
    patched = insert_hook(file.data, hook, file.path)
    return {file.base_version: {"pristine_sha256": file.sha256, "patched_sha256": sha256_of(patched)}}


def state_of(file: TorchFile, manifest: Mapping[str, Known]) -> str:
    """original, patched or foreign."""
    known = manifest.get(file.base_version)
    if known and file.sha256 == known.patched_sha256:
        return "patched"
    if file.sha256 in _pristine_hashes(file, manifest):
        return "original"
    return "foreign"


def plan_present(file: TorchFile, manifest: Mapping[str, Known], hook: str) -> Change:
    """What patches this file. Raises PatchError for an unknown version or a foreign file.

    A file that carries the hook of another bench release over the pristine text gets the new one.
    """
    state = state_of(file, manifest)
    known = manifest.get(file.base_version)
    if known is None:
        raise PatchError(
            f"{file.path}: torch {file.version} is not a version the hook is validated for "
            f"({', '.join(manifest)}); sha256 {file.sha256}. "
            "Install one of these, or add this version to patches/manifest.json (see patches/README.md)"
        )
    without = remove_hook(file.data)
    original = file.data if without is None else without
    if sha256_of(original) != known.pristine_sha256:
        raise PatchError(_foreign(file, manifest) + f" Reinstall torch, then patch again: {file.reinstall_command}")
    if state == "patched":
        return Change(file, state, state, file.data, original)
    new = insert_hook(original, hook, file.path)
    if sha256_of(new) != known.patched_sha256:
        raise PatchError(
            f"the hook gives torch {file.version} the sha256 {sha256_of(new)}, the manifest says "
            f"{known.patched_sha256}: {HOOK_FILE} and {MANIFEST_FILE} are not of one release; "
            "nothing was changed"
        )
    notes = _link_notes(file)
    if without is not None:
        notes.append("the hook of another bench release was replaced")
    return Change(file, state, "patched", new, original, notes)


def plan_absent(file: TorchFile, manifest: Mapping[str, Known], backup_folder: str) -> Change:
    """What brings the original back: from the verified backup, else by taking the hook out.

    Both are checked by hash. Raises PatchError, and says where a good backup lies, when the file is neither
    ours nor original.
    """
    state = state_of(file, manifest)
    if state == "original":
        return Change(file, state, state, file.data, file.data)
    without = remove_hook(file.data)
    expected = sha256_of(without) if without is not None else ""
    if without is None or expected not in _pristine_hashes(file, manifest):
        raise PatchError(_foreign(file, manifest) + " " + _way_back(file, manifest, backup_folder))
    if file.recorded_sha256 not in (None, expected):
        raise PatchError(
            f"{file.path}: taking the hook out would give sha256 {expected}, but the RECORD of the installed "
            f"wheel says {file.recorded_sha256}; nothing was changed. "
            f"Reinstall torch: {file.reinstall_command}"
        )
    notes = _link_notes(file)
    try:
        original = read_backup(backup_folder, file.version, expected)
        notes.append(f"restored from {backup_path(backup_folder, file.version, expected)}")
    except PatchError as error:
        original = without
        notes.append(f"{error}; taking the hook out gave the original, sha256 {expected}")
    return Change(file, state, "original", original, original, notes)


def _last_loop(source: bytes, where: str) -> ast.For:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise PatchError(
            f"{where} does not parse here ({error}); if it is sound, this Python is older than torch asks for"
        ) from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION]
    loops = [node for node in functions[0].body if isinstance(node, ast.For)] if len(functions) == 1 else []
    if not loops or not (isinstance(loops[-1].iter, ast.Name) and loops[-1].iter.id == LOOP_OVER):
        raise PatchError(
            f"{where}: {FUNCTION} does not end with a loop over {LOOP_OVER}; the hook does not fit this torch"
        )
    return loops[-1]


def _pristine_hashes(file: TorchFile, manifest: Mapping[str, Known]) -> set[str]:
    known = manifest.get(file.base_version)
    hashes = {known.pristine_sha256} if known else set()
    return hashes | ({file.recorded_sha256} if file.recorded_sha256 else set())


def _foreign(file: TorchFile, manifest: Mapping[str, Known]) -> str:
    known = manifest.get(file.base_version)
    expected = (
        f"the original is {known.pristine_sha256}, with the hook {known.patched_sha256}"
        if known
        else f"the manifest knows torch {', '.join(manifest)}, the wheel's RECORD says {file.recorded_sha256}"
    )
    return (
        f"{file.path} is foreign: it was changed by somebody else, or is of another build. "
        f"torch {file.version}, sha256 {file.sha256}; {expected}. Nothing was changed."
    )


def _way_back(file: TorchFile, manifest: Mapping[str, Known], backup_folder: str) -> str:
    for expected in sorted(_pristine_hashes(file, manifest)):
        try:
            read_backup(backup_folder, file.version, expected)
        except PatchError:
            continue
        backup = backup_path(backup_folder, file.version, expected)
        return f"If what is in the file now may go, copy the verified backup over it: {backup}"
    others = ", ".join(backed_up_versions(backup_folder)) or "none"
    return (
        f"There is no backup of torch {file.version} in {backup_folder} (backups: {others}). "
        f"If what is in the file now may go, reinstall torch: {file.reinstall_command}"
    )


def _link_notes(file: TorchFile) -> list[str]:
    if file.links < 2:
        return []
    return [f"the file had {file.links} hard links (a package cache?); the other names keep what they had"]


# ---------------------------------------------------------------------------------------------------
# The disk: finding, backing up, replacing


def find_in_venv(venv: str) -> str | None:
    """The path of serialization.py in a virtual environment, or None when torch is not installed there.

    No Python of that environment is run, so it may be broken. Raises PatchError when there are several,
    and when the torch folder is a link: the files behind it belong to other environments too.
    """
    found: dict[str, str] = {}
    for library in ("lib", "lib64"):
        for python in sorted(_entries(os.path.join(venv, library))):
            packages = os.path.join(venv, library, python, "site-packages")
            if python.startswith("python3") and os.path.isdir(os.path.join(packages, "torch")):
                found.setdefault(os.path.realpath(packages), packages)
    if not found:
        return None
    if len(found) > 1:
        raise PatchError(f"{venv} has torch more than once ({', '.join(found.values())}); name the file to patch")
    torch = os.path.join(*found.values(), "torch")
    if os.path.islink(torch):
        raise PatchError(
            f"{torch} is a link to {os.path.realpath(torch)}, so patching would change every environment "
            "that uses that folder; install torch into this environment as files"
        )
    return os.path.join(torch, "serialization.py")


def read_torch_file(path: str) -> TorchFile:
    """Read serialization.py and what is known about it; PatchError when there is no such file or version."""
    try:
        with open(path, "rb") as file:
            data = file.read()
            links = os.fstat(file.fileno()).st_nlink
    except OSError as error:
        raise PatchError(f"cannot read {path}: {error.strerror}; is torch installed there as a whole?") from error
    version = _version_beside(path)
    return TorchFile(path, version, data, _recorded_sha256(path, version), links)


def backup_path(folder: str, version: str, sha256: str) -> str:
    """Where the original of one torch version lies: keyed by version and content, so upgrades never mix."""
    return os.path.join(folder, f"torch-{version}", sha256, "serialization.py")


def backed_up_versions(folder: str) -> list[str]:
    """Versions of torch that have a backup folder."""
    return sorted(name[len("torch-") :] for name in _entries(folder) if name.startswith("torch-"))


def read_backup(folder: str, version: str, sha256: str) -> bytes:
    """The bytes of a backup; raises PatchError when it is missing or not what its manifest and key say."""
    path = backup_path(folder, version, sha256)
    try:
        with open(path, "rb") as backup:
            data = backup.read()
        with open(_backup_manifest(path), encoding="utf-8") as text:
            manifest = json.load(text)
    except FileNotFoundError as error:
        raise PatchError(f"no backup: {error.filename} is missing") from error
    except (OSError, ValueError) as error:
        raise PatchError(f"the backup {path} can't be read ({error})") from error
    claimed = manifest.get("pristine_sha256") if isinstance(manifest, dict) else None
    if not sha256_of(data) == claimed == sha256:
        raise PatchError(
            f"the backup {path} is damaged: sha256 {sha256_of(data)}, its manifest says {claimed}, needed {sha256}"
        )
    return data


def write_backup(folder: str, change: Change, bench_version: str) -> None:
    """Keep the original and a manifest that says what it is. Raises OSError."""
    sha256 = sha256_of(change.original)
    path = backup_path(folder, change.file.version, sha256)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    manifest = {
        "schema_version": BACKUP_SCHEMA,
        "torch_version": change.file.version,
        "path": change.file.path,
        "pristine_sha256": sha256,
        "patched_sha256": sha256_of(change.new),
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "bench_version": bench_version,
    }
    write_atomically(path, change.original)
    write_atomically(_backup_manifest(path), (json.dumps(manifest, indent=2) + "\n").encode())


def write_atomically(path: str, data: bytes) -> None:
    """Write a new file and rename it over ``path``: a reader sees the old bytes or all the new ones.

    Never writes in place, so other hard links keep the old content. An existing file's mode and owner are
    kept. Raises OSError and leaves nothing behind.
    """
    folder, name = os.path.split(path)
    handle, part = tempfile.mkstemp(prefix=f".{name}.", suffix=".part", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            try:
                old = os.stat(path)
            except FileNotFoundError:
                os.fchmod(handle, 0o644)
            else:
                mine = os.fstat(handle)
                if (mine.st_uid, mine.st_gid) != (old.st_uid, old.st_gid):
                    os.fchown(handle, old.st_uid, old.st_gid)
                os.fchmod(handle, stat.S_IMODE(old.st_mode))
            file.flush()
            os.fsync(handle)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def replace_torch_file(change: Change) -> None:
    """Put ``change.new`` in place and drop the bytecode compiled from the old text. Raises OSError.

    Bytecode goes first: after a crash in between Python just compiles again.
    """
    for path in bytecode_of(change.file.path):
        os.unlink(path)
    write_atomically(change.file.path, change.new)


def bytecode_of(path: str) -> list[str]:
    """Compiled forms of a module, for every Python and optimization level."""
    folder, name = os.path.split(path)
    cache = os.path.join(folder, "__pycache__")
    stem = os.path.splitext(name)[0]
    return [
        os.path.join(cache, entry)
        for entry in sorted(_entries(cache))
        if entry.startswith(f"{stem}.") and entry.endswith(".pyc")
    ]


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _backup_manifest(path: str) -> str:
    return os.path.join(os.path.dirname(path), "backup.json")


def _version_beside(path: str) -> str:
    version_file = os.path.join(os.path.dirname(path), "version.py")
    try:
        with open(version_file, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError) as error:
        raise PatchError(f"can't tell the version of torch: {version_file} can't be read ({error})") from error
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if names == ["__version__"] and _VERSION.fullmatch(str(node.value.value)):
                return str(node.value.value)
    raise PatchError(f"can't tell the version of torch: {version_file} assigns no usable __version__")


def _recorded_sha256(path: str, version: str) -> str | None:
    """The hash in the wheel's RECORD (sha256, urlsafe base64 without padding; PEP 376 and 427)."""
    torch_folder = os.path.dirname(path)
    packages = os.path.dirname(torch_folder)
    wanted = f"{os.path.basename(torch_folder)}/{os.path.basename(path)},sha256="
    for name in sorted(_entries(packages)):
        match = re.fullmatch(r"torch-([^-]+)\.dist-info", name)
        if not match or match.group(1).split("+", 1)[0] != version.split("+", 1)[0]:
            continue
        try:
            with open(os.path.join(packages, name, "RECORD"), encoding="utf-8") as record:
                for line in record:
                    if line.startswith(wanted):
                        encoded = line[len(wanted) :].split(",")[0]
                        return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
        except (OSError, ValueError):
            return None
    return None
