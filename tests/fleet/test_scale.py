"""The script behind the figures in docs/fleet.md does what it says."""

from __future__ import annotations

import pytest
import scale


@pytest.fixture(autouse=True)
def hosts_up():
    """No hosts are needed here."""


def test_every_synthetic_host_has_a_verdict():
    found = scale.measure(300)
    assert found["verdict"].startswith("FAILED: ")
    assert found["verdict"].endswith("of 300 hosts")
    assert "SLOW" in found["verdict"]
    assert found["lines"] < 80
