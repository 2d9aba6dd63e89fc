"""The data that flows from a host to the controller and to other people's tools.

A host's report is somebody else's input for the controller, so every model here refuses unknown
fields, non-finite numbers and sizes that are not whole bytes. Sizes are integer bytes, durations
are float seconds, rates are float bytes per second, instants are timezone-aware UTC.
"""

from __future__ import annotations

import enum
import json
import math
import os
import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from bench.words import benchmark_words

SCHEMA_VERSION = 1
RUN_ID_PATTERN = re.compile(r"^\d{8}T\d{6}Z-[0-9a-f]{4}$")

Status = Literal["ok", "failed", "skipped", "timeout"]
Verdict = Literal["PASS", "SLOW", "FAILED", "UNREACHABLE", "SKIPPED"]
PatchState = Literal["patched", "original", "foreign"]
# The upper bounds are beyond any machine; they keep somebody else's nonsense out of our arithmetic.
Bytes = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Rate = Annotated[float, Field(gt=0, le=1e18)]
# Options and statistics are free in form; what a benchmark writes there is flat.
MAX_DEPTH = 16


class ExitCode(enum.IntEnum):
    """Exit status of ``bench run``, ``audit`` and ``report``. 2 is left to the command line's own usage errors."""

    ALL_PASS = 0
    COULD_NOT_RUN = 1
    SOME_SLOW = 3
    SOME_FAILED = 4
    INTERRUPTED = 130


class ReportError(ValueError):
    """A results file that cannot be used; the message says which file, where in it and what to do."""


class Model(BaseModel):
    """Base of everything here: unknown fields refused, numbers finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_assignment=True)


class Sample(Model):
    """One timed save.

    ``ack_seconds``: until the save call and the close returned. ``durable_seconds``: until fsync of
    the file (every file for an engine checkpoint) and of its directory also returned, from the same start.
    ``settle_seconds``: how long earlier dirty pages took to be written back before that start.
    ``at_seconds``: when the save started, since the start of the run.
    """

    ack_seconds: Seconds
    durable_seconds: Seconds
    warmup: bool = False
    settle_seconds: Seconds = 0.0
    at_seconds: Seconds = 0.0


class CaseResult(Model):
    """One row: one writer saving one workload on one host."""

    workload: str
    writer: str
    tag: str
    options: dict[str, Any] = Field(default_factory=dict)
    status: Status
    reason: str | None = None
    payload_bytes: Bytes = 0
    file_bytes: Bytes = 0
    setup_seconds: Seconds = 0.0
    samples: list[Sample] = Field(default_factory=list)
    durable_bytes_per_second: Rate | None = None
    spread: Annotated[float, Field(ge=0)] | None = None
    unstable: bool = False
    ceiling_share: Annotated[float, Field(ge=0)] | None = None
    verified: bool | None = None
    resumable: bool | None = None
    resume_reason: str | None = None
    statistics: dict[str, Any] = Field(default_factory=dict)
    sha256: str | None = None
    warnings: list[str] = Field(default_factory=list)

    @property
    def name(self) -> str:
        """What it is, in words that tell it from the other rows: ``engine tiny-t5 fp32, ZeRO 1: ds_aio``."""
        return f"{benchmark_words(self.workload, self.options)}: {self.writer}"

    @property
    def mechanism(self) -> str:
        """What the row may be compared and ranked as: its writer, but a GDS row only where GDS was really used."""
        found = self.statistics.get("mechanism")
        return found if isinstance(found, str) and found == "gds-compat" else self.writer


class Gpu(Model):
    name: str
    memory_bytes: Bytes
    driver: str | None = None


class Drive(Model):
    """A block device below the benchmark folder; ``link`` as the kernel prints it, such as "16.0 GT/s PCIe x4"."""

    name: str
    model: str | None = None
    serial: str | None = None
    firmware: str | None = None
    link: str | None = None
    size_bytes: Bytes | None = None
    logical_block_bytes: Bytes | None = None
    scheduler: str | None = None


class Array(Model):
    """An md array below the benchmark folder."""

    name: str
    uuid: str | None = None
    level: str
    chunk_bytes: Bytes | None = None
    members: list[str] = Field(default_factory=list)


class Filesystem(Model):
    type: str
    source: str
    mount_point: str
    options: str
    size_bytes: Bytes
    free_bytes: Bytes


class Facts(Model):
    """What this machine is, so that two reports can be compared honestly."""

    kernel: str
    distribution: str | None = None
    cpu: str
    cpu_count: int
    memory_bytes: Bytes
    gpus: list[Gpu] = Field(default_factory=list)
    drives: list[Drive] = Field(default_factory=list)
    array: Array | None = None
    filesystem: Filesystem
    software: dict[str, str | None] = Field(default_factory=dict)


class Patch(Model):
    """The state of torch's serialization.py as this run saw it."""

    path: str
    torch_version: str
    state: PatchState
    sha256: str


class Ceiling(Model):
    """What the folder can do, measured by ``tool`` in the same run, before the cases and again after them.

    ``write_bytes_per_second`` and ``read_bytes_per_second`` are the larger of the two; ``drift`` is
    (after - before) / before of the write rate.
    """

    tool: str
    command: list[str]
    write_bytes_per_second: Rate | None = None
    read_bytes_per_second: Rate | None = None
    before_write_bytes_per_second: Rate | None = None
    after_write_bytes_per_second: Rate | None = None
    drift: float | None = None
    reason: str | None = None


class HostReport(Model):
    """report.json: everything one host says about one run."""

    schema_version: Literal[1] = 1
    run_id: str = Field(pattern=RUN_ID_PATTERN.pattern)
    host: str
    started_at: AwareDatetime
    finished_at: AwareDatetime
    interrupted: bool = False
    bench_version: str
    plan: dict[str, Any]
    facts: Facts
    patch: Patch
    ceiling: Ceiling | None = None
    cases: list[CaseResult]
    warnings: list[str] = Field(default_factory=list)
    time_spent: dict[str, Seconds] = Field(default_factory=dict)


class HostOutcome(Model):
    """One row of fleet.json; ``report`` is the path of report.json below the run's folder, null when there is none."""

    name: str
    verdict: Verdict
    reason: str | None = None
    report: str | None = None


class FleetReport(Model):
    """fleet.json: every targeted host, also those without a report."""

    schema_version: Literal[1] = 1
    run_id: str = Field(pattern=RUN_ID_PATTERN.pattern)
    plan: str
    started_at: AwareDatetime
    finished_at: AwareDatetime
    bench_version: str
    hosts: list[HostOutcome]


@dataclass(frozen=True)
class FleetRate:
    """One measurement over the hosts that made it; rates in bytes per second."""

    benchmark: str
    writer: str
    hosts: int
    lowest: float
    lowest_host: str
    median: float
    highest: float


class RunStatus(Model):
    """status.json: small, rewritten atomically while a run goes on; what ``bench watch`` shows.

    ``progress`` is the share of the planned samples that are done, 0 to 1. ``phase`` of a case is
    setup, warmup, save, verify or resume.
    """

    schema_version: Literal[1] = 1
    run_id: str
    host: str
    pid: int
    state: Literal["starting", "running", "finished", "failed", "interrupted"]
    reason: str | None = None
    started_at: AwareDatetime
    updated_at: AwareDatetime
    progress: Annotated[float, Field(ge=0, le=1)] = 0.0
    case: str | None = None
    phase: str | None = None
    repetition: int | None = None
    repetitions: int | None = None
    last_bytes_per_second: Rate | None = None
    seconds_left: Seconds | None = None
    cases_done: int = 0
    cases_total: int = 0
    cases_failed: int = 0


def utc_now() -> datetime:
    """The wall clock, timezone-aware UTC; for labels only, never for durations."""
    return datetime.now(timezone.utc)


def new_run_id() -> str:
    """A run id that sorts by time and is unique, such as ``20261129T174442Z-3f9c``."""
    return f"{utc_now():%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def write_json(path: Path, model: BaseModel) -> None:
    """Write a model as JSON so that a reader sees either the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(model.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def parse_host_report(text: str | bytes, where: str) -> HostReport:
    """Read a host's report.json as hostile input.

    Raises ReportError, naming ``where`` and both schema versions when the file is of another one.
    """
    return _parse(HostReport, text, where)


def parse_fleet_report(text: str | bytes, where: str) -> FleetReport:
    """Read fleet.json; raises ReportError like :func:`parse_host_report`."""
    return _parse(FleetReport, text, where)


def parse_status(text: str | bytes, where: str) -> RunStatus:
    """Read status.json; raises ReportError like :func:`parse_host_report`."""
    return _parse(RunStatus, text, where)


def _parse(model: type[Any], text: str | bytes, where: str) -> Any:
    try:
        data = json.loads(text, parse_constant=_not_a_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{where} is not JSON ({error}); was it cut off? Collect it again.") from error
    if not isinstance(data, dict):
        raise ReportError(f"{where} holds a {type(data).__name__}, not an object")
    if _deeper_than(data, MAX_DEPTH):
        raise ReportError(f"{where} is nested deeper than {MAX_DEPTH} levels; no benchmark writes that")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ReportError(
            f"{where} has schema version {version!r}, this bench reads version {SCHEMA_VERSION}; "
            "use the bench version that wrote it, or run the benchmark again"
        )
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the top level"
        raise ReportError(f"{where}: {place}: {first['msg']}") from error


def _not_a_number(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _deeper_than(data: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than ``levels``; level by level, without recursion."""
    layer = [data]
    for _ in range(levels):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return False
    return True
