"""Decoding methods of `nlgrpo decode`: the search of each at a budget, and its theoretical cost.

Budget: N = K B candidates per prompt at any time. H: tokens of the longest response. L: tokens per chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nlgrpo.engine.cascade_sampling import Cascade
from nlgrpo.engine.guided_search import Search
from nlgrpo.errors import UserError

IMPLICIT = ("implicit", "weak_to_strong", "bon-i")


@dataclass(frozen=True)
class DecodingMethod:
    """A decoding method at a budget."""

    name: str
    budget: int
    search: Search
    values: tuple[int, ...] = ()
    """Indices of the value models that guide the search."""
    weight: float | None = None
    """Weight of the reward of prefixes. None: not used."""
    implicit: bool = False
    """Whether the implicit reward of two models guides the search, instead of value models."""
    own_choice: bool = False
    """Whether the response is the candidate with the largest value of this method, whatever else chooses."""
    cascade: Cascade | None = None
    """Options of CARDS, which samples instead of searching."""


@dataclass(frozen=True)
class GivenModels:
    """The models that can guide a search."""

    values: int = 0
    """Number of value models."""
    compressed: bool = False
    """Whether there is also a compressed one, after them."""
    implicit: bool = False
    """Whether there are a tuned and an untuned model."""


def decoding_method(
    method: str, budget: int, like: Search, longest: int, given: GivenModels, *, by_value: bool = False
) -> DecodingMethod:
    """Return the decoding method named ``method``, such as "bon" or "iro:3", at a budget.

    ``like``: the search whose settings apart from K and B are used. ``longest``: H. ``by_value``: the response is
    chosen by value, so that best-of-N needs value models too.

    Raises UserError for an unknown method, and if value models that it needs are missing.
    """
    values = given.values
    name, _, detail = method.partition(":")
    beams = max(k for k in range(1, math.isqrt(budget) + 1) if budget % k == 0)
    wide = replace(like, beams=beams, successors=budget // beams)
    if method == "bon":
        if by_value and not values:
            raise UserError(f"method {method!r} with --choose value needs a value model: set --guide")
        return DecodingMethod(method, budget, Search(1, budget, longest), tuple(range(values)) if by_value else ())
    if method == "cd":
        return _guided(method, budget, Search(1, budget, like.chunk, diverse=False), 1, values)
    if method == "compressed":
        if not given.compressed:
            raise UserError(
                "method 'compressed' needs a compressed value model: set --guide to a folder of `nlgrpo iro` with one"
            )
        return DecodingMethod(method, budget, wide, (values,))
    if method in IMPLICIT:
        if not given.implicit:
            raise UserError(f"method {method!r} needs a model before and after tuning: set --tuned and --untuned")
        search = {"bon-i": Search(1, budget, longest), "implicit": wide}.get(
            method, replace(wide, temperature=0.0, diverse=False, softmax=False)
        )
        return DecodingMethod(method, budget, search, implicit=True, own_choice=method != "implicit")
    if name == "cards":
        return DecodingMethod(method, budget, Search(1, budget, longest), cascade=_cascade(method, detail, budget))
    if name == "args":
        weight = _number(method, detail or "1")
        return DecodingMethod(method, budget, Search(1, budget, 1, diverse=False, likeliest=True), (), weight)
    if name == "iro":
        count = _number(method, detail) if detail else values
        return _guided(method, budget, wide, count, values)
    raise UserError(_unknown(method))


def _guided(method: str, budget: int, search: Search, count: float, there: int) -> DecodingMethod:
    """Method guided by the first ``count`` value models."""
    if count != int(count):
        raise UserError(_unknown(method))
    if not 1 <= count <= there:
        raise UserError(
            f"method {method!r} needs {count:g} value models: expected 1 to {there}, the number given with --guide"
        )
    return DecodingMethod(method, budget, search, tuple(range(int(count))))


def _cascade(method: str, detail: str, budget: int) -> Cascade:
    """Options of ``cards:REWARD``, ``cards:REWARD:BETA`` or ``cards:REWARD:BETA:ENTROPY``."""
    if not detail:
        raise UserError("method 'cards' needs the reward that a response should reach, such as 'cards:0.9'")
    numbers = [_number(method, part) for part in detail.split(":")]
    if len(numbers) > 3:
        raise UserError(_unknown(method))
    try:
        cascade = Cascade(numbers[0], tries=budget)
        if len(numbers) > 1:
            cascade = replace(cascade, temperature=numbers[1])
        if len(numbers) > 2:
            cascade = replace(cascade, entropy=numbers[2])
        return cascade
    except ValueError as error:
        raise UserError(f"method {method!r}: {error}") from error


def _number(method: str, detail: str) -> float:
    try:
        number = float(detail)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(_unknown(method))
    return number


def _unknown(method: str) -> str:
    return (
        f"method {method!r}: expected bon, cd, args, args:WEIGHT, iro, iro:NUMBER, compressed, implicit, "
        "weak_to_strong, bon-i, or cards:REWARD, cards:REWARD:BETA or cards:REWARD:BETA:ENTROPY"
    )


def theory(method: DecodingMethod, length: int) -> dict[str, float]:
    """Return the cost per prompt by Proposition 1 of IRO, for responses of H = ``length`` tokens.

    Best-of-N: N H tokens and N reward queries (Eq. 36). A search with U = N candidates and I value models: U H tokens
    and I U H / L value queries (Eq. 44). With exact values it equals best-of-N with U^(H / L) samples (Eq. 43);
    "log10_samples" is the base-10 logarithm of that number. Eq. 45 has the ratios of the costs. ARGS is a search by the
    reward with U = N. Best-of-N by value is a search with L = H. The implicit reward is I = 1 value. CARDS samples at
    most N segments of ``shortest`` tokens or more at a place: N H tokens and 1 + N H / shortest reward queries at most.
    """
    if method.cascade is not None:
        most = float(method.budget * length)
        return {"tokens": most, "reward_queries": 1 + most / min(method.cascade.shortest, length)}
    tokens = float(method.budget * length)
    queries = float(method.budget * length / method.search.chunk)
    if not (method.values or method.implicit):  # best-of-N, or ARGS, which queries the reward at every token
        return {"tokens": tokens, "reward_queries": float(method.budget) if method.weight is None else queries}
    samples = max(1.0, length / method.search.chunk) * math.log10(method.budget)
    return {"tokens": tokens, "value_queries": (len(method.values) or 1) * queries, "log10_samples": samples}
