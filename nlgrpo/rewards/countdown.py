"""The reward of Countdown: an expression of given numbers that has the value of a target."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from nlgrpo.data.conversations import text_of
from nlgrpo.errors import UserError

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
LONGEST_EXPRESSION = 200  # characters
WRITTEN = re.compile(r"[-+*/() 0-9]+")


@dataclass(frozen=True)
class Countdown:
    """1.0 for an expression of the given numbers, each used once, with the value of the target, else 0.0.

    The expression is in the last ``<answer>..</answer>`` of the completion: numbers, ``+ - * /`` (also as signs) and
    parentheses. An equation ``.. = target`` counts by its left side. ``nums`` and ``target`` name the columns of the
    data, a list of whole numbers and a whole number, as in Countdown-Tasks-3to4. The value is exact. Abstains (None)
    for rows without both, such as those of another source in a mixture.

    Raises UserError if the data do not have the columns, or for other values in them.
    """

    nums: str = "nums"
    target: str = "target"

    @property
    def data_columns(self) -> tuple[str, ...]:
        """Required columns of the data."""
        return (self.nums, self.target)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        for name in self.data_columns:
            if name not in columns:
                raise UserError(f"countdown() needs a column {name!r} in the data")
        rows = zip(completions, columns[self.nums], columns[self.target], strict=True)
        scores: list[float | None] = []
        for completion, nums, target in rows:
            absent = nums is None and target is None
            scores.append(None if absent else float(self._solves(text_of(completion), nums, target)))
        return scores

    def _solves(self, text: str, nums: Any, target: Any) -> bool:
        if not isinstance(nums, list | tuple) or not all(type(x) is int for x in (*nums, target)):
            raise UserError(f"countdown(): {self.nums} = {nums!r}, {self.target} = {target!r}: expected whole numbers")
        found = expression_of(text)
        if found is None:
            return False
        value, used = found
        return value == target and Counter(used) == Counter(nums)


def expression_of(text: str) -> tuple[Fraction, list[int]] | None:
    """Return the value of the expression in the last ``<answer>..</answer>``, and its numbers; None without a value."""
    before, end, _ = text.rpartition("</answer>")
    _, begin, inside = before.rpartition("<answer>")
    inside = " ".join(inside.partition("=")[0].split())
    if not begin or not end or len(inside) > LONGEST_EXPRESSION or not WRITTEN.fullmatch(inside):
        return None
    numbers: list[int] = []
    try:
        return _value_of(ast.parse(inside, mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value_of(node: ast.expr, numbers: list[int]) -> Fraction:
    """Compute an expression, and append its numbers. Raises ValueError for other operators, such as ``//``."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value_of(node.left, numbers), _value_of(node.right, numbers))
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_value_of(node.operand, numbers))
    raise ValueError("not an expression of numbers")
