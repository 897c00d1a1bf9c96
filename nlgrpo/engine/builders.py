"""The parts that a configuration names, read and made: tokenizer, prompts, rewards with their objectives, sampling."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nlgrpo.config.schema import Config
from nlgrpo.data import prompt_dataset
from nlgrpo.engine.generation import Limits
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import decoder
from nlgrpo.objectives import registry
from nlgrpo.rewards import reward_functions
from nlgrpo.runtime import user_code

EMBEDDED_DATA = {"story-prompts": "prompts.jsonl", "story-evaluation": "eval_prompts.jsonl"}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def micro_batch_tokens(asked: int | None, device: torch.device) -> int:
    """Tokens that one forward and backward takes: what is asked for, or what suits the device."""
    return asked or (16384 if device.type == "cuda" else 1024)


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """The model directory's tokenizer; no code of it is run.

    Raises ValueError where there is none, or one without words, which transformers makes from nothing.
    """
    decoder.read_config(source)  # which says more of a broken one
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare ones
        raise ValueError(f"{source} has no tokenizer that transformers can read: {error}") from error
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise ValueError(
            f"{source} has no tokenizer: its files (tokenizer.json, or vocab.json with merges.txt) are missing"
        )
    return tokenizer


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


def stop_ids_of(tokenizer: PreTrainedTokenizerBase, source: Path) -> list[int]:
    """The ids that end a text: those of the directory's configs, and the tokenizer's EOS.

    Raises ValueError for a config that is not JSON, or whose ``eos_token_id`` is neither an id nor a list of such.
    """
    ids: list[int] = []
    for path in (source / "generation_config.json", source / "config.json"):
        if path.is_file():
            ids += _declared_stops(path)
    return ids + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])


def _declared_stops(path: Path) -> list[int]:
    try:
        declared = json.loads(path.read_text("utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} holds no JSON object: {error}") from error
    found = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in found):
        raise ValueError(f"{path}: eos_token_id = {declared!r} is neither a token id nor a list of token ids")
    return found


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
