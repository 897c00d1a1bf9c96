"""What a configuration gives up of the promise that the gradient is that of the objective; said, not refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nlgrpo.config.schema import Config, LossConfig
from nlgrpo.objectives.rank_based import OfN
from nlgrpo.objectives.registry import Objective

SMALL = 0.01  # of DPO's beta
# What says how completions that the policy draws become a loss.
ONLINE = (
    "aggregate_memory", "baseline", "dual_clip", "kl_importance", "kl_in", "level", "normalization", "scale",
    "surrogate",
)  # fmt: skip


def notes(config: Config, objectives: Mapping[str, Objective]) -> list[str]:
    """A line for each setting that breaks a property, with what keeps it."""
    if config.loss.offline:
        return [*_of_sampling(config), *_of_choices(config), *_of_their_beta(config)]
    of_objective = [*_of_sampling(config), *_of_estimators(config, objectives), *_of_transforms(config)]
    return [*of_objective, *_of_the_loss(config), *_of_the_kl(config)]


def _of_sampling(config: Config) -> Iterator[str]:
    r = config.rollout
    cuts = [f"{name} = {value:g}" for name, value, off in
            (("top_k", r.top_k, 0), ("top_p", r.top_p, 1), ("min_p", r.min_p, 0)) if value != off]  # fmt: skip
    if cuts:
        yield f"rollout.{', rollout.'.join(cuts)}: samples are those of a cut policy, and the whole one is trained."


def _of_choices(config: Config) -> Iterator[str]:
    loss, plain = vars(config.loss), vars(LossConfig())
    unused = [f"loss.{key} = {loss[key]!r}" for key in ONLINE if loss[key] != plain[key]]
    if unused:
        yield f"{', '.join(unused)}: of no effect on {config.loss.algorithm}, whose loss is of whole responses."
    given = [(f"rewards.{name}", reward) for name, reward in config.rewards.items() if reward.weight]
    passed = [f"{name}.transform = {reward.transform!r}" for name, reward in given if reward.transform]
    passed += [f"{name}.objective = {reward.objective!r}" for name, reward in given if reward.objective != "mean"]
    if passed:
        yield (
            f"{', '.join(passed)}: of no effect on training; {config.loss.algorithm} chooses by the rewards "
            f"themselves, the best of offline.n = {config.offline.n}."
        )


def _of_their_beta(config: Config) -> Iterator[str]:
    loss = config.loss
    if loss.algorithm in ("dpo", "ipo") and loss.beta < SMALL:
        yield (
            f"loss.beta = {loss.beta:g}: {loss.algorithm} asks for margins of about 1/beta nats between two responses, "
            "which is far from the reference; 0.1 is usual."
        )


def _of_transforms(config: Config) -> Iterator[str]:
    loss = config.loss
    for name, reward in config.rewards.items():
        is_vbon = reward.transform.startswith("vbon")
        if is_vbon and (loss.beta != reward.weight or loss.target_kl is not None):
            yield (
                f"rewards.{name}: the objective of {reward.transform} has a KL of the weight of the reward; take "
                f"loss.beta = {reward.weight:g}, constant, and loss.kl_in = 'reward'."
            )
        if reward.transform.startswith(("bon_fp", "won_fp")) and loss.target_kl is not None:
            yield (
                f"rewards.{name}: {reward.transform} is the best transform for one beta, and loss.target_kl moves it; "
                "leave target_kl out."
            )


def _of_estimators(config: Config, objectives: Mapping[str, Objective]) -> Iterator[str]:
    M = config.rollout.samples
    for name, objective in objectives.items():
        if isinstance(objective, OfN) and objective.estimator == "plugin" and objective.n > M:
            yield (
                f"rewards.{name}: {objective} from {M} samples can only be a plug-in estimate, biased at order 1/M; "
                f"rollout.samples >= {objective.n} allow '{objective}:unbiased'."
            )
    loss = config.loss
    if loss.aggregate != "sum" and loss.aggregate_at == "batch" and loss.aggregate_memory == 0:
        yield (
            f"loss.aggregate = {loss.aggregate!r}: its gradient is taken at the values of {config.rollout.prompts} "
            "prompts, whose noise biases it; loss.aggregate_memory averages them over steps."
        )


def _of_the_loss(config: Config) -> Iterator[str]:
    loss = config.loss
    if loss.scale != "none":
        yield (
            f"loss.scale = {loss.scale!r}: advantages are divided by their deviation, which undoes the scale of the "
            "linearisation (IAMA, 6); 'none' keeps it."
        )
    if loss.algorithm == "ppo" and config.critic.whiten and loss.beta > 0 and loss.kl_in == "loss":
        yield (
            "critic.whiten divides the advantages by their deviation, and not the KL in the loss, which then weighs "
            "beta times that deviation; loss.kl_in = 'reward' divides both."
        )
    if loss.normalization == "grpo":
        yield (
            "loss.normalization = 'grpo': a completion's gradient is divided by its length, so that the tokens of long "
            "ones count less; 'dapo' and 'dr_grpo' divide all by one number."
        )
    if loss.epochs * loss.minibatches > 1:
        correction = {
            "ppo": "clipping the ratios biases the gradient",
            "cispo": "capping the ratios biases the gradient",
            "reinforce": "nothing corrects for it; 'cispo' and 'ppo' weigh by the ratio",
        }
        yield (
            f"{loss.epochs * loss.minibatches} optimiser steps a rollout: from the second on the policy is not the one "
            f"that sampled, and {correction[loss.surrogate]}."
        )


def _of_the_kl(config: Config) -> Iterator[str]:
    loss = config.loss
    if loss.beta > 0 and loss.kl_in == "loss" and loss.kl == "k1":
        yield (
            "loss.kl = 'k1' in the loss has a gradient of 0 in expectation, and holds the policy to nothing; "
            "take 'k2' or 'k3', or loss.kl_in = 'reward'."
        )
