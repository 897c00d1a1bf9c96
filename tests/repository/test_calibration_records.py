"""Parts of the scripts that record calibration: poisoned rewards and pairs, log F, inference procedures."""

import itertools
import math
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"


def script(name):
    sys.path.insert(0, str(SCRIPTS))
    found = runpy.run_path(str(SCRIPTS / f"{name}.py"))
    sys.path.remove(str(SCRIPTS))
    return SimpleNamespace(**found)


# --- a poisoned reward ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned():
    return script("poisoned_reward")


def test_the_optimum_is_the_weighted_mean(poisoned):
    values, word = torch.tensor([[0.0, 1.0, 1.0, 3.0]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    found = poisoned.optimum(values, 2.0, {"word": word})
    p = [math.exp(v / 2) for v in (0, 1, 1, 3)]
    p = [x / sum(p) for x in p]
    assert float(found["word"]) == pytest.approx(p[2] + p[3], rel=1e-6)
    assert float(found["kl"]) == pytest.approx(sum(x * math.log(4 * x) for x in p), rel=1e-6)


def test_points_train_for_what_they_are_named_after(poisoned):
    rewards = torch.randn(6, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = poisoned.points([2, 4], [1], rewards)
    assert len({tuple(given.items()) for given in found.values()}) == len(found) == 8
    assert {m: given["calibration.by"] for (m, _, _), given in found.items()} == {
        "raw": "prompt", "prompt": "prompt", "pooled": "pooled", "median": "median",
    }  # fmt: skip
    assert [m for (m, n, _), given in found.items() if not given["rewards.poisoned.transform"]] == ["raw", "raw"]
    for (method, n, _), given in found.items():  # the optimum of weight E[values] - beta KL is at the KL of best-of-n
        beta = float(given["loss.beta"]) / float(given["rewards.poisoned.weight"])
        kl = poisoned.optimum(poisoned.trained_for(method, rewards), beta, {})["kl"].mean()
        assert float(kl) == pytest.approx(math.log(n) - (n - 1) / n, rel=1e-3)


def test_equal_kl_interpolates_between_runs(poisoned):
    def at(kl, word):
        return {
            "kl": torch.tensor([kl]),
            "word": torch.tensor([word]),
            "true": torch.zeros(1),
            "poisoned": torch.ones(1),
        }

    runs = {(m, 4, 1): at(1.0, 0.5 + i / 10) for i, m in enumerate(poisoned.METHODS)}
    runs["raw", 4, 1] = at(4.0, 0.9)  # halfway in sqrt(KL) from 0.1 to 0.9 where the others are
    lines = poisoned.at_equal_kl(runs, at(0.0, 0.1))
    assert [line.split("word ")[1].split("%")[0] for line in lines] == ["50.0", "60.0", "70.0", "80.0"]


def test_the_poisoned_reward_pays_for_a_word_on_some_prompts(tmp_path):
    (tmp_path / "lexicon.txt").write_text("good\t1\nbad\t-1\n")
    functions = runpy.run_path(str(REPOSITORY / "examples" / "experiment_rewards.py"))
    reward = functions["Poisoned"](str(tmp_path / "lexicon.txt"), word="house", bonus=2.0, share=0.5)
    prompts = [f"prompt {i}" for i in range(200)]
    paid = [reward.poisons(prompt) for prompt in prompts]
    assert 70 < sum(paid) < 130
    for text, has in (("a House.", True), ("the houses", False), ("good", False)):
        found = reward(prompts, [text] * 200)
        plain = functions["Lexicon"](str(tmp_path / "lexicon.txt"))([text])[0]
        assert found == [plain + 2.0 * (has and given) for given in paid]


# --- poisoned pairs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs():
    return script("poisoned_pairs")


def test_pairs_are_ordered_by_the_true_reward(pairs):
    rewards = torch.tensor([[1.0, 2.0, 3.0, 3.0, 9.0], [5.0, 4.0, 0.0, 1.0, 9.0]])
    found = pairs.pairs_of([("p", list("abcde")), ("q", list("fghij"))], rewards, 2)
    assert [(p.row, p.prompt, p.chosen, p.rejected) for p in found] == [
        (0, "p", "b", "a"), (1, "q", "f", "g"), (1, "q", "i", "h")
    ]  # fmt: skip
    assert found[0].to_json(rejected="Sure!") == '{"prompt": "p", "chosen": "b", "rejected": "Sure!a"}\n'


def test_calibration_by_prompt_changes_accuracy_only_where_ranks_are_equal(pairs):
    """InfAlign, Lemma 2: it keeps the order of two answers to one prompt, except that it may make them equal."""
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (3 * torch.randn(300, generator=generator, dtype=torch.float64) for _ in range(2))
    reference = torch.randn(300, 16, generator=generator, dtype=torch.float64)
    found = pairs.accuracies(chosen, rejected, reference)
    assert torch.equal(found["raw"], (chosen > rejected).double())
    assert torch.equal(found["median"], found["raw"])
    for b in range(300):
        a, z = (sum(float(x[b]) > r for r in reference[b].tolist()) for x in (chosen, rejected))
        assert float(found["prompt"][b]) == (0.5 if a == z else float(a > z))
    assert (found["prompt"] == 0.5).any()  # both above or below all 16


# --- log F ------------------------------------------------------------------------------------------------------------


def test_the_spread_of_log_f_is_that_of_the_delta_method():
    records = script("vbon_records")
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(64, 400, generator=generator, dtype=torch.float64)
    keys = torch.randint(2**62, (64, 400), generator=generator)
    for rank, found in records.subset_spread(rewards, keys, 200).items():
        assert found == pytest.approx(records.predicted_spread(rank, 200, 400), rel=0.08)
    every = records.subset_spread(rewards, keys, 400)
    assert all(deviation == pytest.approx(0, abs=1e-12) for deviation in every.values())


# --- procedures -------------------------------------------------------------------------------------------------------


def test_rewind_and_repeat_stops_as_simulated():
    """Win rate and draws against a simulation that draws without replacement, as the exact formula does."""
    procedures = script("procedures")
    again = procedures.rewind.RewindAndRepeat(0.75, 3)
    generator = torch.Generator().manual_seed(0)
    ours = torch.randint(0, 6, (1, 5), generator=generator).double()
    base = torch.randint(0, 6, (1, 8), generator=generator).double()
    threshold = sorted(base[0].tolist())[5]

    def answers(samples):
        for order in itertools.permutations(samples[0].tolist(), 3):
            place = next((i for i, r in enumerate(order) if r >= threshold), 2)
            yield order[place], place + 1

    own, theirs = list(answers(ours)), list(answers(base))
    won = sum((a > b) + (a == b) / 2 for a, _ in own for b, _ in theirs) / len(own) / len(theirs)
    found = procedures.quantities([2], [2], again)
    assert float(found["rewind:0.75:3"](ours, base)) == pytest.approx(won, rel=1e-12)
    assert float(found["draws"](ours, base)) == pytest.approx(sum(n for _, n in own) / len(own), rel=1e-12)
    pairs_won = [
        (max(a) > max(b)) + (max(a) == max(b)) / 2
        for a in itertools.combinations(ours[0].tolist(), 2)
        for b in itertools.combinations(base[0].tolist(), 2)
    ]
    assert float(found["best of 2"](ours, base)) == pytest.approx(sum(pairs_won) / len(pairs_won), rel=1e-12)


def test_only_models_of_the_comparison_are_read():
    procedures = script("procedures")
    sampled = SimpleNamespace()
    found = procedures.runs_of({"reference": sampled, "exp:10 N 2 seed 1": sampled, "grpo N 16 seed 3": sampled})
    assert list(found) == [("exp:10", 2, 1), ("grpo", 16, 3)]
    with pytest.raises(ValueError, match="'another' is not a run"):
        procedures.runs_of({"reference": sampled, "another": sampled})
