#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Makes the Python environment of a host what the pins and the bench wheel say, and nothing when it is so."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time

DOCUMENTATION = r"""
---
module: bench_runtime_environment
short_description: Makes a host's Python environment from hashed pins and a wheel
description:
  - Creates I(root)/venv, installs uv with pip and everything else with uv, by hash, and the bench wheel.
  - Asks the environment itself what it holds before it believes I(root)/runtime.json, so that a damaged
    environment is repaired and a whole one is left alone.
options:
  root:
    description: The runtime folder, bench_runtime_root.
    type: path
    required: true
  python:
    description:
      - The interpreter to make the environment with.
      - An environment that works with another one in range is kept, unless I(python_required).
    type: path
    required: true
  python_required:
    description: Whether an environment made with another interpreter is made anew.
    type: bool
    default: false
  uv_pins:
    description: Text of the pin file that holds uv, for pip.
    type: str
    required: true
  build_pins:
    description: Text of the pin file with what source distributions build with.
    type: str
    required: true
  pins:
    description: Texts of the pin files with everything else.
    type: list
    elements: str
    required: true
  wheel:
    description: Path of the bench wheel on this host.
    type: path
    required: true
  wheel_sha256:
    description: Hash of the wheel, so that check mode needs no wheel.
    type: str
    required: true
  index:
    description: A package index to use instead of the configured one.
    type: str
    default: ""
  wheel_dir:
    description: A folder on this host that holds every pinned file; no index is asked.
    type: str
    default: ""
  uv_cache:
    description: uv's cache folder. Empty leaves the choice to uv.
    type: str
    default: ""
  keep_cache:
    description: Whether I(uv_cache) stays after the installation.
    type: bool
    default: false
author:
  - fastpersist-bench
"""

EXAMPLES = r"""
- name: Make the environment
  bench_runtime_environment:
    root: /opt/fastpersist-bench
    python: /usr/bin/python3.11
    uv_pins: "{{ lookup('ansible.builtin.file', 'requirements/uv.txt') }}"
    build_pins: "{{ lookup('ansible.builtin.file', 'requirements/host-build.txt') }}"
    pins: ["{{ lookup('ansible.builtin.file', 'requirements/host.txt') }}"]
    wheel: /opt/fastpersist-bench/stage/fastpersist_bench-0.1.0-py3-none-any.whl
    wheel_sha256: 5f0c...
"""

RETURN = r"""
steps:
  description: What was done, or would be in check mode, with the seconds each took.
  type: list
  elements: dict
  returned: always
python:
  description: The environment's interpreter.
  type: str
  returned: always
"""

STAMP = "runtime.json"
CERTIFICATE_STORES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
OLDEST, NEWEST = (3, 10), (3, 13)
# Asked of the environment: what is installed and whether the bench package and torch are really there.
INVENTORY = r"""
import importlib.metadata as metadata, importlib.util as util, json, os, re, sys
found = {}
for each in metadata.distributions():
    name = each.metadata["Name"]
    if name:
        found[re.sub(r"[-_.]+", "-", name).lower()] = each.version
def there(name):
    spec = util.find_spec(name)
    return bool(spec and spec.origin and os.path.getsize(spec.origin))
print(json.dumps({
    "version": list(sys.version_info[:3]),
    "base": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "packages": found,
    "importable": [name for name in ("torch", "deepspeed", "transformers", "bench") if there(name)],
}))
"""


class StepError(Exception):
    """A step that failed: what was run, its last words, what to do."""


# --- decisions: pure ---------------------------------------------------------------------------


def pinned(texts):
    """{name: version} of pins that hold on every host; those with a marker are left to uv."""
    versions = {}
    for text in texts:
        for line in text.splitlines():
            match = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)\s*(;)?", line)
            if match and not match.group(3):
                versions[re.sub(r"[-_.]+", "-", match.group(1)).lower()] = match.group(2)
    return versions


def digest(texts):
    """One hash for all pin files, in order."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def plan(seen, stamp, wanted):
    """Steps that are needed, in order: ``create``, ``pins``, ``wheel``; none when all is as wanted.

    ``seen`` is the environment's own answer or None where it does not run, ``stamp`` the content of
    runtime.json or {}, ``wanted`` has python, python_required, pins_sha256, versions, wheel_sha256.
    Returns [(step, why)].
    """
    if seen is None:
        return [
            ("create", "no working environment"),
            ("pins", "new environment"),
            ("wheel", "new environment"),
        ]
    if not OLDEST <= tuple(seen["version"][:2]) <= NEWEST or (
        wanted["python_required"] and seen["base"] != wanted["python"]
    ):
        why = "made with {}, {} is wanted".format(seen["base"], wanted["python"])
        return [("create", why), ("pins", "new environment"), ("wheel", "new environment")]
    steps = []
    wrong = sorted(name for name, version in wanted["versions"].items() if seen["packages"].get(name) != version)
    hollow = [name for name in ("torch", "deepspeed", "transformers") if name not in seen["importable"]]
    if wrong or hollow:
        steps.append(("pins", "not as pinned: " + ", ".join(sorted(set(wrong) | set(hollow)))))
    elif stamp.get("pins_sha256") != wanted["pins_sha256"]:
        steps.append(("pins", "the pins changed" if stamp else "an installation was interrupted"))
    if "bench" not in seen["importable"]:
        steps.append(("wheel", "bench is not installed"))
    elif stamp.get("wheel_sha256") != wanted["wheel_sha256"]:
        steps.append(("wheel", "bench changed"))
    return steps


def uv_environment(environment, uv_cache, pip_settings, system_certificates=False):
    """What uv is started with, beyond the host's environment.

    A site often has its index in pip's configuration only. Where uv has none of its own, it gets
    pip's, with pip's rule for several indexes (safe here, everything is hashed).
    """
    extra = {"UV_PYTHON_DOWNLOADS": "never", "UV_LINK_MODE": environment.get("UV_LINK_MODE", "")}
    if uv_cache:
        extra["UV_CACHE_DIR"] = uv_cache
    if pip_settings.get("index-url") and not (environment.get("UV_DEFAULT_INDEX") or environment.get("UV_INDEX_URL")):
        extra["UV_DEFAULT_INDEX"] = pip_settings["index-url"]
        others = pip_settings.get("extra-index-url", "").split()
        if others:
            extra.update(UV_INDEX=" ".join(others), UV_INDEX_STRATEGY="unsafe-best-match")
    if pip_settings.get("cert") and not environment.get("SSL_CERT_FILE"):
        extra["SSL_CERT_FILE"] = pip_settings["cert"]
    if system_certificates and not environment.get("UV_SYSTEM_CERTS"):
        # A site's own certificate authority is in the system's store, where pip looks but uv does not.
        extra["UV_SYSTEM_CERTS"] = "true"
    return {key: value for key, value in extra.items() if value}


def index_options(index, wheel_dir):
    """Options of pip and uv alike: where packages come from, when this role was told."""
    if wheel_dir:
        return ["--no-index", "--find-links", wheel_dir]
    return ["--index-url", index] if index else []


def without_password(text):
    """The text with user and password taken out of addresses."""
    return re.sub(r"://[^/\s@]+@", "://***@", text)


def parse_pip_settings(text):
    """Index settings out of ``pip config list``: {"index-url": ..., "extra-index-url": ..., "cert": ...}.

    The environment wins over files, ``[install]`` over ``[global]``, as in pip.
    """
    ranked = {}
    for line in text.splitlines():
        match = re.match(r"(:env:|global|install)\.([a-z-]+)='(.*)'$", line.strip())
        if match and match.group(2) in ("index-url", "extra-index-url", "cert"):
            rank = ("global", "install", ":env:").index(match.group(1))
            value = match.group(3).replace("\\n", " ").strip()
            if rank >= ranked.get(match.group(2), (-1, ""))[0]:
                ranked[match.group(2)] = (rank, value)
    return {key: value for key, (rank, value) in ranked.items()}


def advice(output, wheel_dir):
    """What to do about a failed installation, from its output."""
    lowered = output.lower()
    if "no space left" in lowered:
        return "make room, or set bench_runtime_root or bench_runtime_uv_cache to another disk"
    if "hash" in lowered and "mismatch" in lowered:
        return "a file is not the one that was pinned: look at the index or wheel folder it came from"
    if wheel_dir:
        return "bench_runtime_wheel_dir ({}) must hold every file of the pins, for this Python".format(wheel_dir)
    network = (
        "dns",
        "resolve",
        "connect",
        "network",
        "timed out",
        "timeout",
        "unreachable",
        "certificate",
        "proxy",
    )
    if any(word in lowered for word in network):
        return (
            "no package index answers: set bench_runtime_index, or pip's configuration or a proxy there, or "
            "use bench_runtime_wheel_dir"
        )
    return "see the words above; run `make provision` again when it is mended"


# --- edges -------------------------------------------------------------------------------------


def ask(python):
    """The environment's own answer, or None where it does not run."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", INVENTORY],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )
        return json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def read_stamp(path):
    """runtime.json, or {} where it is missing or cut off."""
    try:
        with open(path, encoding="utf-8") as file:
            stamp = json.load(file)
        return stamp if isinstance(stamp, dict) else {}
    except (OSError, ValueError):
        return {}


def write_stamp(path, stamp):
    """Replace runtime.json whole."""
    partial = path + ".part"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(stamp, file, indent=2)
        file.write("\n")
    os.replace(partial, path)


class Environment:
    """The folder venv below the root, and the steps that change it."""

    def __init__(self, params):
        self.params = params
        self.root = params["root"]
        self.folder = os.path.join(self.root, "venv")
        self.python = os.path.join(self.folder, "bin", "python")
        self.stamp_path = os.path.join(self.root, STAMP)

    def run(self, command, extra=None):
        """Run a step's command; raises StepError with its last words and advice."""
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        # pip and uv would otherwise take a virtual environment of the caller for theirs.
        environment.pop("VIRTUAL_ENV", None)
        environment.update(extra or {})
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                check=False,
                cwd=self.root,
            )
        except OSError as error:
            raise StepError("{} does not start: {}".format(command[0], error)) from error
        output = done.stdout.decode("utf-8", "replace")
        if done.returncode:
            words = "\n".join(line for line in output.strip().splitlines()[-15:])
            raise StepError(
                "`{}` failed with exit code {}:\n{}\nWhat to do: {}".format(
                    without_password(" ".join(command)),
                    done.returncode,
                    without_password(words),
                    advice(output, self.params["wheel_dir"]),
                )
            )
        return output

    def create(self):
        """A fresh environment with uv in it; the old one is removed."""
        if os.path.lexists(self.folder):
            if not os.path.exists(os.path.join(self.folder, "pyvenv.cfg")) and os.listdir(self.folder):
                raise StepError("{} is not a Python environment; move it away".format(self.folder))
            shutil.rmtree(self.folder)
        self.run([self.params["python"], "-m", "venv", self.folder])

    def install_pins(self):
        """Everything pinned, by hash: uv by pip, then what builds DeepSpeed, then the rest."""
        stage = tempfile.mkdtemp(prefix="pins-", dir=self.root)
        try:
            files = {}
            texts = [("uv", self.params["uv_pins"]), ("build", self.params["build_pins"])]
            texts += [("pins{}".format(n), text) for n, text in enumerate(self.params["pins"])]
            for name, text in texts:
                files[name] = os.path.join(stage, name + ".txt")
                with open(files[name], "w", encoding="utf-8") as file:
                    file.write(text)
            pip = [self.python, "-I", "-m", "pip", "--disable-pip-version-check"]
            options = index_options(self.params["index"], self.params["wheel_dir"])
            self.run(
                [
                    *pip,
                    "install",
                    "--quiet",
                    "--retries",
                    "2",
                    *options,
                    "--require-hashes",
                    "-r",
                    files["uv"],
                ]
            )
            settings = {} if options else parse_pip_settings(self.run([*pip, "config", "list"]))
            hashed = [*options, "--require-hashes", "--no-deps", "--no-build-isolation"]
            self.uv("install", *hashed, "-r", files["build"], settings=settings)
            rest = [word for name in sorted(files) if name.startswith("pins") for word in ("-r", files[name])]
            # Compiled once here: who runs a benchmark may not write into this folder, and torch with
            # DeepSpeed and transformers takes twice as long to import from source, in every case's process.
            self.uv("install", "--compile-bytecode", *hashed, *rest, settings=settings)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            cache = self.params["uv_cache"]
            if cache and not self.params["keep_cache"]:
                shutil.rmtree(cache, ignore_errors=True)

    def install_wheel(self):
        """The bench wheel, nothing else."""
        self.uv("install", "--no-cache", "--no-deps", "--no-index", "--reinstall", self.params["wheel"], settings={})

    def uv(self, verb, *arguments, settings):
        """``uv pip VERB`` into this environment."""
        trusted = any(os.path.exists(store) for store in CERTIFICATE_STORES)
        extra = uv_environment(os.environ, self.params["uv_cache"], settings, trusted)
        # Source distributions build with what is in the environment: its ninja must be found.
        extra["PATH"] = os.path.join(self.folder, "bin") + os.pathsep + os.environ.get("PATH", os.defpath)
        uv = os.path.join(self.folder, "bin", "uv")
        self.run([uv, "pip", verb, "--quiet", "--python", self.python, *arguments], extra)


def main():
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "python": {"type": "path", "required": True},
            "python_required": {"type": "bool", "default": False},
            "uv_pins": {"type": "str", "required": True},
            "build_pins": {"type": "str", "required": True},
            "pins": {"type": "list", "elements": "str", "required": True},
            "wheel": {"type": "path", "required": True},
            "wheel_sha256": {"type": "str", "required": True},
            "index": {"type": "str", "default": ""},
            "wheel_dir": {"type": "str", "default": ""},
            "uv_cache": {"type": "str", "default": ""},
            "keep_cache": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    environment = Environment(params)
    texts = [params["uv_pins"], params["build_pins"], *params["pins"]]
    wanted = {
        "python": os.path.realpath(params["python"]),
        "python_required": params["python_required"],
        "pins_sha256": digest(texts),
        "versions": pinned(texts),
        "wheel_sha256": params["wheel_sha256"],
    }
    seen = ask(environment.python)
    stamp = read_stamp(environment.stamp_path)
    todo = plan(seen, stamp, wanted)
    diff = {"before": "", "after": "".join("{}: {}\n".format(step, why) for step, why in todo)}
    actions = {
        "create": environment.create,
        "pins": environment.install_pins,
        "wheel": environment.install_wheel,
    }
    done = []
    try:
        for step, why in todo:
            begin = time.monotonic()
            if not module.check_mode:
                # Without its stamp an interrupted installation is never taken for a whole one.
                if step != "wheel" and os.path.exists(environment.stamp_path):
                    os.unlink(environment.stamp_path)
                actions[step]()
            done.append({"step": step, "why": why, "seconds": round(time.monotonic() - begin, 1)})
    except (StepError, OSError) as error:
        module.fail_json(msg="environment {}: {}".format(environment.folder, error), steps=done)
    if todo and not module.check_mode:
        seen = ask(environment.python)
        left = plan(seen, {"pins_sha256": wanted["pins_sha256"], "wheel_sha256": wanted["wheel_sha256"]}, wanted)
        if left:
            module.fail_json(
                msg="environment {} is still not right after the installation: {}".format(
                    environment.folder, "; ".join(why for step, why in left)
                ),
                steps=done,
            )
        write_stamp(
            environment.stamp_path,
            {
                "schema_version": 1,
                "python": seen["base"],
                "pins_sha256": wanted["pins_sha256"],
                "wheel_sha256": wanted["wheel_sha256"],
                "packages": {name: seen["packages"][name] for name in ("torch", "deepspeed", "transformers")},
            },
        )
    module.exit_json(changed=bool(todo), steps=done, python=environment.python, diff=diff)


if __name__ == "__main__":
    main()
