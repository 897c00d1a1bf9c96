"""The tokens of conversations: what the policy sampled, and what was inserted between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from nlgrpo.engine.backends.base import EngineError
from nlgrpo.engine.generation import Conversation, Rollout


@dataclass
class Turn:
    """One answer of the policy, and the tokens that come before it since its last one."""

    inserted: list[int]
    tokens: list[int]
    logprobs: list[float]
    finished: bool  # by a stop id


@dataclass
class Dialogue:
    """A conversation in tokens: prompt, answer, inserted tokens, answer, .. Nothing is ever tokenized twice."""

    turns: list[Turn] = field(default_factory=list)
    version: int | None = None  # of the policy

    def ids(self) -> list[int]:
        """All tokens so far."""
        return [token for turn in self.turns for token in (*turn.inserted, *turn.tokens)]

    @property
    def finished(self) -> bool:
        """Whether the last answer ended by a stop id."""
        return bool(self.turns) and self.turns[-1].finished

    def add(self, turn: Turn, version: int | None) -> None:
        """Append a turn. Raises EngineError if another version of the policy sampled the ones before."""
        if self.turns and version != self.version:
            raise EngineError(
                f"a conversation was sampled by the policy of step {self.version} and then by that of step {version}"
            )
        self.turns.append(turn)
        self.version = version


def to_rollout(
    dialogues: Sequence[Dialogue],
    conversations: Sequence[Conversation],
    prompt_ids: Sequence[Sequence[int]],
    samples: int,
    device: torch.device | str = "cpu",
) -> Rollout:
    """Combine P*M dialogues, M = ``samples`` per prompt, into a `Rollout`: its tokens are those of the policy.

    The prompt of a group is what all its dialogues begin with; the rest, if they begin differently, is inserted before
    their first sampled token. ``prompt_ids``: prompts (P) of groups whose dialogues all ended before they began.
    ``conversations``: one per dialogue, in their order; their ``inserted`` is set here.

    Raises EngineError if the dialogues of a prompt begin with different tokens, or if several versions of the policy
    sampled them.
    """
    prompts = []
    for i, ids in enumerate(prompt_ids):
        begun = [d.turns[0].inserted for d in dialogues[i * samples : (i + 1) * samples] if d.turns]
        prompts.append(_common_start(begun) if begun else list(ids))
        if not prompts[-1]:
            raise EngineError("the conversations of one prompt begin with different tokens")
    rows = list[list[int]]()
    inserted = list[dict[int, list[int]]]()
    for i, dialogue in enumerate(dialogues):
        row = list[int]()
        between = dict[int, list[int]]()
        for t, turn in enumerate(dialogue.turns):
            before = turn.inserted[len(prompts[i // samples]) :] if t == 0 else turn.inserted
            if before:
                between[len(row)] = before
            row += turn.tokens
        rows.append(row)
        inserted.append(between)
    shape = (len(prompts), samples)
    longest = max(map(len, rows), default=0)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    logprobs = torch.zeros(len(rows), longest)
    for i, dialogue in enumerate(dialogues):
        tokens[i, : len(rows[i])] = torch.tensor(rows[i])
        logprobs[i, : len(rows[i])] = torch.tensor([x for turn in dialogue.turns for x in turn.logprobs])
    versions = {dialogue.version for dialogue in dialogues if dialogue.turns}
    if len(versions) > 1:
        steps = ", ".join(sorted(map(str, versions)))
        raise EngineError(f"the conversations of one step were sampled by the policies of steps {steps}")
    return Rollout(
        prompt_ids=prompts,
        tokens=tokens.view(*shape, longest).to(device),
        logprobs=logprobs.view(*shape, longest).to(device),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64).view(shape).to(device),
        finished=torch.tensor([d.finished for d in dialogues], dtype=torch.bool).view(shape).to(device),
        version=next(iter(versions), None),
        conversations=[replace(c, inserted=part) for c, part in zip(conversations, inserted, strict=True)],
    )


def _common_start(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that all sequences begin with."""
    shortest = min(map(len, sequences))
    same = next((k for k in range(shortest) if len({s[k] for s in sequences}) > 1), shortest)
    return list(sequences[0][:same])
