"""Load the prompts, rewards and sampling options of a configuration, and make digests of what a run reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from nlgrpo.config import schema
from nlgrpo.config.schema import Config, DataConfig
from nlgrpo.data import prompt_dataset
from nlgrpo.data.conversations import ChatOptions, load_tools
from nlgrpo.data.prompt_dataset import PromptSet, Reader, SourceOptions, read_all
from nlgrpo.data.sources import is_file, unread
from nlgrpo.engine.generation import ModelLimits
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserError, as_user_error
from nlgrpo.model.tokenizer import stop_ids_of
from nlgrpo.objectives import registry
from nlgrpo.rewards import reward_functions, specs
from nlgrpo.runtime import user_code
from nlgrpo.runtime.distributed import Ranks

if TYPE_CHECKING:
    from nlgrpo.engine.environments import Environment

EMBEDDED_DATA = {
    "story-prompts": "prompts.jsonl",
    "story-evaluation": "eval_prompts.jsonl",
    "sums": "sums.jsonl",
    "countdown": "countdown.jsonl",
}


def embedded(source: str) -> str:
    """Return the path of an embedded source of prompts, and any other source unchanged."""
    return str(files("nlgrpo.data") / "assets" / EMBEDDED_DATA[source]) if source in EMBEDDED_DATA else source


def _room_for_prompts(cfg: Config, data: DataConfig, limits: ModelLimits) -> int:
    """Return the maximum prompt length in tokens: data.max_prompt_tokens, at most context - rollout.max_new_tokens.

    Raises UserError if no token is left for prompts.
    """
    room = limits.context - cfg.rollout.max_new_tokens
    if room < 1:
        raise UserError(
            f"rollout.max_new_tokens = {cfg.rollout.max_new_tokens} leaves no room for a prompt in the context of "
            f"{limits.context} tokens of {cfg.model.path}"
        )
    return min(room, data.max_prompt_tokens or room)


def load_environment(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, limits: ModelLimits, ranks: Ranks
) -> Environment | None:
    """Load the environment of a configuration; None if it has none. Raises UserError if that fails."""
    if not cfg.environment.id:
        return None
    from nlgrpo.engine.environments.verifiers_environment import VerifiersEnvironment

    return VerifiersEnvironment(
        cfg.environment, tokenizer, cfg.model.path, limits, cfg.data.chat_template_kwargs, ranks,
        together=cfg.rollout.ahead == 0,
    )  # fmt: skip


def refuse_environment(cfg: Config, command: str) -> None:
    """Raise UserError if a configuration has an environment, whose conversations ``command`` cannot store."""
    if cfg.environment.id:
        raise UserError(f"environment.id = {cfg.environment.id!r}: {command} has no environments")


def load_prompts(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, limits: ModelLimits, environment: Environment | None = None
) -> tuple[prompt_dataset.Prompts, PromptSet]:
    """Load training and evaluation prompts, as `read_prompts`, and drop training prompts that are held out.

    With evaluation.prompts = 0, nothing is evaluated, and a source may be its own evaluation data.

    Raises UserError as `read_prompts`, and if all training prompts are held out.
    """
    prompts, held_out = read_prompts(cfg, tokenizer, limits, environment)
    if held_out is prompts or not len(held_out):
        return prompts, held_out
    known = {tuple(ids) for ids in held_out.ids}
    everything = prompts.all().ids
    if cfg.evaluation.prompts == 0 and everything and all(tuple(ids) in known for ids in everything):
        return prompts, held_out
    return prompts.without(held_out.ids), held_out


def read_prompts(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, limits: ModelLimits, environment: Environment | None = None
) -> tuple[prompt_dataset.Prompts, PromptSet]:
    """Read training and evaluation prompts: those of the environment, if there is one, else those of [data].

    Without evaluation prompts of their own, training prompts are held out for evaluation. The evaluation prompts and
    their order do not depend on train.seed. Both sets may have a prompt in common.

    Raises UserError as `load_prompt_set`, for a mixture that is not one, and if the context has no room for
    prompts.
    """
    d = cfg.data
    if environment is not None:
        own = environment.prompts(
            max_new_tokens=cfg.rollout.max_new_tokens, seed=cfg.train.seed, shuffle=d.shuffle, limit=d.limit
        )
        held_out = environment.prompts(evaluation=True, max_new_tokens=cfg.rollout.max_new_tokens)
        return own.split(cfg.evaluation.prompts) if held_out is None else (own, held_out)
    parts = _parts(d)
    sources = [_source(cfg, part, tokenizer, limits, seed=cfg.train.seed + s) for s, (_, part) in enumerate(parts)]
    _check_template_options(d, parts, sources)
    prompts: prompt_dataset.Prompts = sources[0]
    if d.mixture:
        from nlgrpo.data.mixtures import MixedPrompts, shares_of

        try:
            prompts = MixedPrompts(sources, shares_of([weight for weight, _ in parts]))
        except ValueError as error:
            raise UserError(f"data.mixture: {error}") from error
    if d.evaluation:
        inherited = "train" if is_file(embedded(d.evaluation)) else d.split  # a file has no splits
        evaluation = dataclasses.replace(d, source=d.evaluation, split=d.evaluation_split or inherited)
        reader = reader_of(cfg, evaluation, tokenizer, limits)
        return prompts, read_all(reader, shuffle=d.shuffle)  # the same order for every train.seed
    return prompts.split(cfg.evaluation.prompts)


def _check_template_options(
    data: DataConfig, parts: Sequence[tuple[float, DataConfig]], sources: Sequence[prompt_dataset.Prompts]
) -> None:
    """Raise UserError for a system prompt and for options of the chat template that change no prompt.

    Those of [data] may be for some of the sources; what a source of a mixture sets is for this one.
    """
    for (_, part), source in zip(parts, sources, strict=True):
        options = ChatOptions(template_kwargs=part.chat_template_kwargs, tools=load_tools(part.tools))
        same = (part.chat_template_kwargs, part.tools) == (data.chat_template_kwargs, data.tools)
        options.check_used(part.source, _conversations(sources if same else [source]))
        system = ChatOptions(system_prompt=part.system_prompt)
        same = part.system_prompt == data.system_prompt
        system.check_used(part.source, _conversations(sources if same else [source]))


def _conversations(sources: Sequence[prompt_dataset.Prompts]) -> Iterator[list[dict[str, Any]]]:
    for source in sources:
        yield from source.conversations()


def find_columns(
    cfg: Config, rewards: Sequence[reward_functions.Reward], prompts: prompt_dataset.Prompts, held_out: PromptSet
) -> None:
    """Look in later rows of a stream for columns that rewards need.

    Prompts that are held out of the source get the columns of all its rows.
    """
    prompts.find(reward_functions.missing_columns(rewards, prompts.names))
    if not (cfg.data.evaluation or cfg.environment.id or held_out is prompts):
        held_out.names = list(dict.fromkeys([*held_out.names, *prompts.names]))


def unread_files(cfg: Config) -> list[str]:
    """Say which files of the folders of [data] belong to other splits and are not read."""
    d = cfg.data
    if cfg.environment.id:
        return []
    read = [(embedded(part.source), part.split) for _, part in _parts(d)]
    if d.evaluation:
        read.append((embedded(d.evaluation), d.evaluation_split or d.split))
    return unread(read)


def all_prompts(cfg: Config, tokenizer: PreTrainedTokenizerBase, limits: ModelLimits) -> PromptSet:
    """Load all training prompts, those of a mixture source by source, in their order; data.streaming is ignored."""
    from nlgrpo.data.mixtures import merge

    parts = _parts(cfg.data)
    sources = [read_all(reader_of(cfg, part, tokenizer, limits), shuffle=False) for _, part in parts]
    _check_template_options(cfg.data, parts, sources)
    return merge(sources)


def reader_of(cfg: Config, data: DataConfig, tokenizer: PreTrainedTokenizerBase, limits: ModelLimits) -> Reader:
    """Return the reader of data.source. Raises UserError if it is empty, or for tools that cannot be loaded."""
    if not data.source:
        raise UserError("data.source is empty: set a file of prompts, a data set, or the embedded 'story-prompts'")
    chat = ChatOptions(data.system_prompt, data.chat, data.chat_template_kwargs, load_tools(data.tools))
    options = SourceOptions(
        split=data.split,
        prompt_column=data.prompt_column,
        template=data.template,
        cut_after=data.cut_after,
        separator=data.separator,
        first_words=data.first_words,
        limit=data.limit,
        add_bos=data.add_bos,
        chat=chat,
    )
    room = _room_for_prompts(cfg, data, limits)
    return Reader(embedded(data.source), tokenizer, options, room, limits.vocab)


def _source(
    cfg: Config, data: DataConfig, tokenizer: PreTrainedTokenizerBase, limits: ModelLimits, *, seed: int
) -> prompt_dataset.Prompts:
    reader = reader_of(cfg, data, tokenizer, limits)
    if data.streaming:
        from nlgrpo.data.streams import PromptStream

        return PromptStream(reader, seed=seed, shuffle_buffer=data.shuffle_buffer if data.shuffle else 0)
    return read_all(reader, seed=seed, shuffle=data.shuffle)


def _parts(data: DataConfig) -> list[tuple[float, DataConfig]]:
    """Return the weight and the options of each source: those of data.mixture, or data.source alone."""
    return [_part(data, name, value) for name, value in data.mixture.items()] or [(1.0, data)]


def _part(data: DataConfig, name: str, value: object) -> tuple[float, DataConfig]:
    """Return the weight and the options of a source of data.mixture."""
    table = dict(value) if isinstance(value, Mapping) else {"weight": value}
    weight = table.pop("weight", 1.0)
    if not isinstance(weight, int | float) or isinstance(weight, bool):
        raise UserError(f"data.mixture: the weight of {name!r} is {weight!r} instead of a number")
    for key in ("mixture", "evaluation", "evaluation_split"):
        if key in table:
            raise UserError(f"data.mixture: {name!r} sets {key!r}, which is not an option of a source")
    part = schema.overlay(dataclasses.replace(data, source=name, mixture={}), table, f"data.mixture, {name!r}")
    return float(weight), part


def sampling_of(cfg: Config, tokenizer: PreTrainedTokenizerBase, source: Path) -> Sampling:
    """Build the sampling options of [rollout]; stop ids of the generation config and the tokenizer's EOS are added.

    Raises UserError for a stop id outside the tokenizer's vocabulary.
    """
    r = cfg.rollout
    largest = max(tokenizer.get_vocab().values())
    if max(r.stop_ids, default=0) > largest:
        raise UserError(f"rollout.stop_ids = {r.stop_ids}: the largest token id of {cfg.model.path} is {largest}")
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
    """Load the objectives (by reward name) and the rewards. Raises UserError if one cannot be loaded."""
    with as_user_error():
        parsed = {name: registry.parse(r.objective, user_code.function) for name, r in cfg.rewards.items()}
    loaded = [
        specs.load_reward(
            name, r.function, timeout=r.timeout, on_error=r.on_error, scale=r.scale, device=str(device),
            pairwise=parsed[name].pairwise, voted=parsed[name].voted, process=r.process,
        )
        for name, r in cfg.rewards.items()
    ]  # fmt: skip
    return parsed, loaded
