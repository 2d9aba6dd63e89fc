"""The controller's commands. Each opens a run, calls one function of this package and prints."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from bench import layout
from bench.fleet import audit as auditing
from bench.fleet.audit import Controller, NothingStartedError, Order
from bench.fleet.cancel import cancel as cancel_run
from bench.fleet.collect import Collected
from bench.fleet.inventory import read_targets
from bench.fleet.store import RunStore, open_run
from bench.fleet.verdict import exit_code
from bench.fleet.watch import PATIENCE_SECONDS, screen
from bench.fleet.watch import watch as watch_run
from bench.report.text import fleet_lines
from bench.results import ExitCode

EXIT_CODES = (
    "Exit status: 0 every host passed, 1 could not run, 2 wrong usage, 3 some hosts slow, "
    "4 some hosts failed, were unreachable or could run nothing, 130 interrupted (the runs go on)."
)

app = typer.Typer(add_completion=False)

Results = Annotated[Path, typer.Option("--results", envvar="BENCH_RESULTS", help="The results folder.")]
KnownHostsFile = Annotated[
    Path,
    typer.Option("--known-hosts", envvar="BENCH_KNOWN_HOSTS", help="The project's own known_hosts file."),
]
AcceptNewKeys = Annotated[
    bool,
    typer.Option(
        "--accept-new-keys",
        envvar="ACCEPT_NEW_KEYS",
        help="Accept hosts' keys that are not known yet; a changed key never.",
    ),
]
Run = Annotated[str | None, typer.Option("--run", help="The run; the latest one when left out.")]
Inventory = Annotated[list[str], typer.Option("--inventory", "-i", help="Inventory, as Ansible takes it.")]
Hosts = Annotated[str, typer.Option("--hosts", help="Hosts, a group, or any pattern of Ansible's.")]
Patience = Annotated[float, typer.Option("--patience", min=0, help="Seconds to wait for a host that was lost.")]
RESULTS = Path("results")
KNOWN_HOSTS = Path("known_hosts")


@app.command(rich_help_panel="Fleet")
def hosts(inventory: Inventory = ["inventory"], pattern: Hosts = "localhost") -> None:  # noqa: B006
    """List the hosts that a pattern names, and how they are reached."""
    for target in read_targets(inventory, pattern):
        how = (
            "this machine"
            if target.local
            else " ".join(["ssh", *[word for word in target.ssh_words() if word != "--"]])
        )
        typer.echo(f"{target.name}\t{how}")


@app.command(rich_help_panel="Fleet", epilog=EXIT_CODES)
def audit(
    plan: Annotated[str, typer.Argument(help="A shipped plan or the path of a .yml file.")] = "quick",
    inventory: Inventory = ["inventory"],  # noqa: B006
    pattern: Hosts = "localhost",
    retry: Annotated[
        str | None,
        typer.Option("--retry", help="Only the hosts of this run that did not pass: `last`, or a run."),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option("--folder", help="Where hosts write checkpoints, instead of their bench_folder."),
    ] = None,
    forks: Annotated[int | None, typer.Option("--forks", min=1, help="Hosts at a time while starting.")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Save from the GPU.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what each host would measure and write.")
    ] = False,
    bench_arguments: Annotated[
        str, typer.Option("--bench-arguments", help="More arguments for `bench run` on the hosts.")
    ] = "",
    ansible_arguments: Annotated[
        str, typer.Option("--ansible-arguments", help="More arguments for ansible-playbook.")
    ] = "",
    patience: Patience = PATIENCE_SECONDS,
    results: Results = RESULTS,
    known_hosts: KnownHostsFile = KNOWN_HOSTS,
    accept_new_keys: AcceptNewKeys = False,
) -> None:
    """Run a plan on a fleet: start it everywhere, watch, collect, judge, report."""
    controller = Controller(results, known_hosts, accept_new_keys)
    order = Order(
        plan=plan, inventory=inventory, pattern=pattern, retry=retry, folder=folder, forks=forks, gpu=gpu,
        dry_run=dry_run, arguments=shlex.split(bench_arguments), playbook_arguments=shlex.split(ansible_arguments),
    )  # fmt: skip
    store, targets = auditing.new_run(controller, order)
    if dry_run:
        status = auditing.dry_run(controller, order, store, targets)
        raise typer.Exit(ExitCode.COULD_NOT_RUN if status else ExitCode.ALL_PASS)
    typer.echo(
        f"run {store.run_id}: plan {targets.plan} on {len(targets.hosts)} host{'s' if len(targets.hosts) != 1 else ''}"
    )
    try:
        with _detachable(store):
            started = auditing.start(controller, order, store, targets)
    except NothingStartedError as error:
        typer.echo(f"bench: {error}", err=True)
        raise typer.Exit(ExitCode.COULD_NOT_RUN) from None
    _watch(controller, store, patience)
    _collect(controller, store)
    verdict = _report(store)
    raise typer.Exit(verdict if started else ExitCode.COULD_NOT_RUN)


@app.command(rich_help_panel="Fleet")
def status(run: Run = None, results: Results = RESULTS, known_hosts: KnownHostsFile = KNOWN_HOSTS) -> None:
    """Say once what every host of a run is doing."""
    store = open_run(results, run)
    watcher = auditing.watcher(Controller(results, known_hosts), store)
    try:
        watcher.poll(seconds=60)
        for line in screen(list(watcher.views.values()), 200 if not sys.stdout.isatty() else _width(), 10**6):
            typer.echo(line)
    finally:
        watcher.close()


@app.command(rich_help_panel="Fleet")
def watch(
    run: Run = None,
    patience: Patience = PATIENCE_SECONDS,
    results: Results = RESULTS,
    known_hosts: KnownHostsFile = KNOWN_HOSTS,
    accept_new_keys: AcceptNewKeys = False,
) -> None:
    """Attach to a run and show it until it has ended everywhere."""
    _watch(Controller(results, known_hosts, accept_new_keys), open_run(results, run), patience)


@app.command(rich_help_panel="Fleet")
def collect(
    run: Run = None,
    results: Results = RESULTS,
    known_hosts: KnownHostsFile = KNOWN_HOSTS,
    accept_new_keys: AcceptNewKeys = False,
) -> None:
    """Fetch the reports and logs that are ready."""
    _collect(Controller(results, known_hosts, accept_new_keys), open_run(results, run))


@app.command(rich_help_panel="Fleet", epilog=EXIT_CODES)
def report(run: Run = None, results: Results = RESULTS) -> None:
    """Judge every targeted host of a run, write the pages and print the verdicts."""
    raise typer.Exit(_report(open_run(results, run)))


@app.command(rich_help_panel="Fleet")
def cancel(
    run: Run = None,
    results: Results = RESULTS,
    known_hosts: KnownHostsFile = KNOWN_HOSTS,
    accept_new_keys: AcceptNewKeys = False,
) -> None:
    """Stop a run on all of its hosts; each removes its half files."""
    store = open_run(results, run)
    _, targets, gone = auditing.targets_of(store)
    told = cancel_run(store, targets, Controller(results, known_hosts, accept_new_keys).connector())
    told |= {one.host: (False, f"NOT stopped: {one.reason}") for one in gone}
    for host, (_, words) in sorted(told.items()):
        typer.echo(f"{host}: {words}")
    if not all(stopped for stopped, _ in told.values()):
        raise typer.Exit(ExitCode.SOME_FAILED)


def _watch(controller: Controller, store: RunStore, patience: float) -> None:
    with _detachable(store):
        watch_run(auditing.watcher(controller, store), patience)


def _collect(controller: Controller, store: RunStore) -> None:
    with _detachable(store):
        auditing.collect_run(controller, store, _say_missing)


def _report(store: RunStore) -> ExitCode:
    fleet, rates = auditing.report_run(store)
    reader = auditing.report_reader(store, store.targets())
    page = (store.folder / layout.MARKDOWN_FILE).resolve()
    where = str(page.relative_to(Path.cwd()) if page.is_relative_to(Path.cwd()) else page)
    for line in fleet_lines(fleet, rates, reader, _width(), where):
        typer.echo(line)
    return exit_code(fleet.hosts)


def _say_missing(found: Collected) -> None:
    if found.missing is not None:
        typer.echo(f"{found.host}: no report: {found.missing.reason}", err=True)


@contextmanager
def _detachable(store: RunStore) -> Iterator[None]:
    """Ctrl-C leaves the view, never the run."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            f"\ndetached; run {store.run_id} goes on. `make watch` attaches again, `make collect report` ends it, "
            "`make cancel` stops it",
            err=True,
        )
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _width() -> int:
    """Columns of the terminal; a pipe gets the full table."""
    return os.get_terminal_size().columns if sys.stdout.isatty() else 140
