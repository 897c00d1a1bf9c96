"""What a value model learns from: completions that were rolled out, and what each came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo import hf_weights, reference_rollouts
from nlgrpo.bridge import Bridge
from nlgrpo.parts import load_tokenizer
from nlgrpo.reference_rollouts import ReferenceRollouts
from nlgrpo.sample_store import digest_of_tokenizer, same_ids


@dataclass(frozen=True)
class Outcomes:
    """R completions of the prompts in front of them, and their rewards (R,) float64; in the order of the rollouts."""

    asked: list[tuple[int, ...]]
    """What each prompt is by itself in the value model's tokens."""
    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: Tensor
    abstained: int = 0
    """Completions left out because a reward had nothing to say of them."""
    too_long: int = 0
    """And because prompt and completion together are too long."""

    def __len__(self) -> int:
        return len(self.completions)

    def __repr__(self) -> str:
        text = f"{len(self):,} completions of {len(set(self.asked)):,} prompts, {self.tokens:,} tokens"
        notes = ((self.abstained, "left out that no reward judges"), (self.too_long, "left out that are too long"))
        return "; ".join([text, *(f"{count:,} {what}" for count, what in notes if count)])

    @cached_property
    def open_ended(self) -> list[list[int]]:
        """The completions with a token behind, which is not looked at: packed, each of their prefixes is a state."""
        return [[*completion, 0] for completion in self.completions]

    @cached_property
    def lengths(self) -> Tensor:
        """(R,) of the completions, in tokens."""
        return torch.tensor([len(completion) for completion in self.completions])

    @property
    def largest(self) -> int:
        """Of all token ids."""
        return max(max(ids, default=0) for ids in (*self.prompts, *self.completions))

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))

    def split(self, prompts: int) -> tuple[Outcomes, Outcomes]:
        """Without the ``prompts`` different prompts that came last, at most half of all, and these: none is in both."""
        known = list(dict.fromkeys(reversed(self.asked)))
        held = set(known[: min(prompts, len(known) // 2)])
        sides: tuple[list[int], list[int]] = ([], [])
        for i, prompt in enumerate(self.asked):
            sides[prompt in held].append(i)
        return self._part(sides[0]), replace(self._part(sides[1]), abstained=0, too_long=0)

    def _part(self, rows: Sequence[int]) -> Outcomes:
        pick = torch.tensor(rows, dtype=torch.int64)
        return replace(
            self,
            asked=[self.asked[i] for i in rows],
            prompts=[self.prompts[i] for i in rows],
            completions=[self.completions[i] for i in rows],
            rewards=self.rewards[pick],
        )


def load(
    folders: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    rewards: Sequence[str] = (),
    weights: Sequence[float] = (),
    max_length: int,
) -> Outcomes:
    """Of all ``folders``. ``rewards``: names, weighed by ``weights``; none: all of them, with 1 each.

    Rollouts of a model with another tokenizer are read as texts (`Bridge`). Raises ValueError for rollouts that are cut
    short or without a reward, for those of a model whose tokenizer has changed, and where none is left.
    """
    found = [_of_one(reference_rollouts.load(folder), tokenizer, rewards, weights, max_length) for folder in folders]
    whole = Outcomes(
        asked=[prompt for each in found for prompt in each.asked],
        prompts=[prompt for each in found for prompt in each.prompts],
        completions=[completion for each in found for completion in each.completions],
        rewards=torch.cat([each.rewards for each in found]),
        abstained=sum(each.abstained for each in found),
        too_long=sum(each.too_long for each in found),
    )
    if not len(whole):
        raise ValueError(f"there is nothing to learn from in {', '.join(folders)}: {whole!r}")
    return whole


def _of_one(
    rollouts: ReferenceRollouts,
    tokenizer: PreTrainedTokenizerBase,
    rewards: Sequence[str],
    weights: Sequence[float],
    max_length: int,
) -> Outcomes:
    bridge = _bridge(rollouts, tokenizer)
    names = list(rewards) or list(rollouts.rewards)
    pairs = zip(names, weights or [1.0] * len(names), strict=True)
    parts = [weight * rollouts.reward(name) for name, weight in pairs if weight != 0]
    worth = sum(parts, start=torch.zeros_like(rollouts.logprobs))
    asked, prompts, completions, kept, abstained, too_long = [], [], [], [], 0, 0
    for (prompt, own), values in zip(rollouts.tokens(), worth.tolist(), strict=True):
        whose = tuple(bridge.whole(prompt, []) if bridge else prompt)
        for completion, value in zip(own, values, strict=True):
            read = bridge.parts(prompt, completion) if bridge else (prompt, completion)
            if value != value:
                abstained += 1
            elif sum(map(len, read)) > max_length:
                too_long += 1
            else:
                asked.append(whose)
                prompts.append(read[0])
                completions.append(read[1])
                kept.append(value)
    return Outcomes(asked, prompts, completions, torch.tensor(kept, dtype=torch.float64), abstained, too_long)


def _bridge(rollouts: ReferenceRollouts, tokenizer: PreTrainedTokenizerBase) -> Bridge | None:
    """From the tokens of the rollouts to the tokenizer's; None where these are the same."""
    drawn = rollouts.index.origin.tokenizer
    if drawn == digest_of_tokenizer(tokenizer):
        return None
    theirs = load_tokenizer(hf_weights.locate(rollouts.index.model))
    if drawn != digest_of_tokenizer(theirs):
        raise ValueError(
            f"the rollouts in {rollouts.folder} were drawn with a tokenizer that {rollouts.index.model} no longer has, "
            "and the value model has another one"
        )
    if same_ids(theirs, tokenizer):
        return None
    return Bridge(theirs, tokenizer, rollouts.index.origin.sampling.stop_ids)
