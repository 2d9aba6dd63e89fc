"""From a plan to a report: one process a case, writers interleaved in rounds, every row accounted for."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

import bench
from bench import layout, stats
from bench.host import hook, preflight
from bench.host.array import ArrayError, ArrayFile, check_mount, load_array_file
from bench.host.ceiling import measure_ceiling, with_drift
from bench.host.child import CaseSpec
from bench.host.children import CaseEndedError, CaseProcess
from bench.host.estimate import gpu_memory_bytes, memory_bytes
from bench.host.facts import collect_facts, filesystem_of, gpu_free_bytes
from bench.host.lock import run_lock
from bench.host.progress import RunProgress
from bench.host.remarks import remarks
from bench.plan import GIB, MIB, Case, Plan
from bench.results import RUN_ID_PATTERN, CaseResult, Ceiling, HostReport, Sample, Status, utc_now, write_json

# Leaves room for what else runs on the host.
MEMORY_SHARE = 0.8
# Nothing else runs on the GPU, and the estimate has its context: eight writers of phi3 fit on 141 GB.
GPU_MEMORY_SHARE = 0.9
NOT_REACHED = "not reached"


@dataclass
class RunSettings:
    """Where and how a plan runs on this host.

    ``hook_in_process``: install torch's hook only inside the cases' processes. ``ceiling``: measure the
    folder with fio first.
    """

    plan: Plan
    folder: Path
    root: Path
    run_id: str
    host: str
    hook_in_process: bool = False
    ceiling: bool = True


class InterruptedRunError(BaseException):
    """Ctrl-C or SIGTERM; not an Exception, so that no handler of errors takes it for one."""


@dataclass
class _Row:
    """One case while it is measured."""

    case: Case
    result: CaseResult
    process: CaseProcess | None = None
    sizes: set[int] = field(default_factory=set)
    done: bool = False

    def end(self, status: Status, reason: str) -> None:
        self.result.status, self.result.reason = status, reason
        if status != "ok":
            self.result.durable_bytes_per_second = None
            self.result.verified = None if status == "skipped" else False
        if self.process is not None:
            self.process.kill()
            self.process = None


def run(settings: RunSettings, console: Console) -> HostReport:
    """Run a plan on this host and write status.json and report.json into the run's folder.

    Raises FolderError, ArrayError, HostBusyError or HookError before anything is written into the benchmark
    folder, and InterruptedRunError after cleaning up when the run was interrupted.
    """
    array = load_array_file(settings.root)
    if array is not None and array.holds(settings.folder):
        check_mount(settings.folder, array)
    preflight.check_folder(settings.folder)
    folder = layout.run_folder(settings.root, settings.run_id)
    settings.root.mkdir(parents=True, exist_ok=True)
    with run_lock(layout.lock_file(settings.root), settings.run_id) as died:
        progress = RunProgress(
            folder / layout.STATUS_FILE, folder / layout.LOG_FILE, settings.run_id, settings.host, console
        )
        with progress.shown(), _signals_raise():
            if died is not None:
                _clear_after(died.run_id, settings.folder, progress)
            try:
                return _Run(settings, array, folder, progress).go()
            except InterruptedRunError:
                progress.update(state="interrupted", reason="interrupted by a signal", phase=None)
                raise
            except BaseException as error:
                progress.update(state="failed", reason=str(error) or type(error).__name__, phase=None)
                raise


class _Run:
    def __init__(self, settings: RunSettings, array: ArrayFile | None, folder: Path, progress: RunProgress) -> None:
        self.settings = settings
        self.array = array
        self.plan = settings.plan
        self.folder = folder
        self.progress = progress
        self.seed = self.plan.seed if self.plan.seed is not None else random.SystemRandom().getrandbits(32)
        self.order = random.Random(self.seed)
        self.work = _work_folder(settings.folder, settings.run_id)
        self.spent: dict[str, float] = defaultdict(float)
        self.rows = [
            _Row(case, CaseResult(workload=case.workload, writer=case.writer, tag=case.tag,
                                  options=case.options.model_dump(exclude_defaults=True),
                                  status="failed", reason=NOT_REACHED))
            for case in self.plan.cases()
        ]  # fmt: skip
        self.warnings: list[str] = []
        self.started = time.monotonic()

    def go(self) -> HostReport:
        report = self._new_report()
        self.progress.update(state="running", cases_total=len(self.rows))
        try:
            self.work.mkdir()
            self._look_for_others()
            self._measure_all(report)
            self._check_mount(report.facts.filesystem.source)
        except InterruptedRunError:
            report.interrupted = True
            for row in self.rows:
                if row.result.reason == NOT_REACHED or row.process is not None:
                    row.end("failed", "the run was interrupted")
            raise
        finally:
            self._close(report)
        self.progress.update(state="finished", progress=1.0, case=None, phase=None, repetition=None)
        return report

    def _new_report(self) -> HostReport:
        now = utc_now()
        plan = self.plan.model_copy(update={"seed": self.seed})
        write_json(self.folder / layout.PLAN_FILE, plan)
        facts = collect_facts(self.settings.folder)
        if self.array is not None and self.array.holds(self.settings.folder):
            facts.array = self.array.facts()
        elif self.array is not None:
            self._warn(f"{self.settings.folder} is not on the array {self.array.name} ({self.array.mount_point})")
        self.gpu_count = len(facts.gpus)
        return HostReport(
            run_id=self.settings.run_id,
            host=self.settings.host,
            started_at=now,
            finished_at=now,
            bench_version=bench.__version__,
            plan=plan.model_dump(mode="json", exclude_defaults=True),
            facts=facts,
            patch=hook.patch_state(),
            cases=[],
        )

    def _measure_all(self, report: HostReport) -> None:
        if self.settings.ceiling:
            report.ceiling = self._ceiling()
            if report.ceiling.reason:
                self._warn(f"ceiling not measured: {report.ceiling.reason}")
        for group in self._groups():
            self._measure(group)
        if report.ceiling is not None and not report.ceiling.reason:
            report.ceiling, drifted = with_drift(report.ceiling, self._ceiling())
            if drifted:
                self._warn(drifted)
            self._share_of_ceiling(report.ceiling)

    def _close(self, report: HostReport) -> None:
        """End what still runs, remove what was written, and write the report, however the run ended."""
        for row in self.rows:
            if row.process is not None:
                row.process.kill()
        shutil.rmtree(self.work, ignore_errors=True)
        report.cases = [row.result for row in self.rows]
        report.warnings = self.warnings
        report.finished_at = utc_now()
        self.spent["rest"] = max(0.0, time.monotonic() - self.started - sum(self.spent.values()))
        report.time_spent = dict(self.spent)
        write_json(self.folder / layout.REPORT_FILE, report)

    def _groups(self) -> Iterator[list[_Row]]:
        """Rows that are measured in turns: those of one benchmark, or one by one when that can't be."""
        rows = iter(self.rows)
        for benchmark in self.plan.benchmarks:
            group = [next(rows) for _ in benchmark.writers]
            short = self._short_of_memory([row.case for row in group])
            if short is not None:
                self._warn(
                    f"{benchmark.workload}: {short} would be needed to take the writers in "
                    "turns; they were measured one after the other instead"
                )
            elif self.plan.sustained_seconds is None:
                yield group
                continue
            yield from ([row] for row in group)

    def _short_of_memory(self, cases: Sequence[Case]) -> str | None:
        """What is missing, in words, when all the cases' processes are to hold their data at once."""
        need = sum(memory_bytes(case) for case in cases)
        if need > MEMORY_SHARE * preflight.memory_available():
            return f"{need / GIB:.1f} GiB of memory"
        on_gpu = sum(gpu_memory_bytes(case) for case in cases)
        free = gpu_free_bytes() if on_gpu else []
        devices = {case.options.device for case in cases}
        if any(on_gpu > GPU_MEMORY_SHARE * free[device] for device in devices if device < len(free)):
            return f"{on_gpu / GIB:.1f} GiB of GPU memory"
        return None

    def _measure(self, group: list[_Row]) -> None:
        host = preflight.look_at_host(self.work, self.gpu_count)
        running = []
        for row in group:
            refusal = preflight.check_case(row.case, host)
            if refusal is None:
                running.append(row)
            else:
                row.end(refusal.status, refusal.reason)
        self._each(running, self._start)
        self._each(running, self._await_prepared)
        while turn := [row for row in running if row.process is not None and not row.done]:
            self.order.shuffle(turn)
            self._each(turn, self._sample)
        for row in group:
            self._finish(row)

    def _each(self, rows: Sequence[_Row], act: Callable[[_Row], None]) -> None:
        for row in rows:
            self._guard(row, lambda row=row: act(row))  # type: ignore[misc]

    def _guard(self, row: _Row, act: Callable[[], None]) -> None:
        """A case that ends costs its own row and no other."""
        try:
            act()
        except CaseEndedError as error:
            row.end(error.status, error.reason)

    def _start(self, row: _Row) -> None:
        case = row.case
        number = self.rows.index(row)
        name = f"{number:02d}-{case.workload}-{case.writer}"
        place = self.work / name
        place.mkdir()
        row.process = CaseProcess(
            CaseSpec(case=case, seed=self.seed, folder=place, root=self.settings.root,
                     hook_in_process=self.settings.hook_in_process),
            self.folder / layout.CASES_FOLDER / f"{name}.log",
        )  # fmt: skip
        row.process.command("prepare")

    def _await_prepared(self, row: _Row) -> None:
        if row.process is None:
            return
        self.progress.update(case=_name(row.case), phase="setup", repetition=None)
        with self._timed("setup"):
            event = self._event(row, "prepared")
        row.result.payload_bytes = event["payload_bytes"]
        row.result.setup_seconds = sum(event["seconds"].values())

    def _sample(self, row: _Row) -> None:
        assert row.process is not None
        number = len(row.result.samples)
        warmup = number < self.plan.warmup
        self.progress.update(
            case=_name(row.case),
            phase="warmup" if warmup else "save",
            repetition=max(0, number - self.plan.warmup) + 1,
            repetitions=self.plan.repetitions,
        )
        last = self._is_last(row)
        with self._timed("settle"):
            row.process.command("sample", check=last)
            self._event(row, "phase")
        at = time.monotonic() - self.started
        with self._timed("saves"):
            event = self._event(row, "sampled")
        sample = Sample(
            ack_seconds=event["ack_seconds"],
            durable_seconds=event["durable_seconds"],
            warmup=warmup,
            settle_seconds=event["settle_seconds"],
            at_seconds=at,
        )
        row.result.samples.append(sample)
        row.result.file_bytes = event["file_bytes"]
        row.result.statistics = event["statistics"]
        row.sizes.add(event["file_bytes"])
        fault = size_fault(row.case.workload, row.sizes)
        if fault is not None:
            raise CaseEndedError("failed", fault)
        self.progress.update(
            progress=self._share_done(),
            last_bytes_per_second=(row.result.payload_bytes / sample.durable_seconds) or None,
        )
        if last:
            self._check(row)
            row.done = True

    def _is_last(self, row: _Row) -> bool:
        """Whether the sample that comes next is the case's last one, which is verified before it is removed."""
        samples = row.result.samples
        if self.plan.sustained_seconds is not None:
            return bool(samples) and (
                time.monotonic() - self.started - samples[0].at_seconds >= self.plan.sustained_seconds
            )
        count = len(samples) + 1
        if self.plan.until_stable and count < self.plan.warmup + self.plan.max_repetitions:
            counted = [sample.durable_seconds for sample in samples if not sample.warmup]
            return count >= self.plan.warmup + self.plan.repetitions and stats.settled(counted)
        return count >= self.plan.warmup + self.plan.repetitions

    def _share_done(self) -> float:
        planned = self.plan.warmup + self.plan.repetitions
        parts = [
            1.0 if row.done or row.result.reason not in (NOT_REACHED, None)
            else min(0.95, len(row.result.samples) / planned)
            for row in self.rows
        ]  # fmt: skip
        return sum(parts) / len(parts)

    def _check(self, row: _Row) -> None:
        with self._timed("verify"):
            while (event := self._event(row, "phase", "checked"))["event"] == "phase":
                self.progress.update(phase=event["phase"])
        row.result.verified = event["verified"]
        row.result.resumable = event["resumable"]
        row.result.resume_reason = event["resume_reason"]
        row.result.sha256 = event["sha256"]
        row.result.status, row.result.reason = "ok", None

    def _finish(self, row: _Row) -> None:
        if row.process is not None:
            row.process.stop()
            row.process = None
        result = row.result
        if result.status == "ok":
            self._summarise(result)
            result.warnings += remarks(row.case, result.statistics)
            if result.mechanism != result.writer:
                result.tag = result.tag.replace("gds", "gds_compat")
            self.progress.say(
                log_line(result.tag, result.payload_bytes, result.payload_bytes / result.durable_bytes_per_second)
                if result.durable_bytes_per_second
                else f"{result.tag} -- no bytes to save"
            )
            for warning in result.warnings:
                self.progress.say(f"  warning: {warning}")
            if row.case.options.statistics and result.statistics:
                self.progress.say(f"  stats = {result.statistics}")
        else:
            self.progress.say(f"{row.case.tag} -- {result.status}: {result.reason}")
        done = [row for row in self.rows if row.done or row.result.reason != NOT_REACHED]
        self.progress.update(
            progress=self._share_done(),
            cases_done=len(done),
            cases_failed=sum(row.result.status in ("failed", "timeout") for row in done),
        )

    def _summarise(self, result: CaseResult) -> None:
        if self.plan.sustained_seconds is not None:
            # What the drive takes once its cache is full: the second half of the time.
            half = result.samples[0].at_seconds + self.plan.sustained_seconds / 2
            for sample in result.samples[:-1]:
                sample.warmup = sample.at_seconds < half
        counted = [sample.durable_seconds for sample in result.samples if not sample.warmup]
        result.durable_bytes_per_second = result.payload_bytes / stats.median(counted) or None
        result.spread = stats.spread(counted)
        result.unstable = result.spread > stats.UNSTABLE_SPREAD
        if self.plan.until_stable and not stats.settled(counted):
            result.warnings.append(
                f"the last {stats.STABLE_SAMPLES} of {len(counted)} samples still differ by more than "
                f"{stats.STABLE_SPREAD:.0%}"
            )

    def _share_of_ceiling(self, ceiling: Ceiling) -> None:
        for row in self.rows:
            result = row.result
            if ceiling.write_bytes_per_second and result.durable_bytes_per_second and result.verified:
                result.ceiling_share = result.durable_bytes_per_second / ceiling.write_bytes_per_second
                if result.ceiling_share > 1:
                    result.warnings.append(
                        "faster than fio on the same folder: a cache took part, or the ceiling was disturbed"
                    )

    def _event(self, row: _Row, *wanted: str) -> dict[str, Any]:
        assert row.process is not None
        event = row.process.event(self.plan.case_timeout_seconds)
        if event["event"] not in wanted:
            raise CaseEndedError("failed", f"the case's process said {event['event']!r} out of turn; see its log")
        return event

    def _ceiling(self) -> Ceiling:
        self.progress.update(case="ceiling", phase="fio", repetition=None)
        with self._timed("ceiling"):
            free = filesystem_of(self.work).free_bytes
            return measure_ceiling(self.work, free, preflight.takes_direct_io(self.work))

    def _look_for_others(self) -> None:
        activity = preflight.drive_activity(self.work)
        if activity is not None and activity > preflight.BUSY_BYTES_PER_SECOND:
            self._warn(
                f"others move {activity / MIB:.0f} MiB/s on the drive below {self.settings.folder}; "
                "what is measured beside that is not the drive's own rate"
            )

    def _warn(self, words: str) -> None:
        self.warnings.append(words)
        self.progress.say(f"warning: {words}")

    def _check_mount(self, source: str) -> None:
        """A mount that went away meanwhile leaves its folder on the disk below: then no row is true."""
        reason = None
        now = filesystem_of(self.settings.folder).source
        if now != source:
            reason = f"the folder moved from {source} to {now} during the run: another mount"
        elif self.array is not None and self.array.holds(self.settings.folder):
            try:
                check_mount(self.settings.folder, self.array)
            except ArrayError as error:
                reason = str(error)
        if reason:
            for row in self.rows:
                row.end("failed", reason)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.spent[what] += time.monotonic() - start


def _work_folder(folder: Path, run_id: str) -> Path:
    """The run's own folder for checkpoints, removed when it ends."""
    return folder / f"fastpersist-bench-{run_id}"


def _clear_after(run_id: str, folder: Path, progress: RunProgress) -> None:
    """Remove the checkpoints of a run that was killed here; the lock says that it lives no more."""
    left = _work_folder(folder, run_id)
    # The lock file is only a file: nothing but a run's own folder is ever removed.
    if RUN_ID_PATTERN.match(run_id) and left.is_dir() and not left.is_symlink():
        shutil.rmtree(left, ignore_errors=True)
        progress.say(f"removed {left}, which run {run_id} left behind when it was killed")


def size_fault(workload: str, sizes: Collection[int]) -> str | None:
    """What is wrong when saves of the same data gave files of these sizes, or None.

    An engine gathers its state anew for every save, and the legacy format names storages by their address: a
    digit more or less there is no fault. Each file's own size was compared with its writer's promise before.
    """
    if len(sizes) < 2 or workload == "engine":
        return None
    return f"the same data gave files of different sizes: {sorted(sizes)} bytes"


def log_line(tag: str, payload_bytes: int, seconds: float) -> str:
    """One measured case in upstream's format; its GB is 1024^3 bytes, and seconds are until durable."""
    size = payload_bytes / GIB
    return f"{tag} -- {size:5.2f} GB, {seconds:5.2f} secs, {size / seconds:5.2f} GB/s"


def _name(case: Case) -> str:
    return f"{case.workload} {case.writer}"


@contextmanager
def _signals_raise() -> Iterator[None]:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        # Once: a second Ctrl-C must not break the cleaning up.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise InterruptedRunError

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
