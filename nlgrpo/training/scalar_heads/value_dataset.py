"""What a value model learns from: completions that were rolled out, and what each came to."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.data.retokenize import Retokenizer
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.engine.rollouts.store import digest_of_tokenizer, same_ids
from nlgrpo.model import hf_weights
from nlgrpo.model.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Outcomes:
    """R completions of the prompts in front of them, and their rewards (R,) float64; in the order of the rollouts."""

    asked: list[tuple[int, ...]]
    """What each prompt is by itself in the value model's tokens."""
    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: Tensor
    known: list[tuple[int, ...]]
    """All prompts of the rollouts, `asked` or without a completion that was kept."""
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
        """Without the ``prompts`` different prompts that came last, at most half of all, and these: none is in both.

        Which these are does not depend on what was left out: in a loop they are the same for every value.
        """
        known = list(dict.fromkeys(reversed(self.known)))
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
    judged: bool = True,
) -> Outcomes:
    """Of all ``folders``. ``rewards``: names, weighed by ``weights``; none: all of them, with 1 each.

    Without ``judged`` no reward is needed: all completions count, and the rewards are 0. Rollouts of a model with
    another tokenizer are read as texts (`Retokenizer`). Raises ValueError for rollouts that are incomplete or without a
    reward, for those of a model whose tokenizer has changed, and where none is left.
    """
    loaded = map(reference_rollouts.load, folders)
    found = [_of_one(each, _worth(each, rewards, weights, judged), tokenizer, max_length) for each in loaded]
    whole = Outcomes(
        asked=[prompt for each in found for prompt in each.asked],
        prompts=[prompt for each in found for prompt in each.prompts],
        completions=[completion for each in found for completion in each.completions],
        rewards=torch.cat([each.rewards for each in found]),
        known=[prompt for each in found for prompt in each.known],
        abstained=sum(each.abstained for each in found),
        too_long=sum(each.too_long for each in found),
    )
    if not len(whole):
        raise ValueError(f"there is nothing to learn from in {', '.join(folders)}: {whole!r}")
    return whole


def _worth(rollouts: ReferenceRollouts, rewards: Sequence[str], weights: Sequence[float], judged: bool) -> Tensor:
    """(P, K) weighted sums of the rewards, NaN where one abstains."""
    names = (list(rewards) or list(rollouts.rewards)) if judged else []
    pairs = zip(names, weights or [1.0] * len(names), strict=True)
    parts = [weight * rollouts.reward(name) for name, weight in pairs if weight != 0]
    return sum(parts, start=torch.zeros_like(rollouts.logprobs))


def _of_one(
    rollouts: ReferenceRollouts, worth: Tensor, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Outcomes:
    retokenizer = _bridge(rollouts, tokenizer)
    asked, prompts, completions, kept, known, abstained, too_long = [], [], [], [], [], 0, 0
    for (prompt, own), values in zip(rollouts.tokens(), worth.tolist(), strict=True):
        whose = tuple(retokenizer.whole(prompt, []) if retokenizer else prompt)
        known.append(whose)
        for completion, value in zip(own, values, strict=True):
            read = retokenizer.parts(prompt, completion) if retokenizer else (prompt, completion)
            if value != value:
                abstained += 1
            elif sum(map(len, read)) > max_length:
                too_long += 1
            else:
                asked.append(whose)
                prompts.append(read[0])
                completions.append(read[1])
                kept.append(value)
    return Outcomes(asked, prompts, completions, torch.tensor(kept, dtype=torch.float64), known, abstained, too_long)


def learned_from(folder: Path) -> set[str] | None:
    """`digest_of_prompt` of all prompts in the rollouts of the run that a value model comes from; none without a run.

    ``folder``: the model that the run has exported. None where its rollouts are neither where they were nor where they
    were from the run's folder, as in that of a loop.
    """
    run = folder.parent
    if hf_weights.begun_from(run) is None:
        return set()
    config = json.loads((run / "config.json").read_text("utf-8"))
    rollouts = [Path(name) for name in config.get("data", {}).get("rollouts", ())]
    if not _all_there(rollouts):  # the run may have moved, and they with it
        out = config["train"]["out"] or f"runs/{config['name']}"
        rollouts = [run / os.path.relpath(path, out) for path in rollouts]
    if not _all_there(rollouts):
        return None
    return {prompt for path in rollouts for prompt in reference_rollouts.read_index(path).prompts}


def _all_there(rollouts: Sequence[Path]) -> bool:
    return all((path / reference_rollouts.FILE).is_file() for path in rollouts)


def _bridge(rollouts: ReferenceRollouts, tokenizer: PreTrainedTokenizerBase) -> Retokenizer | None:
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
    return Retokenizer(theirs, tokenizer, rollouts.index.origin.sampling.stop_ids)
