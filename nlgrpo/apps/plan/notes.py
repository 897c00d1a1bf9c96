"""Notes on settings that make the gradient differ from the objective's, with the alternative."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from nlgrpo.config.schema import Config, LossConfig
from nlgrpo.objectives.registry import Objective

SMALL = 0.01  # a beta of DPO or IPO below this gets a note
# Keys of [loss] that only the online algorithms read.
ONLINE = (
    "aggregate_memory", "baseline", "dual_clip", "kl_importance", "kl_in", "level", "log_kl_every", "normalization",
    "scale", "surrogate",
)  # fmt: skip


def notes(config: Config, objectives: Mapping[str, Objective], compute: torch.dtype | None = None) -> list[str]:
    """One line, with the alternative, per setting that makes the gradient differ from the objective's.

    ``compute``: dtype in which the policy computes, if it is known.
    """
    if config.loss.offline:
        return [*_on_truncation(config), *_on_ignored_keys(config), *_on_small_beta(config)]
    on_objective = [*_on_sampler(config, compute), *_on_estimators(config, objectives), *_on_transforms(config)]
    return [*on_objective, *_on_loss(config), *_on_kl(config)]


def _on_sampler(config: Config, compute: torch.dtype | None) -> Iterator[str]:
    """Notes on a sampler that is not the policy, which importance weights correct for."""
    ahead = config.rollout.ahead
    yield from _on_truncation(config)
    if config.loss.correction != "none":
        return
    if ahead > 0:
        yield (
            f"rollout.ahead = {ahead}: completions are up to {ahead} step{'s' * (ahead > 1)} old, and nothing corrects "
            "for it; use loss.correction = 'tis:2'."
        )
    if config.rollout.engine == "vllm" and compute == torch.bfloat16:
        yield (
            "rollout.engine = 'vllm' in bfloat16: vLLM rounds in other places than the policy, so that it samples "
            "another distribution; loss.correction = 'tis:2' corrects for it."
        )


def _on_truncation(config: Config) -> Iterator[str]:
    r = config.rollout
    cuts = [f"{name} = {value:g}" for name, value, off in
            (("top_k", r.top_k, 0), ("top_p", r.top_p, 1), ("min_p", r.min_p, 0)) if value != off]  # fmt: skip
    if cuts:
        yield (
            f"rollout.{', rollout.'.join(cuts)}: samples come from the truncated policy, and the full one is trained; "
            "loss.correction cannot weight tokens that are never sampled."
        )


def _on_ignored_keys(config: Config) -> Iterator[str]:
    loss = vars(config.loss)
    plain = vars(LossConfig())
    unused = [f"loss.{key} = {loss[key]!r}" for key in ONLINE if loss[key] != plain[key]]
    if unused:
        yield f"{', '.join(unused)}: ignored by {config.loss.algorithm}, whose loss is per response."
    given = [(f"rewards.{name}", reward) for name, reward in config.rewards.items() if reward.weight]
    passed = [f"{name}.transform = {reward.transform!r}" for name, reward in given if reward.transform]
    passed += [f"{name}.objective = {reward.objective!r}" for name, reward in given if reward.objective != "mean"]
    if passed:
        yield (
            f"{', '.join(passed)}: ignored in training; {config.loss.algorithm} picks the best of offline.n = "
            f"{config.offline.n} samples by the rewards themselves."
        )


def _on_small_beta(config: Config) -> Iterator[str]:
    loss = config.loss
    if loss.algorithm in ("dpo", "ipo") and loss.beta < SMALL:
        yield (
            f"loss.beta = {loss.beta:g}: {loss.algorithm} then pushes for margins of about 1/beta nats between two "
            "responses, far from the reference; 0.1 is usual."
        )


def _on_transforms(config: Config) -> Iterator[str]:
    loss = config.loss
    for name, reward in config.rewards.items():
        is_vbon = reward.transform.startswith("vbon")
        if is_vbon and (loss.beta != reward.weight or loss.target_kl is not None):
            yield (
                f"rewards.{name}: the objective of {reward.transform} gives the KL the reward's weight; set "
                f"loss.beta = {reward.weight:g}, constant (no loss.target_kl), and loss.kl_in = 'reward'."
            )
        if reward.transform.startswith(("bon_fp", "won_fp", "fp:")) and loss.target_kl is not None:
            yield (
                f"rewards.{name}: {reward.transform} is the optimal transform for one beta, and loss.target_kl "
                "changes beta during training; remove loss.target_kl."
            )
        if reward.transform.startswith(("bon_fp", "won_fp")) and config.calibration.by != "prompt":
            yield (
                f"rewards.{name}: {reward.transform} is the optimal transform of ranks in the prompt, and "
                f"calibration.by = {config.calibration.by!r} gives it other values; use 'prompt'."
            )


def _on_estimators(config: Config, objectives: Mapping[str, Objective]) -> Iterator[str]:
    loss = config.loss
    if loss.aggregate != "sum" and loss.aggregate_at == "batch" and loss.aggregate_memory == 0:
        yield (
            f"loss.aggregate = {loss.aggregate!r}: its gradient is taken at values from {config.rollout.prompts} "
            "prompts, whose noise biases it; loss.aggregate_memory > 0 averages the values over steps."
        )


def _on_loss(config: Config) -> Iterator[str]:
    loss = config.loss
    if loss.scale != "none":
        yield (
            f"loss.scale = {loss.scale!r}: advantages are divided by their standard deviation, which undoes the "
            "scale of the linearisation (IAMA, 6); 'none' keeps it."
        )
    if loss.algorithm == "ppo" and config.critic.whiten:
        yield (
            "critic.whiten subtracts the mean of all tokens' advantages and divides by their standard deviation, so "
            "that long completions and the other prompts of the step change a prompt's gradient; false keeps the "
            "objective's."
        )
        if loss.beta > 0 and loss.kl_in == "loss":
            yield (
                "critic.whiten does not divide the KL in the loss, whose relative weight becomes beta times that std; "
                "loss.kl_in = 'reward' divides both."
            )
    if loss.normalization == "grpo":
        yield (
            "loss.normalization = 'grpo': a completion's gradient is divided by its length, so tokens of long "
            "completions count less; 'dapo' and 'dr_grpo' divide all tokens by the same number."
        )
    if loss.epochs * loss.minibatches > 1:
        correction = {
            "ppo": "clipping the ratios biases the gradient",
            "cispo": "capping the ratios biases the gradient",
            "reinforce": "no importance weight corrects for it; 'cispo' and 'ppo' weight by the ratio",
        }
        yield (
            f"{loss.epochs * loss.minibatches} optimiser steps per rollout: from the second on, the policy is not the "
            f"one that sampled, and {correction[loss.surrogate]}."
        )


def _on_kl(config: Config) -> Iterator[str]:
    loss = config.loss
    if loss.beta == 0 or loss.kl_in == "reward":
        return
    if loss.kl == "k1":
        yield (
            "loss.kl = 'k1' in the loss has a gradient of 0 in expectation, so it does not restrain the policy; "
            "use 'k2' or 'k3', or loss.kl_in = 'reward'."
        )
    if loss.kl == "k3" and not loss.weights_kl:
        yield (
            "loss.kl_importance = false: k3 without the ratio has the gradient of KL(reference || policy) in "
            "expectation, not that of KL(policy || reference); true, the default, has the latter."
        )
    if loss.kl == "k3" and loss.weights_kl and loss.level == "sequence":
        yield (
            "loss.level = 'sequence' weights k3 by the ratio of the whole completion, which does not have the gradient "
            "of KL(policy || reference); loss.kl = 'k2' and loss.kl_in = 'reward' have it on-policy."
        )
