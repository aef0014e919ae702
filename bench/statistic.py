"""Statistics that are robust against noise: medians, percentiles, and an interval for a median."""

from collections.abc import Sequence
from math import ceil, comb
from statistics import median

CONFIDENCE = 0.95


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return low, high and the exact confidence of an interval for the median (at least 95 % from six values on).

    The interval comes from order statistics, so it does not depend on the distribution: the k-th smallest and k-th
    largest value enclose the median unless fewer than k of n coin tosses fall on one side. With up to five values the
    interval is the whole range, and its confidence is below 95 %.
    """
    ordered, n = sorted(values), len(values)
    best, outside = 1, 2 * comb(n, 0) / 2**n
    for k in range(2, n // 2 + 1):
        beyond = 2 * sum(comb(n, i) for i in range(k)) / 2**n
        if beyond > 1 - CONFIDENCE:
            break
        best, outside = k, beyond
    return ordered[best - 1], ordered[n - best], 1 - outside


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the median of the ratios of paired runs, because both runs of a pair have the same noise."""
    return median(a / b for a, b in zip(of, to, strict=True))
