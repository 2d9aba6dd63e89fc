"""How it is saved: one module a mechanism, all behind one interface."""

from __future__ import annotations

from bench.host.workloads.base import SkipCaseError
from bench.host.writers.base import Writer, WriterContext


def make_writer(name: str, context: WriterContext) -> Writer:
    """The writer with the id ``name`` (see bench.plan.WRITER_TAGS); its module is imported only now.

    Raises SkipCaseError for a writer that this workload has no form of.
    """
    if name in ("torch_save", "torch_save_zip"):
        from bench.host.writers.torch_save import TorchSave, TorchSaveZip

        return TorchSaveZip(context) if name == "torch_save_zip" else TorchSave(context)
    if name.startswith("ds_"):
        from bench.host.writers import deepspeed

        return deepspeed.WRITERS[name](context)
    if name == "safetensors":
        from bench.host.writers.safetensors import Safetensors

        return Safetensors(context)
    if name == "torch_save_tuned":
        from bench.host.writers.torch_save_tuned import TorchSaveTuned

        return TorchSaveTuned(context)
    if name == "direct":
        from bench.host.writers.direct import DirectWriter

        return DirectWriter(context)
    if name == "dcp":
        from bench.host.writers.dcp import Dcp

        return Dcp(context)
    raise SkipCaseError(f"the writer {name} has no form for the workload {context.workload}")
