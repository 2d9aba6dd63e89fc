#!/usr/bin/python
"""Ansible module: an NVMe RAID-0 array with a mounted filesystem, made only of drives that are provably unused."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nvme_raid
short_description: Make or keep an NVMe RAID-0 array with a mounted filesystem
description:
  - Makes an md array of level 0 out of the chosen NVMe drives, a filesystem on it, and mounts it by UUID, now and
    after every boot. An array that is already as wanted is left alone.
  - Refuses, with every reason at once, unless each chosen drive is provably unused, and refuses an existing array
    that differs in any way. It never grows, shrinks, repairs or formats anything that exists, and never wipes.
  - Needs lsblk and wipefs (util-linux) to decide; mdadm and the filesystem's mkfs only to make the array.
options:
  devices:
    description: Drives by serial or by name in /dev/disk/by-id.
    type: list
    elements: str
    default: []
  match:
    description: Shell pattern for the drives' model, instead of O(devices); needs O(count).
    type: str
    default: ""
  count:
    description: Exact number of drives that must have been chosen; 0 checks nothing with O(devices).
    type: int
    default: 0
  name:
    description: Name of the array.
    type: str
    required: true
  chunk_kib:
    description: Chunk in KiB.
    type: int
    default: 512
  filesystem:
    description: Filesystem on the array.
    type: str
    choices: [xfs, ext4]
    default: xfs
  mount_point:
    description: Where it is mounted.
    type: str
    required: true
  mount_options:
    description: Mount options, comma separated, as fstab takes them.
    type: str
    default: noatime,nofail,x-systemd.device-timeout=30s
  blkdiscard:
    description: Discard every block of the drives before a new array is made.
    type: bool
    default: false
  array_file:
    description: Where the array is described for the benchmark, as JSON.
    type: str
    required: true
author: fastpersist-bench
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
"""

EXAMPLES = r"""
- name: Four drives by serial
  nvme_raid:
    name: fastpersist
    devices: [S4EVNX0R100001, S4EVNX0R100002, S4EVNX0R100003, S4EVNX0R100004]
    mount_point: /mnt/fastpersist
    array_file: /opt/fastpersist-bench/array.json
"""

RETURN = r"""
steps:
  description: What was done, or in check mode would be, in order.
  type: list
  elements: str
  returned: success
missing:
  description: Programs that making the array needs and that aren't installed.
  type: list
  elements: str
  returned: success
array:
  description: The array as it is described in O(array_file); without UUIDs while it doesn't exist.
  type: dict
  returned: success
refusals:
  description: Every reason not to touch anything.
  type: list
  elements: str
  returned: failure
"""

import os
import socket
import uuid
from typing import Callable, Dict

from ansible.module_utils import nvme_raid_choice as choice
from ansible.module_utils import nvme_raid_facts as reads
from ansible.module_utils import nvme_raid_rules as rules
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.nvme_raid_actions import (
    LONG_SECONDS,
    differences,
    do_steps,
    rebuild_initramfs,
    refuse,
    reload_systemd,
    replace_text,
)
from ansible.module_utils.nvme_raid_files import array_uuid
from ansible.module_utils.nvme_raid_model import (
    FILESYSTEMS,
    NEW_ARRAY,
    Decision,
    Drive,
    Facts,
    Step,
    Wanted,
    filesystem_uuid,
)


class Maker:
    """Carries out what was decided. After every step, an interrupted run leaves what the next one can judge."""

    def __init__(self, module: AnsibleModule, wanted: Wanted, decision: Decision, facts: Facts):
        self.module = module
        self.wanted = wanted
        self.decision = decision
        self.facts = facts
        # The array's node, found by its UUID: names such as md127 change between boots.
        self.device = f"/dev/disk/by-id/md-uuid-{decision.array_uuid}"

    def do(self, step: Step) -> None:
        """Do one step; raises FactsError with what a program said."""
        actions: Dict[str, Callable[[], None]] = {
            "discard": self.discard,
            "create": self.create,
            "format": self.format,
            "assemble": self.assemble,
            "mdadm_conf": lambda: self.write("mdadm_conf"),
            "initramfs": lambda: rebuild_initramfs(self.facts["initramfs_tool"]),
            "fstab": self.fstab,
            "mount": self.mount,
            "record": lambda: self.write("array"),
        }
        actions[step.do]()

    def discard(self) -> None:
        for drive in self.decision.drives:
            self.check_same(drive)
            reads.run("blkdiscard", drive.path, timeout=LONG_SECONDS)

    def create(self) -> None:
        for drive in self.decision.drives:
            self.check_same(drive)
        # Neither --run nor --force, and no input: where mdadm itself has a doubt it asks, and gets no yes.
        reads.run(
            "mdadm", "--create", f"/dev/md/{self.wanted.name}", "--level=0", "--metadata=1.2",
            f"--chunk={self.wanted.chunk_kib}K", f"--raid-devices={len(self.decision.drives)}", "--homehost=any",
            f"--name={self.wanted.name}", f"--uuid={self.decision.array_uuid}",
            *(drive.path for drive in self.decision.drives),
        )  # fmt: skip
        reads.run("udevadm", "settle")
        old = reads.signatures(self.device)
        if old:
            kinds = ", ".join(f"{s['type']} {s.get('uuid') or ''}".strip() for s in old)
            raise reads.FactsError(
                f"the new array {self.wanted.name} shows what an earlier array of these drives held ({kinds}), so it "
                f"was not formatted. If that may go: make teardown CONFIRM={self.wanted.name}, then run again"
            )

    def check_same(self, drive: Drive) -> None:
        """The name must still lead to the drive that was judged."""
        now = os.path.basename(os.path.realpath(drive.path))
        serial = reads.read_nvme().get(now, {}).get("serial")
        if (now, serial) != (drive.kname, drive.serial):
            raise reads.FactsError(f"{drive} has become {now} with serial {serial}; it was left alone")

    def format(self) -> None:
        fs_uuid = filesystem_uuid(self.decision.array_uuid)
        chunk, members = self.wanted.chunk_kib, len(self.decision.drives)
        # Nothing is forced: the array was made a moment ago and nothing was recognised on it.
        if self.wanted.filesystem == "xfs":
            command = ["mkfs.xfs", "-q", "-K", "-d", f"su={chunk}k,sw={members}", "-m", f"uuid={fs_uuid}", self.device]
        else:
            blocks = chunk // 4
            # Tables are initialised now, not in the background of a benchmark.
            options = (
                f"nodiscard,stride={blocks},stripe_width={blocks * members},lazy_itable_init=0,lazy_journal_init=0"
            )
            command = ["mkfs.ext4", "-q", "-b", "4096", "-E", options, "-U", fs_uuid, self.device]
        reads.run(*command, timeout=LONG_SECONDS)
        reads.run("udevadm", "settle")

    def assemble(self) -> None:
        found = self.decision.array
        members = [f"/dev/{kname}" for kname in found.present] if found else []
        identity = f"--uuid={self.decision.array_uuid}"
        reads.run("mdadm", "--assemble", f"/dev/md/{self.wanted.name}", identity, *members)
        reads.run("udevadm", "settle")

    def fstab(self) -> None:
        self.write("fstab")
        reload_systemd()

    def mount(self) -> None:
        os.makedirs(self.wanted.mount_point, mode=0o755, exist_ok=True)
        reads.run("mount", self.wanted.mount_point)

    def write(self, file: str) -> None:
        replace_text(self.module, self.facts["files"][file], self.decision.files[file])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "devices": {"type": "list", "elements": "str", "default": []},
            "match": {"type": "str", "default": ""},
            "count": {"type": "int", "default": 0},
            "name": {"type": "str", "required": True},
            "chunk_kib": {"type": "int", "default": 512},
            "filesystem": {"type": "str", "choices": list(FILESYSTEMS), "default": "xfs"},
            "mount_point": {"type": "str", "required": True},
            "mount_options": {"type": "str", "default": Wanted.mount_options},
            "blkdiscard": {"type": "bool", "default": False},
            "array_file": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    settings = {key: value for key, value in module.params.items() if key != "array_file"}
    wanted = Wanted(**{**settings, "devices": tuple(settings["devices"])})
    if not wanted.devices and not wanted.match:
        module.exit_json(changed=False, steps=[], missing=[], array={}, msg="no drives are chosen: nothing to do")
    if os.geteuid() != 0:
        module.fail_json(msg=f"nvme_raid on {socket.gethostname()}: root is needed; set become: true")
    try:
        make(module, wanted)
    except reads.FactsError as error:
        module.fail_json(msg=f"nvme_raid on {socket.gethostname()}: {error}. Nothing was changed.")


def make(module: AnsibleModule, wanted: Wanted) -> None:
    """Decide, refuse or do; leaves through exit_json or fail_json."""
    new_uuid = NEW_ARRAY if module.check_mode else array_uuid(uuid.uuid4().hex)
    decision, facts = judge(module, wanted, new_uuid)
    if decision.refusals:
        refuse(module, decision.refusals)
    missing = [program for program in rules.programs_needed(wanted) if program not in facts["programs"]]
    if missing and not module.check_mode:
        raise reads.FactsError(f"{', '.join(missing)} not found; the role installs mdadm and the filesystem's tools")
    steps = decision.steps
    if not module.check_mode:
        if steps and steps[0].do == "assemble":
            # Only now can be seen what is on it: the rest is decided from that.
            do_steps(module, steps[:1], Maker(module, wanted, decision, facts).do)
            decision, facts = judge(module, wanted, new_uuid)
            if decision.refusals:
                refuse(module, decision.refusals)
            steps = steps[:1] + decision.steps
        do_steps(module, decision.steps, Maker(module, wanted, decision, facts).do)
        if steps:
            check_made(module, wanted)
    module.exit_json(
        changed=bool(steps),
        steps=[step.say for step in steps],
        missing=missing,
        array=rules.describe(wanted, decision),
        diff=differences(decision, facts),
    )


def judge(module: AnsibleModule, wanted: Wanted, new_uuid: str) -> "tuple[Decision, Facts]":
    """Read the facts and decide."""
    facts = reads.read_facts(
        wanted, module.params["array_file"], lambda found: [drive.kname for drive in choice.choose(wanted, found)[0]]
    )
    return rules.decide(wanted, facts, new_uuid), facts


def check_made(module: AnsibleModule, wanted: Wanted) -> None:
    """Judge again from fresh facts: now there must be nothing left to do and nothing to refuse."""
    decision, _ = judge(module, wanted, NEW_ARRAY)
    if decision.refusals:
        refuse(module, ["after all steps were done:", *decision.refusals])
    if decision.steps:
        left = "; ".join(step.say for step in decision.steps)
        module.fail_json(msg=f"nvme_raid on {socket.gethostname()}: all steps were done, but this is left: {left}")


if __name__ == "__main__":
    main()
