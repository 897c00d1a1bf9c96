"""Figures of evaluation results show the values of their entries."""

import math

import numpy as np
import pytest

from nlgrpo.apps.report import evaluation_figures, figures
from nlgrpo.apps.report.configurations import Place
from nlgrpo.apps.report.evaluation_figures import Table
from nlgrpo.training.evaluation_entries import Entry
from nlgrpo.training.evaluation_summary import Estimate

MODELS = {"reference": 0.0, "x": 1.0, "y": 2.0}
LOOKS = {"reference": figures.Style(), "x": figures.series_style(0), "y": figures.series_style(1)}


def estimate(value, width=0.5):
    return Estimate(value, value - width, value + width)


def entries(quantities=("a", "b"), procedures=("mean", "bon:2", "bon:4"), kl=("kl/k1",)):
    for model, base in MODELS.items():
        for i, quantity in enumerate(quantities):
            for k, procedure in enumerate(procedures):
                won = estimate(0.5 + base / 10 + k / 100, 0.05) if base else None
                value = base + k + 10 * i if i % 2 == 0 else k - base
                yield Entry(model, quantity, procedure, estimate(value), won)
        for name in kl if base else ():
            yield Entry(model, name, "", estimate(3 * base))


def drawn(axes):
    """Points of the labelled lines, by label."""
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines if not line.get_label().startswith("_")}


def test_procedures_by_n():
    known = {"mean": ("bon", 1), "bon:1": ("bon", 1), "bon:4": ("bon", 4), "bon:4:unbiased": ("bon", 4)}
    known |= {"wor:8": ("wor", 8), "maj@2": ("maj@", 2), "soft:0.1": ("", 0), "bon:4:kde": ("", 0), "": ("", 0)}
    assert {text: evaluation_figures.kind_and_n(text) for text in known} == known


@pytest.mark.parametrize(
    ("of_x", "of_y", "expected"),
    [
        (["mean", "bon:2", "bon:16"], ["mean", "bon:2", "bon:16"], [1, 2]),  # nearest to 4
        (["mean", "bon:2", "bon:16"], ["mean", "bon:16"], [1, 16]),
        (["mean", "bon:2"], ["mean", "bon:16"], [1]),
        (["mean", "bon:2", "bon:4"], ["mean"], [1, 4]),  # of the models that have several
        (["mean"], ["mean"], [1]),
    ],
)
def test_numbers_of_candidates_that_all_models_have(of_x, of_y, expected):
    rows = [Entry("x", "a", procedure, estimate(0)) for procedure in of_x]
    rows += [Entry("y", "a", procedure, estimate(0)) for procedure in of_y]
    assert Table(rows).chosen_from() == expected


def test_rewards_over_n():
    table = Table(entries(procedures=("mean", "bon:2", "bon:4", "wor:4")))
    panels = evaluation_figures.best_of_n(table, LOOKS).axes
    assert [axes.get_title() for axes in panels] == ["a: best-of-N", "a: worst-of-N", "b: best-of-N", "b: worst-of-N"]
    assert drawn(panels[0])["x"] == [[1, 1], [2, 2], [4, 3]]
    assert drawn(panels[1])["y"] == [[1, 2], [4, 5]]
    assert [line.get_color() for line in panels[0].lines] == [LOOKS[name].colour for name in MODELS]
    band = panels[0].collections[1].get_datalim(panels[0].transData)
    assert (band.y0, band.y1) == pytest.approx((0.5, 3.5))
    panels = evaluation_figures.best_of_n(table, LOOKS, binary=["b"]).axes
    assert [axes.get_title() for axes in panels] == ["a: best-of-N", "a: worst-of-N", "b: pass@N", "b: worst-of-N"]


def test_gold_by_choice_of_a_proxy_comes_directly_after_the_proxy():
    rows = entries(quantities=("proxy", "other", "gold by choice of proxy"))
    titles = [axes.get_title() for axes in evaluation_figures.best_of_n(Table(rows), LOOKS).axes[:3]]
    assert titles == [f"{name}: best-of-N" for name in ("proxy", "gold by choice of proxy", "other")]


def test_nan_values_are_not_drawn():
    nothing = Estimate(math.nan, math.nan, math.nan)
    table = Table([Entry("x", "a", "mean", nothing), Entry("x", "a", "bon:2", nothing)])
    assert table.quantities() == []
    assert not evaluation_figures.has_win_rates(table)
    alone = Table([Entry("x", "a", name, Estimate(1.0, math.nan, math.nan)) for name in ("mean", "bon:2")])
    assert drawn(evaluation_figures.best_of_n(alone, LOOKS).axes[0]) == {"x": [[1, 1], [2, 1]]}


def test_win_rate_over_kl():
    places = {"x": Place("over beta", 0.2, "beta 0.2"), "y": Place("over beta", 0.1, "beta 0.1")}
    panels = evaluation_figures.win_rates(Table(entries(kl=("kl/k1", "kl/training"))), LOOKS, places).axes
    assert [axes.get_title() for axes in panels] == [
        f"{name}: {how}" for how in ("single completions", "best-of-4") for name in ("a", "b")
    ]
    assert drawn(panels[0])["over beta"] == [pytest.approx([6, 70]), pytest.approx([3, 60])]  # in the order of beta
    assert drawn(panels[2])["over beta"] == [pytest.approx([6, 72]), pytest.approx([3, 62])]
    assert [text.get_text() for text in panels[0].texts] == ["beta 0.2", "beta 0.1"]
    curve = np.array(drawn(panels[0])["best-of-N of the reference"])
    n = curve[:, 1] / (100 - curve[:, 1])  # N / (N + 1)
    assert curve[:, 0] == pytest.approx(np.log(n) - (n - 1) / n)
    assert "best-of-N of the reference" not in drawn(panels[2])


def test_win_rates_need_a_kl():
    assert not evaluation_figures.has_win_rates(Table(entries(kl=())))
    assert evaluation_figures.has_win_rates(Table(entries(kl=("kl/training",))))


def test_one_reward_over_another():
    rows = [e for e in entries() if e.model != "y" or e.quantity == "a"]
    rows += [Entry("y", "b", name, estimate(-3.0)) for name in ("mean", "bon:2", "bon:4")]
    table = Table([*rows, *(Entry(m, "b by choice of a", "mean", estimate(0)) for m in MODELS)])
    pairs = evaluation_figures.fronts_of(table, [])
    assert pairs == [("a", "b")]
    panels = evaluation_figures.fronts(table, pairs, LOOKS, {}).axes
    assert [axes.get_title() for axes in panels] == ["single completions", "best-of-4"]
    caps = [container.lines[0].get_xydata().tolist() for container in panels[1].containers]
    assert caps == [[[2, 2]], [[3, 1]], [[4, -3]]]


def test_diversity_has_the_same_value_for_every_n():
    rows = [*entries(quantities=("a",)), *(Entry(m, "diversity", "mean", estimate(v)) for m, v in MODELS.items())]
    (pair,) = evaluation_figures.fronts_of(Table(rows), [])
    panels = evaluation_figures.fronts(Table(rows), [pair], LOOKS, {}).axes
    assert [c.lines[0].get_xydata().tolist() for c in panels[1].containers] == [[[2, 0]], [[3, 1]], [[4, 2]]]


def test_points_below_another_point_in_both_rewards_are_hollow():
    at = {"low": (0, 0), "left": (0, 2), "right": (2, 0), "even": (2, 2)}
    found = {name: tuple(map(estimate, place)) for name, place in at.items()}
    assert evaluation_figures.beaten(found) == ["low"]
