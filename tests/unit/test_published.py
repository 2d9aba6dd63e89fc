"""What docs/h200 publishes: raw reports that today's bench reads, every rate verified, and the tables made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.plan import UNWRITTEN, load_plan
from bench.report.text import host_lines
from bench.results import HostReport, parse_host_report

FOLDER = Path(__file__).parents[2] / "docs" / "h200"
REPORTS = {
    "phi3.yml": "report.json",
    "training.yml": "training-report.json",
    "rows.yml": "rows-report.json",
    "driver-only.yml": "driver-only-report.json",
}


def published(name: str) -> HostReport:
    return parse_host_report((FOLDER / REPORTS[name]).read_bytes(), name)


@pytest.mark.parametrize("name", REPORTS)
def test_every_rate_was_verified_and_every_other_row_says_why_it_has_none(name: str) -> None:
    report = published(name)
    for case in report.cases:
        if case.writer in UNWRITTEN:
            assert case.verified is None
        elif case.status == "ok":
            assert case.verified is True
        else:
            assert (case.status, case.durable_bytes_per_second) == ("skipped", None)
            assert case.reason


@pytest.mark.parametrize("name", REPORTS)
def test_the_plan_beside_a_report_is_the_one_that_made_it(name: str) -> None:
    cases = [(case.workload, case.writer) for case in load_plan(str(FOLDER / name)).cases()]
    assert [(case.workload, case.writer) for case in published(name).cases] == cases


def test_the_tables_are_those_of_the_reports() -> None:
    parts = [[f"== docs/h200/{name}", *host_lines(published(name), 400), ""] for name in REPORTS]
    table = "\n".join(line for part in parts for line in part)
    assert (FOLDER / "table.txt").read_text(encoding="utf-8").strip() == table.strip()


def test_the_words_quote_the_reports() -> None:
    words = (FOLDER / "README.md").read_text(encoding="utf-8")
    (line,) = (line for line in words.splitlines() if line.startswith("| **ds_aio**"))
    rates = [cell.strip(" *") for cell in line.split("|")[2:6]]
    found = [
        {f"{case.durable_bytes_per_second / 1024**3:.2f}" for case in published(name).cases
         if case.writer == "ds_aio" and case.workload == workload and not case.options.get("zipfile")
         and case.durable_bytes_per_second}
        for name, workload in (("phi3.yml", "model"), ("training.yml", "model"), ("rows.yml", "model"),
                               ("rows.yml", "tensor"))
    ]  # fmt: skip
    assert [{rate} for rate in rates] == found
