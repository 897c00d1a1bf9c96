"""Results of a check of `nlgrpo verify`: claims with the measured value and its bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """A claim of ``source``. It holds if ``measured``, the value of ``quantity``, is within the bounds, inclusive.

    NaN is never within the bounds. ``note`` has additional information.
    """

    claim: str
    source: str
    quantity: str
    measured: float
    at_most: float = math.inf
    at_least: float = -math.inf
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.at_least <= self.measured <= self.at_most

    @property
    def required(self) -> str:
        if self.at_least == -math.inf:
            return f"<= {self.at_most:.4g}"
        if self.at_most == math.inf:
            return f">= {self.at_least:.4g}"
        return f"{self.at_least:.4g} to {self.at_most:.4g}"

    def as_json(self) -> dict[str, Any]:
        """JSON data; numbers that are not finite, such as missing bounds, are null."""
        numbers = {"measured": self.measured, "at_most": self.at_most, "at_least": self.at_least}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        texts = {"claim": self.claim, "source": self.source, "quantity": self.quantity, "note": self.note}
        return texts | finite | {"holds": self.holds}


@dataclass(frozen=True)
class Proof:
    """Results of one check, and the keyword arguments of its function in `verification_figures`."""

    results: Sequence[Result]
    drawn: dict[str, Any] = field(default_factory=dict)
