"""Machines for the nvme_raid tests: facts recorded on a real kernel, and the edits that make other stories of them.

``data/nvme_raid_before.json``: a guest with a root drive, LVM, swap, a partition table, four clean drives and one
of another size and sector size. ``data/nvme_raid_made.json``: the same one with the array made of three of them.
``data/nvme_raid_vanished.json``: such a guest after a boot without DATA0002.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import ansible.module_utils

HERE = Path(__file__).resolve().parent
ROLE = HERE.parents[1] / "roles" / "nvme_raid"
# Where Ansible itself puts a role's module_utils when it runs the role.
ansible.module_utils.__path__.append(str(ROLE / "module_utils"))

from ansible.module_utils import nvme_raid_facts as reads  # noqa: E402
from ansible.module_utils import nvme_raid_files as files  # noqa: E402
from ansible.module_utils import nvme_raid_model as model  # noqa: E402
from ansible.module_utils import nvme_raid_rules as rules  # noqa: E402

__all__ = ["ROLE", "Machine", "before", "files", "made", "model", "reads", "rules", "vanished"]

SERIALS = ("DATA0001", "DATA0002", "DATA0003")
NEW_UUID = "11111111:22222222:33333333:44444444"


class Machine:
    """Recorded facts, and what happens to a machine, in its owner's words."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def kname(self, serial: str) -> str:
        return next(kname for kname, nvme in self.facts["nvme"].items() if nvme["serial"] == serial)

    def disk(self, serial: str) -> dict[str, Any]:
        return next(d for d in self.facts["lsblk"]["blockdevices"] if d["kname"] == self.kname(serial))

    def sign(self, serial: str, kind: str, usage: str = "filesystem", **more: Any) -> None:
        """Something was written on a drive that libblkid recognises."""
        found = {"offset": "0x0", "type": kind, "usage": usage, "uuid": "u-u", "label": None, **more}
        self.facts["signatures"][self.kname(serial)] = [{"device": self.kname(serial), **found}]

    def put_on(self, serial: str, device: dict[str, Any]) -> None:
        """A partition or volume stands on a drive."""
        self.disk(serial).setdefault("children", []).append({"children": [], **device})

    def mount(self, point: str, device: str, source: str, own: bool = True, process: str = "1 (init)") -> None:
        self.facts["mounts"].append(
            {
                "device": device, "mount_point": point, "source": source, "type": "ext4", "options": "rw",
                "namespace": "mnt:[1]", "process": process, "own": own,
            }
        )  # fmt: skip

    def unplug(self, serial: str) -> None:
        """A drive is no longer there, as after a boot without it; the array it belonged to didn't start."""
        kname = self.kname(serial)
        devices = self.facts["lsblk"]["blockdevices"]
        self.facts["lsblk"]["blockdevices"] = [d for d in devices if d["kname"] != kname]
        for table in ("nvme", "holders", "signatures", "exclusive", "open_by", "members"):
            self.facts[table].pop(kname, None)
        self.facts["by_id"] = {name: k for name, k in self.facts["by_id"].items() if k != kname}

    def stop_array(self) -> None:
        """The array isn't assembled and so not mounted."""
        arrays = set(self.facts["arrays"])
        self.facts["arrays"] = {}
        self.facts["holders"] = {k: h for k, h in self.facts["holders"].items() if not arrays & set(h)}
        self.facts["mounts"] = [m for m in self.facts["mounts"] if m["device"] != "9:127"]
        self.facts["mount_point"]["entries"] = []
        for disk in self.facts["lsblk"]["blockdevices"]:
            disk["children"] = [c for c in disk.get("children", []) if c["kname"] not in arrays]

    def rename_drives(self) -> None:
        """A boot that gave every drive another kernel name."""
        names = sorted(self.facts["nvme"])
        text = json.dumps(self.facts)
        for old, new in zip(names, names[1:] + names[:1], strict=True):
            text = text.replace(f'"{old}"', f'"@{new}"').replace(f'"/dev/{old}"', f'"/dev/@{new}"')
        self.facts = json.loads(text.replace("@", ""))

    def text(self, file: str) -> str:
        return self.facts["files"][file]["text"]

    def add_line(self, file: str, line: str) -> None:
        self.facts["files"][file]["text"] += line + "\n"

    def decide(self, *devices: str, **wanted: Any) -> model.Decision:
        settings = model.Wanted(devices=devices, **wanted)
        return rules.decide(settings, self.facts, NEW_UUID)

    def refusals(self, *devices: str, **wanted: Any) -> list[str]:
        decision = self.decide(*devices, **wanted)
        assert bool(decision.refusals) != bool(decision.steps) or not decision.refusals
        return decision.refusals

    def teardown(self, *devices: str, **wanted: Any) -> model.Decision:
        return rules.decide_teardown(model.Wanted(devices=devices, **wanted), self.facts)

    def apply(self, decision: model.Decision) -> None:
        """What a decision writes into files has been written."""
        for file, text in decision.files.items():
            self.facts["files"][file]["text"] = text


def before() -> Machine:
    return Machine(_load("nvme_raid_before.json"))


def made() -> Machine:
    return Machine(_load("nvme_raid_made.json"))


def vanished() -> Machine:
    return Machine(_load("nvme_raid_vanished.json"))


def _load(name: str) -> dict[str, Any]:
    return copy.deepcopy(json.loads((HERE / "data" / name).read_text(encoding="utf-8")))
