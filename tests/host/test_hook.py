"""The hook in the real torch: patched on disk and installed in memory, each in processes of their own.

torch is imported from an overlay: links to the installed package, but for serialization.py, which is a copy.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import layout
from bench.host import hook, patching

CHECKOUT = Path(__file__).resolve().parents[2]

# What a process says about its torch, after the steps named by its arguments.
PROBE = """
import io, json, struct, sys
from bench.host import hook

said = {"state": hook.patch_state().model_dump()}
if "no-torch-import" in sys.argv:
    said["imported"] = "torch" in sys.modules
    print(json.dumps(said))
    sys.exit()

import torch

said["live"] = hook.hook_is_live()
if "only-live" in sys.argv:
    print(json.dumps(said))
    sys.exit()
if "install" in sys.argv:
    try:
        hook.install_in_process()
        hook.install_in_process()
    except hook.HookError as error:
        said["refused"] = str(error)
    said["live_after"] = hook.hook_is_live()
    said["state_after"] = hook.patch_state().model_dump()

class Through(io.BytesIO):
    # A reference for the method: size in elements as 8 bytes, then the bytes, storage after storage.
    calls = 0
    def save_torch_storage_object_list(self, storages, save_size):
        self.calls += 1
        assert save_size is True
        for storage, dtype in storages:
            data = bytes(storage.cpu().tolist())
            self.write(struct.pack("<q", len(data) // dtype.itemsize) + data)

def save(save_with, file):
    save_with(tensors, file, _use_new_zipfile_serialization=False)
    return file

shared = torch.arange(12, dtype=torch.float32)
tensors = {
    "weight": torch.randn(17, 3), "tied": shared, "view": shared[2:7], "turned": torch.randn(4, 5).t(),
    "half": torch.randn(9).bfloat16(), "complex": torch.randn(3, dtype=torch.complex64),
    "one": torch.tensor([7], dtype=torch.uint8), "scalar": torch.tensor(2.5), "empty": torch.empty(0),
    "flag": torch.tensor([True, False]),
}
plain = save(torch.save, io.BytesIO()).getvalue()
through = save(torch.save, Through())
said["calls"] = through.calls
said["same_as_plain"] = through.getvalue() == plain
loaded = torch.load(io.BytesIO(through.getvalue()), weights_only=True)
said["loads_equal"] = all(torch.equal(loaded[k], tensors[k]) for k in tensors)
zipped = Through()
torch.save(tensors, zipped, _use_new_zipfile_serialization=True)
said["calls_with_zip"] = zipped.calls

if "then-patch-the-file" in sys.argv:
    # The other way, with the same tensors at the same addresses: the file patched on disk, imported anew.
    import importlib
    from bench.host import patching
    change = patching.plan_present(hook.torch_file(), hook.load_manifest(), hook.load_hook())
    patching.replace_torch_file(change)
    import torch.serialization
    importlib.reload(torch.serialization)
    from_file = save(torch.serialization.save, Through())
    said["from_file_calls"] = from_file.calls
    said["both_ways_equal"] = from_file.getvalue() == through.getvalue()
print(json.dumps(said))
"""


def environment(*first: Path) -> dict[str, str]:
    path = [*map(str, first), str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONDONTWRITEBYTECODE": "1"}


def installed() -> patching.TorchFile:
    return hook.torch_file()


def pristine() -> bytes:
    """The original text, whether the environment under test is patched or not."""
    file = installed()
    text = patching.remove_hook(file.data) or file.data
    known = hook.load_manifest()[file.base_version]
    assert patching.sha256_of(text) == known.pristine_sha256, f"{file.path} is foreign; reinstall torch"
    return text


class Overlay:
    """A folder that, first on the path, provides torch with another serialization.py."""

    def __init__(self, folder: Path) -> None:
        real = Path(installed().path).parent
        self.folder = folder
        self.file = folder / "torch" / "serialization.py"
        for entry in real.parent.iterdir():
            if entry.name not in ("torch", "__pycache__"):
                (folder / entry.name).symlink_to(entry)
        self.file.parent.mkdir()
        for entry in real.iterdir():
            if entry.name not in ("serialization.py", "__pycache__"):
                (self.file.parent / entry.name).symlink_to(entry)
        self.file.write_bytes(pristine())

    def probe(self, *steps: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, *steps],
            env=environment(self.folder) | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    folder = tmp_path / "overlay"
    folder.mkdir()
    return Overlay(folder)


def test_the_real_file_is_patched_and_restored_byte_for_byte(overlay: Overlay, tmp_path: Path) -> None:
    backups = str(tmp_path / "backups")
    manifest = hook.load_manifest()
    known = manifest[installed().base_version]
    file = patching.read_torch_file(str(overlay.file))
    change = patching.plan_present(file, manifest, hook.load_hook())
    patching.write_backup(backups, change, "test")
    patching.replace_torch_file(change)
    assert patching.sha256_of(overlay.file.read_bytes()) == known.patched_sha256
    back = patching.plan_absent(patching.read_torch_file(str(overlay.file)), manifest, backups)
    patching.replace_torch_file(back)
    assert patching.sha256_of(overlay.file.read_bytes()) == known.pristine_sha256
    assert "restored from" in " ".join(back.notes)


def test_the_wheel_recorded_the_same_original(overlay: Overlay) -> None:
    file = patching.read_torch_file(str(overlay.file))
    assert file.recorded_sha256 == hook.load_manifest()[file.base_version].pristine_sha256
    assert file.version == installed().version


def test_state_is_known_without_importing_torch(overlay: Overlay) -> None:
    said = overlay.probe("no-torch-import")
    assert said["imported"] is False
    assert said["state"] == {
        "path": str(overlay.file),
        "torch_version": installed().version,
        "state": "original",
        "sha256": patching.sha256_of(pristine()),
    }


def test_patched_on_disk_every_storage_comes_through_the_hook(overlay: Overlay) -> None:
    overlay.file.write_bytes(patching.insert_hook(pristine(), hook.load_hook()))
    said = overlay.probe("install")
    assert said["state"]["state"] == "patched"
    assert said["live"] is True
    assert "refused" not in said
    assert said["calls"] == 1
    assert said["same_as_plain"] is True
    assert said["loads_equal"] is True
    assert said["calls_with_zip"] == 0


def test_without_the_patch_the_hook_is_not_live(overlay: Overlay) -> None:
    said = overlay.probe()
    assert said["state"]["state"] == "original"
    assert said["live"] is False
    assert said["calls"] == 0


def test_installed_in_memory_it_saves_what_the_patched_file_saves(overlay: Overlay) -> None:
    said = overlay.probe("install", "then-patch-the-file")
    assert said["live"] is False
    assert said["live_after"] is True
    assert said["state_after"] == said["state"]
    assert said["calls"] == said["from_file_calls"] == 1
    assert said["same_as_plain"] is True
    assert said["both_ways_equal"] is True


def test_a_foreign_file_gets_no_hook_in_memory_either(overlay: Overlay) -> None:
    overlay.file.write_bytes(pristine() + b"# edited\n")
    said = overlay.probe("install")
    assert said["state"]["state"] == "foreign"
    assert "is foreign" in said["refused"]
    assert said["live_after"] is False


def test_a_hook_that_says_something_else_is_no_proof(overlay: Overlay) -> None:
    text = hook.load_hook().replace("save_size=True", "save_size=False")
    overlay.file.write_bytes(patching.insert_hook(pristine(), text))
    assert overlay.probe("only-live")["live"] is False


def test_no_torch_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(hook.HookError, match="torch is not installed"):
        hook.patch_state()


def test_an_incomplete_installation_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layout, "patches_folder", lambda: tmp_path)
    for read in (hook.load_manifest, hook.load_hook):
        with pytest.raises(hook.HookError, match="install fastpersist-bench again"):
            read()


def test_a_new_torch_version_gets_its_manifest_entry(overlay: Overlay) -> None:
    command = [sys.executable, "-m", "bench.host.hook"]
    done = subprocess.run([*command, overlay.file], env=environment(), capture_output=True, text=True, check=True)
    known = hook.load_manifest()[installed().base_version]
    assert patching.parse_manifest({"versions": json.loads(done.stdout)}) == {installed().base_version: known}
    overlay.file.write_bytes(pristine() + b"# edited\n")
    done = subprocess.run([*command, overlay.file], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RECORD" in done.stderr
    assert "Traceback" not in done.stderr
