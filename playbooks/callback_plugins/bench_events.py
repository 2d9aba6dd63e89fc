"""Writes what Ansible saw of each host into the run's start.jsonl, so that no targeted host is forgotten."""

from __future__ import annotations

import json
import os
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: bench_events
type: notification
short_description: Records each host's start, failure or unreachability as a line of JSON
description:
  - Appends to the file that the environment variable E(BENCH_EVENTS) names; does nothing without it.
options: {}
"""


class CallbackModule(CallbackBase):
    """One line a host and event; the last event of a host counts."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "bench_events"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._path = os.environ.get("BENCH_EVENTS", "")

    def v2_runner_on_ok(self, result: Any) -> None:
        """Where the benchmark will be on a host, and then that it runs there."""
        announced = result.result.get("ansible_facts", {}).get("__bench_run_places")
        if announced:
            self._add(result, "starting", announced)
        elif result.task.action == "bench_start":
            places = {key: result.result.get(key) for key in ("run_folder", "work_folder", "pid")}
            self._add(result, "started", places)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """A host on which some step failed."""
        if not ignore_errors:
            self._add(result, "failed", {"message": self._message(result), "busy": bool(result.result.get("busy"))})

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """A host that Ansible could not log in to."""
        self._add(result, "unreachable", {"message": str(result.result.get("msg", ""))})

    def _message(self, result: Any) -> str:
        message = str(result.result.get("msg") or result.result.get("stderr") or "failed without a message")
        return message if result.task.action == "bench_start" else f"{result.task.get_name()}: {message}"

    def _add(self, result: Any, event: str, more: dict[str, Any]) -> None:
        if not self._path:
            return
        line = json.dumps({"host": result.host.get_name(), "event": event, **more}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
