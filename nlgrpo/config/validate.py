"""Checks of a configuration: values out of range, and values that do not fit together."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from huggingface_hub.utils import validate_repo_id

from nlgrpo.config.schema import (
    Config,
    DataConfig,
    RewardConfig,
    ScalarHeadConfig,
    dashed,
    out_of_bounds,
)
from nlgrpo.errors import UserError
from nlgrpo.kernels.policy_loss import check_settings
from nlgrpo.objectives import aggregation, registry
from nlgrpo.objectives.majority import MOST_VOTES
from nlgrpo.runtime import secrets, user_code

# module of each tracker
TRACKERS = {
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "comet": "comet_ml",
    "tensorboard": "tensorboard",
}
ENVIRONMENT_DATA = ("shuffle", "limit", "chat_template_kwargs")  # what an environment takes of [data]


def check_config(config: Config, *, world: int = 1) -> None:
    """Check a configuration. Raises UserError that lists every fault with the value and what is allowed."""
    loss = config.loss
    faults = shared_faults(config, config.train.steps)
    if loss.algorithm != "ppo":
        faults = [fault for fault in faults if not fault.startswith("critic.")]
    faults += _data_faults(config)
    faults += _environment_faults(config)
    faults += _divergence_faults(config)
    faults += _rollout_faults(config, world)
    faults += _engine_faults(config)
    faults += config.parallel.faults(world)
    faults += config.vllm.faults(world)
    faults += push_faults(config.train.push)
    faults += _evaluation_faults(config, world)
    if loss.offline:
        faults += _offline_faults(config)
    elif loss.jeffreys:
        faults += _jeffreys_faults(config)
    if loss.algorithm == "ppo":
        faults += _critic_faults(config)
    faults += _loss_faults(config)
    faults += _correction_faults(config)
    faults += _reward_faults(config)
    faults += _aggregate_faults(config)
    refuse(faults)


def refuse(faults: Iterable[str]) -> None:
    """Raise UserError with the faults that are not empty, if there are any."""
    lines = [f"  {fault}" for fault in faults if fault]
    if lines:
        raise UserError("\n".join(["the configuration cannot be run:", *lines]))


def bound_faults(config: Any, prefix: str = "") -> list[str]:
    """List the numbers of a configuration, and of its sections, that the bounds of their fields do not allow."""
    return [f"{prefix}{name} = {value!r}: allowed is {allowed}" for name, value, allowed in out_of_bounds(config)]


def shared_faults(config: Config | ScalarHeadConfig, steps: float = math.inf) -> list[str]:
    """List the faults of what all training configurations have: bounds, secrets, [lora], [optim] and [train].

    ``steps``: of the run; inf: their number is not known yet.
    """
    optim = config.optim
    faults = [*bound_faults(config), *secrets.faults(asdict(config)), *config.lora.faults()]
    if config.lora.enabled and optim.algorithm == "muon":
        faults.append("optim.algorithm = 'muon' trains the matrices that adapters freeze; use 'adamw'")
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        faults.append(f"optim.betas = {optim.betas!r}: allowed is two values in [0, 1)")
    return [*faults, *tracker_faults(config.train.track), *profile_faults(config.train.profile, steps)]


def profile_faults(text: str, steps: float) -> list[str]:
    """List what is wrong with the steps to profile, of a run of ``steps``; inf: their number is not known yet."""
    from nlgrpo.runtime.profiling import steps_of

    try:
        profiled = steps_of(text)
    except ValueError as error:
        return [f"train.profile = {error}"]
    if profiled and profiled.start >= steps:
        return [f"train.profile = {text!r}: the run has the steps 0 to {steps - 1}"]
    return []


def push_faults(repository: str) -> list[str]:
    """List the fault of a repository's name on the Hugging Face Hub; none for an empty one."""
    try:
        if repository:
            validate_repo_id(repository)
    except ValueError as error:
        return [f"train.push = {repository!r}: {error}"]
    return []


def tracker_faults(names: Sequence[str]) -> list[str]:
    """List the trackers that are unknown or not installed."""
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        return [f"train.track = {list(names)}: allowed are {', '.join(map(repr, TRACKERS))}"]
    absent = [name for name in names if importlib.util.find_spec(TRACKERS[name]) is None]
    return [f"train.track has {name!r}, which is not installed: run pip install nlgrpo[{name}]" for name in absent]


def split_fault(split: str) -> str:
    """Return the fault of a split of an evaluation source that is not given."""
    return f"data.evaluation_split = {split!r}: allowed is empty, because data.evaluation is empty"


def _data_faults(config: Config) -> list[str]:
    data = config.data
    loss = config.loss
    faults = _buffer_faults(data)
    for name, text in {"cut_after": data.cut_after, "separator": data.separator}.items():
        if text == "":
            faults.append(f"data.{name} = '': allowed is a text or none")
    if data.evaluation_split and not data.evaluation:
        faults.append(split_fault(data.evaluation_split))
    if data.mixture and data.source not in ("", DataConfig().source):
        faults.append(
            f"data.source = {data.source!r} is not used beside data.mixture: name it there, and set data.source = ''"
        )
    if data.mixture and loss.offline:
        faults.append(f"data.mixture: {loss.algorithm} visits all prompts equally often; use one data.source")
    drawn = config.calibration.missing == "draw" and not config.calibration.rollouts
    if data.streaming and (loss.offline or (any(r.transform for r in config.rewards.values()) and not drawn)):
        faults.append("data.streaming: rollouts of the reference need prompts that are known in advance")
    return faults


def _buffer_faults(data: DataConfig) -> list[str]:
    """Find shuffle buffers that no stream uses: that of [data], and those of the sources of a mixture."""
    advice = "only a shuffled stream has one; set data.streaming = true and data.shuffle = true"
    faults = []
    used = False  # whether a source is a shuffled stream
    for name, value in (data.mixture or {"": None}).items():
        own = value if isinstance(value, dict) else {}
        shuffled = own.get("streaming", data.streaming) and own.get("shuffle", data.shuffle)
        used = used or bool(shuffled)
        if "shuffle_buffer" in own and not shuffled:
            faults.append(f"data.mixture, {name!r}: shuffle_buffer = {own['shuffle_buffer']!r}: {advice}")
    if data.shuffle_buffer != DataConfig().shuffle_buffer and not used:
        faults.append(f"data.shuffle_buffer = {data.shuffle_buffer}: {advice}")
    return faults


def _divergence_faults(config: Config) -> list[str]:
    faults = []
    if config.divergence.action == "rollback" and config.loss.offline:
        faults.append(f"divergence.action = 'rollback': {config.loss.algorithm} draws no samples; use 'stop'")
    if config.divergence.action == "rollback" and not config.train.checkpoint_every:
        faults.append("divergence.action = 'rollback' needs checkpoints: set train.checkpoint_every")
    return faults


def _environment_faults(config: Config) -> list[str]:
    environment = config.environment
    data = config.data
    limit = environment.max_tokens
    faults = []
    if limit is not None and limit <= config.rollout.max_new_tokens:
        faults.append(f"environment.max_tokens = {limit}: allowed is > rollout.max_new_tokens or none")
    if not environment.id:
        return faults
    default = DataConfig()
    given = [key.name for key in fields(data) if key.name not in ENVIRONMENT_DATA]
    ignored = [f"data.{name}" for name in given if getattr(data, name) not in (getattr(default, name), "")]
    if ignored:
        faults.append(f"{', '.join(ignored)}: the environment gives the prompts, those of evaluation too, and uses "
                      f"only {', '.join(f'data.{name}' for name in ENVIRONMENT_DATA)}; remove the others")  # fmt: skip
    if config.loss.offline or config.loss.jeffreys or any(reward.transform for reward in config.rewards.values()):
        faults.append("environment.id: conversations of an environment are not sampled from the reference, which "
                      f"{config.loss.algorithm!r} or a transform needs")  # fmt: skip
    return faults


def _rollout_faults(config: Config, world: int) -> list[str]:
    rollout = config.rollout
    faults = []
    if rollout.samples == 1 and config.loss.baseline != "none" and not config.loss.offline:
        faults.append(
            "rollout.samples = 1: allowed is >= 2, because the baseline is the mean of the group; 1 with "
            "loss.baseline = 'none'"
        )
    if rollout.prompts % world:
        faults.append(f"rollout.prompts = {rollout.prompts}: it must be a multiple of the number of ranks, {world}")
    return faults


def _evaluation_faults(config: Config, world: int) -> list[str]:
    evaluation = config.evaluation
    faults = []
    if 0 < evaluation.prompts < world:
        faults.append(
            f"evaluation.prompts = {evaluation.prompts}: allowed is 0 (no evaluation) or >= {world}, one prompt per "
            "rank"
        )
    if fault := evaluation.ns_fault():
        faults.append(fault)
    votes = any(registry.is_voted(reward.objective) for reward in config.rewards.values())
    if votes and max(evaluation.ns, default=0) > MOST_VOTES:
        faults.append(f"evaluation.ns: at most {MOST_VOTES} with the objective maj:N")
    if evaluation.every or evaluation.patience or evaluation.gold or evaluation.sets or config.train.keep_best:
        from nlgrpo.config import evaluation_sets

        faults += evaluation_sets.faults(config)
    return faults


def _loss_faults(config: Config) -> list[str]:
    loss = config.loss
    rollout = config.rollout
    faults = []
    try:
        check_settings(loss.settings(beta=0.0), ref_logprob=None)
    except ValueError as error:
        faults.append(f"loss.{error}")
    if loss.minibatches > max(1, rollout.prompts * rollout.samples):
        faults.append(f"loss.minibatches = {loss.minibatches}: more than the completions per step")
    if loss.scale != "none" and not loss.offline and (loss.baseline == "none" or loss.algorithm == "ppo"):
        instead = "use critic.whiten" if loss.algorithm == "ppo" else "use a baseline, or scale 'none'"
        faults.append(
            f"loss.scale = {loss.scale!r} needs a baseline, which "
            f"{'PPO' if loss.algorithm == 'ppo' else repr(loss.baseline)} does not have: {instead}"
        )
    if loss.kl_importance and (loss.kl != "k3" or loss.kl_in != "loss"):
        faults.append(
            f"loss.kl_importance needs loss.kl = 'k3' and loss.kl_in = 'loss', got {loss.kl!r} and {loss.kl_in!r}"
        )
    if loss.target_kl is not None and loss.beta == 0:
        faults.append("loss.target_kl multiplies beta by a factor, so loss.beta must start above 0")
    if loss.aggregate_memory > 0 and loss.aggregate_at == "prompt":
        faults.append("loss.aggregate_memory needs loss.aggregate_at = 'batch': it averages means over prompts")
    return faults


def _engine_faults(config: Config) -> list[str]:
    rollout = config.rollout
    faults = []
    if config.vllm.servers and rollout.engine != "vllm":
        faults.append(f"vllm.servers: only with rollout.engine = 'vllm', got {rollout.engine!r}")
    if rollout.ahead > 0 and not config.vllm.servers:
        faults.append(
            f"rollout.ahead = {rollout.ahead}: needs rollout.engine = 'vllm' and vllm.servers, which sample while the "
            "trainer trains"
        )
    if config.train.deterministic and rollout.engine == "vllm" and not config.loss.offline:
        faults.append(
            "train.deterministic: completions of vLLM depend on how it batches requests; use rollout.engine = 'nlgrpo'"
        )
    return faults


def _correction_faults(config: Config) -> list[str]:
    loss = config.loss
    if loss.correction == "none":
        return []
    from nlgrpo.objectives import importance_sampling

    try:
        correction = importance_sampling.parse_correction(loss.correction, loss.correction_level)
    except ValueError as error:
        return [f"loss.correction: {error}"]
    if correction is None:
        return []
    if loss.offline:
        return [f"loss.correction = {loss.correction!r}: only for online algorithms; {loss.algorithm!r} is offline"]
    return [
        f"rewards.{name}.objective = {reward.objective!r}: the kernel smoother takes no importance weights; use "
        "loss.correction_level = 'token', or the objective without ':kde'"
        for name, reward in config.rewards.items()
        if loss.correction_level == "sequence" and ":kde" in reward.objective
    ]


def _transform_faults(name: str, reward: RewardConfig, config: Config) -> list[str]:
    """Faults of a reward with a transform."""
    from nlgrpo.calibration import variational
    from nlgrpo.calibration.transforms import parse_transform

    beta = config.loss.beta
    own = config.calibration
    faults = []
    try:
        variational_bon = variational.parse_variational(reward.transform)
        if variational_bon is None:
            parse_transform(reward.transform, beta=beta or 1.0, function=user_code.function)
    except ValueError as error:
        return [f"{name}.transform: {error}"]
    if beta == 0:
        faults.append(
            f"{name}.transform = {reward.transform!r}: needs loss.beta > 0: with 0 no reference model is loaded"
        )
    if variational_bon is not None and reward.objective != "mean":
        faults.append(f"{name}.transform = {reward.transform!r} needs objective = 'mean', got {reward.objective!r}")
    if variational_bon is not None and own.by != "prompt":
        faults.append(f"{name}.transform = {reward.transform!r} needs calibration.by = 'prompt', got {own.by!r}")
    if own.by == "pooled" and (not own.rollouts or own.missing != "error"):
        faults.append(
            "calibration.by = 'pooled': needs the samples of all prompts before training, calibration.rollouts (a "
            "folder of `nlgrpo rollout`) with calibration.missing = 'error'"
        )
    if registry.is_pairwise(reward.objective):
        faults.append(f"{name}.transform: {reward.objective!r} takes a similarity kernel, which has no ranks")
    if registry.is_voted(reward.objective):
        faults.append(f"{name}.transform: {reward.objective!r} votes over answers; it takes the reward itself")
    if not own.rollouts and own.missing == "error":
        faults.append(
            f"{name}.transform = {reward.transform!r}: needs samples of the reference, calibration.rollouts "
            "(a folder of `nlgrpo rollout`) or calibration.missing = 'draw'"
        )
    return faults


def _offline_faults(config: Config) -> list[str]:
    """Faults of an offline algorithm, including keys that it would ignore."""
    loss = config.loss
    own = config.offline
    samples = config.rollout.samples
    name = f"loss.algorithm = {loss.algorithm!r}"
    least = 2 if loss.paired else 1
    faults = []
    if not config.calibration.rollouts:
        faults.append(f"{name}: needs samples of the reference, calibration.rollouts (a folder of `nlgrpo rollout`)")
    if not least <= own.n <= samples:
        allowed = f"{least} to rollout.samples = {samples}, the samples per prompt in a step"
        faults.append(f"offline.n = {own.n}: allowed with {name} is {allowed}")
    if loss.algorithm == "bonbon" and own.rejected != "worst" and own.n > 2:
        faults.append(
            f"offline.rejected = {own.rejected!r}: the margin of bonbon is for the best and the worst of n; use 'worst'"
        )
    if own.alpha is not None and not 0 <= own.alpha <= 1:
        faults.append(f"offline.alpha = {own.alpha}: allowed is in [0, 1]")
    if loss.jeffreys:
        faults.append(f"loss.jeffreys = {loss.jeffreys}: only for online algorithms; {name} is offline")
    if loss.algorithm in ("dpo", "ipo") and loss.beta == 0:
        faults.append(f"loss.beta = 0: {name} has no optimum; allowed is > 0")
    if loss.epochs * loss.minibatches > 1:
        several = f"loss.epochs = {loss.epochs}, loss.minibatches = {loss.minibatches}"
        faults.append(f"{several}: {name} takes one optimizer step per training step; set train.steps instead")
    if loss.target_kl is not None:
        faults.append(f"loss.target_kl needs completions of the policy, and {name} is offline")
    if loss.aggregate != "sum":
        faults.append(
            f"loss.aggregate = {loss.aggregate!r}: {name} ranks samples by the weighted sum of the rewards; use 'sum'"
        )
    for reward, given in config.rewards.items():
        if given.weight and registry.is_pairwise(given.objective):
            faults.append(
                f"rewards.{reward}: {name} ranks samples by rewards, and {given.objective!r} takes a similarity kernel"
            )
    return faults


def _jeffreys_faults(config: Config) -> list[str]:
    n = config.offline.n
    samples = config.rollout.samples
    faults = []
    if not config.calibration.rollouts:
        faults.append(
            "loss.jeffreys: needs samples of the reference, calibration.rollouts (a folder of `nlgrpo rollout`)"
        )
    if not 1 <= n <= samples:
        faults.append(f"offline.n = {n}: allowed with loss.jeffreys is 1 to rollout.samples = {samples}")
    return faults


def _critic_faults(config: Config) -> list[str]:
    critic = config.critic
    faults = []
    if critic.trunk == "shared" and critic.path:
        faults.append(f"critic.path = {critic.path!r}: critic.trunk = 'shared' has no model of its own; leave it empty")
    if config.loss.level == "sequence":
        faults.append(
            "loss.level = 'sequence' does not fit the per-token advantages of loss.algorithm = 'ppo'; use 'token'"
        )
    return faults


def _aggregate_faults(config: Config) -> list[str]:
    weights = [reward.weight for reward in config.rewards.values()]
    if not any(weights) or not all(map(math.isfinite, weights)):
        return []  # reported by _reward_faults
    try:
        aggregation.parse_aggregate(config.loss.aggregate, weights)
    except ValueError as error:
        return [f"loss.aggregate: {error}"]
    return []


def _reward_faults(config: Config) -> list[str]:
    rewards = config.rewards
    samples = config.rollout.samples
    faults = list[str]()
    if not rewards:
        faults.append("there is no reward: give one with --rewards.NAME.function, or a [rewards.NAME] table")
    if rewards and all(reward.weight == 0 for reward in rewards.values()):
        faults.append("every reward has weight 0: there is nothing to train for")
    if len({dashed(name) for name in rewards}) < len(rewards):
        faults.append(
            f"rewards {', '.join(rewards)}: two names differ only in - and _, which are the same on the command line"
        )
    for name, reward in rewards.items():
        faults += bound_faults(reward, f"rewards.{name}.")
        if not re.fullmatch(r"\w[\w-]{,63}", name):
            faults.append(f"rewards: {name!r} is not a valid name; allowed are up to 64 letters, digits, - and _")
        if not math.isfinite(reward.weight):
            faults.append(f"rewards.{name}.weight = {reward.weight}: allowed is a finite number")
        if not 0 < abs(reward.scale) < math.inf:
            faults.append(f"rewards.{name}.scale = {reward.scale}: allowed is a finite number other than 0")
        if not reward.function:
            faults.append(f"rewards.{name}.function is missing")
        if reward.transform and not config.loss.offline:
            faults += _transform_faults(f"rewards.{name}", reward, config)
        try:
            objective = registry.parse(reward.objective, user_code.function)
            fewest = objective.fewest
            if isinstance(objective, registry.Functional):
                objective.check(samples)
            if samples == 1 and fewest == 1 and not config.loss.offline and not registry.learns_from_one(objective):
                fewest = 2
        except ValueError as error:
            faults.append(f"rewards.{name}.objective: {error}")
        else:
            if fewest > samples:
                faults.append(f"rewards.{name}.objective = {reward.objective!r}: needs rollout.samples >= {fewest}")
    return faults
