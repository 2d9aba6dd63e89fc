"""What ``bench run`` and the four benchmarks do around a run: defaults, dry run, table, exit code."""

from __future__ import annotations

import platform
from pathlib import Path

from rich.console import Console

from bench import layout
from bench.host import preflight
from bench.host.array import load_array_file, require_array
from bench.host.estimate import payload_bytes
from bench.host.facts import gpus
from bench.host.run import InterruptedRunError, RunSettings, run
from bench.plan import GIB, UNWRITTEN, Plan, PlanError
from bench.results import RUN_ID_PATTERN, ExitCode, HostReport, new_run_id
from bench.words import benchmark_words


def run_plan(
    plan: Plan,
    folder: Path | None,
    root: Path | None,
    run_id: str | None,
    host: str | None,
    no_patch: bool,
    ceiling: bool,
    dry_run: bool,
    on_array: bool = False,
) -> int:
    """Run a plan on this host and print its table; returns the exit code.

    0: every row that can run here is ok; 4: one is not, or none could run; 130: interrupted. Raises a ValueError
    subclass with a clear message when it could not start. ``on_array``: drives were chosen for this host,
    so a folder that is not on the array they make is refused.
    """
    console = Console(highlight=False)
    if run_id is not None and not RUN_ID_PATTERN.match(run_id):
        raise PlanError(f"run id {run_id!r} is not of the form 20261129T174442Z-3f9c; leave it out for a new one")
    root = root or layout.default_runtime_root()
    chosen_folder = _folder(folder, root, make=not dry_run and not on_array)
    if on_array:
        require_array(root, chosen_folder)
    if dry_run:
        return _print_dry_run(plan, chosen_folder, console)
    settings = RunSettings(
        plan=plan,
        folder=chosen_folder,
        root=root,
        run_id=run_id or new_run_id(),
        host=host or platform.node(),
        hook_in_process=no_patch,
        ceiling=ceiling,
    )
    try:
        report = run(settings, console)
    except InterruptedRunError:
        console.print("interrupted: nothing half-written was left, the rows so far are in the report")
        return ExitCode.INTERRUPTED
    from bench.report.text import host_lines

    where = layout.run_folder(settings.root, settings.run_id) / layout.REPORT_FILE
    told = _trouble(report)
    for line in ["", *host_lines(report, console.width), *([told] if told else []), f"report: {where}"]:
        console.print(line, markup=False, soft_wrap=True)
    return ExitCode.SOME_FAILED if told else ExitCode.ALL_PASS


def _trouble(report: HostReport) -> str | None:
    """Why a run is no success, in one line: rows that failed, or nothing that could be run; None where all is well."""
    faulty = [case for case in report.cases if case.status not in ("ok", "skipped")]
    if faulty:
        return f"FAILED: {len(faulty)} of {len(report.cases)} rows; the first: {faulty[0].name}: {faulty[0].reason}"
    if not any(case.status == "ok" for case in report.cases):
        return f"SKIPPED: nothing could be run here; the first reason: {report.cases[0].reason}"
    return None


def _folder(folder: Path | None, root: Path, make: bool) -> Path:
    """The folder that was named, else the mount of this host's array, else the default one, made when missing."""
    if folder is not None:
        return folder.absolute()
    array = load_array_file(root)
    if array is not None:
        return Path(array.mount_point)
    default = layout.default_bench_folder()
    if make:
        default.mkdir(parents=True, exist_ok=True)
    return default


def _print_dry_run(plan: Plan, folder: Path, console: Console) -> int:
    samples = plan.warmup + plan.repetitions
    there = folder
    while not there.exists():
        there = there.parent
    host = preflight.look_at_host(there, len(gpus()))
    total = 0
    problems = 0
    console.print(
        f"plan {plan.name}: {plan.warmup} warm-up and {plan.repetitions} counted saves a case, into {folder}",
        soft_wrap=True,
    )
    benchmark = None
    for case in plan.cases():
        refusal = preflight.check_case(case, host)
        size = payload_bytes(case)
        name = benchmark_words(case.workload, case.options.model_dump(exclude_defaults=True), size or 0)
        if name != benchmark:
            benchmark = name
            console.print(name, soft_wrap=True, markup=False)
        if refusal is not None:
            problems += refusal.status == "failed"
            what = f"{refusal.status}: {refusal.reason}"
        elif size is None:
            what = f"{samples} x the size of {case.options.pretrained}"
        else:
            written = 0 if case.writer in UNWRITTEN else size * samples
            total += written
            what = f"{samples} x {size / GIB:.3f} GiB" if written else "writes nothing"
        console.print(f"  {case.writer:<17} {what}", soft_wrap=True, markup=False)
    need = preflight.space_needed(plan.cases())
    console.print(
        f"writes {total / GIB:.2f} GiB in all, at most {need / GIB:.2f} GiB at a time; "
        + (f"{host.free_bytes / GIB:.2f} GiB are free" if host.free_bytes is not None else "free space not known"),
        soft_wrap=True,
    )
    return ExitCode.SOME_FAILED if problems else ExitCode.ALL_PASS
