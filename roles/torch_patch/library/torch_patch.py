#!/usr/bin/python
"""Ansible module: the hook in torch's serialization.py. What it decides is in bench/host/patching.py."""

from __future__ import annotations

import os

from ansible.module_utils import torch_patch_core as core
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: torch_patch
short_description: Patch torch's serialization.py with the FastPersist hook, or restore the original
description:
  - Puts a hook before the last loop of C(_legacy_save), after a backup. A new file is renamed over the old.
  - Hashes of the file are checked before and after; an unknown torch version or a file changed by somebody
    else is refused.
  - torch is not imported and no Python but Ansible's own is run, so a broken environment can be restored.
options:
  state:
    description:
      - V(present) patches.
      - V(absent) restores the original, byte for byte. Nothing is done where torch is not installed.
    type: str
    choices: [present, absent]
    default: present
  venv:
    description: Virtual environment that holds torch. Exactly one of O(venv) and O(path) is needed.
    type: path
  path:
    description: Path of C(torch/serialization.py) itself.
    type: path
  manifest:
    description: Content of C(patches/manifest.json), the torch versions and hashes that are validated.
    type: dict
    required: true
  hook:
    description: The lines to insert. Needed with O(state=present).
    type: str
  backup_folder:
    description: Where originals are kept, keyed by version and sha256.
    type: path
    required: true
  bench_version:
    description: Release that patches, for the backup's manifest.
    type: str
    default: unknown
attributes:
  check_mode:
    support: full
    description: Says what would change and changes nothing.
  diff_mode:
    support: full
    description: Shows the lines that go in or come out.
author: fastpersist-bench
"""

EXAMPLES = r"""
- name: Patch torch in a virtual environment
  torch_patch:
    venv: /opt/fastpersist-bench/venv
    backup_folder: /opt/fastpersist-bench/backups
    manifest: "{{ lookup('ansible.builtin.file', 'patches/manifest.json') | from_json }}"
    hook: "{{ lookup('ansible.builtin.file', 'patches/legacy_save_hook.py.txt') }}"

- name: Put the original back
  torch_patch:
    state: absent
    venv: /opt/fastpersist-bench/venv
    backup_folder: /opt/fastpersist-bench/backups
    manifest: "{{ lookup('ansible.builtin.file', 'patches/manifest.json') | from_json }}"
"""

RETURN = r"""
path:
  description: The file, empty where torch is not installed.
  type: str
  returned: always
torch_version:
  description: Version of the torch that owns the file, with its build label.
  type: str
  returned: where torch is installed
file_state:
  description: State of the file after the task (in check mode, as it would be).
  type: str
  returned: always
  sample: patched, original or missing
sha256:
  description: Hash that belongs to RV(file_state).
  type: str
  returned: where torch is installed
backup:
  description: Path of the original's backup; it may not exist when the file is original.
  type: str
  returned: where torch is installed
hard_links:
  description: Number of names the file had; above 1 it was shared with a package cache.
  type: int
  returned: where torch is installed
msg:
  description: One line for a person.
  type: str
  returned: always
"""


def locate(venv, path):
    """The file to work on, None where torch is not installed; raises PatchError."""
    if path:
        return path if os.path.isdir(os.path.dirname(path)) else None
    return core.find_in_venv(venv)


def patch(file, params, check_mode):
    """Put the hook in; returns the change, whether anything changed, and a line about the backup."""
    change = core.plan_present(file, core.parse_manifest(params["manifest"]), params["hook"])
    key = (params["backup_folder"], file.version, core.sha256_of(change.original))
    notes = list(change.notes)
    backed_up = True
    try:
        core.read_backup(*key)
    except core.PatchError as error:
        backed_up = False
        why = f" ({error})" if os.path.exists(core.backup_path(*key)) else ""
        notes.append(f"the original goes to {core.backup_path(*key)}{why}")
    if not check_mode:
        if not backed_up:
            core.write_backup(params["backup_folder"], change, params["bench_version"])
        if change.changed:
            core.replace_torch_file(change)
    return change, change.changed or not backed_up, notes


def restore(file, params, check_mode):
    """Put the original back; returns the change, whether anything changed, and where it came from."""
    change = core.plan_absent(file, core.parse_manifest(params["manifest"]), params["backup_folder"])
    if change.changed and not check_mode:
        core.replace_torch_file(change)
    return change, change.changed, change.notes


def without_torch(where, present, check_mode):
    """The result where torch is not installed; raises PatchError when there is nothing to patch."""
    if present and not check_mode:
        raise core.PatchError(f"torch is not installed in {where}; run make provision first")
    # In check mode the role before this one has not installed torch either.
    what = "it would be patched once installed" if present else "nothing to restore"
    return {"changed": present, "path": "", "file_state": "missing", "msg": f"no torch in {where}; {what}"}


def run(module):
    """Do what the task asks; raises PatchError or OSError."""
    params = module.params
    present = params["state"] == "present"
    path = locate(params["venv"], params["path"])
    if path is None:
        return without_torch(params["venv"] or params["path"], present, module.check_mode)
    file = core.read_torch_file(path)
    change, changed, notes = (patch if present else restore)(file, params, module.check_mode)
    would = "would be " if change.changed and module.check_mode else ""
    was = f" (was {change.state_before})" if change.changed else " already"
    result = {
        "changed": changed,
        "path": path,
        "torch_version": file.version,
        "file_state": change.state_after,
        "sha256": core.sha256_of(change.new),
        "backup": core.backup_path(params["backup_folder"], file.version, core.sha256_of(change.original)),
        "hard_links": file.links,
        "msg": "; ".join([f"torch {file.version} {would}{change.state_after}{was}: {path}", *notes]),
    }
    if module._diff and change.changed:
        result["diff"] = {"prepared": change.diff()}
    return result


def main():
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "venv": {"type": "path"},
            "path": {"type": "path"},
            "manifest": {"type": "dict", "required": True},
            "hook": {"type": "str"},
            "backup_folder": {"type": "path", "required": True},
            "bench_version": {"type": "str", "default": "unknown"},
        },
        mutually_exclusive=[("venv", "path")],
        required_one_of=[("venv", "path")],
        required_if=[("state", "present", ["hook"])],
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except core.PatchError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(
            msg=f"{error.filename or 'the new file'}: {error.strerror}. serialization.py is whole. "
            "Run as the owner of the environment (become), and check free space and mount options"
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
