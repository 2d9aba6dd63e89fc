"""What both nvme_raid modules do besides their drives: files, initramfs, systemd, and how they report."""

from __future__ import annotations

import os
import socket
import tempfile
from typing import Callable, Dict, List

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.nvme_raid_facts import FactsError, read_text, run
from ansible.module_utils.nvme_raid_model import Decision, Facts, Step

# blkdiscard, mkfs with initialised tables, and an initramfs for each of many kernels take minutes.
LONG_SECONDS = 3600
INITRAMFS_COMMANDS = {
    "update-initramfs": ("update-initramfs", "-u", "-k", "all"),
    "dracut": ("dracut", "--force", "--regenerate-all"),
}


def replace_text(module: AnsibleModule, known: Dict[str, str], text: str) -> None:
    """Put ``text`` in the place of a file at once; owner, mode and SELinux context of the old one stay.

    ``known`` has the path and the text that the decision was made from; raises FactsError when it has changed since.
    """
    path = os.path.realpath(known["path"])
    if read_text(path) != known["text"]:
        raise FactsError(f"somebody else changed {path} meanwhile, so it was left alone; run again")
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=folder, prefix=f".{os.path.basename(path)}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        module.atomic_move(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


def rebuild_initramfs(tool: str) -> None:
    """Rebuild the initramfs of every installed kernel, so that it knows mdadm.conf as it is now."""
    if tool:
        run(*INITRAMFS_COMMANDS[tool], timeout=LONG_SECONDS)


def reload_systemd() -> None:
    """Let systemd, where it runs, read fstab again."""
    if os.path.isdir("/run/systemd/system"):
        run("systemctl", "daemon-reload")


def do_steps(module: AnsibleModule, steps: List[Step], do: Callable[[Step], None]) -> None:
    """Do the steps in order; the first that fails ends the module, which says what had been done by then."""
    done: List[str] = []
    for step in steps:
        try:
            do(step)
        except (FactsError, OSError) as error:
            so_far = "".join(f"\n  - {say}" for say in done) or " nothing"
            host = socket.gethostname()
            module.fail_json(msg=f"on {host}, failed to {step.say}: {error}\nDone before that:{so_far}", done=done)
        done.append(step.say)


def refuse(module: AnsibleModule, refusals: List[str]) -> None:
    """Fail with every reason, a line each."""
    listed = "".join(f"\n  - {refusal}" for refusal in refusals)
    module.fail_json(msg=f"nvme_raid refuses on {socket.gethostname()}:{listed}", refusals=refusals)


def differences(decision: Decision, facts: Facts) -> List[Dict[str, str]]:
    """What --diff shows: the steps, then the files."""
    shown = []
    if decision.steps:
        steps = "".join(f"{step.say}\n" for step in decision.steps)
        shown.append({"before_header": "steps", "after_header": "steps", "before": "", "after": steps})
    for file, text in decision.files.items():
        path, before = facts["files"][file]["path"], facts["files"][file]["text"]
        shown.append({"before_header": path, "after_header": path, "before": before, "after": text})
    return shown
