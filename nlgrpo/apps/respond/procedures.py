"""Inference-time procedures by name: how many candidates are sampled, and by which rule one is the response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nlgrpo.calibration.rewind import RewindAndRepeat
from nlgrpo.errors import UserError
from nlgrpo.objectives.registry import Form, parse_name, split_name

Rule = Literal["largest", "smallest", "soft", "majority", "rewind"]

MOST = 1 << 16  # candidates per prompt


@dataclass(frozen=True)
class Procedure:
    """Sample ``samples`` candidates of a prompt, score them, and choose one by ``rule``. The first of ties wins.

    - "largest", "smallest": best-of-N and worst-of-N.
    - "soft": soft best-of-N, candidate j with probability proportional to e^(score_j / tau) (IAMA, Sec. 5.3).
    - "majority": the first candidate with the most frequent final answer (self-consistency, Wang et al. 2023).
    - "rewind": rewind-and-repeat (InfAlign, appendix G): candidates are sampled one at a time, at most ``samples``,
      and the last one is the response; ``rewind`` has the threshold.

    Raises UserError for arguments out of range.
    """

    rule: Rule
    samples: int
    tau: float = math.nan
    rewind: RewindAndRepeat | None = None

    def __post_init__(self) -> None:
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or not 1 <= self.samples <= MOST:
            raise UserError(f"{self.samples} candidates per prompt: expected a whole number in [1, {MOST:,}]")
        if self.rule == "soft" and not (self.tau > 0 and math.isfinite(self.tau)):
            raise UserError(f"tau = {self.tau}: expected a finite number > 0")
        if (self.rule == "rewind") != (self.rewind is not None):
            raise UserError('a threshold belongs to the rule "rewind", and that rule needs one')

    @property
    def needs_reward(self) -> bool:
        return self.rule != "majority"

    def choose(self, scores: Sequence[float], noise: float) -> int:
        """Return the index of the response among candidates with these scores; NaN is never chosen.

        ``noise``, uniform in [0, 1), decides for soft best-of-N. Raises UserError if all scores are NaN.
        """
        scored = [i for i, score in enumerate(scores) if not math.isnan(score)]
        if not scored:
            raise UserError("all scores are NaN")
        if self.rule == "soft":
            return scored[_sampled([scores[i] for i in scored], self.tau, noise)]
        if self.rule == "rewind":
            return scored[-1]
        return (min if self.rule == "smallest" else max)(scored, key=lambda i: scores[i])

    def __str__(self) -> str:
        if self.rewind is not None:
            return str(self.rewind)
        name = {"largest": "bon", "smallest": "wor", "soft": f"soft:{self.tau:g}", "majority": "maj"}[self.rule]
        return f"{name}:{self.samples}"

    @classmethod
    def parse(cls, text: str, samples: int | None = None) -> Procedure:
        """Parse "bon:N", "wor:N", "soft:TAU:N", "maj:N" or "rewind:QUANTILE:N", the names of objectives.

        ``samples`` is the number of candidates if the name has none: "soft:0.1" with 8 is "soft:0.1:8". Raises
        UserError for an unknown name, suggesting the nearest one, for invalid arguments, and for two different
        numbers of candidates.
        """
        whole = text.strip()
        try:
            name, given = split_name(whole, FORMS, "procedure")
        except ValueError as error:
            raise UserError(str(error)) from None
        form = FORMS[name]
        if len(given) == form.needed - 1:
            if samples is None:
                raise UserError(f"procedure {text!r}: the number of candidates is missing; write {form.text!r}")
            whole = f"{whole}:{samples}"
        try:
            found: Procedure = parse_name(whole, FORMS, "procedure")
        except UserError as error:  # an argument is out of range
            raise UserError(f"procedure {text!r}: {error}") from None
        except ValueError as error:
            raise UserError(str(error)) from None
        if samples not in (None, found.samples):
            raise UserError(f"procedure {text!r} samples {found.samples} candidates, but samples = {samples}")
        return found


def _rewind(quantile: float, most: int) -> Procedure:
    return Procedure("rewind", most, rewind=RewindAndRepeat(quantile, most))


FORMS = {
    "bon": Form("bon:N", lambda n: Procedure("largest", n), (int,), 1),
    "wor": Form("wor:N", lambda n: Procedure("smallest", n), (int,), 1),
    "soft": Form("soft:TAU:N", lambda tau, n: Procedure("soft", n, tau), (float, int), 2),
    "maj": Form("maj:N", lambda n: Procedure("majority", n), (int,), 1),
    "rewind": Form("rewind:QUANTILE:N", _rewind, (float, int), 2),
}


def _sampled(scores: Sequence[float], tau: float, noise: float) -> int:
    """Sample an index in proportion to e^(score / tau) by inverting the CDF at ``noise``."""
    largest = max(scores)
    weights = [math.exp((score - largest) / tau) for score in scores]
    target = noise * math.fsum(weights)
    total = 0.0
    for i, weight in enumerate(weights):
        total += weight
        if target < total:
            return i
    return max(i for i, weight in enumerate(weights) if weight > 0)  # rounding of the sum
