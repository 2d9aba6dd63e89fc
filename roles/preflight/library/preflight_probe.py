#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""May this host be provisioned, and what does it lack? Reads only."""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile

DOCUMENTATION = r"""
---
module: preflight_probe
short_description: Decides whether a host can be provisioned for the checkpoint benchmark
description:
  - Looks at the distribution, the Python interpreters, the C++ compiler, libaio, memory, limits, free
    space and GPUs of a host, and says what is missing, what packages would bring it, and what cannot be
    helped. Changes nothing; a probe that compiles works in a temporary folder that it removes.
options:
  root:
    description: The runtime folder, bench_runtime_root. Need not exist.
    type: path
    required: true
  python:
    description: An interpreter to use, a path or a name on PATH. Empty to choose.
    type: str
    default: ""
  free_bytes:
    description: Free bytes needed below I(root) where nothing is provisioned yet.
    type: int
    default: 7000000000
  memory_bytes:
    description: Memory needed, in bytes.
    type: int
    default: 3500000000
  memlock_bytes:
    description: Page-locked memory that the largest default buffers need, in bytes.
    type: int
    default: 268435456
  aio_events:
    description: Asynchronous I/O events that must still be free.
    type: int
    default: 1024
author:
  - fastpersist-bench
"""

EXAMPLES = r"""
- name: Look at the host
  preflight_probe:
    root: /opt/fastpersist-bench
  register: preflight_report
"""

RETURN = r"""
problems:
  description: Why this host cannot be provisioned, one sentence each, with what to do.
  type: list
  elements: str
  returned: always
warnings_found:
  description: What will limit the benchmark here, without stopping it.
  type: list
  elements: str
  returned: always
packages:
  description: System packages that are missing.
  type: list
  elements: str
  returned: always
install_command:
  description: The command that installs them, for a person to run.
  type: str
  returned: always
python:
  description: The interpreter to make the environment with; empty until the packages are installed.
  type: str
  returned: always
facts:
  description: What was seen.
  type: dict
  returned: always
"""

OLDEST = (3, 10)
NEWEST = (3, 13)
# torch 2.6.0 is built for CUDA 12.4, which by minor-version compatibility runs from this driver on
# (NVIDIA, CUDA compatibility).
OLDEST_DRIVER = (525, 60, 13)
# torch 2.6.0 refuses older compilers in its own headers.
LINK_PROBE = r"""
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 9
#error "GCC 9 or newer is needed to compile against torch 2.6"
#endif
#include <libaio.h>
int main() { return &io_pgetevents == nullptr || &io_submit == nullptr; }
"""
PYTHON_PROBE = r"""
import json, os, sys, sysconfig
def has(name):
    try:
        __import__(name)
        return True
    except ImportError:
        return False
path = getattr(sys, "_base_executable", None) or sys.executable
print(json.dumps({
    "path": os.path.realpath(path), "version": list(sys.version_info[:3]),
    "venv": has("venv") and has("ensurepip"),
    "header": os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
}))
"""


# --- decisions: pure ---------------------------------------------------------------------------


def family_of(os_release):
    """``debian``, ``rhel`` or empty, from the fields of /etc/os-release."""
    names = {os_release.get("ID", "")} | set(os_release.get("ID_LIKE", "").split())
    if names & {"debian", "ubuntu"}:
        return "debian"
    if names & {"rhel", "fedora", "centos"}:
        return "rhel"
    return ""


def in_range(version):
    """Is this Python, (major, minor, ...), one that the pins are made for?"""
    return OLDEST <= tuple(version[:2]) <= NEWEST


def of_distribution(candidate):
    """Does the distribution package this interpreter, so that its -dev and -venv packages fit?"""
    return os.path.dirname(candidate["path"]) in ("/usr/bin", "/bin", "/usr/libexec")


def choose_python(candidates, family):
    """The interpreter to use, or None.

    One that has all it needs, else one that packages can complete; the newest of them.
    """

    def complete(candidate):
        return candidate["venv"] and candidate["header"]

    fit = [c for c in candidates if in_range(c["version"]) and (complete(c) or (family and of_distribution(c)))]
    return max(fit, key=lambda c: (complete(c), tuple(c["version"])), default=None)


def python_packages(chosen, family, os_release):
    """Packages that make the chosen interpreter whole, or bring one where there is none."""
    if chosen is None:
        if family == "rhel":
            # EL8 and EL9 have an older python3 and package 3.11 beside it.
            return ["python3.11", "python3.11-devel"]
        if family == "debian" and _distribution_python_fits(os_release):
            return ["python3", "python3-venv", "python3-dev"]
        return []
    name = "python{}.{}".format(*chosen["version"][:2])
    packages = []
    if not chosen["venv"]:
        packages.append(name + "-venv" if family == "debian" else name)
    if not chosen["header"]:
        packages.append(name + ("-dev" if family == "debian" else "-devel"))
    if family == "rhel" and chosen["path"].endswith("/platform-python"):
        packages = [p.replace(name, "python3") for p in packages]
    return packages


def _distribution_python_fits(os_release):
    """Debian 12 and Ubuntu 22.04 are the first whose python3 is 3.10 or newer."""
    oldest = {"debian": 12, "ubuntu": 22}.get(os_release.get("ID", ""))
    match = re.match(r"\d+", os_release.get("VERSION_ID", ""))
    return bool(oldest and match and int(match.group()) >= oldest)


def install_command(family, packages):
    """What a person types to install them."""
    if not packages:
        return ""
    tool = {"debian": "apt-get install -y", "rhel": "dnf install -y"}.get(family, "install")
    return "sudo " + tool + " " + " ".join(packages)


def decide(facts, options):
    """(problems, warnings, packages) of a host.

    ``facts`` is what :func:`gather` returned, ``options`` the module's. A problem means that the
    host cannot be provisioned; a warning names rows that will be skipped or limited.
    """
    problems, warnings = [], []
    family = facts["family"]
    chosen = choose_python(facts["pythons"], family)

    packages = python_packages(chosen, family, facts["os_release"])
    compiler, aio = facts["compiler"], facts["aio_probe"]
    if not compiler:
        packages.append("g++" if family == "debian" else "gcc-c++")
    if not facts["libaio_header"]:
        packages.append("libaio-dev" if family == "debian" else "libaio-devel")
    if not facts["fio"]:
        packages.append("fio")

    if facts["machine"] not in ("x86_64", "aarch64"):
        problems.append(
            "the processor is {}; torch 2.6.0 has wheels for x86_64 and aarch64 only".format(facts["machine"])
        )
    problems += _python_problems(facts, options, chosen, packages)
    if packages:
        if not family:
            problems.append(
                "missing: {}; this distribution ({}) is not known here: install what it calls these".format(
                    " ".join(packages), facts["os_release"].get("ID") or "unknown"
                )
            )
        elif not (facts["root"] or facts["sudo"]):
            problems.append(
                "missing system packages and no sudo to install them with: run `{}` as root".format(
                    install_command(family, packages).replace("sudo ", "")
                )
            )
    if compiler and facts["libaio_header"] and not aio["ok"]:
        problems.append(
            "{} cannot build against libaio with io_pgetevents (libaio 0.3.112 or newer and GCC 9 or newer "
            "are needed). The compiler's words:\n{}".format(compiler, aio["output"])
        )
    problems += _space_and_memory(facts, options)
    if facts["python_optimize"]:
        problems.append(
            "PYTHONOPTIMIZE is set on this host: it strips the asserts that DeepSpeed's I/O calls are in. "
            "Unset it (look in /etc/environment and the login user's profile)"
        )
    free_events = facts["aio_max_nr"] - facts["aio_nr"]
    if free_events < options["aio_events"]:
        problems.append(
            "{} of fs.aio-max-nr = {} asynchronous I/O events are in use, {} must be free: "
            "`sudo sysctl -w fs.aio-max-nr={}`".format(
                facts["aio_nr"],
                facts["aio_max_nr"],
                options["aio_events"],
                max(1048576, facts["aio_max_nr"] * 2),
            )
        )
    if not facts["root"] and 0 <= facts["memlock_bytes"] < options["memlock_bytes"]:
        warnings.append(
            "only {} may be page-locked (ulimit -l), {} are needed: DeepSpeed's fast writer may fail. "
            "Raise memlock in /etc/security/limits.conf and log in again".format(
                size(facts["memlock_bytes"]), size(options["memlock_bytes"])
            )
        )
    warnings += _gpu_warnings(facts)
    return problems, warnings, packages


def _python_problems(facts, options, chosen, packages):
    wanted = options["python"]
    if wanted and not facts["pythons"]:
        return ["bench_runtime_python is {}, which does not run here".format(wanted)]
    if chosen is not None or packages[:1] in (["python3"], ["python3.11"]):
        return []
    seen = ["{} ({})".format(c["path"], ".".join(map(str, c["version"]))) for c in facts["pythons"]]
    return [
        "no Python from {}.{} to {}.{} with venv and headers; seen: {}. Install one with its venv and "
        "development packages, or name one with bench_runtime_python".format(
            *OLDEST, *NEWEST, ", ".join(seen) or "none"
        )
    ]


def _space_and_memory(facts, options):
    problems = []
    if not facts["provisioned"] and facts["free_bytes"] < options["free_bytes"]:
        problems.append(
            "{} has {} free, the runtime needs {}: make room or set bench_runtime_root elsewhere".format(
                facts["free_where"], size(facts["free_bytes"]), size(options["free_bytes"])
            )
        )
    if facts["memory_bytes"] < options["memory_bytes"]:
        problems.append(
            "{} of memory; {} are needed to import torch and compile the ops".format(
                size(facts["memory_bytes"]), size(options["memory_bytes"])
            )
        )
    return problems


def _gpu_warnings(facts):
    gpu = facts["gpu"]
    if gpu["devices"] and not gpu["driver"]:
        return ["an NVIDIA GPU is present but its driver is not loaded: GPU rows will be skipped (try nvidia-smi)"]
    warnings = []
    if gpu["driver"]:
        if version_tuple(gpu["driver"]) < OLDEST_DRIVER:
            warnings.append(
                "NVIDIA driver {} is older than {}, which CUDA 12.4 needs: GPU rows will be skipped".format(
                    gpu["driver"], ".".join(map(str, OLDEST_DRIVER))
                )
            )
        if not gpu["toolkit"]:
            warnings.append("no CUDA toolkit (nvcc): ops are built against the headers of torch's own CUDA packages")
    return warnings


def version_tuple(text):
    """The leading numbers of a version, for comparison."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def size(count):
    """Bytes for people."""
    return "{:.1f} GB".format(count / 1e9) if count >= 1e9 else "{:.0f} MB".format(count / 1e6)


def parse_os_release(text):
    """The fields of /etc/os-release."""
    fields = {}
    for line in text.splitlines():
        key, sign, value = line.partition("=")
        if sign:
            fields[key.strip()] = value.strip().strip("\"'")
    return fields


# --- edges: look, change nothing ---------------------------------------------------------------


def output_of(*command, timeout=30):
    """(exit code, output) of a command; 127 where it does not exist, 124 where it hangs."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, "{} did not answer within {} s".format(command[0], timeout)
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def read(path, default=""):
    """A small file's text."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return default


def pythons(wanted):
    """Every interpreter that answers, or the wanted one only; each once."""
    names = (
        [wanted]
        if wanted
        else ["python3.{}".format(n) for n in range(NEWEST[1], OLDEST[1] - 1, -1)]
        + [
            "python3",
            "/usr/bin/python3",
            "/usr/local/bin/python3",
            sys.executable,
        ]
    )
    found = {}
    for name in names:
        path = shutil.which(name)
        if path:
            code, text = output_of(path, "-I", "-c", PYTHON_PROBE)
            if code == 0:
                try:
                    answer = json.loads(text.splitlines()[-1])
                except (ValueError, IndexError):
                    continue
                found[answer["path"]] = answer
    return list(found.values())


def probe_aio(compiler):
    """Does a program with io_pgetevents compile and link? The compiler's words where not."""
    if not compiler:
        return {"ok": False, "output": ""}
    folder = tempfile.mkdtemp(prefix="fastpersist-preflight-")
    try:
        source = os.path.join(folder, "probe.cpp")
        with open(source, "w", encoding="utf-8") as file:
            file.write(LINK_PROBE)
        code, text = output_of(
            compiler, "-std=c++17", source, "-laio", "-o", os.path.join(folder, "probe"), timeout=120
        )
        return {"ok": code == 0, "output": text[-2000:]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def has_libaio_header(compiler):
    """Is libaio.h where compilers look?"""
    places = ["/usr/include", "/usr/local/include", *os.environ.get("CPATH", "").split(":")]
    return any(os.path.exists(os.path.join(place, "libaio.h")) for place in places if place) or bool(
        compiler and glob.glob("/usr/include/*-linux-gnu/libaio.h")
    )


def gpus():
    """NVIDIA devices on the PCI bus, the driver's version and the toolkit's compiler."""
    devices = 0
    for device in glob.glob("/sys/bus/pci/devices/*"):
        if read(device + "/vendor").strip() == "0x10de" and read(device + "/class").startswith("0x03"):
            devices += 1
    match = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", read("/proc/driver/nvidia/version"))
    nvcc = shutil.which("nvcc") or ("/usr/local/cuda/bin/nvcc" if os.path.exists("/usr/local/cuda/bin/nvcc") else "")
    return {"devices": devices, "driver": match.group(1) if match else "", "toolkit": nvcc}


def nearest_existing(path):
    """The folder itself, or the nearest parent that exists."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def number(path):
    """The number in a small file of /proc; -1 where there is none."""
    match = re.match(r"\s*(\d+)", read(path))
    return int(match.group(1)) if match else -1


def gather(root, wanted_python):
    """Everything :func:`decide` needs to know about this host."""
    os_release = parse_os_release(read("/etc/os-release"))
    where = nearest_existing(root)
    space = os.statvfs(where)
    meminfo = re.search(r"MemTotal:\s+(\d+) kB", read("/proc/meminfo"))
    compiler = shutil.which(os.environ.get("CXX") or "g++") or ""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "os_release": os_release,
        "family": family_of(os_release),
        "machine": platform.machine(),
        "root": os.geteuid() == 0,
        "sudo": bool(shutil.which("sudo")),
        "pythons": pythons(wanted_python),
        "compiler": compiler,
        "libaio_header": has_libaio_header(compiler),
        "aio_probe": probe_aio(compiler) if has_libaio_header(compiler) else {"ok": False, "output": ""},
        "fio": shutil.which("fio") or "",
        "provisioned": os.path.exists(os.path.join(root, "venv", "bin", "python")),
        "free_where": where,
        "free_bytes": space.f_bavail * space.f_frsize,
        "memory_bytes": int(meminfo.group(1)) * 1024 if meminfo else 0,
        "memlock_bytes": -1 if soft == resource.RLIM_INFINITY else soft,
        "aio_nr": max(number("/proc/sys/fs/aio-nr"), 0),
        "aio_max_nr": number("/proc/sys/fs/aio-max-nr"),
        "python_optimize": os.environ.get("PYTHONOPTIMIZE", ""),
        "gpu": gpus(),
    }


def main():
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "python": {"type": "str", "default": ""},
            "free_bytes": {"type": "int", "default": 7_000_000_000},
            "memory_bytes": {"type": "int", "default": 3_500_000_000},
            "memlock_bytes": {"type": "int", "default": 256 * 1024**2},
            "aio_events": {"type": "int", "default": 1024},
        },
        supports_check_mode=True,
    )
    facts = gather(module.params["root"], module.params["python"])
    problems, warnings, packages = decide(facts, module.params)
    chosen = choose_python(facts["pythons"], facts["family"])
    module.exit_json(
        changed=False,
        problems=problems,
        warnings_found=warnings,
        packages=packages,
        install_command=install_command(facts["family"], packages),
        python=chosen["path"] if chosen and chosen["venv"] and chosen["header"] else "",
        facts=facts,
    )


if __name__ == "__main__":
    main()
