"""Saves of the same data must give equal sizes, but for an engine's, whose names of storages differ in length."""

from __future__ import annotations

from bench.host.run import size_fault


def test_equal_sizes_are_no_fault() -> None:
    assert size_fault("model", {100}) is None


def test_files_of_different_sizes_are_a_fault_with_both_sizes() -> None:
    fault = size_fault("model", {120, 100})
    assert fault is not None
    assert "[100, 120]" in fault


def test_an_engine_that_gathers_its_state_anew_may_differ_by_digits_of_addresses() -> None:
    # Seen with ZeRO 3 on an H200.
    assert size_fault("engine", {186926620, 186926632}) is None
