"""The controller's results folder: one run's files, and which hosts it was meant for.

``targets.json`` is written before anything touches a host, so that every targeted host has a row in
the end. ``start.jsonl`` is what Ansible saw while starting: one line a host and event.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import yaml
from pydantic import AwareDatetime, Field, ValidationError

from bench import layout, results
from bench.fleet.verdict import NoReport
from bench.plan import Plan

TARGETS_FILE = "targets.json"
START_FILE = "start.jsonl"
PLAN_FILE = "plan.yml"
HOSTS_FILE = "hosts.txt"
MISSING_FILE = "missing.json"
# Names of the run's own files, and of folders that safe_folder() makes up.
RESERVED = re.compile(r"host-|.*\.(json|jsonl|yml|txt|md|html|csv|prom|xml)$", re.IGNORECASE)


class StoreError(ValueError):
    """A results folder that can't be used; the message says which and what to do."""


class Targets(results.Model):
    """targets.json: what was asked for. ``inventory`` and ``pattern`` as given on the command line."""

    schema_version: Literal[1] = 1
    run_id: str = Field(pattern=results.RUN_ID_PATTERN.pattern)
    plan: str
    cases: list[tuple[str, str]]
    started_at: AwareDatetime
    inventory: list[str]
    pattern: str
    hosts: list[str]


class Start(results.Model):
    """What Ansible saw of one host while it started the benchmark there.

    ``starting`` is left when the controller died before it heard how the start ended.
    """

    event: Literal["starting", "started", "failed", "unreachable"]
    message: str | None = None
    run_folder: str | None = None
    work_folder: str | None = None
    pid: int | None = None
    busy: bool = False

    @property
    def may_run(self) -> bool:
        """Whether the benchmark may run on the host, so that it is worth asking."""
        return self.event in ("starting", "started") and self.run_folder is not None


class RunStore:
    """The folder of one run below ``results``; the one place that knows the names in it."""

    def __init__(self, results_folder: Path, run_id: str) -> None:
        self.results_folder = results_folder
        self.run_id = run_id
        self.folder = results_folder / run_id

    @property
    def plan_file(self) -> Path:
        return self.folder / PLAN_FILE

    @property
    def start_file(self) -> Path:
        return self.folder / START_FILE

    @property
    def hosts_file(self) -> Path:
        """The targeted hosts, one a line, as ``--limit @file`` takes them."""
        return self.folder / HOSTS_FILE

    def host_folder(self, host: str) -> Path:
        """Where one host's report and logs go; always directly below the run's folder."""
        return self.folder / safe_folder(host)

    def report_file(self, host: str) -> Path:
        return self.host_folder(host) / layout.REPORT_FILE

    def create(self, targets: Targets, plan: Plan) -> None:
        """Make the folder with targets.json, the plan and the list of hosts."""
        self.folder.mkdir(parents=True)
        results.write_json(self.folder / TARGETS_FILE, targets)
        data = plan.model_dump(mode="json", exclude_defaults=True)
        self.plan_file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        self.hosts_file.write_text("".join(f"{host}\n" for host in targets.hosts), encoding="utf-8")

    def targets(self) -> Targets:
        """targets.json; raises StoreError when it is missing or damaged."""
        path = self.folder / TARGETS_FILE
        try:
            return Targets.model_validate_json(path.read_bytes())
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        except ValidationError as error:
            raise StoreError(f"{path} is damaged: {error.errors(include_url=False)[0]['msg']}") from error

    def starts(self) -> dict[str, Start]:
        """The last event of each host in start.jsonl; a failure after a start does not undo the start."""
        found: dict[str, Start] = {}
        with contextlib.suppress(FileNotFoundError), self.start_file.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    data = json.loads(line)
                    host, start = str(data.pop("host")), Start.model_validate(data)
                except (ValueError, KeyError, AttributeError):
                    continue  # a line cut off by a killed controller
                before = found[host].event if host in found else None
                # Lost while it was being started, the host may run it all the same: it has to be asked.
                if before != "started" and not (before == "starting" and start.event == "unreachable"):
                    found[host] = start
        return found

    def write_missing(self, missing: Sequence[NoReport]) -> None:
        """Note why hosts have no report, for ``bench report``."""
        partial = self.folder / f".{MISSING_FILE}.part"
        partial.write_text(json.dumps([asdict(one) for one in missing], indent=1), encoding="utf-8")
        partial.replace(self.folder / MISSING_FILE)

    def missing(self) -> dict[str, NoReport]:
        """Why hosts have no report, as the last collection saw it; what was never collected is not in it."""
        try:
            found = json.loads((self.folder / MISSING_FILE).read_text(encoding="utf-8"))
            return {one["host"]: NoReport(**one) for one in found}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{self.folder / MISSING_FILE} is damaged; `make collect` writes it anew") from error

    def latest(self) -> RunStore | None:
        """The run that ``results/latest`` points at now, if any."""
        link = self.results_folder / layout.LATEST_LINK
        return RunStore(self.results_folder, link.resolve().name) if link.is_dir() else None

    def link_latest(self) -> None:
        """Point ``results/latest`` at this run, atomically."""
        link = self.results_folder / layout.LATEST_LINK
        partial = self.results_folder / f".{layout.LATEST_LINK}.{os.getpid()}"
        partial.unlink(missing_ok=True)
        partial.symlink_to(self.run_id)
        partial.replace(link)


def open_run(results_folder: Path, run_id: str | None) -> RunStore:
    """The run named, or the latest one. Raises StoreError, naming the runs there are."""
    if run_id is None:
        link = results_folder / layout.LATEST_LINK
        if not link.is_dir():
            raise StoreError(f"there is no run in {results_folder} yet; `make run` starts one")
        run_id = link.resolve().name
    store = RunStore(results_folder, run_id)
    if not results.RUN_ID_PATTERN.match(run_id) or not (store.folder / TARGETS_FILE).is_file():
        known = ", ".join(known_runs(results_folder)[-5:])
        raise StoreError(
            f"there is no run {run_id!r} in {results_folder}" + (f"; the last ones: {known}" if known else "")
        )
    return store


def known_runs(results_folder: Path) -> list[str]:
    """Run ids in the results folder, oldest first."""
    return sorted(path.parent.name for path in results_folder.glob(f"*/{TARGETS_FILE}") if not path.parent.is_symlink())


def safe_folder(host: str) -> str:
    """A folder name for a host's name: one path component, never hidden, one for each name.

    An ordinary name stays as it is; any other is made plain and told apart by a hash of the original.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", host) and not RESERVED.match(host):
        return host
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", host).strip("._-")[:60]
    return f"host-{readable}-{hashlib.sha256(host.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
