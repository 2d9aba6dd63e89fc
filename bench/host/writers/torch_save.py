"""Plain torch.save to a path: the published baseline (legacy format) and torch's default (zip format)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.host.workloads.base import Saved
from bench.host.writers.base import Writer, WriterContext


class TorchSave(Writer):
    """``torch.save(obj, path)`` in the legacy format, or in the zip format with the option ``zipfile``."""

    def save(self, obj: Any, path: Path) -> Saved:
        torch.save(obj, path, _use_new_zipfile_serialization=self.context.options.zipfile)
        return Saved(files=[path])


class TorchSaveZip(TorchSave):
    """``torch.save(obj, path)`` as everybody calls it: the zip format."""

    def __init__(self, context: WriterContext) -> None:
        options = context.options.model_copy(update={"zipfile": True})
        super().__init__(
            WriterContext(context.workload, options, context.device, context.folder, context.logical_block_bytes)
        )
