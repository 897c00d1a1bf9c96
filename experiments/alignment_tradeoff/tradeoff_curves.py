"""Results of tradeoff.py: curves over KL and comparisons between methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import stdtrit
from torch import Tensor

from nlgrpo.calibration import ecdf
from nlgrpo.config.schema import Config
from nlgrpo.data.conversations import plain_text
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.engine.rollouts.inputs import read_prompts
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.estimators import bootstrap, selected_value, win_rate
from nlgrpo.model import hf_weights
from nlgrpo.model.architectures import shape_of
from nlgrpo.model.decoder import read_config
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.objectives.registry import BestOfN

LABELS = {
    "vbon": "vBoN, Eq. 5",
    "vbon:bound": "vBoN, Eq. 8",
    "bon_sft": "BoN-SFT",
    "bon": "bon:N on the reward",
    "rank": "bon:N on u^N",
    "dpo/all": "DPO, all pairs",
    "bonbon": "BoNBoN",
}
BON = "best-of-N of the reference"
BEST_OF = (2, 4, 8)
WORST_OF = 4
TITLES = {
    "single": "One completion: win rate (%)",
    **{f"best{n}": f"Best of {n} each: win rate (%)" for n in BEST_OF},
    "worst": f"Worst of {WORST_OF} each: win rate (%)",
    "reward": "Mean reward",
}
GOLD = {  # with a reward that evaluates and does not choose
    "gold": "Gold reward, one completion",
    **{f"gold_best{n}": f"Gold reward of the best of {n}" for n in BEST_OF},
}
ALL = TITLES | GOLD
Run = tuple[str, int, int]  # method, N, seed
Measured = Mapping[Run, Mapping[str, Tensor]]
Row = dict[str, Any]


def label(method: str) -> str:
    by, _, transform = method.rpartition("/")
    if by == "ppo":
        return f"PPO on {label(transform)}"
    return LABELS.get(method, method.upper() if method in ("grpo", "ppo", "dpo", "ipo", "bond") else method)


def scale_of(quantity: str) -> float:
    return 1 if quantity in ("kl", "reward") or quantity in GOLD else 100


# --- curves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A method at S strengths: ``kl`` (S,), rising from 0 (the reference), and ``values[quantity]`` (S, P)."""

    kl: Tensor
    values: dict[str, Tensor]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Tensor]]) -> Curve:
        """Build a curve from every quantity and the KL, each (P,), at each strength."""
        rows = sorted(rows, key=lambda row: float(row["kl"].mean()))
        kl = torch.stack([row["kl"].mean() for row in rows])
        return cls(kl, {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "kl"})

    def at(self, quantity: str, kls: Tensor) -> Tensor:
        """Values (G, P) at each KL, by linear interpolation in sqrt(KL), in which win rates are linear near 0."""
        weights = np.stack([np.interp(kls.sqrt(), self.kl.clamp(min=0).sqrt(), unit) for unit in np.eye(len(self.kl))])
        return torch.from_numpy(weights).T @ self.values[quantity]


@dataclass(frozen=True)
class Reference:
    """Rewards of the reference (P, K) on the held-out prompts, from the rollouts, in ascending order.

    ``gold`` (P, K): the gold rewards of the same samples. ``prompts``: texts of the prompts.
    """

    rewards: Tensor
    gold: Tensor | None = None
    prompts: Sequence[str] = ()

    def check(self, model: EvaluationSamples) -> None:
        """Raise ValueError if a model was evaluated on other prompts, or in another order."""
        same = model.prompts == list(self.prompts[: len(model.prompts)])
        if not same or len(model.lengths) != len(self.rewards):
            raise ValueError(
                "the models and the reference were evaluated on different prompts, or in another order: train.seed "
                "shuffles them; evaluate with the seed of the configuration"
            )

    def measure(self, rewards: Tensor, kl: Tensor, gold: Tensor | None = None) -> dict[str, Tensor]:
        """Each quantity (P,) of a model whose completions have these rewards and KLs, (P, n)."""
        found = {
            "kl": kl.mean(1),
            "single": win_rate(rewards, self.rewards, 1),
            **{f"best{n}": win_rate(rewards, self.rewards, n) for n in BEST_OF},
            "worst": win_rate(rewards, self.rewards, WORST_OF, worst=True),
            "reward": rewards.mean(1),
        }
        if gold is not None:
            found["gold"] = gold.mean(1)
            found |= {f"gold_best{n}": selected_value(rewards, gold, BestOfN(n, "unbiased")) for n in BEST_OF}
        return found

    def best_of(self, n: float) -> dict[str, Tensor]:
        """The same quantities for best-of-n of the reference itself, n >= 1, not only integers: the CDF F^n.

        Samples with equal rewards keep their relative probabilities, so the KL is that of the rewards.
        """
        below, upto = (ecdf.cdf(self.rewards, self.rewards, side) for side in ("strict", "weak"))
        share = 1 / (upto - below) / self.rewards.shape[1]  # of a sample among those with its reward

        def won(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> Tensor:
            chance = (ours(upto) - ours(below)) * share
            return (chance * (theirs(below) + theirs(upto)) / 2).sum(1)

        def best(N: int) -> Tensor:
            return won(lambda F: F ** (n * N), lambda F: F**N)

        chance = (upto**n - below**n) * share
        found = {
            "kl": (chance * (chance * self.rewards.shape[1]).clamp(min=1e-300).log()).sum(1),
            "single": best(1),
            **{f"best{N}": best(N) for N in BEST_OF},
            "worst": won(lambda F: 1 - (1 - F**n) ** WORST_OF, lambda F: 1 - (1 - F) ** WORST_OF),
            "reward": (chance * self.rewards).sum(1),
        }
        if self.gold is not None:
            for name, N in (("gold", 1), *((f"gold_best{N}", N) for N in BEST_OF)):
                found[name] = ((upto ** (n * N) - below ** (n * N)) * share * self.gold).sum(1)
        return found

    def best_at(self, kl: float) -> dict[str, Tensor]:
        """Best-of-n of the reference for the n that has this KL."""
        most = float(self.rewards.shape[1])
        furthest = float(self.best_of(most)["kl"].mean())
        if kl >= furthest:
            return self.best_of(most)
        return self.best_of(brentq(lambda n: float(self.best_of(n)["kl"].mean()) - max(kl, 0.0), 1.0, most))


def held_out(config: Config, rollouts: ReferenceRollouts, name: str, gold: str | None = None) -> Reference:
    """Build the `Reference` of a run's evaluation prompts. Raises ValueError if a prompt has no rollouts."""
    source = hf_weights.locate(config.model.path)
    _, prompts = read_prompts(config, load_tokenizer(source), shape_of(read_config(source)))
    batch = prompts.take(0, min(config.evaluation.prompts, len(prompts)))
    rows = [rollouts.row(ids) for ids in batch.ids]
    if None in rows:
        raise ValueError("the evaluation has prompts that are not in data.source; leave data.evaluation empty")
    rewards, order = rollouts.rewards[name][rows].sort(1)
    texts = [plain_text(prompt) for prompt in batch.prompts]
    return Reference(rewards, None if gold is None else rollouts.rewards[gold][rows].gather(1, order), texts)


def curves(measured: Measured, start: Mapping[str, Tensor]) -> dict[str, list[Curve]]:
    """Return the curves of every method, one per seed, each starting at the reference (``start``)."""
    found: dict[str, list[Curve]] = {}
    for method, seed in dict.fromkeys((method, seed) for method, _, seed in measured):
        rows = [each for (m, _, s), each in measured.items() if (m, s) == (method, seed)]
        found.setdefault(method, []).append(Curve.of([start, *rows]))
    return found


def ahead(quantity: str, one: Sequence[Curve], other: Sequence[Curve], scale: float) -> str:
    """By how much ``one`` is higher, averaged over the KLs that all seeds of both methods cover."""
    every = [*one, *other]
    low, high = max(float(curve.kl[1]) for curve in every), min(float(curve.kl[-1]) for curve in every)
    if not 0 < low < high:
        return f"have no KLs in common (from {low:.2f}, to {high:.2f})"
    kls = torch.linspace(low**0.5, high**0.5, 101, dtype=torch.float64).square()
    seeds = [(a.at(quantity, kls) - b.at(quantity, kls)).mean(0) for a, b in zip(one, other, strict=True)]
    return f"{_difference(seeds, scale)}, over KL {low:.2f} to {high:.2f}"


def behind(quantity: str, one: Sequence[Curve], reference: Reference, scale: float) -> str:
    """By how much best-of-N of the reference is higher at the KL of each run, averaged over the runs."""
    seeds = []
    for curve in one:
        gaps = [
            reference.best_at(float(kl))[quantity] - v
            for kl, v in zip(curve.kl[1:], curve.values[quantity][1:], strict=True)
        ]
        seeds.append(torch.stack(gaps).mean(0))
    return _difference(seeds, scale)


def _difference(seeds: Sequence[Tensor], scale: float) -> str:
    """Format the mean over seeds of differences (P,), with 95% intervals over prompts and seeds, and the means."""
    mean, low, high = (scale * x for x in bootstrap(torch.stack(list(seeds)).mean(0)))
    means = [scale * float(seed.mean()) for seed in seeds]
    each = ", ".join(f"{one:+.2f}" for one in means)
    text = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}] over prompts"
    if len(means) > 1:
        reach = reach_over_seeds(means)
        text += f", [{mean - reach:+.2f}, {mean + reach:+.2f}] over seeds"
    return f"{text} (seeds {each})"


def reach_over_seeds(means: Sequence[float]) -> float:
    """Half the width of the 95% interval of the mean, by Student's t; NaN for one number."""
    count = len(means)
    return float(stdtrit(count - 1, 0.975) * np.std(means, ddof=1) / count**0.5) if count > 1 else math.nan


def points(measured: Measured, quantity: str) -> list[tuple[float, float]]:
    """KL and mean of a quantity of each run."""
    scale = scale_of(quantity)
    return [(float(each["kl"].mean()), scale * float(each[quantity].mean())) for each in measured.values()]


def undominated(where: Sequence[tuple[float, float]]) -> list[bool]:
    """For each point (KL, value): whether no other point has both a lower KL and a higher value."""
    return [not any(k < kl and v > value for k, v in where) for kl, value in where]


# --- findings ---------------------------------------------------------------------------------------------------------


def findings(found: Mapping[str, Sequence[Curve]], reference: Reference, measured: Measured) -> list[str]:
    """The papers' claims as differences between two methods, and the shares of methods on the fronts."""
    claims = [("single", "identity", "grpo"), ("worst", "exp:-10", "identity")]
    for quantity in (f"best{n}" for n in BEST_OF):
        claims += [(quantity, one, "identity") for one in ("exp:10", "bon_fp", "rank")] + [(quantity, "bon", "grpo")]
    claims += [("best4", "ppo/exp:10", "ppo/identity"), ("best4", "ppo/bon_fp", "ppo/identity")]
    claims += [("single", "vbon", other) for other in found if other not in ("vbon", "exp:-10")]
    claims += [("single", "ppo/vbon", other) for other in ("ppo", "grpo", "ppo/identity", "ppo/vbon:bound")]
    claims += [("single", "dpo/all", "dpo")]
    if reference.gold is not None:
        claims += [
            ("gold_best4", one, other) for one, other in (("bon", "grpo"), ("exp:10", "identity"), ("ppo", "grpo"))
        ]
    lines = []
    for quantity, one, other in claims:
        if {one, other} <= set(found):
            gain = ahead(quantity, found[one], found[other], scale_of(quantity))
            lines.append(f"{ALL[quantity]}: {label(one)} over {label(other)}: {gain}")
    for quantity in ("single", "reward"):
        for method, own in found.items():
            gap = behind(quantity, own, reference, scale_of(quantity))
            lines.append(f"{ALL[quantity]}: {BON} over {label(method)}, at the same KLs: {gap}")
    for quantity in ("single", "reward"):
        best = undominated(points(measured, quantity))
        on = [method for (method, _, _), chosen in zip(measured, best, strict=True) if chosen]
        shares = ", ".join(f"{label(m)} {100 * on.count(m) / len(on):.0f}%" for m in found if m in on)
        lines.append(f"{ALL[quantity]}: shares of the {len(on)} points on the front: {shares}")
    return lines


def means(measured: Measured, reference: Reference) -> list[str]:
    """Markdown table with a row for best-of-N of the reference and for each method: means at each N, over seeds."""
    ns = list(dict.fromkeys(n for _, n, _ in measured))
    rows: dict[str, list[list[Mapping[str, Tensor]]]] = {BON: [[reference.best_of(float(n))] for n in ns]}
    for method in dict.fromkeys(method for method, _, _ in measured):
        rows[label(method)] = [[x for (m, k, _), x in measured.items() if (m, k) == (method, n)] for n in ns]
    shown = ["kl", *(quantity for quantity in ALL if quantity in rows[BON][0][0])]
    lines = _header([f"N = {', '.join(map(str, ns))}", *(ALL.get(quantity, "KL") for quantity in shown)])
    for name, strengths in rows.items():
        averages = {q: [sum(float(x[q].mean()) for x in each) / len(each) for each in strengths] for q in shown}
        cells = [", ".join(_number(quantity, value) for value in values) for quantity, values in averages.items()]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return lines


def at_equal_kls(found: Mapping[str, Sequence[Curve]], reference: Reference, kls: Sequence[float]) -> list[Row]:
    """Every quantity of every method at each KL: mean over seeds and half the width of its 95% interval.

    Values are interpolated (`Curve.at`). A method has no row at a KL that some seed does not reach. ``reach`` is None
    for best-of-N of the reference, and with one seed.
    """
    rows: list[Row] = []
    for kl in kls:
        best, at = reference.best_at(kl), torch.tensor([kl], dtype=torch.float64)
        for quantity in (q for q in best if q != "kl"):
            row: Row = {"quantity": quantity, "kl": kl}
            rows.append(row | {"method": BON, "mean": float(best[quantity].mean()), "reach": None})
            for method, seeds in found.items():
                if all(float(curve.kl[-1]) >= kl for curve in seeds):
                    means = [float(curve.at(quantity, at).mean()) for curve in seeds]
                    reach = reach_over_seeds(means) if len(means) > 1 else None
                    rows.append(row | {"method": method, "mean": float(np.mean(means)), "reach": reach})
    return rows


def equal_kl_tables(rows: Sequence[Row]) -> list[str]:
    """One Markdown table per KL: a row for each method that reaches it, a column for each quantity."""
    methods, kls, known = (list(dict.fromkeys(row[key] for row in rows)) for key in ("method", "kl", "quantity"))
    cells = {(row["method"], row["quantity"], row["kl"]): _cell(row) for row in rows}
    shown = [quantity for quantity in ALL if quantity in known]
    lines = []
    for kl in kls:
        there = [method for method in methods if (method, shown[0], kl) in cells]
        lines += ["", *_header([f"at KL {kl:.3f} (95% over seeds)", *(ALL[quantity] for quantity in shown)])]
        lines += [f"| {' | '.join([label(m), *(cells[m, quantity, kl] for quantity in shown)])} |" for m in there]
        absent = ", ".join(label(method) for method in methods if method not in there)
        lines += ["", f"Not all seeds reach this KL: {absent}."] if absent else []
    return lines


def _header(titles: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def _number(quantity: str, value: float) -> str:
    scale = scale_of(quantity)
    return f"{scale * value:.{2 if quantity == 'kl' else 1 if scale == 100 else 3}f}"


def _cell(row: Row) -> str:
    text, reach = _number(row["quantity"], row["mean"]), row["reach"]
    return text if reach is None else f"{text} ±{_number(row['quantity'], reach)}"


def table(measured: Measured) -> list[dict[str, object]]:
    """One row per run: means over prompts with intervals."""
    rows = []
    for (method, n, seed), each in measured.items():
        estimates = {quantity: _numbers(bootstrap(values)) for quantity, values in each.items()}
        rows.append({"method": method, "n": n, "seed": seed} | estimates)
    return rows


def _numbers(estimate: Sequence[Tensor]) -> list[float | None]:
    """Mean, low and high; None without an interval (one prompt)."""
    return [None if x.isnan() else x.item() for x in estimate]
