"""Builds what a configuration names: prompts, rewards with their objectives, the sampling, and a whole run."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from nlgrpo.config import validate
from nlgrpo.config.schema import Config
from nlgrpo.data import prompt_dataset
from nlgrpo.engine.generation import Limits
from nlgrpo.engine.rollouts.collect import Provenance
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.architectures import shape_of
from nlgrpo.model.tokenizer import load_tokenizer, stop_ids_of
from nlgrpo.objectives import aggregation, registry
from nlgrpo.rewards import reward_functions
from nlgrpo.runtime import user_code
from nlgrpo.runtime.device import compute_dtype
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training import critic, offline, reference_rewards
from nlgrpo.training.run import Progress, Run

EMBEDDED_DATA = {"story-prompts": "prompts.jsonl", "story-evaluation": "eval_prompts.jsonl"}


def build(cfg: Config, ranks: Ranks) -> Run:
    """Read tokenizer, data and rewards and fit them together; the weights are read later, by `Run.learner`.

    Raises ValueError for whatever of the configuration cannot be run.
    """
    validate.check(cfg, world=ranks.world)
    source = hf_weights.locate(cfg.model.path)
    shape = shape_of(decoder.read_config(source))
    tokenizer = load_tokenizer(source)
    prompts, held_out = load_prompts(cfg, tokenizer, shape)
    parsed, loaded = load_rewards(cfg, ranks.device)
    for known in (*([] if cfg.loss.offline else [prompts]), *([held_out] if cfg.evaluation.prompts else [])):
        reward_functions.check_columns(loaded, known.names)
    sampling = sampling_of(cfg, tokenizer, source)
    compute = compute_dtype(cfg.model.dtype, ranks.device)
    sampler = Sampler(tokenizer, sampling, cfg.rollout.samples, cfg.rollout.max_rows, cfg.train.seed, loaded)
    origin = partial(Provenance.of, source, tokenizer, compute, sampling)
    critic.check(cfg, shape, longest=max(map(len, prompts.ids), default=0) + cfg.rollout.max_new_tokens)
    samples = offline.make(cfg, loaded, parsed, prompts, origin)
    return Run(
        config=cfg,
        ranks=ranks,
        tokenizer=tokenizer,
        shape=shape,
        source=source,
        prompts=prompts if samples is None else samples.prompts,
        held_out=held_out,
        sampler=sampler,
        objectives=parsed,
        aggregate=aggregation.parse(cfg.loss.aggregate, [r.weight for r in cfg.rewards.values()]),
        references=reference_rewards.make(cfg, sampler, parsed, prompts, origin, ranks),
        samples=samples,
        compute=compute,
        progress=Progress(beta=cfg.loss.beta),
    )


def _room_for_prompts(cfg: Config, limits: Limits) -> int:
    """Tokens that a prompt may have: what is asked for, as far as the completions leave it.

    Raises ValueError where they leave none.
    """
    room = limits.context - cfg.rollout.max_new_tokens
    if room < 1:
        raise ValueError(
            f"rollout.max_new_tokens = {cfg.rollout.max_new_tokens} leaves no room for a prompt in the context of "
            f"{limits.context} tokens that {cfg.model.path} has"
        )
    return min(room, cfg.data.max_prompt_tokens or room)


def load_prompts(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, limits: Limits
) -> tuple[prompt_dataset.PromptSet, prompt_dataset.PromptSet]:
    """The prompts of training and those of the evaluation, which are held out of the former unless they are named."""
    prompts = prompts_of(cfg, cfg.data.source, cfg.data.split, tokenizer, limits)
    if cfg.data.evaluation:
        split = cfg.data.evaluation_split or cfg.data.split
        return prompts, prompts_of(cfg, cfg.data.evaluation, split, tokenizer, limits)
    return prompts.split(cfg.evaluation.prompts)


def prompts_of(
    cfg: Config, name: str, split: str, tokenizer: PreTrainedTokenizerBase, limits: Limits
) -> prompt_dataset.PromptSet:
    """All prompts of a source, read as the configuration says, for a model of these limits.

    Raises ValueError as `prompt_dataset.load`, and where the model has no room for a prompt or lacks one of its tokens.
    """
    if not name:
        raise ValueError("data.source is empty: name a file of prompts, a data set, or the embedded 'story-prompts'")
    path = str(files("nlgrpo.data") / "assets" / EMBEDDED_DATA[name]) if name in EMBEDDED_DATA else name
    d = cfg.data
    prompts = prompt_dataset.load(
        path,
        tokenizer,
        max_prompt_tokens=_room_for_prompts(cfg, limits),
        split=split,
        prompt_column=d.prompt_column,
        template=d.template,
        cut_after=d.cut_after,
        separator=d.separator,
        first_words=d.first_words,
        seed=cfg.train.seed,
        shuffle=d.shuffle,
        limit=d.limit,
        add_bos=d.add_bos,
    )
    for ids, prompt in zip(prompts.ids, prompts.prompts, strict=True):
        if max(ids) >= limits.vocab:
            raise ValueError(
                f"{name}: the tokenizer of {cfg.model.path} gives the token {max(ids)} "
                f"({tokenizer.convert_ids_to_tokens(max(ids))!r}), which is not in the model's vocabulary of "
                f"{limits.vocab}, for the prompt {prompt_dataset.brief(prompt)}"
            )
    return prompts


def sampling_of(cfg: Config, tokenizer: PreTrainedTokenizerBase, source: Path) -> Sampling:
    """The rollout's sampling; it stops at the ids of the model's generation config and the tokenizer's EOS too.

    Raises ValueError for a stop id that no token has.
    """
    r = cfg.rollout
    largest = max(tokenizer.get_vocab().values())
    if max(r.stop_ids, default=0) > largest:
        raise ValueError(f"rollout.stop_ids = {r.stop_ids}: the tokenizer of {cfg.model.path} ends at token {largest}")
    return Sampling(
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        max_new_tokens=r.max_new_tokens,
        stop_ids=tuple(dict.fromkeys((*r.stop_ids, *stop_ids_of(tokenizer, source)))),
    )


def load_rewards(
    cfg: Config, device: torch.device
) -> tuple[dict[str, registry.Objective], list[reward_functions.Reward]]:
    """The objectives by the names of their rewards, and the rewards. Raises ValueError for what cannot be loaded."""
    parsed = {name: registry.parse(r.objective, user_code.function) for name, r in cfg.rewards.items()}
    loaded = [
        reward_functions.load(
            name, r.function, timeout=r.timeout, on_error=r.on_error, scale=r.scale, device=str(device),
            pairwise=parsed[name].pairwise,
        )
        for name, r in cfg.rewards.items()
    ]  # fmt: skip
    return parsed, loaded
