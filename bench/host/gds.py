"""GPUDirect Storage told apart: used, emulated through host memory, or not possible. Imports no torch.

cuFile falls back to copies through host memory without a word (its compatibility mode), and DeepSpeed's
gds op ends its process from C++ when cuFile refuses. So a row says what happened, in three ways:

- the kernel module nvidia-fs counted writes during the save: ``gds``;
- it counted none, or is not there, and the save succeeded all the same: ``gds-compat``;
- the process ended with cuFile's refusal: :func:`explain_end` makes that a skipped or a failed row.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from bench.results import Status

STATS = Path("/proc/driver/nvidia-fs/stats")
GUIDE = "docs/gds.md"
# What DeepSpeed's gds op prints before it ends the process (csrc/gds, 0.19.8); cuFile's own words follow.
REFUSALS = ("file register error:", "buffer register failed:")
# cuFile's words for a file that is on a filesystem or drive which GDS does not know.
NOT_FOR_THIS_FILE = ("not supported on current file", "unsupported file")


@dataclass(frozen=True)
class Counters:
    """What nvidia-fs has counted since it was loaded: writes that went well, and whether it counts at all."""

    writes: int
    enabled: bool


@dataclass(frozen=True)
class Mechanism:
    """How a row of ds_gds was really written: ``gds``, ``gds-compat``, and why it is called so."""

    name: str
    why: str


def read_counters(path: Path = STATS) -> Counters | None:
    """The counters of nvidia-fs, None where the module is not loaded or says nothing that is understood."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return parse_counters(text)


def parse_counters(text: str) -> Counters | None:
    """The line ``Writes : n=.. ok=..`` of /proc/driver/nvidia-fs/stats, and ``IO stats: Enabled``."""
    writes = re.search(r"^Writes\s*:.*?\bok=(\d+)", text, re.MULTILINE)
    if writes is None:
        return None
    switched_off = re.search(r"^IO stats:\s*Disabled", text, re.MULTILINE | re.IGNORECASE)
    return Counters(int(writes[1]), switched_off is None)


def mechanism(before: Counters | None, after: Counters | None, library: str | None) -> Mechanism:
    """Name what one save went through, from the counters around it and the library that answered for cuFile."""
    if library is not None and not re.match(r"libcufile\.so", os.path.basename(library)):
        return Mechanism("gds-compat", f"not NVIDIA's cuFile: {library} stands in for it")
    if before is None or after is None:
        return Mechanism("gds-compat", "nvidia-fs is not loaded, so cuFile copied through host memory")
    if after.writes > before.writes:
        return Mechanism("gds", f"nvidia-fs counted {after.writes - before.writes} writes")
    if not after.enabled:
        return Mechanism(
            "gds-compat",
            "nvidia-fs counts nothing, so nothing proves GDS; "
            "write 1 into /sys/module/nvidia_fs/parameters/rw_stats_enabled and run again",
        )
    return Mechanism("gds-compat", "nvidia-fs counted no write, so cuFile copied through host memory")


def loaded_library(maps: str | None = None) -> str | None:
    """The file that stands for cuFile in this process: an interposed library comes first, as the linker has it."""
    text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace") if maps is None else maps
    paths = {line.split(maxsplit=5)[5] for line in text.splitlines() if "cufile" in line and len(line.split()) > 5}
    libraries = sorted(path for path in paths if re.search(r"cufile[^/]*\.so", path) and "cufile_rdma" not in path)
    strangers = [path for path in libraries if not re.match(r"libcufile\.so", os.path.basename(path))]
    return next(iter(strangers + libraries), None)


def explain_end(words: str, module_loaded: bool) -> tuple[Status, str] | None:
    """Status and reason for a ds_gds process that ended by itself, from the end of its log; None for other ends.

    Skipped where this host or file can't do GDS; failed where nvidia-fs is loaded and cuFile refuses anyway.
    """
    lines = [line.strip() for line in words.splitlines()]
    refusal = next((line for line in lines if line.startswith(REFUSALS)), None)
    if refusal is None:
        return None
    if any(text in refusal for text in NOT_FOR_THIS_FILE):
        return "skipped", f"cuFile says {refusal!r}: this filesystem or drive has no GDS ({GUIDE})"
    if not module_loaded:
        return (
            "skipped",
            f"cuFile says {refusal!r}; nvidia-fs is not loaded here, and GDS needs it, a local NVMe drive with "
            f"ext4 or xfs, and a driver that registers the file ({GUIDE})",
        )
    return "failed", f"cuFile says {refusal!r} although nvidia-fs is loaded; run gdscheck -p ({GUIDE})"
