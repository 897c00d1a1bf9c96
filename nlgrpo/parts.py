"""The parts that a configuration names, read and made: tokenizer, prompts, rewards with their objectives, sampling."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nlgrpo import data, objectives, rewards, user_code
from nlgrpo.config import Config
from nlgrpo.engine import Limits
from nlgrpo.sampling import Sampling

EMBEDDED_DATA = {"story-prompts": "prompts.jsonl", "story-evaluation": "eval_prompts.jsonl"}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def micro_batch_tokens(asked: int | None, device: torch.device) -> int:
    """Tokens that one forward and backward takes: what is asked for, or what suits the device."""
    return asked or (16384 if device.type == "cuda" else 1024)


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """The model directory's tokenizer; no code of it is run."""
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{source} has no tokenizer that transformers can read: {error}") from error


def room_for_prompts(cfg: Config, limits: Limits) -> int:
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


def load_prompts(cfg: Config, tokenizer: PreTrainedTokenizerBase, room: int) -> tuple[data.PromptSet, data.PromptSet]:
    """The prompts of training and those of the evaluation, which are held out of the former unless they are named."""
    prompts = prompts_of(cfg, cfg.data.source, cfg.data.split, tokenizer, room)
    if cfg.data.evaluation:
        split = cfg.data.evaluation_split or cfg.data.split
        return prompts, prompts_of(cfg, cfg.data.evaluation, split, tokenizer, room)
    return prompts.split(cfg.evaluation.prompts)


def prompts_of(cfg: Config, name: str, split: str, tokenizer: PreTrainedTokenizerBase, room: int) -> data.PromptSet:
    """All prompts of a source, read as the configuration says."""
    if not name:
        raise ValueError("data.source is empty: name a file of prompts, a data set, or the embedded 'story-prompts'")
    path = str(files("nlgrpo") / "assets" / EMBEDDED_DATA[name]) if name in EMBEDDED_DATA else name
    d = cfg.data
    return data.load(
        path,
        tokenizer,
        max_prompt_tokens=room,
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


def sampling_of(cfg: Config, tokenizer: PreTrainedTokenizerBase, source: Path) -> Sampling:
    """The rollout's sampling; it stops at the ids of the model's generation config and the tokenizer's EOS too."""
    r = cfg.rollout
    return Sampling(
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        max_new_tokens=r.max_new_tokens,
        stop_ids=tuple(dict.fromkeys((*r.stop_ids, *stop_ids_of(tokenizer, source)))),
    )


def stop_ids_of(tokenizer: PreTrainedTokenizerBase, source: Path) -> list[int]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (source / name).is_file():
            declared = json.loads((source / name).read_text("utf-8")).get("eos_token_id")
            ids += declared if isinstance(declared, list) else [] if declared is None else [declared]
    return ids + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])


def load_rewards(cfg: Config, device: torch.device) -> tuple[dict[str, objectives.Objective], list[rewards.Reward]]:
    """The objectives by the names of their rewards, and the rewards. Raises ValueError for what cannot be loaded."""
    parsed = {name: objectives.parse(r.objective, user_code.function) for name, r in cfg.rewards.items()}
    loaded = [
        rewards.load(
            name, r.function, timeout=r.timeout, on_error=r.on_error, scale=r.scale, device=str(device),
            pairwise=parsed[name].pairwise,
        )
        for name, r in cfg.rewards.items()
    ]  # fmt: skip
    return parsed, loaded
