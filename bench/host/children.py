"""The parent's end of a case's process: start, command, listen with a time limit, kill."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.host import gds
from bench.host.child import CaseSpec
from bench.results import Status

KILL_WAIT_SECONDS = 10


class CaseEndedError(Exception):
    """The case's process can measure no more; carries the row's status and reason."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


class CaseProcess:
    """One case in a process group of its own, so that whatever it forks can be ended with it."""

    def __init__(self, spec: CaseSpec, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._writer = spec.case.writer
        receive, send = os.pipe()
        # The child's events leave through a descriptor of their own; it may land on any number here.
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.host.child", str(os.getpid()), str(send)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[send],
                bufsize=0,
                start_new_session=True,
            )
        os.close(send)
        self._receive = receive
        os.set_blocking(receive, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(receive, selectors.EVENT_READ)
        self._pending = b""
        self._write(spec.model_dump_json())

    def command(self, do: str, **arguments: Any) -> None:
        """Send one command; a child that is gone is noticed when its next event is awaited."""
        self._write(json.dumps({"do": do, **arguments}))

    def event(self, timeout: float) -> dict[str, Any]:
        """The next event. Raises CaseEndedError when the child ended, said so, or took over ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._pending:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                self.kill()
                raise CaseEndedError("timeout", f"took over {timeout:g} s and was ended{self._last_words()}")
            piece = os.read(self._receive, 65536)
            if not piece:
                raise self._end()
            self._pending += piece
        line, self._pending = self._pending.split(b"\n", 1)
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "ended":
            self.kill()
            raise CaseEndedError(event["status"], event["reason"])
        return event

    def stop(self) -> None:
        """Let the child release what it took, then end it."""
        self.command("stop")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_WAIT_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the child and all it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # It may be stuck in the kernel on a dead drive; then nothing more can be done from here.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_WAIT_SECONDS)
        if self._receive >= 0:
            self._selector.close()
            os.close(self._receive)
            self._receive = -1
        if self._process.stdin:
            self._process.stdin.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        # A child that is gone is noticed at its next event.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line.encode() + b"\n")

    def _end(self) -> CaseEndedError:
        self.kill()
        explained = gds.explain_end(self._end_of_log(), gds.STATS.exists()) if self._writer == "ds_gds" else None
        return CaseEndedError(*(explained or ("failed", self._how_it_died())))

    def _how_it_died(self) -> str:
        code = self._process.returncode
        if code is None:
            return "the case's process closed its events and could not be ended"
        if code < 0:
            name = signal.Signals(-code).name
            memory = "; out of memory? see dmesg" if -code == signal.SIGKILL else ""
            return f"the case's process was killed by {name}{memory}{self._last_words()}"
        return f"the case's process exited with code {code}{self._last_words()}"

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._end_of_log().splitlines() if line.strip()]
        return f"; its last words: {lines[-1][:300]}" if lines else ""

    def _end_of_log(self) -> str:
        """The last lines of the log, where a native exit leaves its message."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 2000))
            return file.read().decode(errors="replace")
