"""Stories of a fleet, in the order of a day: reach the hosts, audit them, lose some, roll back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import FAST, TINY_PLAN, Fleet

from bench.fleet.store import RunStore
from bench.plan import Plan

NODES = ("node-1", "node-2", "node-3", "node-4")
PRISTINE = "db42dbd71fcd9ca4fb83283350bacde067659b5a53dd647588236a0693bb0d38"


def wait_for(what: Callable[[], object], seconds: float = 90.0) -> object:
    """The first true answer; fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = what()
        if answer:
            return answer
        time.sleep(0.2)
    raise AssertionError(f"never became true: {what}")


def long_plan(fleet: Fleet, repetitions: int) -> Path:
    """A plan that goes on long enough to do something to it."""
    path = fleet.folder / f"long-{repetitions}.yml"
    path.write_text(yaml.safe_dump({**TINY_PLAN, "name": "long", "repetitions": repetitions}))
    return path


def status(fleet: Fleet, host: str, run_id: str) -> dict:
    """What a host says of a run, read on its own disk."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((fleet.hosts[host].root / "runs" / run_id / "status.json").read_text())
    return {}


def verdicts(fleet: Fleet, run_id: str = "latest") -> dict[str, dict]:
    """Rows of fleet.json by host."""
    data = json.loads((fleet.results / run_id / "fleet.json").read_text())
    return {host["name"]: host for host in data["hosts"]}


def newest(fleet: Fleet) -> str:
    """The newest run's id."""
    return sorted(path.parent.name for path in fleet.results.glob("2*/targets.json"))[-1]


def running(fleet: Fleet, hosts: tuple[str, ...], before: set[str]) -> str:
    """Wait until a new run measures on all ``hosts``; its id."""

    def found() -> str | None:
        runs = {path.name for path in fleet.results.glob("2*")} - before
        run_id = max(runs, default="")
        busy = all(status(fleet, host, run_id).get("state") == "running" for host in hosts)
        return run_id if run_id and busy else None

    return str(wait_for(found))


@pytest.fixture(scope="session")
def good_run(provisioned):
    """The first run, in which every host passed: its id."""
    return next(path.parent.name for path in sorted(provisioned.results.glob("2*/targets.json")))


def test_make_hosts_lists_who_would_be_touched_and_how(fleet):
    done = fleet.make("hosts")
    assert done.returncode == 0
    assert re.findall(r"^node-\d", done.stdout, re.M) == list(NODES)
    assert (
        f"ssh -o ProxyJump=root@{fleet.hosts['node-1'].address} -l root {fleet.hosts['node-4'].address}" in done.stdout
    )
    assert "WARNING" not in done.stdout  # a group with a dash is an ordinary group


def test_a_pattern_that_names_nobody_is_an_error(fleet):
    done = fleet.make("run", hosts="gpu-nods")
    assert done.returncode != 0
    assert "gpu-nods" in done.stdout
    assert "make hosts HOSTS=all" in done.stdout
    assert "make hosts HOSTS=all" in fleet.make("provision", "run", hosts="gpu-nods").stdout


def test_all_well_in_every_way_to_log_in(provisioned, good_run):
    """Root by address, an alias of ~/.ssh/config on another port, another user with sudo, through a jump host."""
    run_id, output = good_run, provisioned.first_run
    assert {name: row["verdict"] for name, row in verdicts(provisioned, run_id).items()} == dict.fromkeys(NODES, "PASS")
    for name in NODES:
        folder = provisioned.results / run_id / name
        report = json.loads((folder / "report.json").read_text())
        assert report["host"] == name
        assert report["patch"]["state"] == "patched"
        assert "test_ds_aio_fast_save -- " in (folder / "bench.log").read_text()
    assert "PASS: all 4 hosts" in output
    # The benchmark ran as the login user, root or not.
    node = provisioned.hosts["node-3"]
    assert (node.root / "runs" / run_id / "report.json").stat().st_uid == 4711
    assert (provisioned.hosts["node-2"].root / "runs" / run_id / "report.json").stat().st_uid == 0


def test_a_host_that_cannot_be_provisioned_costs_only_its_own_row(provisioned):
    provisioned.hosts["node-2"].down()
    done = provisioned.make("provision", "run", hosts="node-1:node-2", ARGS=FAST)
    assert done.returncode != 0
    # What did not change since the first time is not brought again.
    assert re.search(r"^node-1 .*changed=0 ", done.stdout, re.M), done.stdout[-4000:]
    assert {name: row["verdict"] for name, row in verdicts(provisioned).items()} == {
        "node-1": "PASS",
        "node-2": "UNREACHABLE",
    }


def test_one_is_down_one_drops_off_one_childs_killed_one_disk_is_full(provisioned, tmp_path):
    before = {path.name for path in provisioned.results.glob("2*")}
    one, two, three, four = (provisioned.hosts[name] for name in NODES)
    two.down()
    image = tmp_path / "small.img"
    with image.open("wb") as file:
        file.truncate(24 * 1024**2)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    four.space.run("mount", "-o", "loop", str(image), str(four.work))
    command = provisioned.audit()
    command[command.index(str(provisioned.plan))] = str(long_plan(provisioned, 25))
    try:
        audit = provisioned.start(*command)
        run_id = running(provisioned, ("node-1", "node-3"), before)
        victim = wait_for(lambda: one.space.processes("bench.host.child"))
        os.kill(victim[-1], signal.SIGKILL)
        three.unplug()
        time.sleep(25)  # longer than the collector waits for an answer
        three.plug()
        output = provisioned.output(audit, timeout=240)
    finally:
        four.space.run("umount", str(four.work))
    rows = verdicts(provisioned)
    assert audit.returncode == 4, output[-6000:]
    assert rows["node-1"]["verdict"] == "FAILED"
    assert "killed by SIGKILL" in rows["node-1"]["reason"]
    assert rows["node-2"]["verdict"] == "UNREACHABLE"
    assert "refused" in rows["node-2"]["reason"]
    assert rows["node-3"]["verdict"] == "PASS", rows["node-3"]
    assert rows["node-4"]["verdict"] == "FAILED"
    assert "space" in rows["node-4"]["reason"]
    assert "node-3" in output
    assert "lost: " in output
    # The other rows of the host whose child was killed were measured all the same.
    cases = json.loads((provisioned.results / run_id / "node-1" / "report.json").read_text())["cases"]
    assert sorted(case["status"] for case in cases) == ["failed", "ok"]
    markdown = (provisioned.results / "latest" / "report.md").read_text()
    assert all(name in markdown for name in ("node-1", "node-2", "node-3", "node-4"))


def test_retry_takes_who_did_not_pass_and_survives_the_controllers_death(provisioned):
    """After the story above. The controller is killed; a second run is refused; a new watch attaches and ends it."""
    before = {path.name for path in provisioned.results.glob("2*")}
    failed = [name for name, row in verdicts(provisioned).items() if row["verdict"] != "PASS"]
    assert failed == ["node-1", "node-2", "node-4"]
    plan = str(long_plan(provisioned, 60))
    command = [sys.executable, "-m", "bench", "audit", plan, "--retry", "last", FAST]
    audit = provisioned.start(*command)
    run_id = running(provisioned, tuple(failed), before)
    time.sleep(1)
    os.killpg(audit.pid, signal.SIGKILL)
    audit.wait()
    assert json.loads((provisioned.results / run_id / "targets.json").read_text())["hosts"] == failed

    shown = provisioned.bench("status")
    assert re.search(r"node-\d .*(torch_save|ds_aio)", shown.stdout), shown.stdout
    second = provisioned.run(*provisioned.audit("node-1"))
    assert second.returncode == 1
    assert f"a benchmark is already running here: run {run_id}, pid " in second.stdout
    assert os.readlink(provisioned.results / "latest") == run_id, "the refused run must not hide the one that goes on"

    watched = provisioned.make("watch")
    assert watched.returncode == 0, watched.stdout
    assert "3 hosts: 3 finished; 100% done" in watched.stdout
    done = provisioned.make("collect", "report")
    assert done.returncode == 0, done.stdout[-4000:]
    assert {name: row["verdict"] for name, row in verdicts(provisioned).items()} == dict.fromkeys(failed, "PASS")
    again = provisioned.bench("audit", plan, "--retry", "last")
    assert again.returncode == 1
    assert "all 3 hosts of run" in again.stdout


def test_cancel_stops_the_run_and_leaves_nothing(provisioned):
    before = {path.name for path in provisioned.results.glob("2*")}
    hosts = ("node-2", "node-3")
    command = provisioned.audit(":".join(hosts))
    command[command.index(str(provisioned.plan))] = str(long_plan(provisioned, 5000))
    audit = provisioned.start(*command)
    run_id = running(provisioned, hosts, before)
    cancelled = provisioned.make("cancel")
    assert cancelled.returncode == 0, cancelled.stdout
    assert "node-2: stopped\nnode-3: stopped" in cancelled.stdout
    output = provisioned.output(audit, timeout=60)
    assert audit.returncode == 4, output[-4000:]
    for name in hosts:
        host = provisioned.hosts[name]
        assert verdicts(provisioned, run_id)[name]["verdict"] == "FAILED"
        assert "interrupted" in verdicts(provisioned, run_id)[name]["reason"]
        assert host.space.processes("bench.host.child") == []
        assert list(host.work.iterdir()) == []


def test_an_unknown_key_is_refused_until_asked_and_a_changed_one_always(provisioned, good_run):
    run_id = good_run
    two = provisioned.hosts["node-2"]
    (provisioned.ssh / "known_hosts").write_text("")
    report = provisioned.results / run_id / "node-2" / "report.json"
    report.unlink()

    # Nobody knows the key: neither Ansible nor the collector goes in.
    refused = provisioned.make("run", hosts="node-2")
    assert refused.returncode != 0
    assert "Host key verification failed" in verdicts(provisioned)["node-2"]["reason"]
    assert verdicts(provisioned)["node-2"]["verdict"] == "UNREACHABLE"
    collected = provisioned.bench("collect", "--run", run_id)
    assert f"[{two.address}]:2222" in collected.stdout
    assert "ACCEPT_NEW_KEYS=1" in collected.stdout
    assert not report.exists()

    # Asked for, both accept it, into the project's file, and then know it.
    assert provisioned.make("collect", ACCEPT_NEW_KEYS="1", RUN=run_id).returncode == 0
    assert two.known_line() in provisioned.known_hosts.read_text()
    assert report.exists()
    provisioned.known_hosts.write_text("")
    accepted = provisioned.make("run", hosts="node-2", ACCEPT_NEW_KEYS="1", ARGS="--dry-run")
    assert accepted.returncode == 0, accepted.stdout[-3000:]
    assert "ds_aio" in accepted.stdout  # the dry run says what would be measured
    assert two.known_line().split()[2] in provisioned.known_hosts.read_text()
    assert (provisioned.ssh / "known_hosts").read_text() == ""

    # The host comes back with another key: refused by both, also when new keys are accepted.
    old = two.known_line()
    provisioned.known_hosts.write_text(old)
    two.down()
    two.new_key()
    two.up()
    report.unlink()
    changed = provisioned.make("run", hosts="node-2", ACCEPT_NEW_KEYS="1")
    assert changed.returncode != 0
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in changed.stdout
    collected = provisioned.make("collect", ACCEPT_NEW_KEYS="1", RUN=run_id)
    assert re.search(r"node-2: .*\[10\.77\.0\.12\]:2222 has CHANGED.*ssh-keygen -R", collected.stdout), collected.stdout
    assert provisioned.known_hosts.read_text() == old
    assert not report.exists()


def test_hostile_reports_cost_their_own_host_and_no_other(provisioned, good_run):
    run_id = good_run
    files = {name: provisioned.hosts[name].root / "runs" / run_id / "report.json" for name in NODES}
    whole = {name: path.read_bytes() for name, path in files.items()}
    try:
        files["node-1"].write_bytes(whole["node-1"][:-200])
        with files["node-2"].open("wb") as file:
            file.truncate(40 * 1024**2)
        files["node-3"].write_bytes(b"[" * 1_000_000)
        for name in NODES[:3]:
            (provisioned.results / run_id / name / "report.json").unlink(missing_ok=True)
        # Half of the good one came before the connection broke.
        ours = provisioned.results / run_id / "node-4" / "report.json"
        ours.unlink()
        ours.with_name(".report.json.part").write_bytes(whole["node-4"][: len(whole["node-4"]) // 2])
        done = provisioned.make("collect", "report", RUN=run_id)
        rows = verdicts(provisioned, run_id)
        assert done.returncode != 0
        assert rows["node-1"]["verdict"] == rows["node-2"]["verdict"] == rows["node-3"]["verdict"] == "FAILED"
        assert "not JSON" in rows["node-1"]["reason"]
        assert "bytes" in rows["node-2"]["reason"]
        assert "not JSON" in rows["node-3"]["reason"]
        assert rows["node-4"]["verdict"] == "PASS"
        assert ours.read_bytes() == whole["node-4"]
    finally:
        for name, path in files.items():
            path.write_bytes(whole[name])


def test_host_names_that_are_paths_or_pages_stay_names(provisioned, good_run, tmp_path):
    """Through the real collector: four names of one host, whose reports bear those names; one has a NaN."""
    names = ["../../../../../tmp/evil", "<script>alert(1)</script>", "report.md", "nan"]
    host = provisioned.hosts["node-1"]
    run_id = "20300101T000000Z-beef"
    inventory = tmp_path / "odd.yml"
    reached = {"ansible_host": host.address, "ansible_user": "root"}
    inventory.write_text(yaml.safe_dump({"all": {"hosts": dict.fromkeys(names, reached)}}))
    known = RunStore(provisioned.results, good_run).targets()
    odd = RunStore(provisioned.results, run_id)
    changes = {"run_id": run_id, "hosts": sorted(names), "inventory": [str(inventory)]}
    odd.create(known.model_copy(update=changes), Plan.model_validate(TINY_PLAN))
    whole = (host.root / "runs" / good_run / "report.json").read_text()
    for number, name in enumerate(names):
        folder = host.root / "runs" / f"odd-{number}"
        folder.mkdir()
        data = {**json.loads(whole), "run_id": run_id, "host": name}
        if name == "nan":
            data["cases"][0]["spread"] = float("nan")
        (folder / "report.json").write_text(json.dumps(data))
        with odd.start_file.open("a") as file:
            file.write(json.dumps({"host": name, "event": "started", "run_folder": str(folder)}) + "\n")
    try:
        done = provisioned.make("collect", "report", RUN=run_id)
        rows = verdicts(provisioned, run_id)
        assert {name: rows[name]["verdict"] for name in names} == {**dict.fromkeys(names, "PASS"), "nan": "FAILED"}, (
            done
        )
        assert "NaN is not a number" in rows["nan"]["reason"]
        page = (odd.folder / "report.md").read_text()
        assert "<script" not in page
        assert all((odd.folder / rows[name]["report"]).resolve().parent.parent == odd.folder for name in names[:3])
        assert not Path("/tmp/evil").exists()
    finally:
        shutil.rmtree(odd.folder)


def test_rollback_restores_the_others_names_the_missing_one_and_finishes_next_time(provisioned):
    torch = {
        name: next(host.root.glob("venv/lib/python3*/site-packages/torch/serialization.py"))
        for name, host in provisioned.hosts.items()
    }

    def pristine() -> dict[str, bool]:
        return {name: hashlib.sha256(path.read_bytes()).hexdigest() == PRISTINE for name, path in torch.items()}

    assert pristine() == dict.fromkeys(NODES, False)
    provisioned.hosts["node-2"].down()
    done = provisioned.make("rollback")
    assert done.returncode != 0
    assert re.search(r"node-2 .*unreachable=1", done.stdout), done.stdout[-3000:]
    assert pristine() == {**dict.fromkeys(NODES, True), "node-2": False}
    provisioned.hosts["node-2"].up()
    done = provisioned.make("rollback")
    assert done.returncode == 0, done.stdout[-3000:]
    assert pristine() == dict.fromkeys(NODES, True)
