"""Signal and noise of the policy gradient, for each parameter: can a run that has stalled still learn?

    python scripts/gradient_signal.py length-bon --model.path runs/length-bon/model

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

from nlgrpo.config.recipes import from_arguments
from nlgrpo.engine import logprobs
from nlgrpo.engine.backends import NativeEngine
from nlgrpo.objectives.aggregation import combine
from nlgrpo.runtime.supervision import process_group
from nlgrpo.training.build import build
from nlgrpo.training.global_batch import GlobalBatch
from nlgrpo.training.learner import Learner
from nlgrpo.training.run import Run

ESTIMATES, BATCHES = 4, 32


def add_gradient(run: Run, learner: Learner) -> None:
    """Add the gradient of the surrogate, sum of A log pi over the next batch, to the parameters' ``grad``."""
    batch = run.next_batch()
    rollout = run.sampler.draw(NativeEngine(learner.model), batch)
    groups = GlobalBatch.gather(run.ranks, run.sampler.score(batch, rollout), rollout)
    linear = combine(groups.linearize(run.objectives), run.aggregate.gradient(groups.values(run.objectives)))
    advantages = groups.advantages(linear, "none").flatten()
    for part in learner.micro_batches(rollout, list(range(len(advantages)))):
        logprob, _ = logprobs.logprobs(learner.model, part, learner.temperature)
        (logprob * advantages[part.row].to(logprob)).sum().backward()
    run.progress.advance(run.config.rollout.prompts, groups.tokens)


def estimate(run: Run, learner: Learner) -> dict[str, Tensor]:
    learner.optimizer.zero_grad()
    for _ in range(BATCHES):
        add_gradient(run, learner)
    completions = BATCHES * run.config.rollout.prompts * run.config.rollout.samples
    gradient = {name: p.grad / completions for name, p in learner.model.named_parameters() if p.grad is not None}
    ends = list(run.sampler.sampling.stop_ids)
    vocabulary = {name: g[ends] for name, g in gradient.items() if len(g) == run.shape.vocab}
    return gradient | {f"{name}, end tokens": g for name, g in vocabulary.items()}


def signal_and_noise(estimates: list[Tensor]) -> tuple[float, float]:
    pairs = [float((a * b).sum()) for a, b in itertools.combinations(estimates, 2)]
    signal = sum(pairs) / len(pairs)
    return signal, sum(float(g.square().sum()) for g in estimates) / len(estimates) - signal


def main() -> None:
    cfg, _ = from_arguments(sys.argv[1:])
    with process_group.start() as ranks:
        try:
            run = build(cfg, ranks)
        except ValueError as error:
            sys.exit(str(error))
        learner = run.learner()
        estimates = [estimate(run, learner) for _ in range(ESTIMATES)]
    rows = {name: [g[name] for g in estimates] for name in estimates[0]}
    whole = [torch.cat([g[name].flatten() for name in g if "," not in name]) for g in estimates]
    for name, gradients in ({"all": whole} | rows).items():
        signal, noise = signal_and_noise(gradients)
        print(f"{name:40} signal^2 {signal:9.2e}   noise^2 {noise:9.2e}   ratio {signal / (noise or math.nan):7.3f}")


if __name__ == "__main__":
    main()
