"""Any differentiable functional of the policy, linearised by autograd. Legend: P prompts, M samples per prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nlgrpo.objectives.base import Objective, first


@dataclass(frozen=True)
class Functional(Objective):
    """Custom objective R of the probabilities and rewards of a group, linearised by autograd.

        R[pi] = R(p, r);      dR/dpi(y_j) = dR/dp_j    at p_j = 1/M      (IAMA, Alg. 1)

    ``f`` maps probabilities (P, M) and rewards (P, M) to the value of each prompt, (P,). It is differentiable in p, and
    sums over the last dimension:

        def entropic(p, r):
            return (p * r.exp()).sum(-1).log()

    R may be defined for distributions only, or for any p >= 0: two extensions differ by a constant per group, which
    baselines remove. It is a plug-in estimate with a bias of order 1/M, like `EntropicRisk` and every functional of the
    empirical distribution. For equal rewards R must have equal derivatives; otherwise it depends on the order of the
    samples.

    ``named``: the function's name in `name`, by default its ``__qualname__``.

    Raises ValueError if ``f`` raises, returns another shape, is not differentiable in p, mixes the groups of a batch,
    or has a value or derivative that is not finite.
    """

    f: Callable[[Tensor, Tensor], Tensor]
    named: str = ""

    def __post_init__(self) -> None:
        if not callable(self.f):
            raise ValueError(f"Functional(f={self.f!r}): expected a function of probabilities and rewards.")

    @property
    def name(self) -> str:
        return f"functional:{self.named or getattr(self.f, '__qualname__', type(self.f).__name__)}"

    def check(self, samples: int) -> None:
        """Raise ValueError before training for a function that fails on groups of ``samples``, except by its values."""
        weights = torch.full((2, samples), 1 / samples, dtype=torch.float64, requires_grad=True)
        rewards = torch.linspace(0.25, 0.75, 2 * samples, dtype=torch.float64).view(2, samples)
        self._derivatives(weights, rewards)

    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        with torch.no_grad():
            values = self._call(_uniform(rewards) if probs is None else probs, rewards.clone())
        return self._finite(values[:, None], "value", rewards)[:, 0]

    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            weights = (_uniform(rewards) if probs is None else probs).clone().requires_grad_()
            slopes = self._derivatives(weights, rewards.clone())
        return self._finite(slopes, "derivative", rewards)

    def _derivatives(self, weights: Tensor, rewards: Tensor) -> Tensor:
        values = self._call(weights, rewards)
        if len(values) > 1:
            alone = self._call(weights[:1], rewards[:1])[0]
            if not torch.allclose(alone, values[0], rtol=1e-4, atol=1e-6, equal_nan=True):
                raise ValueError(
                    f"{self}: the value of a group depends on the other groups ({alone.item():g} alone, "
                    f"{values[0].item():g} in a batch); sum over the last dimension only."
                )
        slopes = torch.autograd.grad(values.sum(), weights, allow_unused=True)[0] if values.requires_grad else None
        if slopes is None:
            raise ValueError(
                f"{self} is not differentiable in the probabilities: its value does not depend on them, or only "
                "through operations without a gradient, such as argmax or comparisons."
            )
        return slopes

    def _call(self, weights: Tensor, rewards: Tensor) -> Tensor:
        try:
            values = self.f(weights, rewards)
        except Exception as error:  # f is user code
            raise ValueError(f"{self} raised {type(error).__name__}: {error}.") from error
        if not isinstance(values, Tensor) or values.shape != weights.shape[:1]:
            got = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise ValueError(
                f"{self} returned {got} for probabilities and rewards {tuple(weights.shape)}; expected the value of "
                f"each prompt, {tuple(weights.shape[:1])}: sum over the last dimension."
            )
        return values

    def _finite(self, numbers: Tensor, what: str, rewards: Tensor) -> Tensor:
        bad = ~numbers.isfinite()
        if bad.any():
            group, sample = bad.nonzero()[0].tolist()
            reward = f", whose reward is {rewards[group, sample].item():g}," if what == "derivative" else ""
            where = first(bad) if what == "derivative" else f"group {group}"
            raise ValueError(f"{self}: the {what} of {where}{reward} is {numbers[group, sample].item():g}; expected a "
                             "finite number.")  # fmt: skip
        return numbers.detach().to(rewards)


def _uniform(rewards: Tensor) -> Tensor:
    return torch.full_like(rewards, 1 / rewards.shape[-1])
