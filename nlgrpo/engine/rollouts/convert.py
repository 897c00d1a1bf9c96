"""Conversions between rollouts and candidates of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.guided_search import Candidate


def as_rollout(prompt_ids: Sequence[Sequence[int]], found: Sequence[Sequence[Candidate]]) -> Rollout:
    """Convert candidates to a rollout. Each is repeated ``places`` times, which gives U completions per prompt."""
    rows = [[candidate for candidate in candidates for _ in range(candidate.places)] for candidates in found]
    flat = [candidate for row in rows for candidate in row]
    samples = len(rows[0])
    rollout = padded(prompt_ids, [candidate.tokens for candidate in flat], samples)
    for row, candidate in zip(rollout.logprobs.flatten(0, 1), flat, strict=True):
        row[: len(candidate.tokens)] = torch.tensor(candidate.logprobs)
    finished = torch.tensor([candidate.finished for candidate in flat]).view(-1, samples)
    return replace(rollout, finished=finished)


def padded(prompt_ids: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], samples: int) -> Rollout:
    """Build a rollout of ``samples`` completions per prompt, sorted by prompt. Log-probs are 0, none is finished."""
    lengths = torch.tensor([len(ids) for ids in completions])
    tokens = torch.zeros(len(completions), int(lengths.max()), dtype=torch.int64)
    for row, ids in zip(tokens, completions, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    shape = (-1, samples)
    logprobs = torch.zeros(tokens.shape).unflatten(0, shape)
    lengths = lengths.view(shape)
    return Rollout([list(ids) for ids in prompt_ids], tokens.unflatten(0, shape), logprobs, lengths, lengths < 0)


def as_candidates(rollout: Rollout) -> list[list[Candidate]]:
    """Convert the completions of each prompt to candidates."""
    rows = zip(
        rollout.completion_ids(),
        rollout.logprobs.flatten(0, 1).tolist(),
        rollout.finished.flatten().tolist(),
        strict=True,
    )
    flat = [Candidate(tuple(ids), finished, logprobs=tuple(logprobs[: len(ids)])) for ids, logprobs, finished in rows]
    samples = rollout.tokens.shape[1]
    return [flat[i : i + samples] for i in range(0, len(flat), samples)]
