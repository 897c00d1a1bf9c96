"""Rewards made of others: ``weighted(...)`` and ``gated(...)``. Their parts are specs in a config, functions in Python.

A weighted sum inside one reward is one number per completion, with one objective: the best of N is then chosen by the
sum. Rewards with separate objectives are separate sections of a config.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from nlgrpo.errors import UserError
from nlgrpo.rewards.calling import PROVIDED, in_event_loop, is_async, needs_main_thread
from nlgrpo.rewards.outputs import values_of
from nlgrpo.runtime.user_code import parameters

log = logging.getLogger(__name__)

Function = Callable[..., Any]
Values = list[float | None]


class _Composite:
    """A reward made of the rewards ``functions``, which get the same completions.

    Their async functions run at the same time. Functions that need the main thread run in that of the composite, which
    is then not async; the others may run in other threads.
    """

    def __init__(self, functions: Sequence[Function]) -> None:
        self.functions = list(functions)
        self.in_main_thread = any(map(needs_main_thread, functions))
        self.is_async = not self.in_main_thread and any(map(is_async, functions))
        self.data_columns = _columns(functions)
        self._with_nan: set[str] = set()
        for function in functions:
            if hasattr(function, "answer"):
                self.answer = function.answer  # of the first that has one, for majority voting
                break

    def __call__(self, completions: Sequence[Any], **arguments: Any) -> Values | Awaitable[Values]:
        given = {"completions": completions, **arguments}
        calls = [_call_of(function, given) for function in self.functions]
        if self.is_async:
            return self._combined_later(calls, len(completions))
        futures: dict[int, Future[Any]] = {}
        for i, function in enumerate(self.functions):
            if is_async(function):
                futures[i] = in_event_loop(calls[i])
        try:
            outputs = {i: call() for i, call in enumerate(calls) if i not in futures}
            outputs |= {i: future.result() for i, future in futures.items()}
        finally:
            for future in futures.values():
                future.cancel()  # those that still run after an error
        return self.combined(self._read([outputs[i] for i in range(len(calls))], len(completions)))

    async def _combined_later(self, calls: Sequence[Callable[[], Any]], count: int) -> Values:
        asynchronous = map(is_async, self.functions)
        running = [call() if own else asyncio.to_thread(call) for call, own in zip(calls, asynchronous, strict=True)]
        return self.combined(self._read(await asyncio.gather(*running), count))

    def combined(self, columns: Sequence[Values]) -> Values:
        """Return the rewards, given those of each function."""
        raise NotImplementedError

    def _read(self, outputs: Sequence[Any], count: int) -> list[Values]:
        """Return the values of each function, None where it abstains.

        Raises UserError for a result that is not one number or None per completion.
        """
        columns = []
        for function, output in zip(self.functions, outputs, strict=True):
            name = getattr(function, "__name__", type(function).__name__)
            read = values_of(output, count, 1.0)
            if read.faults:
                raise UserError(f"{name} {read.faults[0].what}. {read.faults[0].advice}")
            if read.nans and name not in self._with_nan:
                self._with_nan.add(name)
                log.warning("%s returned NaN for %d of %d completions; it counts as abstaining", name, read.nans, count)
            columns.append([None if math.isnan(x) else x for x in read.values.tolist()])
        return columns


class Weighted(_Composite):
    """Weighted sum of rewards of one completion, such as a reward and a penalty.

        r(y) = sum_i w_i r_i(y)     over the parts that do not abstain; abstains if all do

    ``parts``: weights by reward. Raises UserError for a weight that is not a finite number, and without parts.
    """

    PARTS = ("parts",)  # arguments that are rewards

    def __init__(self, parts: Mapping[Function, float] | Sequence[tuple[Function, float]]) -> None:
        pairs = list(parts.items()) if isinstance(parts, Mapping) else list(parts)
        if not pairs:
            raise UserError("parts must have at least one reward, as {'gsm8k()': 1.0, 'overlong(limit=200)': 0.5}")
        for _, weight in pairs:
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise UserError(f"a weight must be a finite number, got {weight!r}")
        self.weights = [weight for _, weight in pairs]
        super().__init__([function for function, _ in pairs])

    def combined(self, columns: Sequence[Values]) -> Values:
        rows: Values = []
        for values in zip(*columns, strict=True):
            terms = [weight * x for weight, x in zip(self.weights, values, strict=True) if x is not None]
            rows.append(math.fsum(terms) if terms else None)
        return rows


class Gated(_Composite):
    """A reward that counts only where another one passes, such as a format.

        r(y) = reward(y) if by(y) >= at_least else otherwise

    It abstains where ``by`` does, and where the reward does behind a gate that passes.

    Raises UserError for numbers that are not finite.
    """

    PARTS = ("reward", "by")  # arguments that are rewards

    def __init__(self, reward: Function, by: Function, at_least: float = 1.0, otherwise: float = 0.0) -> None:
        for name, value in (("at_least", at_least), ("otherwise", otherwise)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(f"{name} must be a finite number, got {value!r}")
        self.at_least = at_least
        self.otherwise = otherwise
        super().__init__([reward, by])

    def combined(self, columns: Sequence[Values]) -> Values:
        values, passes = columns
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


def _call_of(function: Function, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Bind a function to the arguments that it takes."""
    taken, _, takes_all = parameters(function)
    bound = function.keywords if isinstance(function, functools.partial) else {}
    own = {name: x for name, x in arguments.items() if name not in bound and (takes_all or name in taken)}
    return functools.partial(function, **own)
