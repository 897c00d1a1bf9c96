"""Rewards as ranks among samples of the reference: empirical CDFs, InfAlign-CTRL, variational best-of-N.

`ecdf`, `log_cdf` and `kolmogorov_smirnov` handle empirical distributions of many samples. `transforms`, `fixed_point`,
`procedures`, `stationary` and `alignment` are InfAlign-CTRL: transforms of a calibrated reward, and their win rates
against KL under any calibrated procedure. `variational` is vBoN. Pure tensor functions that import `nlgrpo.objectives`
and `nlgrpo.kernels`. Read `alignment.py` first.
"""

from nlgrpo.calibration.alignment import (
    Curve,
    Transform,
    alignment_curve,
    at_kl,
    calibrate,
    calibrate_by_median,
    calibrate_pooled,
    parse_transform,
    suggest,
)

__all__ = [
    "Curve",
    "Transform",
    "alignment_curve",
    "at_kl",
    "calibrate",
    "calibrate_by_median",
    "calibrate_pooled",
    "parse_transform",
    "suggest",
]
