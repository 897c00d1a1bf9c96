"""Conversions between rollouts and candidates of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.guided_search import Candidate


def as_rollout(prompt_ids: Sequence[Sequence[int]], found: Sequence[Sequence[Candidate]]) -> Rollout:
    """Convert candidates to a rollout. Each is repeated ``places`` times, which gives U completions per prompt."""
    completions: list[Candidate] = []
    for candidates in found:
        for candidate in candidates:
            completions += [candidate] * candidate.places
    samples = len(completions) // len(found)
    rollout = padded(prompt_ids, [completion.tokens for completion in completions], samples)
    for row, completion in zip(rollout.logprobs.flatten(0, 1), completions, strict=True):
        row[: len(completion.tokens)] = torch.tensor(completion.logprobs)
    finished = torch.tensor([completion.finished for completion in completions])
    return replace(rollout, finished=finished.view(-1, samples))


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
    completions = rollout.completion_ids()
    logprobs = rollout.logprobs.flatten(0, 1).tolist()
    finished = rollout.finished.flatten().tolist()
    candidates = []
    for ids, values, ended in zip(completions, logprobs, finished, strict=True):
        candidates.append(Candidate(tuple(ids), ended, logprobs=tuple(values[: len(ids)])))
    samples = rollout.tokens.shape[1]
    return [candidates[i : i + samples] for i in range(0, len(candidates), samples)]
