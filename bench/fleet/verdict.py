"""What a host's report means: PASS, SLOW, FAILED or SKIPPED, and UNREACHABLE where there is none.

Reports are condensed one at a time to a :class:`Digest`, so that a fleet of thousands needs little memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench import stats
from bench.plan import UNWRITTEN
from bench.results import CaseResult, ExitCode, FleetRate, HostOutcome, HostReport
from bench.words import benchmark_words, gib_per_second

# A host is slow when a rate is below the median of alike hosts by more than both of these.
SLOW_SHARE = 0.10
SLOW_SCALED_MADS = 3.5
# With fewer alike hosts than this, this one included, there is no verdict on speed.
ALIKE_HOSTS = 5
# How far a reported rate may be from the one its own samples give: rounding only.
RATE_TOLERANCE = 0.001


@dataclass(frozen=True)
class Digest:
    """What the verdict on one host needs of its report. Rates in bytes per second, by case."""

    host: str
    report: str
    fault: str | None
    skipped: str | None
    alike: tuple[str, ...]
    rates: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class NoReport:
    """A targeted host without a usable report, and why."""

    host: str
    reason: str
    unreachable: bool = False


def digest(report: HostReport, path: str) -> Digest:
    """Condense a valid report; ``path`` is where it lies below the run's folder."""
    rates = {
        case_key(case): case.durable_bytes_per_second
        for case in report.cases
        if case.status == "ok" and case.durable_bytes_per_second is not None and case.writer not in UNWRITTEN
    }
    return Digest(
        host=report.host,
        report=path,
        fault=report_fault(report),
        skipped=_nothing_ran(report.cases),
        alike=alike_key(report),
        rates=rates,
        rows=len(report.cases),
        seconds=(report.finished_at - report.started_at).total_seconds(),
    )


def report_fault(report: HostReport) -> str | None:
    """The reason why a host has failed, or None: an interrupted run, or rows that should have worked and didn't."""
    if report.interrupted:
        return "the run was interrupted before its end"
    faults = [fault for case in report.cases if (fault := row_fault(case)) is not None]
    if not report.cases:
        return "the report has no rows"
    if len(faults) > 1:
        return f"{len(faults)} rows failed; the first: {faults[0]}"
    return faults[0] if faults else None


def row_fault(case: CaseResult) -> str | None:
    """Why a row counts as failed, or None. A skipped row never does; an unverified one always."""
    name = case.name
    if case.status in ("failed", "timeout"):
        return (
            f"{name} {'failed' if case.status == 'failed' else 'ran out of time'}: {case.reason or 'no reason given'}"
        )
    if case.status == "ok" and case.writer not in UNWRITTEN and case.verified is not True:
        return f"{name} was not verified: {case.reason or 'what was read back was not compared'}"
    return None


def nonsense(report: HostReport) -> str | None:
    """What can't be true in a report that has the right form, or None."""
    for case in report.cases:
        name = case.name
        if case.status == "ok" and case.writer not in UNWRITTEN:
            counted = [sample.durable_seconds for sample in case.samples if not sample.warmup]
            if not counted or case.durable_bytes_per_second is None:
                return f"{name} is ok without a measured rate"
            middle = stats.median(counted)
            rate = case.payload_bytes / middle if middle > 0 else 0.0
            if abs(rate - case.durable_bytes_per_second) > RATE_TOLERANCE * case.durable_bytes_per_second:
                return f"{name} claims a rate that its own samples do not give"
        for sample in case.samples:
            if sample.durable_seconds < sample.ack_seconds:
                return f"{name} claims to be durable before it was acknowledged"
    if report.finished_at < report.started_at and not report.interrupted:
        return "it ended before it began"
    return None


def case_key(case: CaseResult) -> str:
    """One name for the same measurement on all hosts: benchmark and writer in words, then all that must be equal."""
    chosen = ",".join(f"{key}={value}" for key, value in sorted(case.options.items()))
    benchmark = benchmark_words(case.workload, case.options, case.payload_bytes).replace("|", "/")
    return f"{benchmark}|{case.mechanism}|{case.payload_bytes}|{chosen}"


def alike_key(report: HostReport) -> tuple[str, ...]:
    """What must be equal before the speed of two hosts is compared: drives, array, filesystem, GPUs, versions."""
    facts = report.facts
    return (
        *sorted(f"{drive.model}/{drive.size_bytes}/{drive.link}" for drive in facts.drives),
        f"{facts.array.level}/{facts.array.chunk_bytes}/{len(facts.array.members)}" if facts.array else "no array",
        facts.filesystem.type,
        facts.cpu,
        *sorted(gpu.name for gpu in facts.gpus),
        *(f"{name}={facts.software.get(name)}" for name in ("torch", "deepspeed", "python")),
    )


def fleet_rates(digests: Iterable[Digest]) -> list[FleetRate]:
    """How fast each writer is over the fleet, in the order in which hosts measured."""
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for one in digests:
        for case, rate in one.rates.items():
            found[case].append((rate, one.host))
    rates = []
    for case, members in found.items():
        benchmark, writer = case.split("|")[:2]
        middle = stats.median([rate for rate, _ in members])
        lowest, host = min(members)
        rates.append(FleetRate(benchmark, writer, len(members), lowest, host, middle, max(members)[0]))
    return rates


def judge(digests: Iterable[Digest], missing: Iterable[NoReport]) -> list[HostOutcome]:
    """One outcome for every host, sorted by name."""
    digests = list(digests)
    slow = slow_hosts(digests)
    outcomes = [_outcome(one, slow.get(one.host)) for one in digests]
    outcomes += [
        HostOutcome(name=one.host, verdict="UNREACHABLE" if one.unreachable else "FAILED", reason=one.reason)
        for one in missing
    ]
    return sorted(outcomes, key=lambda outcome: outcome.name)


def slow_hosts(digests: Sequence[Digest]) -> dict[str, str]:
    """Hosts with a rate that is outside of what alike hosts reach, each with its worst row in words."""
    groups: dict[tuple[tuple[str, ...], str], list[tuple[float, str]]] = defaultdict(list)
    for one in digests:
        for case, rate in one.rates.items():
            groups[one.alike, case].append((rate, one.host))
    worst: dict[str, tuple[float, str]] = {}
    for (_, case), members in groups.items():
        for rate, host in _outliers(members):
            middle = stats.median([other for other, _ in members])
            behind = 1 - rate / middle
            if behind > worst.get(host, (0.0, ""))[0]:
                benchmark, writer = case.split("|")[:2]
                words = (
                    f"{benchmark}: {writer} is {behind:.0%} below the median of {len(members)} alike hosts "
                    f"({gib_per_second(rate)} against {gib_per_second(middle)})"
                )
                worst[host] = (behind, words)
    return {host: words for host, (_, words) in worst.items()}


def exit_code(outcomes: Sequence[HostOutcome]) -> ExitCode:
    """The exit status for a fleet; a failed host outweighs a slow one."""
    verdicts = {outcome.verdict for outcome in outcomes}
    if verdicts == {"PASS"}:
        return ExitCode.ALL_PASS
    if verdicts <= {"PASS", "SLOW"} and verdicts:
        return ExitCode.SOME_SLOW
    return ExitCode.SOME_FAILED


def _outliers(members: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    if len(members) < ALIKE_HOSTS:
        return []
    rates = [rate for rate, _ in members]
    middle = stats.median(rates)
    limit = min(middle * (1 - SLOW_SHARE), middle - SLOW_SCALED_MADS * stats.scaled_mad(rates))
    return [(rate, host) for rate, host in members if rate < limit]


def _nothing_ran(cases: Sequence[CaseResult]) -> str | None:
    """The first reason when every row that writes was skipped."""
    written = [case for case in cases if case.writer not in UNWRITTEN]
    if written and all(case.status == "skipped" for case in written):
        return f"nothing could be run here: {written[0].reason or 'no reason given'}"
    return None


def _outcome(one: Digest, slow: str | None) -> HostOutcome:
    if one.fault is not None:
        return HostOutcome(name=one.host, verdict="FAILED", reason=one.fault, report=one.report)
    if one.skipped is not None:
        return HostOutcome(name=one.host, verdict="SKIPPED", reason=one.skipped, report=one.report)
    if slow is not None:
        return HostOutcome(name=one.host, verdict="SLOW", reason=slow, report=one.report)
    return HostOutcome(name=one.host, verdict="PASS", report=one.report)
