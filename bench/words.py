"""Sizes, rates, durations and other people's text, as people read them. The one place that prints them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.plan import GIB, Options

# Options that benchmark_words has words for, or that change nothing of what is measured.
_NAMED_OPTIONS = frozenset(
    ("size_bytes", "model", "pretrained", "half", "optimizer", "fused", "zero_stage", "cpu_offload", "gpu", "device",
     "zipfile", "statistics")
)  # fmt: skip


def size_words(count: int) -> str:
    """Bytes as people read them: ``14.2 GiB``, ``256 MiB``."""
    for unit, name in ((GIB, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if count >= unit:
            value = count / unit
            return f"{value:.{2 if value < 10 and count % unit else 1 if value < 100 and count % unit else 0}f} {name}"
    return f"{count} B"


def gib_per_second(rate: float) -> str:
    """A rate in bytes per second as people read it, three digits: ``17.9 GiB/s``."""
    value = rate / GIB
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} GiB/s"


def duration(seconds: float) -> str:
    """Seconds as ``42 s``, ``3:12`` min or ``2:05:00`` h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plain(text: Any, limit: int = 500) -> str:
    """Somebody else's text made safe for a terminal and a table: one line, no control characters, bounded."""
    words = "".join(char if char.isprintable() else " " for char in str(text)[: 4 * limit])
    words = " ".join(words.split())
    return words if len(words) <= limit else words[: limit - 1] + "…"


def benchmark_words(workload: str, options: Mapping[str, Any], size_bytes: int = 0) -> str:
    """What the rows of one benchmark have in common: ``engine tiny-t5 half, optimizer, ZeRO 1, GPU, 208 MiB``.

    ``options``: those of a plan or of somebody's report; what is left out has its default.
    """
    first = [plain(workload, 12)]
    if workload != "tensor":
        name = options.get("pretrained") or options.get("model") or Options.model_fields["model"].default
        first += [plain(name, 60), "half" if options.get("half") else "fp32"]
    words = [" ".join(first)]
    if options.get("optimizer"):
        words.append("fused optimizer" if options.get("fused") else "optimizer")
    if workload == "engine":
        words.append(f"ZeRO {plain(options.get('zero_stage') or 0, 4)}")
    if options.get("cpu_offload"):
        words.append("offload")
    if options.get("gpu"):
        words.append(f"GPU {plain(options['device'], 4)}" if options.get("device") else "GPU")
    if options.get("zipfile"):
        words.append("zip format")
    words += [
        f"{plain(name, 24)} {plain(value, 24)}"
        for name, value in options.items()
        if name not in _NAMED_OPTIONS and value is not None
    ]
    if size_bytes:
        words.append(size_words(size_bytes))
    return ", ".join(words)
