"""Modules of the roles, which are on no import path, for the tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROLES = Path(__file__).resolve().parents[1] / "roles"


def load(path: str) -> ModuleType:
    """The module at ``path`` below roles/, new at each call."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
