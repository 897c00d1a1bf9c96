"""What a run is going to do, before it does it: batch arithmetic, sizes, memory, and the implementations chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from nlgrpo.config.schema import Config, LossConfig
from nlgrpo.kernels.head import BLOCK_BYTES
from nlgrpo.model.attention import implementation
from nlgrpo.objectives.rank_based import OfN
from nlgrpo.objectives.registry import Objective
from nlgrpo.runtime.console import named_lines
from nlgrpo.training.losses.preference import bonbon_margin
from nlgrpo.training.offline import OfflineSamples
from nlgrpo.training.run import Run

SMALL = 0.01  # of DPO's beta
# What says how completions that the policy draws become a loss.
ONLINE = (
    "aggregate_memory", "baseline", "dual_clip", "kl_importance", "kl_in", "level", "normalization", "scale",
    "surrogate",
)  # fmt: skip


def memory(run: Run) -> dict[str, float]:
    """Bytes on one rank, by use; an estimate from shapes, without the allocator's slack and the libraries."""
    cfg, shape, world = run.config, run.shape, run.ranks.world
    count = shape.parameters
    stored = 8 if cfg.model.dtype == "float64" else 4
    compute = run.compute.itemsize
    rows = max(cfg.rollout.samples, min(cfg.rollout.max_rows, cfg.rollout.prompts * cfg.rollout.samples // world))
    columns = min(shape.context, max(map(len, run.prompts.ids)) + cfg.rollout.max_new_tokens)
    longest = max(run.micro_batch_tokens, columns)
    tokens = min(longest, cfg.rollout.prompts * cfg.rollout.samples // world * columns)
    kept = 2 if cfg.model.activation_checkpointing else 16 + 4 * shape.ffn / shape.width
    return {
        "parameters, gradients, Adam": 4 * count * stored / world,
        "critic, gradients, Adam": 4 * count * stored / world if _has_own_critic(cfg) else 0,
        "reference": count * compute / world if cfg.loss.has_reference else 0,
        "reward models": sum(getattr(reward.function, "nbytes", 0) for reward in run.sampler.rewards),
        "whole parameters while sampling": count * compute if compute != stored or world > 1 else 0,
        "cache of keys and values": 2 * shape.layers * rows * shape.kv_heads * shape.head_dim * columns * compute,
        "activations of a micro-batch": tokens * shape.width * shape.layers * kept * compute,
        "logits of a block": 3 * min(tokens * shape.vocab * 4, BLOCK_BYTES[run.ranks.device.type]),
    }


def show(run: Run) -> Table:
    """The plan as a table; what ``--dry-run`` prints."""
    cfg, ranks = run.config, run.ranks
    epochs = cfg.train.steps * cfg.rollout.prompts / len(run.prompts)
    uses = memory(run)
    parts = ", ".join(f"{name} {_size(size)}" for name, size in uses.items() if size)
    rows = {
        "model": f"{cfg.model.path} ({run.shape.family}, {run.shape.parameters:,} parameters, "
        f"context {run.shape.context}, computes in {str(run.compute).removeprefix('torch.')})",
        "ranks": f"{ranks.world} on {ranks.device.type}, attention by {implementation(ranks.device.type, run.compute)}",
        "data": f"{run.prompts!r}",
        **(_objective(run) if run.samples is None else _choices(cfg, run.samples)),
        "rewards": "\n".join(f"{n}: {f'{r.scale:g} x ' * (r.scale != 1)}{r.function}" for n, r in cfg.rewards.items()),
        "a step": _step(cfg, ranks.world),
        **_critic(cfg),
        "training": f"{cfg.train.steps} steps, {epochs:.1f} epochs of the prompts; learning rate {cfg.optim.lr:g} "
        f"{cfg.optim.schedule}",
        "evaluation": f"{min(cfg.evaluation.prompts, len(run.held_out))} prompts x {cfg.evaluation.samples} samples, "
        "before and after",
        "memory a rank": f"about {_size(sum(uses.values()))}: {parts}",
        "folder": str(run.folder),
    }
    said = notes(cfg, run.objectives)
    if said:
        rows["note"] = "\n".join(said)
    return named_lines("plan", rows)


def _objective(run: Run) -> dict[str, str]:
    loss, rewards = run.config.loss, run.config.rewards
    terms = [f"{r.weight:g} {run.objectives[n]}({n})" for n, r in rewards.items()]
    objective = " + ".join(terms) if loss.aggregate == "sum" else f"{loss.aggregate} of {', '.join(terms)}"
    objective += " at each prompt" if loss.aggregate_at == "prompt" else ""
    estimator = loss.kl if loss.kl_in == "loss" else "k1"
    kl = f" - {loss.beta:g} KL (in the {loss.kl_in}, {estimator})" if loss.beta > 0 else ""
    return {"objective": f"maximise {objective}{kl}"}


def _choices(cfg: Config, samples: OfflineSamples) -> dict[str, str]:
    """What an algorithm that draws nothing learns, and from what."""
    K, n, beta = samples.rewards.shape[1], cfg.offline.n, f"{cfg.loss.beta:g}"
    terms = [f"{r.weight:g} {name}" for name, r in cfg.rewards.items() if r.weight]
    formula = {
        "bon_sft": "-log pi(best)",
        "dpo": f"-log sigmoid({beta} h)",
        "ipo": f"(h - 1 / (2 x {beta}))^2",
        "bonbon": f"-{cfg.offline.alpha:g} log pi(best) + {1 - cfg.offline.alpha:g} (h - {bonbon_margin(n):g})^2",
    }[cfg.loss.algorithm]
    other = "worst of them" if cfg.offline.rejected == "worst" else "another one of them"
    chosen = f"best of {n} samples by {' + '.join(terms)}" + f", against the {other}" * samples.paired
    left_out = [f"{samples.unknown:,} prompts have none"] * (samples.unknown > 0)
    left_out += [f"{samples.repeated:,} are repeated"] * (samples.repeated > 0)
    left_out += [f"{samples.tied:,} have samples of one reward only"] * (samples.tied > 0)
    said = f"; {', '.join(left_out)}: left out" if left_out else ""
    margin = "; h: log pi / pi_ref of the best less that of the other" * samples.paired
    return {
        "objective": f"minimise {formula}, the {chosen}{margin}",
        "rollouts": f"{K} samples of each prompt in {samples.rollouts.folder}{said}",
    }


def _step(cfg: Config, world: int) -> str:
    P, M, n = cfg.rollout.prompts, cfg.rollout.samples, cfg.offline.n
    if cfg.loss.offline:
        what = "pairs, less those of equal rewards" if cfg.loss.paired else "winners"
        return f"{P} prompts x {M} of their samples, in {M // n} sets of {n} each = {P * (M // n)} {what}"
    updates = cfg.loss.epochs * cfg.loss.minibatches
    return (
        f"{P} prompts x {M} samples = {P * M} completions of up to {cfg.rollout.max_new_tokens} tokens, "
        f"{P * M // world} a rank; {updates} optimiser step{'s' * (updates > 1)}, loss {cfg.loss.surrogate} by "
        f"{cfg.loss.level}, normalised as {cfg.loss.normalization}"
    )


def _has_own_critic(cfg: Config) -> bool:
    return cfg.loss.algorithm == "ppo" and cfg.critic.trunk == "own"


def _critic(cfg: Config) -> dict[str, str]:
    """A row about PPO's critic, where there is one."""
    own = cfg.critic
    if cfg.loss.algorithm != "ppo":
        return {}
    what = "a head on the policy" if own.trunk == "shared" else f"a model of its own ({own.path or cfg.model.path})"
    alone = f", alone for {own.warmup_steps} steps" * (own.warmup_steps > 0)
    return {"critic": f"{what}, learning rate {own.lr:g}{alone}; GAE gamma {own.gamma:g}, lambda {own.lam:g}"}


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit in ("B", "KiB") else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


# --- notes: what a configuration gives up of the promise that the gradient is that of the objective -------------------


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
