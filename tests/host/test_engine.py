"""DeepSpeed engine rows on the CPU: every writer, every ZeRO stage, true files, and can training resume?"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

import pytest
import torch

from bench.host import models
from bench.host.mend import mend_checkpoint
from bench.host.process_group import single_process_group
from bench.host.workloads import engine as engine_module
from bench.host.workloads.base import NotVerifiedError, Saved, SkipCaseError
from bench.host.workloads.engine import FRAGMENT_SUFFIX, EngineWorkload, engine_config
from bench.plan import Case, Options, handle_defaults

SMALL_T5 = {
    "model_type": "t5", "d_ff": 64, "d_kv": 8, "d_model": 32, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "vocab_size": 500, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
FRAGMENTED = "DeepSpeed wrote mp_rank_00_model_states.pt-0.1 and looks for mp_rank_00_model_states.pt"
WEIGHTS_ONLY = "torch loads weights only and refuses"


class _Probe(Enum):
    ONE = 1


# Python 3.11.2 (Debian 12) is one that does; torch then meets getattr where it would meet the enum's class.
ENUMS_ARE_PICKLED_BY_GETATTR = _Probe.ONE.__reduce_ex__(2)[0] is getattr


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = dict(models._shipped("tiny-t5"), config=SMALL_T5)
    monkeypatch.setattr(models, "_shipped", lambda _: shipped)


@pytest.fixture(scope="module")
def group(ready_ops: None) -> Iterator[None]:
    with single_process_group():
        yield


@pytest.fixture
def start(group: None, tmp_path: Path) -> Iterator[Callable[..., EngineWorkload]]:
    """Builds a prepared workload; options as keywords."""
    made = []

    def build(writer: str, **options: object) -> EngineWorkload:
        options = {"io_buffer_bytes": 1024**2, "statistics": False, **options}
        case = Case(workload="engine", writer=writer, options=Options.model_validate(options))
        workload = EngineWorkload(case, 5, tmp_path)
        made.append(workload)
        workload.prepare()
        return workload

    yield build
    for workload in made:
        workload.close()


def save(workload: EngineWorkload, target: Path) -> Saved:
    workload.arm(target)
    saved = workload.save(target)
    workload.disarm()
    return saved


def assert_documented_answer(workload: EngineWorkload, saved: Saved) -> None:
    """What DeepSpeed 0.19.8 does on torch 2.6: the table in docs/resume.md."""
    resumable, reason = workload.resume(saved)
    writer, zero_stage = workload.case.writer, workload.case.options.zero_stage
    expected = []
    if writer == "ds_aio" and zero_stage < 3:
        expected.append(FRAGMENTED)
    if writer in ("ds_python", "ds_aio") and zero_stage > 0:
        an_enum = zero_stage == 3 and ENUMS_ARE_PICKLED_BY_GETATTR
        expected.append(f"{WEIGHTS_ONLY} {'an enum (builtins.getattr' if an_enum else 'deepspeed'}")
    assert resumable is (not expected), reason
    assert all(part in (reason or "") for part in expected)
    assert ("docs/resume.md" in (reason or "")) is bool(expected)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("writer", ["torch_save", "ds_python", "ds_aio"])
def test_saves_verify_and_the_answer_about_resuming_is_the_documented_one(
    start, tmp_path: Path, writer: str, zero_stage: int
) -> None:
    workload = start(writer, optimizer=True, zero_stage=zero_stage)
    saved = save(workload, tmp_path / "one")
    size = sum(path.stat().st_size for path in saved.files)
    assert {path for path in (tmp_path / "one").rglob("*") if path.is_file()} == set(saved.files)
    assert workload.payload_bytes <= size
    assert saved.promised_bytes == (None if writer == "torch_save" else size)
    workload.verify(saved)
    assert len(workload.digest or "") == 64
    assert_documented_answer(workload, saved)
    again = save(workload, tmp_path / "two")
    workload.verify(again)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_mock_counts_what_would_be_saved_and_writes_nothing(start, tmp_path: Path, zero_stage: int) -> None:
    workload = start("ds_mock", optimizer=True, zero_stage=zero_stage)
    saved = save(workload, tmp_path / "one")
    assert saved.hook_storages
    assert saved.promised_bytes is None
    assert sum(path.stat().st_size for path in saved.files if path.suffix == ".pt") == 0


@pytest.mark.parametrize("double_buffer", [True, False])
def test_fast_writer_takes_every_storage_through_the_hook(start, tmp_path: Path, double_buffer: bool) -> None:
    workload = start("ds_aio", double_buffer=double_buffer)
    saved = save(workload, tmp_path / "one")
    tensors = len(list(workload._engine.module.parameters()))
    assert saved.hook_storages == tensors
    assert saved.statistics[f"mp_rank_00_model_states.pt{FRAGMENT_SUFFIX}"]["save_storage"] == tensors
    workload.verify(saved)


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("writer", ["torch_save", "ds_python", "ds_aio", "torch_save_zip"])
def test_zip_format_never_reaches_the_hook_and_verifies(start, tmp_path: Path, writer: str, zero_stage: int) -> None:
    workload = start(writer, zipfile=writer != "torch_save_zip", optimizer=True, zero_stage=zero_stage)
    saved = save(workload, tmp_path / "one")
    assert not saved.hook_storages
    states = [path for path in saved.files if ".pt" in path.name]
    assert all(path.read_bytes()[:2] == b"PK" for path in states)
    workload.verify(saved)
    assert_documented_answer(workload, saved)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_optimizer_on_the_cpu_by_offload(start, tmp_path: Path, zero_stage: int) -> None:
    workload = start("ds_aio", optimizer=True, zero_stage=zero_stage, cpu_offload=True)
    saved = save(workload, tmp_path / "one")
    workload.verify(saved)
    assert_documented_answer(workload, saved)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_payload_has_both_moments_of_every_parameter(start, zero_stage: int) -> None:
    workload = start("torch_save", optimizer=True, zero_stage=zero_stage)
    weights = sum(parameter.numel() for parameter in models._skeleton("tiny-t5").parameters()) * 4
    copies = {0: 3, 1: 4, 3: 3}[zero_stage]  # stage 1 in fp32 holds the weights and their master copy
    assert copies * weights <= workload.payload_bytes < copies * weights * 1.02 + 4096


@pytest.mark.parametrize("writer", ["torch_save", "ds_python", "ds_aio"])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_one_wrong_byte_is_found(start, tmp_path: Path, writer: str, zero_stage: int) -> None:
    workload = start(writer, optimizer=True, zero_stage=zero_stage)
    saved = save(workload, tmp_path / "one")
    largest = max(saved.files, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(NotVerifiedError, match=largest.name):
        workload.verify(saved)


@pytest.mark.parametrize("fault", ["short", "missing", "extra", "latest"])
def test_files_that_are_not_the_checkpoint_are_found(start, tmp_path: Path, fault: str) -> None:
    workload = start("ds_python", optimizer=True, zero_stage=1)
    saved = save(workload, tmp_path / "one")
    model = next(path for path in saved.files if path.name.startswith("mp_rank"))
    if fault == "short":
        os.truncate(model, model.stat().st_size - 1000)
        expected = "can't be loaded"
    elif fault == "missing":
        model.unlink()
        saved.files.remove(model)
        expected = "is missing"
    elif fault == "extra":
        extra = model.with_name("mp_rank_01_model_states.pt")
        extra.write_bytes(b"")
        saved.files.append(extra)
        expected = "holds no such state"
    else:
        (tmp_path / "one" / "latest").write_text("other")
        expected = "does not name"
    with pytest.raises(NotVerifiedError, match=expected):
        workload.verify(saved)


def test_a_load_that_brings_back_other_weights_is_no_resume(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = start("torch_save")
    saved = save(workload, tmp_path / "one")
    from deepspeed.runtime.engine import DeepSpeedEngine

    monkeypatch.setattr(DeepSpeedEngine, "load_module_state_dict", lambda *_, **__: None)
    resumable, reason = workload.resume(saved)
    assert resumable is False
    assert "load_checkpoint returned, but mp_rank_00_model_states.pt" in reason


@pytest.mark.parametrize(
    ("writer", "options", "reason"),
    [
        ("safetensors", {}, "can't save through safetensors; it knows torch_save"),
        ("ds_gds", {}, "needs a GPU"),
        ("torch_save", {"zero_stage": 2}, "add --optimizer"),
        ("torch_save", {"cpu_offload": True}, "ZeRO stage 0"),
    ],
)
def test_what_deepspeed_refuses_is_skipped_with_the_way_out(start, writer: str, options: dict, reason: str) -> None:
    with pytest.raises(SkipCaseError, match=reason):
        start(writer, **options)


def test_half_on_a_processor_without_fp16_is_skipped(start, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False, raising=False)
    with pytest.raises(SkipCaseError, match="leave out --half"):
        start("torch_save", half=True)


def test_configuration_is_the_published_one() -> None:
    handle = handle_defaults("engine")
    handle["block_size"] = handle.pop("block_bytes")
    config = engine_config("ds_gds", Options(gpu=True, optimizer=True, zero_stage=1, half=True), handle)
    assert config["checkpoint"] == {
        "checkpoint_serialization": False,
        "writer": {"type": "fast", "io_buffer_size": 64 * 1024**2, "io_buffer_double": True,
                   "show_statistics": True, "data_parallel": "socket"},
    }  # fmt: skip
    assert config["aio"] == {"block_size": 8 * 1024**2, "queue_depth": 8, "single_submit": False,
                             "overlap_events": True, "intra_op_parallelism": 2, "use_gds": True}  # fmt: skip
    assert config["optimizer"]["params"]["torch_adam"] is True
    assert config["fp16"] == {"enabled": True}
    assert config["zero_optimization"] == {"stage": 1}
    vanilla = engine_config("torch_save", Options(gpu=True, optimizer=True, fused=True), handle)
    assert vanilla["checkpoint"] == {"checkpoint_serialization": False}
    assert vanilla["optimizer"]["params"]["torch_adam"] is False


# The mends of docs/resume.md, for real.


def loads(workload: EngineWorkload, folder: Path) -> bool:
    """Does a fresh engine with other weights load the folder and hold what the files hold?"""
    workload._drop_engine()
    workload._engine = workload._make_engine(workload.seed + 1)
    path, _ = workload._engine.load_checkpoint(str(folder))
    workload._visit_states(lambda name, state: engine_module._compare_state(state, folder / name))
    return path is not None


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_renaming_and_an_environment_variable_mend_every_fast_checkpoint(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    workload = start("ds_aio", optimizer=True, zero_stage=zero_stage)
    save(workload, tmp_path / "one")
    mend_checkpoint(tmp_path / "one")
    if zero_stage:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert loads(workload, tmp_path / "one")


@pytest.mark.parametrize("writer", ["ds_python", "ds_aio"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_safe_globals_mend_weights_only(start, tmp_path: Path, writer: str, zero_stage: int) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    workload = start(writer, optimizer=True, zero_stage=zero_stage)
    save(workload, tmp_path / "one")
    mend_checkpoint(tmp_path / "one")
    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        if ENUMS_ARE_PICKLED_BY_GETATTR:
            with pytest.raises(pickle.UnpicklingError, match="getattr"):
                loads(workload, tmp_path / "one")
        else:
            assert loads(workload, tmp_path / "one")


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_loading_through_the_torch_checkpoint_engine_mends_weights_only(start, tmp_path: Path, zero_stage: int) -> None:
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    workload = start("ds_aio", optimizer=True, zero_stage=zero_stage)
    save(workload, tmp_path / "one")
    mend_checkpoint(tmp_path / "one")
    make = workload._make_engine

    def make_and_swap(seed: int) -> object:
        made = make(seed)
        made.checkpoint_engine = TorchCheckpointEngine()
        return made

    workload._make_engine = make_and_swap
    assert loads(workload, tmp_path / "one")


def test_process_group_opens_again_and_leaves_the_environment_as_it_was() -> None:
    program = (
        "import os, torch.distributed as dist\n"
        "from bench.host import deepspeed_cpu\n"
        "from bench.host.process_group import single_process_group\n"
        "deepspeed_cpu.install()\n"
        "import deepspeed, deepspeed.comm as comm, json\n"
        "before = dict(os.environ)\n"
        "for _ in range(2):\n"
        "    with single_process_group() as backend:\n"
        "        deepspeed.init_distributed(dist_backend=backend)\n"
        "        comm.barrier()\n"
        "        assert (comm.get_rank(), comm.get_world_size(), os.environ['CROSS_SIZE']) == (0, 1, '1')\n"
        "    assert not dist.is_initialized()\n"
        "print(json.dumps(before == dict(os.environ)))\n"
    )
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": "/nonexistent-so-that-nothing-can-be-compiled"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) is True
