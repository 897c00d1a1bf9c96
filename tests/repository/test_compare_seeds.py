"""scripts/compare_seeds.py on sweeps written by hand: paired differences, KLs, and sweeps that are refused."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import REPOSITORY
from scipy import stats

from nlgrpo.apps.sweep import state as sweep_state
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, write_evaluation

SEEDS = (3, 1, 2)


def samples(mean, seed):
    rewards = {
        name: mean + torch.randn(6, 4, generator=torch.Generator().manual_seed(seed + i), dtype=torch.float64)
        for i, name in enumerate("ab")
    }
    objectives, weights = dict.fromkeys("ab", "mean"), {"a": 0.25, "b": 0.75}
    return EvaluationSamples(rewards, torch.full((6, 4), 8), objectives, weights, 32, ["p"], [["c"] * 4])


def make_sweep(folder, means=(("mean", 0.0), ("bon:4", 1.0)), seeds=SEEDS):
    """A sweep of one run per setting and seed, with 20 steps that end at a KL per token of seed / 10."""
    points, found = [], {}
    for (objective, mean), seed in itertools.product(means, seeds):
        point = sweep_state.Point({"objective": objective, "train.seed": seed}, folder / f"{objective}-{seed}", "done")
        point.folder.mkdir(parents=True)
        (point.folder / "config.json").write_text("{}")
        rows = [{"step": i, "kl": seed / 10 * (i >= 18), "completions/mean_length": 8.0} for i in range(20)]
        (point.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found[objective, seed] = samples(mean, 10 * seed + int(mean))
        write_evaluation(point.folder, before=samples(0.0, 7), after=found[objective, seed])
        points.append(point)
    sweep_state.SweepState(folder, {"recipe": "x"}, points).write()
    return points, found


def compare(*arguments):
    command = [sys.executable, REPOSITORY / "scripts" / "compare_seeds.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def best_of_two(sampled):
    """Mean over prompts of the weighted best of all pairs of samples."""
    pairs = list(itertools.combinations(range(4), 2))
    best = {
        name: torch.stack([x[:, list(pair)].amax(1) for pair in pairs]).mean() for name, x in sampled.rewards.items()
    }
    return sum(sampled.weights[name] * float(value) for name, value in best.items())


def test_differences_are_paired_over_seeds(tmp_path):
    _, found = make_sweep(tmp_path / "sweep")
    done = compare(tmp_path / "sweep", "--ns", 2, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    ours, theirs = ([best_of_two(found[name, seed]) for seed in SEEDS] for name in ("bon:4", "mean"))
    line = next(line for line in done.stdout.splitlines() if line.startswith("objective = bon:4 over objective = mean"))
    interval = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    each = ", ".join(f"{gap:+.4f}" for gap in gaps)
    expected = f"{sum(gaps) / 3:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}] over seeds (seeds {each})"
    assert line.partition("best of 2: ")[2] == expected
    start = f"{best_of_two(samples(0.0, 7)):.4f}"
    assert f"before training: best of 2: {start} [{start}, {start}]" in done.stdout
    of_a = [best_of_two(replace(found["mean", seed], weights={"a": 1.0, "b": 0.0})) for seed in SEEDS]
    assert f"objective = mean: a, best of 2: {sum(of_a) / 3:.4f} [" in done.stdout
    assert "objective = mean: KL 1.600 nats per completion (seeds 2.40, 0.80, 1.60)" in done.stdout
    written = json.loads((tmp_path / "out" / "seeds.json").read_text())
    assert written["settings"]["objective = mean"]["values"] == [[pytest.approx(value)] for value in theirs]
    assert (tmp_path / "out" / "seeds.png").stat().st_size > 1000


def spoil_seed(points):
    del points[0].overrides["train.seed"]


def spoil_state(points):
    points[-1].state = "failed"


def spoil_setting(points):
    points[-1].overrides["train.seed"] = 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_seed, "has no train.seed"),
        (spoil_state, "is failed; run the sweep to its end"),
        (spoil_setting, "has other seeds than objective = mean"),
    ],
)
def test_sweeps_that_cannot_be_compared(tmp_path, spoil, message):
    points, _ = make_sweep(tmp_path)
    spoil(points)
    sweep_state.SweepState(tmp_path, {"recipe": "x"}, points).write()
    refused = compare(tmp_path)
    assert refused.returncode == 2
    assert message in refused.stderr.replace("\n", " ")


@pytest.mark.slow
def test_options_that_are_refused(tmp_path):
    make_sweep(tmp_path / "sweep")
    for arguments, message in (
        ([tmp_path / "sweep", "--ns", 8], "has 4 samples per prompt"),
        ([tmp_path / "sweep", "--ns", 0], "expected numbers >= 1"),
        ([tmp_path / "nothing"], "sweep.json"),
    ):
        refused = compare(*arguments)
        assert refused.returncode == 2
        assert message in refused.stderr.replace("\n", " "), refused.stderr
