"""All objectives, how a config names them, and rewards that are missing for some samples.

Training replaces the rewards of a group of M samples of one prompt by the *linearised* rewards: the first variation of
the objective at the group's empirical distribution, up to a constant per group (IAMA, Alg. 1 to 4). No gradient flows
through anything here. Legend: P prompts, M samples per prompt.

A config names an objective by a string: "mean", "bon:4", "soft:0.1". `parse` reads it and `Objective.name` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nlgrpo.errors import did_you_mean, nearest
from nlgrpo.kernels import reference
from nlgrpo.objectives.advantages import Baseline
from nlgrpo.objectives.base import Objective
from nlgrpo.objectives.diversity import Diversity, DPPDiversity, RaoDiversity
from nlgrpo.objectives.functional import Functional
from nlgrpo.objectives.kde import Smoothed
from nlgrpo.objectives.majority import MajorityVote
from nlgrpo.objectives.rank_based import BestOfN, BestOfPoisson, CVaR, Distortion, Mean, RankBased, WorstOfN
from nlgrpo.objectives.tilted import EntropicRisk, SoftBestOfN

__all__ = [
    "BestOfN",
    "BestOfPoisson",
    "CVaR",
    "DPPDiversity",
    "Distortion",
    "EntropicRisk",
    "Form",
    "Functional",
    "MajorityVote",
    "Mean",
    "Objective",
    "RankBased",
    "RaoDiversity",
    "Smoothed",
    "SoftBestOfN",
    "WorstOfN",
    "linearize_present",
    "parse",
    "parse_name",
    "present",
    "split_name",
    "value_present",
]


def linearize_present(
    objective: Objective, rewards: Tensor, baseline: Baseline = "mean", weights: Tensor | None = None
) -> Tensor:
    """Return `Objective.advantage` (P, M) where NaN marks a missing reward: the reward abstained for that completion.

    With the importance weights (P, M) of samples of another policy, `Objective.reweighted_advantage`.

    The remaining entries of a group form a smaller group. Missing entries get 0, and so do all entries of a group with
    fewer than ``objective.fewest``. In kernel matrices (P, M, M) a sample is missing if its similarity to itself is
    NaN; in rewards with answers (P, M, 2), if its reward is.
    """

    def advantage(rewards: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None:
            return objective.advantage(rewards, baseline)
        return objective.reweighted_advantage(rewards, weights, baseline)

    absent = _absent(objective, rewards)
    if not absent.any():
        return advantage(rewards, weights)
    linear = torch.zeros(absent.shape, dtype=reference.widen(rewards).dtype, device=rewards.device)
    for rows, columns in _by_presence(absent, objective.fewest):
        some = None if weights is None else weights[rows, columns]
        linear[rows, columns] = advantage(_picked(objective, rewards, rows, columns), some)
    return linear


def present(objective: Objective, rewards: Tensor) -> Tensor:
    """Mask (P, M) of the entries that are used: not NaN, in a group with at least ``objective.fewest`` of them."""
    available = ~_absent(objective, rewards)
    return available & (available.sum(-1, keepdim=True) >= objective.fewest)


def learns_from_one(objective: Objective) -> bool:
    """Whether the linearised reward of a group of one depends on its reward. It does not for soft best-of-N."""

    def advantage(reward: float) -> Tensor:
        atom = [reward, 0.0] if objective.voted else reward
        return objective.advantage(torch.tensor([[atom]], dtype=torch.float64), "none")

    return not torch.equal(advantage(1.0), advantage(2.0))


def value_present(objective: Objective, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return `Objective.value` (P,) over the entries of each group that are not NaN; NaN if too few are left.

    With importance weights (P, M), `Objective.reweighted_value`.
    """

    def value(rewards: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None:
            return objective.value(rewards)
        return objective.reweighted_value(rewards, weights)

    absent = _absent(objective, rewards)
    if not absent.any():
        return value(rewards, weights)
    values = reference.widen(rewards).new_full(rewards.shape[:1], torch.nan)
    for rows, columns in _by_presence(absent, objective.fewest):
        some = None if weights is None else weights[rows, columns]
        values[rows[:, 0]] = value(_picked(objective, rewards, rows, columns), some)
    return values


def per_completion(objective: Objective, rewards: Tensor) -> Tensor:
    """Return one number per completion, (P, M), for tables: its reward, or its contribution to the group's diversity.

    The mean over a group is its mean reward, or its diversity. Missing entries are NaN.
    """
    if not isinstance(objective, Diversity):
        return rewards[..., 0] if objective.voted and rewards.ndim == 3 else rewards
    absent = _absent(objective, rewards)
    out = torch.full_like(rewards[..., 0], torch.nan)
    for rows, columns in _by_presence(absent, objective.order):
        out[rows, columns] = objective.contributions(_picked(objective, rewards, rows, columns))
    return out


class Form(NamedTuple):
    """Syntax of a name: "bon:4:unbiased" is the form "bon" with two arguments."""

    text: str
    """How it is written, as in "bon:N"."""
    make: Any
    """Class or function that takes the arguments."""
    arguments: tuple[type, ...] = ()
    """The type of each."""
    needed: int = 0
    """Number of arguments that have no default."""


def split_name(text: str, forms: Mapping[str, Form], what: str) -> tuple[str, list[str]]:
    """Split "bon:4:unbiased" into the name of its form, "bon", and its arguments, ["4", "unbiased"].

    ``what`` is named, in errors: "objective". Raises ValueError for a name without a form, suggesting the nearest one.
    """
    text = text.strip()
    name, *arguments = text.split(":")
    if name in forms:
        return name, arguments
    known = ", ".join(form.text for form in forms.values())
    near = nearest(name.lower(), forms, n=3)
    # names with swapped letters come first
    near.sort(key=lambda other: sorted(other) != sorted(name.lower()))
    hint = did_you_mean([forms[other].text for other in near[:1]])
    raise ValueError(f"{what} {text!r} is not known{hint} Expected one of {known}.")


def parse_name(text: str, forms: Mapping[str, Form], what: str) -> Any:
    """Make what ``text`` names: "bon:4:unbiased" -> make(4, "unbiased") of the form "bon".

    Raises ValueError as `split_name`, for a wrong number or type of arguments, and as the form's ``make``.
    """
    text = text.strip()
    name, given = split_name(text, forms, what)
    form = forms[name]
    if given and not form.arguments:
        raise ValueError(f"{what} {text!r} takes no argument; write {form.text!r}.")
    numbers = "a number" if form.needed == 1 else "numbers"
    expected = f"{what} {text!r}: expected {form.text!r} with {numbers}, got {':'.join(given)!r}."
    if not form.needed <= len(given) <= len(form.arguments):
        raise ValueError(expected)
    arguments = []
    for kind, argument in zip(form.arguments, given, strict=False):
        try:
            arguments.append(kind(argument))
        except ValueError:
            raise ValueError(expected) from None
    return form.make(*arguments)


FORMS = {
    "mean": Form("mean", Mean),
    "bon": Form("bon:N", BestOfN, (int, str), 1),
    "wor": Form("wor:N", WorstOfN, (int, str), 1),
    "bop": Form("bop:RATE", BestOfPoisson, (float,), 1),
    "cvar": Form("cvar:ALPHA", CVaR, (float,), 1),
    "soft": Form("soft:TAU", SoftBestOfN, (float,), 1),
    "erm": Form("erm:BETA", EntropicRisk, (float,), 1),
    "rao": Form("rao", RaoDiversity),
    "dpp": Form("dpp:N", DPPDiversity, (int, float), 1),
    "distortion": Form("distortion:F", Distortion),
    "maj": Form("maj:N", MajorityVote, (int, str), 1),
    "functional": Form("functional:FILE.py:R", Functional),
}


def is_pairwise(text: str) -> bool:
    """Whether the objective named ``text`` takes kernel matrices instead of rewards."""
    form = FORMS.get(text.strip().partition(":")[0])
    return form is not None and form.make.pairwise


def is_voted(text: str) -> bool:
    """Whether the objective named ``text`` takes the final answers besides the rewards."""
    form = FORMS.get(text.strip().partition(":")[0])
    return form is not None and form.make.voted


def parse(text: str, function: Callable[[str], Callable[..., Any]] | None = None) -> Objective:
    """Parse the name of an objective: "mean", "bon:4" -> BestOfN(4), "soft:0.1" -> SoftBestOfN(0.1).

    - "bon:N", "wor:N" and "maj:N" take an optional estimator, "bon:4:unbiased" -> BestOfN(4, "unbiased"); "dpp:N" takes
      an optional eps, "dpp:3:0.01".
    - "distortion:1,0.5,0" is a `Distortion` with a table. "distortion:file.py:f" calls ``function("file.py:f")`` to
      load f; without ``function`` only tables are allowed. "functional:file.py:R" is a `Functional`, loaded likewise.
    - A rank-based objective may end in ":kde" or ":kde:BANDWIDTH": "wor:4:kde" -> `Smoothed` (WorstOfN(4)).

    Raises ValueError for an unknown name, suggesting the nearest known one, and for invalid arguments.
    """
    text = text.strip()
    rank_based, smoothed, bandwidth = text.rpartition(":kde")
    if smoothed and (not bandwidth or bandwidth.startswith(":")):
        return _smoothed(text, parse(rank_based, function), bandwidth[1:])
    name, arguments = split_name(text, FORMS, "objective")
    if name == "functional":
        return _functional(text, ":".join(arguments), function)
    if name == "distortion":
        return _distortion(text, ":".join(arguments), function)
    objective: Objective = parse_name(text, FORMS, "objective")
    return objective


def _smoothed(text: str, objective: Objective, bandwidth: str) -> Objective:
    try:
        width = float(bandwidth) if bandwidth else "silverman"
    except ValueError:
        raise ValueError(f"objective {text!r}: expected ':kde' or ':kde:BANDWIDTH', got {bandwidth!r}.") from None
    return Smoothed(objective, width)  # type: ignore[arg-type]  # raises for objectives that are not rank-based


def _distortion_of(text: str, f: Callable[..., Any], named: str) -> Objective:
    try:
        return Distortion(f, named=named)
    except ValueError as error:
        raise ValueError(f"objective {text!r}: {error}") from error
    except Exception as error:  # f is user code
        raise ValueError(f"objective {text!r}: f raised {type(error).__name__}: {error}.") from error


def _distortion(text: str, rest: str, function: Callable[[str], Callable[..., Any]] | None) -> Objective:
    try:
        table = [float(number) for number in rest.split(",")]
    except ValueError:
        if ":" in rest and function is not None:
            return _distortion_of(text, function(rest), rest)
        raise ValueError(
            f"objective {text!r}: expected 'distortion:' and numbers separated by commas, f at equal steps of [0, 1]"
            + (", or a function as module:function or file.py:function." if function is not None else ".")
        ) from None
    return Distortion(table)


def _functional(text: str, rest: str, function: Callable[[str], Callable[..., Any]] | None) -> Objective:
    if ":" not in rest:
        raise ValueError(f"objective {text!r}: expected 'functional:file.py:R' or 'functional:package.module:R'.")
    if function is None:
        raise ValueError(f"objective {text!r} is a function of the user, which is not loaded here.")
    return Functional(function(rest), named=rest)


def _absent(objective: Objective, rewards: Tensor) -> Tensor:
    """Mask (P, M) of the missing samples."""
    if objective.pairwise and rewards.ndim == 3:
        return rewards.diagonal(dim1=-2, dim2=-1).isnan()
    if objective.voted and rewards.ndim == 3:
        return rewards[..., 0].isnan()
    return rewards.isnan()


def _picked(objective: Objective, rewards: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Select groups ``rows`` (p, 1) and samples ``columns`` (p, k) from rewards (P, M[, 2]) or kernels (P, M, M)."""
    if not objective.pairwise:
        return rewards[rows, columns]
    return rewards[rows[:, :, None], columns[:, :, None], columns[:, None, :]]


def _by_presence(absent: Tensor, fewest: int) -> list[tuple[Tensor, Tensor]]:
    """Group the rows by their number k >= ``fewest`` of present entries: row indices (p, 1), column indices (p, k)."""
    present_first = absent.to(torch.uint8).argsort(dim=-1, stable=True)
    counts = (~absent).sum(-1)
    parts = []
    for k in counts.unique().tolist():
        if k >= fewest:
            rows = (counts == k).nonzero()
            parts.append((rows, present_first[rows[:, 0], :k]))
    return parts
