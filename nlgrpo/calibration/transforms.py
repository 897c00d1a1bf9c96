"""Transforms Phi of a calibrated reward u in [0, 1], the second step of InfAlign-CTRL; each by its name.

Training for Phi(u) with beta KL to the reference makes the density of u, uniform under the reference, e^{Phi(u) / beta}
over its integral (InfAlign, Theorem 3). Which Phi is good depends on how the model is sampled; `nlgrpo.calibration` has
the win rates of each.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nlgrpo.calibration import fixed_point
from nlgrpo.objectives.base import is_number

Loader = Callable[[str], Callable[..., Any]]

FORMS = {  # name: how it is written
    "identity": "identity",
    "log": "log",
    "exp": "exp:T",
    "bon_fp": "bon_fp:N:BETA",
    "won_fp": "won_fp:N:BETA",
}
STEEPEST = 500.0  # of exp:t; e^700 is the largest float64
GRID = 1025  # places at which a function of the user is looked at


class Transform(ABC):
    """Phi: [0, 1] -> R that never falls; called with calibrated rewards of any shape, it returns their shape and dtype.

    All is computed in float64. Raises ValueError for NaN, what lies outside of [0, 1], and integers.
    """

    def __call__(self, calibrated: Tensor) -> Tensor:
        if not calibrated.is_floating_point():
            raise ValueError(f"{self.name}: expected a floating type, got {calibrated.dtype}.")
        u = calibrated.detach().double()
        wrong = ~((u >= 0) & (u <= 1))
        if bool(wrong.any()):
            raise ValueError(
                f"{self.name}: expected calibrated rewards in [0, 1], got {float(u[wrong][0]):g}; "
                "nlgrpo.calibration.calibrate makes them."
            )
        return self._phi(u).to(calibrated.dtype)

    def below_top(self, u: Tensor, w: Tensor) -> Tensor:
        """Phi(u) - Phi(1), given u and w = 1 - u in float64, one of which may be too small to be seen in the other."""
        return self._phi(u) - self._phi(torch.ones_like(u[..., :1]))

    def at(self, beta: float) -> Transform:
        """The transform that a training with this ``beta`` uses: itself, unless its best form depends on beta."""
        return self

    @property
    @abstractmethod
    def name(self) -> str:
        """The string from which `parse_transform` makes it."""

    @abstractmethod
    def _phi(self, u: Tensor) -> Tensor:
        """Phi(u), float64."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Identity(Transform):
    """Phi(u) = u, the best one for the win rate of a single sample (IPO; InfAlign, Corollary 1)."""

    @property
    def name(self) -> str:
        return "identity"

    def _phi(self, u: Tensor) -> Tensor:
        return u

    def below_top(self, u: Tensor, w: Tensor) -> Tensor:
        return -w


@dataclass(frozen=True)
class Log(Transform):
    """Phi(u) = log max(u, 1/(2K)): training for it is distillation of best-of-m of the reference, m = 1 + 1/beta.

    K = ``references`` is the number of samples by which u was calibrated; of its values 0, 1/(2K), .., 1 the clamp
    moves 0 alone. Without K nothing is clamped, and calling it with u = 0 is a ValueError, as is a K < 2.
    """

    references: int | None = None

    def __post_init__(self) -> None:
        K = self.references
        if K is not None and (not isinstance(K, int) or isinstance(K, bool) or K < 2):
            raise ValueError(
                f"log: references = {K!r}; expected an integer >= 2, the samples that calibrated the rewards."
            )

    @property
    def name(self) -> str:
        return "log"

    def __call__(self, calibrated: Tensor) -> Tensor:
        if self.references is None and bool((calibrated == 0).any()):
            raise ValueError("log of a calibrated reward of 0; give references=K, the samples that calibrated it.")
        return super().__call__(calibrated)

    def _phi(self, u: Tensor) -> Tensor:
        return (u if self.references is None else u.clamp(min=0.5 / self.references)).log()

    def below_top(self, u: Tensor, w: Tensor) -> Tensor:
        return torch.where(w < 0.25, torch.log1p(-w), self._phi(u))


@dataclass(frozen=True)
class Exponential(Transform):
    """Phi(u) = sign(t) e^{t u} (InfAlign, Eq. 11): t > 0 for best-of-N, t < 0 for worst-of-N; t -> 0 is the identity.

    t = 10 suits N = 4. Raises ValueError for t = 0, which is constant, and for |t| > 500.
    """

    t: float

    def __post_init__(self) -> None:
        if not (is_number(self.t) and 0 < abs(self.t) <= STEEPEST):
            raise ValueError(
                f"exp:{self.t}: expected a number in [-{STEEPEST:g}, {STEEPEST:g}] that is not 0, as 'exp:10'."
            )

    @property
    def name(self) -> str:
        return f"exp:{self.t:g}" if float(f"{self.t:g}") == self.t else f"exp:{self.t!r}"

    def _phi(self, u: Tensor) -> Tensor:
        return math.copysign(1.0, self.t) * (self.t * u).exp()

    def below_top(self, u: Tensor, w: Tensor) -> Tensor:
        return math.copysign(math.exp(self.t), self.t) * torch.expm1(-self.t * w)


@dataclass(frozen=True)
class FixedPoint(Transform):
    """The best transform for best-of-n, or ``worst``-of-n, at a ``beta`` (InfAlign, Corollary 2), with Phi(1) = 0.

    Without a beta it is that of whichever beta is trained with (`at`), and calling it is a ValueError. How it is found,
    and for which n and beta: `nlgrpo.calibration.fixed_point`.
    """

    n: int
    beta: float | None = None
    worst: bool = False

    def __post_init__(self) -> None:
        fixed_point.check_n(self.n, self.worst)
        if self.beta is not None:
            fixed_point.solve(self.n, self.beta, self.worst)

    @property
    def residual(self) -> float:
        """Largest difference of the two sides of Corollary 2's equation, by quadrature; at most 1e-8."""
        return self._solved().residual

    @property
    def name(self) -> str:
        return f"{'won' if self.worst else 'bon'}_fp:{self.n}" + (
            f":{float(self.beta)!r}" if self.beta is not None else ""
        )

    def at(self, beta: float) -> FixedPoint:
        return replace(self, beta=float(beta)) if self.beta is None else self

    def _solved(self) -> fixed_point.FixedPoint:
        if self.beta is None:
            raise ValueError(f"{self.name} depends on beta; write '{self.name}:0.1', or give beta=0.1.")
        return fixed_point.solve(self.n, self.beta, self.worst)

    def _phi(self, u: Tensor) -> Tensor:
        return self._solved()(1 - u)

    def below_top(self, u: Tensor, w: Tensor) -> Tensor:
        return self._solved()(w)


@dataclass(frozen=True)
class Custom(Transform):
    """A function ``f`` of the user: of a float64 tensor of any shape in [0, 1], finite, of that shape, never falling.

    ``named`` is what `name` calls it. It is looked at on a grid of 1,025 places; raises ValueError naming where it
    falls or is not finite, and for what is no tensor of the same shape.
    """

    f: Callable[[Tensor], Tensor]
    named: str = ""

    def __post_init__(self) -> None:
        grid = torch.linspace(0, 1, GRID, dtype=torch.float64)
        values = self._phi(grid)
        if not bool(values.isfinite().all()):
            i = int((~values.isfinite()).nonzero()[0])
            raise ValueError(
                f"{self.name}: f({float(grid[i]):g}) = {float(values[i])}; expected finite numbers on [0, 1]."
            )
        falls = (values.diff() < 0).nonzero()
        if len(falls):
            i = int(falls[0])
            raise ValueError(
                f"{self.name} falls from f({float(grid[i]):.6g}) = {float(values[i]):.6g} to "
                f"f({float(grid[i + 1]):.6g}) = {float(values[i + 1]):.6g}; a transform must keep the order of rewards."
            )
        if values[0] == values[-1]:
            raise ValueError(f"{self.name} is {float(values[0]):g} everywhere; there would be nothing to train for.")

    @property
    def name(self) -> str:
        return self.named or getattr(self.f, "__qualname__", type(self.f).__name__)

    def _phi(self, u: Tensor) -> Tensor:
        with torch.no_grad():
            found = self.f(u)
        if not isinstance(found, Tensor) or found.shape != u.shape:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{self.name} of a tensor {tuple(u.shape)} must be a tensor of that shape, got {got}.")
        return found.double()


def parse_transform(
    text: str,
    *,
    n: int | None = None,
    beta: float | None = None,
    references: int | None = None,
    function: Loader | None = None,
) -> Transform:
    """The transform that ``text`` names.

    - "identity"; "log", clamped at 1/(2K) for K = ``references``; "exp:10", "exp:-10".
    - "bon_fp:4:0.1" and "won_fp:4:0.1", the fixed points for N = 4 at beta = 0.1. ``n`` and ``beta`` are those of a
      text without them, as "bon_fp"; with no beta it is made for the beta that it is used with.
    - "file.py:f" or "module:f", what ``function`` makes of that (`nlgrpo.runtime.user_code.function`).

    Raises ValueError for an unknown name, with the nearest known one, and for arguments that do not fit.
    """
    text = text.strip()
    name, *given = text.split(":")
    if name in ("identity", "log"):
        if given:
            raise ValueError(f"transform {text!r}: it takes no argument; write {name!r}.")
        return Identity() if name == "identity" else Log(references)
    if name == "exp":
        return Exponential(_number(text, given, float))
    if name in ("bon_fp", "won_fp"):
        n = _number(text, given[:1], int) if given or n is None else n
        beta = _number(text, given[1:], float) if given[1:] else beta
        return FixedPoint(n, beta, name == "won_fp")
    if function is not None and given and all((name, *given)):
        return Custom(function(text), text)
    near = difflib.get_close_matches(name.lower(), FORMS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    own = ", or a function as file.py:f" if function is not None else ""
    raise ValueError(f"transform {text!r} is not known; expected one of {', '.join(FORMS.values())}{own}.{hint}")


def _number(text: str, given: list[str], kind: Callable[[str], Any]) -> Any:
    """The one argument that is ``given``."""
    try:
        (argument,) = given
        return kind(argument)
    except ValueError:
        raise ValueError(f"transform {text!r}: expected {FORMS[text.partition(':')[0]]!r} with numbers.") from None
