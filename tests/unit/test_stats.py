"""Statistics, against values worked out by hand."""

from __future__ import annotations

import pytest

from bench import stats


def test_median_ignores_one_slow_sample() -> None:
    assert stats.median([1.0, 1.1, 9.0]) == 1.1
    assert stats.median([1.0, 2.0]) == 1.5


def test_scaled_mad_is_1_4826_times_the_median_deviation() -> None:
    assert stats.scaled_mad([1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(1.4826)
    assert stats.scaled_mad([2.0, 2.0, 2.0]) == 0.0


def test_spread_is_the_range_as_a_share_of_the_median() -> None:
    assert stats.spread([0.9, 1.0, 1.2]) == pytest.approx(0.3)
    assert stats.spread([0.0, 0.0]) == 0.0


def test_settled_asks_the_last_five_to_agree_within_five_percent() -> None:
    assert not stats.settled([1.0] * 4)
    assert stats.settled([9.0, 1.0, 1.01, 1.02, 1.03, 1.04])
    assert not stats.settled([1.0, 1.0, 1.0, 1.0, 1.06])
