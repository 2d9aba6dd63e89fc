"""What a person sees at the end, in the terminal and in report.md."""

from __future__ import annotations

import re

import pytest
from synthetic import BEGIN, RUN, host_report, report, row

from bench.fleet.verdict import digest, fleet_rates
from bench.report.markdown import escape, host_section, markdown
from bench.report.text import fleet_lines, host_lines
from bench.results import FleetReport, HostOutcome

SKIPPED = {"status": "skipped", "reason": "nvidia-fs is not loaded (see docs/gds.md)", "samples": [],
           "durable_bytes_per_second": None, "payload_bytes": 0}  # fmt: skip
ROWS = [
    row("model", "torch_save", 0.66),
    row("model", "torch_save_tuned", 1.2),
    row("model", "ds_mock", 30.0),
    row("model", "ds_aio", 17.9, unstable=True, spread=0.14),
    row("model", "ds_gds", 1, **SKIPPED),
    row("roundtrip", "ds_aio", 16.8),
    row(
        "engine",
        "ds_aio",
        16.8,
        resumable=False,
        resume_reason="DeepSpeed looks for another file name (docs/resume.md)",
    ),
]


RATES = fleet_rates(digest(host_report(name, speed), "r") for name, speed in (("a", 1), ("b", 0.5), ("c", 19 / 18)))


def fleet(*outcomes: HostOutcome) -> FleetReport:
    return FleetReport(
        run_id=RUN, plan="standard", started_at=BEGIN, finished_at=BEGIN, bench_version="0.1.0", hosts=list(outcomes)
    )


def line_of(lines, *words):
    return next(line for line in lines if all(word in line for word in words))


def test_the_table_of_one_host():
    lines = host_lines(host_report(cases=ROWS), 140)
    assert re.search(
        r"8 x PM1743 3\.84 TB, raid0 .*xfs.*8 x H200.*torch 2\.6\.0 patched.*ceiling 21\.4 GiB/s", lines[0]
    )
    assert re.split(r" {2,}", lines[1].strip()) == [
        "writer", "durable", "vs torch_save", "of ceiling", "spread", "verified", "resumes", "status",
    ]  # fmt: skip
    assert lines[2] == "model tiny-t5 fp32, 4 GiB"
    cells = re.split(r" {2,}", line_of(lines, "  ds_aio", "14%!").strip())
    assert cells == ["ds_aio", "17.9 GiB/s", "27.1 x", "84%", "14%!", "yes", "-", "ok"]
    assert line_of(lines, "engine") == "engine tiny-t5 fp32, ZeRO 0, 4 GiB"


def test_rows_of_one_workload_are_told_apart_by_what_they_saved():
    cases = [
        row("engine", "ds_aio", 1, options={"half": True, "optimizer": True, "zero_stage": stage}) for stage in (1, 2)
    ]
    report_ = host_report(cases=cases)
    lines = host_lines(report_, 140)
    heads = [line for line in lines if line.startswith("engine")]
    assert heads == [f"engine tiny-t5 half, optimizer, ZeRO {stage}, 4 GiB" for stage in (1, 2)]
    rates = fleet_rates([digest(report_, "r")])
    assert [rate.benchmark for rate in rates] == heads
    page = "\n".join(host_section(HostOutcome(name="n", verdict="PASS", report="r"), report_))
    assert all(f"| {head} | ds\\_aio |" in page for head in heads)


@pytest.mark.parametrize("order", [1, -1])
def test_the_zip_format_is_compared_with_the_legacy_one_where_both_were_measured(order):
    cases = [row("tensor", "torch_save", 1.0), row("tensor", "torch_save", 0.5, options={"zipfile": True})]
    lines = host_lines(host_report(cases=cases[::order]), 140)
    zipped = lines.index("tensor, zip format, 4 GiB")
    assert " 0.5 x " in lines[zipped + 1]
    assert " 1.0 x " in line_of(lines, "1.00 GiB/s")


def test_a_row_that_was_not_measured_says_why_and_shows_no_figure():
    lines = host_lines(host_report(cases=ROWS), 140)
    assert line_of(lines, "ds_gds").split(maxsplit=1)[1] == "skipped: nvidia-fs is not loaded (see docs/gds.md)"
    assert "GiB/s" not in line_of(lines, "ds_gds")


def test_a_mock_row_is_a_ceiling_of_serialization_and_is_compared_with_nothing():
    line = line_of(host_lines(host_report(cases=ROWS), 140), "ds_mock")
    assert "ceiling of serialization" in line
    assert " x" not in line.split("nothing is written")[0]


def test_what_does_not_resume_is_explained_below_its_row():
    lines = host_lines(host_report(cases=ROWS), 140)
    place = lines.index("engine tiny-t5 fp32, ZeRO 0, 4 GiB") + 1
    assert lines[place].startswith("  ds_aio")
    assert "DeepSpeed looks for another file name (docs/resume.md)" in lines[place + 1]


@pytest.mark.parametrize("width", [140, 100, 80])
def test_the_figures_fit_the_terminal(width):
    figures = [
        line for line in host_lines(host_report(cases=ROWS), width)[1:] if re.search(r"\d GiB/s +\S* *.*ok$", line)
    ]
    assert len(figures) == 5
    assert max(map(len, figures)) <= width
    assert all("GiB/s" in line for line in figures)


def test_a_narrow_terminal_keeps_the_rates():
    lines = host_lines(host_report(cases=ROWS), 40)
    assert "17.9 GiB/s" in line_of(lines, "ds_aio")


def test_one_host_ends_with_its_verdict_and_where_the_time_went():
    outcome = HostOutcome(name="gpu-node-1", verdict="PASS", report="gpu-node-1/report.json")
    lines = fleet_lines(fleet(outcome), [], lambda _: host_report(), 140, "results/x/report.md")
    assert lines[-1] == "PASS in 3:12 (saves 1:40, verify 52 s, data 20 s, rest 20 s)   results/x/report.md"


def test_a_large_fleet_names_everybody_who_did_not_pass_and_counts_the_rest():
    outcomes = [HostOutcome(name=f"n{n:03}", verdict="PASS", report="r") for n in range(195)]
    outcomes += [HostOutcome(name=f"x{n}", verdict="UNREACHABLE", reason="no route") for n in range(3)]
    outcomes += [HostOutcome(name="y", verdict="FAILED", reason="disk full"), HostOutcome(name="z", verdict="SLOW")]
    lines = fleet_lines(fleet(*outcomes), [], lambda _: None, 100, "r.md")
    assert re.match(r"y +FAILED +disk full", line_of(lines, "y  "))
    assert sum("UNREACHABLE  no route" in line for line in lines) == 3
    assert lines[-1] == "FAILED: 1 FAILED, 3 UNREACHABLE, 1 SLOW, 195 PASS of 200 hosts   r.md"
    assert len(lines) < 10


def test_a_fleet_sees_how_fast_each_writer_is_and_who_is_last():
    outcomes = [HostOutcome(name=name, verdict="PASS", report="r") for name in "abcdef"]
    lines = fleet_lines(fleet(*outcomes), RATES, lambda _: None, 100, "r.md")
    head = lines.index("model tiny-t5 fp32, 4 GiB")
    cells = re.split(r" {2,}", line_of(lines[head:], "ds_aio").strip())
    assert cells == ["ds_aio", "3", "18.0 GiB/s", "19.0 GiB/s", "9.00 GiB/s", "on b"]
    assert not any("ds_mock" in line for line in lines)


def test_a_hosts_warnings_are_told():
    assert "    the ceiling fell by 30 %" in host_lines(host_report(warnings=["the ceiling fell by 30 %"]), 140)


def test_words_of_a_host_can_do_nothing_to_the_terminal():
    hostile = report(cases=[row("model", "ds_aio", 1, status="failed", reason="\x1b[2J\x07gone\nFAKE PASS")])
    hostile["facts"]["filesystem"]["type"] = "xfs\x1b]0;title\x07"
    lines = host_lines(host_report(**hostile), 140)
    assert "\x1b" not in "".join(lines)
    assert all("\n" not in line for line in lines)


def test_words_of_a_host_can_do_nothing_to_the_page():
    evil = "<script>alert(1)</script> | [x](http://e) `c` # h\n| node-2 | PASS |"
    outcome = HostOutcome(name="<img src=x>", verdict="FAILED", reason=evil, report="r")
    made = host_report(cases=[row("model", "ds_aio", 1, status="failed", reason=evil)])
    page = "\n".join(markdown(fleet(outcome), [], lambda _: made))
    assert "<script" not in page
    assert "<img" not in page
    assert re.search(r"^\| .*img src=x.* \| FAILED \|", page, re.M)
    assert not re.search(r"^\| node-2", page, re.M)
    assert r"\[x\](http" in page


def test_the_page_has_every_host_and_the_tables():
    outcomes = [
        HostOutcome(name="a", verdict="PASS", report="a/report.json"),
        HostOutcome(name="b", verdict="UNREACHABLE", reason="no route"),
    ]
    page = "\n".join(markdown(fleet(*outcomes), RATES, lambda _: host_report(cases=ROWS)))
    assert "| a | PASS |  |" in page
    assert "| model tiny-t5 fp32, 4 GiB | ds\\_aio | 3 | 18.0 GiB/s | 19.0 GiB/s | 9.00 GiB/s | b |" in page
    assert "| b | UNREACHABLE | no route |" in page
    table = [line for line in page.splitlines() if line.startswith("|") and "test" in line]
    assert len(table) == len(ROWS)
    assert {line.replace(r"\|", "").count("|") for line in table} == {12}


def test_escape_leaves_ordinary_words_readable():
    assert escape("PASS in 3:12 (saves 1:40)") == "PASS in 3:12 (saves 1:40)"


def test_a_row_of_the_page_says_how_many_saves_there_were_and_how_far_apart():
    samples = [{"ack_seconds": 0.1, "durable_seconds": value} for value in (2.0, 1.0, 4.0)]
    samples.append({"ack_seconds": 0.1, "durable_seconds": 90.0, "warmup": True})
    page = "\n".join(
        host_section(
            HostOutcome(name="n", verdict="PASS", report="r"),
            host_report(cases=[row("model", "torch_save", 0.66, samples=samples)]),
        )
    )
    assert "| 3: 1 to 4, MAD 1.5 |" in page
