"""What a run is going to do, before it does it: batch arithmetic, sizes, memory, and the implementations chosen."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from nlgrpo.attention import implementation
from nlgrpo.config import Config
from nlgrpo.kernels.head import BLOCK_BYTES
from nlgrpo.notes import notes
from nlgrpo.run import Run


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
        "reference": count * compute / world if cfg.loss.beta > 0 else 0,
        "reward models": sum(getattr(reward.function, "nbytes", 0) for reward in run.sampler.rewards),
        "whole parameters while sampling": count * compute if compute != stored or world > 1 else 0,
        "cache of keys and values": 2 * shape.layers * rows * shape.kv_heads * shape.head_dim * columns * compute,
        "activations of a micro-batch": tokens * shape.width * shape.layers * kept * compute,
        "logits of a block": 3 * min(tokens * shape.vocab * 4, BLOCK_BYTES[run.ranks.device.type]),
    }


def show(run: Run) -> Table:
    """The plan as a table; what ``--dry-run`` prints."""
    cfg, ranks = run.config, run.ranks
    completions = cfg.rollout.prompts * cfg.rollout.samples
    updates = cfg.loss.epochs * cfg.loss.minibatches
    epochs = cfg.train.steps * cfg.rollout.prompts / len(run.prompts)
    terms = [f"{r.weight:g} {run.objectives[n]}({n})" for n, r in cfg.rewards.items()]
    objective = " + ".join(terms) if cfg.loss.aggregate == "sum" else f"{cfg.loss.aggregate} of {', '.join(terms)}"
    objective += " at each prompt" if cfg.loss.aggregate_at == "prompt" else ""
    kl = f" - {cfg.loss.beta:g} KL (in the {cfg.loss.kl_in}, {cfg.loss.kl})" if cfg.loss.beta > 0 else ""
    uses = memory(run)
    parts = ", ".join(f"{name} {_size(size)}" for name, size in uses.items() if size)
    rows = {
        "model": f"{cfg.model.path} ({run.shape.family}, {run.shape.parameters:,} parameters, "
        f"context {run.shape.context}, computes in {str(run.compute).removeprefix('torch.')})",
        "ranks": f"{ranks.world} on {ranks.device.type}, attention by {implementation(ranks.device.type, run.compute)}",
        "data": f"{run.prompts!r}",
        "objective": f"maximise {objective}{kl}",
        "rewards": "\n".join(f"{n}: {f'{r.scale:g} x ' * (r.scale != 1)}{r.function}" for n, r in cfg.rewards.items()),
        "a step": f"{cfg.rollout.prompts} prompts x {cfg.rollout.samples} samples = {completions} completions of up to "
        f"{cfg.rollout.max_new_tokens} tokens, {completions // ranks.world} a rank; {updates} optimiser step"
        f"{'s' * (updates > 1)}, loss {cfg.loss.surrogate} by {cfg.loss.level}, normalised as {cfg.loss.normalization}",
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
    table = Table(box=SIMPLE_HEAD, show_header=False, title="plan", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in rows.items():
        table.add_row(name, Text(text))
    return table


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
