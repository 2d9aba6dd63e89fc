"""Bring every host's report and logs to the controller, many at once, and trust none of them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from bench import layout, results
from bench.fleet.inventory import InventoryError, Target
from bench.fleet.ssh import Connector, FileTooLargeError, HostUnreachableError, Remote, RemoteError, is_alive
from bench.fleet.store import RunStore, Start, Targets
from bench.fleet.verdict import Digest, NoReport, digest, nonsense
from bench.words import plain

# A full plan's report is below 1 MiB; logs are cut at their beginning.
MAX_REPORT_BYTES = 32 * 1024**2
MAX_LOG_BYTES = 4 * 1024**2
MAX_STATUS_BYTES = 64 * 1024
HOSTS_AT_ONCE = 32
CONSOLE_FILE = "console.log"
LOG_FILES = (layout.LOG_FILE, CONSOLE_FILE)
ATTEMPTS = 3


@dataclass(frozen=True)
class Collected:
    """What came of one host: ``missing`` is None when its report is here."""

    host: str
    missing: NoReport | None = None


def collect(
    store: RunStore,
    targets: Sequence[Target],
    connect: Connector,
    said: Callable[[Collected], None] = lambda _: None,
    at_once: int = HOSTS_AT_ONCE,
) -> list[Collected]:
    """Fetch the reports of a run's hosts. One host's trouble never touches another."""
    starts = store.starts()

    def one(target: Target) -> Collected:
        found = Collected(target.name, _collect_host(store, target, starts.get(target.name), connect))
        said(found)
        return found

    with ThreadPoolExecutor(max_workers=max(1, min(at_once, len(targets)))) as pool:
        return list(pool.map(one, targets))


def _collect_host(store: RunStore, target: Target, start: Start | None, connect: Connector) -> NoReport | None:
    if store.report_file(target.name).is_file():
        return None  # a report is written once, when a run has ended
    never_started = not_started(target.name, start)
    if never_started is not None:
        return never_started
    assert start is not None
    assert start.run_folder is not None
    failure = NoReport(target.name, "not tried")
    for _ in range(ATTEMPTS):
        try:
            remote = connect(target)
        except (RemoteError, InventoryError) as error:
            return NoReport(target.name, plain(error), unreachable=True)
        try:
            return _fetch_host(store, target.name, start.run_folder, remote)
        except HostUnreachableError as error:  # broke in the middle: go on where it ended
            failure = NoReport(target.name, plain(error), unreachable=True)
        except Exception as error:  # a server that is not OpenSSH can make paramiko raise anything
            words = plain(error if isinstance(error, RemoteError | OSError) else f"{type(error).__name__}: {error}")
            return NoReport(target.name, f"its report cannot be fetched: {words}")
        finally:
            remote.close()
    return failure


def not_started(host: str, start: Start | None) -> NoReport | None:
    """Why a host has nothing to collect, from what Ansible saw; None for a host that was started."""
    if start is None:
        return NoReport(host, "it was never started: the controller stopped before its turn; `make run RETRY=last`")
    if start.event == "unreachable":
        return NoReport(host, plain(start.message or "Ansible could not log in"), unreachable=True)
    if not start.may_run:
        return NoReport(host, plain(start.message or "the start failed"))
    return None


def _fetch_host(store: RunStore, host: str, run_folder: str, remote: Remote) -> NoReport | None:
    folder = store.host_folder(host)
    folder.mkdir(exist_ok=True)
    for name in LOG_FILES:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            _write(folder / name, remote.tail(f"{run_folder}/{name}", MAX_LOG_BYTES))
    source = f"{run_folder}/{layout.REPORT_FILE}"
    try:
        fetch_checked(remote, source, folder / layout.REPORT_FILE)
    except FileNotFoundError:
        return NoReport(host, _why_no_report(remote, run_folder, store.run_id))
    return None


def fetch_checked(remote: Remote, source: str, to: Path) -> None:
    """Fetch a file so that ``to`` is either absent or whole and equal to the host's, by sha256.

    Raises FileNotFoundError, FileTooLargeError, RemoteError; after a broken connection the next call goes on.
    """
    partial = to.with_name(f".{to.name}.part")
    for _ in range(2):
        remote.fetch(source, partial, MAX_REPORT_BYTES)
        with partial.open("rb") as file:
            ours = file_digest(file, "sha256").hexdigest()
        theirs = remote.sha256(source)
        if ours == theirs:
            partial.replace(to)
            return
        partial.unlink()  # the rest of another file, or damage: once more from the start
    raise RemoteError(f"{source} arrived twice with another sha256 ({ours}) than the host's ({theirs})")


def _why_no_report(remote: Remote, run_folder: str, run_id: str) -> str:
    try:
        raw = remote.read(f"{run_folder}/{layout.STATUS_FILE}", MAX_STATUS_BYTES)
        status = results.parse_status(raw, layout.STATUS_FILE)
    except FileNotFoundError:
        return f"there is no run in {run_folder} on this host; was it cleaned up?"
    except (results.ReportError, FileTooLargeError) as error:
        return plain(error)
    if status.state in ("failed", "interrupted"):
        how = "failed" if status.state == "failed" else "was interrupted"
        return plain(f"the run {how}: {status.reason or 'no reason given'}")
    if status.state == "finished":
        return "the run has ended but left no report; see its console.log"
    if is_alive(remote, status.pid, run_id) is False:
        return (
            f"the benchmark's process (pid {status.pid}) ended without a report, {status.progress:.0%} done: killed, "
            "out of memory, or the host restarted; see its console.log and the kernel's log"
        )
    return f"still running, {status.progress:.0%} done; `make watch` attaches, `make collect report` when it has ended"


def load(store: RunStore, targets: Targets, missing: dict[str, NoReport]) -> tuple[list[Digest], list[NoReport]]:
    """Every targeted host's report, condensed, or why there is none that can be used."""
    digests: list[Digest] = []
    without: list[NoReport] = []
    for host in targets.hosts:
        path = store.report_file(host)
        if not path.is_file():
            without.append(
                missing.get(host) or NoReport(host, "its report was not collected; `make collect` fetches it")
            )
            continue
        try:
            report = read_report(path, targets, host)
        except results.ReportError as error:
            without.append(NoReport(host, plain(error)))
        else:
            digests.append(digest(report, str(path.relative_to(store.folder))))
    return digests, without


def read_report(path: Path, targets: Targets, host: str) -> results.HostReport:
    """A host's report, checked as somebody else's input.

    Raises ReportError: too large, not JSON, another schema, run or host, rows missing, or values that can't be true.
    """
    if path.stat().st_size > MAX_REPORT_BYTES:
        raise results.ReportError(f"{path.name} is larger than {MAX_REPORT_BYTES} bytes")
    report = results.parse_host_report(path.read_bytes(), path.name)
    if report.run_id != targets.run_id:
        raise results.ReportError(f"{path.name} is of another run, {report.run_id}")
    if report.host != host:
        raise results.ReportError(f"{path.name} is of another host, {plain(report.host, 80)}")
    told = nonsense(report)
    if told is not None:
        raise results.ReportError(f"{path.name} makes no sense: {told}")
    absent = Counter(targets.cases) - Counter((case.workload, case.writer) for case in report.cases)
    if absent and not report.interrupted:
        workload, writer = min(absent)
        raise results.ReportError(f"{path.name} lacks {absent.total()} of the plan's rows, such as {workload} {writer}")
    return report


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.part")
    partial.write_bytes(data)
    partial.replace(path)
