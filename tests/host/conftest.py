"""What the tests with real torch and DeepSpeed share: prebuilt ops, a folder on a real filesystem, the hook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benching import CHECKOUT, Bench, bench_environment

from bench import layout
from bench.host import hook, ops


@pytest.fixture(scope="session")
def runtime_root() -> Path:
    """The provisioned runtime that these tests run in."""
    return layout.default_runtime_root()


@pytest.fixture(scope="session")
def ready_ops(runtime_root: Path) -> None:
    """DeepSpeed's compiled ops in this process, and proof that torch's hook is live."""
    ops.activate(runtime_root)
    assert hook.hook_is_live(), "the test runtime's torch is not patched: make test-host provisions it"


@pytest.fixture
def bench(tmp_path: Path, runtime_root: Path) -> Bench:
    """Run ``bench`` as a user does, in its own process; the runs go below ``tmp_path``."""

    def run(*arguments: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bench", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=CHECKOUT,
            env=bench_environment(tmp_path, runtime_root, **environment),
            check=False,
        )

    return run
