"""A QEMU guest with emulated NVMe drives, reached by SSH through one forwarded port on loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vm_image import ROOT_UUID, Image

NAME = "raid-guest"
# Reserved by RFC 2606 never to resolve: what the inventory holds while no guest has shown its key.
UNREACHABLE = "no-guest-started.invalid"
MIB = 1024**2


@dataclass(frozen=True)
class Drive:
    """An emulated NVMe drive: ``size_mib`` MiB with sectors of ``sector_bytes``."""

    serial: str
    size_mib: int = 512
    sector_bytes: int = 512


class GuestError(RuntimeError):
    """The guest did not start or a command in it failed; the message holds its output."""


@dataclass
class Guest:
    """One guest: its disks and its inventory live in ``folder``; it starts and stops as often as needed."""

    image: Image
    folder: Path
    drives: Sequence[Drive]
    process: subprocess.Popen[bytes] | None = None
    port: int = 0
    initramfs: Path = field(init=False)

    def __post_init__(self) -> None:
        subprocess.run(["cp", "--sparse=always", self.image.disk, self.folder / "root.img"], check=True)
        self.initramfs = self.folder / "initrd.img"
        shutil.copy(self.image.initramfs, self.initramfs)
        for drive in self.drives:
            with self.disk(drive.serial).open("wb") as file:
                file.truncate(drive.size_mib * MIB)
        self._write_inventory(UNREACHABLE)

    @property
    def inventory(self) -> Path:
        return self.folder / "hosts.yml"

    @property
    def console(self) -> str:
        """The end of what the guest's kernel and systemd printed."""
        path = self.folder / "console.log"
        return path.read_text(encoding="utf-8", errors="replace")[-4000:] if path.exists() else ""

    def disk(self, serial: str) -> Path:
        return self.folder / f"{serial}.img"

    def start(self, without: Sequence[str] = (), seconds: float = 180) -> None:
        """Boot, without the drives of some serials; returns when SSH answers with the guest's key."""
        self.stop()
        self.port = _free_port()
        command = [
            "qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
            "-m", "1024", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-serial", f"file:{self.folder / 'console.log'}",
            "-kernel", str(self.image.kernel), "-initrd", str(self.initramfs),
            "-append", f"root=UUID={ROOT_UUID} ro console=ttyS0 net.ifnames=0 mitigations=off quiet",
            # restrict=on: the guest reaches nothing; only the forwarded port leads in.
            "-nic", f"user,model=virtio-net-pci,restrict=on,hostfwd=tcp:127.0.0.1:{self.port}-:22",
            "-device", "virtio-rng-pci",
        ]  # fmt: skip
        command += _drive("ROOT0001", self.folder / "root.img", 512)
        for drive in self.drives:
            if drive.serial not in without:
                command += _drive(drive.serial, self.disk(drive.serial), drive.sector_bytes)
        log = (self.folder / "qemu.log").open("ab")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()
        self._wait_for_ssh(seconds)
        self._write_inventory("127.0.0.1")

    def settle(self) -> None:
        """Wait until systemd has nothing left to do: a mount with nofail may come after SSH answers."""
        self.run("until systemctl list-jobs | grep -q 'No jobs'; do sleep 1; done", timeout=180)

    def stop(self) -> None:
        """Power off cleanly where the guest answers, else end QEMU; the inventory then points nowhere."""
        self._write_inventory(UNREACHABLE)
        if self.process is None:
            return
        if self.process.poll() is None and self.port:
            self._ssh("systemctl poweroff --no-wall", timeout=20)
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self.process = None

    def kill(self) -> None:
        """Pull the plug."""
        self._write_inventory(UNREACHABLE)
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def run(self, command: str, timeout: float = 120) -> str:
        """Run a shell command as root in the guest, give its output; raises GuestError when it fails."""
        done = self._ssh(command, timeout)
        if done.returncode != 0:
            raise GuestError(f"in the guest: {command}\nexit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def put(self, path: Path, target: str) -> None:
        """Copy a small file into the guest."""
        with path.open("rb") as file:
            subprocess.run([*self._ssh_command(), f"cat >{target}"], check=True, timeout=60, stdin=file)

    def build_initramfs(self) -> None:
        """Build the initramfs with the guest's own tool and files, while the guest is off; the next boot uses it.

        Natively, since under emulation it takes a minute. In a mount namespace of its own, so nothing stays mounted.
        """
        build = 'chroot "$2" /usr/sbin/update-initramfs.real -u -k all'
        script = f'mount -o loop "$1" "$2"; {build}; cp "$2"/boot/initrd.img-* "$3"'
        inside = self.folder / "root"
        inside.mkdir(exist_ok=True)
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", script, "sh", self.folder / "root.img", inside, self.initramfs],
            check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode != 0:
            raise GuestError(f"no initramfs could be built for the guest:\n{done.stdout}")

    def _ssh(self, command: str, timeout: float) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [*self._ssh_command(), command], check=False, text=True, timeout=timeout,
                stdin=subprocess.DEVNULL, capture_output=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return subprocess.CompletedProcess(error.cmd, 124, "", f"no answer within {timeout:g} s")

    def _ssh_command(self) -> list[str]:
        return [
            "ssh", "-F", "none", "-p", str(self.port), "-i", str(self.image.user_key),
            *self._ssh_options().split(), "root@127.0.0.1",
        ]  # fmt: skip

    def _ssh_options(self) -> str:
        """Only the key that was made for the guest is accepted: this machine's own sshd can't pass for it."""
        known = self.folder / "known_hosts"
        known.write_text(f"{NAME} {self.image.host_public_key}\n", encoding="utf-8")
        return (
            f"-o UserKnownHostsFile={known} -o GlobalKnownHostsFile=/dev/null -o HostKeyAlias={NAME}"
            " -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes -o BatchMode=yes -o ConnectTimeout=10"
            f" -o ControlMaster=auto -o ControlPersist=60 -o ControlPath={self.folder}/ssh-%p"
        )

    def _wait_for_ssh(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process is not None and self.process.poll() is not None:
                break
            done = self._ssh("cat /proc/sys/kernel/hostname", timeout=20)
            if done.returncode == 0 and done.stdout.strip() == NAME:
                return
            time.sleep(0.5)
        log = (self.folder / "qemu.log").read_text(encoding="utf-8", errors="replace")
        self.kill()
        raise GuestError(f"the guest did not answer within {seconds:g} s\n{log}\n{self.console}")

    def _write_inventory(self, address: str) -> None:
        host = {
            "ansible_connection": "ssh",
            "ansible_host": address,
            "ansible_port": self.port,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.image.user_key),
            "ansible_ssh_args": f"-F none {self._ssh_options()}",
            "ansible_python_interpreter": "/usr/bin/python3",
            "bench_runtime_root": "/opt/fastpersist-bench",
        }
        groups = {"all": {"children": {"gpu_nodes": {"hosts": {"guest": host}}}}}
        self.inventory.write_text(json.dumps(groups, indent=2), encoding="utf-8")


def _drive(serial: str, path: Path, sector_bytes: int) -> list[str]:
    sectors = f"logical_block_size={sector_bytes},physical_block_size={sector_bytes}"
    return [
        "-drive", f"file={path},format=raw,if=none,id={serial},discard=unmap,cache=unsafe",
        "-device", f"nvme,drive={serial},serial={serial},{sectors}",
    ]  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    """The environment for ansible-playbook: this machine's, without settings that could change its target."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
