"""Was it GPUDirect Storage? From nvidia-fs's counters, cuFile's last words, and what stands for cuFile."""

from __future__ import annotations

import pytest
from synthetic import host_report

from bench.fleet.verdict import case_key
from bench.host.gds import Counters, explain_end, loaded_library, mechanism, parse_counters
from bench.host.remarks import remarks
from bench.plan import Case, Options
from bench.report.text import host_lines
from bench.results import CaseResult

STATS = """GDS Version: 1.13.1.3
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.24.3)
Mellanox PeerDirect Supported: False
IO stats: Enabled, peer IO stats: Disabled
Logging level: info

Active Shadow-Buffer (MiB): 0
Active Process: 0
Batches                         : n=0 ok=0 err=0 Avg-Submit-Latency(usec)=0
Reads                           : n=3 ok=3 err=0 readMiB=24 io_state_err=0
Reads                           : Bandwidth(MiB/s)=0 Avg-Latency(usec)=0
Sparse Reads                    : n=0 io=0 holes=0 pages=0
Writes                          : n=130 ok=128 err=2 writeMiB=1024 io_state_err=0 pg-cache=0
Writes                          : Bandwidth(MiB/s)=0 Avg-Latency(usec)=0
Mmap                            : n=2 ok=2 err=0 munmap=2
"""
CUFILE = "/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcufile.so.0"
LOG = """[2026-11-29 19:00:00] loading the op
file register error:file descriptor is not registered
"""


def test_the_counters_are_those_of_writes_that_went_well() -> None:
    assert parse_counters(STATS) == Counters(writes=128, enabled=True)
    assert parse_counters(STATS.replace("IO stats: Enabled", "IO stats: Disabled")) == Counters(128, enabled=False)
    assert parse_counters("something else\n") is None


@pytest.mark.parametrize(
    ("before", "after", "library", "name", "why"),
    [
        (Counters(10, True), Counters(138, True), CUFILE, "gds", "counted 128 writes"),
        (Counters(10, True), Counters(10, True), CUFILE, "gds-compat", "counted no write"),
        (Counters(10, False), Counters(10, False), CUFILE, "gds-compat", "rw_stats_enabled"),
        (None, None, CUFILE, "gds-compat", "not loaded"),
        (Counters(10, True), Counters(138, True), "/tmp/libcufile_double.so", "gds-compat", "/tmp/libcufile_double.so"),
    ],
)
def test_only_moving_counters_prove_gds(
    before: Counters | None, after: Counters | None, library: str, name: str, why: str
) -> None:
    found = mechanism(before, after, library)
    assert found.name == name
    assert why in found.why


def test_a_library_that_was_put_before_cufile_is_the_one_that_answers() -> None:
    maps = (
        f"7f00-7f01 r-xp 00000000 fe:00 12 {CUFILE}\n"
        "7f02-7f03 r-xp 00000000 fe:00 13 /venv/nvidia/cu13/lib/libcufile_rdma.so.1\n"
        "7f04-7f05 rw-p 00000000 00:00 0 \n"
    )
    assert loaded_library(maps) == CUFILE
    assert loaded_library(maps + "7f06-7f07 r-xp 0 fe:00 14 /tmp/libcufile_double.so\n") == "/tmp/libcufile_double.so"
    assert loaded_library("") is None


@pytest.mark.parametrize(
    ("words", "module", "status", "told"),
    [
        (LOG, False, "skipped", "nvidia-fs is not loaded"),
        (LOG, True, "failed", "gdscheck"),
        (LOG.replace("file descriptor is not registered", "GPUDirect Storage not supported on current file"),
         True, "skipped", "this filesystem or drive"),
        ("buffer register failed:invalid argument\n", False, "skipped", "buffer register failed"),
    ],
)  # fmt: skip
def test_cufiles_refusal_is_told_in_its_own_words(words: str, module: bool, status: str, told: str) -> None:
    explained = explain_end(words, module)
    assert explained is not None
    assert explained[0] == status
    assert told in explained[1]
    assert words.strip().splitlines()[-1] in explained[1]
    assert "docs/gds.md" in explained[1]


def test_other_ends_are_not_excused_by_gds() -> None:
    assert explain_end("write failed with posix error: No space left on device\n", False) is None
    assert explain_end("", False) is None


def gds_row(name: str) -> CaseResult:
    return CaseResult(
        workload="tensor", writer="ds_gds", tag="test_ds_gds_fast_save", status="ok", payload_bytes=1,
        statistics={"mechanism": name, "mechanism_because": "because"},
    )  # fmt: skip


def test_a_compat_row_is_compared_with_compat_rows_only() -> None:
    assert gds_row("gds").mechanism == "ds_gds"
    assert gds_row("gds-compat").mechanism == "gds-compat"
    assert case_key(gds_row("gds")) != case_key(gds_row("gds-compat"))


def test_a_zip_row_and_a_compat_row_say_what_they_are_not() -> None:
    zipped = Case(workload="tensor", writer="ds_aio", options=Options(zipfile=True))
    assert "not FastPersist" in remarks(zipped, {})[0]
    assert remarks(Case(workload="tensor", writer="torch_save", options=Options(zipfile=True)), {}) == []
    assert remarks(Case(workload="tensor", writer="ds_aio"), {}) == []
    compat = Case(workload="tensor", writer="ds_gds", options=Options(gpu=True))
    (words,) = remarks(compat, {"mechanism": "gds-compat", "mechanism_because": "nothing moved"})
    assert "not GPUDirect Storage" in words
    assert "nothing moved" in words


def test_the_table_shows_compat_rows_and_remarks_under_their_own_name() -> None:
    row = gds_row("gds-compat")
    row.warnings = ["this is not GPUDirect Storage"]
    host = host_report()
    host.cases = [row]
    text = "\n".join(host_lines(host, 200))
    assert "gds-compat" in text
    assert "ds_gds" not in text
    assert "this is not GPUDirect Storage" in text
