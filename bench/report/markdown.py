"""report.md: the same facts as the terminal shows, to keep, to mail and to put into a ticket."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from bench.report.text import Row, final_line, fleet_verdict, header_lines, rows, worst_first
from bench.results import FleetRate, FleetReport, HostOutcome, HostReport
from bench.words import gib_per_second, plain

# Whole tables of so many hosts at most, those that need a look first; every host has its line in the summary.
MAX_TABLES = 100

TITLES = (
    "benchmark",
    "writer",
    "tag",
    "durable",
    "vs torch_save",
    "of ceiling",
    "spread",
    "saves, s",
    "verified",
    "resumes",
    "status",
)


def markdown(
    fleet: FleetReport, rates: Sequence[FleetRate], report_of: Callable[[HostOutcome], HostReport | None]
) -> Iterator[str]:
    """The lines of report.md. Reports are read one at a time."""
    yield f"# Checkpoint audit {fleet.run_id}"
    yield ""
    yield f"**{fleet_verdict(fleet.hosts)}**"
    yield ""
    yield (
        f"Plan {escape(fleet.plan)}, {fleet.started_at:%Y-%m-%d %H:%M:%S} to "
        f"{fleet.finished_at:%Y-%m-%d %H:%M:%S} UTC, bench {escape(fleet.bench_version)}. Rates are payload bytes by "
        "the median time until the checkpoint was durable (file and directory synced); GiB is 1024^3 bytes."
    )
    ordered = worst_first(fleet.hosts)
    yield ""
    yield "| host | verdict | reason |"
    yield "|---|---|---|"
    for outcome in ordered:
        yield f"| {escape(outcome.name)} | {outcome.verdict} | {escape(outcome.reason or '')} |"
    if rates and len(ordered) > 1:
        yield from rate_section(rates)
    for outcome in [one for one in ordered if one.report is not None][:MAX_TABLES]:
        report = report_of(outcome)
        if report is not None:
            yield from host_section(outcome, report)


def rate_section(rates: Sequence[FleetRate]) -> Iterator[str]:
    """How fast each writer is over the fleet."""
    yield ""
    yield "## The fleet"
    yield ""
    yield "| benchmark | writer | hosts | median | highest | lowest | on |"
    yield "|---|---|---:|---:|---:|---:|---|"
    for rate in rates:
        figures = (gib_per_second(value) for value in (rate.median, rate.highest, rate.lowest))
        cells = (rate.benchmark, rate.writer, str(rate.hosts), *figures, rate.lowest_host)
        yield "| " + " | ".join(escape(cell) for cell in cells) + " |"


def host_section(outcome: HostOutcome, report: HostReport) -> Iterator[str]:
    """One host's table with its remarks."""
    yield ""
    yield f"## {escape(outcome.name)}"
    yield ""
    for line in header_lines(report):
        yield escape(line)
    yield ""
    yield "| " + " | ".join(TITLES) + " |"
    yield "|---|---|---|" + "---:|" * 5 + "---|---|---|"
    table = rows(report)
    for row in table:
        yield "| " + " | ".join(escape(cell) for cell in _cells(row)) + " |"
    remarks = [f"- {escape(row.benchmark)}: {escape(row.writer)}: {escape(row.remark)}" for row in table if row.remark]
    if remarks:
        yield ""
        yield from remarks
    yield ""
    yield escape(final_line(outcome, report, outcome.report or ""))


def escape(text: str) -> str:
    """Somebody else's text as text: neither Markdown nor HTML of theirs takes effect."""
    return re.sub(r"([\\`*_{}\[\]<>#|!&~$])", r"\\\1", plain(text)).replace("\\<", "&lt;").replace("\\>", "&gt;")


def _cells(row: Row) -> tuple[str, ...]:
    status = row.status if row.note is None else f"{row.status}: {row.note}"
    return (
        row.benchmark,
        row.writer,
        row.tag,
        row.rate,
        row.ratio,
        row.share,
        row.spread,
        row.seconds,
        row.verified,
        row.resumes,
        status,
    )
