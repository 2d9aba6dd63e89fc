"""The few statistics that a rate in our tables stands on. Pure functions of samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# A case whose slowest and fastest counted sample differ by more than this share of the median is unstable.
UNSTABLE_SPREAD = 0.10
# --until-stable ends when this many samples in a row lie within this share of their median.
STABLE_SAMPLES = 5
STABLE_SPREAD = 0.05
# fio before and after the cases may differ by this share before the rates in between are called into question.
CEILING_DRIFT = 0.10
# Scales the median absolute deviation to the standard deviation of a normal distribution, 1 / Phi^-1(3/4).
MAD_SCALE = 1.4826


def median(values: Sequence[float]) -> float:
    """The middle value; robust against one slow sample."""
    return statistics.median(values)


def scaled_mad(values: Sequence[float]) -> float:
    """Median absolute deviation from the median, scaled to a normal's standard deviation."""
    middle = median(values)
    return MAD_SCALE * median([abs(value - middle) for value in values])


def spread(values: Sequence[float]) -> float:
    """(max - min) / median, as a share."""
    middle = median(values)
    return (max(values) - min(values)) / middle if middle > 0 else 0.0


def settled(values: Sequence[float]) -> bool:
    """Whether the last five values agree within 5 percent, by :func:`spread`; fewer than five never do."""
    return len(values) >= STABLE_SAMPLES and spread(values[-STABLE_SAMPLES:]) <= STABLE_SPREAD
