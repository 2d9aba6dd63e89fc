"""Stop a run on its hosts and leave them clean."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bench import layout
from bench.fleet.collect import HOSTS_AT_ONCE, MAX_STATUS_BYTES, not_started
from bench.fleet.inventory import InventoryError, Target
from bench.fleet.ssh import Connector, Remote, RemoteError, is_alive
from bench.fleet.store import RunStore, Start
from bench.results import ReportError, parse_status
from bench.words import plain

# The benchmark ends its cases and removes half files within this time, else it is killed.
GRACE_SECONDS = 30.0


def cancel(store: RunStore, targets: Sequence[Target], connect: Connector) -> dict[str, tuple[bool, str]]:
    """Stop the run on every host: whether nothing of it runs there any more, and what was done, by host."""
    starts = store.starts()

    def one(target: Target) -> tuple[bool, str]:
        start = starts.get(target.name)
        if start is None or not_started(target.name, start) is not None:
            return True, "it was not started"
        try:
            remote = connect(target)
        except (RemoteError, InventoryError) as error:
            return False, plain(f"NOT stopped: {error}")
        try:
            return _cancel_host(remote, start, store.run_id)
        except (RemoteError, ReportError, OSError) as error:
            return False, plain(f"NOT stopped: {error}")
        finally:
            remote.close()

    with ThreadPoolExecutor(max_workers=max(1, min(HOSTS_AT_ONCE, len(targets)))) as pool:
        return dict(zip([target.name for target in targets], pool.map(one, targets), strict=True))


def _cancel_host(remote: Remote, start: Start, run_id: str) -> tuple[bool, str]:
    try:
        raw = remote.read(f"{start.run_folder}/{layout.STATUS_FILE}", MAX_STATUS_BYTES)
    except FileNotFoundError:
        return True, "there is no run on this host any more"
    status = parse_status(raw, layout.STATUS_FILE)
    if is_alive(remote, status.pid, run_id) is not True:
        _remove_half_files(remote, start)
        return True, f"it had ended before ({status.state})"
    for signal, seconds in (("TERM", GRACE_SECONDS), ("KILL", 5.0)):
        remote.run(["kill", "-s", signal, "--", str(status.pid)])
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if is_alive(remote, status.pid, run_id) is not True:
                _remove_half_files(remote, start)
                return True, "stopped" if signal == "TERM" else "killed: it did not stop by itself"
            time.sleep(0.2)
    return False, f"NOT stopped: pid {status.pid} does not end, which points at a drive that does not answer"


def _remove_half_files(remote: Remote, start: Start) -> None:
    """Remove the run's own folder of checkpoints, which a run that could clean up has removed already."""
    if start.work_folder:
        code, words = remote.run(["rm", "-rf", "--", start.work_folder])
        if code:
            raise RemoteError(f"the run has ended, but its files could not be removed: {words.strip()}")
