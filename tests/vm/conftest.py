"""One guest for all chapters of a story, in the order they are written: each starts where the last one ended."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vm_guest import Drive, Guest, environment
from vm_image import cached_image

CHECKOUT = Path(__file__).resolve().parents[2]
# In an order that is not that of their serials; the kernel's names follow neither for certain.
DRIVES = (
    Drive("DATA0003"),
    Drive("LVM0001"),
    Drive("DATA0001"),
    Drive("SWAP0001"),
    Drive("PART0001"),
    Drive("DATA0002"),
    Drive("DATA0004"),
    Drive("ODD0001", size_mib=768, sector_bytes=4096),
)


@dataclass(frozen=True)
class Played:
    """One run of ansible-playbook: its output and the guest's line of the recap."""

    output: str
    code: int

    @property
    def changed(self) -> int:
        found = re.search(r"^guest\s.*changed=(\d+)", self.output, re.MULTILINE)
        assert found, self.output
        return int(found[1])


@dataclass(frozen=True)
class Controller:
    """Runs playbooks of this checkout against the guest, and against nothing else: its inventory has no other host."""

    guest: Guest

    def play(self, playbook: str, *arguments: str, fails: bool = False, **variables: Any) -> Played:
        """Run a playbook over SSH. ``variables`` are extra variables; ``fails`` says which end is expected."""
        command = [
            str(Path(sys.executable).parent / "ansible-playbook"), "--inventory", str(self.guest.inventory),
            "--extra-vars", json.dumps(variables), *arguments, playbook,
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=CHECKOUT, check=False, text=True, timeout=600, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            # JSON: no message is wrapped or quoted otherwise than it was said.
            env={
                **environment(), "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"),
                "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
            },
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stdout
        return Played(done.stdout, done.returncode)

    def raid(self, *arguments: str, fails: bool = False, **variables: Any) -> Played:
        """Run the role nvme_raid on the guest."""
        return self.play("tests/vm/raid.yml", *arguments, fails=fails, **variables)


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    guest = Guest(cached_image(), tmp_path_factory.mktemp("guest"), DRIVES)
    partition_table(guest.disk("PART0001"))
    subprocess.run(["/usr/sbin/mkswap", "-q", guest.disk("SWAP0001")], check=True, stdout=subprocess.DEVNULL)
    try:
        guest.start()
        yield guest
    finally:
        guest.kill()


@pytest.fixture(scope="module")
def controller(guest: Guest) -> Controller:
    return Controller(guest)


def partition_table(disk: Path) -> None:
    """A GPT with one empty partition, as a drive has it that somebody prepared and has yet to fill."""
    layout = "label: gpt\nsize=100MiB\n"
    subprocess.run(["/usr/sbin/sfdisk", "--quiet", disk], input=layout, check=True, text=True)


_broken: dict[str, str] = {}


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        _broken.setdefault(item.path.name, item.name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where chapters follow each other (``STORY``), those after one that failed would only fail of that."""
    if getattr(item.module, "STORY", False) and item.path.name in _broken:
        pytest.fail(f"not run: the story broke off at {_broken[item.path.name]}", pytrace=False)
