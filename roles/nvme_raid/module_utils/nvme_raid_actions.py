"""What both nvme_raid modules do to a host besides its drives: configuration files, initramfs, systemd."""

from __future__ import annotations

import os
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.nvme_raid_facts import run

# blkdiscard, mkfs with initialised tables, and an initramfs for each of many kernels take minutes.
LONG_SECONDS = 3600
INITRAMFS_COMMANDS = {
    "update-initramfs": ("update-initramfs", "-u", "-k", "all"),
    "dracut": ("dracut", "--force", "--regenerate-all"),
}


def replace_text(module: AnsibleModule, path: str, text: str) -> None:
    """Put ``text`` in the place of a file at once; owner, mode and SELinux context of the old one stay."""
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
