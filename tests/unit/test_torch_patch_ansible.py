"""The torch_patch role and the rollback playbook, run by the real ansible-playbook on throwaway trees."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch_patch_tree as tree

from bench.host import patching

PATCHED = patching.insert_hook(tree.SOURCE, tree.HOOK)
FOREIGN = PATCHED + b"# somebody was here\n"
ROLLBACK = tree.CHECKOUT / "playbooks" / "rollback.yml"


class Fleet:
    """Hosts that are folders of this machine, reached by the local connection; all but the dead one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.apply = folder / "apply.yml"
        self.apply.write_text("- hosts: all\n  gather_facts: false\n  roles: [torch_patch]\n")
        patches = folder / "patches"
        patches.mkdir()
        (patches / patching.HOOK_FILE).write_text(tree.HOOK)
        versions = {"2.6.0": {"pristine_sha256": tree.sha256(tree.SOURCE), "patched_sha256": tree.sha256(PATCHED)}}
        (patches / "manifest.json").write_text(json.dumps({"schema_version": 1, "versions": versions}))
        self.hosts: dict[str, dict] = {}

    def host(self, name: str, **build: object) -> Path:
        """Add a host; returns its serialization.py."""
        self.empty_host(name)
        return tree.build(self.folder / name, **build)

    def empty_host(self, name: str, **variables: object) -> None:
        self.hosts[name] = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "ansible_become": False,
            "bench_runtime_root": str(self.folder / name),
            "torch_patch_patches_folder": str(self.folder / "patches"),
            **variables,
        }

    def play(self, playbook: Path, *arguments: str) -> tuple[int, str]:
        """Exit code and everything printed."""
        inventory = self.folder / "inventory.json"
        inventory.write_text(json.dumps({"all": {"hosts": self.hosts}}))
        beside = Path(sys.executable).with_name("ansible-playbook")
        command = str(beside) if beside.exists() else shutil.which("ansible-playbook")
        assert command, "ansible-playbook is part of the controller's environment: run make venv"
        environment = os.environ | {
            "ANSIBLE_CONFIG": str(tree.CHECKOUT / "ansible.cfg"),
            "ANSIBLE_ROLES_PATH": str(tree.CHECKOUT / "roles"),
            "ANSIBLE_LOCAL_TEMP": str(self.folder / "tmp"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORKS": "4",
        }
        environment.pop("ANSIBLE_FORCE_COLOR", None)
        done = subprocess.run(
            [command, "-i", str(inventory), str(playbook), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def recap(output: str, host: str) -> dict[str, int]:
    """Counters of one host in the recap."""
    (line,) = re.findall(rf"^{re.escape(host)} +: (.*)$", output, re.MULTILINE)
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_check_patch_again_roll_back_again(fleet: Fleet) -> None:
    path = fleet.host("one")
    before = contents(fleet.folder / "one")

    code, output = fleet.play(fleet.apply, "--check", "--diff")
    assert code == 0, output
    assert recap(output, "one")["changed"] == 1
    assert "+    if take_storages is not None:" in output
    assert "would be patched (was original)" in output
    assert contents(fleet.folder / "one") == before

    code, output = fleet.play(fleet.apply)
    assert code == 0, output
    assert recap(output, "one")["changed"] == 1
    assert path.read_bytes() == PATCHED
    assert tree.bytecode(path) == ["storage.cpython-311.pyc"]
    kept = Path(patching.backup_path(str(fleet.folder / "one/backups"), "2.6.0+cu124", tree.sha256(tree.SOURCE)))
    assert kept.read_bytes() == tree.SOURCE
    version = re.search('"(.*)"', (tree.CHECKOUT / "bench/__init__.py").read_text().split("__version__")[1])
    assert json.loads(kept.with_name("backup.json").read_text())["bench_version"] == version.group(1)

    after = contents(fleet.folder / "one")
    code, output = fleet.play(fleet.apply, "--diff")
    assert code == 0, output
    assert recap(output, "one")["changed"] == 0
    assert "patched already" in output
    assert contents(fleet.folder / "one") == after

    code, output = fleet.play(ROLLBACK, "--check", "--diff")
    assert code == 0, output
    assert recap(output, "one")["changed"] == 1
    assert "-    if take_storages is not None:" in output
    assert contents(fleet.folder / "one") == after

    code, output = fleet.play(ROLLBACK)
    assert code == 0, output
    assert recap(output, "one")["changed"] == 1
    assert f"original (was patched): {path}; restored from {kept}" in output
    assert path.read_bytes() == tree.SOURCE

    code, output = fleet.play(ROLLBACK)
    assert code == 0, output
    assert recap(output, "one")["changed"] == 0
    assert "original already" in output


def test_every_host_is_patched_or_refused_on_its_own(fleet: Fleet) -> None:
    good = fleet.host("good")
    foreign = fleet.host("foreign", source=FOREIGN)
    unknown = fleet.host("unknown", version="2.99.0")
    fleet.empty_host("bare")
    blocked = fleet.host("blocked")
    (fleet.folder / "blocked" / "backups").write_text("a file in the way")
    unbacked = fleet.host("unbacked", source=PATCHED)

    code, output = fleet.play(fleet.apply)
    assert code != 0
    assert "Traceback" not in output
    assert good.read_bytes() == PATCHED
    assert foreign.read_bytes() == FOREIGN
    assert unknown.read_bytes() == blocked.read_bytes() == tree.SOURCE
    said = {host: failure(output, host) for host in ("foreign", "unknown", "bare", "blocked")}
    assert tree.sha256(FOREIGN) in said["foreign"]
    assert "2.99.0 is not a version the hook is validated for" in said["unknown"]
    assert "torch is not installed" in said["bare"]
    assert "Not a directory" in said["blocked"]
    assert str(fleet.folder / "blocked" / "backups") in said["blocked"]
    assert "serialization.py is whole" in said["blocked"]
    # A patched file whose backup went missing gets a new one.
    assert unbacked.read_bytes() == PATCHED
    assert recap(output, "unbacked")["changed"] == 1
    assert list((fleet.folder / "unbacked" / "backups").rglob("backup.json"))


def test_in_check_mode_a_host_without_torch_would_be_patched(fleet: Fleet) -> None:
    fleet.empty_host("bare")
    code, output = fleet.play(fleet.apply, "--check")
    assert code == 0, output
    assert "it would be patched once installed" in output
    assert recap(output, "bare")["changed"] == 1


def test_a_damaged_backup_is_replaced_when_patching_again(fleet: Fleet) -> None:
    fleet.host("one", source=PATCHED)
    kept = Path(patching.backup_path(str(fleet.folder / "one/backups"), "2.6.0+cu124", tree.sha256(tree.SOURCE)))
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"damaged")
    kept.with_name("backup.json").write_text("{}")
    code, output = fleet.play(fleet.apply)
    assert code == 0, output
    assert f"the backup {kept} is damaged" in output
    assert kept.read_bytes() == tree.SOURCE


def test_rollback_goes_on_past_hosts_that_fail_or_are_dead(fleet: Fleet) -> None:
    fleet.empty_host(
        "a-dead",
        ansible_connection="ssh",
        ansible_host="127.0.0.1",
        ansible_port=1,
        ansible_ssh_common_args="-F none",
    )
    foreign = fleet.host("b-foreign", source=FOREIGN)
    patched = fleet.host("c-patched", source=PATCHED)
    original = fleet.host("d-original")
    fleet.empty_host("e-bare")
    fleet.empty_host("f-path", torch_patch_path=str(tree.build(fleet.folder / "f-path", source=PATCHED)))

    code, output = fleet.play(ROLLBACK)
    assert code != 0
    assert "Traceback" not in output
    assert recap(output, "a-dead")["unreachable"] == 1
    assert recap(output, "b-foreign")["failed"] == 1
    assert "is foreign" in failure(output, "b-foreign")
    assert foreign.read_bytes() == FOREIGN
    assert patched.read_bytes() == original.read_bytes() == tree.SOURCE
    for host, changed in (("c-patched", 1), ("d-original", 0), ("e-bare", 0), ("f-path", 1)):
        assert recap(output, host)["changed"] == changed
        assert recap(output, host)["failed"] == 0
    assert "taking the hook out gave the original" in output
    assert "nothing to restore" in output

    code, output = fleet.play(ROLLBACK, "--limit", "c-patched:d-original")
    assert code == 0, output
    assert "b-foreign" not in output


def test_a_host_without_a_runtime_root_is_refused_before_anything_happens(fleet: Fleet) -> None:
    path = fleet.host("one")
    del fleet.hosts["one"]["bench_runtime_root"]
    code, output = fleet.play(fleet.apply)
    assert code != 0
    assert "bench_runtime_root" in output
    assert path.read_bytes() == tree.SOURCE


def failure(output: str, host: str) -> str:
    """What a failed host said, in one line."""
    start = output.index(f"fatal: [{host}]")
    return re.split(r"\n(?:fatal|ok|changed|TASK|PLAY)", output[start:])[0]
