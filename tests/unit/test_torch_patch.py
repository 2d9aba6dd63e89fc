"""What the torch patch decides and what it does to files, on a throwaway tree."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest
import torch_patch_tree as tree

from bench.host import patching

PATCHED = patching.insert_hook(tree.SOURCE, tree.HOOK)
MANIFEST = {"2.6.0": patching.Known(tree.sha256(tree.SOURCE), tree.sha256(PATCHED))}
# A hook of another release: other lines between the same kind of markers.
OLDER = PATCHED.replace(b"take_storages", b"hand_over")
FOREIGN = PATCHED + b"\n# somebody was here\n"


class Plain:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


class TakesAll(Plain):
    def save_torch_storage_object_list(self, storages: list, save_size: bool) -> None:
        self.taken = (storages, save_size)


def run_saved(source: bytes, file: Plain) -> Plain:
    namespace: dict = {}
    exec(compile(source, "serialization.py", "exec"), namespace)
    namespace["save"]({"b": b"B", "a": b"A", "c": b"C"}, file)
    return file


@pytest.fixture
def backups(tmp_path: Path) -> str:
    return str(tmp_path / "backups")


def put(path: Path, backups: str, manifest: dict = MANIFEST) -> patching.Change:
    """Patch as the module does."""
    change = patching.plan_present(patching.read_torch_file(str(path)), manifest, tree.HOOK)
    patching.write_backup(backups, change, "1.2.3")
    patching.replace_torch_file(change)
    return change


def take_out(path: Path, backups: str, manifest: dict = MANIFEST) -> patching.Change:
    change = patching.plan_absent(patching.read_torch_file(str(path)), manifest, backups)
    patching.replace_torch_file(change)
    return change


# --- the text -------------------------------------------------------------------------------------


def test_the_hook_gets_all_storages_in_file_order_and_nothing_else_is_written() -> None:
    file = run_saved(PATCHED, TakesAll())
    assert file.taken == ([(b"A", "uint8"), (b"B", "uint8"), (b"C", "uint8")], True)
    assert file.data == b"names;"


def test_a_plain_file_is_saved_as_before() -> None:
    assert run_saved(PATCHED, Plain()).data == run_saved(tree.SOURCE, Plain()).data == b"names;ABC"


def test_a_method_set_to_none_is_no_method() -> None:
    file = Plain()
    file.save_torch_storage_object_list = None
    assert run_saved(PATCHED, file).data == b"names;ABC"


@pytest.mark.parametrize("source", [tree.SOURCE, tree.SOURCE.rstrip(b"\n"), tree.SOURCE + b"# \x0c\xe2\x80\xa8 odd\n"])
def test_taking_the_hook_out_gives_the_same_bytes(source: bytes) -> None:
    assert patching.remove_hook(patching.insert_hook(source, tree.HOOK)) == source


@pytest.mark.parametrize(
    ("source", "hook", "message"),
    [
        (tree.SOURCE.replace(b"_legacy_save", b"_other_save"), tree.HOOK, "does not end with a loop"),
        (
            tree.SOURCE.replace(b"for key in serialized_storage_keys", b"for key in []"),
            tree.HOOK,
            "not end with a loop",
        ),
        (b"def _legacy_save(:\n", tree.HOOK, "does not parse"),
        (b"def _legacy_save():\n    pass\n" + tree.SOURCE, tree.HOOK, "does not end with a loop"),
        (tree.SOURCE, "f.hello()\n", "must begin and end with its marker"),
        (PATCHED, tree.HOOK, "has a hook already"),
    ],
)
def test_a_text_of_another_shape_is_refused(source: bytes, hook: str, message: str) -> None:
    with pytest.raises(patching.PatchError, match=message):
        patching.insert_hook(source, hook)


@pytest.mark.parametrize("text", [b"", tree.SOURCE, PATCHED + PATCHED, PATCHED.split(b"# <<<")[0]])
def test_no_single_whole_block_means_no_hook_to_take_out(text: bytes) -> None:
    assert patching.remove_hook(text) is None


@pytest.mark.parametrize(
    "data",
    [None, {}, {"versions": {}}, {"versions": {"2.6.0": {"pristine_sha256": "ab", "patched_sha256": "cd"}}}],
)
def test_a_broken_manifest_is_refused(data: object) -> None:
    with pytest.raises(patching.PatchError, match=r"given\.json"):
        patching.parse_manifest(data, "given.json")


def test_the_shipped_manifest_knows_the_published_hash_of_2_6_0() -> None:
    known = patching.parse_manifest(json.loads((tree.CHECKOUT / "patches" / "manifest.json").read_text()))
    assert known["2.6.0"].pristine_sha256 == "db42dbd71fcd9ca4fb83283350bacde067659b5a53dd647588236a0693bb0d38"
    assert "2.11.0" in known


def test_the_role_and_the_package_share_one_file_that_python_3_9_understands() -> None:
    shared = tree.CHECKOUT / "roles" / "torch_patch" / "module_utils" / "torch_patch_core.py"
    assert shared.resolve() == Path(patching.__file__).resolve()
    for path in (shared, tree.CHECKOUT / "roles" / "torch_patch" / "library" / "torch_patch.py"):
        ast.parse(path.read_text(), feature_version=(3, 9))


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "recorded", "version", "state"),
    [
        (tree.SOURCE, tree.SOURCE, "2.6.0+cu124", "original"),
        (tree.SOURCE, None, "2.6.0", "original"),
        (PATCHED, tree.SOURCE, "2.6.0+cpu", "patched"),
        (FOREIGN, tree.SOURCE, "2.6.0", "foreign"),
        (OLDER, tree.SOURCE, "2.6.0", "foreign"),
        (b"x = 1\n", b"x = 1\n", "2.99.0", "original"),
        (b"x = 1\n", None, "2.99.0", "foreign"),
        (PATCHED, tree.SOURCE, "2.99.0", "foreign"),
    ],
)
def test_state(tmp_path: Path, source: bytes, recorded: bytes | None, version: str, state: str) -> None:
    path = tree.build(tmp_path, version, source, recorded)
    assert patching.state_of(patching.read_torch_file(str(path)), MANIFEST) == state


def test_the_record_of_a_leftover_older_version_is_not_believed(tmp_path: Path) -> None:
    path = tree.build(tmp_path, "2.6.0+cu124")
    tree.write_record(path.parents[1], "2.5.1", b"older")
    assert patching.read_torch_file(str(path)).recorded_sha256 == tree.sha256(tree.SOURCE)


@pytest.mark.parametrize("text", ["", "__version__ = None\n", "__version__ = '../../etc'\n", "(\n"])
def test_a_torch_without_a_usable_version_is_refused(tmp_path: Path, text: str) -> None:
    path = tree.build(tmp_path)
    path.with_name("version.py").write_text(text)
    with pytest.raises(patching.PatchError, match="can't tell the version of torch"):
        patching.read_torch_file(str(path))


# --- patching -------------------------------------------------------------------------------------


def test_patch_twice_and_roll_back_twice(tmp_path: Path, backups: str) -> None:
    path = tree.build(tmp_path)
    assert put(path, backups).changed
    assert path.read_bytes() == PATCHED
    again = patching.plan_present(patching.read_torch_file(str(path)), MANIFEST, tree.HOOK)
    assert not again.changed
    assert again.diff() == ""
    back = take_out(path, backups)
    assert back.changed
    assert "restored from" in " ".join(back.notes)
    assert path.read_bytes() == tree.SOURCE
    assert not patching.plan_absent(patching.read_torch_file(str(path)), MANIFEST, backups).changed


def test_the_diff_shows_only_the_hook(tmp_path: Path) -> None:
    path = tree.build(tmp_path)
    diff = patching.plan_present(patching.read_torch_file(str(path)), MANIFEST, tree.HOOK).diff()
    changed = [line[1:] for line in diff.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    assert [line.removeprefix("    ") for line in changed] == tree.HOOK.splitlines()
    assert str(path) in diff


def test_the_backup_says_what_it_is(tmp_path: Path, backups: str) -> None:
    path = tree.build(tmp_path)
    put(path, backups)
    kept = Path(patching.backup_path(backups, "2.6.0+cu124", tree.sha256(tree.SOURCE)))
    assert kept.read_bytes() == tree.SOURCE
    manifest = json.loads(kept.with_name("backup.json").read_text())
    assert manifest.pop("created_at")
    assert manifest == {
        "schema_version": 1,
        "torch_version": "2.6.0+cu124",
        "path": str(path),
        "pristine_sha256": tree.sha256(tree.SOURCE),
        "patched_sha256": tree.sha256(PATCHED),
        "bench_version": "1.2.3",
    }


def test_an_unknown_version_is_refused_with_version_hash_and_the_known_ones(tmp_path: Path) -> None:
    path = tree.build(tmp_path, "2.99.1+cpu")
    with pytest.raises(patching.PatchError) as error:
        patching.plan_present(patching.read_torch_file(str(path)), MANIFEST, tree.HOOK)
    for part in (str(path), "2.99.1+cpu", tree.sha256(tree.SOURCE), "2.6.0", "patches/README.md"):
        assert part in str(error.value)


@pytest.mark.parametrize("source", [FOREIGN, tree.SOURCE + b"\n"])
def test_a_foreign_file_is_refused_with_all_hashes_and_the_way_out(tmp_path: Path, source: bytes) -> None:
    path = tree.build(tmp_path, source=source)
    with pytest.raises(patching.PatchError) as error:
        patching.plan_present(patching.read_torch_file(str(path)), MANIFEST, tree.HOOK)
    for part in (
        str(path),
        "torch 2.6.0+cu124",
        tree.sha256(source),
        tree.sha256(tree.SOURCE),
        tree.sha256(PATCHED),
        f"{tmp_path}/venv/bin/python -m pip install --force-reinstall --no-deps torch==2.6.0",
    ):
        assert part in str(error.value)


def test_another_build_of_a_known_version_is_original_but_not_patched(tmp_path: Path) -> None:
    vendor = tree.SOURCE + b"\n# vendor\n"
    file = patching.read_torch_file(str(tree.build(tmp_path, source=vendor, recorded=vendor)))
    assert patching.state_of(file, MANIFEST) == "original"
    with pytest.raises(patching.PatchError, match="of another build"):
        patching.plan_present(file, MANIFEST, tree.HOOK)


def test_hook_and_manifest_of_different_releases_are_refused(tmp_path: Path) -> None:
    file = patching.read_torch_file(str(tree.build(tmp_path)))
    with pytest.raises(patching.PatchError, match="not of one release"):
        patching.plan_present(file, MANIFEST, tree.HOOK.replace("take_storages", "hand_over"))


def test_the_hook_of_an_earlier_release_is_replaced_and_the_backup_stays_the_original(
    tmp_path: Path, backups: str
) -> None:
    path = tree.build(tmp_path, source=OLDER)
    change = put(path, backups)
    assert "another bench release" in " ".join(change.notes)
    assert path.read_bytes() == PATCHED
    take_out(path, backups)
    assert path.read_bytes() == tree.SOURCE


# --- rolling back ---------------------------------------------------------------------------------


def break_content(kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:-1])


def break_manifest(kept: Path) -> None:
    kept.with_name("backup.json").write_text('{"pristine_sha')


def break_claim(kept: Path) -> None:
    kept.with_name("backup.json").write_text("[]")


def lose(kept: Path) -> None:
    kept.unlink()


@pytest.mark.parametrize(
    ("harm", "note"),
    [
        (break_content, "damaged"),
        (break_manifest, "can't be read"),
        (break_claim, "damaged"),
        (lose, "is missing"),
    ],
)
def test_without_a_good_backup_the_original_comes_from_taking_the_hook_out(
    tmp_path: Path, backups: str, harm, note: str
) -> None:
    path = tree.build(tmp_path)
    put(path, backups)
    kept = Path(patching.backup_path(backups, "2.6.0+cu124", tree.sha256(tree.SOURCE)))
    harm(kept)
    notes = " ".join(take_out(path, backups).notes)
    assert path.read_bytes() == tree.SOURCE
    assert note in notes
    assert str(kept.parent) in notes
    assert "taking the hook out gave the original" in notes


def test_rollback_knows_the_hook_of_another_release(tmp_path: Path, backups: str) -> None:
    path = tree.build(tmp_path, source=OLDER)
    take_out(path, backups)
    assert path.read_bytes() == tree.SOURCE


def test_rollback_of_a_foreign_file_is_refused_and_names_the_verified_backup(tmp_path: Path, backups: str) -> None:
    path = tree.build(tmp_path)
    put(path, backups)
    path.write_bytes(FOREIGN)
    with pytest.raises(patching.PatchError) as error:
        take_out(path, backups)
    kept = patching.backup_path(backups, "2.6.0+cu124", tree.sha256(tree.SOURCE))
    for part in (tree.sha256(FOREIGN), tree.sha256(tree.SOURCE), "copy the verified backup over it", kept):
        assert part in str(error.value)
    assert path.read_bytes() == FOREIGN
    Path(kept).write_bytes(b"damaged")
    with pytest.raises(patching.PatchError, match="pip install --force-reinstall") as error:
        take_out(path, backups)
    assert "copy the verified backup" not in str(error.value)


def test_after_an_upgrade_the_old_backup_is_never_used(tmp_path: Path, backups: str) -> None:
    path = tree.build(tmp_path)
    put(path, backups)
    newer = tree.SOURCE.replace(b"names;", b"NAMES;")
    path.write_bytes(newer)
    path.with_name("version.py").write_text("__version__ = '2.7.1'\n")
    (path.parents[1] / "torch-2.6.0.dist-info" / "RECORD").unlink()
    tree.write_record(path.parents[1], "2.7.1", newer)
    assert not take_out(path, backups).changed
    assert path.read_bytes() == newer
    path.write_bytes(newer + b"# edited\n")
    with pytest.raises(patching.PatchError) as error:
        take_out(path, backups)
    assert "no backup of torch 2.7.1" in str(error.value)
    assert "backups: 2.6.0+cu124" in str(error.value)
    assert "torch==2.7.1" in str(error.value)


def test_rollback_stops_when_the_wheel_says_the_original_was_another(tmp_path: Path, backups: str) -> None:
    path = tree.build(tmp_path, source=PATCHED, recorded=b"another original")
    with pytest.raises(patching.PatchError) as error:
        take_out(path, backups)
    assert tree.sha256(b"another original") in str(error.value)
    assert "RECORD" in str(error.value)
    assert path.read_bytes() == PATCHED


# --- the disk -------------------------------------------------------------------------------------


def test_other_hard_links_keep_what_they_had(tmp_path: Path, backups: str) -> None:
    path = tree.build(tmp_path)
    cached = tmp_path / "cache.py"
    os.link(path, cached)
    change = put(path, backups)
    assert "2 hard links" in " ".join(change.notes)
    assert cached.read_bytes() == tree.SOURCE
    os.link(path, tmp_path / "other.py")
    assert "2 hard links" in " ".join(take_out(path, backups).notes)
    assert (tmp_path / "other.py").read_bytes() == PATCHED
    assert cached.stat().st_nlink == 1


def test_a_file_linked_to_a_cache_by_symlink_leaves_the_cache_alone(tmp_path: Path, backups: str) -> None:
    path = tree.build(tmp_path)
    cached = tmp_path / "cache.py"
    path.rename(cached)
    path.symlink_to(cached)
    put(path, backups)
    assert cached.read_bytes() == tree.SOURCE
    assert path.read_bytes() == PATCHED


def test_mode_and_owner_stay(tmp_path: Path, backups: str) -> None:
    path = tree.build(tmp_path)
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 12345, 23456)
    before = path.stat()
    put(path, backups)
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino


def test_stale_bytecode_goes_both_ways_and_other_modules_keep_theirs(tmp_path: Path, backups: str) -> None:
    path = tree.build(tmp_path)
    put(path, backups)
    assert tree.bytecode(path) == ["storage.cpython-311.pyc"]
    (path.parent / "__pycache__" / "serialization.cpython-312.pyc").write_bytes(b"patched")
    take_out(path, backups)
    assert tree.bytecode(path) == ["storage.cpython-311.pyc"]


def test_a_write_that_fails_leaves_the_old_file_and_no_leftovers(
    tmp_path: Path, backups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tree.build(tmp_path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    change = patching.plan_present(patching.read_torch_file(str(path)), MANIFEST, tree.HOOK)
    with pytest.raises(OSError, match="No space left"):
        patching.replace_torch_file(change)
    assert path.read_bytes() == tree.SOURCE
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "__pycache__",
        "serialization.py",
        "version.py",
    ]


def test_finding_torch(tmp_path: Path) -> None:
    assert patching.find_in_venv(str(tmp_path / "venv")) is None
    path = tree.build(tmp_path)
    (tmp_path / "venv" / "lib64").symlink_to("lib")
    assert patching.find_in_venv(str(tmp_path / "venv")) == str(path)
    (tmp_path / "venv" / "lib" / "python3.12" / "site-packages" / "torch").mkdir(parents=True)
    with pytest.raises(patching.PatchError, match="more than once"):
        patching.find_in_venv(str(tmp_path / "venv"))


def test_a_torch_folder_shared_by_a_link_is_refused(tmp_path: Path) -> None:
    path = tree.build(tmp_path)
    path.parent.rename(tmp_path / "shared")
    path.parent.symlink_to(tmp_path / "shared")
    with pytest.raises(patching.PatchError, match="every environment that uses that folder"):
        patching.find_in_venv(str(tmp_path / "venv"))


def test_a_torch_without_its_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tree.build(tmp_path)
    path.unlink()
    with pytest.raises(patching.PatchError, match=re.escape(f"cannot read {path}")):
        patching.read_torch_file(str(path))


def test_a_manifest_entry_is_made_only_from_an_unchanged_file(tmp_path: Path) -> None:
    path = tree.build(tmp_path)
    entry = patching.manifest_entry(patching.read_torch_file(str(path)), tree.HOOK)
    assert patching.parse_manifest({"versions": entry}) == MANIFEST
    path.write_bytes(tree.SOURCE + b"\n")
    with pytest.raises(patching.PatchError, match="RECORD"):
        patching.manifest_entry(patching.read_torch_file(str(path)), tree.HOOK)
