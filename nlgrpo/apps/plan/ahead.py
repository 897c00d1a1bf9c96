"""The workload of a run on machines that are not here, from its configuration and the configs of its models.

Nothing is loaded: no weights, tokenizer, data or rewards. A model of the hub needs only its config.json.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from nlgrpo.apps.plan import vllm_memory
from nlgrpo.apps.plan.workload import CONTEXT, Workload
from nlgrpo.config import validate
from nlgrpo.config.schema import Config
from nlgrpo.errors import UserError
from nlgrpo.model import adapters, decoder, hf_weights
from nlgrpo.model.architectures import shape_of
from nlgrpo.rewards import specs
from nlgrpo.runtime.device import compute_dtype
from nlgrpo.training import critic

DTYPES = ("float32", "float16", "bfloat16")  # of reward models
PROMPT_TOKENS = 512  # of the longest prompt, where neither the command nor data.max_prompt_tokens says more


@dataclass(frozen=True)
class Ahead:
    """A workload, and the models of rewards whose size is unknown."""

    work: Workload
    unknown: tuple[str, ...]


def workload(cfg: Config, *, gpus: int, prompt: int | None = None, gpu_memory: float = 0.0) -> Ahead:
    """Return what one of ``gpus`` ranks would compute. ``prompt``: tokens of the longest prompt.

    ``gpu_memory``: bytes of a GPU, for vLLM's share. Raises UserError for a configuration that cannot be run, for a
    model without a config, for a prompt that leaves no room for a completion, and for a share that is too small.
    """
    validate.check_config(cfg, world=gpus)
    shape = shape_of(decoder.read_config(hf_weights.locate(cfg.model.path, config_only=True)))
    prompt = prompt or cfg.data.max_prompt_tokens or min(PROMPT_TOKENS, shape.context - cfg.rollout.max_new_tokens)
    if prompt < 1 or prompt + cfg.rollout.max_new_tokens > shape.context:
        raise UserError(
            f"a prompt of {prompt} tokens and rollout.max_new_tokens = {cfg.rollout.max_new_tokens} exceed the "
            f"model's context of {shape.context}; lower --prompt-tokens or rollout.max_new_tokens"
        )
    own_critic = cfg.loss.algorithm == "ppo" and cfg.critic.trunk == "own"
    paths = [pair for reward in cfg.rewards.values() for pair in specs.models(reward.function)]
    sizes = {pair: _bytes(*pair) for pair in paths}
    work = Workload(
        config=cfg,
        shape=shape,
        adapter=adapters.resolve(cfg.lora, shape),
        compute=compute_dtype(cfg.model.dtype, torch.device("cuda")),
        device="cuda",
        world=gpus,
        prompt=prompt,
        critic=critic.own_shape(cfg, shape) if own_critic else None,
        reward_models=sum(sizes[pair] or 0 for pair in paths),
        process=CONTEXT,
        gpu_memory=gpu_memory,
    )
    if fault := vllm_memory.fault(work):
        raise UserError(fault)
    return Ahead(work, tuple(dict.fromkeys(path for (path, _), number in sizes.items() if number is None)))


def _bytes(path: str, dtype: str) -> int | None:
    """Size of a reward model of any architecture; None if it has no config yet, such as a model to be trained."""
    if dtype not in DTYPES:
        raise UserError(f"the reward of {path}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        config = AutoConfig.from_pretrained(hf_weights.locate(path, config_only=True), trust_remote_code=False)
    except (ValueError, OSError):
        return None
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    return model.num_parameters() * getattr(torch, dtype).itemsize
