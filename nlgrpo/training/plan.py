"""What a run is going to do, before it does it: batch arithmetic, sizes, memory, and the implementations chosen."""

from __future__ import annotations

from rich.table import Table

from nlgrpo.config.advisories import notes
from nlgrpo.config.schema import Config
from nlgrpo.kernels.head import BLOCK_BYTES
from nlgrpo.model.attention import implementation
from nlgrpo.runtime.console import named_lines
from nlgrpo.training.losses.preference import bonbon_margin
from nlgrpo.training.offline import OfflineSamples
from nlgrpo.training.run import Run


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
