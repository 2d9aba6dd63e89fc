"""The best that plain torch.save can do without a patch: zip, no CRC, pinned copies from the GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.host.workloads.base import Saved
from bench.host.writers.torch_save import TorchSaveZip


class TorchSaveTuned(TorchSaveZip):
    """``torch.save`` in the zip format with the settings of torch that make it faster, where this torch has them.

    ``set_crc32_options`` is in torch >= 2.6, ``use_pinned_memory_for_d2h`` in torch >= 2.7 and of use for
    data on a GPU only. Both are global, so they are put back after every save.
    """

    def save(self, obj: Any, path: Path) -> Saved:
        with tuned(pinned_copies=self.context.device.type == "cuda") as settings:
            saved = super().save(obj, path)
        saved.statistics = settings
        return saved


@contextmanager
def tuned(pinned_copies: bool) -> Iterator[dict[str, bool]]:
    """torch's settings for quick zip saves inside the block; yields which of them this torch has and took."""
    settings = {"crc32": True, "pinned_copies": False}
    with ExitStack() as restore:
        if hasattr(torch.serialization, "set_crc32_options"):
            restore.callback(torch.serialization.set_crc32_options, torch.serialization.get_crc32_options())
            torch.serialization.set_crc32_options(False)
            settings["crc32"] = False
        config = _save_config() if pinned_copies else None
        if config is not None:
            restore.callback(setattr, config, "use_pinned_memory_for_d2h", config.use_pinned_memory_for_d2h)
            config.use_pinned_memory_for_d2h = True
            settings["pinned_copies"] = True
        yield settings


def _save_config() -> Any | None:
    """torch's settings of torch.save, None where this torch has no pinned copies."""
    try:
        config = importlib.import_module("torch.utils.serialization.config")
    except ImportError:
        return None
    return config.save if hasattr(config.save, "use_pinned_memory_for_d2h") else None
