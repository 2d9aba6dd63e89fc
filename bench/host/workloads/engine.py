"""A DeepSpeed engine's ``save_checkpoint``, with the published configuration and one rank.

Verification and the question whether training can resume both use DeepSpeed's own code to say what a
checkpoint holds: ``save_checkpoint`` runs once more with a checkpoint engine that compares each state
with its file in place of writing one.
"""

from __future__ import annotations

import gc
import hashlib
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from bench.host import deepspeed_cpu
from bench.host.models import build_model, fill_optimizer_
from bench.host.process_group import single_process_group
from bench.host.randomness import fill_weights_
from bench.host.verify import compare, drop_cache, files_sha256, tensors_in, unique_storage_bytes
from bench.host.workloads.base import NotVerifiedError, Saved, SkipCaseError, Workload
from bench.host.writers.base import WriterContext, logical_block_bytes
from bench.host.writers.deepspeed import saved_by
from bench.plan import Case, Options

TAG = "bench"
# DeepSpeed's names for its writers; None: no writer, the engine calls torch.save with a path.
WRITER_TYPES: dict[str, str | None] = {
    "torch_save": None,
    "torch_save_zip": None,
    "ds_mock": "mock",
    "ds_python": "python",
    "ds_aio": "fast",
    "ds_gds": "fast",
}
# What the fast writer adds to a file's name for one rank of one.
FRAGMENT_SUFFIX = "-0.1"
GUIDE = "docs/resume.md"

Visit = Callable[[Path, Any], None]


def engine_config(writer: str, options: Options, handle: dict[str, Any]) -> dict[str, Any]:
    """The published DeepSpeed configuration for one writer.

    ``handle``: arguments of the I/O handle (block_size, queue_depth, ...). Source: DeepSpeedExamples,
    deepnvme/model_checkpoint.
    """
    zero: dict[str, Any] = {"stage": options.zero_stage}
    if options.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": options.gpu}
    checkpoint: dict[str, Any] = {"checkpoint_serialization": options.zipfile or writer == "torch_save_zip"}
    config: dict[str, Any] = {
        "train_batch_size": 1,
        "zero_optimization": zero,
        "fp16": {"enabled": options.half},
        "checkpoint": checkpoint,
    }
    if options.optimizer:
        config["optimizer"] = {"type": "Adam", "params": {"torch_adam": not options.fused}}
    if WRITER_TYPES[writer] is not None:
        checkpoint["writer"] = {
            "type": WRITER_TYPES[writer],
            "io_buffer_size": options.io_buffer_bytes,
            "io_buffer_double": options.double_buffer,
            "show_statistics": options.statistics,
            "data_parallel": "socket",
        }
        config["aio"] = {**handle, "use_gds": writer == "ds_gds"}
    return config


class EngineWorkload(Workload):
    """A model and its optimizer inside a DeepSpeed engine, saved by the case's writer into a folder."""

    def __init__(self, case: Case, seed: int, folder: Path) -> None:
        self.case = case
        self.seed = seed
        self.folder = folder
        self.digest: str | None = None
        self._open = ExitStack()
        self._engine: Any = None
        self._written: list[Saved] = []

    def prepare(self) -> None:
        options = self.case.options
        _refuse_what_deepspeed_refuses(self.case.writer, options)
        deepspeed_cpu.use_accelerator(gpu=options.gpu)
        deepspeed_cpu.install(logical_block_bytes(self.folder))
        _refuse_half_without_hardware(options)
        self._open.enter_context(single_process_group(options.gpu, options.device))
        self._engine = self._make_engine(self.seed)
        sizes: list[int] = []
        self._visit_states(lambda _, state: sizes.append(unique_storage_bytes(state)))
        self.payload_bytes = sum(sizes)

    def arm(self, target: Path) -> None:
        self._written.clear()
        if self._engine is None:
            self._engine = self._make_engine(self.seed)

    def save(self, target: Path) -> Saved:
        self._engine.save_checkpoint(str(target), tag=TAG)
        files = sorted(path for path in target.rglob("*") if path.is_file())
        return _joined(self._written, files)

    def verify(self, saved: Saved) -> None:
        root = _root(saved)
        unread = {path for path in saved.files if _holds_state(path)}

        def compare_file(name: Path, state: Any) -> None:
            path = _written_as(root / name)
            unread.discard(path)
            _compare_state(state, path)

        self._visit_states(compare_file)
        if unread:
            raise NotVerifiedError(f"{min(unread).name} is in the checkpoint, but the engine holds no such state")
        latest = root / "latest"
        if latest.read_text(encoding="utf-8") != TAG:
            raise NotVerifiedError(f"{latest} does not name the checkpoint that was saved")
        self.digest = files_sha256(root, saved.files)

    def resume(self, saved: Saved) -> tuple[bool | None, str | None]:
        root = _root(saved)
        before = self._fingerprint()
        self._drop_engine()
        # A fresh engine with other weights and moments: on the old one the check could not fail.
        self._engine = self._make_engine(self.seed + 1)
        if self._fingerprint() == before:
            raise NotVerifiedError("the fresh engine equals the saved one: nothing is proved")
        try:
            loaded, _ = self._engine.load_checkpoint(str(root))
            if loaded is None:
                reason = "load_checkpoint found no checkpoint"
            else:
                self._visit_states(lambda name, state: _compare_state(state, _written_as(root / name)))
                return True, None
        except NotVerifiedError as error:
            reason = f"load_checkpoint returned, but {error}"
        except Exception as error:
            reason = _why_not(root, saved, error)
        # What a failed load left behind is no engine to go on with.
        self._drop_engine()
        return False, reason

    def close(self) -> None:
        self._drop_engine()
        self._open.close()

    def _make_engine(self, seed: int) -> Any:
        import deepspeed

        options = self.case.options
        device = torch.device("cuda", options.device) if options.gpu else torch.device("cpu")
        dtype = torch.float16 if options.half else torch.float32
        model = build_model(options.model, seed, dtype, device, options.pretrained)
        if options.pretrained is not None and seed != self.seed:
            fill_weights_(model, seed)
        context = WriterContext("engine", options, device, self.folder, logical_block_bytes(self.folder))
        config = engine_config(self.case.writer, options, context.handle_options())
        engine, *_ = deepspeed.initialize(model=model, config=config)
        if options.optimizer:
            _fill_moments_(engine.optimizer, seed)
        self._note_writers(engine)
        return engine

    def _note_writers(self, engine: Any) -> None:
        """Keep what every writer says when DeepSpeed's factory lets go of it."""
        factory = getattr(engine.checkpoint_engine, "_writer", None)
        if factory is None:
            return
        release = factory.release_writer

        def release_and_note() -> None:
            writer = factory._writer
            release()
            self._written.append(saved_by(writer, Path(writer.file_path())))

        factory.release_writer = release_and_note

    def _visit_states(self, visit: Visit) -> None:
        """Call ``visit`` with name (below the checkpoint's folder) and state of every file that a save would write."""
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

        class Visitor(TorchCheckpointEngine):
            def save(self, state_dict: Any, path: str) -> None:
                visit(Path(path).relative_to(place), state_dict)

        # DeepSpeed makes folders and leaves its recovery scripts wherever it saves.
        with tempfile.TemporaryDirectory(prefix=".engine-", dir=self.folder) as place:
            real = self._engine.checkpoint_engine
            self._engine.checkpoint_engine = Visitor()
            try:
                self._engine.save_checkpoint(place, tag=TAG, save_latest=False)
            finally:
                self._engine.checkpoint_engine = real

    def _fingerprint(self) -> str:
        """A digest of the first bytes of every tensor that the engine would save."""
        digest = hashlib.sha256()

        def add(_: Path, state: Any) -> None:
            for tensor in tensors_in(state):
                flat = deepspeed_cpu.cast_to_byte_tensor(tensor.detach().flatten()[:8].contiguous())
                digest.update(flat.cpu().numpy().tobytes())

        self._visit_states(add)
        return digest.hexdigest()

    def _drop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        factory = getattr(engine.checkpoint_engine, "_writer", None)
        if factory is not None:
            deepspeed_cpu.release_factory(factory)
        engine.destroy()
        del engine, factory
        gc.collect()
        if self.case.options.gpu:
            torch.cuda.empty_cache()


def _refuse_what_deepspeed_refuses(writer: str, options: Options) -> None:
    if writer not in WRITER_TYPES:
        raise SkipCaseError(f"DeepSpeed's engine can't save through {writer}; it knows {', '.join(WRITER_TYPES)}")
    if writer == "ds_gds" and not options.gpu:
        raise SkipCaseError("GPUDirect Storage needs a GPU; give --gpu on a host that has one")
    if options.zero_stage and not options.optimizer:
        raise SkipCaseError(
            f"DeepSpeed asserts that ZeRO stage {options.zero_stage} has an optimizer; add --optimizer, or use stage 0"
        )
    if options.cpu_offload and not options.zero_stage:
        raise SkipCaseError("there is no optimizer to offload in ZeRO stage 0; use --zero_stage 1, 2 or 3")


def _refuse_half_without_hardware(options: Options) -> None:
    from deepspeed.accelerator import get_accelerator

    if options.half and not get_accelerator().is_fp16_supported():
        raise SkipCaseError("DeepSpeed's engine has no fp16 on this processor; leave out --half, or give --gpu")


def _fill_moments_(optimizer: Any, seed: int) -> None:
    """Random moments for whatever DeepSpeed wrapped around Adam, which makes them at its first step only."""
    base = getattr(optimizer, "optimizer", optimizer)
    # ZeRO 3 keeps its parameters out of the optimizer's groups between steps.
    fill_optimizer_(base, seed, getattr(optimizer, "fp32_partitioned_groups_flat", None))


def _joined(written: list[Saved], files: list[Path]) -> Saved:
    """One account of a checkpoint from those of its files' writers.

    Files that no writer accounts for (``latest``, recovery scripts) count with the size they have.
    """
    promised = None
    if written and all(part.promised_bytes is not None for part in written):
        accounted = {path for part in written for path in part.files}
        others = sum(path.stat().st_size for path in files if path not in accounted)
        promised = others + sum(part.promised_bytes or 0 for part in written)
    counts = [part.hook_storages for part in written if part.hook_storages is not None]
    return Saved(
        files=files,
        promised_bytes=promised,
        statistics={path.name: part.statistics for part in written for path in part.files},
        hook_storages=sum(counts) if counts else None,
    )


def _root(saved: Saved) -> Path:
    """The folder that was given to save_checkpoint."""
    return next(path for path in saved.files if path.name == "latest").parent


def _holds_state(path: Path) -> bool:
    return path.name != "latest" and path.suffix != ".py"


def _written_as(path: Path) -> Path:
    """Where a writer put the file that DeepSpeed calls ``path``."""
    fragment = path.with_name(path.name + FRAGMENT_SUFFIX)
    if fragment.exists():
        return fragment
    if not path.exists():
        raise NotVerifiedError(f"{path.name} is missing from the checkpoint")
    return path


def _compare_state(state: Any, path: Path) -> None:
    """Compare what the engine holds with a file, bit by bit; raises NotVerifiedError."""
    drop_cache(path)
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    try:
        # Its own file, and it holds DeepSpeed's classes, which a load of weights only refuses.
        loaded = torch.load(path, map_location="cpu", weights_only=False, mmap=is_zip)
    except Exception as error:
        raise NotVerifiedError(f"{path.name} can't be loaded: {_first_line(error)}") from error
    compare(_plain(state), _plain(loaded), path.name)


def _plain(value: Any) -> Any:
    """Mappings, lists and tensors only: other objects become what they hold, since few of them define equality."""
    if isinstance(value, torch.Tensor | Enum | str | bytes | int | float | type | None):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dict__") and not callable(value):
        return {"": type(value).__qualname__, **{key: _plain(item) for key, item in vars(value).items()}}
    return value


def _why_not(root: Path, saved: Saved, error: Exception) -> str:
    """Plain words for a load_checkpoint that failed: cause and mend, both causes where there are two."""
    causes = []
    fragments = [path for path in saved.files if path.name.endswith(FRAGMENT_SUFFIX)]
    if fragments:
        wanted = fragments[0].name.removesuffix(FRAGMENT_SUFFIX)
        causes.append(
            f"DeepSpeed wrote {fragments[0].name} and looks for {wanted} "
            f"(bench mend-checkpoint renames it, {GUIDE} mend 1)"
        )
    refused = next(_refused_classes(path for path in saved.files if _holds_state(path)), None)
    if refused is not None:
        causes.append(
            f"torch loads weights only and refuses {refused} in DeepSpeed's state "
            f"(TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1, {GUIDE} mend 2)"
        )
    if not causes:
        causes.append(f"load_checkpoint failed: {type(error).__name__}: {_first_line(error)}")
    return "; and ".join(causes)


def _refused_classes(paths: Iterator[Path]) -> Iterator[str]:
    """Names of the classes for which torch refuses to load files with weights only."""
    for path in paths:
        try:
            # On the meta device a refusal comes before any tensor's bytes are read.
            torch.load(path, map_location="meta", weights_only=True)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL ([\w.]+)", str(error))
            name = found.group(1) if found else "a class"
            # Early releases of Python 3.11 pickle a member of an enum as a call of getattr.
            yield f"an enum ({name}, which this Python pickles it with)" if name == "builtins.getattr" else name


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
