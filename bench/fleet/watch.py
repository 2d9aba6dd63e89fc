"""The live view: what every host of a run is doing, from the small status file each of them keeps.

:class:`View` and the functions of it are pure; :class:`Watcher` polls. A watcher holds nothing that a
run needs: it can be killed and started again at any time, on the same results folder.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Literal, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bench import layout
from bench.fleet.collect import MAX_STATUS_BYTES, not_started
from bench.fleet.inventory import InventoryError, Target
from bench.fleet.ssh import (
    Connector,
    HostKeyRefusedError,
    HostUnreachableError,
    LoginRefusedError,
    Remote,
    RemoteError,
    is_alive,
)
from bench.fleet.store import Start
from bench.results import ReportError, RunStatus, parse_status
from bench.words import duration, gib_per_second, plain

POLL_SECONDS = 2.0
POLLS_AT_ONCE = 64
# Asking a lost host can take as long as a connection takes to time out.
LOST_EVERY_SECONDS = 10.0
# A host that was lost is waited for this long before the others' results are collected without it.
PATIENCE_SECONDS = 300.0
# A running benchmark writes its status at least every 2 s.
SILENT_SECONDS = 30.0
# In a pipe, a host whose case and repetition did not change gets a line this often.
PLAIN_EVERY_SECONDS = 30.0

State = Literal["waiting", "running", "finished", "failed", "lost"]
# Order in the view: what needs a look first.
ORDER: dict[str, int] = {"failed": 0, "lost": 1, "running": 2, "waiting": 3, "finished": 4}


@dataclass(frozen=True)
class View:
    """What is known of one host. ``heard`` and ``changed`` are monotonic seconds of this machine."""

    host: str
    state: State = "waiting"
    reason: str | None = None
    status: RunStatus | None = None
    heard: float = 0.0
    changed: float = 0.0

    @property
    def progress(self) -> float:
        return self.status.progress if self.status else 0.0


def heard(view: View, status: RunStatus, now: float) -> View:
    """The view after a status was read."""
    changed = now if status != view.status else view.changed
    state: State = "running"
    reason = None
    if status.state == "finished":
        state = "finished"
    elif status.state in ("failed", "interrupted"):
        state, reason = "failed", plain(status.reason or status.state)
    elif now - changed > SILENT_SECONDS:
        reason = f"no sign of life for {now - changed:.0f} s"
    return replace(view, state=state, reason=reason, status=status, heard=now, changed=changed)


def lost(view: View, reason: str) -> View:
    """The view after the host could not be reached."""
    return replace(view, state="lost", reason=plain(reason))


def done(views: Iterable[View], now: float, patience: float) -> bool:
    """Whether there is nothing left to wait for: all ended, or lost for longer than ``patience`` seconds."""
    return all(
        view.state in ("finished", "failed") or (view.state == "lost" and now - view.heard > patience) for view in views
    )


def sort_key(view: View) -> tuple[int, float, str]:
    """Failed first, then lost, then running with the slowest in front."""
    return ORDER[view.state], view.progress, view.host


def screen(views: Sequence[View], width: int, height: int) -> list[str]:
    """The view in at most ``height`` lines of at most ``width`` characters: a summary, then hosts, then a count."""
    lines = [summary(views)[:width]]
    ordered = sorted(views, key=sort_key)
    room = max(1, height - 1)
    shown = ordered if len(ordered) <= room else ordered[: room - 1]
    names = min(max((len(view.host) for view in shown), default=4), max(8, width // 4))
    lines += [host_line(view, names, width) for view in shown]
    rest = ordered[len(shown) :]
    if rest:
        counts = ", ".join(f"{number} {state}" for state, number in _counts(rest).items())
        lines.append(f"and {len(rest)} more: {counts}"[:width])
    return lines


def summary(views: Sequence[View]) -> str:
    """One line for the fleet."""
    counts = ", ".join(f"{number} {state}" for state, number in _counts(views).items())
    left = [
        view.status.seconds_left
        for view in views
        if view.state == "running" and view.status and view.status.seconds_left
    ]
    share = sum(1.0 if view.state in ("finished", "failed") else view.progress for view in views) / max(1, len(views))
    time_left = f", about {duration(max(left))} left" if left else ""
    return f"{len(views)} host{'s' if len(views) != 1 else ''}: {counts}; {share:.0%} done{time_left}"


def host_line(view: View, name_width: int, width: int) -> str:
    """One line for a host: bar, case, repetition, last rate, time left; the less room, the fewer of them."""
    name = view.host if len(view.host) <= name_width else view.host[: name_width - 1] + "…"
    line = f"{name:<{name_width}} {bar(view.progress, 20 if width >= 100 else 8)} {view.progress:4.0%} "
    if view.state != "running" or view.status is None:
        return f"{line}{view.state}{': ' + view.reason if view.reason else ''}"[:width]
    status = view.status
    words = [plain(status.case or status.state, 40)]
    if status.phase:
        words.append(plain(status.phase, 10))
    if status.repetition and status.repetitions:
        words.append(f"{status.repetition}/{status.repetitions}")
    if status.last_bytes_per_second:
        words.append(gib_per_second(status.last_bytes_per_second))
    if status.seconds_left is not None:
        words.append(f"{duration(status.seconds_left)} left")
    if status.cases_failed:
        words.append(f"{status.cases_failed} failed")
    if view.reason:
        words.append(view.reason)
    return (line + "  ".join(words))[:width]


def bar(share: float, width: int) -> str:
    """A progress bar of ``width`` characters."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "·" * (width - full)


class Watcher:
    """Polls every host's status, many at once, each over a connection that is kept.

    A host that does not answer holds up no other: it is asked in the background, and lost ones less often.
    """

    def __init__(self, targets: Sequence[Target], starts: dict[str, Start], connect: Connector) -> None:
        now = time.monotonic()
        self._targets = {target.name: target for target in targets}
        self._starts = starts
        self._connect = connect
        self._remotes: dict[str, Remote] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=POLLS_AT_ONCE)
        self._asked: dict[str, Future[View]] = {}
        self._ask_again: dict[str, float] = {}
        self.views = {target.name: _first_view(target.name, starts.get(target.name), now) for target in targets}

    def poll(self, seconds: float = POLL_SECONDS) -> None:
        """Ask every host that still has something to say, and take the answers that come within ``seconds``."""
        now = time.monotonic()
        for view in self.views.values():
            waiting = view.host in self._asked or now < self._ask_again.get(view.host, now)
            if view.state not in ("finished", "failed") and not waiting:
                self._asked[view.host] = self._pool.submit(self._ask, view)
        answered, _ = wait(self._asked.values(), timeout=seconds)
        for host in [host for host, future in self._asked.items() if future in answered]:
            view = self._asked.pop(host).result()
            self.views[host] = view
            if view.state in ("finished", "failed", "lost"):
                self._hang_up(host)
            if view.state == "lost":
                self._ask_again[host] = time.monotonic() + LOST_EVERY_SECONDS

    def close(self) -> None:
        """Close all connections; what is still asked then is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for host in list(self._remotes):
            self._hang_up(host)

    def _ask(self, view: View) -> View:
        try:
            return self._look(view)
        except FileNotFoundError:
            folder = self._starts[view.host].run_folder
            after = replace(view, state="failed", reason=f"there is no run in {folder} any more")
        except (HostKeyRefusedError, LoginRefusedError) as error:
            after = replace(view, state="failed", reason=plain(error))
        except (HostUnreachableError, InventoryError) as error:
            after = lost(view, str(error))
        except (RemoteError, ReportError, OSError) as error:
            after = replace(view, state="failed", reason=plain(error))
        except Exception as error:  # a server that is not OpenSSH can make paramiko raise anything
            after = lost(view, f"{type(error).__name__}: {error}")
        return after

    def _look(self, view: View) -> View:
        remote = self._remotes.get(view.host)
        if remote is None:
            remote = self._connect(self._targets[view.host])
            with self._lock:
                self._remotes[view.host] = remote
        raw = remote.read(f"{self._starts[view.host].run_folder}/{layout.STATUS_FILE}", MAX_STATUS_BYTES)
        status = parse_status(raw, layout.STATUS_FILE)
        after = heard(view, status, time.monotonic())
        silent = after.state == "running" and after.reason is not None
        if silent and is_alive(remote, status.pid, status.run_id) is False:
            gone = f"the benchmark's process (pid {status.pid}) is gone without a report"
            return replace(after, state="failed", reason=gone)
        return after

    def _hang_up(self, host: str) -> None:
        remote = self._remotes.pop(host, None)
        if remote is not None:
            remote.close()


def watch(watcher: Watcher, patience: float = PATIENCE_SECONDS, stream: TextIO = sys.stdout) -> None:
    """Show the run until it has ended everywhere: redrawn in a terminal, lines in a pipe."""
    try:
        if stream.isatty():
            _redraw(watcher, patience, stream)
        else:
            _print_lines(watcher, patience, stream)
    finally:
        watcher.close()


def _redraw(watcher: Watcher, patience: float, stream: TextIO) -> None:
    console = Console(file=stream, highlight=False)
    with Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop") as live:

        def draw() -> None:
            size = shutil.get_terminal_size()
            live.update(
                Text("\n".join(screen(list(watcher.views.values()), size.columns, size.lines - 1))),
                refresh=True,
            )

        _until_done(watcher, patience, draw)


def _print_lines(watcher: Watcher, patience: float, stream: TextIO) -> None:
    said: dict[str, tuple[object, float]] = {}

    def print_changes() -> None:
        now = time.monotonic()
        for view in sorted(watcher.views.values(), key=sort_key):
            what = (view.state, view.status and view.status.case, view.reason is not None)
            before, at = said.get(view.host, (None, now))
            if what != before or (view.state == "running" and now - at > PLAIN_EVERY_SECONDS):
                said[view.host] = (what, now)
                print(host_line(view, len(view.host), 200), file=stream, flush=True)

    _until_done(watcher, patience, print_changes)
    print(summary(list(watcher.views.values())), file=stream, flush=True)


def _until_done(watcher: Watcher, patience: float, show: Callable[[], None]) -> None:
    while True:
        began = time.monotonic()
        watcher.poll()
        show()
        if done(watcher.views.values(), time.monotonic(), patience):
            return
        time.sleep(max(0.1, POLL_SECONDS - (time.monotonic() - began)))


def _first_view(host: str, start: Start | None, now: float) -> View:
    missing = not_started(host, start)
    if missing is not None:
        return View(host, state="failed", reason=missing.reason, heard=now, changed=now)
    return View(host, heard=now, changed=now)


def _counts(views: Iterable[View]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for view in sorted(views, key=lambda view: ORDER[view.state]):
        counts[view.state] = counts.get(view.state, 0) + 1
    return counts
