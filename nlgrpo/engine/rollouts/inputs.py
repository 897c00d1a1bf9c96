"""Load the prompts, rewards and sampling options of a configuration."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from nlgrpo.config.schema import Config
from nlgrpo.data import prompt_dataset
from nlgrpo.engine.generation import Limits
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model.tokenizer import stop_ids_of
from nlgrpo.objectives import registry
from nlgrpo.rewards import reward_functions, specs
from nlgrpo.runtime import user_code

EMBEDDED_DATA = {"story-prompts": "prompts.jsonl", "story-evaluation": "eval_prompts.jsonl"}


def embedded(source: str) -> str:
    """Return the path of an embedded source of prompts, and any other source unchanged."""
    return str(files("nlgrpo.data") / "assets" / EMBEDDED_DATA[source]) if source in EMBEDDED_DATA else source


def _room_for_prompts(cfg: Config, limits: Limits) -> int:
    """Return the maximum prompt length in tokens: data.max_prompt_tokens, at most context - rollout.max_new_tokens.

    Raises ValueError if no token is left for prompts.
    """
    room = limits.context - cfg.rollout.max_new_tokens
    if room < 1:
        raise ValueError(
            f"rollout.max_new_tokens = {cfg.rollout.max_new_tokens} leaves no room for a prompt in the context of "
            f"{limits.context} tokens of {cfg.model.path}"
        )
    return min(room, cfg.data.max_prompt_tokens or room)


def load_prompts(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, limits: Limits
) -> tuple[prompt_dataset.PromptSet, prompt_dataset.PromptSet]:
    """Load training and evaluation prompts. Without data.evaluation, training prompts are held out for evaluation."""
    prompts = prompts_of(cfg, cfg.data.source, cfg.data.split, tokenizer, limits)
    if cfg.data.evaluation:
        split = cfg.data.evaluation_split or cfg.data.split
        return prompts, prompts_of(cfg, cfg.data.evaluation, split, tokenizer, limits)
    return prompts.split(cfg.evaluation.prompts)


def prompts_of(
    cfg: Config, name: str, split: str, tokenizer: PreTrainedTokenizerBase, limits: Limits
) -> prompt_dataset.PromptSet:
    """Load all prompts of the source ``name`` with the options of [data], for a model with these limits.

    Raises the errors of `prompt_dataset.load`, and ValueError if the context has no room for prompts or a token is
    outside the model's vocabulary.
    """
    if not name:
        raise ValueError("data.source is empty: set a file of prompts, a data set, or the embedded 'story-prompts'")
    d = cfg.data
    prompts = prompt_dataset.load(
        embedded(name),
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
                f"{name}: the tokenizer of {cfg.model.path} returns the token id {max(ids)} "
                f"({tokenizer.convert_ids_to_tokens(max(ids))!r}), outside the model's vocabulary of {limits.vocab}, "
                f"for the prompt {prompt_dataset.brief(prompt)}"
            )
    return prompts


def sampling_of(cfg: Config, tokenizer: PreTrainedTokenizerBase, source: Path) -> Sampling:
    """Build the sampling options of [rollout]; stop ids of the generation config and the tokenizer's EOS are added.

    Raises ValueError for a stop id outside the tokenizer's vocabulary.
    """
    r = cfg.rollout
    largest = max(tokenizer.get_vocab().values())
    if max(r.stop_ids, default=0) > largest:
        raise ValueError(f"rollout.stop_ids = {r.stop_ids}: the largest token id of {cfg.model.path} is {largest}")
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
    """Load the objectives (by reward name) and the rewards. Raises ValueError if one cannot be loaded."""
    parsed = {name: registry.parse(r.objective, user_code.function) for name, r in cfg.rewards.items()}
    loaded = [
        specs.load(
            name, r.function, timeout=r.timeout, on_error=r.on_error, scale=r.scale, device=str(device),
            pairwise=parsed[name].pairwise, voted=parsed[name].voted,
        )
        for name, r in cfg.rewards.items()
    ]  # fmt: skip
    return parsed, loaded
