"""Controller's side of the module nvme_raid_teardown: lets it destroy only what this run's command line names.

A variable alone can't tell where it comes from, and a confirmation that lies in an inventory would confirm every
later run too. So it is taken from the extra variables as they were typed, and from nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml
from ansible import context
from ansible.parsing.splitter import parse_kv
from ansible.plugins.action import ActionBase

VARIABLE = "nvme_raid_confirm"


def confirmation(extra_vars: Iterable[str]) -> str:
    """The confirmation among ``--extra-vars`` arguments as typed; empty without one. Files (``@file``) don't count."""
    confirmed = ""
    for argument in extra_vars:
        if argument.startswith("@"):
            continue
        given = yaml.safe_load(argument) if argument[:1] in ("{", "[") else parse_kv(argument)
        if isinstance(given, dict) and VARIABLE in given:
            confirmed = str(given[VARIABLE] or "")
    return confirmed


class ActionModule(ActionBase):
    """Runs the module with the confirmation of this run, or fails before the host is contacted."""

    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        variables = task_vars or {}
        name = str(self._task.args.get("name", ""))
        confirmed = confirmation(context.CLIARGS.get("extra_vars") or ())
        if "confirm" in self._task.args:
            return self._refuse(result, "the confirmation can't be an argument of the task")
        if "ansible_failed_task" in variables:
            return self._refuse(result, "a task failed before it in this play: nothing is destroyed in a rescue")
        if not confirmed or confirmed != name:
            given = f"CONFIRM={confirmed} was given" if confirmed else "no confirmation was given with this run"
            return self._refuse(
                result,
                f"{given}. All data on the array {name!r} would be lost; to do that, run "
                f"make teardown HOSTS={variables.get('inventory_hostname', '...')} CONFIRM={name}. "
                "A confirmation in an inventory, a playbook or a file of variables counts for nothing",
            )
        arguments = {**self._task.args, "confirm": confirmed}
        result.update(
            self._execute_module(module_name="nvme_raid_teardown", module_args=arguments, task_vars=task_vars)
        )
        return result

    @staticmethod
    def _refuse(result: dict[str, Any], reason: str) -> dict[str, Any]:
        result.update(failed=True, msg=f"teardown refused: {reason}. Nothing was changed.")
        return result
