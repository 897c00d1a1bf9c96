"""Variational best-of-N (vBoN): densities, rewards and bounds.

The public names of `nlgrpo.calibration.variational`.
"""

from nlgrpo.calibration.variational import (
    VariationalBoN,
    bound,
    log_bon_density,
    log_strict_cdf,
    objective,
    parse_variational,
    strict_counts,
    strict_order,
    string_keys,
    vbon_reward,
)

__all__ = [
    "VariationalBoN",
    "bound",
    "log_bon_density",
    "log_strict_cdf",
    "objective",
    "parse_variational",
    "strict_counts",
    "strict_order",
    "string_keys",
    "vbon_reward",
]
