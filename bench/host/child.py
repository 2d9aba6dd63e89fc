"""One case in its own process: ``python -m bench.host.child PARENT_PID EVENTS_FD``.

The parent writes a :class:`CaseSpec` and then commands to standard input, a line of JSON each; events
go back the same way through the file descriptor ``EVENTS_FD``. Standard output and error belong to the
case's log: whatever a writer prints, forks or aborts with ends up there, never between the events.

A native exit, an abort, a deadlock or the OOM killer costs this process, and the parent one row.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from bench.host import gds, gpu
from bench.host.clock import Timing, settle, time_save
from bench.host.workloads.base import NotVerifiedError, Saved, SkipCaseError, Workload
from bench.plan import FASTPERSIST_WRITERS, UNWRITTEN, Case

PROBE_BYTES = 64 * 1024**2


class CaseSpec(BaseModel):
    """What a child needs: the case, the seed of its data, its folder for checkpoints, and the runtime root.

    ``hook_in_process`` installs torch's hook only inside the child, for hosts whose files must not change.
    """

    model_config = ConfigDict(extra="forbid")

    case: Case
    seed: int
    folder: Path
    root: Path
    hook_in_process: bool = False


class CaseFailedError(Exception):
    """The row has failed; the message is its reason."""


def main() -> None:
    """Serve one parent until it says stop or goes away."""
    _die_with_parent(int(sys.argv[1]))
    events = os.fdopen(int(sys.argv[2]), "w", buffering=1)
    spec = CaseSpec.model_validate_json(sys.stdin.readline())
    try:
        _Child(spec, events).serve(sys.stdin)
    except SkipCaseError as error:
        _tell(events, "ended", status="skipped", reason=str(error))
    except (CaseFailedError, NotVerifiedError, gpu.GpuError) as error:
        _tell(events, "ended", status="failed", reason=str(error))
    except Exception as error:
        traceback.print_exc()
        _tell(events, "ended", status="failed", reason=describe(error))
    # Threads of a writer that went wrong must not keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Child:
    def __init__(self, spec: CaseSpec, events: IO[str]) -> None:
        self.spec = spec
        self.events = events
        self.workload: Workload
        self.count = 0

    def serve(self, commands: IO[str]) -> None:
        for line in commands:
            command = json.loads(line)
            if command["do"] == "prepare":
                self.prepare()
            elif command["do"] == "sample":
                self.sample(check=command["check"])
            else:
                self.workload.close()
                return

    def prepare(self) -> None:
        seconds: dict[str, float] = {}
        started = time.perf_counter()
        from bench.host import hook, ops
        from bench.host.workloads import make_workload

        case = self.spec.case
        if case.options.gpu:
            gpu.count_as_nvidia_smi_does()
            gpu.take(case.options.device)
        if case.writer == "ds_gds":
            # DeepSpeed and cuFile leave their settings and log in the working directory.
            os.chdir(self.spec.folder)
        if case.writer.startswith("ds_") or case.workload == "engine" or case.options.fused:
            folder = ops.activate(self.spec.root)
            if case.writer == "ds_gds" and case.options.gpu and not ops.op_file(folder, "gds").exists():
                words = f"DeepSpeed's gds op is not built here: cuFile's headers or library were missing ({gds.GUIDE})"
                raise CaseFailedError(words) if gds.STATS.exists() else SkipCaseError(words)
        if self.spec.hook_in_process:
            hook.install_in_process()
        elif case.writer in FASTPERSIST_WRITERS and not case.options.zipfile and not hook.hook_is_live():
            raise CaseFailedError(
                "torch's serialization.py has no FastPersist hook, so this row would measure something else; "
                "run 'make provision', or give --no-patch to install the hook in this process only"
            )
        seconds["load"] = time.perf_counter() - started
        started = time.perf_counter()
        self.workload = make_workload(case, self.spec.seed, self.spec.folder)
        self.workload.prepare()
        seconds["data"] = time.perf_counter() - started
        _tell(self.events, "prepared", payload_bytes=self.workload.payload_bytes, seconds=seconds)

    def sample(self, check: bool) -> None:
        target = self.spec.folder / f"{self.spec.case.workload}-{self.spec.case.writer}-{self.count}.pt"
        self.count += 1
        if target.exists():
            raise CaseFailedError(f"{target} exists; a save into an older file could keep its tail")
        self.workload.arm(target)
        # Telling first: the parent's clock for the time limit starts, and its write to status.json is
        # settled before the save.
        _tell(self.events, "phase", phase="save")
        settled = settle(self.spec.folder)
        counted = gds.read_counters()
        try:
            saved, timing = self._save(target)
            self.workload.disarm()
            file_bytes = sum(path.stat().st_size for path in saved.files)
            self._check_size(saved, file_bytes)
            self._check_hook(saved)
            _tell(
                self.events,
                "sampled",
                ack_seconds=timing.ack_seconds,
                durable_seconds=timing.durable_seconds,
                settle_seconds=settled,
                file_bytes=file_bytes,
                statistics={**saved.statistics, **self._mechanism(counted)},
            )
            if check:
                self._check(saved)
        finally:
            _remove(target)

    def _save(self, target: Path) -> tuple[Saved, Timing]:
        try:
            return time_save(self.workload.save, target, self._synchronize)
        except SkipCaseError:
            raise
        except Exception as error:
            traceback.print_exc()
            # While the half file is still there: some writers' words do not say that the disk is full.
            cause = "" if isinstance(error, OSError) else _why_short(self.spec.folder, PROBE_BYTES)
            raise CaseFailedError(f"{describe(error)}{cause}") from error

    def _check(self, saved: Saved) -> None:
        if not self._writes():
            _tell(self.events, "checked", verified=None, resumable=None, resume_reason=None, sha256=None)
            return
        _tell(self.events, "phase", phase="verify")
        self.workload.verify(saved)
        _tell(self.events, "phase", phase="resume")
        resumable, reason = self.workload.resume(saved)
        _tell(
            self.events,
            "checked",
            verified=True,
            resumable=resumable,
            resume_reason=reason,
            sha256=getattr(self.workload, "digest", None),
        )

    def _mechanism(self, before: gds.Counters | None) -> dict[str, str]:
        """For a row of ds_gds: was it GPUDirect Storage?"""
        if self.spec.case.writer != "ds_gds":
            return {}
        found = gds.mechanism(before, gds.read_counters(), gds.loaded_library())
        return {"mechanism": found.name, "mechanism_because": found.why}

    def _writes(self) -> bool:
        return self.spec.case.writer not in UNWRITTEN

    def _check_size(self, saved: Saved, file_bytes: int) -> None:
        if not self._writes():
            return
        wanted = self.workload.payload_bytes if saved.promised_bytes is None else saved.promised_bytes
        exact = saved.promised_bytes is not None
        if file_bytes < wanted or (exact and file_bytes != wanted):
            cause = _why_short(self.spec.folder, wanted - file_bytes)
            raise CaseFailedError(
                f"the writer reported success, but {file_bytes} of {wanted} bytes are in the file{cause}"
            )

    def _check_hook(self, saved: Saved) -> None:
        case = self.spec.case
        if case.writer in FASTPERSIST_WRITERS and not case.options.zipfile and not saved.hook_storages:
            raise CaseFailedError(
                "no storage came through torch's hook: what was measured is Python's write, not FastPersist"
            )

    def _synchronize(self) -> None:
        if self.spec.case.options.gpu:
            import torch

            torch.cuda.synchronize(self.spec.case.options.device)


def describe(error: BaseException) -> str:
    """One line about an unexpected error: its type, its words, and the errno's name and file where it has one."""
    if isinstance(error, OSError) and error.errno is not None:
        import errno

        name = errno.errorcode.get(error.errno, str(error.errno))
        where = f": {error.filename}" if error.filename else ""
        return f"{name}: {error.strerror}{where}"
    words = str(error).strip().splitlines()
    if words and type(error).__module__.startswith("bench."):
        return words[0]  # our own errors are written for people
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


def _why_short(folder: Path, missing: int) -> str:
    """The errno that the writer dropped, found by writing as much again; empty when that works now."""
    probe = folder / ".probe"
    try:
        with probe.open("wb", buffering=0) as file:
            file.write(bytes(min(max(missing, 4096), PROBE_BYTES)))
            os.fsync(file.fileno())
    except OSError as error:
        return f" ({describe(error)})"
    finally:
        probe.unlink(missing_ok=True)
    return ""


def _remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
        return
    # DeepSpeed's engine adds a fragment's number to the name.
    for path in target.parent.glob(f"{target.name}*"):
        path.unlink()


def _tell(events: IO[str], event: str, **facts: Any) -> None:
    events.write(json.dumps({"event": event, **facts}) + "\n")


def _die_with_parent(parent: int) -> None:
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # gone before the kernel was told
        os._exit(1)


if __name__ == "__main__":
    main()
