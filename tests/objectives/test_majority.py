"""Majority voting as an objective, compared with the enumeration of all draws."""

import itertools
import json
import math
import time
from dataclasses import replace

import pytest
import torch
from support import truths
from support.truths import float64, voted

from nlgrpo import cli
from nlgrpo.evaluation import maj_at_k
from nlgrpo.objectives import MajorityVote, Mean, parse
from nlgrpo.objectives.registry import linearize_present, per_completion, present, value_present
from nlgrpo.rewards.reward_functions import Reward, RewardError, final_answers, score


def first_of_order(draws, rewards, answers):
    """Reward of the response that the command `nlgrpo generate --procedure maj:N` chooses from this sequence."""
    from nlgrpo.inference import majority

    index, _ = majority([None if answers[j] < 0 else answers[j] for j in draws], [1.0] * len(draws))
    return rewards[draws[index]]


def groups(P, M, K, seed=0, same=False):
    generator = torch.Generator().manual_seed(seed)
    answers = torch.randint(-1, K, (P, M), generator=generator)
    rewards = torch.randn(P, M, generator=generator, dtype=torch.float64)
    if same:  # equal answers have equal rewards, 0 or 1
        table = (torch.rand(P, K + 1, generator=generator) > 0.5).double()
        rewards = table.gather(1, answers + 1) * (answers >= 0)
    return torch.stack([rewards, answers.double()], -1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("probs", [False, True])
def test_plugin_value_and_slope_by_enumeration(n, probs):
    votes = groups(4, 4, 3, seed=n)
    weights = torch.ones(4, 4, dtype=torch.float64)
    if probs:
        weights = torch.rand(4, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    weights = weights / weights.sum(-1, keepdim=True)
    objective = MajorityVote(n)
    given = weights if probs else None
    values, linear = objective.value(votes, given), objective.linearize(votes, given)
    for g, (group, p) in enumerate(zip(votes, weights.tolist(), strict=True)):
        rewards, answers = group[:, 0].tolist(), group[:, 1].tolist()
        expected, slopes = 0.0, [0.0] * 4
        for draws in itertools.product(range(4), repeat=n):
            reward = voted(draws, rewards, answers)
            expected += math.prod(p[j] for j in draws) * reward
            slopes[draws[0]] += n * math.prod(p[j] for j in draws[1:]) * reward
        assert values[g].item() == pytest.approx(expected, abs=1e-12)
        assert linear[g].tolist() == pytest.approx(slopes, abs=1e-11)


@pytest.mark.parametrize(("n", "M"), [(1, 4), (2, 5), (3, 6), (4, 7), (5, 8), (6, 6)])
def test_unbiased_value_and_slope_are_means_over_all_subsets(n, M):
    votes = groups(3, M, 3, seed=n)
    objective = MajorityVote(n, "unbiased")
    values, linear = objective.value(votes), objective.linearize(votes)
    for g, group in enumerate(votes):
        rewards, answers = group[:, 0].tolist(), group[:, 1].tolist()
        found = {draws: voted(draws, rewards, answers) for draws in itertools.combinations(range(M), n)}
        assert values[g].item() == pytest.approx(sum(found.values()) / len(found), abs=1e-11)
        for j in range(M):
            own = [reward for draws, reward in found.items() if j in draws]
            assert linear[g, j].item() == pytest.approx(n * sum(own) / len(own), abs=1e-10)


def test_the_value_is_maj_at_k_of_the_evaluation():
    """Rewards 0 and 1 per answer, for all k at once: another algorithm, over counts of right and wrong answers."""
    votes = groups(12, 16, 5, seed=3, same=True)
    for n in (1, 2, 3, 5, 8, 16):
        expected = maj_at_k(votes[..., 0], votes[..., 1].long(), [n])[0]
        torch.testing.assert_close(MajorityVote(n, "unbiased").value(votes), expected, atol=1e-10, rtol=0)


def test_many_votes_and_atoms_stay_exact():
    """n = 64 of 96 samples in 30 answers; against maj_at_k."""
    votes = groups(2, 96, 30, seed=5, same=True)
    expected = maj_at_k(votes[..., 0], votes[..., 1].long(), [64])[0]
    torch.testing.assert_close(MajorityVote(64, "unbiased").value(votes), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("n", [21, 64, 128])
def test_many_votes_with_replacement(n):
    """Two answers, of which one has probability p: a binomial tail, with half of the ties."""
    from scipy.stats import binom

    votes = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]], dtype=torch.float64)
    p = torch.tensor([[0.55, 0.25, 0.2]], dtype=torch.float64)
    truth = binom.sf(n // 2, n, 0.55) + (0.5 * binom.pmf(n // 2, n, 0.55) if n % 2 == 0 else 0.0)
    assert MajorityVote(n).value(votes, p).item() == pytest.approx(truth, rel=1e-9)
    assert MajorityVote(n).linearize(votes, p).isfinite().all()
    assert MajorityVote(n).value(votes[:0]).shape == (0,)


def test_the_procedure_that_is_used_has_this_mean():
    """The first response of the first of the most frequent answers, over all orders of the draws."""
    votes = groups(1, 4, 2, seed=8)[0]
    rewards, answers = votes[:, 0].tolist(), [int(a) for a in votes[:, 1].tolist()]
    for n in (2, 3, 4):
        used = [first_of_order(draws, rewards, answers) for draws in itertools.product(range(4), repeat=n)]
        assert MajorityVote(n).value(votes[None]).item() == pytest.approx(sum(used) / len(used), abs=1e-12)


def test_the_plugin_gradient_has_a_bias_that_falls_with_the_group():
    logits, values = float64(0.3, -0.2, 0.5), float64([1.0, 0.0], [0.0, 1.0], [0.5, 2.0])
    truth, _ = truths.gradient(MajorityVote(3), values, logits)
    errors = {}
    for M in (3, 6, 12):
        letters, chance = truths.counted_groups(logits.softmax(0), M)
        found = truths.expected_gradient(logits, letters, chance, MajorityVote(3).advantage(values[letters]))
        errors[M] = (found - truth).abs().max().item()
    assert errors[3] > 1.6 * errors[6] > 2.5 * errors[12] > 0


def test_one_vote_is_the_mean_and_missing_samples_form_smaller_groups():
    votes = groups(5, 6, 3, seed=4)
    torch.testing.assert_close(MajorityVote(1).advantage(votes), Mean().advantage(votes[..., 0]))
    torch.testing.assert_close(MajorityVote(1).value(votes), votes[..., 0].mean(-1))
    holes = votes.clone()
    holes[0, 1, 0] = holes[0, 4, 0] = torch.nan
    kept = [0, 2, 3, 5]
    objective = MajorityVote(3)
    torch.testing.assert_close(linearize_present(objective, holes)[0, kept], objective.advantage(votes[:1, kept])[0])
    assert linearize_present(objective, holes)[0, 1] == 0
    torch.testing.assert_close(value_present(objective, holes)[0], objective.value(votes[:1, kept])[0])
    assert present(objective, holes).sum() == 28
    torch.testing.assert_close(per_completion(objective, votes), votes[..., 0])


def test_the_numbers_of_answers_do_not_matter():
    votes = groups(6, 8, 3, seed=6)
    renamed = votes.clone()
    renamed[..., 1] = torch.where(votes[..., 1] < 0, -1.0, 1000 - 7 * votes[..., 1])
    for objective in (MajorityVote(4), MajorityVote(4, "unbiased")):
        torch.testing.assert_close(objective.linearize(votes), objective.linearize(renamed))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(MajorityVote(4).linearize(votes[:, order]), MajorityVote(4).linearize(votes)[:, order])
    with torch.inference_mode():
        assert MajorityVote(4).linearize(votes.float()).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MajorityVote(0), r"n=0.*expected an integer in \[1, 128\]"),
        (lambda: MajorityVote(129), "n=129"),
        (lambda: MajorityVote(True), "n=True"),
        (lambda: MajorityVote(2, "exact"), "expected 'plugin' or 'unbiased'"),
        (lambda: MajorityVote(2).value(torch.zeros(2, 3)), r"maj:2: expected rewards and answers \(P, M, 2\)"),
        (
            lambda: MajorityVote(2).value(torch.full((1, 2, 2), 0.5)),
            r"group 0, sample 0 is \[0.5, 0.5\]; expected an answer",
        ),
        (lambda: MajorityVote(2).value(torch.full((1, 2, 2), torch.nan)), "expected a finite reward"),
        (lambda: MajorityVote(4, "unbiased").value(torch.zeros(1, 3, 2)), "4 of 3 samples have no unbiased estimate"),
        (lambda: MajorityVote(3, "unbiased").advantage(torch.zeros(1, 3, 2)), "expected M > 3"),
        (lambda: parse("maj"), "expected 'maj:N' with a number"),
        (lambda: parse("maj:x"), "expected 'maj:N' with a number"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_names():
    for text in ("maj:4", "maj:4:unbiased"):
        assert str(parse(text)) == text
    assert parse("maj:4:unbiased").fewest == 5


# --- rewards and training ---------------------------------------------------------------------------------------------


def test_scores_have_the_final_answers():
    def right(completions, **_):
        return [float("4" in text) for text in completions]

    texts = ["it is 4", r"\boxed{4.0}", "5", "nothing", "four", "5 or 4"]
    scores = score(
        [Reward("right", right, voted=True), Reward("other", right)],
        prompts=["p"] * 6, completions=texts, completion_ids=[[1]] * 6, columns={}, samples=3, step=0, total_steps=1,
    )  # fmt: skip
    assert scores.answers["right"].tolist() == [[0, 0, 1], [-1, -1, 0]]
    assert list(scores.answers) == ["right"]


class Voted:
    def __init__(self, answer):
        self.answer = answer

    def __call__(self, completions, **_):
        return [1.0] * len(completions)


def raises(text):
    return {"a": "x"}[text]


def hangs(text):
    time.sleep(600)


@pytest.mark.parametrize(
    ("answer", "says"), [(raises, "raised KeyError in its method answer: 'b'"), (hangs, "did not return within")]
)
def test_a_method_answer_that_fails_stops_the_run_or_drops_the_groups(answer, says, caplog):
    given = {
        "prompts": ["p"] * 4, "completions": ["a", "b", "a", "a"], "completion_ids": [[1]] * 4, "columns": {},
        "samples": 2, "step": 3, "total_steps": 9,
    }  # fmt: skip
    reward = Reward("v", Voted(answer), timeout=0.2, voted=True)
    with pytest.raises(RewardError, match=rf"reward 'v' {says}.*step 3") as error:
        score([reward], **given)
    assert "in its method answer" in str(error.value)
    scores = score([replace(reward, on_error="skip")], **given)
    assert scores.skipped.tolist() == [True, True]
    assert scores.values["v"].isnan().all()
    assert scores.answers["v"].tolist() == [[-1, -1]] * 2
    with pytest.raises(RewardError, match=rf"reward 'v' {says}"):
        final_answers(reward, [["a", "b"]])
    assert final_answers(replace(reward, on_error="skip"), [["a", "b"]]).tolist() == [[-1, -1]]
    assert caplog.text.count(says) == 2


REWARD = """
def small(completions, **_):
    return [float(len(text) % 2) for text in completions]
"""


@pytest.mark.usefixtures("one_thread", "no_figures")
def test_training_for_majority_voting(tmp_path, monkeypatch, capfd):
    """The logged objective is the value of the sampled groups; a transform is refused; the table has majorities."""
    (tmp_path / "r.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vote.toml").write_text(
        '[rewards.small]\nfunction = "r.py:small"\nobjective = "maj:4"\n[rollout]\nprompts = 3\nsamples = 6\n'
        'max_new_tokens = 5\n[evaluation]\nprompts = 3\nsamples = 4\n[train]\nsteps = 2\nout = "run"\n'
        '[data]\nsource = "story-prompts"\n[loss]\nbeta = 0.0\n'
    )
    assert cli.main(["train", "vote.toml"]) == 0
    out = capfd.readouterr().out
    assert "majority-of-4" in out
    assert "maj:4" in out
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["objective/small"] <= 1 for row in logged)
    assert cli.main(["evaluate", "run", "--n", "4", "--procedures", "maj:4", "--ns", "1", "--out", "evaluation"]) == 0
    assert "maj:4" in capfd.readouterr().out
    assert cli.main(["train", "vote.toml", "--rewards.small.transform", "identity", "--loss.beta", "0.1"]) == 2
    assert "'maj:4' votes over answers; it takes the reward itself" in " ".join(capfd.readouterr().err.split())
