"""Teardown's confirmation: from this run's command line or not at all. The host doesn't exist: nothing can happen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from nvme_raid_machine import ROLE

CHECKOUT = ROLE.parents[1]
INVENTORY = """
all:
  hosts:
    nowhere: {ansible_connection: ssh, ansible_host: no-such-host.invalid, ansible_python_interpreter: /usr/bin/python3}
  vars: {bench_runtime_root: /opt/fastpersist-bench%s}
"""


def teardown(folder: Path, *arguments: str, in_inventory: str = "", playbook: str = "playbooks/teardown.yml") -> str:
    inventory = folder / "hosts.yml"
    inventory.write_text(INVENTORY % in_inventory, encoding="utf-8")
    program = Path(sys.executable).parent / "ansible-playbook"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    done = subprocess.run(
        [str(program), "--inventory", str(inventory), *arguments, playbook],
        cwd=CHECKOUT, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
        env={**environment, "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"), "ANSIBLE_ROLES_PATH": str(ROLE.parent)},
    )  # fmt: skip
    assert done.returncode != 0
    return done.stdout


def test_the_command_line_confirms(tmp_path: Path) -> None:
    assert "UNREACHABLE" in teardown(tmp_path, "--extra-vars", "nvme_raid_confirm=fastpersist")


@pytest.mark.parametrize(
    ("arguments", "in_inventory"),
    [
        ([], ""),
        (["--extra-vars", "nvme_raid_confirm="], ""),
        (["--extra-vars", "nvme_raid_confirm=other"], ""),
        (["--extra-vars", '{"nvme_raid_confirm": true}'], ""),
        ([], ", nvme_raid_confirm: fastpersist"),
        (["--extra-vars", "@FILE"], ""),
    ],
    ids=["nothing", "empty", "other name", "true", "inventory", "file"],
)
def test_nothing_else_confirms(tmp_path: Path, arguments: list[str], in_inventory: str) -> None:
    file = tmp_path / "vars.yml"
    file.write_text("nvme_raid_confirm: fastpersist\n", encoding="utf-8")
    arguments = [argument.replace("FILE", str(file)) for argument in arguments]
    output = teardown(tmp_path, *arguments, in_inventory=in_inventory)
    assert "teardown refused" in output
    assert "make teardown HOSTS=nowhere CONFIRM=fastpersist" in output
    assert "UNREACHABLE" not in output


def test_an_empty_name_is_never_confirmed(tmp_path: Path) -> None:
    output = teardown(tmp_path, "--extra-vars", "nvme_raid_confirm=", in_inventory=', nvme_raid_name: ""')
    assert "teardown refused" in output
    assert "UNREACHABLE" not in output


def test_a_rescue_destroys_nothing_even_when_confirmed(tmp_path: Path) -> None:
    playbook = tmp_path / "rescue.yml"
    playbook.write_text(
        "- hosts: all\n  gather_facts: false\n  tasks:\n  - block:\n    - ansible.builtin.fail: {msg: broken}\n"
        "    rescue:\n    - ansible.builtin.include_role: {name: nvme_raid, tasks_from: teardown}\n",
        encoding="utf-8",
    )
    output = teardown(tmp_path, "--extra-vars", "nvme_raid_confirm=fastpersist", playbook=str(playbook))
    assert "nothing is destroyed in a rescue" in output
    assert "UNREACHABLE" not in output


def test_a_task_can_not_confirm(tmp_path: Path) -> None:
    playbook = tmp_path / "task.yml"
    playbook.write_text(
        "- hosts: all\n  gather_facts: false\n  tasks:\n"
        "  - ansible.builtin.import_role: {name: nvme_raid}\n    when: false\n"
        "  - nvme_raid_teardown: {name: a, confirm: a, mount_point: /mnt/a, array_file: /x}\n",
        encoding="utf-8",
    )
    assert "can't be an argument of the task" in teardown(tmp_path, playbook=str(playbook))


def test_no_role_or_playbook_has_a_rescue() -> None:
    found = [
        str(path)
        for folder in (ROLE, CHECKOUT / "playbooks")
        for path in folder.rglob("*.yml")
        if re.search(r"^\s*(- )?rescue:", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert found == []
