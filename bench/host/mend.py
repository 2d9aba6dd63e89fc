"""Give the fragments of a DeepSpeed checkpoint the names that ``load_checkpoint`` looks for.

DeepSpeed's fast writer adds ``-RANK.WRITERS`` to a file's name. With one writer the fragment ``-0.1``
is the complete file; with more of them each is a part, and no renaming makes them whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from bench.host.clock import fsync_path

_FRAGMENT = re.compile(r"^(?P<name>.+\.pt)-(?P<rank>\d+)\.(?P<writers>\d+)$")


class MendError(ValueError):
    """A checkpoint that renaming would not mend; the message says why. Nothing was renamed."""


def plan_renames(files: Iterable[Path]) -> dict[Path, Path]:
    """New names for the complete fragments among ``files``, which are all files of a checkpoint.

    Raises MendError where a fragment is one of several, or its new name is taken.
    """
    present = set(files)
    renames: dict[Path, Path] = {}
    for path in sorted(present):
        fragment = _FRAGMENT.match(path.name)
        if fragment is None:
            continue
        if (fragment["rank"], fragment["writers"]) != ("0", "1"):
            raise MendError(
                f"{path} is one of {fragment['writers']} parts that as many ranks wrote; "
                "parts can't be mended by renaming"
            )
        target = path.with_name(fragment["name"])
        if target in present:
            raise MendError(
                f"{target} is there beside {path.name}; two saves went into one folder, so say which is right "
                "by removing the other"
            )
        renames[path] = target
    return renames


def mend_checkpoint(folder: Path, dry_run: bool = False) -> dict[Path, Path]:
    """Rename the fragments below ``folder`` and make the new names durable; returns old and new names.

    Looks at all files before the first rename; never replaces a file. Doing it again changes nothing.
    Raises MendError, FileNotFoundError, and OSError where a rename fails.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint folder {folder}")
    renames = plan_renames(path for path in folder.rglob("*") if path.is_file())
    if dry_run:
        return renames
    for old, new in renames.items():
        # A link fails where the name was taken meanwhile, a rename would replace it.
        try:
            os.link(old, new)
        except FileExistsError as error:
            raise MendError(f"{new} has appeared while {folder} was mended; is a save going on there?") from error
        old.unlink()
    for parent in {new.parent for new in renames.values()}:
        fsync_path(parent)
    return renames
