"""Empirical CDFs of large samples: ranks, probabilities, quantiles and tests.

The public names of `nlgrpo.calibration.ecdf`.
"""

from nlgrpo.calibration.ecdf import (
    ECDF,
    argsort,
    cdf,
    ks_distance,
    ks_test,
    ranks,
)

__all__ = ["ECDF", "argsort", "cdf", "ks_distance", "ks_test", "ranks"]
