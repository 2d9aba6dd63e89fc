"""Builds the guest for tests/vm once: a root disk image, its keys and nothing from outside Debian.

The image is cached under the user's cache folder, keyed by a hash of this file, so an edited recipe
builds a new one. Packages come from the mirror that this machine's own apt is set up for.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HOST_PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "debootstrap": "debootstrap",
    "ssh": "openssh-client",
    "mkfs.ext4": "e2fsprogs",
    "mkswap": "util-linux",
    "sfdisk": "fdisk",
}
# Of the recipe as it was read: a file that is edited while tests run doesn't give its name to an older image.
KEY = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
SUITE = "bookworm"
GUEST_PACKAGES = (
    "linux-image-cloud-amd64",
    "initramfs-tools",
    "systemd-sysv",
    "udev",
    "kmod",
    "openssh-server",
    "python3",
    "python3-apt",
    "lvm2",
    "e2fsprogs",
)
# Not installed in the image, but in a package source on its disk: installing them is the role's work.
OFFERED_PACKAGES = ("mdadm", "xfsprogs")
OFFERED_FOLDER = "/var/local/packages"
ROOT_UUID = "5eed0000-0000-4000-8000-00000000d15c"
ROOT_DISK_MIB = 2048
# Emulation is slow: nothing may start in the guest that the tests don't need.
MASKED_UNITS = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@tty1.service",
    "serial-getty@ttyS0.service",
    "systemd-timesyncd.service",
    "systemd-journal-flush.service",
    "lvm2-monitor.service",
)
FILES = {
    "etc/hostname": "raid-guest\n",
    "etc/hosts": "127.0.0.1 localhost raid-guest\n",
    "etc/fstab": f"# root of the test guest\nUUID={ROOT_UUID} / ext4 errors=remount-ro 0 1\n",
    "etc/systemd/network/10-guest.network": "[Match]\nName=e*\n[Network]\nAddress=10.0.2.15/24\n",
    "etc/apt/sources.list": f"deb [trusted=yes] file:{OFFERED_FOLDER} ./\n",
    # As few modules as the guest needs, packed quickly.
    "etc/initramfs-tools/conf.d/guest": "MODULES=list\nCOMPRESS=gzip\nCOMPRESSLEVEL=1\n",
    "etc/ssh/sshd_config": (
        "HostKey /etc/ssh/ssh_host_ed25519_key\nPermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\nUsePAM no\nUseDNS no\nSubsystem sftp internal-sftp\n"
    ),
}
# Calls are counted and come back at once: Guest.build_initramfs builds it natively before the next boot.
INITRAMFS_CALLS = "/var/log/update-initramfs.calls"
UPDATE_INITRAMFS = f"""#!/bin/sh
echo "$*" >>{INITRAMFS_CALLS}
touch /boot/initrd.img-*
"""


class ImageError(RuntimeError):
    """The guest image can't be built here; the message says what is missing."""


@dataclass(frozen=True)
class Image:
    """A built guest: root disk, the kernel and initramfs to boot it with, and its keys."""

    folder: Path

    @property
    def disk(self) -> Path:
        return self.folder / "root.img"

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def initramfs(self) -> Path:
        return self.folder / "initrd.img"

    @property
    def user_key(self) -> Path:
        return self.folder / "user_key"

    @property
    def host_public_key(self) -> str:
        kind, key, *_ = (self.folder / "host_key.pub").read_text(encoding="utf-8").split()
        return f"{kind} {key}"


def cached_image() -> Image:
    """The guest image, built when this recipe has none yet; one builder at a time."""
    install_host_packages()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastpersist-bench-vm"
    cache.mkdir(parents=True, exist_ok=True)
    image = Image(cache / KEY)
    with (cache / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not image.folder.is_dir():
            work = cache / f"{KEY}.building"
            shutil.rmtree(work, ignore_errors=True)
            build(work)
            work.rename(image.folder)
    return image


def install_host_packages() -> None:
    """Install the Debian packages that building and booting need, where they are missing."""
    missing = sorted(package for program, package in HOST_PACKAGES.items() if not _which(program))
    if not missing:
        return
    if os.geteuid() != 0 or not _which("apt-get"):
        raise ImageError(f"tests/vm needs these Debian packages: {' '.join(missing)}; install them as root")
    _run("apt-get", "update", "-qq")
    _run(
        "apt-get",
        "-o",
        "DPkg::Lock::Timeout=300",
        "install",
        "-y",
        "-qq",
        "--no-install-recommends",
        *missing,
        env={"DEBIAN_FRONTEND": "noninteractive"},
    )


def build(folder: Path) -> None:
    """Build the root disk, kernel, initramfs and keys in ``folder``. Takes some minutes."""
    if os.geteuid() != 0:
        raise ImageError("building the guest image needs root (debootstrap); run make test-vm as root once")
    if platform.machine() != "x86_64":
        raise ImageError(f"the guest image is built for x86_64, this machine is {platform.machine()}")
    mirror, proxy = debian_mirror()
    root = folder / "root"
    root.mkdir(parents=True)
    environment = {"DEBIAN_FRONTEND": "noninteractive", **({"http_proxy": proxy} if proxy else {})}
    _run(
        "debootstrap",
        "--variant=minbase",
        f"--include={','.join(GUEST_PACKAGES)}",
        f"--cache-dir={_folder(folder / 'debs')}",
        SUITE,
        str(root),
        mirror,
        env=environment,
    )
    for name in ("user_key", "host_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name))
    _settle_in(root, folder)
    _offer_packages(root)
    _run("chroot", str(root), "update-initramfs", "-u")
    _count_initramfs_calls(root)
    for link in ("vmlinuz", "initrd.img"):
        shutil.copy(next((root / "boot").glob(f"{link}-*")), folder / link)
    shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
    disk = folder / "root.img"
    with disk.open("wb") as file:
        file.truncate(ROOT_DISK_MIB * 1024**2)
    _run("mkfs.ext4", "-q", "-U", ROOT_UUID, "-d", str(root), str(disk))
    shutil.rmtree(root)
    shutil.rmtree(folder / "debs")


def debian_mirror() -> tuple[str, str | None]:
    """The mirror of the guest's suite and the proxy, as this machine's apt is configured for them."""
    targets = _output(
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI)|$(CODENAME)|$(COMPONENT)|$(ORIGIN)",
        "Created-By: Packages",
    )
    for line in targets.splitlines():
        uri, *identity = line.split("|")
        if identity == [SUITE, "main", "Debian"]:
            proxy = _output("apt-config", "shell", "PROXY", "Acquire::http::Proxy").strip()
            return uri, proxy.removeprefix("PROXY='").removesuffix("'") or None
    raise ImageError(f"this machine's apt knows no Debian {SUITE} main; add a source for it, run apt-get update")


def _settle_in(root: Path, folder: Path) -> None:
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for old in (root / "etc/ssh").glob("ssh_host_*"):
        old.unlink()
    shutil.copy(folder / "host_key", root / "etc/ssh/ssh_host_ed25519_key")
    keys = root / "root/.ssh/authorized_keys"
    keys.parent.mkdir(mode=0o700, exist_ok=True)
    keys.write_text((folder / "user_key.pub").read_text(encoding="utf-8"), encoding="utf-8")
    (root / "etc/machine-id").write_text(hashlib.md5(b"raid-guest").hexdigest() + "\n", encoding="utf-8")
    _run("systemctl", f"--root={root}", "enable", "--quiet", "systemd-networkd.service", "ssh.service")
    _run("systemctl", f"--root={root}", "mask", "--quiet", *MASKED_UNITS)


def _offer_packages(root: Path) -> None:
    """Put the offered packages and what they depend on into a package source on the guest's own disk.

    apt resolves them against the guest's installed packages, with this machine's sources and settings.
    """
    offered = root / OFFERED_FOLDER.lstrip("/")
    archives = offered / "archives"
    (archives / "partial").mkdir(parents=True)
    _run(
        "apt-get",
        "install",
        "--download-only",
        "-y",
        "-qq",
        "--no-install-recommends",
        "-o",
        f"Dir::State::status={root}/var/lib/dpkg/status",
        "-o",
        f"Dir::Cache::archives={archives}",
        "-o",
        "Dir::State::extended_states=/dev/null",
        "-o",
        "Debug::NoLocking=true",
        *OFFERED_PACKAGES,
    )
    stanzas = []
    for package in sorted(archives.glob("*.deb")):
        path = offered / package.name.replace("%3a", "_")
        package.rename(path)
        control = _output("dpkg-deb", "--field", str(path)).strip()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        stanzas.append(f"{control}\nFilename: ./{path.name}\nSize: {path.stat().st_size}\nSHA256: {digest}\n")
    shutil.rmtree(archives)
    (offered / "Packages").write_text("\n".join(stanzas), encoding="utf-8")
    _run("chroot", str(root), "apt-get", "update", "-qq")


def _count_initramfs_calls(root: Path) -> None:
    program = "/usr/sbin/update-initramfs"
    _run("chroot", str(root), "dpkg-divert", "--local", "--rename", "--divert", f"{program}.real", "--add", program)
    path = root / program.lstrip("/")
    path.write_text(UPDATE_INITRAMFS, encoding="utf-8")
    path.chmod(0o755)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    _output(*command, env=env)


def _output(*command: str, env: dict[str, str] | None = None) -> str:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    done = subprocess.run(
        command,
        check=False,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": path, **(env or {})},
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-20:])
        raise ImageError(f"{' '.join(command)} exited {done.returncode}:\n{tail}")
    return done.stdout
