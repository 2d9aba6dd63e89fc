"""What a run says while it goes on: status.json for the controller, a live line for a person, lines for a log."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from bench.results import RunStatus, utc_now, write_json
from bench.words import gib_per_second

HEARTBEAT_SECONDS = 2.0


class RunProgress:
    """One run's state, written to ``status_file`` at every change and at least every two seconds.

    On a terminal it draws one bar; elsewhere it prints one plain line a finished case.
    """

    def __init__(self, status_file: Path, log_file: Path, run_id: str, host: str, console: Console) -> None:
        self._file = status_file
        self._console = console
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._started = time.monotonic()
        now = utc_now()
        self._status = RunStatus(
            run_id=run_id, host=host, pid=os.getpid(), state="starting", started_at=now, updated_at=now
        )
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log: TextIO = log_file.open("a", encoding="utf-8", buffering=1)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep status.json fresh, and the bar drawn, for the block."""
        heartbeat = threading.Thread(target=self._beat, daemon=True)
        heartbeat.start()
        try:
            if not self._console.is_terminal:
                yield
                return
            columns = (
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:3.0f} %"),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(compact=True),
            )
            with Progress(*columns, console=self._console, transient=True) as bar:
                self._bar, self._task = bar, bar.add_task("starting", total=1.0)
                yield
        finally:
            self._bar = None
            self._stop.set()
            heartbeat.join()
            self._log.close()

    def update(self, **changes: Any) -> None:
        """Change fields of the status and write it."""
        with self._lock:
            for name, value in changes.items():
                setattr(self._status, name, value)
            share = self._status.progress
            elapsed = time.monotonic() - self._started
            self._status.seconds_left = elapsed / share * (1 - share) if share > 0.02 else None
            self._write()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=share, description=self._describe())

    def say(self, line: str) -> None:
        """One line for the person and for the log."""
        self._log.write(line + "\n")
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def note(self, line: str) -> None:
        """One line for the log only."""
        self._log.write(line + "\n")

    def _describe(self) -> str:
        status = self._status
        parts = [status.case or "starting"]
        if status.phase:
            parts.append(status.phase)
        if status.repetition is not None:
            parts.append(f"{status.repetition}/{status.repetitions}")
        if status.last_bytes_per_second:
            parts.append(gib_per_second(status.last_bytes_per_second))
        return "  ".join(parts)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with self._lock:
                self._write()

    def _write(self) -> None:
        self._status.updated_at = utc_now()
        write_json(self._file, self._status)
