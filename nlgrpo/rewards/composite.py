"""Rewards made of others: ``weighted(...)`` and ``gated(...)``. Their parts are specs in a config, functions in Python.

A weighted sum inside one reward is one number per completion, with one objective: the best of N is then chosen by the
sum. Rewards with separate objectives are separate sections of a config.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nlgrpo.rewards.calling import PROVIDED, is_async, parameters
from nlgrpo.rewards.outputs import values_of

Function = Callable[..., Any]


class Weighted:
    """Weighted sum of rewards of one completion, such as a reward and a penalty.

        r(y) = sum_i w_i r_i(y)     over the parts that do not abstain; abstains if all do

    ``parts``: weights by reward. Raises ValueError for a weight that is not a finite number, and without parts.
    """

    PARTS = ("parts",)  # arguments that are rewards

    def __init__(self, parts: Mapping[Function, float] | Sequence[tuple[Function, float]]) -> None:
        pairs = list(parts.items()) if isinstance(parts, Mapping) else list(parts)
        if not pairs:
            raise ValueError("parts must have at least one reward, as {'gsm8k()': 1.0, 'overlong(limit=200)': 0.5}")
        for _, weight in pairs:
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(f"a weight must be a finite number, got {weight!r}")
        self.functions, self.weights = [function for function, _ in pairs], [weight for _, weight in pairs]
        self.data_columns = _columns(self.functions)
        _pass_answers(self, self.functions)

    async def __call__(self, completions: Sequence[Any], **arguments: Any) -> list[float | None]:
        columns = await _values(self.functions, {"completions": completions, **arguments})
        rows = []
        for values in zip(*columns, strict=True):
            terms = [weight * x for weight, x in zip(self.weights, values, strict=True) if x is not None]
            rows.append(math.fsum(terms) if terms else None)
        return rows


class Gated:
    """A reward that counts only where another one passes, such as a format.

        r(y) = reward(y) if by(y) >= at_least else otherwise

    It abstains where ``by`` does, and where the reward does behind a gate that passes.

    Raises ValueError for numbers that are not finite.
    """

    PARTS = ("reward", "by")  # arguments that are rewards

    def __init__(self, reward: Function, by: Function, at_least: float = 1.0, otherwise: float = 0.0) -> None:
        for name, value in (("at_least", at_least), ("otherwise", otherwise)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        self.functions, self.at_least, self.otherwise = [reward, by], at_least, otherwise
        self.data_columns = _columns(self.functions)
        _pass_answers(self, self.functions)

    async def __call__(self, completions: Sequence[Any], **arguments: Any) -> list[float | None]:
        values, passes = await _values(self.functions, {"completions": completions, **arguments})
        return [
            None if gate is None else value if gate >= self.at_least else float(self.otherwise)
            for value, gate in zip(values, passes, strict=True)
        ]


def _columns(functions: Sequence[Function]) -> tuple[str, ...]:
    """Columns of the data that the functions need."""
    needed: dict[str, None] = {}
    for function in functions:
        bound = function.keywords if isinstance(function, functools.partial) else {}
        own = parameters(function)[1] - bound.keys() - set(PROVIDED)
        needed |= dict.fromkeys([*getattr(function, "data_columns", ()), *sorted(own)])
    return tuple(needed)


def _pass_answers(composite: Any, functions: Sequence[Function]) -> None:
    """Give a composite the method ``answer`` of its first part that has one, for majority voting."""
    for function in functions:
        if hasattr(function, "answer"):
            composite.answer = function.answer
            return


async def _values(functions: Sequence[Function], arguments: Mapping[str, Any]) -> list[list[float | None]]:
    """Call all functions at the same time, each with the arguments that it takes; None where one abstains.

    Raises ValueError for a result that is not one finite number or None per completion.
    """
    outputs = await asyncio.gather(*(_call(function, arguments) for function in functions))
    count, columns = len(arguments["completions"]), []
    for function, output in zip(functions, outputs, strict=True):
        values, faults = values_of(output, count, 1.0)
        if faults:
            name = getattr(function, "__name__", type(function).__name__)
            raise ValueError(f"{name} {faults[0].what}")
        columns.append([None if math.isnan(x) else x for x in values.tolist()])
    return columns


async def _call(function: Function, arguments: Mapping[str, Any]) -> Any:
    taken, _, takes_all = parameters(function)
    bound = function.keywords if isinstance(function, functools.partial) else {}
    own = {name: x for name, x in arguments.items() if name not in bound and (takes_all or name in taken)}
    if is_async(function):
        return await function(**own)
    return await asyncio.to_thread(function, **own)
