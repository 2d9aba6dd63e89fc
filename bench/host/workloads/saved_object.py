"""Workloads that hand one object to a writer: a raw tensor, a model, a round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.host.verify import compare, unique_storage_bytes
from bench.host.workloads.base import NotVerifiedError, Saved, Workload
from bench.host.writers import make_writer
from bench.host.writers.base import Writer, WriterContext, logical_block_bytes
from bench.plan import Case


class SavedObject(Workload):
    """One object, saved by the case's writer. A subclass says what the object is."""

    def __init__(self, case: Case, seed: int, folder: Path) -> None:
        self.case = case
        self.seed = seed
        options = case.options
        self.device = torch.device(f"cuda:{options.device}" if options.gpu else "cpu")
        self.writer: Writer = make_writer(
            case.writer,
            WriterContext(case.workload, options, self.device, folder, logical_block_bytes(folder)),
        )
        self.digest: str | None = None

    def build(self) -> Any:
        """Make the object on ``self.device``."""
        raise NotImplementedError

    def prepare(self) -> None:
        # The writer first: when this host can't run it, no time goes into data.
        self.writer.prepare()
        self.obj = self.build()
        self.writer.check(self.obj)
        self.payload_bytes = unique_storage_bytes(self.obj)

    def save(self, target: Path) -> Saved:
        self.target = target
        return self.writer.save(self.obj, target)

    def verify(self, saved: Saved) -> None:
        self.digest = self.writer.verify(self.obj, saved)

    def close(self) -> None:
        self.writer.close()


class TensorWorkload(SavedObject):
    """A one-dimensional uint8 tensor of ``options.size_bytes`` incompressible bytes."""

    def build(self) -> torch.Tensor:
        from bench.host.randomness import fill_random_

        tensor = torch.empty(self.case.options.size_bytes, dtype=torch.uint8, device=self.device)
        fill_random_(tensor, self.seed)
        return tensor


class ModelWorkload(SavedObject):
    """The state of a Hugging Face model, and of its optimizer with ``options.optimizer``."""

    def build(self) -> Any:
        from bench.host.models import build_model, make_optimizer

        options = self.case.options
        dtype = torch.float16 if options.half else torch.float32
        self.model = build_model(options.model, self.seed, dtype, self.device, options.pretrained)
        if not options.optimizer:
            return self.model.state_dict()
        optimizer = make_optimizer(self.model, fused=options.fused, seed=self.seed)
        return {"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}


class RoundtripWorkload(ModelWorkload):
    """Save a model, scramble it, load the checkpoint with weights_only, and get the same model back.

    On top of the bytes on the drive: every tensor bit-equal after ``load_state_dict`` and every logit equal.
    """

    def verify(self, saved: Saved) -> None:
        from bench.host.randomness import fill_weights_

        super().verify(saved)
        nested = self.case.options.optimizer
        original = self.obj["model"] if nested else self.obj
        loaded = self.writer.load(self.target)
        weights = loaded["model"] if nested else loaded
        compare(dict(sorted(original.items())), dict(sorted(weights.items())), "loaded model")
        before = self._logits()
        # Other weights first: on a model that still holds the right ones this check could not fail.
        fill_weights_(self.model, self.seed + 1)
        if torch.equal(self._logits(), before):
            raise NotVerifiedError("the logits did not change when the weights were scrambled: nothing is proved")
        self.model.load_state_dict(weights)
        if not torch.equal(self._logits(), before):
            raise NotVerifiedError("the logits of the loaded model differ from those of the saved one")

    def _logits(self) -> torch.Tensor:
        from bench.host.models import logits, model_inputs

        return logits(self.model, model_inputs(self.model, self.seed))
