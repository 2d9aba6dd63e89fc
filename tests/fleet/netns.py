"""Hosts on one machine: each a process with network, mount and UTS namespaces of its own, and a real sshd.

Nothing is added to the machine's own network: the cables live in a namespace that holds the switch,
and everything goes away with the processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

PUBLIC, BEHIND = "10.77.0", "10.77.1"


class Namespaces:
    """One set of namespaces, held open by a sleeping process."""

    def __init__(self, name: str) -> None:
        self.name = name
        keep = f"hostname {name} && ip link set lo up && mount -t tmpfs tmpfs /run && echo up && exec sleep infinity"
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--uts", "sh", "-c", keep],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n", f"no namespaces for {name}: are we root?"
        self.pid = self._process.pid

    def words(self, *command: str) -> list[str]:
        """The command as it runs inside."""
        return ["nsenter", "-t", str(self.pid), "--net", "--mount", "--uts", "--", *command]

    def run(self, *command: str, **options) -> subprocess.CompletedProcess[str]:
        """Run inside; fails loudly."""
        return subprocess.run(self.words(*command), check=True, text=True, capture_output=True, **options)

    def bind(self, source: Path, over: str) -> None:
        """Let ``source`` be seen at ``over``, only in here."""
        self.run("mount", "--bind", str(source), over)

    def processes(self, words: str) -> list[int]:
        """Processes of this host whose command line contains ``words``."""
        ours = os.readlink(f"/proc/{self.pid}/ns/mnt")
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words in line and os.readlink(proc / "ns/mnt") == ours:
                    found.append(int(proc.name))
        return sorted(found)

    def kill_all(self) -> None:
        """End every process in here, the holder last."""
        for pid in self.processes(""):
            if pid != self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()


class Switch:
    """Two bridges in a namespace of their own: one for all, one behind the jump host."""

    def __init__(self) -> None:
        self.space = Namespaces("switch")
        for bridge in ("br0", "br1"):
            self.space.run("ip", "link", "add", bridge, "type", "bridge")
            self.space.run("ip", "link", "set", bridge, "up")
        self._count = 0

    def plug(self, space: Namespaces, address: str, bridge: str = "br0") -> None:
        """Give a host an interface with ``address``."""
        self._count += 1
        port, inside = f"p{self._count}", f"eth{bridge[-1]}"
        self.space.run(
            "ip", "link", "add", port, "type", "veth", "peer", "name", inside, "netns", f"/proc/{space.pid}/ns/net"
        )
        self.space.run("ip", "link", "set", port, "master", bridge, "up")
        space.run("ip", "address", "add", f"{address}/24", "dev", inside)
        space.run("ip", "link", "set", inside, "up")


class Host:
    """One host of the fleet: its sshd, host key, accounts, runtime root and benchmark folder."""

    def __init__(
        self, switch: Switch, folder: Path, name: str, number: int, port: int = 22, behind: bool = False
    ) -> None:
        self.name, self.port, self.folder = name, port, folder
        self.address = f"{BEHIND if behind else PUBLIC}.{number}"
        self.interface = "eth1" if behind else "eth0"
        self.root = folder / "runtime"
        self.work = folder / "checkpoints"
        self.space = Namespaces(name)
        switch.plug(self.space, self.address, "br1" if behind else "br0")
        etc = folder / "etc"
        etc.mkdir(parents=True, exist_ok=True)
        self._sshd: subprocess.Popen[bytes] | None = None
        self.key = etc / "host_key"
        if not self.key.exists():
            keygen(self.key)

    def users(self, authorized: Path, environment: dict[str, str]) -> None:
        """Accounts of this host only: root, and ``ops`` who may become root by sudo."""
        etc = self.folder / "etc"
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        os.chown(home, 4711, 4711)
        extra = {
            "passwd": f"ops:x:4711:4711:ops:{home}:/bin/bash\n",
            "group": "ops:x:4711:\n",
            "shadow": "ops:*:19000:0:99999:7:::\n",
        }
        for name, line in extra.items():
            text = Path(f"/etc/{name}").read_text()
            if name == "shadow":  # sshd without PAM refuses an account that is locked by "!"
                text = "root:*:19000:0:99999:7:::\n" + "".join(
                    f"{old}\n" for old in text.splitlines() if not old.startswith("root:")
                )
            (etc / name).write_text(text + line)
            shutil.copymode(f"/etc/{name}", etc / name)
            self.space.bind(etc / name, f"/etc/{name}")
        sudoers = etc / "sudoers"
        sudoers.unlink(missing_ok=True)
        sudoers.write_text(
            f'Defaults env_reset, env_keep += "{" ".join(environment)}"\n'
            "root ALL=(ALL) ALL\nops ALL=(ALL) NOPASSWD: ALL\n"
        )
        sudoers.chmod(0o440)
        self.space.bind(sudoers, "/etc/sudoers")
        self._config = etc / "sshd_config"
        settings = " ".join(f'"{key}={value}"' for key, value in environment.items())
        self._config.write_text(
            f"Port {self.port}\nHostKey {self.key}\nAuthorizedKeysFile {authorized}\nStrictModes no\nUsePAM no\n"
            f"PermitRootLogin prohibit-password\nPasswordAuthentication no\nSubsystem sftp internal-sftp\n"
            f"PidFile none\nMaxStartups 100\nSetEnv {settings}\n"
        )

    def up(self) -> None:
        """Start sshd."""
        self.space.run("mkdir", "-p", "/run/sshd")
        self._sshd = subprocess.Popen(
            self.space.words("setpriv", "--pdeathsig", "KILL", "/usr/sbin/sshd", "-D", "-e", "-f", str(self._config)),
            stderr=(self.folder / "sshd.log").open("ab"),
        )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if f":{self.port} " in self.space.run("ss", "-ltn").stdout:
                return
            time.sleep(0.05)
        raise AssertionError((self.folder / "sshd.log").read_text())

    def down(self) -> None:
        """Stop sshd and cut every session; what runs detached goes on."""
        for pid in self.space.processes("sshd"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._sshd is not None:
            self._sshd.wait()
            self._sshd = None

    def unplug(self) -> None:
        """Pull the cable: packets are lost, nobody is told."""
        self.space.run("ip", "link", "set", self.interface, "down")

    def plug(self) -> None:
        """Put the cable back."""
        self.space.run("ip", "link", "set", self.interface, "up")

    def new_key(self) -> None:
        """As after a reinstallation."""
        self.key.unlink()
        keygen(self.key)

    def known_line(self) -> str:
        """This host's line for a known_hosts file."""
        name = self.address if self.port == 22 else f"[{self.address}]:{self.port}"
        return f"{name} {' '.join(self.key.with_suffix('.pub').read_text().split()[:2])}\n"


def keygen(path: Path) -> None:
    """An ed25519 key without a passphrase."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, stdin=subprocess.DEVNULL
    )
