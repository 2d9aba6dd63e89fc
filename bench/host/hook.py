"""torch's hook as this process sees it: state of the file, proof that it is live, a hook in memory only.

What the hook is and how it gets into a file is in :mod:`bench.host.patching`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from types import CodeType
from typing import Any

from bench import layout
from bench.host import patching
from bench.results import Patch


class HookError(ValueError):
    """torch is missing, or the hook can't be put in; the message says where and what to do."""


def load_manifest() -> dict[str, patching.Known]:
    """The torch versions this release is validated for; HookError when the installation is incomplete."""
    path = layout.patches_folder() / patching.MANIFEST_FILE
    try:
        return patching.parse_manifest(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError) as error:
        raise HookError(f"the hook's manifest can't be used ({error}); install fastpersist-bench again") from error


def load_hook() -> str:
    """The text that goes into torch; raises HookError when the installation is incomplete."""
    path = layout.patches_folder() / patching.HOOK_FILE
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise HookError(f"the hook {path} can't be read ({error.strerror}); install fastpersist-bench again") from error


def torch_file() -> patching.TorchFile:
    """serialization.py of the torch ``import torch`` would give, found without importing it; or HookError."""
    spec = importlib.util.find_spec("torch")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise HookError("torch is not installed in this Python; run make provision, or use <bench_runtime_root>/venv")
    try:
        return patching.read_torch_file(os.path.join(folders[0], "serialization.py"))
    except patching.PatchError as error:
        raise HookError(str(error)) from error


def patch_state() -> Patch:
    """Path, version, sha256 and state (patched, original, foreign) of serialization.py; or HookError."""
    file = torch_file()
    return Patch(
        path=file.path,
        torch_version=file.version,
        state=patching.state_of(file, load_manifest()),
        sha256=file.sha256,
    )


class _Recorder:
    """A file object with the hook's method: keeps what torch writes and what torch hands over."""

    def __init__(self) -> None:
        self.handed_over: list[tuple[list[tuple[Any, Any]], bool]] = []

    def write(self, data: bytes) -> int:
        return len(data)

    def flush(self) -> None:
        pass

    def save_torch_storage_object_list(self, storages: list[tuple[Any, Any]], save_size: bool) -> None:
        self.handed_over.append((storages, save_size))


def hook_is_live() -> bool:
    """Proof by behaviour: does ``torch.save`` in this process hand storages to a file object that takes them?

    Saves one byte in the legacy format to an object in memory. False also when torch calls the method
    with anything but one list of (storage, dtype) pairs and ``save_size=True``. Raises HookError without a
    torch that can be imported.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise HookError(f"torch can't be imported ({error}); run make provision again") from error
    recorder = _Recorder()
    tensor = torch.zeros(1, dtype=torch.uint8)
    torch.save(tensor, recorder, _use_new_zipfile_serialization=False)
    if len(recorder.handed_over) != 1:
        return False
    storages, save_size = recorder.handed_over[0]
    return (
        save_size is True
        and len(storages) == 1
        and storages[0][0].data_ptr() == tensor.data_ptr()
        and storages[0][1] == torch.uint8
    )


def install_in_process() -> None:
    """Put the hook into the imported torch of this process only; nothing on disk changes.

    The same insertion and the same hashes as for the file. Nothing to do when the hook is live already.
    Raises HookError when the file is foreign, of an unknown version, or the hook is not live afterwards.
    """
    if hook_is_live():
        return
    file = torch_file()
    try:
        patched = patching.plan_present(file, load_manifest(), load_hook()).new
    except patching.PatchError as error:
        raise HookError(str(error)) from error
    serialization = importlib.import_module("torch.serialization")
    module_code = compile(patched, f"{file.path} with the hook in memory", "exec", dont_inherit=True)
    # Exchanging the code keeps the function object, its defaults and every reference to it.
    getattr(serialization, patching.FUNCTION).__code__ = _code_of(module_code, patching.FUNCTION)
    if not hook_is_live():
        raise HookError(f"{file.path}: the hook was put into this process but torch.save does not reach it")


def _code_of(module_code: CodeType, function: str) -> CodeType:
    (code,) = [
        constant
        for constant in module_code.co_consts
        if isinstance(constant, CodeType) and constant.co_name == function
    ]
    return code


def main(arguments: list[str]) -> str:
    """The manifest's entry, as JSON, for the unchanged serialization.py that is named; or HookError."""
    if len(arguments) != 1:
        raise HookError("usage: python -m bench.host.hook path/to/torch/serialization.py")
    try:
        return json.dumps(patching.manifest_entry(patching.read_torch_file(arguments[0]), load_hook()), indent=2)
    except patching.PatchError as error:
        raise HookError(str(error)) from error


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except HookError as error:
        sys.exit(str(error))
