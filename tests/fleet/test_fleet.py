"""Stories of a fleet. The order is that of a day: reach the hosts, audit them, lose some, roll back."""

from __future__ import annotations

import json


def test_all_well_every_way_to_log_in(provisioned):
    done = provisioned.run(*provisioned.audit())
    assert done.returncode == 0, done.stdout[-6000:]
    latest = provisioned.results / "latest"
    fleet = json.loads((latest / "fleet.json").read_text())
    assert {host["name"]: host["verdict"] for host in fleet["hosts"]} == {f"node-{n}": "PASS" for n in (1, 2, 3, 4)}
    for host in fleet["hosts"]:
        report = json.loads((latest / host["report"]).read_text())
        assert report["host"] == host["name"]
        assert report["patch"]["state"] == "patched"
        assert (latest / host["name"] / "bench.log").stat().st_size > 0
    assert "PASS: all 4 hosts" in done.stdout
