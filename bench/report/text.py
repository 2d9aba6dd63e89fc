"""What a person sees in the terminal at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from bench import stats
from bench.plan import UNWRITTEN
from bench.results import CaseResult, FleetRate, FleetReport, HostOutcome, HostReport
from bench.words import benchmark_words, duration, gib_per_second, plain

# Hosts whose whole tables are printed; of a larger fleet only those that did not pass, up to as many.
FULL_TABLES = 4
# Lines about hosts that did not pass, before the rest is only counted.
MAX_LINES = 50
VERDICT_ORDER = ("FAILED", "UNREACHABLE", "SLOW", "SKIPPED", "PASS")


@dataclass(frozen=True)
class Row:
    """One line of a host's table, in words. ``note`` replaces the figures of a row that has none.

    ``benchmark``: what this row and its neighbours saved. ``seconds``: how many counted saves, their
    shortest and longest durable time, and their scaled MAD.
    """

    benchmark: str
    writer: str
    tag: str
    rate: str = "-"
    ratio: str = "-"
    share: str = "-"
    spread: str = "-"
    seconds: str = "-"
    verified: str = "-"
    resumes: str = "-"
    status: str = "ok"
    note: str | None = None
    remark: str | None = None


Column = tuple[str, Callable[[Row], str]]
_NAME: Column = ("writer", lambda row: f"  {row.writer}")
_RATE: Column = ("durable", lambda row: row.rate)
_VERIFIED: Column = ("verified", lambda row: row.verified)
_RESUMES: Column = ("resumes", lambda row: row.resumes)
_STATUS: Column = ("status", lambda row: row.status)
# From the richest to the narrowest.
FORMS: tuple[tuple[Column, ...], ...] = (
    (
        _NAME, _RATE, ("vs torch_save", lambda row: row.ratio), ("of ceiling", lambda row: row.share),
        ("spread", lambda row: row.spread), _VERIFIED, _RESUMES, _STATUS,
    ),
    (
        _NAME, _RATE, ("vs", lambda row: row.ratio), ("ceiling", lambda row: row.share),
        ("spread", lambda row: row.spread), _VERIFIED, _RESUMES, _STATUS,
    ),
    (_NAME, _RATE, ("vs", lambda row: row.ratio), _VERIFIED, _STATUS),
    (_NAME, _RATE),
)  # fmt: skip


def rows(report: HostReport) -> list[Row]:
    """A host's table; torch_save in the legacy format, of the same data, is what the others are compared with."""
    base: dict[str, float] = {}
    for case in sorted(report.cases, key=lambda case: not case.options.get("zipfile")):
        if case.writer == "torch_save" and case.durable_bytes_per_second:
            base[_data(case)] = case.durable_bytes_per_second
    table = []
    for _, members in groupby(report.cases, lambda case: (case.workload, case.options)):
        cases = list(members)
        largest = max(case.payload_bytes for case in cases)
        name = benchmark_words(cases[0].workload, cases[0].options, largest)
        table += [_row(case, name, base.get(_data(case))) for case in cases]
    return table


def host_lines(report: HostReport, width: int) -> list[str]:
    """The table of one host: the richest form whose lines have at most ``width`` characters."""
    table = rows(report)
    forms = [_form(table, columns) for columns in FORMS]
    chosen = next((form for form in forms if max(map(len, form)) <= width), forms[-1])
    lines: list[tuple[str, str]] = []
    for row, line in zip(table, chosen[1:], strict=True):
        lines.append((row.benchmark, line if row.note is None else f"{line}  {row.status}: {row.note}"))
        if row.remark:
            lines.append((row.benchmark, f"      {row.remark}"))
    return [*header_lines(report), chosen[0], *_below_headings(lines)]


def _below_headings(lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Lines, each group of one benchmark below its name."""
    for benchmark, group in groupby(lines, lambda pair: pair[0]):
        yield benchmark
        yield from (line for _, line in group)


def _form(table: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """Title line and one line a row; of a row without figures only its name, the note comes behind."""
    widths = [max(len(title), *(len(cell(row)) for row in table), 1) for title, cell in columns]
    lines = [_join([title for title, _ in columns], widths)]
    for row in table:
        cells = [cell(row) for _, cell in columns]
        lines.append(_join(cells, widths) if row.note is None else _join(cells[:1], widths[:1]))
    return lines


def header_lines(report: HostReport) -> list[str]:
    """What machine and software this was, in one line or two."""
    facts = report.facts
    software = facts.software
    words = [plain(report.host, 60), _drives(report), plain(facts.filesystem.type, 20)]
    if facts.gpus:
        words.append(f"{len(facts.gpus)} x {plain(facts.gpus[0].name, 40)}")
    words.append(f"torch {plain(software.get('torch') or report.patch.torch_version, 30)} {report.patch.state}")
    if software.get("deepspeed"):
        words.append(f"DeepSpeed {plain(software['deepspeed'], 30)}")
    if report.ceiling and report.ceiling.write_bytes_per_second:
        words.append(f"ceiling {gib_per_second(report.ceiling.write_bytes_per_second)}")
    elif report.ceiling and report.ceiling.reason:
        words.append(f"no ceiling: {plain(report.ceiling.reason, 120)}")
    first = "   ".join(word for word in words if word)
    return [first, *(f"    {plain(warning)}" for warning in report.warnings)]


def final_line(outcome: HostOutcome, report: HostReport | None, where: str) -> str:
    """The verdict on one host with where its time went."""
    reason = f": {plain(outcome.reason)}" if outcome.reason else ""
    if report is None:
        return f"{outcome.verdict}{reason}   {where}"
    total = (report.finished_at - report.started_at).total_seconds()
    parts = ", ".join(f"{plain(name, 20)} {duration(seconds)}" for name, seconds in time_spent(report, total))
    return f"{outcome.verdict} in {duration(total)}{f' ({parts})' if parts else ''}{reason}   {where}"


def time_spent(report: HostReport, total: float) -> list[tuple[str, float]]:
    """Where a host's time went, longest first; what is not accounted for is ``rest``."""
    spent = sorted(report.time_spent.items(), key=lambda item: -item[1])[:8]
    rest = total - sum(report.time_spent.values())
    return [*spent, ("rest", rest)] if spent and rest >= 1 else spent


def fleet_lines(
    fleet: FleetReport,
    rates: Sequence[FleetRate],
    report_of: Callable[[HostOutcome], HostReport | None],
    width: int,
    where: str,
) -> list[str]:
    """All that is printed at the end: tables, one line for each host that did not pass, and the verdict."""
    if len(fleet.hosts) == 1:
        outcome = fleet.hosts[0]
        report = report_of(outcome)
        return [
            *(host_lines(report, width) if report else [outcome.name]),
            final_line(outcome, report, where),
        ]
    ordered = worst_first(fleet.hosts)
    lines: list[str] = []
    detailed = (
        ordered if len(ordered) <= FULL_TABLES else [one for one in ordered if one.verdict != "PASS"][:FULL_TABLES]
    )
    for outcome in detailed:
        report = report_of(outcome)
        if report is not None:
            lines += [*host_lines(report, width), ""]
    if rates:
        lines += [*rate_lines(rates), ""]
    telling = ordered if len(ordered) <= MAX_LINES else [one for one in ordered if one.verdict != "PASS"][:MAX_LINES]
    names = max((len(plain(one.name, 60)) for one in telling), default=4)
    for outcome in telling:
        lines.append(
            f"{plain(outcome.name, 60):<{names}}  {outcome.verdict:<11}  {plain(outcome.reason or '')}".rstrip()
        )
    untold = len(ordered) - len(telling)
    if untold:
        lines.append(f"and {untold} more")
    return [*lines, f"{fleet_verdict(fleet.hosts)}   {where}"]


def rate_lines(rates: Sequence[FleetRate]) -> list[str]:
    """How fast each writer is over the fleet, durably, and who is last."""
    cells = [("writer", "hosts", "median", "highest", "lowest", "")]
    cells += [
        (
            f"  {plain(rate.writer, 20)}",
            str(rate.hosts),
            gib_per_second(rate.median),
            gib_per_second(rate.highest),
            gib_per_second(rate.lowest),
            f"on {plain(rate.lowest_host, 40)}",
        )
        for rate in rates
    ]
    widths = [max(len(row[place]) for row in cells) for place in range(5)]
    title, *lines = [f"{_join(row[:5], widths)}  {row[5]}".rstrip() for row in cells]
    names = [plain(rate.benchmark) for rate in rates]
    return [title, *_below_headings(zip(names, lines, strict=True))]


def fleet_verdict(hosts: Sequence[HostOutcome]) -> str:
    """The fleet in one line: PASS only when every host passed."""
    counts = {verdict: sum(host.verdict == verdict for host in hosts) for verdict in VERDICT_ORDER}
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    if counts["PASS"] == len(hosts):
        return f"PASS: all {len(hosts)} hosts"
    worst = "FAILED" if counts["FAILED"] or counts["UNREACHABLE"] or counts["SKIPPED"] else "SLOW"
    return f"{worst}: {words} of {len(hosts)} hosts"


def worst_first(hosts: Iterable[HostOutcome]) -> list[HostOutcome]:
    """Hosts in the order in which somebody should look at them."""
    return sorted(hosts, key=lambda host: (VERDICT_ORDER.index(host.verdict), host.name))


def _row(case: CaseResult, benchmark: str, base: float | None) -> Row:
    rate = case.durable_bytes_per_second
    row = Row(
        benchmark=benchmark,
        writer=plain(case.mechanism, 20),
        tag=plain(case.tag, 30),
        status=case.status,
    )
    if case.status != "ok":
        return _with(row, note=plain(case.reason or "no reason given"))
    if case.writer in UNWRITTEN:
        words = (
            f"{gib_per_second(rate)}, nothing is written: the ceiling of serialization"
            if rate
            else "nothing is written"
        )
        return _with(row, note=words)
    return _with(
        row,
        rate=gib_per_second(rate) if rate else "-",
        ratio=f"{rate / base:.1f} x" if rate and base else "-",
        share=f"{case.ceiling_share:.0%}" if case.ceiling_share is not None else "-",
        spread=(f"{case.spread:.0%}" if case.spread is not None else "-") + ("!" if case.unstable else ""),
        seconds=_seconds(case),
        verified=_yes(case.verified),
        resumes=_yes(case.resumable),
        remark="; ".join(_remarks(case)) or None,
    )


def _seconds(case: CaseResult) -> str:
    counted = [sample.durable_seconds for sample in case.samples if not sample.warmup]
    if not counted:
        return "-"
    return f"{len(counted)}: {min(counted):.3g} to {max(counted):.3g}, MAD {stats.scaled_mad(counted):.2g}"


def _remarks(case: CaseResult) -> Iterator[str]:
    if case.resumable is False and case.resume_reason:
        yield f"does not resume: {plain(case.resume_reason)}"
    for warning in case.warnings:
        yield plain(warning)


def _with(row: Row, **changes: str | None) -> Row:
    return Row(**{**row.__dict__, **changes})


def _data(case: CaseResult) -> str:
    """What a case saves, whatever the format."""
    chosen = sorted((key, value) for key, value in case.options.items() if key != "zipfile")
    return f"{case.workload} {case.payload_bytes} {chosen}"


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _drives(report: HostReport) -> str:
    facts = report.facts
    if not facts.drives:
        return ""
    first = facts.drives[0]
    name = plain(first.model or first.name, 40)
    size = f" {first.size_bytes / 1000**4:.2f} TB" if first.size_bytes else ""
    array = f", {plain(facts.array.level, 12)}" if facts.array else ""
    return f"{len(facts.drives)} x {name}{size}{array}"


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Words to the left (the first column), figures to the right."""
    parts = [
        f"{cell:<{width}}" if place == 0 else f"{cell:>{width}}"
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()
