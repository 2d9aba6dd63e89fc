"""A throwaway site-packages with a serialization.py of torch's shape (own text)."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
HOOK = (CHECKOUT / "patches" / "legacy_save_hook.py.txt").read_text(encoding="utf-8")

SOURCE = b'''"""Stand-in: saves names first, then one storage after the other."""


def _legacy_save(obj, f, pickle_module, pickle_protocol) -> None:
    serialized_storages = {}
    for name in obj:
        serialized_storages[name] = (obj[name], "uint8")
    serialized_storage_keys = sorted(serialized_storages.keys())
    f.write(b"names;")

    def unrelated():
        for key in serialized_storage_keys:
            yield key

    # the last loop
    for key in serialized_storage_keys:
        storage, dtype = serialized_storages[key]
        f.write(storage)


def save(obj, f):
    for _ in range(1):
        _legacy_save(obj, f, None, 2)
'''


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def build(root: Path, version: str = "2.6.0+cu124", source: bytes = SOURCE, recorded: bytes | None = SOURCE) -> Path:
    """Make <root>/venv with a fake torch; returns the path of serialization.py.

    ``recorded`` is what the wheel's RECORD has hashed, None leaves the RECORD out. The venv's python is a
    dangling link: nothing may depend on running it.
    """
    packages = root / "venv" / "lib" / "python3.11" / "site-packages"
    torch = packages / "torch"
    (torch / "__pycache__").mkdir(parents=True)
    (root / "venv" / "bin").mkdir()
    (root / "venv" / "bin" / "python").symlink_to("/nonexistent/python")
    (torch / "version.py").write_text(f"from typing import Optional\n__version__ = {version!r}\ndebug = False\n")
    (torch / "serialization.py").write_bytes(source)
    for name in (
        "serialization.cpython-311.pyc",
        "serialization.cpython-311.opt-1.pyc",
        "storage.cpython-311.pyc",
    ):
        (torch / "__pycache__" / name).write_bytes(b"compiled")
    if recorded is not None:
        write_record(packages, version, recorded)
    return torch / "serialization.py"


def write_record(packages: Path, version: str, recorded: bytes) -> None:
    info = packages / f"torch-{version.split('+', 1)[0]}.dist-info"
    info.mkdir(exist_ok=True)
    encoded = base64.urlsafe_b64encode(hashlib.sha256(recorded).digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(
        f"torch/jit/serialization.py,sha256=AAAA,1\ntorch/serialization.py,sha256={encoded},{len(recorded)}\n"
    )


def bytecode(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path.parent / "__pycache__").iterdir())
