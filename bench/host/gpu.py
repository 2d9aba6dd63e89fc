"""One GPU for one case, or clear words why not."""

from __future__ import annotations

import os


class GpuError(ValueError):
    """The GPU can't be used by torch; the message says why and what to do."""


def count_as_nvidia_smi_does() -> None:
    """Number GPUs by their PCI address, as nvidia-smi and its users do; before torch starts CUDA."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def take(device: int) -> None:
    """Make ``device`` this process's GPU, so that pinned memory and DeepSpeed's ops touch no other.

    Raises GpuError where torch has no CUDA, finds no driver, or knows no such device.
    """
    import torch

    if torch.version.cuda is None:
        raise GpuError(
            f"torch {torch.__version__} is built without CUDA; install the CUDA build (make provision does), "
            "or leave out --gpu"
        )
    try:
        torch.cuda.init()
    except RuntimeError as error:
        words = str(error).strip().splitlines()
        raise GpuError(
            f"torch {torch.__version__} for CUDA {torch.version.cuda} can't use a GPU here: {words[0]}; look at "
            "nvidia-smi, or leave out --gpu"
        ) from error
    count = torch.cuda.device_count()
    if device >= count:
        raise GpuError(f"--device {device} is not there: torch sees {count} GPUs, counted from 0")
    torch.cuda.set_device(device)
