"""How several objectives become one: sum, min, smooth min.

The public names of `nlgrpo.objectives.aggregation`.
"""

from nlgrpo.objectives.aggregation import (
    Aggregate,
    Min,
    SmoothMin,
    WeightedSum,
    combine,
    moving_average,
    parse_aggregate,
    sum_of_applicable,
)

__all__ = [
    "Aggregate",
    "Min",
    "SmoothMin",
    "WeightedSum",
    "combine",
    "moving_average",
    "parse_aggregate",
    "sum_of_applicable",
]
