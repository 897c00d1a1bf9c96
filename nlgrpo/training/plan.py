"""The plan that a run prints before it starts: batch sizes, an estimate of memory, and notes on risky settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from nlgrpo.config.schema import Config, LossConfig
from nlgrpo.kernels.head import BLOCK_BYTES
from nlgrpo.model import lora
from nlgrpo.model.architectures import Shape
from nlgrpo.model.attention import implementation
from nlgrpo.model.lora import LoraConfig
from nlgrpo.objectives.rank_based import OfN
from nlgrpo.objectives.registry import Objective
from nlgrpo.runtime.console import named_lines
from nlgrpo.runtime.device import master_dtype
from nlgrpo.training.losses.preference import bonbon_margin
from nlgrpo.training.offline import OfflineSamples
from nlgrpo.training.run import Run

SMALL = 0.01  # a beta of DPO or IPO below this gets a note
# Keys of [loss] that only the online algorithms read.
ONLINE = (
    "aggregate_memory", "baseline", "dual_clip", "kl_importance", "kl_in", "level", "normalization", "scale",
    "surrogate",
)  # fmt: skip


def memory(run: Run) -> dict[str, float]:
    """Estimate the memory of one rank in bytes, by use, from shapes; without allocator overhead and libraries."""
    cfg, shape, world = run.config, run.shape, run.ranks.world
    shards = world // cfg.parallel.replicate
    count, adapter = shape.parameters, run.adapter
    stored, compute = master_dtype(run.compute).itemsize, run.compute.itemsize
    trained = count if adapter is None else lora.count(adapter, shape)
    muon = cfg.optim.algorithm == "muon"
    values = 4 * trained - (shape.matrices if muon else 0)  # Muon has one moment, Adam two
    model = (values * stored + (count * compute if adapter is not None else 0)) / shards
    rows = max(cfg.rollout.samples, min(cfg.rollout.max_rows, cfg.rollout.prompts * cfg.rollout.samples // world))
    prompt = max(map(len, run.prompts.ids))
    columns = min(shape.context, prompt + cfg.rollout.max_new_tokens)
    cached = rows // cfg.rollout.samples * prompt + rows * (columns - prompt)  # tokens
    group, limit = prompt + cfg.rollout.samples * (columns - prompt), run.micro_batch_limit
    largest = max(limit.tokens, columns, min(limit.group, group))  # micro-batch
    tokens = min(largest, cfg.rollout.prompts // world * group)
    optimizer = "Muon" if muon else "Adam"
    per_layer = 2 if cfg.model.activation_checkpointing else 16 + 4 * shape.ffn / shape.width
    return {
        f"parameters + gradients + {optimizer}": model,
        f"critic + gradients + {optimizer}": model if _has_own_critic(cfg) else 0,
        "reference": count * compute / shards if cfg.loss.has_reference and adapter is None else 0,
        "reward models": sum(getattr(reward.function, "nbytes", 0) for reward in run.sampler.rewards),
        "unsharded parameters while sampling": count * compute if compute != stored or shards > 1 else 0,
        "KV cache": 2 * shape.layers * cached * shape.kv_heads * shape.head_dim * compute,
        "activations": tokens * shape.width * shape.layers * per_layer * compute,
        "logits": 3 * min(tokens * shape.vocab * 4, BLOCK_BYTES[run.ranks.device.type]),
    }


def show(run: Run) -> Table:
    """Return the plan as a table; ``--dry-run`` prints it and stops."""
    cfg, ranks = run.config, run.ranks
    epochs = cfg.train.steps * cfg.rollout.prompts / len(run.prompts)
    uses = memory(run)
    parts = ", ".join(f"{name} {_size(size)}" for name, size in uses.items() if size)
    rows = {
        "model": f"{cfg.model.path} ({run.shape.family}, {run.shape.parameters:,} parameters, "
        f"context {run.shape.context}, computes in {str(run.compute).removeprefix('torch.')})",
        **_adapter_row(run.adapter, run.shape),
        "ranks": f"{ranks.world} on {ranks.device.type}, {implementation(ranks.device.type, run.compute)} attention",
        "data": f"{run.prompts!r}",
        **(_offline_rows(cfg, run.samples) if run.samples and cfg.loss.offline else _online_rows(run)),
        "rewards": "\n".join(f"{n}: {f'{r.scale:g} x ' * (r.scale != 1)}{r.function}" for n, r in cfg.rewards.items()),
        "step": _step(cfg, ranks.world),
        **_critic_rows(cfg),
        "training": f"{cfg.train.steps} steps, {epochs:.1f} epochs; {cfg.optim.description}",
        "evaluation": f"{min(cfg.evaluation.prompts, len(run.held_out))} prompts x {cfg.evaluation.samples} samples, "
        "before and after training",
        "memory per rank": f"about {_size(sum(uses.values()))}: {parts}",
        "folder": str(run.folder),
    }
    if lines := notes(cfg, run.objectives):
        rows["note"] = "\n".join(lines)
    return named_lines("plan", rows)


def _adapter_row(adapter: LoraConfig | None, shape: Shape) -> dict[str, str]:
    if adapter is None:
        return {}
    trained, names = lora.count(adapter, shape), [*lora.targets(adapter, shape), *adapter.modules_to_save]
    start = f", continuing {adapter.path}" if adapter.path else ""
    share = f"{trained:,} trained parameters, {trained / shape.parameters:.2%} of the model{start}"
    return {"adapters": f"LoRA of rank {adapter.rank} on {', '.join(names)}, scaled by {adapter.scaling:g}: {share}"}


def _online_rows(run: Run) -> dict[str, str]:
    loss, rewards = run.config.loss, run.config.rewards
    terms = [
        f"{r.weight:g} {run.objectives[n]}({f'{r.transform} of {n}' if r.transform else n})" for n, r in rewards.items()
    ]
    objective = " + ".join(terms) if loss.aggregate == "sum" else f"{loss.aggregate} of {', '.join(terms)}"
    objective += " at each prompt" if loss.aggregate_at == "prompt" else ""
    estimator = loss.kl if loss.kl_in == "loss" else "k1"
    kl = f" - {loss.beta:g} KL (in the {loss.kl_in}, {estimator})" if loss.beta > 0 else ""
    if loss.jeffreys:
        best = f"log pi(best of {run.config.offline.n} reference samples)"
        return {"objective": f"maximise {1 - loss.jeffreys:g} ({objective}{kl}) + {loss.jeffreys:g} {best}"}
    return {"objective": f"maximise {objective}{kl}"}


def _offline_rows(cfg: Config, samples: OfflineSamples) -> dict[str, str]:
    """Rows for the loss and the data of an offline algorithm."""
    K, n, beta = samples.rewards.shape[1], cfg.offline.n, f"{cfg.loss.beta:g}"
    alpha = samples.config.alpha or 0.0
    terms = [f"{r.weight:g} {name}" for name, r in cfg.rewards.items() if r.weight]
    formula = {
        "bon_sft": "-log pi(chosen)",
        "dpo": f"-log sigmoid({beta} h)",
        "ipo": f"(h - 1 / (2 x {beta}))^2",
        "bonbon": f"-{alpha:g} log pi(chosen) + {1 - alpha:g} (h - {bonbon_margin(n):g})^2" if n > 1 else "",
    }[cfg.loss.algorithm]
    margin = ", h = log pi/pi_ref(chosen) - log pi/pi_ref(rejected)" * samples.paired
    other = {"worst": "the worst", "random": "another"}.get(cfg.offline.rejected, "each worse one")
    rejected = f"; rejected: {other} of these" * samples.paired
    dropped = [f"{samples.unknown:,} without rollouts"] * (samples.unknown > 0)
    dropped += [f"{samples.repeated:,} repeated"] * (samples.repeated > 0)
    dropped += [f"{samples.tied:,} whose samples all have the same reward"] * (samples.tied > 0)
    dropped_text = f"; prompts dropped: {', '.join(dropped)}" if dropped else ""
    return {
        "objective": f"minimise {formula}{margin}; chosen: the best of {n} samples by {' + '.join(terms)}{rejected}",
        "rollouts": f"{K} samples per prompt in {samples.rollouts.folder}{dropped_text}",
    }


def _step(cfg: Config, world: int) -> str:
    P, M, n = cfg.rollout.prompts, cfg.rollout.samples, cfg.offline.n
    if cfg.loss.offline:
        unit = "pairs, minus those with equal rewards" if cfg.loss.paired else "chosen samples"
        per_set = n * (n - 1) // 2 if cfg.loss.paired and cfg.offline.rejected == "all" else 1
        return f"{P} prompts x {M} samples in {M // n} sets of {n} = {P * (M // n) * per_set} {unit}"
    updates = cfg.loss.epochs * cfg.loss.minibatches
    return (
        f"{P} prompts x {M} samples = {P * M} completions of up to {cfg.rollout.max_new_tokens} tokens, "
        f"{P * M // world} per rank; {updates} optimiser step{'s' * (updates > 1)}, {cfg.loss.surrogate} loss per "
        f"{cfg.loss.level}, {cfg.loss.normalization} normalization"
    )


def _has_own_critic(cfg: Config) -> bool:
    return cfg.loss.algorithm == "ppo" and cfg.critic.trunk == "own"


def _critic_rows(cfg: Config) -> dict[str, str]:
    """Row for the critic of PPO; none for other algorithms."""
    critic = cfg.critic
    if cfg.loss.algorithm != "ppo":
        return {}
    shared = critic.trunk == "shared"
    model = "a head on the policy" if shared else f"a separate model ({critic.path or cfg.model.path})"
    warmup = f", trained alone for the first {critic.warmup_steps} steps" * (critic.warmup_steps > 0)
    gae = f"GAE gamma {critic.gamma:g}, lambda {critic.lam:g}"
    return {"critic": f"{model}, learning rate {critic.lr:g}{warmup}; {gae}"}


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit in ("B", "KiB") else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


# --- notes: settings that make the gradient differ from the objective's -----------------------------------------------


def notes(config: Config, objectives: Mapping[str, Objective]) -> list[str]:
    """One line, with the alternative, per setting that makes the gradient differ from the objective's."""
    if config.loss.offline:
        return [*_on_sampling(config), *_on_ignored_keys(config), *_on_small_beta(config)]
    on_objective = [*_on_sampling(config), *_on_estimators(config, objectives), *_on_transforms(config)]
    return [*on_objective, *_on_loss(config), *_on_kl(config)]


def _on_sampling(config: Config) -> Iterator[str]:
    r = config.rollout
    cuts = [f"{name} = {value:g}" for name, value, off in
            (("top_k", r.top_k, 0), ("top_p", r.top_p, 1), ("min_p", r.min_p, 0)) if value != off]  # fmt: skip
    if cuts:
        yield f"rollout.{', rollout.'.join(cuts)}: samples come from the truncated policy, and the full one is trained."


def _on_ignored_keys(config: Config) -> Iterator[str]:
    loss, plain = vars(config.loss), vars(LossConfig())
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
    M = config.rollout.samples
    for name, objective in objectives.items():
        if isinstance(objective, OfN) and objective.estimator == "plugin" and objective.n > M:
            yield (
                f"rewards.{name}: {objective} with {M} samples is a plug-in estimate, biased at order 1/M; "
                f"rollout.samples >= {objective.n} allows '{objective}:unbiased'."
            )
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
    if loss.algorithm == "ppo" and config.critic.whiten and loss.beta > 0 and loss.kl_in == "loss":
        yield (
            "critic.whiten divides the advantages by their standard deviation, but not the KL in the loss, whose "
            "relative weight becomes beta times that std; loss.kl_in = 'reward' divides both."
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
    if loss.beta > 0 and loss.kl_in == "loss" and loss.kl == "k1":
        yield (
            "loss.kl = 'k1' in the loss has a gradient of 0 in expectation, so it does not restrain the policy; "
            "use 'k2' or 'k3', or loss.kl_in = 'reward'."
        )
