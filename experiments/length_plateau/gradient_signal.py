"""Signal and noise of the policy gradient, for each parameter: can a run that has stalled still learn?

    python -m experiments.length_plateau.gradient_signal length-bon --model.path runs/length-bon/model

Takes the arguments of ``nlgrpo train``. Computes 4 independent estimates g_1 .. g_4 of the gradient, each from 32 of
the run's batches, and prints for each parameter, and for the rows of the end tokens in the embedding and the head,

    signal^2 = mean of g_i . g_j over i < j            (unbiased for |E g|^2, so it can be below 0)
    noise^2  = mean of |g_i|^2 - signal^2              (the variance of one estimate)
"""

from __future__ import annotations

import itertools
import math
import sys

import torch
from torch import Tensor

from experiments import quick
from nlgrpo.config.recipes import from_arguments
from nlgrpo.engine import logprobs
from nlgrpo.engine.backends import NativeEngine
from nlgrpo.objectives.aggregation import combine
from nlgrpo.runtime.supervision import process_group
from nlgrpo.training import policy
from nlgrpo.training.build import Setup, build_setup
from nlgrpo.training.global_batch import GlobalBatch
from nlgrpo.training.learner import Learner

ESTIMATES, BATCHES = 4, 32


def add_gradient(setup: Setup, learner: Learner, number: int) -> None:
    """Add the gradient of the surrogate, sum of A log pi over batch ``number``, to the parameters' ``grad``."""
    prompts, objective = setup.config.rollout.prompts, setup.objective
    batch = setup.prompts.take(number * prompts, prompts)
    rollout = setup.sampler.draw(NativeEngine(learner.model), batch)
    groups = GlobalBatch.gather(setup.ranks, setup.sampler.score(batch, rollout), rollout)
    values = groups.values(objective.objectives)
    linear = combine(groups.linearize(objective.objectives), objective.aggregate.gradient(values))
    advantages = groups.advantages(linear, "none").flatten()
    for part in learner.micro_batches(rollout, list(range(len(advantages)))):
        logprob, _ = logprobs.logprobs(learner.model, part, learner.temperature)
        (logprob * advantages[part.row].to(logprob)).sum().backward()


def estimate(setup: Setup, learner: Learner, first: int) -> dict[str, Tensor]:
    """Gradient per completion of `BATCHES` batches from number ``first`` on."""
    learner.optimizer.zero_grad()
    for number in range(first, first + BATCHES):
        add_gradient(setup, learner, number)
    completions = BATCHES * setup.config.rollout.prompts * setup.config.rollout.samples
    gradient = {name: p.grad / completions for name, p in learner.model.named_parameters() if p.grad is not None}
    ends = list(setup.sampler.sampling.stop_ids)
    vocabulary = {name: g[ends] for name, g in gradient.items() if len(g) == setup.shape.vocab}
    return gradient | {f"{name}, end tokens": g for name, g in vocabulary.items()}


def signal_and_noise(estimates: list[Tensor]) -> tuple[float, float]:
    pairs = [float((a * b).sum()) for a, b in itertools.combinations(estimates, 2)]
    signal = sum(pairs) / len(pairs)
    return signal, sum(float(g.square().sum()) for g in estimates) / len(estimates) - signal


QUICK = [
    "two.toml",
]  # fmt: skip


def main() -> None:
    cfg, _ = from_arguments(sys.argv[1:])
    with process_group.start() as ranks:
        try:
            setup = build_setup(cfg, ranks)
        except ValueError as error:
            sys.exit(str(error))
        learner = policy.load_learner(setup)
        estimates = [estimate(setup, learner, part * BATCHES) for part in range(ESTIMATES)]
    rows = {name: [g[name] for g in estimates] for name in estimates[0]}
    whole = [torch.cat([g[name].flatten() for name in g if "," not in name]) for g in estimates]
    for name, gradients in ({"all": whole} | rows).items():
        signal, noise = signal_and_noise(gradients)
        print(f"{name:40} signal^2 {signal:9.2e}   noise^2 {noise:9.2e}   ratio {signal / (noise or math.nan):7.3f}")


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK))
