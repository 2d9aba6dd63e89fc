#!/usr/bin/python
"""Ansible module: takes an nvme_raid array apart, if its action plugin saw that this run's command line says so."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nvme_raid_teardown
short_description: Take an NVMe RAID-0 array apart; its data is lost and its drives are free
description:
  - Unmounts the array, takes its lines out of fstab and mdadm.conf, wipes the signature of its filesystem, stops it
    and wipes the md superblocks of its members. Nothing else on any drive is written.
  - Works only when the extra variables of this run, as typed, hold C(nvme_raid_confirm) with the array's name.
  - An array that isn't there is no failure; lines that it left in configuration files are taken out.
options:
  name:
    description: Name of the array.
    type: str
    required: true
  confirm:
    description: Set by the action plugin from the command line, never by a task.
    type: str
    default: ""
  devices:
    description: As in the module nvme_raid. Where given, an array with other members is refused.
    type: list
    elements: str
    default: []
  match:
    description: As O(devices), by model.
    type: str
    default: ""
  mount_point:
    description: Where the array is mounted; one that is mounted elsewhere is refused.
    type: str
    required: true
  array_file:
    description: The array's description for the benchmark, which is removed.
    type: str
    required: true
author: fastpersist-bench
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
"""

EXAMPLES = r"""
# ansible-playbook --limit gpu-node-3 --extra-vars nvme_raid_confirm=fastpersist playbooks/teardown.yml
- name: Take the array apart
  nvme_raid_teardown:
    name: fastpersist
    mount_point: /mnt/fastpersist
    array_file: /opt/fastpersist-bench/array.json
"""

RETURN = r"""
steps:
  description: What was done, or in check mode would be, in order.
  type: list
  elements: str
  returned: success
notes:
  description: What remains for a person to know, such as members that aren't on this host.
  type: list
  elements: str
  returned: success
refusals:
  description: Every reason not to touch anything.
  type: list
  elements: str
  returned: failure
"""

import os
import socket
from typing import Callable, Dict

from ansible.module_utils import nvme_raid_choice as choice
from ansible.module_utils import nvme_raid_facts as reads
from ansible.module_utils import nvme_raid_rules as rules
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.nvme_raid_actions import (
    differences,
    do_steps,
    rebuild_initramfs,
    refuse,
    reload_systemd,
    replace_text,
)
from ansible.module_utils.nvme_raid_model import Decision, Facts, Step, Wanted


class Unmaker:
    """Carries out a teardown. To the last step the members know the array's name, so it can be run again."""

    def __init__(self, module: AnsibleModule, decision: Decision, facts: Facts) -> None:
        self.module = module
        self.decision = decision
        self.facts = facts
        self.array = decision.array

    def do(self, step: Step) -> None:
        """Do one step; raises FactsError with what a program said."""
        actions: Dict[str, Callable[[], None]] = {
            "unmount": self.unmount,
            "fstab": self.fstab,
            "mdadm_conf": lambda: self.write("mdadm_conf"),
            "initramfs": lambda: rebuild_initramfs(self.facts["initramfs_tool"]),
            "wipe": self.wipe,
            "stop": self.stop,
            "zero": self.zero,
            "forget": lambda: os.unlink(self.module.params["array_file"]),
        }
        actions[step.do]()

    def unmount(self) -> None:
        point = self.module.params["mount_point"]
        try:
            reads.run("umount", point)
        except reads.FactsError as error:
            users = ", ".join(reads.users_of(point))
            raise reads.FactsError(f"{error}; in use by {users}" if users else str(error)) from error
        self.check_free()

    def fstab(self) -> None:
        self.write("fstab")
        reload_systemd()

    def wipe(self) -> None:
        self.check_free()
        kind = self.array.filesystem["type"]
        reads.run("wipefs", "--quiet", "--all", "--types", kind, f"/dev/{self.array.kname}")

    def check_free(self) -> None:
        """Nobody may have the array in use any more, in whatever mount namespace, before something is wiped."""
        node = f"/dev/{self.array.kname}"
        held = reads.not_exclusive([self.array.kname])
        if held:
            number = os.stat(node).st_rdev
            device = f"{os.major(number)}:{os.minor(number)}"
            mounts = [mount for mount in reads.read_mounts()[0] if mount["device"] == device]
            where = {f"{mount['mount_point']} of process {mount['process']}" for mount in mounts}
            told = f"mounted at {', '.join(sorted(where))}" if where else held[self.array.kname]
            raise reads.FactsError(f"the array is still in use ({told}); nothing was wiped")

    def stop(self) -> None:
        self.check_free()
        reads.run("mdadm", "--stop", f"/dev/{self.array.kname}")
        reads.run("udevadm", "settle")

    def zero(self) -> None:
        for drive in self.decision.drives:
            member = reads.examine(os.path.basename(os.path.realpath(drive.path)))
            if member.get("MD_UUID") != self.array.uuid:
                raise reads.FactsError(f"{drive} is no longer a member of {self.array.uuid}; it was left alone")
            reads.run("mdadm", "--zero-superblock", drive.path)
        reads.run("udevadm", "settle")

    def write(self, file: str) -> None:
        replace_text(self.module, self.facts["files"][file], self.decision.files[file])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "confirm": {"type": "str", "default": ""},
            "devices": {"type": "list", "elements": "str", "default": []},
            "match": {"type": "str", "default": ""},
            "mount_point": {"type": "str", "required": True},
            "array_file": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    given = module.params
    if not given["confirm"] or given["confirm"] != given["name"]:
        module.fail_json(msg=f"teardown refused: {given['confirm']!r} was confirmed, the array is {given['name']!r}")
    if os.geteuid() != 0:
        module.fail_json(msg=f"nvme_raid_teardown on {socket.gethostname()}: root is needed; set become: true")
    wanted = Wanted(
        devices=tuple(given["devices"]), match=given["match"], name=given["name"], mount_point=given["mount_point"]
    )
    try:
        unmake(module, wanted)
    except reads.FactsError as error:
        module.fail_json(msg=f"nvme_raid_teardown on {socket.gethostname()}: {error}. Nothing was changed.")


def unmake(module: AnsibleModule, wanted: Wanted) -> None:
    """Decide, refuse or do; leaves through exit_json or fail_json."""
    decision, facts = judge(module, wanted)
    if decision.refusals:
        refuse(module, decision.refusals)
    if not module.check_mode:
        do_steps(module, decision.steps, Unmaker(module, decision, facts).do)
        check_gone(module, wanted, decision)
    module.exit_json(
        changed=bool(decision.steps),
        steps=[step.say for step in decision.steps],
        notes=decision.notes,
        diff=differences(decision, facts),
    )


def judge(module: AnsibleModule, wanted: Wanted) -> "tuple[Decision, Facts]":
    """Read the facts and decide."""
    facts = reads.read_facts(wanted, module.params["array_file"], lambda _: ())
    return rules.decide_teardown(wanted, facts), facts


def check_gone(module: AnsibleModule, wanted: Wanted, before: Decision) -> None:
    """From fresh facts: nothing of the array is left, and its drives could be chosen again."""
    names = {os.path.basename(os.path.realpath(drive.path)) for drive in before.drives}
    facts = reads.read_facts(wanted, module.params["array_file"], lambda _: names)
    left = [step.say for step in rules.decide_teardown(wanted, facts).steps]
    left += [f"{drive}: {reason}" for drive in before.drives for reason in choice.uses(drive.kname, facts)]
    if left:
        refuse(module, ["after all steps were done, this is left:", *left])


if __name__ == "__main__":
    main()
