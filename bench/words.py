"""Sizes, rates, durations and other people's text, as people read them. The one place that prints them."""

from __future__ import annotations

from typing import Any

from bench.plan import GIB


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
