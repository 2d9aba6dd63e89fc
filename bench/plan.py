"""What to measure: a plan is a list of benchmarks, each one workload saved by several writers.

A plan is a YAML file. Those that ship are in ``bench/plans``; ``bench run PLAN`` takes a name of one
of them or a path. Unknown keys are refused with the nearest known key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MIB = 1024**2
GIB = 1024**3

Workload = Literal["tensor", "model", "engine", "roundtrip"]
WORKLOADS: tuple[str, ...] = get_args(Workload)

# id -> upstream's tag in log lines
WRITER_TAGS: dict[str, str] = {
    "torch_save": "test_save",
    "torch_save_zip": "test_save_zip",
    "torch_save_tuned": "test_save_tuned",
    "ds_mock": "test_ds_mock_save",
    "ds_python": "test_ds_py_save",
    "ds_aio": "test_ds_aio_fast_save",
    "ds_gds": "test_ds_gds_fast_save",
    "direct": "test_direct_save",
    "safetensors": "test_safetensors_save",
    "dcp": "test_dcp_save",
}
# The published set, in the published order.
PUBLISHED_WRITERS = ("torch_save", "ds_mock", "ds_python", "ds_aio", "ds_gds")
# Rows that go through torch's hook, so they need proof that the hook ran.
FASTPERSIST_WRITERS = ("ds_mock", "ds_aio", "ds_gds", "direct")
# Rows that write nothing: never a storage rate, never verified.
UNWRITTEN = frozenset({"ds_mock"})
MODELS = ("tiny-t5", "gpt2-large", "phi3", "phi3-v", "llama3-1B")


class PlanError(ValueError):
    """A plan or an option that can't be used; the message says where and what would be right."""


class Options(BaseModel):
    """Everything that can be set for one case. Sizes in bytes; the handle's defaults are the published ones.

    ``block_bytes``, ``queue_depth``, ``single_submit``, ``overlap_events`` and ``intra_op_parallelism``
    left at None mean: the published value for the workload (see :func:`handle_defaults`).
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    size_bytes: Annotated[int, Field(gt=0)] = 256 * MIB
    model: str = "tiny-t5"
    pretrained: str | None = None
    half: bool = False
    optimizer: bool = False
    fused: bool = False
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    cpu_offload: bool = False
    gpu: bool = False
    device: Annotated[int, Field(ge=0)] = 0
    zipfile: bool = False
    io_buffer_bytes: Annotated[int, Field(gt=0)] = 64 * MIB
    double_buffer: bool = True
    block_bytes: Annotated[int, Field(gt=0)] | None = None
    queue_depth: Annotated[int, Field(gt=0)] | None = None
    single_submit: bool | None = None
    overlap_events: bool | None = None
    intra_op_parallelism: Annotated[int, Field(gt=0)] | None = None
    statistics: bool = True

    @model_validator(mode="after")
    def _upstream_rules(self) -> Options:
        if self.optimizer and self.half and not self.gpu:
            raise ValueError("optimizer with half needs gpu: there is no half-precision optimizer on the CPU")
        if self.fused and not self.gpu:
            raise ValueError("fused needs gpu: the fused optimizer is a CUDA op")
        if self.pretrained is None and self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}{_near(self.model, MODELS)}")
        return self


class Case(BaseModel):
    """One row to measure: one writer saving one workload."""

    model_config = ConfigDict(extra="forbid")

    workload: Workload
    writer: str
    options: Options = Field(default_factory=Options)

    @model_validator(mode="after")
    def _known_writer(self) -> Case:
        if self.writer not in WRITER_TAGS:
            raise ValueError(f"unknown writer {self.writer!r}{_near(self.writer, WRITER_TAGS)}")
        return self

    @property
    def tag(self) -> str:
        """Upstream's tag in log lines."""
        return WRITER_TAGS[self.writer]


class Benchmark(BaseModel):
    """One workload with one set of options, saved by several writers."""

    model_config = ConfigDict(extra="forbid")

    workload: Workload
    writers: Annotated[list[str], Field(min_length=1)]
    options: Options = Field(default_factory=Options)

    @model_validator(mode="after")
    def _zero_needs_an_optimizer(self) -> Benchmark:
        if self.workload == "engine" and self.options.zero_stage > 0 and not self.options.optimizer:
            raise ValueError("ZeRO 1 to 3 partitions an optimizer's state: set optimizer too, or zero_stage 0")
        return self

    def cases(self) -> list[Case]:
        """The rows of this benchmark, in the plan's order."""
        return [Case(workload=self.workload, writer=writer, options=self.options) for writer in self.writers]


class Plan(BaseModel):
    """What to measure and how often.

    ``repetitions`` counted samples a case after ``warmup`` uncounted ones; ``seed`` makes data and
    order repeatable (None draws one and records it); ``case_timeout_seconds`` bounds each step of a
    case: setup, one save, verification.

    ``until_stable``: further samples, up to ``max_repetitions`` counted ones, until the last five agree
    (see bench.stats). ``sustained_seconds``: each case saves back to back for so long, to leave a drive's
    cache behind; only the second half of that time is counted.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str
    description: str = ""
    repetitions: Annotated[int, Field(ge=1)] = 5
    warmup: Annotated[int, Field(ge=0)] = 1
    until_stable: bool = False
    max_repetitions: Annotated[int, Field(ge=1)] = 20
    sustained_seconds: Annotated[float, Field(gt=0)] | None = None
    seed: int | None = None
    case_timeout_seconds: Annotated[float, Field(gt=0)] = 600
    benchmarks: Annotated[list[Benchmark], Field(min_length=1)]

    def cases(self) -> list[Case]:
        """Every row of the plan, in order."""
        return [case for benchmark in self.benchmarks for case in benchmark.cases()]

    def changed(self, changes: dict[str, Any]) -> Plan:
        """The same plan with other settings, checked; raises PlanError."""
        return parse_plan(self.model_dump() | changes, "command line")

    def on_gpu(self, device: int) -> Plan:
        """The same plan with the data of every benchmark on one GPU."""
        moved = [
            benchmark.model_copy(
                update={"options": benchmark.options.model_copy(update={"gpu": True, "device": device})}
            )
            for benchmark in self.benchmarks
        ]
        return self.model_copy(update={"benchmarks": moved})

    @model_validator(mode="after")
    def _known_writers(self) -> Plan:
        self.cases()
        return self

    @model_validator(mode="after")
    def _one_way_to_stop(self) -> Plan:
        if self.until_stable and self.sustained_seconds is not None:
            raise ValueError("until_stable and sustained_seconds are two ways to end a case; give one")
        if self.until_stable and self.max_repetitions < self.repetitions:
            raise ValueError("max_repetitions is below repetitions")
        return self


def handle_defaults(workload: str) -> dict[str, Any]:
    """The published I/O handle: engine rows and torch.save rows differ in overlap and parallelism.

    Source: DeepSpeedExamples, deepnvme/model_checkpoint, as published with FastPersist.
    """
    engine = workload == "engine"
    return {
        "block_bytes": 8 * MIB,
        "queue_depth": 8,
        "single_submit": False,
        "overlap_events": engine,
        "intra_op_parallelism": 2 if engine else 1,
    }


def shipped_plans() -> list[str]:
    """Names of the plans in this package."""
    return sorted(path.stem for path in _plans_folder().glob("*.yml"))


def load_plan(name_or_path: str) -> Plan:
    """A shipped plan by name, or a plan file by path.

    Raises PlanError for an unknown name, an unreadable file, a wrong key or a wrong value, and says
    where, and which known name is near.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yml", ".yaml"):
        path = _plans_folder() / f"{name_or_path}.yml"
        if not path.is_file():
            known = shipped_plans()
            raise PlanError(
                f"unknown plan {name_or_path!r}{_near(name_or_path, known)}; "
                f"known: {', '.join(known)}, or give the path of a .yml file"
            )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot read plan {path}: {error.strerror}") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(f"{path} is not YAML: {error}") from error
    return parse_plan(data, str(path))


def parse_plan(data: Any, where: str) -> Plan:
    """Check a plan that was read from ``where``; raises PlanError as :func:`load_plan` does."""
    if not isinstance(data, dict):
        raise PlanError(f"{where} must be a mapping with the key benchmarks, not {type(data).__name__}")
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        raise PlanError("\n".join(f"{where}: {line}" for line in validation_lines(error, Plan))) from error


def validation_lines(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line a fault, with the nearest known key for an unknown one."""
    lines = []
    for fault in error.errors(include_url=False):
        place = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            key = str(fault["loc"][-1])
            known = _fields_at(root, fault["loc"][:-1])
            lines.append(f"unknown key {place}{_near(key, known)}")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            lines.append(f"{place}: {message}" if place else message)
    return lines


def _fields_at(root: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    below: dict[str, type[BaseModel]] = {"benchmarks": Benchmark, "options": Options}
    model = root
    for part in loc:
        if isinstance(part, str):
            model = below.get(part, model)
    return list(model.model_fields)


def _near(word: str, known: Iterable[str]) -> str:
    known = list(known)
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {matches[0]}?)" if matches else f" (known: {', '.join(known)})"


def _plans_folder() -> Path:
    return Path(__file__).resolve().parent / "plans"
