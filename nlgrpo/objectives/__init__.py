"""Objectives that training maximises: functionals of the policy for an inference procedure, and first variations.

One file per family: `rank_based` (best-of-N, worst-of-N, CVaR, any distortion), `tilted` (soft best-of-N, entropic
risk), `diversity` (Rao, DPP), `majority` (voting over final answers), `functional` (any differentiable functional, by
autograd). `registry.parse` reads a name such as ``"bon:4"``, `aggregation` combines several
objectives into one, `advantages` subtracts a baseline. `importance_sampling` weights samples of another policy, and
`reweighted` has the estimates with such weights. Pure tensor functions that import `nlgrpo.kernels`, and from
`nlgrpo.errors` the suggestion for a name that is not known.
Read `base.py` first.
"""

from nlgrpo.objectives.registry import (
    BestOfN,
    BestOfPoisson,
    CVaR,
    Distortion,
    DPPDiversity,
    EntropicRisk,
    Functional,
    MajorityVote,
    Mean,
    Objective,
    RankBased,
    RaoDiversity,
    Smoothed,
    SoftBestOfN,
    WorstOfN,
    linearize_present,
    parse,
    present,
    value_present,
)

__all__ = [
    "BestOfN",
    "BestOfPoisson",
    "CVaR",
    "DPPDiversity",
    "Distortion",
    "EntropicRisk",
    "Functional",
    "MajorityVote",
    "Mean",
    "Objective",
    "RankBased",
    "RaoDiversity",
    "Smoothed",
    "SoftBestOfN",
    "WorstOfN",
    "linearize_present",
    "parse",
    "present",
    "value_present",
]
