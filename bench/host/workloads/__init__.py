"""What is saved: a raw tensor, a model, a DeepSpeed engine, a round trip."""

from __future__ import annotations

from pathlib import Path

from bench.host.workloads.base import Workload
from bench.plan import Case


def make_workload(case: Case, seed: int, folder: Path) -> Workload:
    """The workload of a case; imports torch, and DeepSpeed only for an engine."""
    if case.workload == "engine":
        from bench.host.workloads.engine import EngineWorkload

        return EngineWorkload(case, seed, folder)
    from bench.host.workloads import saved_object

    kinds = {
        "tensor": saved_object.TensorWorkload,
        "model": saved_object.ModelWorkload,
        "roundtrip": saved_object.RoundtripWorkload,
    }
    return kinds[case.workload](case, seed, folder)
