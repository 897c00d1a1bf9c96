"""Guided search by brute force, and values of candidates that a function gives."""

import itertools

import torch


class TextValue:
    """A value model that applies a function to the tokens after the prompt."""

    name = "by hand"

    def __init__(self, function):
        self.function = function

    def begin(self, prompts):
        self.rows = [()] * len(prompts)

    def score(self, rows, chunks):
        self.rows = [(*self.rows[row], *chunk) for row, chunk in zip(rows, chunks, strict=True)]
        return torch.tensor([self.function(tokens) for tokens in self.rows], dtype=torch.float64)

    def keep(self, rows):
        self.rows = [self.rows[row] for row in rows]


def best_by_brute_force(candidates, values, how):
    """The subset with the most distinct texts, then the largest values (Eq. 9), in the order of Algorithm 5."""
    k = min(how.beams, len(candidates))
    distinct = len(set(map(tuple, candidates))) if how.diverse else 0

    def quality(subset):
        return (min(k, distinct) == len({tuple(candidates[i]) for i in subset}) or not how.diverse) * 1e9 + sum(
            values[i] for i in subset
        )

    chosen = max(itertools.combinations(range(len(candidates)), k), key=quality)
    first = {}
    for i in sorted(chosen, key=lambda i: -values[i]):
        first.setdefault(tuple(candidates[i]) if how.diverse else i, i)
    rest = [i for i in sorted(chosen, key=lambda i: -values[i]) if i not in first.values()]
    return [candidates[i] for i in [*first.values(), *rest]]
