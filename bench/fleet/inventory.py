"""Which hosts a pattern names, and how Ansible reaches them: asked of ``ansible-inventory``, never parsed here."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Host variables that say how to connect, each with the names Ansible takes for it, the first one wins.
CONNECTION_VARIABLES: dict[str, tuple[str, ...]] = {
    "address": ("ansible_ssh_host", "ansible_host"),
    "user": ("ansible_ssh_user", "ansible_user"),
    "port": ("ansible_ssh_port", "ansible_port"),
    "key_file": ("ansible_ssh_private_key_file", "ansible_private_key_file"),
    "common_args": ("ansible_ssh_common_args",),
}


class InventoryError(ValueError):
    """An inventory or a pattern that can't be used; the message says which and what to do."""


@dataclass(frozen=True)
class Target:
    """One host as the inventory describes it; None where the inventory leaves it to ssh's own configuration."""

    name: str
    local: bool = False
    address: str | None = None
    user: str | None = None
    port: str | None = None
    key_file: str | None = None
    common_args: str | None = None

    def ssh_words(self) -> list[str]:
        """The arguments with which Ansible would start ssh for this host, the destination last.

        Raises InventoryError when the extra arguments are not properly quoted, or a value is a template,
        which only a playbook renders.
        """
        for field, aliases in CONNECTION_VARIABLES.items():
            if "{{" in (getattr(self, field) or ""):
                raise InventoryError(
                    f"{self.name}: {aliases[-1]} is a template; write its value, or set it in ~/.ssh/config"
                )
        try:
            words = shlex.split(self.common_args or "")
        except ValueError as error:
            raise InventoryError(f"{self.name}: ansible_ssh_common_args: {error}") from error
        for option, value in (("-l", self.user), ("-p", self.port), ("-i", self.key_file)):
            if value is not None:
                words += [option, value]
        return [*words, "--", self.address or self.name]


def read_targets(inventory: Sequence[str], pattern: str) -> list[Target]:
    """The hosts that ``pattern`` names in ``inventory`` (as Ansible's --limit, ``@file`` included), sorted.

    Raises InventoryError when there is none, or when ansible-inventory fails.
    """
    sources = [word for source in inventory for word in ("--inventory", source)]
    command = [tool("ansible-inventory"), *sources, "--list", "--limit", pattern]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        raise InventoryError(
            "ansible-inventory is not installed; `make venv` makes the controller's environment"
        ) from None
    if done.returncode != 0:
        raise InventoryError(f"{_last_line(done.stderr)}; `make hosts HOSTS=all` lists the hosts there are")
    targets = parse_targets(done.stdout)
    if not targets:
        raise InventoryError(
            f"HOSTS={pattern} names no host of {', '.join(inventory) or 'the inventory'}; "
            "`make hosts HOSTS=all` lists the hosts there are"
        )
    return targets


def tool(name: str) -> str:
    """A program of Ansible's: the one installed beside our Python, whatever PATH says, else the one on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def parse_targets(listing: str) -> list[Target]:
    """Targets from the output of ``ansible-inventory --list``; hosts without variables count too."""
    data = json.loads(listing)
    variables: dict[str, dict[str, Any]] = data.get("_meta", {}).get("hostvars", {})
    names = set(variables)
    for key, group in data.items():
        if key != "_meta":
            names.update(group.get("hosts", []))
    return [_target(name, variables.get(name, {})) for name in sorted(names)]


def _target(name: str, variables: dict[str, Any]) -> Target:
    found: dict[str, str | None] = {
        field: next((str(variables[alias]) for alias in aliases if variables.get(alias) is not None), None)
        for field, aliases in CONNECTION_VARIABLES.items()
    }
    return Target(name=name, local=variables.get("ansible_connection") == "local", **found)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and "WARNING" not in line]
    return lines[-1] if lines else "ansible-inventory failed without a word"
