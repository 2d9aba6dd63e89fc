"""Reports of hosts that do not exist, for what validates, judges and renders them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from bench.results import HostReport

RUN = "20261129T174442Z-3f9c"
BEGIN = datetime(2026, 11, 29, 17, 44, 42, tzinfo=timezone.utc)
GIB = 1024**3
PAYLOAD = 4 * GIB
CASES = [("model", "torch_save"), ("model", "ds_mock"), ("model", "ds_aio"), ("engine", "ds_aio")]
RATES = {"torch_save": 0.7, "ds_mock": 30.0, "ds_aio": 18.0}


def row(workload: str, writer: str, gib_per_second: float, **changes: Any) -> dict[str, Any]:
    """One row that is ok, with five counted samples around a rate."""
    rate = gib_per_second * GIB
    middle = PAYLOAD / rate
    samples = [{"ack_seconds": 0.9 * middle * k, "durable_seconds": middle * k} for k in (0.98, 0.99, 1, 1.01, 1.02)]
    return {
        "workload": workload,
        "writer": writer,
        "tag": f"test_{writer}",
        "status": "ok",
        "payload_bytes": PAYLOAD,
        "file_bytes": 0 if writer == "ds_mock" else PAYLOAD + 4096,
        "setup_seconds": 1.5,
        "samples": [{**samples[0], "warmup": True}, *samples],
        "durable_bytes_per_second": PAYLOAD / samples[2]["durable_seconds"],
        "spread": 0.04,
        "ceiling_share": rate / (21.4 * GIB),
        "verified": None if writer == "ds_mock" else True,
        "resumable": True if workload == "engine" else None,
        "statistics": {"storages": 12},
        **changes,
    }


def report(host: str = "gpu-node-1", speed: float = 1.0, **changes: Any) -> dict[str, Any]:
    """report.json of a host whose rows all worked, as data."""
    return {
        "schema_version": 1,
        "run_id": RUN,
        "host": host,
        "started_at": BEGIN.isoformat(),
        "finished_at": (BEGIN + timedelta(seconds=192)).isoformat(),
        "bench_version": "0.1.0",
        "plan": {"name": "standard"},
        "facts": {
            "kernel": "6.1.0",
            "cpu": "EPYC 9654",
            "cpu_count": 192,
            "memory_bytes": 1536 * GIB,
            "gpus": [{"name": "H200", "memory_bytes": 141 * GIB}] * 8,
            "drives": [{"name": f"nvme{n}n1", "model": "PM1743", "size_bytes": 3_840_755_982_336} for n in range(8)],
            "array": {"name": "ckpt", "level": "raid0", "chunk_bytes": 512 * 1024, "members": ["a", "b", "c", "d"]},
            "filesystem": {
                "type": "xfs", "source": "/dev/md127", "mount_point": "/mnt/nvme", "options": "rw,noatime",
                "size_bytes": 30 * 1024**4, "free_bytes": 29 * 1024**4,
            },
            "software": {"torch": "2.6.0", "deepspeed": "0.19.8", "python": "3.12.3"},
        },
        "patch": {"path": "/x/serialization.py", "torch_version": "2.6.0", "state": "patched", "sha256": "0" * 64},
        "ceiling": {"tool": "fio", "command": ["fio"], "write_bytes_per_second": 21.4 * GIB},
        "cases": [row(workload, writer, RATES[writer] * speed) for workload, writer in CASES],
        "time_spent": {"saves": 100.0, "verify": 52.0, "data": 20.0},
        **changes,
    }  # fmt: skip


def host_report(host: str = "gpu-node-1", speed: float = 1.0, **changes: Any) -> HostReport:
    """The same, validated."""
    return HostReport.model_validate(report(host, speed, **changes))
