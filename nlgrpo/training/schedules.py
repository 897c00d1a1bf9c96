"""Values that change during a run: learning rates, and the weight of the KL penalty."""

from __future__ import annotations

import math
from dataclasses import replace

from nlgrpo.config.schema import Config, OptimConfig


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Learning rate at ``step`` of ``steps``: linear warm-up, then the schedule."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    progress = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return optim.lr * factor[optim.schedule]


def learning_rates(cfg: Config, step: int) -> dict[str, float]:
    """Learning rates of the policy and of PPO's critic, which trains alone during its warm-up."""
    steps = cfg.train.steps
    if cfg.loss.algorithm != "ppo":
        return {"lr": learning_rate(cfg.optim, step, steps)}
    warmup = cfg.critic.warmup_steps
    policy_step = step - warmup  # the policy's schedule starts after the critic's warm-up
    lr = 0.0 if policy_step < 0 else learning_rate(cfg.optim, policy_step, steps - warmup)
    return {"lr": lr, "critic_lr": learning_rate(replace(cfg.optim, lr=cfg.critic.lr), step, steps)}


def next_beta(cfg: Config, step: int, beta: float, kl: float) -> float:
    """Beta of the next step, given the KL per token of ``step``; unchanged while the policy is not trained."""
    target = cfg.loss.target_kl
    if target is None or learning_rates(cfg, step)["lr"] == 0:
        return beta
    from nlgrpo.losses.kl import AdaptiveBeta

    return AdaptiveBeta(beta, target).step(kl)
