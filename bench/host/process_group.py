"""A process group of one, for engines and optimizers that insist on one.

Gloo for the CPU, NCCL for a GPU. The store lives in this process, so nothing is listened on, no port
is taken and no other host is asked; gloo itself is bound to the loopback interface.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# RANK and friends are read by torch and DeepSpeed, CROSS_* by DeepSpeed's checkpoint writers.
_ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_SIZE": "1",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


@contextmanager
def single_process_group(gpu: bool = False, device: int = 0) -> Iterator[str]:
    """Make this process rank 0 of 1 while the block runs; yields the backend's name.

    ``device`` is the GPU's index. A group that exists already is used and left in place. Environment
    variables that the group needs are set for the block and put back after it.
    """
    import torch
    import torch.distributed as dist

    with _environment(device if gpu else 0):
        if dist.is_initialized():
            yield dist.get_backend()
            return
        backend = "nccl" if gpu else "gloo"
        if gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield backend
        finally:
            _destroy()


@contextmanager
def _environment(device: int) -> Iterator[None]:
    wanted = {**_ENVIRONMENT, "LOCAL_RANK": str(device)}
    if "MASTER_PORT" not in os.environ:
        wanted["MASTER_PORT"] = str(_free_port())
    if "GLOO_SOCKET_IFNAME" not in os.environ and os.path.exists("/sys/class/net/lo"):
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _free_port() -> int:
    # Nothing of ours listens there; launch-time checks only want the variable to hold a usable port.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _destroy() -> None:
    """End the group, through DeepSpeed where it uses it: it keeps handles on groups beyond their end."""
    import torch.distributed as dist

    comm: Any = sys.modules.get("deepspeed.comm.comm")
    if comm is not None and comm.cdb is not None:
        comm.destroy_process_group()
        comm.cdb = None
    if dist.is_initialized():
        dist.destroy_process_group()
