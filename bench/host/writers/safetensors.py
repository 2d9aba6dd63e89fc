"""The safetensors format: a JSON header and the tensors' bytes, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.host.verify import compare, drop_cache, file_sha256
from bench.host.workloads.base import Saved, SkipCaseError
from bench.host.writers.base import Writer

ALIASES = "aliases"


class Safetensors(Writer):
    """``safetensors.torch.save_file`` of the distinct tensors; names that share one are kept as aliases.

    The format refuses tensors that share memory (tied weights), so each is stored once and the header's
    metadata says which other names mean it.
    """

    def check(self, obj: Any) -> None:
        flatten(obj)

    def save(self, obj: Any, path: Path) -> Saved:
        from safetensors.torch import save_file

        tensors, aliases = split_shared(flatten(obj))
        save_file(tensors, path, metadata={ALIASES: json.dumps(aliases)})
        return Saved(files=[path])

    def verify(self, obj: Any, saved: Saved) -> str | None:
        (path,) = saved.files
        drop_cache(path)
        compare(flatten(obj), self.load(path))
        return file_sha256(path)

    def load(self, path: Path) -> Any:
        from safetensors import safe_open

        with safe_open(path, framework="pt", device="cpu") as file:
            loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            aliases = json.loads(file.metadata()[ALIASES])
        loaded.update({alias: loaded[name] for alias, name in aliases.items()})
        return dict(sorted(loaded.items()))


def flatten(obj: Any) -> dict[str, torch.Tensor]:
    """A sorted mapping of dotted names to tensors; raises SkipCaseError for what the format can't hold."""
    found: dict[str, torch.Tensor] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name or "tensor"] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, f"{name}.{key}" if name else str(key))
        else:
            raise SkipCaseError(
                f"safetensors holds only named tensors; {name or 'the object'} is a {type(value).__name__}"
            )

    walk(obj, "")
    return dict(sorted(found.items()))


def split_shared(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each distinct tensor once, and for every further name of one the name that it is stored under."""
    seen: dict[Any, str] = {}
    distinct: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        identity = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if identity in seen:
            aliases[name] = seen[identity]
        else:
            seen[identity] = name
            distinct[name] = _own_memory(tensor)
    return distinct, aliases


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    # safetensors 0.6 stores a lazy conjugate's bytes and forgets that they mean the conjugate.
    plain = tensor.resolve_conj().resolve_neg()
    whole = plain.is_contiguous() and plain.untyped_storage().nbytes() == plain.numel() * plain.element_size()
    return plain if whole else plain.clone(memory_format=torch.contiguous_format)
