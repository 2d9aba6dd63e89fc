"""How much a case will write and hold, known before torch is imported: for --dry-run and for preflight."""

from __future__ import annotations

from bench.host.models import parameter_count
from bench.plan import UNWRITTEN, Case

# An engine has Adam's two moments in fp32; ZeRO, and any half-precision training, keeps an fp32 master copy of the
# weights too. A model saved without an engine has moments of its weights' type and no such copy.
ADAM_BYTES_PER_PARAMETER = 8
MASTER_BYTES_PER_PARAMETER = 4
# A file is a little larger than its payload: pickle, size headers, zip records, block padding.
FILE_OVERHEAD = 1.02
FILE_OVERHEAD_BYTES = 16 * 1024**2
# A process with torch, DeepSpeed and transformers loaded, without data; measured 0.6 GB, rounded up.
PROCESS_BYTES = 1024**3
# What CUDA and its libraries take on top, on the host and on the GPU; an H200 under CUDA 13, rounded up.
CUDA_PROCESS_BYTES = 2 * 1024**3
CUDA_CONTEXT_BYTES = 1024**3


def payload_bytes(case: Case) -> int | None:
    """Bytes of tensors that one save of a case holds; None for a pretrained model, whose size is not known here."""
    options = case.options
    if case.workload == "tensor":
        return options.size_bytes
    if options.pretrained is not None:
        return None
    parameters = parameter_count(options.model)
    weights = parameters * (2 if options.half else 4)
    if not options.optimizer:
        return weights
    if case.workload != "engine":
        return 3 * weights
    partitioned = options.zero_stage > 0
    master = parameters * MASTER_BYTES_PER_PARAMETER if options.half or partitioned else 0
    if partitioned and options.zero_stage == 3:
        weights = 0  # ZeRO 3 keeps the master copy in place of the model's weights
    return weights + master + parameters * ADAM_BYTES_PER_PARAMETER


def file_bytes(case: Case) -> int:
    """Upper bound of the space that one save of a case takes; 0 when nothing is written or the size is not known."""
    if case.writer in UNWRITTEN:
        return 0
    return int((payload_bytes(case) or 0) * FILE_OVERHEAD) + FILE_OVERHEAD_BYTES


def memory_bytes(case: Case) -> int:
    """Host memory that one case's process holds while it waits and saves, from its payload and buffers."""
    options = case.options
    payload = payload_bytes(case) or 0
    # The engine holds gradients' and optimizer's space beside the model, a round trip what it loaded.
    copies = 2 if case.workload in ("engine", "roundtrip") else 1
    if options.gpu and not options.cpu_offload:
        copies -= 1
    process = PROCESS_BYTES + (CUDA_PROCESS_BYTES if options.gpu else 0)
    return copies * payload + options.io_buffer_bytes + process


def gpu_memory_bytes(case: Case) -> int:
    """GPU memory that one case's process holds, 0 for a case on the CPU."""
    options = case.options
    if not options.gpu:
        return 0
    # An engine has flat copies and gradients of its parameters beside what it saves.
    held = (payload_bytes(case) or 0) * (1.5 if case.workload == "engine" else 1)
    buffer = options.io_buffer_bytes if case.writer == "ds_gds" else 0
    return int(held) + buffer + CUDA_CONTEXT_BYTES
