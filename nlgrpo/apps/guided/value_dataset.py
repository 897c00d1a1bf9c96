"""Training data of value models: completions from rollouts, with their final rewards."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.engine.guides import Retokenizer
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.engine.rollouts.store import digest_of_tokenizer, same_ids
from nlgrpo.errors import UserError
from nlgrpo.model import hf_weights
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.objectives.aggregation import sum_of_applicable


@dataclass(frozen=True)
class Outcomes:
    """R completions with their prompts and their rewards (R,) float64, in the order of the rollouts."""

    asked: list[tuple[int, ...]]
    """Prompt of each completion, tokenized alone with the value model's tokenizer; identifies the prompt."""
    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: Tensor
    known: list[tuple[int, ...]]
    """All prompts of the rollouts, including those without a remaining completion; as in `asked`."""
    abstained: int = 0
    """Number of completions dropped because a reward abstained."""
    too_long: int = 0
    """Number of completions dropped because they are too long together with their prompt."""
    equal: int = 0
    """Number of completions dropped because all completions of their prompt have the same reward."""

    def __len__(self) -> int:
        return len(self.completions)

    def __repr__(self) -> str:
        text = f"{len(self):,} completions of {len(set(self.asked)):,} prompts, {self.tokens:,} tokens"
        notes = ((self.abstained, "dropped because a reward abstained"), (self.too_long, "dropped as too long"),
                 (self.equal, "dropped because all of their prompt have the same reward"))  # fmt: skip
        return "; ".join([text, *(f"{count:,} {what}" for count, what in notes if count)])

    @cached_property
    def open_ended(self) -> list[list[int]]:
        """Completions with an extra token that is never read, so that packing gives a state for every prefix."""
        return [[*completion, 0] for completion in self.completions]

    @cached_property
    def lengths(self) -> Tensor:
        """Lengths (R,) of the completions, in tokens."""
        return torch.tensor([len(completion) for completion in self.completions])

    @property
    def largest(self) -> int:
        """Largest token id."""
        return max(max(ids, default=0) for ids in (*self.prompts, *self.completions))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of tokens of each prompt and completion."""
        return [
            len(prompt) + len(completion) for prompt, completion in zip(self.prompts, self.completions, strict=True)
        ]

    @property
    def tokens(self) -> int:
        return sum(self.sizes)

    def split(self, prompts: int) -> tuple[Outcomes, Outcomes]:
        """Split off the last ``prompts`` distinct prompts, at most half of all; returns (the rest, these).

        The choice does not depend on dropped completions, so all value models of a loop hold out the same prompts.
        """
        known = list(dict.fromkeys(reversed(self.known)))
        held_out = set(known[: min(prompts, len(known) // 2)])
        sides: tuple[list[int], list[int]] = ([], [])
        for i, prompt in enumerate(self.asked):
            sides[prompt in held_out].append(i)
        return self._part(sides[0]), replace(self._part(sides[1]), abstained=0, too_long=0)

    def mixed(self) -> Outcomes:
        """Drop the prompts whose completions all have the same reward (IRO, H.4: all right, or all wrong)."""
        rewards = defaultdict[tuple[int, ...], set[float]](set)
        for prompt, reward in zip(self.asked, self.rewards.tolist(), strict=True):
            rewards[prompt].add(reward)
        rows = [i for i, prompt in enumerate(self.asked) if len(rewards[prompt]) > 1]
        return replace(self._part(rows), equal=len(self) - len(rows))

    def _part(self, rows: Sequence[int]) -> Outcomes:
        pick = torch.tensor(rows, dtype=torch.int64)
        return replace(
            self,
            asked=[self.asked[i] for i in rows],
            prompts=[self.prompts[i] for i in rows],
            completions=[self.completions[i] for i in rows],
            rewards=self.rewards[pick],
        )


def load_outcomes(
    folders: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    rewards: Sequence[str] = (),
    weights: Sequence[float] = (),
    max_length: int,
    need_rewards: bool = True,
) -> Outcomes:
    """Load the completions and final rewards of all ``folders``.

    ``rewards``: names of rewards to sum with ``weights``; empty: all rewards with weight 1. If ``need_rewards`` is
    false, all completions are used and their rewards are 0. Rollouts of a model with another tokenizer are converted as
    text (`Retokenizer`). Raises UserError if rollouts are incomplete or lack a reward, if the tokenizer of their model
    has changed, and if no completion remains.
    """
    parts = []
    for rollouts in map(reference_rollouts.load_rollouts, folders):
        final_rewards = _final_rewards(rollouts, rewards, weights, need_rewards)
        parts.append(_load_one(rollouts, final_rewards, tokenizer, max_length))
    outcomes = Outcomes(
        asked=[prompt for part in parts for prompt in part.asked],
        prompts=[prompt for part in parts for prompt in part.prompts],
        completions=[completion for part in parts for completion in part.completions],
        rewards=torch.cat([part.rewards for part in parts]),
        known=[prompt for part in parts for prompt in part.known],
        abstained=sum(part.abstained for part in parts),
        too_long=sum(part.too_long for part in parts),
    )
    if not len(outcomes):
        raise UserError(f"no completion to train on in {', '.join(folders)}: {outcomes!r}")
    return outcomes


def _final_rewards(
    rollouts: ReferenceRollouts, rewards: Sequence[str], weights: Sequence[float], need_rewards: bool
) -> Tensor:
    """Weighted sums (P, K) of the rewards that apply to a prompt, NaN where one of these abstained."""
    names = (list(rewards) or list(rollouts.rewards)) if need_rewards else []
    if not names:
        return torch.zeros_like(rollouts.logprobs)
    values = torch.stack([rollouts.reward(name) for name in names])
    return sum_of_applicable(values, weights or [1.0] * len(names))


def _load_one(
    rollouts: ReferenceRollouts, rewards: Tensor, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Outcomes:
    retokenizer = _retokenizer(rollouts, tokenizer)
    asked = []
    prompts = []
    completions = []
    final_rewards = []
    known = []
    abstained = 0
    too_long = 0
    for (prompt, sampled), values in zip(rollouts.tokens(), rewards.tolist(), strict=True):
        prompt_ids = tuple(retokenizer.whole(prompt, []) if retokenizer else prompt)
        known.append(prompt_ids)
        for completion, value in zip(sampled, values, strict=True):
            tokens = retokenizer.parts(prompt, completion) if retokenizer else (prompt, completion)
            if value != value:  # NaN
                abstained += 1
            elif sum(map(len, tokens)) > max_length:
                too_long += 1
            else:
                asked.append(prompt_ids)
                prompts.append(tokens[0])
                completions.append(tokens[1])
                final_rewards.append(value)
    return Outcomes(
        asked, prompts, completions, torch.tensor(final_rewards, dtype=torch.float64), known, abstained, too_long
    )


def learned_from(folder: Path) -> set[str] | None:
    """Digests (`digest_of_prompt`) of all prompts that a value model was trained on.

    ``folder``: the exported model. Empty if no run wrote it. None if the run's rollouts are neither at their saved
    paths nor at the same paths relative to the run's folder.
    """
    run = folder.parent
    if hf_weights.begun_from(run) is None:
        return set()
    config = json.loads((run / "config.json").read_text("utf-8"))
    rollouts = [Path(name) for name in config.get("data", {}).get("rollouts", ())]
    if not _all_exist(rollouts):  # the run may have moved together with its rollouts
        out = config["train"]["out"] or f"runs/{config['name']}"
        rollouts = [run / os.path.relpath(path, out) for path in rollouts]
    if not _all_exist(rollouts):
        return None
    return {prompt for path in rollouts for prompt in reference_rollouts.read_index(path).prompts}


def rewards_of(folder: Path) -> set[str]:
    """Names of the rewards that a value model was fitted to, as far as its run names them. ``folder``: as above."""
    run = folder.parent
    if hf_weights.begun_from(run) is None:
        return set()
    return set(json.loads((run / "config.json").read_text("utf-8")).get("data", {}).get("rewards", ()))


def _all_exist(rollouts: Sequence[Path]) -> bool:
    return all((path / reference_rollouts.ROLLOUTS_FILE).is_file() for path in rollouts)


def _retokenizer(rollouts: ReferenceRollouts, tokenizer: PreTrainedTokenizerBase) -> Retokenizer | None:
    """Converter from the tokens of the rollouts to those of ``tokenizer``; None if they are the same."""
    expected = rollouts.index.origin.tokenizer
    if expected == digest_of_tokenizer(tokenizer):
        return None
    theirs = load_tokenizer(hf_weights.locate(rollouts.index.model))
    if expected != digest_of_tokenizer(theirs):
        raise UserError(
            f"the tokenizer of {rollouts.index.model} has changed since the rollouts in {rollouts.folder} were "
            "sampled; sample them again, or train a value model with the tokenizer of the rollouts"
        )
    if same_ids(theirs, tokenizer):
        return None
    return Retokenizer(theirs, tokenizer, rollouts.index.origin.sampling.stop_ids)
