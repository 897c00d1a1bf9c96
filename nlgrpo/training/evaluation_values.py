"""The numbers of an evaluation, by the names that ``evaluations.jsonl``, trackers and train.keep_best give them.

    objective/NAME            the training objective of a reward, without its transform; best-of-N needs N samples
    objective/aggregate       g(R_1, .., R_m) of all rewards; absent if one of them has no value
    rewards/NAME/mean         mean reward; for a reward that is 0 or 1, avg@n
    rewards/NAME/best-of-N    best-of-N, which is pass@N if the reward is 0 or 1; also worst-of-N, majority-of-N and the
                              procedures of evaluation.procedures
    rewards/GOLD by choice of NAME/best-of-N    the gold reward of the response that NAME chooses
    reward, reward_best-of-N  weighted sums over the rewards
    win_rate/NAME/best-of-N   against the initial policy under the same procedure
    completions/mean_length   tokens

All are means over prompts with 95% intervals. A set that is not the main one has its name in front: "aime/reward".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.engine.rollouts.sampler import errors_of_user_objective
from nlgrpo.estimators import over_present, procedure_value
from nlgrpo.objectives.rank_based import OfN
from nlgrpo.objectives.registry import Objective, is_pairwise, is_voted
from nlgrpo.training import evaluation_entries
from nlgrpo.training.evaluation_summary import WEIGHTED_SUM, Estimate, summarize
from nlgrpo.training.global_batch import JointObjective

START = "start"
MODEL = "model"


def values_of(
    sampled: EvaluationSamples,
    start: EvaluationSamples,
    joint: JointObjective,
    ns: Sequence[int],
    procedures: Sequence[str] = (),
    gold: Sequence[str] = (),
) -> dict[str, Estimate]:
    """Return the numbers of an evaluation. ``start``: that of the initial policy, for win rates.

    Raises UserError if N exceeds the number of samples per prompt.
    """
    found = dict(_objectives(sampled, joint))
    rows = summarize(sampled, ns)
    if len(sampled.rewards) == 1:
        weight = sampled.weights[rows[0].reward]
        for row in rows[:]:
            low, high = sorted((weight * row.low, weight * row.high)) if row.low == row.low else (row.low, row.high)
            rows.append(replace(row, reward=WEIGHTED_SUM, value=weight * row.value, low=low, high=high))
    for row in rows:
        of_n = row.procedure.replace(" ", "-")
        total = "reward" if of_n == "mean" else f"reward_{of_n}"
        name = total if row.reward == WEIGHTED_SUM else f"rewards/{row.reward}/{of_n}"
        found[name] = Estimate(row.value, row.low, row.high, row.coverage)
    measured = evaluation_entries.entries({START: start, MODEL: sampled}, procedures, gold)
    for entry in measured:
        if entry.model != MODEL or not entry.procedure:
            continue
        of_n = procedure_name(entry.procedure)
        found.setdefault(f"rewards/{entry.quantity}/{of_n}", entry.estimate)
        if entry.win_rate is not None:
            found[f"win_rate/{entry.quantity}/{of_n}"] = entry.win_rate
    every = torch.ones_like(sampled.lengths, dtype=torch.bool)
    found["completions/mean_length"] = Estimate.of(sampled.lengths.double().mean(1), every)
    return found


def procedure_name(procedure: str) -> str:
    """Name of a procedure in a metric: "best-of-4" for "bon:4", "maj-at-4" for "maj@4", "soft-0.1" for "soft:0.1"."""
    for short, words in (("bon:", "best-of-"), ("wor:", "worst-of-"), ("maj:", "majority-of-")):
        if procedure.startswith(short):
            return words + procedure.removeprefix(short).replace(":", "-")
    return procedure.replace("@", "-at-").replace(":", "-").replace(",", "_").replace("/", "_")


def metrics(values: Mapping[str, Estimate], sampled: EvaluationSamples) -> dict[str, float]:
    """Return the numbers as trackers get them, with TRL's names where it has them: eval_reward, eval_rewards/NAME/mean.

    NAME_low and NAME_high are the interval, where there is one. A number that is not over all prompts and samples has
    NAME_prompts and NAME_samples beside it. No name is another one with a "/" and more after it, because MLflow's store
    in files has folders for them.
    """
    found = {}
    for name, estimate in values.items():
        found[f"eval_{name}"] = estimate.value
        if not math.isnan(estimate.low):
            found[f"eval_{name}_low"] = estimate.low
            found[f"eval_{name}_high"] = estimate.high
        if estimate.coverage.lines:
            found[f"eval_{name}_prompts"] = float(estimate.coverage.prompts)
            found[f"eval_{name}_samples"] = float(estimate.coverage.samples)
    found["eval_completions/min_length"] = sampled.lengths.min().item()
    found["eval_completions/max_length"] = sampled.lengths.max().item()
    return found


def _objectives(sampled: EvaluationSamples, joint: JointObjective) -> Iterator[tuple[str, Estimate]]:
    """Values of the objectives that the run trains for, and of their aggregate."""
    of_prompts = {}
    for name, rewards in sampled.rewards.items():
        objective = joint.objectives[name]
        of_prompts[name] = _per_prompt(objective, sampled, name)
        yield f"objective/{name}", Estimate.of(of_prompts[name], ~rewards.isnan())
    if sampled.rewards.keys() != joint.objectives.keys():
        return
    values = torch.stack([of_prompts[name] for name in joint.objectives])
    if any(values[i].isnan().all() for i, name in enumerate(joint.objectives) if joint.weights[name] != 0):
        return
    at_prompts = joint.aggregate.value(values)
    of_all = Estimate.of(at_prompts, sampled.scored())
    if joint.at == "batch":
        value = float(joint.aggregate.value(values.nanmean(-1)))
        same = math.isclose(value, of_all.value, rel_tol=1e-9, abs_tol=1e-12)  # of a sum over all prompts
        of_all = of_all if same else Estimate(value, math.nan, math.nan, of_all.coverage)
    yield "objective/aggregate", of_all


def _per_prompt(objective: Objective, sampled: EvaluationSamples, name: str) -> Tensor:
    """Values (P,) of an objective, NaN at prompts with too few samples that have a reward.

    Best-of-N and worst-of-N need N samples, and are unbiased also for a run that trains a plug-in estimate.
    """
    text = sampled.objectives[name]
    if is_pairwise(text):
        return sampled.rewards[name].nanmean(1)
    rewards = sampled.votes(name) if is_voted(text) else sampled.rewards[name]
    prompts, samples = sampled.lengths.shape
    fewest = objective.n if isinstance(objective, OfN) else objective.fewest
    if fewest > samples:
        return torch.full((prompts,), math.nan, dtype=torch.float64)
    if isinstance(objective, OfN):
        return over_present(partial(procedure_value, objective=objective), rewards, fewest=fewest)
    with errors_of_user_objective(name, objective):
        return over_present(objective.value, rewards, fewest=objective.fewest)
