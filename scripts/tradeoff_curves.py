"""Results of tradeoff.py: curves over KL, comparisons between methods, and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import brentq
from scipy.special import stdtrit
from torch import Tensor

from nlgrpo.calibration import ecdf
from nlgrpo.calibration.alignment import at_kl
from nlgrpo.config.schema import Config
from nlgrpo.engine.rollouts.inputs import load_prompts
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.evaluation import figures
from nlgrpo.evaluation.estimators import bootstrap, selected_value, win_rate
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


def label(method: str) -> str:
    by, _, transform = method.rpartition("/")
    if by == "ppo":
        return f"PPO on {label(transform)}"
    return LABELS.get(method, method.upper() if method in ("grpo", "ppo", "dpo", "ipo", "bond") else method)


def scale_of(quantity: str) -> float:
    return 1 if quantity == "reward" or quantity in GOLD else 100


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

    ``gold`` (P, K): the gold rewards of the same samples.
    """

    rewards: Tensor
    gold: Tensor | None = None

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
    _, prompts = load_prompts(config, load_tokenizer(source), shape_of(read_config(source)))
    rows = [rollouts.row(ids) for ids in prompts.take(0, min(config.evaluation.prompts, len(prompts))).ids]
    if None in rows:
        raise ValueError("the evaluation has prompts that are not in data.source; leave data.evaluation empty")
    rewards, order = rollouts.rewards[name][rows].sort(1)
    return Reference(rewards, None if gold is None else rollouts.rewards[gold][rows].gather(1, order))


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
        reach = float(stdtrit(len(means) - 1, 0.975)) * np.std(means, ddof=1) / len(means) ** 0.5
        text += f", [{mean - reach:+.2f}, {mean + reach:+.2f}] over seeds"
    return f"{text} (seeds {each})"


def undominated(where: Sequence[tuple[float, float]]) -> list[bool]:
    """For each point (KL, value): whether no other point has both a lower KL and a higher value."""
    return [not any(k < kl and v > value for k, v in where) for kl, value in where]


def optimum(quantity: str, furthest: float) -> tuple[Tensor, Tensor] | None:
    """KLs, and the best win rate of any policy at each, for rewards without ties (InfAlign, Theorem 3, Cor. 2)."""
    known = {f"best{n}": (f"bon_fp:{n}", n) for n in BEST_OF} | {"worst": (f"won_fp:{WORST_OF}", WORST_OF)}
    if quantity not in known or furthest < 0.1:
        return None
    transform, n = known[quantity]
    curve = at_kl(transform, np.geomspace(0.02, min(furthest, 20.0), 24).tolist(), n)
    return curve.kl, curve.won_win_rate if quantity == "worst" else curve.bon_win_rate


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_curves(found: Mapping[str, Sequence[Curve]], reference: Reference, quantities: Sequence[str]) -> Figure:
    """Curves through the means over seeds, with intervals over prompts (InfAlign, Fig. 4)."""
    figure, every = _panels(quantities, max(float(curve.kl[-1]) for own in found.values() for curve in own), reference)
    for axes, quantity in zip(every, quantities, strict=True):
        for i, (method, seeds) in enumerate(found.items()):
            kl = torch.stack([curve.kl for curve in seeds]).mean(0)
            values = torch.stack([curve.values[quantity] for curve in seeds]).mean(0)
            mean, low, high = (scale_of(quantity) * x.numpy() for x in bootstrap(values))
            look, reach = figures.series_style(i), np.stack([mean - low, high - mean]).clip(min=0)
            axes.errorbar(kl, mean, reach, **look.line, marker=look.marker, capsize=2, label=label(method))
    figures.legend(figure, every)
    return figure


def draw_points(measured: Measured, reference: Reference, quantities: Sequence[str]) -> Figure:
    """One point per run; pale points are dominated by another run of their method (vBoN, Fig. 2)."""
    figure, every = _panels(quantities, max(float(each["kl"].mean()) for each in measured.values()), reference)
    for axes, quantity in zip(every, quantities, strict=True):
        for i, method in enumerate(dict.fromkeys(method for method, _, _ in measured)):
            look = figures.series_style(i)
            own = _points({run: x for run, x in measured.items() if run[0] == method}, quantity)
            for (x, y), best in zip(own, undominated(own), strict=True):
                axes.plot(x, y, look.marker, color=look.colour, alpha=1.0 if best else 0.3, linewidth=0)
            axes.plot([], [], look.marker, color=look.colour, linewidth=0, label=label(method))
    figures.legend(figure, every)
    return figure


def _points(measured: Measured, quantity: str) -> list[tuple[float, float]]:
    scale = scale_of(quantity)
    return [(float(each["kl"].mean()), scale * float(each[quantity].mean())) for each in measured.values()]


def _panels(quantities: Sequence[str], furthest: float, reference: Reference) -> tuple[Figure, list[Axes]]:
    """Panels with the curves of best-of-N of the reference and of the best policy."""
    figure = figures.figure_of((5.2 * len(quantities), 5.2))
    every = list(figure.subplots(1, len(quantities), squeeze=False)[0])
    bon = [reference.best_of(float(n)) for n in np.geomspace(1, reference.rewards.shape[1], 60)]
    near = [each for each in bon if float(each["kl"].mean()) <= 1.05 * max(furthest, 0.1)]
    for axes, quantity in zip(every, quantities, strict=True):
        xs, ys = ([float(each[key].mean()) for each in near] for key in ("kl", quantity))
        axes.plot(xs, [scale_of(quantity) * y for y in ys], color=figures.GREY, linestyle="--", label=BON)
        best = optimum(quantity, furthest)
        if best is not None:
            axes.plot(best[0], 100 * best[1], color=figures.GREY, linestyle=":", label="best possible policy")
        axes.set_title(ALL[quantity])
        axes.set_xlabel("KL to the reference (nats)")
        axes.set_xscale("function", functions=(lambda kl: np.sqrt(np.maximum(kl, 0)), np.square))  # `Curve.at`
        axes.set_xlim(0, 1.08 * max(furthest, 0.1))
    return figure, every


# --- findings ---------------------------------------------------------------------------------------------------------


def findings(found: Mapping[str, Sequence[Curve]], reference: Reference, measured: Measured) -> list[str]:
    """The papers' claims as differences between two methods, and the shares of methods on the fronts."""
    claims = [("single", "identity", "grpo"), ("worst", "exp:-10", "identity")]
    for quantity in (f"best{n}" for n in BEST_OF):
        claims += [(quantity, one, "identity") for one in ("exp:10", "bon_fp", "rank")] + [(quantity, "bon", "grpo")]
    claims += [("best4", "ppo/exp:10", "ppo/identity"), ("best4", "ppo/bon_fp", "ppo/identity")]
    claims += [("single", "vbon", other) for other in found if other not in ("vbon", "exp:-10")]
    claims += [("single", "ppo/vbon", "ppo"), ("single", "ppo/vbon", "ppo/vbon:bound"), ("single", "dpo/all", "dpo")]
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
        best = undominated(_points(measured, quantity))
        on = [method for (method, _, _), chosen in zip(measured, best, strict=True) if chosen]
        shares = ", ".join(f"{label(m)} {100 * on.count(m) / len(on):.0f}%" for m in found if m in on)
        lines.append(f"{ALL[quantity]}: shares of the {len(on)} points on the front: {shares}")
    return lines


def means(measured: Measured, reference: Reference) -> list[str]:
    """One line for best-of-N of the reference and one per method: means over seeds and prompts at each N."""
    ns = list(dict.fromkeys(n for _, n, _ in measured))
    rows: dict[str, list[list[Mapping[str, Tensor]]]] = {BON: [[reference.best_of(float(n))] for n in ns]}
    for method in dict.fromkeys(method for method, _, _ in measured):
        rows[label(method)] = [[x for (m, k, _), x in measured.items() if (m, k) == (method, n)] for n in ns]
    shown = [quantity for quantity in ALL if quantity in rows[BON][0][0]]
    lines = [f"N = {', '.join(map(str, ns))}: KL | {' | '.join(ALL[quantity] for quantity in shown)}"]
    for name, strengths in rows.items():
        columns = []
        for quantity in ("kl", *shown):
            scale = 1 if quantity == "kl" else scale_of(quantity)
            digits = 2 if quantity == "kl" else 1 if scale == 100 else 3
            values = [scale * sum(float(x[quantity].mean()) for x in each) / len(each) for each in strengths]
            columns.append(", ".join(f"{value:.{digits}f}" for value in values))
        lines.append(f"{name}: {' | '.join(columns)}")
    return lines


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
