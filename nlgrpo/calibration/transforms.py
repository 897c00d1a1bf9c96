"""Transforms Phi of a calibrated reward u in [0, 1], the second step of InfAlign-CTRL, and their names.

Training on Phi(u) with a KL penalty of weight beta turns the density of u, uniform under the reference, into
e^{Phi(u) / beta} over its integral (InfAlign, Theorem 3). The best Phi depends on how responses are selected at
inference time; `nlgrpo.calibration.alignment` computes the win rates.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nlgrpo.calibration import fixed_point, stationary
from nlgrpo.calibration.procedures import CalibratedProcedure
from nlgrpo.errors import did_you_mean, nearest
from nlgrpo.objectives import registry
from nlgrpo.objectives.base import is_number
from nlgrpo.objectives.rank_based import BestOfN, RankBased, WorstOfN

Loader = Callable[[str], Callable[..., Any]]

FORMS = {  # name: syntax
    "identity": "identity",
    "log": "log",
    "exp": "exp:T",
    "power": "power:T",
    "bon_fp": "bon_fp:N:BETA",
    "won_fp": "won_fp:N:BETA",
    "fp": "fp:PROCEDURE:BETA",
}
STEEPEST = 500.0  # largest |t| of exp:t; e^710 overflows float64
POWERS = 1e-6, 1e6  # range of t of power:t
GRID = 1025  # points at which a user's function is checked


class Transform(ABC):
    """Base class: a non-decreasing Phi: [0, 1] -> R. Maps calibrated rewards of any shape to their shape and dtype.

    Computes in float64. Raises ValueError for NaN, values outside [0, 1], and integer tensors.
    """

    def __call__(self, calibrated: Tensor) -> Tensor:
        if not calibrated.is_floating_point():
            raise ValueError(f"{self.name}: expected a floating-point dtype, got {calibrated.dtype}.")
        u = calibrated.detach().double()
        wrong = ~((u >= 0) & (u <= 1))
        if bool(wrong.any()):
            raise ValueError(
                f"{self.name}: expected calibrated rewards in [0, 1], got {float(u[wrong][0]):g}; "
                "compute them by nlgrpo.calibration.calibrate."
            )
        return self._phi(u).to(calibrated.dtype)

    def below_top(self, u: Tensor, w: Tensor) -> Tensor:
        """Return Phi(u) - Phi(1) from u and w = 1 - u, both in float64, which keeps a tiny u or w exact."""
        return self._phi(u) - self._phi(torch.ones_like(u[..., :1]))

    def at(self, beta: float) -> Transform:
        """Return the transform for training with this ``beta``: itself, unless it depends on beta."""
        return self

    @property
    def residual(self) -> float | None:
        """Of a fixed point: the largest error of its equations, at most 1e-8. None for other transforms."""
        return None

    @property
    @abstractmethod
    def name(self) -> str:
        """The string that `parse_transform` turns into this transform."""

    @abstractmethod
    def _phi(self, u: Tensor) -> Tensor:
        """Phi(u), float64."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Identity(Transform):
    """Phi(u) = u, the best transform for the win rate of a single sample (IPO; InfAlign, Corollary 1)."""

    @property
    def name(self) -> str:
        return "identity"

    def _phi(self, u: Tensor) -> Tensor:
        return u

    def below_top(self, u: Tensor, w: Tensor) -> Tensor:
        return -w


@dataclass(frozen=True)
class Log(Transform):
    """Phi(u) = log max(u, 1/(2K)): distillation of best-of-m of the reference, m = 1 + 1/beta.

    K = ``references`` is the number of reference samples that calibrated u. Of the values 0, 1/(2K), .., 1 the clamp
    changes only 0. Raises ValueError for K < 2. Without K nothing is clamped, and u = 0 raises ValueError.
    """

    references: int | None = None

    def __post_init__(self) -> None:
        K = self.references
        if K is not None and (not isinstance(K, int) or isinstance(K, bool) or K < 2):
            raise ValueError(
                f"log: references = {K!r}; expected an integer >= 2, the reference samples that calibrated the rewards."
            )

    @property
    def name(self) -> str:
        return "log"

    def __call__(self, calibrated: Tensor) -> Tensor:
        if self.references is None and bool((calibrated == 0).any()):
            raise ValueError(
                "log of a calibrated reward of 0; give references=K, the number of samples that calibrated it."
            )
        return super().__call__(calibrated)

    def _phi(self, u: Tensor) -> Tensor:
        return (u if self.references is None else u.clamp(min=0.5 / self.references)).log()

    def below_top(self, u: Tensor, w: Tensor) -> Tensor:
        return torch.where(w < 0.25, torch.log1p(-w), self._phi(u))


@dataclass(frozen=True)
class Exponential(Transform):
    """Phi(u) = sign(t) e^{t u} (InfAlign, Eq. 11): t > 0 for best-of-N, t < 0 for worst-of-N.

    t -> 0 approaches the identity; t = 10 suits N = 4. Raises ValueError for t = 0, which is constant, and |t| > 500.
    """

    t: float

    def __post_init__(self) -> None:
        if not (is_number(self.t) and 0 < abs(self.t) <= STEEPEST):
            raise ValueError(
                f"exp:{self.t}: expected a number in [-{STEEPEST:g}, {STEEPEST:g}] other than 0, such as 'exp:10'."
            )

    @property
    def name(self) -> str:
        return f"exp:{self.t:g}" if float(f"{self.t:g}") == self.t else f"exp:{self.t!r}"

    def _phi(self, u: Tensor) -> Tensor:
        return math.copysign(1.0, self.t) * (self.t * u).exp()

    def below_top(self, u: Tensor, w: Tensor) -> Tensor:
        return math.copysign(math.exp(self.t), self.t) * torch.expm1(-self.t * w)


@dataclass(frozen=True)
class Power(Transform):
    """Phi(u) = u^t, t > 0. With t = N, best-of-N of it is InfAlign's objective for best-of-N (Definition 5):

        E max(u_1^N, .., u_N^N) = 1 - N int F^N u^{N-1} = best-of-N win rate

    Training with the objective "bon:N" and the transform "power:N" therefore has the optimum of "mean" and "bon_fp:N"
    at the same beta, without solving for it. "power:1" is the identity. Raises ValueError for t outside [1e-6, 1e6].
    """

    t: float

    def __post_init__(self) -> None:
        if not (is_number(self.t) and POWERS[0] <= self.t <= POWERS[1]):
            raise ValueError(
                f"power:{self.t}: expected a number in [{POWERS[0]:g}, {POWERS[1]:g}], such as 'power:4' for best-of-4."
            )

    @property
    def name(self) -> str:
        return f"power:{self.t:g}" if float(f"{self.t:g}") == self.t else f"power:{self.t!r}"

    def _phi(self, u: Tensor) -> Tensor:
        return u**self.t

    def below_top(self, u: Tensor, w: Tensor) -> Tensor:
        return torch.expm1(self.t * torch.where(w < 0.25, torch.log1p(-w), u.log()))


@dataclass(frozen=True)
class FixedPoint(Transform):
    """The best transform for best-of-n, or ``worst``-of-n, at ``beta`` (InfAlign, Corollary 2), with Phi(1) = 0.

    Without ``beta`` it adapts to the beta of the training (`at`), and calling it raises ValueError. See
    `nlgrpo.calibration.fixed_point` for the method and the range of n and beta.
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
        """Largest difference between the two sides of Corollary 2's equation, by quadrature; at most 1e-8."""
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
class ProcedureFixedPoint(Transform):
    """The transform of InfAlign's Theorem 1 for any calibrated procedure, a rank-based objective, at ``beta``.

        Phi(u) = -int_u^1 g(F(v)) g(v) dv,    F' ~ e^{Phi / beta},    Phi(1) = 0

    g is the procedure's density of the rank. If g increases (best-of-N, best-of-Poisson), this is the optimum of the
    win rate minus beta KL. Otherwise it is the best stationary point that was found, which Theorem 1 requires of the
    optimum; see `nlgrpo.calibration.stationary`. Without ``beta`` it adapts to the beta of the training (`at`), and
    calling it raises ValueError. For best-of-N and worst-of-N it equals `FixedPoint`.
    """

    procedure: RankBased
    beta: float | None = None

    def __post_init__(self) -> None:
        CalibratedProcedure(self.procedure)
        if self.beta is not None:
            stationary.solve(self.procedure, self.beta)

    @property
    def residual(self) -> float:
        """Largest difference between the two sides of Theorem 1's equation, by quadrature; at most 1e-8."""
        return self._solved().residual

    @property
    def name(self) -> str:
        return f"fp:{self.procedure.name}" + (f":{float(self.beta)!r}" if self.beta is not None else "")

    def at(self, beta: float) -> ProcedureFixedPoint:
        return replace(self, beta=float(beta)) if self.beta is None else self

    def _solved(self) -> stationary.StationaryPoint:
        if self.beta is None:
            raise ValueError(f"{self.name} depends on beta; write '{self.name}:0.1', or give beta=0.1.")
        return stationary.solve(self.procedure, self.beta)

    def _phi(self, u: Tensor) -> Tensor:
        return self._solved()(1 - u)

    def below_top(self, u: Tensor, w: Tensor) -> Tensor:
        return self._solved()(w)


@dataclass(frozen=True)
class Custom(Transform):
    """A user's function ``f``: maps a float64 tensor in [0, 1] to a finite tensor of its shape, and never decreases.

    ``named`` is its name. Raises ValueError if f decreases or is not finite somewhere on a grid of 1,025 points, or
    does not return a tensor of the same shape.
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
                f"{self.name} decreases from f({float(grid[i]):.6g}) = {float(values[i]):.6g} to "
                f"f({float(grid[i + 1]):.6g}) = {float(values[i + 1]):.6g}; a transform must keep the order of rewards."
            )
        if values[0] == values[-1]:
            raise ValueError(f"{self.name} is {float(values[0]):g} everywhere; expected f(1) > f(0).")

    @property
    def name(self) -> str:
        return self.named or getattr(self.f, "__qualname__", type(self.f).__name__)

    def _phi(self, u: Tensor) -> Tensor:
        with torch.no_grad():
            values = self.f(u)
        if not isinstance(values, Tensor) or values.shape != u.shape:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"{self.name} of a tensor {tuple(u.shape)} must be a tensor of that shape, got {got}.")
        return values.double()


def parse_transform(
    text: str,
    *,
    n: int | None = None,
    beta: float | None = None,
    references: int | None = None,
    function: Loader | None = None,
) -> Transform:
    """Parse the name of a transform.

    - "identity"; "log", clamped at 1/(2K) for K = ``references``; "exp:10", "exp:-10"; "power:4".
    - "bon_fp:4:0.1" and "won_fp:4:0.1", the fixed points for N = 4 at beta = 0.1. ``n`` and ``beta`` are the defaults
      for a text without them, such as "bon_fp". Without any beta the transform adapts to that of the training.
    - "fp:cvar:0.25:0.1", the fixed point for any rank-based objective (`nlgrpo.objectives.parse`) at beta = 0.1, and
      "fp:cvar:0.25" without it. "fp:bon:4" and "fp:wor:4" are "bon_fp:4" and "won_fp:4".
    - "file.py:f" or "module:f", loaded by ``function`` (`nlgrpo.runtime.user_code.function`).

    Raises ValueError for an unknown name, suggesting the nearest known one, and for invalid arguments.
    """
    text = text.strip()
    name, *given = text.split(":")
    if name in ("identity", "log"):
        if given:
            raise ValueError(f"transform {text!r} takes no argument; write {name!r}.")
        return Identity() if name == "identity" else Log(references)
    if name == "exp":
        return Exponential(_number(text, given, float))
    if name == "power":
        return Power(_number(text, given, float))
    if name == "fp":
        return _fixed_point(text, beta, function)
    if name in ("bon_fp", "won_fp"):
        n = _number(text, given[:1], int) if given or n is None else n
        beta = _number(text, given[1:], float) if given[1:] else beta
        return FixedPoint(n, beta, name == "won_fp")
    if function is not None and given and all((name, *given)):
        return Custom(function(text), text)
    hint = did_you_mean(nearest(name.lower(), FORMS))
    custom = ", or a function as file.py:f" if function is not None else ""
    raise ValueError(f"transform {text!r} is not known{hint} Expected one of {', '.join(FORMS.values())}{custom}.")


def as_transform(transform: Transform | str, n: int | None = None) -> Transform:
    """Return ``transform``, or the transform of this name, as `parse_transform` does with the default ``n``.

    Raises ValueError as `parse_transform`, and for another type.
    """
    if isinstance(transform, str):
        return parse_transform(transform, n=n)
    if not isinstance(transform, Transform):
        raise ValueError(f"transform = {transform!r}: expected a Transform, or a name such as 'log' or 'exp:10'.")
    return transform


def _fixed_point(text: str, beta: float | None, function: Loader | None) -> Transform:
    """Parse "fp:PROCEDURE" or "fp:PROCEDURE:BETA"."""
    name, *given = text.split(":")[1:] or [""]
    if name not in registry.FORMS:
        raise ValueError(f"transform {text!r}: expected {FORMS['fp']!r} with a rank-based objective: 'fp:cvar:0.25'.")
    needed = max(registry.FORMS[name].needed, name == "distortion")  # arguments of the procedure itself
    if len(given) > needed and _is_float(given[-1]):
        beta = float(given.pop())
    objective = registry.parse(":".join((name, *given)), function)
    if isinstance(objective, BestOfN | WorstOfN) and objective.n > 1:
        return FixedPoint(objective.n, beta, isinstance(objective, WorstOfN))
    return ProcedureFixedPoint(CalibratedProcedure(objective).objective, beta)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str, given: list[str], kind: Callable[[str], Any]) -> Any:
    """Convert the single argument in ``given``. Raises ValueError if there is not exactly one valid argument."""
    try:
        (argument,) = given
        return kind(argument)
    except ValueError:
        raise ValueError(f"transform {text!r}: expected {FORMS[text.partition(':')[0]]!r} with numbers.") from None
