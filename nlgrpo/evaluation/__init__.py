"""Evaluation of models as they will be used, for example with best-of-N: estimators, results, figures, reports.

`estimators` are pure functions of reward tensors (best-of-N, win rates, intervals, paired tests). `model_evaluation`
samples and scores models, and `results` builds the tables. `decoding` compares decoding methods. `report` writes the
HTML report of the folders that `run_loader` reads, with `html_page` and the figures; `comparison` is one picture of
several runs, and `seeds` joins runs that differ in the seed only. `recorded` has GRPO's figures on mazes. Imports
`training` and the rooms below it. Read `estimators.py` first.
"""

from nlgrpo.evaluation.estimators import (
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
