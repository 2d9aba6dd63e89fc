#!/usr/bin/python
"""Start a benchmark on this host so that it outlives the connection that started it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import resource
import subprocess
import tempfile
import time
from datetime import datetime, timezone

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: bench_start
short_description: Start C(bench run) detached
description:
  - Starts one run of the benchmark in the background, under C(systemd-run) where systemd is the running init and
    this module runs as root, else in a session of its own. The run goes on when the connection, Ansible or the
    controller ends.
  - Waits until the run shows its first C(status.json), or reports why it ended at once.
  - Nothing is started when this run was started before, nor while another run holds the host's lock.
options:
  run_id: {type: str, required: true, description: Name of the run.}
  host: {type: str, required: true, description: The host's name in the inventory; goes into the report.}
  root: {type: path, required: true, description: The runtime root, with the environment in C(venv).}
  folder: {type: path, required: true, description: Where checkpoints are written.}
  plan: {type: str, required: true, description: The text of the plan; written into the run's folder.}
  ops_cache: {type: path, description: Folder of the compiled ops, when it is not below I(root).}
  arguments: {type: list, elements: str, default: [], description: More arguments for C(bench run).}
  user:
    type: str
    description:
      - Who the benchmark runs as; the user this module runs as when left out.
      - As root this module lifts the limit on locked memory first, which pinned buffers need, then becomes this user.
  dry_run:
    type: bool
    default: false
    description: Only return, in C(lines), what the benchmark would measure and write; nothing is started.
  wait_seconds: {type: int, default: 60, description: How long the first status may take.}
author: [fastpersist-bench]
"""

EXAMPLES = r"""
- name: Start the benchmark
  bench_start:
    run_id: 20261129T174442Z-3f9c
    host: gpu-node-1
    root: /opt/fastpersist-bench
    folder: /mnt/nvme0
    plan: "{{ lookup('ansible.builtin.file', 'plan.yml') }}"
    user: "{{ ansible_facts.user_id }}"
  become: true
"""

RETURN = r"""
run_folder: {type: str, returned: always, description: Where status.json and report.json of the run are.}
work_folder: {type: str, returned: always, description: Where the run puts its checkpoints; it removes it at its end.}
pid: {type: int, returned: when started, description: The process of the benchmark.}
command: {type: list, returned: always, description: What is or would be started.}
lines: {type: list, returned: with dry_run, description: What the benchmark would do, in its own words.}
busy: {type: bool, returned: always, description: Another run holds this host.}
"""

UNIT_PREFIX = "fastpersist-bench-"
LOG_LINES = 12


class StartError(Exception):
    """The benchmark can't be started; the message says why and what to do."""


def bench_command(params, plan_file):
    """The benchmark's command line."""
    command = [
        os.path.join(params["root"], "venv", "bin", "bench"), "run", plan_file,
        "--folder", params["folder"], "--run-id", params["run_id"], "--host", params["host"],
    ]  # fmt: skip
    return command + list(params["arguments"])


def bench_environment(params, account):
    """The variables the benchmark needs, whoever starts it. ``account`` is a pwd entry."""
    path = os.path.join(params["root"], "venv", "bin") + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = {
        "BENCH_RUNTIME_ROOT": params["root"],
        "HOME": account.pw_dir,
        "LANG": "C.UTF-8",
        "LOGNAME": account.pw_name,
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        "USER": account.pw_name,
    }
    if params.get("ops_cache"):
        environment["BENCH_OPS_CACHE"] = params["ops_cache"]
    return environment


def detached_command(command, environment, unit, user, console):
    """Arguments of systemd-run for the command: a unit of its own outlives every session of the user."""
    return [
        "--quiet", "--collect", "--unit=" + unit, "--uid=" + user,
        "--property=LimitMEMLOCK=infinity", "--property=KillMode=mixed",
        "--property=WorkingDirectory=" + os.path.dirname(console),
        *["--setenv=%s=%s" % pair for pair in sorted(environment.items())],
        # The shell opens the log: StandardOutput=append: needs a newer systemd than EL8 has.
        "/bin/sh", "-c", 'exec "$@" >>"$0" 2>&1', console, *command,
    ]  # fmt: skip


def lock_holder(path):
    """None when nobody holds the lock, else what its file says of the owner (may be empty)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        owner = read_json(path)
        return owner if isinstance(owner, dict) else {}
    finally:
        os.close(descriptor)


def busy_message(owner, now):
    """Who runs here, for how long, and what to do."""
    run_id = owner.get("run_id", "of unknown name")
    try:
        age = max(0, int((now - datetime.fromisoformat(owner["since"])).total_seconds()))
        since = ", for %d s" % age
    except (KeyError, ValueError, TypeError):
        since = ""
    return (
        "a benchmark is already running here: run %s, pid %s%s; attach with `make watch RUN=%s`, stop it with "
        "`make cancel RUN=%s`" % (run_id, owner.get("pid", "?"), since, run_id, run_id)
    )


def read_json(path):
    """The JSON in a file, or None when it isn't there or isn't whole."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def last_lines(path):
    """The end of a log, for the message of a run that failed to start."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            return file.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []


def start(command, environment, console, account, as_root, cwd):
    """Start the command in a session of its own; a function that says whether it has ended."""

    def become():
        hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        for limit in (resource.RLIM_INFINITY, hard):
            try:
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
                break
            except (OSError, ValueError):  # a container's root may not lift it
                continue
        if as_root and account.pw_uid != 0:
            os.initgroups(account.pw_name, account.pw_gid)
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)

    with open(console, "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=cwd,
            start_new_session=True, close_fds=True,
            preexec_fn=become,  # noqa: PLW1509  # Ansible modules have one thread
        )  # fmt: skip
    return lambda: process.poll() is not None


def start_unit(systemd_run, command, environment, unit, account, console):
    """Start the command as a systemd unit; a function that says whether it has ended."""
    words = [systemd_run, *detached_command(command, environment, unit, account.pw_name, console)]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise StartError("systemd-run failed: %s" % done.stdout.decode("utf-8", "replace").strip())
    return lambda: subprocess.run(["systemctl", "is-active", "--quiet", unit], check=False).returncode != 0


def prepare(params, run_folder, plan_file, account):
    """Make what the benchmark writes into, owned by the user it runs as. Raises OSError."""
    own_folder(os.path.join(params["root"], "runs"), account)
    own_folder(run_folder, account)
    with open(plan_file, "w", encoding="utf-8") as file:
        file.write(params["plan"])
    for path in (plan_file, os.path.join(params["root"], "run.lock")):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
        hand_over(path, account)
    if not os.path.isdir(params["folder"]):
        own_folder(params["folder"], account)
    elif os.path.ismount(params["folder"]) and not set(os.listdir(params["folder"])) - {"lost+found"}:
        # A new array's filesystem belongs to root. One with data in it is left as it is.
        hand_over(params["folder"], account)


def own_folder(path, account):
    """Make a folder, with parents, for the user; one that exists keeps its content."""
    os.makedirs(path, mode=0o755, exist_ok=True)
    hand_over(path, account)


def hand_over(path, account):
    """Give a file or folder to the user, where this process may and it isn't theirs already."""
    if os.geteuid() == 0 and os.lstat(path).st_uid != account.pw_uid:
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)


def wait_for_status(status_file, ended, seconds):
    """The first status of the run, or None when it ended (``ended()``) or time is over before there is one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        over = ended()
        status = read_json(status_file)
        if status or over:
            return status
        time.sleep(0.1)
    return None


def dry_run(params):
    """What the benchmark's own dry run prints, in lines; leaves nothing behind."""
    folder = params["folder"]
    while not os.path.isdir(folder):  # made by the real run; its space is that of the parent
        folder = os.path.dirname(folder)
    with tempfile.NamedTemporaryFile("w", suffix=".yml", encoding="utf-8") as plan:
        plan.write(params["plan"])
        plan.flush()
        command = bench_command(dict(params, folder=folder), plan.name)
        environment = bench_environment(params, pwd.getpwuid(os.geteuid()))
        done = subprocess.run(
            [*command, "--dry-run"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment, check=False,
        )  # fmt: skip
    output = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode:
        raise StartError(output or "bench ended with %d" % done.returncode)
    return output.splitlines()


def account_of(user):
    """The pwd entry of who the benchmark runs as; this process's own when ``user`` is empty."""
    try:
        return pwd.getpwnam(user) if user else pwd.getpwuid(os.geteuid())
    except KeyError:
        raise StartError("there is no user %s on this host" % user) from None


def start_detached(params, command, run_folder, plan_file, systemd_run):
    """Prepare, start, and wait for the first status; its process id. ``systemd_run`` is a path or None."""
    account = account_of(params["user"])
    try:
        prepare(params, run_folder, plan_file, account)
    except OSError as error:
        raise StartError(
            "cannot prepare %s: %s; does the login user own %s, or may it become root?"
            % (error.filename, error.strerror, params["root"])
        ) from error
    console = os.path.join(run_folder, "console.log")
    environment = bench_environment(params, account)
    as_root = os.geteuid() == 0
    if as_root and systemd_run:
        ended = start_unit(systemd_run, command, environment, UNIT_PREFIX + params["run_id"], account, console)
    else:
        try:
            ended = start(command, environment, console, account, as_root, run_folder)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise StartError("cannot start %s: %s" % (command[0], error)) from error
    status = wait_for_status(os.path.join(run_folder, "status.json"), ended, params["wait_seconds"])
    if not status:
        how = "ended" if ended() else "goes on"
        words = " | ".join(last_lines(console)) or "it printed nothing"
        raise StartError("the benchmark %s without a status: %s" % (how, words))
    if status.get("state") == "failed":
        raise StartError(str(status.get("reason") or "the benchmark failed without a reason"))
    return status.get("pid")


def main():
    module = AnsibleModule(
        argument_spec={
            "run_id": {"type": "str", "required": True},
            "host": {"type": "str", "required": True},
            "root": {"type": "path", "required": True},
            "folder": {"type": "path", "required": True},
            "plan": {"type": "str", "required": True},
            "ops_cache": {"type": "path"},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "user": {"type": "str"},
            "dry_run": {"type": "bool", "default": False},
            "wait_seconds": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    params = module.params
    run_folder = os.path.join(params["root"], "runs", params["run_id"])
    plan_file = os.path.join(run_folder, "plan.yml")
    command = bench_command(params, plan_file)
    result = {
        "changed": False,
        "busy": False,
        "command": command,
        "run_folder": run_folder,
        # As bench.host.run names it.
        "work_folder": os.path.join(params["folder"], "fastpersist-bench-" + params["run_id"]),
    }
    status = read_json(os.path.join(run_folder, "status.json"))
    if status:
        module.exit_json(msg="this run was started before", pid=status.get("pid"), **result)
    try:
        if not os.access(command[0], os.X_OK):
            raise StartError(
                "%s is not there: this host is not provisioned; `make provision HOSTS=%s` does it"
                % (command[0], params["host"])
            )
        if params["dry_run"]:
            module.exit_json(lines=dry_run(params), **result)
        owner = lock_holder(os.path.join(params["root"], "run.lock"))
        if owner is not None:
            result["busy"] = True
            raise StartError(busy_message(owner, datetime.now(timezone.utc)))
        result["changed"] = True
        if module.check_mode:
            module.exit_json(msg="would start the benchmark", **result)
        systemd_run = module.get_bin_path("systemd-run") if os.path.isdir("/run/systemd/system") else None
        pid = start_detached(params, command, run_folder, plan_file, systemd_run)
    except StartError as error:
        module.fail_json(msg=str(error), **result)
    module.exit_json(msg="started", pid=pid, **result)


if __name__ == "__main__":
    main()
