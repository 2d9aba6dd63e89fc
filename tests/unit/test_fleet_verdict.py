"""The rules by which a report becomes a verdict."""

from __future__ import annotations

import itertools

import pytest
from synthetic import RATES, host_report, report, row

from bench.fleet.verdict import ExitCode, NoReport, digest, exit_code, judge, nonsense
from bench.results import HostOutcome, HostReport


def fleet(*speeds: float, **changes):
    """One digest a speed, of alike hosts."""
    return [digest(host_report(f"n{place}", speed, **changes), "r") for place, speed in enumerate(speeds)]


def verdict_of(cases=None, **changes):
    made = host_report(**({"cases": cases} if cases is not None else {}), **changes)
    return judge([digest(made, "gpu-node-1/report.json")], [])[0]


def test_a_host_whose_rows_all_worked_passes():
    outcome = verdict_of()
    assert (outcome.verdict, outcome.reason, outcome.report) == ("PASS", None, "gpu-node-1/report.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"status": "failed", "reason": "No space left"}, "model tiny-t5 fp32: ds_aio failed: No space left"),
        (
            {"status": "timeout", "reason": "took over 600 s"},
            "model tiny-t5 fp32: ds_aio ran out of time: took over 600 s",
        ),
        ({"verified": None}, "model tiny-t5 fp32: ds_aio was not verified"),
        (
            {"verified": False, "reason": "tensor w differs"},
            "model tiny-t5 fp32: ds_aio was not verified: tensor w differs",
        ),
    ],
)
def test_a_row_that_should_work_and_does_not_fails_the_host(change, words):
    outcome = verdict_of([row("model", "torch_save", 0.7), row("model", "ds_aio", 18, **change)])
    assert outcome.verdict == "FAILED"
    assert words in outcome.reason


def test_skipped_rows_and_checkpoints_that_do_not_resume_fail_nobody():
    cases = [
        row("model", "torch_save", 0.7),
        row("model", "ds_gds", 1, status="skipped", reason="no GPU", samples=[], durable_bytes_per_second=None),
        row("engine", "ds_aio", 18, resumable=False, resume_reason="DeepSpeed looks for another name"),
    ]
    assert verdict_of(cases).verdict == "PASS"


def test_only_where_nothing_could_be_run_a_host_is_skipped():
    skipped = {"status": "skipped", "reason": "needs a GPU", "samples": [], "durable_bytes_per_second": None}
    mock = row("model", "ds_mock", 30)
    outcome = verdict_of([row("model", "torch_save", 1, **skipped), mock])
    assert (outcome.verdict, outcome.reason) == ("SKIPPED", "nothing could be run here: needs a GPU")


def test_an_interrupted_run_and_an_empty_report_fail():
    assert verdict_of(interrupted=True).verdict == "FAILED"
    assert verdict_of([]).verdict == "FAILED"


def test_hosts_without_a_report_have_rows_too():
    outcomes = judge(fleet(1), [NoReport("z", "no route", unreachable=True), NoReport("a", "disk full")])
    assert [(one.name, one.verdict, one.reason) for one in outcomes] == [
        ("a", "FAILED", "disk full"),
        ("n0", "PASS", None),
        ("z", "UNREACHABLE", "no route"),
    ]


def test_slow_needs_five_alike_hosts_more_than_ten_percent_and_three_and_a_half_mads():
    verdicts = lambda digests: {one.name: one.verdict for one in judge(digests, [])}  # noqa: E731
    assert verdicts(fleet(1, 1.01, 0.99, 1.02, 0.6))["n4"] == "SLOW"
    assert set(verdicts(fleet(1, 1.01, 0.99, 0.6)).values()) == {"PASS"}, "four hosts are too few"
    assert set(verdicts(fleet(1, 1.01, 0.99, 1.02, 0.92)).values()) == {"PASS"}, "8 % behind is not slow"
    wide = fleet(0.6, 0.8, 1, 1.2, 1.4, 0.5)
    assert set(verdicts(wide).values()) == {"PASS"}, "half as fast, but so are the others' differences"
    equal = fleet(1, 1, 1, 1, 0.8)
    assert verdicts(equal)["n4"] == "SLOW", "a spread of zero must not hide an outlier"


def test_only_alike_hosts_are_compared():
    facts = {**report()["facts"], "drives": [{"name": "sda", "model": "a slower one"}]}
    slower_kind = [digest(host_report(f"s{place}", 0.5, facts=facts), "r") for place in range(4)]
    assert {one.verdict for one in judge(fleet(1, 1, 1, 1) + slower_kind, [])} == {"PASS"}


def test_the_reason_of_a_slow_host_names_the_row_the_rates_and_the_company():
    slow = {one.name: one for one in judge(fleet(1, 1, 1, 1, 0.5), [])}["n4"]
    assert "50% below the median of 5 alike hosts" in slow.reason
    assert "GiB/s against" in slow.reason


def test_a_mock_writers_rate_never_makes_a_host_slow():
    cases = lambda rate: [row("model", "torch_save", 0.7), row("model", "ds_mock", rate)]  # noqa: E731
    digests = [digest(host_report(f"n{n}", cases=cases(rate)), "r") for n, rate in enumerate([30, 30, 30, 30, 1])]
    assert {one.verdict for one in judge(digests, [])} == {"PASS"}


def test_failed_outweighs_slow():
    digests = fleet(1, 1, 1, 1)
    cases = [
        row("model", "torch_save", RATES["torch_save"] / 2),
        row("model", "ds_aio", 1, status="failed", reason="EIO"),
    ]
    digests.append(digest(host_report("bad", cases=cases), "r"))
    assert {one.name: one.verdict for one in judge(digests, [])}["bad"] == "FAILED"


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["PASS", "PASS"], ExitCode.ALL_PASS),
        (["PASS", "SLOW"], ExitCode.SOME_SLOW),
        (["SLOW", "FAILED"], ExitCode.SOME_FAILED),
        (["PASS", "UNREACHABLE"], ExitCode.SOME_FAILED),
        (["SKIPPED"], ExitCode.SOME_FAILED),
        ([], ExitCode.SOME_FAILED),
    ],
)
def test_exit_codes(verdicts, code):
    assert exit_code([HostOutcome(name="x", verdict=verdict) for verdict in verdicts]) == code


def test_exit_codes_are_distinct_and_leave_the_command_lines_own_alone():
    values = [int(code) for code in ExitCode]
    assert all(a != b for a, b in itertools.combinations(values, 2))
    assert 2 not in values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": []}, "ok without a measured rate"),
        ({"durable_bytes_per_second": None}, "ok without a measured rate"),
        ({"durable_bytes_per_second": 900.0 * 1024**3}, "its own samples do not give"),
        ({"samples": [{"ack_seconds": 2, "durable_seconds": 1}] * 3}, "samples"),
    ],
)
def test_values_that_cannot_be_true_are_found(change, words):
    made = host_report(cases=[row("model", "ds_aio", 18, **change)])
    assert words in nonsense(made)


def test_a_sound_report_is_no_nonsense():
    assert nonsense(HostReport.model_validate(report())) is None
