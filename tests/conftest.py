"""A skipped test is a failure, unless it names something that this machine really lacks.

A skip's reason starts with one of :data:`LACKS`, such as ``needs GPU``. Any other reason, or one that
is not true here, fails the session: a suite that skips what it could run proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

# Beginning of a reason -> does this machine lack it?
LACKS: dict[str, Callable[[], bool]] = {
    "needs GPU": lambda: not Path("/proc/driver/nvidia").exists(),
    "needs nvidia-fs": lambda: not Path("/proc/driver/nvidia-fs").exists(),
    "needs root": lambda: os.geteuid() != 0,
}


def unfounded(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """The skips that have no excuse, one line each, from (test, reason) pairs."""
    lines = []
    for test, reason in reasons:
        true_here = next((lacks() for start, lacks in LACKS.items() if reason.startswith(start)), None)
        if true_here is None:
            lines.append(f"{test}: skipped for no accepted reason: {reason}")
        elif not true_here:
            lines.append(f"{test}: skipped although this machine has it: {reason}")
    return lines


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Skips(), "skips-need-a-reason")


class _Skips:
    def __init__(self) -> None:
        self.reasons: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.reasons.append((report.nodeid, _reason(report.longrepr)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.reasons.append((report.nodeid, _reason(report.longrepr)))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if unfounded(self.reasons) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = unfounded(self.reasons)
        if lines:
            terminalreporter.section("skipped without need", red=True)
            terminalreporter.write_line("\n".join(lines))


def _reason(longrepr: object) -> str:
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ").strip()
