"""One audit from the controller: name the run, start it everywhere, watch, collect, judge, report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import bench
from bench import layout, results
from bench.fleet import ssh
from bench.fleet.collect import Collected, collect, load, read_report
from bench.fleet.inventory import InventoryError, Target, read_targets, tool
from bench.fleet.store import RunStore, StoreError, Targets, open_run
from bench.fleet.verdict import NoReport, fleet_rates, judge
from bench.fleet.watch import Watcher
from bench.plan import load_plan
from bench.report.markdown import markdown
from bench.results import FleetRate, FleetReport, HostOutcome, HostReport, utc_now
from bench.words import plain

# The checkout: playbooks, and ansible.cfg with them, are not part of the installed package.
CHECKOUT = Path(__file__).resolve().parents[2]
NEW_KEYS_ARGS = "-o StrictHostKeyChecking=accept-new"


@dataclass(frozen=True)
class Controller:
    """What every command on the controller needs to know. ``known_hosts``: the project's own file."""

    results_folder: Path
    known_hosts: Path
    accept_new_keys: bool = False

    def connector(self) -> ssh.Connector:
        return ssh.connector(self.known_hosts, self.accept_new_keys)


@dataclass(frozen=True)
class Order:
    """What a person asked to run. ``retry``: take the hosts of this run (or ``last``) that did not pass."""

    plan: str
    inventory: list[str]
    pattern: str
    retry: str | None = None
    folder: str | None = None
    forks: int | None = None
    gpu: bool = False
    dry_run: bool = False
    arguments: list[str] = field(default_factory=list)
    playbook_arguments: list[str] = field(default_factory=list)


class NothingStartedError(ValueError):
    """No host was started, and there is nothing to report; the message says why."""


def new_run(controller: Controller, order: Order) -> tuple[RunStore, Targets]:
    """Make the run's folder with all targeted hosts in it, before any host is touched.

    Raises PlanError, InventoryError or StoreError.
    """
    plan = load_plan(order.plan)
    inventory, hosts = _hosts_to_run(controller, order)
    store = RunStore(controller.results_folder, results.new_run_id())
    targets = Targets(
        run_id=store.run_id,
        plan=plan.name,
        cases=[(case.workload, case.writer) for case in plan.cases()],
        started_at=utc_now(),
        inventory=inventory,
        pattern=order.pattern,
        hosts=hosts,
    )
    store.create(targets, plan)
    return store, targets


def start(controller: Controller, order: Order, store: RunStore, targets: Targets) -> bool:
    """Start the benchmark on every host through Ansible; events go to the run's start.jsonl.

    Returns whether it runs anywhere. Raises NothingStartedError when there is nothing to report either:
    all hosts are busy with another run, or Ansible reached none at all.
    """
    # Linked first: when this process is killed while hosts are being started, `make watch` still finds the run.
    before = store.latest()
    store.link_latest()
    status = run_playbook(controller, order, store, targets)
    starts = store.starts()
    if any(start.may_run for start in starts.values()):
        return True
    busy = [f"{host}: {plain(start.message)}" for host, start in sorted(starts.items()) if start.busy]
    if busy:
        # It would stand in the way of attaching to the run that is going on.
        shutil.rmtree(store.folder)
        if before is not None:
            before.link_latest()
        raise NothingStartedError("nothing was started. " + "\n".join(busy[:5]))
    if not starts:
        raise NothingStartedError(
            f"ansible-playbook ended with {status} before it reached a host (its words are above)"
        )
    return False


def dry_run(controller: Controller, order: Order, store: RunStore, targets: Targets) -> int:
    """Let every host say what it would measure and write; leaves nothing behind. Ansible's exit status."""
    try:
        return run_playbook(controller, order, store, targets)
    finally:
        shutil.rmtree(store.folder)


def run_playbook(controller: Controller, order: Order, store: RunStore, targets: Targets) -> int:
    """Run playbooks/run.yml for the targets; its exit status. Failed hosts are in start.jsonl."""
    variables = {
        "bench_run_id": store.run_id,
        "bench_run_plan_file": str(store.plan_file.resolve()),
        "bench_run_gpu": order.gpu,
        "bench_run_dry_run": order.dry_run,
        "bench_run_arguments": order.arguments,
        **({"bench_folder": order.folder} if order.folder else {}),
    }
    command = [
        tool("ansible-playbook"), *[word for source in targets.inventory for word in ("--inventory", source)],
        "--limit", f"@{store.hosts_file.resolve()}", "--extra-vars", json.dumps(variables),
        *(["--forks", str(order.forks)] if order.forks else []),
        *order.playbook_arguments, str(CHECKOUT / "playbooks" / "run.yml"),
    ]  # fmt: skip
    environment = ansible_environment(controller) | {"BENCH_EVENTS": str(store.start_file.resolve())}
    try:
        return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
    except FileNotFoundError:
        raise NothingStartedError(
            "ansible-playbook is not installed; `make venv` makes the controller's environment"
        ) from None


def ansible_environment(controller: Controller) -> dict[str, str]:
    """Our environment with what makes Ansible accept new host keys, when asked, and report each host."""
    environment = dict(os.environ)
    environment.setdefault("ANSIBLE_CONFIG", str(CHECKOUT / "ansible.cfg"))
    enabled = [name for name in environment.get("ANSIBLE_CALLBACKS_ENABLED", "").split(",") if name]
    environment["ANSIBLE_CALLBACKS_ENABLED"] = ",".join([*enabled, "bench_events"])
    if controller.accept_new_keys:
        environment["ANSIBLE_SSH_EXTRA_ARGS"] = NEW_KEYS_ARGS
    return environment


def targets_of(store: RunStore) -> tuple[Targets, list[Target], list[NoReport]]:
    """A run's targets as the inventory describes them now, and those that are not in it any more."""
    targets = store.targets()
    try:
        known = {target.name: target for target in read_targets(targets.inventory, "all")}
    except InventoryError as error:
        raise StoreError(f"run {store.run_id} used the inventory {', '.join(targets.inventory)}: {error}") from error
    gone = [
        NoReport(host, "it is not in the inventory any more", unreachable=True)
        for host in targets.hosts
        if host not in known
    ]
    return targets, [known[host] for host in targets.hosts if host in known], gone


def watcher(controller: Controller, store: RunStore) -> Watcher:
    """A live view of a run, attached anew."""
    _, targets, _ = targets_of(store)
    return Watcher(targets, store.starts(), controller.connector())


def collect_run(controller: Controller, store: RunStore, said: Callable[[Collected], None] = lambda _: None) -> None:
    """Fetch what is ready of a run and note why the rest is missing."""
    _, targets, gone = targets_of(store)
    found = collect(store, targets, controller.connector(), said)
    store.write_missing([*gone, *(one.missing for one in found if one.missing is not None)])


def report_run(store: RunStore) -> tuple[FleetReport, list[FleetRate]]:
    """Judge every targeted host and write fleet.json, report.md and the link to the latest run."""
    targets = store.targets()
    digests, without = load(store, targets, store.missing())
    fleet = FleetReport(
        run_id=store.run_id,
        plan=targets.plan,
        started_at=targets.started_at,
        finished_at=utc_now(),
        bench_version=bench.__version__,
        hosts=judge(digests, without),
    )
    results.write_json(store.folder / layout.FLEET_FILE, fleet)
    rates = fleet_rates(digests)
    reader = report_reader(store, targets)
    partial = store.folder / f".{layout.MARKDOWN_FILE}.part"
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in markdown(fleet, rates, reader))
    partial.replace(store.folder / layout.MARKDOWN_FILE)
    store.link_latest()
    return fleet, rates


def report_reader(store: RunStore, targets: Targets) -> Callable[[HostOutcome], HostReport | None]:
    """A function that reads one host's report again when its table is wanted."""

    def read(outcome: HostOutcome) -> HostReport | None:
        if outcome.report is None:
            return None
        return read_report(store.folder / outcome.report, targets, outcome.name)

    return read


def _hosts_to_run(controller: Controller, order: Order) -> tuple[list[str], list[str]]:
    if order.retry is None:
        return absolute(order.inventory), [target.name for target in read_targets(order.inventory, order.pattern)]
    before = open_run(controller.results_folder, None if order.retry == "last" else order.retry)
    path = before.folder / layout.FLEET_FILE
    if not path.is_file():
        raise StoreError(
            f"run {before.run_id} has no verdicts yet; `make collect report RUN={before.run_id}` makes them"
        )
    fleet = results.parse_fleet_report(path.read_bytes(), str(path))
    hosts = [host.name for host in fleet.hosts if host.verdict != "PASS"]
    if not hosts:
        raise StoreError(f"all {len(fleet.hosts)} hosts of run {before.run_id} passed; there is nothing to run again")
    inventory = before.targets().inventory
    known = {target.name for target in read_targets(inventory, "all")}
    left = [host for host in hosts if host in known]
    if not left:
        raise InventoryError(
            f"none of the hosts that did not pass is in the inventory any more: {', '.join(hosts[:10])}"
        )
    return inventory, left


def absolute(inventory: Sequence[str]) -> list[str]:
    """Inventory sources by absolute path, so that a run can be watched from any folder; host lists stay."""
    return [source if "," in source else str(Path(source).resolve()) for source in inventory]
