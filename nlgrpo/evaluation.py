"""Estimators of best-of-N, worst-of-N, pass@k and win rates, on plain tensors: the names that most users need.

All of them are in `nlgrpo.estimators`.
"""

from nlgrpo.estimators import (
    best_of_n,
    bootstrap,
    distinct_n,
    maj_at_k,
    over_present,
    paired_test,
    pass_at_k,
    procedure_value,
    procedure_win_rate,
    selected_value,
    weighted_win_rate,
    win_rate,
    worst_of_n,
)

__all__ = [
    "best_of_n",
    "bootstrap",
    "distinct_n",
    "maj_at_k",
    "over_present",
    "paired_test",
    "pass_at_k",
    "procedure_value",
    "procedure_win_rate",
    "selected_value",
    "weighted_win_rate",
    "win_rate",
    "worst_of_n",
]
