"""Logged metrics as columns, the panels in which they are drawn, and the charts of a page."""

import json
import math
import statistics

import numpy as np
import pytest

from nlgrpo.apps.report import charts, figures, logged, run_warnings
from nlgrpo.apps.report.logged import Logged, panels_of_run, panels_of_runs


def columns(run):
    return {name: values.tolist() for name, values in run.metrics.items()}


def test_rows_become_columns_and_other_values_are_missing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 2, "kl": 0.5, "note": "text", "flag": true, "loss": null}\n'
        '{"step": 1, "kl": NaN, "loss": 1, "big": 1e999}\n'
        f'{{"step": 3, "kl": 1e308, "huge": {10**400}}}\n'
        '{"step": 2, "kl": 0.25}\n'
        '{"step": "4", "kl": 1.0}\n'
        '{"step": 5, "k'
    )
    run = Logged.read(path)
    assert run.steps.tolist() == [1, 2, 3]
    assert {name: [None if math.isnan(x) else x for x in xs] for name, xs in columns(run).items()} == {
        "loss": [1, None, None],
        "kl": [None, 0.25, None],
    }
    assert [part.tolist() for part in run.points("kl")] == [[2], [0.25]]
    assert [part.tolist() for part in run.points("absent")] == [[], []]
    assert len(Logged.read(tmp_path / "absent")) == 0


def test_the_last_tenth_of_the_steps():
    run = Logged.of([{"step": i, "a": float(i), **({"b": 1.0} if i < 50 else {})} for i in range(100)])
    assert run.last("a") == statistics.mean(range(90, 100))
    assert math.isnan(run.last("b"))
    assert math.isnan(run.last("absent"))
    assert Logged.of([{"step": 0, "a": 3.0}]).last("a") == 3


def test_means_over_runs_are_of_the_steps_and_metrics_that_all_have():
    a = Logged.of([{"step": i, "x": float(i), "only": 1.0} for i in range(4)])
    b = Logged.of([{"step": i, "x": 10.0 + i} for i in (0, 2, 3, 9)])
    mean = logged.mean_over_runs([a, b])
    assert mean.steps.tolist() == [0, 2, 3]
    assert columns(mean) == {"x": [5, 7, 8]}


def test_metrics_that_runs_never_share_and_runs_without_steps_leave_no_empty_curve():
    even = Logged.of([{"step": i, "kl": 1.0, **({"rare": 1.0} if i % 2 == 0 else {})} for i in range(6)])
    odd = Logged.of([{"step": i, "kl": 3.0, **({"rare": 1.0} if i % 2 else {})} for i in range(6)])
    assert columns(logged.mean_over_runs([even, odd])) == {"kl": [2.0] * 6}
    assert columns(logged.mean_over_runs([even, Logged()]))["kl"] == [1.0] * 6
    assert len(logged.mean_over_runs([Logged(), Logged()])) == 0


def test_steps_that_no_script_can_count_are_left_out():
    run = Logged.of([{"step": step, "kl": 1.0} for step in (-1, 0, 10**30, 2**53, 2**53 + 1)])
    assert run.steps.tolist() == [0, 2**53]


def test_moving_averages_are_means_of_a_window_that_is_cut_at_the_ends():
    values = np.random.default_rng(0).normal(size=100)  # windows of 5
    average = logged.moving_average(values)
    expected = [values[max(0, i - 2) : i + 3].mean() for i in range(100)]
    assert average == pytest.approx(expected)
    few = values[:39]
    assert logged.moving_average(few) is few


def test_fewer_points_keep_the_spikes_and_both_ends():
    values = np.zeros(100_000)
    values[[12_345, 54_321]] = 7.0, -3.0
    kept = logged.extremes(values, 400)
    assert len(kept) <= 400
    assert {12_345, 54_321} <= set(kept.tolist())
    assert logged.extremes(values[:400], 400).tolist() == list(range(400))
    assert logged.evenly(10, 4).tolist() == [0, 3, 6, 9]


# --- panels -----------------------------------------------------------------------------------------------------------

STEP = {
    "rewards/short/mean": 1.0, "rewards/short/std": 0.5, "rewards/long/mean": 2.0, "objective/short": 3.0,
    "objective/long": 4.0, "objective/aggregate": 7.0, "kl": 0.1, "entropy": 1.0, "grad_norm": 2.0,
    "completions/clipped_ratio": 0.0, "time/generate": 1.0, "time/update": 2.0, "learning_rate": 0.1, "beta": 0.5,
    "my own metric": 1.0,
}  # fmt: skip


def run_of(**changes):
    return Logged.of([{"step": step, **STEP, **changes} for step in range(3)])


def shown(panels):
    return {panel.title: [series.label for series in panel.series] for panel in panels}


def test_metrics_of_one_quantity_share_a_panel():
    panels = panels_of_run("run", run_of(), {"short": "bon:4", "long": "mean"})
    assert shown(panels) == {
        "Mean reward": ["short", "long"],
        "Objective (batch estimate)": ["short: bon:4", "long: mean", "aggregate"],
        "KL to the reference": ["kl"],
        "Completions without an end": ["clipped_ratio"],
        "Entropy": ["entropy"],
        "Gradient norm": ["grad_norm"],
        "Time per step": ["generate", "update"],
        "Standard deviation of rewards": ["short"],
        "my own metric": ["my own metric"],
    }
    assert [panel.title for panel in panels if not panel.important] == [
        "Standard deviation of rewards",
        "my own metric",
    ]


def test_the_sum_over_one_reward_is_left_out():
    names = ("objective/long", "rewards/long/mean")
    one = Logged.of([{"step": 0, **{name: x for name, x in STEP.items() if name not in names}}])
    assert shown(panels_of_run("run", one, {"short": "bon:4"}))["Objective (batch estimate)"] == ["short: bon:4"]


def test_beta_and_the_learning_rate_are_shown_if_they_change():
    rows = [{"step": step, "beta": 0.1 * step, "learning_rate": 1.0 - step} for step in range(2)]
    assert list(shown(panels_of_run("run", Logged.of(rows), {}))) == ["KL weight", "Learning rate"]


def test_values_of_different_objectives_are_in_different_panels():
    """Best-of-4 of one run and the mean of another have no axis in common."""
    runs = {"a": run_of(), "b": run_of(), "c": run_of()}
    objectives = {
        "a": {"short": "bon:4", "long": "bon:4"},
        "b": {"short": "mean", "long": "mean"},
        "c": {"short": "bon:4", "long": "bon:4"},
    }
    found = shown(panels_of_runs(runs, objectives))
    assert found["Objective (batch estimate) bon:4"] == ["a", "c"]
    assert found["Objective (batch estimate) mean"] == ["b"]
    assert found["Objective (batch estimate): short bon:4"] == ["a", "c"]
    assert found["Mean reward: short"] == ["a", "b", "c"]
    mixed = panels_of_runs({"a": run_of()}, {"a": {"short": "bon:4", "long": "mean"}})
    assert "Objective (batch estimate) short bon:4, long mean" in shown(mixed)


# --- charts -----------------------------------------------------------------------------------------------------------


def test_a_chart_has_the_logged_values_and_their_average():
    rows = [{"step": 3 * i, "kl": math.sin(i), **({"rewards/a/mean": float(i)} if i % 2 else {})} for i in range(100)]
    run = Logged.of(rows)
    by_title = {chart["title"]: chart for chart in charts.charts(panels_of_run("run", run, {}), {}, [])["panels"]}
    kl = by_title["KL to the reference"]
    assert kl["x"] == [3 * i for i in range(100)]
    (curve,) = kl["series"]
    assert curve["values"] == pytest.approx([math.sin(i) for i in range(100)], rel=1e-5)
    assert curve["average"] == pytest.approx(logged.moving_average(run.metrics["kl"]), rel=1e-5)
    (reward,) = by_title["Mean reward"]["series"]
    assert by_title["Mean reward"]["x"] == [3 * i for i in range(1, 100, 2)]
    assert reward["values"] == [float(i) for i in range(1, 100, 2)]


def test_curves_with_other_steps_are_filled_with_none():
    runs = {
        "a": Logged.of([{"step": i, "kl": 1.0} for i in (0, 2)]),
        "b": Logged.of([{"step": i, "kl": 2.0} for i in (1, 2)]),
    }
    looks = {name: figures.series_style(i) for i, name in enumerate(runs)}
    found = charts.charts(panels_of_runs(runs, {}), looks, [])
    (chart,) = found["panels"]
    assert found["legend"] == [{"label": name, "colour": look.colour} for name, look in looks.items()]
    assert chart["x"] == [0, 1, 2]
    assert [curve["values"] for curve in chart["series"]] == [[1.0, None, 1.0], [None, 2.0, 2.0]]
    assert [curve["colour"] for curve in chart["series"]] == [look.colour for look in looks.values()]


def test_charts_of_long_and_of_many_runs_stay_small():
    values = [0.0] * 50_000
    values[12_345] = 7.0
    long = Logged.of([{"step": i, "kl": x} for i, x in enumerate(values)])
    (chart,) = charts.charts(panels_of_run("run", long, {}), {}, [])["panels"]
    assert len(chart["x"]) <= charts.POINTS
    assert 7.0 in chart["series"][0]["values"]
    many = Logged.of([{"step": i, "kl": math.sin(i / 50)} for i in range(5000)])
    runs = {str(i): many for i in range(50)}
    looks = {name: figures.series_style(i) for i, name in enumerate(runs)}
    drawn = charts.charts(panels_of_runs(runs, {}), looks, [])["panels"]
    assert sum(len(curve["values"]) for curve in drawn[0]["series"]) <= charts.POINTS_IN_ALL
    assert len(json.dumps(drawn)) < 200_000
    axes = figures.curves(panels_of_runs(runs, {}), looks).axes
    assert sum(len(line.get_xdata()) for line in axes[0].lines) <= figures.POINTS_IN_ALL


def test_the_picture_of_the_curves_has_the_values_and_their_average():
    few = [{"step": 3 * i, "kl": float(i), "rewards/a/b/mean": None} for i in range(5)]
    (panel,) = panels_of_run("run", Logged.of(few), {})  # the reward was never logged
    axes = figures.curves([panel], {}).axes[0]
    assert axes.lines[0].get_xydata().tolist() == [[3.0 * i, i] for i in range(5)]
    constant = Logged.of([{"step": i, "kl": 2.0} for i in range(100)])
    faint, average = figures.curves(panels_of_run("run", constant, {}), {}).axes[0].lines
    assert len(faint.get_xdata()) == 100
    assert average.get_ydata() == pytest.approx(np.full(100, 2.0))  # also at its ends


def test_a_reward_has_one_colour_in_all_panels():
    panels = panels_of_run("run", run_of(), {"short": "bon:4", "long": "mean"})
    drawn = {chart["title"]: chart["series"] for chart in charts.charts(panels, {}, ["short", "long"])["panels"]}
    rewards = [curve["colour"] for curve in drawn["Mean reward"]]
    assert [curve["colour"] for curve in drawn["Objective (batch estimate)"]][:2] == rewards
    assert len(set(rewards)) == 2


# --- warnings ---------------------------------------------------------------------------------------------------------

BON = {"rewards": {"r": {"objective": "bon:16"}}, "rollout": {"max_new_tokens": 200}}


@pytest.mark.parametrize(
    ("metrics", "config", "kl", "expected"),
    [
        ({"completions/clipped_ratio": 0.97}, BON, math.nan, "97% of the completions have no end: they were cut at"),
        ({"completions/clipped_ratio": 0.4}, BON, math.nan, None),
        ({}, BON, 30.0, "The policy is 30 nats from the reference; best-of-16 of the reference is at most 1.8 nats"),
        ({}, BON, 3.0, None),
        ({}, {"rewards": {"r": {"objective": "mean"}}}, 30.0, None),
        ({"advantage/frac_zero_std": 0.75}, {}, math.nan, "75% of the groups have no gradient"),
        ({"clip_ratio/region_mean": 0.5}, {}, math.nan, "50% of the tokens are clipped"),
        ({"kl": 0.1, "entropy": 1.0, "grad_norm": 1.0}, {}, math.nan, None),
    ],
)  # fmt: skip
def test_warnings_are_sentences_with_numbers(metrics, config, kl, expected):
    run = Logged.of([{"step": i, **metrics} for i in range(50)])
    found = list(run_warnings.warnings_of(run, config, kl))
    if expected is None:
        assert found == []
    else:
        assert [text[: len(expected)] for text in found] == [expected]


def test_a_collapse_and_infinite_gradients_are_named():
    rows = [
        {"step": i, "entropy": 2.0 if i < 10 else 0.05, "grad_norm": None if i in (3, 5) else 1.0} for i in range(40)
    ]
    entropy, gradient = run_warnings.warnings_of(Logged.of(rows), {}, math.nan)
    assert entropy.startswith("The entropy fell from 2 to 0.05 nats per token")
    assert gradient == "The gradient norm was not finite in 2 steps."
    never = Logged.of([{"step": i, "kl": 0.1, "grad_norm": None} for i in range(10)])
    assert list(run_warnings.warnings_of(never, {}, math.nan)) == ["The gradient norm was not finite in 10 steps."]
    sparse = Logged.of([{"step": i, **({"grad_norm": 1.0} if i % 2 else {})} for i in range(10)])
    assert list(run_warnings.warnings_of(sparse, {}, math.nan)) == []


def test_nothing_is_said_of_a_run_without_steps():
    assert list(run_warnings.warnings_of(Logged(), {"rewards": ["damaged"], "rollout": 3}, math.nan)) == []
