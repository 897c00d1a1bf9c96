"""The plan that a run prints before it starts: batch sizes, memory by phase, and notes on risky settings."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from nlgrpo.apps.plan import advice, estimates, memory
from nlgrpo.apps.plan.memory import Memory
from nlgrpo.apps.plan.notes import notes
from nlgrpo.apps.plan.workload import CONTEXT, Workload
from nlgrpo.config.schema import Config
from nlgrpo.engine.rollouts.evaluation_samples import size_of
from nlgrpo.engine.rollouts.inputs import unread_files
from nlgrpo.model import lora
from nlgrpo.model.architectures import Shape
from nlgrpo.model.attention import implementation
from nlgrpo.model.lora import LoraConfig
from nlgrpo.model.tokenizer import count_tokens
from nlgrpo.runtime import host_memory
from nlgrpo.runtime.console import first_tokens, named_lines, size
from nlgrpo.training.build import Setup

if TYPE_CHECKING:
    from nlgrpo.training.offline import OfflineSamples


def workload(setup: Setup) -> Workload:
    """The workload of a run that this process is about to start."""
    cfg = setup.config
    cpu = setup.ranks.device.type == "cpu"
    critic_shape = None
    if cfg.loss.algorithm == "ppo" and cfg.critic.trunk == "own":
        from nlgrpo.training import critic

        critic_shape = critic.own_shape(cfg, setup.shape)
    return Workload(
        config=cfg,
        shape=setup.shape,
        adapter=setup.adapter,
        compute=setup.compute,
        device=setup.ranks.device.type,
        world=setup.ranks.world,
        prompt=setup.prompts.longest,
        prompts_of_sets={name: one.prompts.longest for name, one in setup.evaluation_sets.items()},
        critic=critic_shape,
        reward_models=sum(getattr(reward.function, "nbytes", 0) for reward in setup.sampler.rewards),
        process=host_memory.of_process() if cpu else CONTEXT,
        gpu_memory=0.0 if cpu or not torch.cuda.is_available() else _gpu_memory(setup.ranks.device),
    )


def _gpu_memory(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory)


def show(setup: Setup) -> Table:
    """Return the plan as a table; ``--dry-run`` prints it and stops."""
    cfg = setup.config
    ranks = setup.ranks
    steps = f"{cfg.train.steps} steps"
    if known := len(setup.prompts.all()):
        steps += f", {cfg.train.steps * cfg.rollout.prompts / known:.1f} epochs"
    work = workload(setup)
    plan = memory.estimate(work)
    rows = {
        "model": f"{cfg.model.path} ({setup.shape.family}, {setup.shape.parameters:,} parameters, "
        f"context {setup.shape.context}, computes in {str(setup.compute).removeprefix('torch.')})",
        **adapter_row(setup.adapter, setup.shape),
        **_vocabulary_row(setup),
        "ranks": f"{ranks.world} on {ranks.device.type}, {implementation(ranks.device.type, setup.compute)} attention",
        **engine_row(work),
        **({"environment": setup.sampler.environment.description} if setup.sampler.environment else {}),
        "data": "\n".join([f"{setup.prompts!r}", *unread_files(cfg)]),
        **first_tokens("first prompt", setup.prompts.first, setup.tokenizer),
        **(_offline_rows(cfg, setup.samples) if setup.samples and cfg.loss.offline else _online_rows(setup)),
        "rewards": "\n".join(f"{n}: {f'{r.scale:g} x ' * (r.scale != 1)}{r.function}" for n, r in cfg.rewards.items()),
        "step": _step(cfg, ranks.world),
        **_critic_rows(cfg),
        "training": f"{steps}; {cfg.optim.description}",
        "evaluation": _evaluation(setup),
        "memory per rank": memory_lines(plan),
        "folder": str(setup.config.run),
    }
    if lines := notes(cfg, setup.objective.objectives, setup.compute):
        rows["note"] = "\n".join(lines)
    return named_lines("plan", rows)


def _evaluation(setup: Setup) -> str:
    """What is evaluated and when: a line for each evaluation set."""
    evaluation = setup.config.evaluation
    when = "before and after training"
    if evaluation.every > 0:
        when = f"before training, every {evaluation.every} steps, and after training"
    if not setup.evaluation_sets:
        return "none"
    lines: list[str] = []
    for name, chosen in setup.evaluation_sets.items():
        text = f"{name}: " if name else ""
        text += size_of(len(chosen.batch.ids), chosen.sampler.samples, chosen.left_out)
        own = name or setup.config.data.evaluation or setup.sampler.environment is not None
        if not name and setup.held_out is setup.prompts:
            text += " (it is also trained on: the data have no other)"
        elif not own:
            text += ", held out of the training data"
        lines.append(f"{text}, {when}" if not lines else text)
    if keep_best := setup.config.train.keep_best:
        patience = f"; the run ends after {evaluation.patience} evaluations without a better one"
        lines.append(f"best policy by {keep_best} in {setup.config.run / 'best'}{patience * (evaluation.patience > 0)}")
    return "\n".join(lines)


def check_memory(setup: Setup) -> None:
    """Raise UserError if the plan needs more memory than this rank has, unless train.check_memory is false."""
    device = setup.ranks.device
    work = workload(setup)
    machine = host_memory.of_machine()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = math.inf if machine is None else machine[0] / ranks
    if device.type == "cuda":
        advice.check_host(work, host)
        advice.check_fits(work, _gpu_memory(device), "the GPU")
    else:
        advice.check_fits(work, host, "the machine" if ranks == 1 else f"each of {ranks} ranks of the machine")


def memory_lines(plan: Memory) -> str:
    """The peak, what all phases need, and what each phase adds."""
    lines = [
        f"at most about {size(plan.peak)}, in the phase: {plan.largest}",
        f"in all phases: {_parts(plan.persistent)}",
    ]
    if plan.host:
        lines.append(f"in the memory of the host: {size(sum(plan.host.values()))}: {_parts(plan.host)}")
    for name, uses in plan.phases.items():
        lines.append(f"{name} {size(plan.total(name))}{': ' * bool(uses)}{_parts(uses)}")
    return "\n".join(lines)


def _parts(uses: dict[str, float]) -> str:
    return ", ".join(f"{name} {size(number)}" for name, number in uses.items())


def _vocabulary_row(setup: Setup) -> dict[str, str]:
    """Row for a head with rows that have no token; none without."""
    left_out = setup.shape.vocab - count_tokens(setup.tokenizer)
    if left_out <= 0:
        return {}
    said = (
        f"{setup.shape.vocab:,} rows; the last {left_out:,} have no token in the tokenizer and are left out of samples"
    )
    return {"vocabulary": f"{said} and log-probs"}


def adapter_row(adapter: LoraConfig | None, shape: Shape) -> dict[str, str]:
    """Row for the adapters; none without."""
    if adapter is None:
        return {}
    trained = lora.count(adapter, shape)
    names = [*lora.targets(adapter, shape), *adapter.modules_to_save]
    start = f", continuing {adapter.path}" if adapter.path else ""
    share = f"{trained:,} trained parameters, {trained / shape.parameters:.2%} of the model{start}"
    return {"adapters": f"LoRA of rank {adapter.rank} on {', '.join(names)}, scaled by {adapter.scaling:g}: {share}"}


def engine_row(work: Workload) -> dict[str, str]:
    """Row for vLLM; none for nlgrpo's engine."""
    vllm = work.config.vllm
    ahead = work.config.rollout.ahead
    if work.engine == "servers":
        number = len(vllm.servers)
        early = f", up to {ahead} step{'s' * (ahead > 1)} ahead" * (ahead > 0)
        return {"engine": f"vLLM on {number} server{'s' * (number > 1)}{early}; evaluations too"}
    if work.engine == "nlgrpo":
        return {}
    engines = f", {vllm.tensor_parallel} ranks per engine" * (vllm.tensor_parallel > 1)
    share = f", with {vllm.gpu_memory:.0%} of the GPU" * (work.device != "cpu")
    asleep = " while it samples" * (work.device != "cpu" and vllm.sleep)
    return {"engine": f"vLLM in the processes of the trainer{engines}{share}{asleep}"}


def _online_rows(setup: Setup) -> dict[str, str]:
    loss = setup.config.loss
    rewards = setup.config.rewards
    terms = [
        f"{r.weight:g} {setup.objective.objectives[n]}({f'{r.transform} of {n}' if r.transform else n})"
        for n, r in rewards.items()
    ]
    objective = " + ".join(terms) if loss.aggregate == "sum" else f"{loss.aggregate} of {', '.join(terms)}"
    objective += " at each prompt" if loss.aggregate_at == "prompt" else ""
    estimator = f"{'weighted ' * loss.weights_kl}{loss.kl}" if loss.kl_in == "loss" else "k1"
    kl = f" - {loss.beta:g} KL (in the {loss.kl_in}, {estimator})" if loss.beta > 0 else ""
    kl += f" (KL: logged every {loss.log_kl_every} steps)" * (loss.beta == 0 and loss.log_kl_every > 0)
    if loss.jeffreys:
        best = f"log pi(best of {setup.config.offline.n} reference samples)"
        return {"objective": f"maximise {1 - loss.jeffreys:g} ({objective}{kl}) + {loss.jeffreys:g} {best}"}
    if all(str(setup.objective.objectives[name]) == "mean" for name, reward in rewards.items() if reward.weight != 0):
        kl += '; the mean is what GRPO maximises, for one sample. For the best of 8: objective = "bon:8"'
    rows = {"objective": f"maximise {objective}{kl}"}
    biased = estimates.lines(setup.objective.objectives, rewards, setup.config.rollout.samples, loss.baseline)
    return rows | ({"estimators": "\n".join(biased)} if biased else {})


def _offline_rows(cfg: Config, samples: OfflineSamples) -> dict[str, str]:
    """Rows for the loss and the data of an offline algorithm."""
    from nlgrpo.losses.preference import bonbon_margin

    K = samples.rewards.shape[1]
    n = cfg.offline.n
    beta = f"{cfg.loss.beta:g}"
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
    dropped += [f"{samples.unscored:,} with fewer than {n} samples with a reward"] * (samples.unscored > 0)
    dropped_text = f"; prompts dropped: {', '.join(dropped)}" if dropped else ""
    absent = int(samples.rewards.isnan().sum())
    dropped_text += f"; {absent:,} of {samples.rewards.numel():,} samples without a reward left out" * (absent > 0)
    return {
        "objective": f"minimise {formula}{margin}; chosen: the best of {n} samples by {' + '.join(terms)}{rejected}",
        "rollouts": f"{K} samples per prompt in {samples.rollouts.folder}{dropped_text}",
    }


SURROGATES = {"ppo": "clipped surrogate (PPO, GRPO)", "cispo": "CISPO's surrogate", "reinforce": "REINFORCE"}


def _step(cfg: Config, world: int) -> str:
    P = cfg.rollout.prompts
    M = cfg.rollout.samples
    n = cfg.offline.n
    if cfg.loss.offline:
        unit = "pairs, minus those with equal rewards" if cfg.loss.paired else "chosen samples"
        per_set = n * (n - 1) // 2 if cfg.loss.paired and cfg.offline.rejected == "all" else 1
        return f"{P} prompts x {M} samples in {M // n} sets of {n} = {P * (M // n) * per_set} {unit}"
    updates = cfg.loss.epochs * cfg.loss.minibatches
    what = "conversations with answers" if cfg.environment.id else "completions"
    return (
        f"{P} prompts x {M} samples = {P * M} {what} of up to {cfg.rollout.max_new_tokens} tokens, "
        f"{P * M // world} per rank; {updates} optimiser step{'s' * (updates > 1)}, {SURROGATES[cfg.loss.surrogate]} "
        f"per {cfg.loss.level}, {cfg.loss.normalization} normalization"
    )


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
