"""What must be said beside a row's figures, so that nobody takes them for something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.plan import FASTPERSIST_WRITERS, Case


def remarks(case: Case, statistics: Mapping[str, Any]) -> list[str]:
    """Sentences about a measured row, from its options and from what its writer counted."""
    return list(_remarks(case, statistics))


def _remarks(case: Case, statistics: Mapping[str, Any]) -> Iterator[str]:
    if case.options.zipfile and case.writer in FASTPERSIST_WRITERS:
        yield (
            "this is not FastPersist: torch's zip format never reaches the hook, so Python's writes were measured; "
            "leave out --zipfile"
        )
    because = statistics.get("mechanism_because")
    if statistics.get("mechanism") == "gds-compat":
        yield f"this is not GPUDirect Storage but gds-compat: {because}"
