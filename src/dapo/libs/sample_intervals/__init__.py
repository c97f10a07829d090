"""95 % intervals of means over a sample, of paired differences, and of means over two crossed
samples.
"""

from .means import (
    CONFIDENCE,
    Interval,
    difference_interval,
    difference_variance,
    mean_interval,
    proportions_interval,
    student_interval,
    student_p_value,
    student_quantile,
    wilson_interval,
)
from .two_way import (
    ROUNDING,
    Estimate,
    mean_over_seeds,
    two_way_difference,
    two_way_mean,
    variance_of_mean,
)

__all__ = [
    "CONFIDENCE",
    "Estimate",
    "Interval",
    "ROUNDING",
    "difference_interval",
    "difference_variance",
    "mean_interval",
    "mean_over_seeds",
    "proportions_interval",
    "student_interval",
    "student_p_value",
    "student_quantile",
    "two_way_difference",
    "two_way_mean",
    "variance_of_mean",
    "wilson_interval",
]
