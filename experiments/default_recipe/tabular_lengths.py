"""The recipe `length-bon` with a policy that has one logit per length instead of a network: what can be reached.

    python -m experiments.default_recipe.tabular_lengths [--quick]

Non-linear GRPO with the trainer's objective and estimator (0.5 bon:4 + 0.5 bon:4, M = 8, plugin) on a categorical
policy over the lengths 1 to 128, by natural-gradient steps. Prints the probability of every 8 lengths at some steps.
"""

from __future__ import annotations

import sys

import torch

from nlgrpo.objectives.registry import BestOfN

LIMIT, TARGETS, GROUPS, SAMPLES = 128, (25, 75), 512, 8
SHOWN = (50, 200, 500, 1000)


def main() -> None:
    shown = SHOWN[:1] if sys.argv[1:] == ["--quick"] else SHOWN
    generator = torch.Generator().manual_seed(0)
    lengths = torch.arange(1, LIMIT + 1, dtype=torch.float64)
    rewards = [-(((lengths - target) / LIMIT) ** 2) for target in TARGETS]
    objective, logits = BestOfN(4), torch.zeros(LIMIT, dtype=torch.float64)
    for step in range(max(shown) + 1):
        probs = logits.softmax(0)
        if step in shown:
            print(step, *(f"{100 * share:.1f}" for share in probs.view(-1, 8).sum(1).tolist()))
        drawn = torch.multinomial(probs, GROUPS * SAMPLES, replacement=True, generator=generator).view(GROUPS, SAMPLES)
        linear = torch.stack([0.5 * objective.linearize(reward[drawn]) for reward in rewards]).sum(0)
        advantages = (linear - linear.mean(1, keepdim=True)).flatten() / drawn.numel()
        gradient = torch.zeros_like(probs).index_add(0, drawn.flatten(), advantages)  # p_y times the advantage of y
        logits += gradient / (probs + 1e-4)


if __name__ == "__main__":
    main()
