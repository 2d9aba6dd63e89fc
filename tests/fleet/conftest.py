"""A fleet of four hosts in namespaces and a controller beside them, provisioned by the real playbooks over real SSH.

The hosts have no network but each other, so that nothing but the controller can help them: they install
offline from uv's cache, which is filled here. Their runtime roots stay between sessions, below ``FLEET_TESTS``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import role_module
import yaml
from netns import PUBLIC, Host, Namespaces, Switch, keygen

CHECKOUT = Path(__file__).resolve().parents[2]
# Readable for other users than root (one host's login user is not root), and on the disk of uv's cache,
# so that environments are hard links and not copies.
SCRATCH = Path(os.environ.get("FLEET_TESTS", "/var/tmp/fastpersist-bench-fleet"))
# Buffers that fit into the 8 MiB of locked memory that a user has by default.
SMALL = {"size_bytes": 16 * 1024**2, "io_buffer_bytes": 4 * 1024**2, "block_bytes": 1024**2}
TINY_PLAN = {
    "name": "tiny",
    "repetitions": 2,
    "warmup": 0,
    "benchmarks": [{"workload": "tensor", "writers": ["torch_save", "ds_aio"], "options": SMALL}],
}
FAST = "--bench-arguments=--no-ceiling"


@dataclass
class Fleet:
    """The hosts by name, and the controller."""

    hosts: dict[str, Host]
    controller: Namespaces
    folder: Path
    inventory: Path
    ssh: Path
    known_hosts: Path
    results: Path
    plan: Path
    first_run: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """What a person's shell on the controller has."""
        keep = {key: os.environ[key] for key in ("LANG", "TERM") if key in os.environ}
        return keep | {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.folder / "home"),
            "BENCH_RESULTS": str(self.results),
            "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            **self.variables,
        }

    @property
    def log(self) -> Path:
        """Output of the command that runs, or ran last, on the controller."""
        return self.folder / "output.log"

    def run(self, *command: str, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
        """Run on the controller, in the checkout; output and errors together."""
        with self.log.open("w+") as log:  # a file: what outlives the command does not keep us waiting
            done = subprocess.run(
                self.controller.words("env", "-C", str(CHECKOUT), *command), env=self.environment(), text=True,
                timeout=timeout, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
            log.seek(0)
            done.stdout = log.read()
        return done

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start on the controller and go on; :meth:`output` waits for it."""
        self._started = (self.folder / "started.log").open("w+")
        return subprocess.Popen(
            self.controller.words("env", "-C", str(CHECKOUT), *command), env=self.environment(), text=True,
            start_new_session=True, stdin=subprocess.DEVNULL, stdout=self._started, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def output(self, process: subprocess.Popen[str], timeout: float) -> str:
        """Wait for what was started last; all that it printed."""
        process.wait(timeout)
        self._started.seek(0)
        return self._started.read()

    def bench(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of bench on the controller."""
        return self.run(sys.executable, "-m", "bench", *arguments)

    def make(self, *goals: str, hosts: str = "gpu-nodes", **variables: str) -> subprocess.CompletedProcess[str]:
        """``make`` as a person types it."""
        settings = {"HOSTS": hosts, "INVENTORY": str(self.inventory), "PLAN": str(self.plan), **variables}
        return self.run("make", *goals, *(f"{key}={value}" for key, value in settings.items()))

    def audit(self, hosts: str = "gpu-nodes", *more: str) -> list[str]:
        """The command line of an audit without the ceiling, which takes ten seconds a host."""
        return [
            sys.executable, "-m", "bench", "audit", str(self.plan), "--inventory", str(self.inventory),
            "--hosts", hosts, FAST, *more,
        ]  # fmt: skip

    def trust(self, *hosts: Host) -> None:
        """Write the hosts' keys into the user's own known_hosts."""
        known = self.ssh / "known_hosts"
        known.write_text("".join(host.known_line() for host in hosts))


@pytest.fixture(scope="session")
def fleet():
    """The fleet, up, known to the controller and not yet touched by Ansible in this session."""
    if os.geteuid() != 0:
        pytest.fail("tests/fleet makes namespaces and starts sshd: run it as root")
    missing = [tool for tool in ("/usr/sbin/sshd", "/usr/bin/sudo", "/usr/bin/nsenter") if not Path(tool).exists()]
    if missing:
        pytest.fail(f"missing: {', '.join(missing)}; `make test-fleet` installs what it needs")
    SCRATCH.mkdir(mode=0o755, exist_ok=True)
    cache = offline_cache()
    folder = SCRATCH / "controller"
    for name in ("home", "ssh", "results"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True, mode=0o700)
    switch = Switch()
    controller = Namespaces("controller")
    switch.plug(controller, f"{PUBLIC}.1")
    hosts = {
        "node-1": Host(switch, SCRATCH / "node-1", "node-1", 11),
        "node-2": Host(switch, SCRATCH / "node-2", "node-2", 12, port=2222),
        "node-3": Host(switch, SCRATCH / "node-3", "node-3", 13),
        "node-4": Host(switch, SCRATCH / "node-4", "node-4", 14, behind=True),
    }
    switch.plug(hosts["node-1"].space, "10.77.1.11", "br1")
    try:
        ssh = folder / "ssh"
        keygen(ssh / "id_ed25519")
        keygen(folder / "ssh" / "ops_key")
        authorized = SCRATCH / "authorized_keys"
        authorized.write_text("".join(key.read_text() for key in sorted(ssh.glob("*.pub"))))
        offline = {
            "UV_OFFLINE": "1",
            "UV_CACHE_DIR": str(cache),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(SCRATCH / "wheels"),
        }
        for host in hosts.values():
            shutil.rmtree(host.root / "runs", ignore_errors=True)
            shutil.rmtree(host.work, ignore_errors=True)
            host.users(authorized, offline)
            host.up()
        (ssh / "config").write_text(f"Host node-2\n  HostName {hosts['node-2'].address}\n  Port 2222\n  User root\n")
        Path("/root/.ssh").mkdir(mode=0o700, exist_ok=True)
        controller.bind(ssh, "/root/.ssh")
        known_hosts = folder / "known_hosts"
        known_hosts.write_text("")
        (CHECKOUT / "known_hosts").touch()
        controller.bind(known_hosts, str(CHECKOUT / "known_hosts"))
        (ssh / "known_hosts").touch()
        made = Fleet(
            hosts=hosts,
            controller=controller,
            folder=folder,
            inventory=write_inventory(folder, hosts, cache),
            ssh=ssh,
            known_hosts=known_hosts,
            results=folder / "results",
            plan=folder / "tiny.yml",
        )
        made.plan.write_text(yaml.safe_dump(TINY_PLAN))
        made.trust(*hosts.values())
        yield made
    finally:
        if (CHECKOUT / "known_hosts").stat().st_size == 0:
            (CHECKOUT / "known_hosts").unlink()
        for space in (controller, *(host.space for host in hosts.values()), switch.space):
            space.kill_all()


@pytest.fixture(scope="session")
def provisioned(fleet):
    """The fleet after ``make provision run``, whose output it has as ``first_run``."""
    seed = Path(os.environ.get("TEST_OPS", ""))
    if seed.is_dir() and not list((SCRATCH / "ops").glob("*/manifest.json")):
        shutil.copytree(seed, SCRATCH / "ops", dirs_exist_ok=True)
    done = fleet.make("provision", "run", ARGS=FAST)
    assert done.returncode == 0, done.stdout[-6000:]
    fleet.first_run = done.stdout
    return fleet


@pytest.fixture(autouse=True)
def hosts_up(fleet):
    """Every test begins with all hosts up, plugged in, and known; Ansible's connections of before are closed."""
    for pid in fleet.controller.processes("[mux]"):
        os.kill(pid, signal.SIGKILL)
    for host in fleet.hosts.values():
        host.plug()
        if host.space.processes("/usr/sbin/sshd") == []:
            host.up()
    fleet.trust(*fleet.hosts.values())
    fleet.known_hosts.write_text("")


def write_inventory(folder: Path, hosts: dict[str, Host], cache: Path) -> Path:
    """One way to be reached each: address and user, alias of ~/.ssh/config, other user and key, through a jump."""
    variables = {
        "node-1": {"ansible_host": hosts["node-1"].address, "ansible_user": "root"},
        "node-2": {},
        "node-3": {
            "ansible_host": hosts["node-3"].address,
            "ansible_user": "ops",
            "ansible_ssh_private_key_file": str(folder / "ssh" / "ops_key"),
        },
        "node-4": {
            "ansible_host": hosts["node-4"].address,
            "ansible_user": "root",
            "ansible_ssh_common_args": f"-o ProxyJump=root@{hosts['node-1'].address}",
        },
    }
    for name, host in hosts.items():
        variables[name] |= {"bench_runtime_root": str(host.root), "bench_folder": str(host.work)}
    inventory = folder / "inventory.yml"
    shared = {
        "ansible_python_interpreter": "/usr/bin/python3",
        "bench_runtime_ops_cache": str(SCRATCH / "ops"),
        "bench_runtime_uv_cache": str(cache),
        "bench_runtime_keep_cache": True,
    }
    data = {"all": {"vars": shared, "children": {"gpu-nodes": {"hosts": variables}}}}
    inventory.write_text(yaml.safe_dump(data))
    return inventory


def as_the_role_starts_uv() -> dict[str, str]:
    """A site's index and certificate authority, which uv does not find by itself."""
    role = role_module.load("bench_runtime/library/bench_runtime_environment.py")
    config = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, text=True, capture_output=True)
    trusted = any(Path(store).exists() for store in role.CERTIFICATE_STORES)
    return role.uv_environment(os.environ, "", role.parse_pip_settings(config.stdout), trusted)


def offline_cache() -> Path:
    """uv's cache with everything the hosts will install, and a folder with uv's own wheel for pip."""
    uv = Path(sys.executable).parent / "uv"
    cache = Path(subprocess.run([uv, "cache", "dir"], check=True, text=True, capture_output=True).stdout.strip())
    pins = [CHECKOUT / "requirements" / name for name in ("uv.txt", "host-build.txt", "host.txt")]
    content = b"".join([bytes(cache), *(pin.read_bytes() for pin in pins)])
    stamp = SCRATCH / f"cache-{hashlib.sha256(content).hexdigest()[:16]}"
    if not stamp.exists():
        wheels, throwaway = SCRATCH / "wheels", SCRATCH / "throwaway"
        pip = [
            "-m",
            "pip",
            "download",
            "--quiet",
            "--require-hashes",
            "--no-deps",
            "--dest",
            str(wheels),
            "-r",
            str(pins[0]),
        ]
        subprocess.run([sys.executable, *pip], check=True)
        subprocess.run(["/usr/bin/python3", "-m", "venv", throwaway], check=True)
        environment = {**os.environ, **as_the_role_starts_uv(), "PATH": f"{throwaway}/bin:{os.environ['PATH']}"}
        for pin in pins[1:]:
            subprocess.run(
                [uv, "pip", "install", "--quiet", "--python", throwaway / "bin" / "python", "--require-hashes",
                 "--no-deps", "--no-build-isolation", "-r", pin],
                check=True, env=environment,
            )  # fmt: skip
        shutil.rmtree(throwaway)
        stamp.touch()
    return cache
