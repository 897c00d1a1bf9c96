"""Completions without a reward count nowhere in training; steps without any are counted, and end a run."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from support.helpers import fork_ranks, training_folder
from support.runs import arguments

from nlgrpo import train
from nlgrpo.config.schema import RewardConfig
from nlgrpo.engine.generation import Rollout
from nlgrpo.objectives.advantages import advantages
from nlgrpo.objectives.aggregation import SmoothMin, WeightedSum, sum_of_applicable
from nlgrpo.objectives.registry import parse
from nlgrpo.rewards.reward_functions import Scores
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.global_batch import GlobalBatch
from nlgrpo.training.reference_rewards import CalibratedReward
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

NAN = math.nan
REWARDS = '''
import hashlib
from pathlib import Path

MODE = Path(__file__).with_name("mode")


def number(completion):
    return int(hashlib.sha256(completion.encode()).hexdigest()[:6], 16) / 2**24


def up(completions, **_):
    return [number(c) for c in completions]


def against(completions, **_):
    return [-number(c) for c in completions]


def moody(completions, **_):
    """None, or an error, as long as the file says so."""
    mode = MODE.read_text()
    if mode == "fails":
        raise ConnectionError("the judge is down")
    return [None if mode == "abstains" else number(c) for c in completions]


def few(completions, **_):
    """A reward for the first completion of each group of four."""
    return [number(c) if i % 4 == 0 else None for i, c in enumerate(completions)]
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = training_folder(tmp_path_factory.mktemp("abstentions"), REWARDS)
    (root / "mode").write_text("")
    return root


def groups_of(rewards, dropped=None, nans=(), calibrated=None):
    """The global batch of rewards {name: (P, M)}."""
    values = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in rewards.items()}
    P, M = next(iter(values.values())).shape
    ones = torch.ones(P, M, dtype=torch.int64)
    rollout = Rollout([[1]] * P, ones[..., None], ones[..., None].float(), ones, ones.bool())
    skipped = torch.zeros(P, dtype=torch.bool) if dropped is None else torch.tensor(dropped)
    scores = Scores(values, skipped, nans=dict(nans))
    return GlobalBatch.gather(Ranks(0, 1, torch.device("cpu")), scores, rollout, calibrated)


def advantages_of(groups, objectives, weights, scale, baseline="mean"):
    gradient = torch.tensor(weights, dtype=torch.float64)
    linear = torch.einsum("i,ipm->pm", gradient, groups.linearize(objectives, baseline))
    return groups.advantages(linear, scale, groups.has_reward(objectives, gradient))


# --- the std of a group and of the batch ------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", range(6))
def test_the_std_of_1_2_6_is_that_of_three_numbers(absent):
    """2.6458 whatever abstains beside them."""
    groups = groups_of({"r": [[1.0, 2.0, 6.0, *[NAN] * absent]]})
    found = advantages_of(groups, {"r": parse("mean")}, [1.0], "group")
    std = np.std([1, 2, 6], ddof=1)
    assert std == pytest.approx(2.6458, abs=5e-5)
    assert found[0, :3].tolist() == pytest.approx([(x - 3) / (std + 1e-4) for x in (1, 2, 6)])
    assert found[0, 3:].tolist() == [0] * absent


@pytest.mark.parametrize("baseline", ["mean", "loo", "none"])
@pytest.mark.parametrize("objective", ["mean", "bon:4", "wor:2", "soft:0.5", "cvar:0.5", "bon:2:unbiased"])
def test_a_group_with_abstentions_is_a_smaller_group(objective, baseline):
    """In each group others abstain; every group is computed alone, without those samples."""
    random = np.random.default_rng(0)
    rewards = random.normal(size=(8, 6))
    for row, count in enumerate((0, 1, 2, 3, 3, 2, 1, 0)):
        rewards[row, random.permutation(6)[:count]] = NAN
    objectives = {"r": parse(objective)}
    whole = advantages_of(groups_of({"r": rewards.tolist()}), objectives, [1.0], "group", baseline)
    for row, own in enumerate(rewards):
        there = ~np.isnan(own)
        alone = advantages_of(groups_of({"r": [own[there].tolist()]}), objectives, [1.0], "group", baseline)[0]
        torch.testing.assert_close(whole[row, torch.tensor(there)], alone, rtol=1e-12, atol=1e-12)


def test_the_std_of_the_batch_is_over_the_completions_with_a_reward():
    rewards = [[1.0, 2.0, 6.0, NAN], [NAN] * 4, [3.0, NAN, NAN, 5.0], [100.0, 0.0, 0.0, 0.0]]
    groups = groups_of({"r": rewards}, dropped=[False, False, False, True])
    found = advantages_of(groups, {"r": parse("mean")}, [1.0], "batch")
    centred = [-2, -1, 3, -1, 1]
    scale = np.std(centred, ddof=1) + 1e-4
    there = [(0, 0), (0, 1), (0, 2), (2, 0), (2, 3)]
    assert [found[at].item() for at in there] == pytest.approx([x / scale for x in centred])
    assert found.count_nonzero() == 5


def test_one_reward_in_a_group_or_batch_is_not_divided():
    groups = groups_of({"r": [[4.0, NAN, NAN], [NAN] * 3]})
    for scale in ("group", "batch"):
        assert advantages_of(groups, {"r": parse("mean")}, [1.0], scale, "none")[0].tolist() == [4, 0, 0]
        assert advantages_of(groups, {"r": parse("mean")}, [1.0], scale).count_nonzero() == 0


def test_a_reward_that_takes_no_part_does_not_count_as_a_reward():
    """Of weight 0, or not the smallest under "min": its completions are no zeros in the std."""
    rewards = {"r": [[1.0, 2.0, 6.0, NAN]], "watched": [[5.0, 5.0, 5.0, 5.0]]}
    objectives = {"r": parse("mean"), "watched": parse("mean")}
    found = advantages_of(groups_of(rewards), objectives, [1.0, 0.0], "group")
    assert found[0].tolist() == pytest.approx([(x - 3) / (math.sqrt(7) + 1e-4) for x in (1, 2, 6)] + [0])


def test_a_mask_needs_the_objectives_own_baseline():
    linear, present = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"baseline='mean': expected a mask \(2, 3\) .* baseline='none'"):
        advantages(linear, present=present)
    with pytest.raises(ValueError, match=r"present \(3,\) .* expected a mask \(2, 3\)"):
        advantages(linear, baseline="none", present=present[0])


# --- other statistics -------------------------------------------------------------------------------------------------


def metrics_of(groups, objectives, weights):
    gradient = torch.tensor(weights, dtype=torch.float64)
    linear = torch.einsum("i,ipm->pm", gradient, groups.linearize(objectives))
    scored = groups.has_reward(objectives, gradient)
    value = WeightedSum(weights).value(groups.values(objectives).nanmean(-1))
    named = dict(zip(groups.rewards, weights, strict=True))
    adv = groups.advantages(linear, "none", scored)
    return groups.metrics(value, groups.values(objectives), groups.scores(objectives), named, linear, adv, scored)


def test_metrics_are_those_of_the_completions_with_a_reward():
    rewards = [[1.0, 2.0, 6.0, NAN], [NAN] * 4, [4.0, 4.0, NAN, NAN], [9.0, 1.0, 2.0, 3.0]]
    found = metrics_of(groups_of({"r": rewards}, [False, False, False, True]), {"r": parse("mean")}, [1.0])
    sizes = [np.abs([-2, -1, 3]).sum() ** 2 / np.square([-2, -1, 3]).sum(), 0]
    assert found["advantage/ess"] == pytest.approx(np.mean(sizes))
    assert found["advantage/frac_zero_std"] == found["frac_reward_zero_std"] == 1 / 2
    assert found["objective/r"] == found["objective/aggregate"] == pytest.approx((3 + 4) / 2)
    assert found["rewards/r/abstained"] == 7 / 12  # of the groups that were not dropped
    assert found["rewards/dropped_groups"] == 1
    assert "rewards/r/abstained" not in metrics_of(groups_of({"r": rewards[3:]}), {"r": parse("mean")}, [1.0])


def test_nan_is_counted_over_all_completions():
    rewards = {"r": [[1.0, NAN, 6.0, NAN], [NAN] * 4], "other": [[1.0] * 4, [NAN] * 4]}
    groups = groups_of(rewards, [False, True], nans={"r": 3})
    found = metrics_of(groups, dict.fromkeys(rewards, parse("mean")), [1.0, 1.0])
    assert found["rewards/r/nan"] == 3 / 8
    assert "rewards/other/nan" not in found


def test_completions_that_cannot_be_ranked_are_counted():
    """The reference has too few samples with the reward at the second prompt."""
    rewards = torch.tensor([[1.0, 2.0, NAN], [3.0, 4.0, 5.0]], dtype=torch.float64)
    ranks = torch.tensor([[0.2, 0.7, NAN], [NAN] * 3], dtype=torch.float64)
    groups = groups_of({"r": rewards.tolist()}, calibrated={"r": CalibratedReward(ranks, ranks)})
    found = metrics_of(groups, {"r": parse("mean")}, [1.0])
    assert (found["rewards/r/abstained"], found["rewards/r/unranked"]) == (1 / 6, 3 / 6)
    assert found["win_rate/r"] == pytest.approx(0.45)
    assert found["rewards/r/mean"] == 3
    said = groups.without_reward({"r": parse("mean")}, {"r": RewardConfig()})
    assert said == (
        "reward 'r' abstained for 1 of 6 completions and scored 5 of 6 and has too few samples of the reference to "
        "rank 3 of them"
    )


def test_rewards_that_cancel_teach_nothing_only_where_the_objective_is_linear():
    up = np.random.default_rng(0).normal(size=(3, 5))
    groups = groups_of({"up": up.tolist(), "down": (-up).tolist()})
    for objective, share in (("mean", 1.0), ("bon:4", 0.0)):
        objectives = dict.fromkeys(("up", "down"), parse(objective))
        found = metrics_of(groups, objectives, [0.5, 0.5])
        assert (found["frac_reward_zero_std"], found["advantage/frac_zero_std"]) == (1, share)


def test_the_aggregate_is_over_the_rewards_that_have_a_value():
    values = torch.tensor([[1.0, NAN, NAN], [4.0, 2.0, NAN]], dtype=torch.float64)
    assert WeightedSum([0.5, 2.0]).value(values).tolist() == pytest.approx([8.5, 4.0, NAN], nan_ok=True)
    assert WeightedSum([1.0, 0.0]).value(values).tolist() == pytest.approx([1.0, NAN, NAN], nan_ok=True)
    smooth = SmoothMin(3.0, [0.25, 0.75])
    assert smooth.value(values)[1] == pytest.approx(2.0)  # between the smallest and the mean of one number
    assert smooth.gradient(values)[:, 1].tolist() == [0, 1]


def test_sums_are_over_the_rewards_that_apply_to_a_prompt():
    a = [[1.0, NAN, 3.0], [NAN] * 3, [1.0, 2.0, 3.0], [NAN] * 3]
    b = [[10.0, 20.0, 30.0], [4.0, 5.0, 6.0], [NAN] * 3, [NAN] * 3]
    found = sum_of_applicable(torch.tensor([a, b, [[7.0] * 3] * 4], dtype=torch.float64), [2.0, 1.0, 0.0])
    expected = [[12.0, NAN, 36.0], [4.0, 5.0, 6.0], [2.0, 4.0, 6.0], [NAN] * 3]
    np.testing.assert_array_equal(found.numpy(), expected)


# --- steps without any reward -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("fails", "reward 'moody' failed in 4 of 4 groups; 4 of 4 groups dropped because a reward failed"),
        ("abstains", "reward 'moody' abstained for 16 of 16 completions"),
    ],
)
def test_a_run_ends_after_steps_without_any_reward(work, capsys, mode, why):
    """The count is logged, continues on resume, and begins again with a reward."""
    (work / "mode").write_text(mode)
    out = f"empty {mode}"
    shared = {"train__max_empty_steps": 6, "train__samples_every": 0, "rewards__moody__on_error": "skip"}
    options = partial(arguments, work, out, {"moody": "moody"}, **shared)
    assert train.main(options(train__steps=4)) == 0
    shown = capsys.readouterr().err
    assert f"warning: no completion of step 1 has a reward: {why}" in shown
    assert shown.count("warning: no completion") == 1
    assert "train.max_empty_steps = 6 such steps in a row end the run" in shown
    assert train.main(options(train__steps=30)) == 2
    shown = capsys.readouterr().err
    assert f"no completion has had a reward for 6 steps in a row, until step 6. In the last one: {why}" in shown
    assert "increase train.max_empty_steps = 6 (0: never ends)" in shown
    lines = read_jsonl(work / out / "metrics.jsonl")
    assert [line["rewards/empty_steps"] for line in lines] == [1, 2, 3, 4, 5, 6]
    (work / "mode").write_text("")
    assert train.main(options(train__steps=7)) == 0  # from step 4, with the reward corrected
    lines = read_jsonl(work / out / "metrics.jsonl")
    assert [line["rewards/empty_steps"] for line in lines] == [1, 2, 3, 4, 0, 0, 0]


def test_no_limit_of_empty_steps(work, capsys):
    (work / "mode").write_text("abstains")
    options = {"train__max_empty_steps": 0, "train__steps": 22, "train__samples_every": 0, "rollout__prompts": 1}
    assert train.main(arguments(work, "no limit", {"moody": "moody"}, **options)) == 0
    (work / "mode").write_text("")
    assert "end the run" not in capsys.readouterr().err
    assert read_jsonl(work / "no limit" / "metrics.jsonl")[-1]["rewards/empty_steps"] == 22


def test_the_default_ends_after_20(work, capsys):
    (work / "mode").write_text("abstains")
    options = {"train__steps": 30, "train__samples_every": 0, "rollout__prompts": 1}
    assert train.main(arguments(work, "default", {"moody": "moody"}, **options)) == 2
    (work / "mode").write_text("")
    assert "for 20 steps in a row" in capsys.readouterr().err
    assert len(read_jsonl(work / "default" / "metrics.jsonl")) == 20


def test_rewards_that_are_too_few_for_the_objective_are_named(work, capsys):
    options = {"train__steps": 3, "train__max_empty_steps": 2, "rewards__few__objective": "bon:2:unbiased"}
    assert train.main(arguments(work, "few", {"few": "few"}, **options)) == 2
    assert (
        "reward 'few' abstained for 12 of 16 completions and scored 4 of 16 (bon:2:unbiased needs 2 in a group)"
        in capsys.readouterr().err
    )


def test_a_limit_below_0_is_refused(work, capsys):
    assert train.main(arguments(work, "refused", train__max_empty_steps=-1)) == 2
    assert "train.max_empty_steps = -1: allowed is >= 0 (0: never)" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_end_together(work):
    (work / "mode").write_text("fails")
    options = {"train__steps": 9, "train__max_empty_steps": 3, "rewards__moody__on_error": "skip"}
    ended = fork_ranks(partial(train.main, arguments(work, "ranks", {"moody": "moody"}, **options)))
    (work / "mode").write_text("")
    assert [end.status for end in ended] == [2, 2], ended[0].output
    assert "reward 'moody' failed in 4 of 4 groups" in ended[0].output
    assert len(read_jsonl(work / "ranks" / "metrics.jsonl")) == 3


@pytest.mark.slow
def test_the_std_of_the_batch_is_over_all_ranks(work):
    """The first rank's prompts have few rewards; two ranks take the step of one."""
    norms = {}
    for world in (1, 2):
        options = {"train__steps": 2, "loss__scale": "batch", "train__out": work / f"world {world}"}
        given = arguments(work, f"world {world}", {"up": "up", "few": "few"}, **options)
        ended = fork_ranks(partial(train.main, given), world)
        assert [end.status for end in ended] == [0] * world, ended[0].output
        norms[world] = [row["grad_norm"] for row in read_jsonl(work / f"world {world}" / "metrics.jsonl")]
    assert norms[2] == pytest.approx(norms[1], rel=1e-6)


# --- opposed users ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_opposed_users_learn_and_are_not_stopped(work, steps):
    """r and -r, each through best-of-4: the sum of the rewards is 0 for every completion."""
    options = {"train__steps": steps, "train__samples_every": 0, "divergence__action": "stop", "rollout__samples": 8}
    options |= {f"rewards__{name}__objective": "bon:4" for name in ("up", "against")}
    options |= {"optim__lr": 1e-3, "divergence__window": 20, "rollout__prompts": 1}
    assert train.main(arguments(work, f"opposed {steps}", {"up": "up", "against": "against"}, **options)) == 0
    lines = read_jsonl(work / f"opposed {steps}" / "metrics.jsonl")
    assert len(lines) == steps
    assert {line["frac_reward_zero_std"] for line in lines} == {1.0}
    assert max(line["advantage/frac_zero_std"] for line in lines) < 1
    assert all(line["grad_norm"] > 0 for line in lines)


def test_opposed_users_of_single_samples_learn_nothing(work, capsys):
    options = {"train__steps": 12, "train__samples_every": 0, "divergence__action": "stop"}
    options |= {f"rewards__{name}__objective": "mean" for name in ("up", "against")}
    assert train.main(arguments(work, "cancel", {"up": "up", "against": "against"}, **options)) == 2
    assert "cancel each other" in capsys.readouterr().err
    assert len(read_jsonl(work / "cancel" / "metrics.jsonl")) == 10


# --- the evaluation of a run ------------------------------------------------------------------------------------------


def test_rewards_for_different_prompts_have_a_sum_before_and_after_training(work, capsys):
    (work / "tasks.py").write_text(
        "def even(prompts, completion_ids, **_):\n"
        "    return [len(ids) if int(p[1]) % 2 == 0 else None for p, ids in zip(prompts, completion_ids)]\n"
        "def odd(prompts, completion_ids, **_):\n"
        "    return [10.0 + len(ids) if int(p[1]) % 2 else None for p, ids in zip(prompts, completion_ids)]\n"
    )
    held_out = [json.dumps({"prompt": f"w{i} w20"}) for i in range(5)]
    (work / "held_out.jsonl").write_text("\n".join(held_out))
    options = {"train__steps": 1, "evaluation__prompts": 5, "evaluation__samples": 4, "train__samples_every": 0}
    options |= {f"rewards__{name}__function": f"{work / 'tasks.py'}:{name}" for name in ("even", "odd")}
    options |= {"data__evaluation": work / "held_out.jsonl"}
    given = arguments(work, "tasks", {"even": "length(target=1, scale=1)", "odd": "length(target=1, scale=1)"})
    for name, value in options.items():
        given += [f"--{name.replace('__', '.')}", str(value)]
    assert train.main(given) == 0
    shown = capsys.readouterr().out
    after = json.loads((work / "tasks" / "evaluation.json").read_text())["after"]
    lengths = np.array(after["lengths"], dtype=float)
    odd = np.array([row[0] is not None for row in after["rewards"]["odd"]])
    assert 0 < odd.sum() < 5
    total = (lengths.mean(1) + 10 * odd).mean()
    assert f"{total:.4f}" in shown
    assert f"odd: {odd.sum()} prompts" in shown
