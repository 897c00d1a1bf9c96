"""BoN-SFT, DPO, IPO, BoNBoN: the update against plain PyTorch on transformers' models in float64; runs on rollouts."""

import json
import math
import os
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.helpers import WORDS, fork_ranks, random_rollout, tiny_model

from nlgrpo import cli, train
from nlgrpo.apps.report.logged import Logged, panels_of_run, panels_of_runs
from nlgrpo.config import validate
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import (
    CalibrationConfig,
    Config,
    LossConfig,
    OfflineConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
)
from nlgrpo.data.prompt_dataset import PromptSet
from nlgrpo.engine.rollouts.reference_rollouts import load_rollouts
from nlgrpo.model import decoder
from nlgrpo.runtime.device import MicroBatchLimit
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training import offline
from nlgrpo.training.build import build_setup
from nlgrpo.training.learner import Learner, make_optimizer

pytestmark = pytest.mark.usefixtures("no_figures")

ALONE = Ranks(0, 1, torch.device("cpu"))
TEMPERATURE, BETA, LR, EPS = 0.8, 0.3, 0.01, 1e-3
ALGORITHMS = ("bon_sft", "dpo", "ipo", "bonbon")
PROMPTS = ["w1 w2", "w3", "w4 w5 w6", "w7"]
REWARDS = """
def first(completion_ids, **_):
    # The reward of a token is its number modulo 8: some tie.
    return [float(ids[0] % 8) for ids in completion_ids]

def low(completion_ids, **_):
    return [-float(ids[0] >= 16) for ids in completion_ids]

def same(completion_ids, **_):
    return [1.0 for _ in completion_ids]

def mostly(completion_ids, **_):
    return [None if ids[0] % 5 == 0 else float(ids[0]) for ids in completion_ids]

def of_some(prompts, completion_ids, **_):
    # One value for every sample of the second prompt.
    return [0.0 if p == "w3" else float(ids[0] % 8) for p, ids in zip(prompts, completion_ids)]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("offline")
    tiny_model(root / "policy", "gpt2", seed=0, scale=0.6)
    tiny_model(root / "reference", "gpt2", seed=1, scale=0.6)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    (root / "rewards.py").write_text(REWARDS)
    return root


# --- the update -------------------------------------------------------------------------------------------------------


def of_response(model, prompt, completion):
    """log pi(completion | prompt) by transformers' model."""
    logits = model(torch.tensor([prompt + completion])).logits[0] / TEMPERATURE
    where = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return logits.log_softmax(-1)[where, completion].sum()


def plain_loss(algorithm, sets, policy, reference, n, alpha):
    """By the formulas of the papers, one set at a time; the loss, and what is logged."""
    total, logged = torch.zeros((), dtype=torch.float64), Counter()
    for responses in sets:
        logps = [of_response(policy, *response) for response in responses]
        with torch.no_grad():
            refs = [of_response(reference, *response) for response in responses]
        logged["logps/chosen"] += float(logps[0].detach())
        if algorithm == "bon_sft":
            total = total - logps[0]
            continue
        ratios = [a - b for a, b in zip(logps, refs, strict=True)]
        h = ratios[0] - ratios[1]
        target = (n - 1) * sum(1 / k for k in range(1, n))
        total = total + {
            "dpo": -torch.sigmoid(BETA * h).log(),
            "ipo": (h - 1 / (2 * BETA)) ** 2,
            "bonbon": -alpha * logps[0] + (1 - alpha) * (h - target) ** 2,
        }[algorithm]  # fmt: skip
        beta = 1 / (2 * target) if algorithm == "bonbon" else BETA
        logged["logps/rejected"] += float(logps[1].detach())
        logged["rewards/chosen"] += beta * float(ratios[0].detach())
        logged["rewards/rejected"] += beta * float(ratios[1].detach())
        logged["rewards/margins"] += beta * float(h.detach())
        logged["rewards/accuracies"] += float(h > 0)
    return total / len(sets), {name: value / len(sets) for name, value in logged.items()}


def make_learner(root, loss, micro=20):
    policy, reference = (decoder.load(root / name, dtype=torch.float64) for name in ("policy", "reference"))
    optim = OptimConfig(eps=EPS, max_grad_norm=0.0)
    reference.requires_grad_(False)
    kept = reference if loss.has_reference else None
    limit = MicroBatchLimit(micro, micro)
    return Learner(policy, kept, make_optimizer(policy, optim), loss, optim, ALONE, TEMPERATURE, 8, limit, 3)


SETS = [  # prompt and completion of the chosen, then of the rejected
    [([5, 6], [7, 8, 9]), ([5, 6], [10, 2])],
    [([5, 6], [11]), ([5, 6], [12, 13, 14, 15, 2])],
    [([9], [20, 21, 22, 23, 24, 25, 26]), ([9], [27])],
    [([4, 4, 8], [16, 2]), ([4, 4, 8], [17, 18])],
]


def chosen_of(sets):
    flat = [response for responses in sets for response in responses]
    return offline.OfflineBatch([list(p) for p, _ in flat], [list(c) for _, c in flat], len(sets[0]), len(sets))


@pytest.mark.parametrize("micro", [20, 10**6], ids=["small micro-batches", "one micro-batch"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_update_is_that_of_plain_pytorch(root, algorithm, micro):
    theirs, frozen = (tiny_model(root / f"{key}-again", "gpt2", seed=i, scale=0.6) for i, key in enumerate("pr"))
    loss, own = LossConfig(algorithm, beta=BETA), OfflineConfig(n=4, alpha=0.2)
    learner = make_learner(root, loss, micro)
    sets = [responses[:1] for responses in SETS] if algorithm == "bon_sft" else SETS
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    for _ in range(2):  # in the second step the policy is not where it began
        stats = offline.update(learner, chosen_of(sets), own, LR)
        optimizer.zero_grad()
        value, logged = plain_loss(algorithm, sets, theirs, frozen, own.n, own.alpha)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), math.inf)
        optimizer.step()
        assert stats["loss"] == pytest.approx(float(value.detach()), rel=1e-10)
        assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
        assert {name: stats[name] for name in logged} == pytest.approx(logged, rel=1e-9)
    near = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(learner.model.embed.weight, theirs.transformer.wte.weight, **near)
    torch.testing.assert_close(learner.model.blocks[1].down.weight, theirs.transformer.h[1].mlp.c_proj.weight.T, **near)
    assert stats["tokens"] == sum(len(p) + len(c) for responses in sets for p, c in responses)
    assert (stats["learning_rate"], stats["sets"]) == (LR, 4)


@pytest.mark.parametrize("micro", [20, 10**6], ids=["small micro-batches", "one micro-batch"])
@pytest.mark.parametrize("normalization", ["dapo", "grpo"])
def test_the_jeffreys_term_is_that_of_plain_pytorch(root, normalization, micro):
    """(1 - w) times GRPO's loss plus w times the likelihood of the winners, with the same weights of tokens."""
    theirs, w = tiny_model(root / "policy-again", "gpt2", seed=0, scale=0.6), 0.3
    learner = make_learner(root, LossConfig("grpo", beta=0.0, jeffreys=w, normalization=normalization), micro)
    lengths = torch.tensor([[3, 2], [4, 1]])
    rollout = random_rollout(lengths, [2, 3])
    advantages = torch.tensor([[1.0, -2.0], [0.5, 0.25]], dtype=torch.float64)
    winners = [responses[:1] for responses in SETS]
    learner.update(
        rollout, advantages, step=0, lr=LR, beta=0.0,
        other=partial(offline.add_likelihood, learner, chosen_of(winners)),
    )  # fmt: skip

    def weight(own, every):
        return 1 / sum(every) if normalization == "dapo" else 1 / (len(every) * own)

    completions, total = rollout.completion_ids(), torch.zeros((), dtype=torch.float64)
    sizes = list(map(len, completions))
    for prompt, completion, advantage in zip([0, 0, 1, 1], completions, advantages.flatten().tolist(), strict=True):
        of_one = of_response(theirs, rollout.prompt_ids[prompt], completion)  # the gradient of the ratio at 1
        total = total - (1 - w) * advantage * weight(len(completion), sizes) * of_one
    sizes = [len(completion) for [(_, completion)] in winners]
    for [(prompt, completion)] in winners:
        total = total - w * weight(len(completion), sizes) * of_response(theirs, prompt, completion)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    total.backward()
    optimizer.step()
    torch.testing.assert_close(learner.model.embed.weight, theirs.transformer.wte.weight, rtol=0, atol=1e-9)


def test_a_step_without_sets_changes_nothing(root):
    learner = make_learner(root, LossConfig("dpo", beta=BETA))
    offline.update(learner, chosen_of(SETS), OfflineConfig(), LR)  # fills the optimiser's moments
    before = learner.model.embed.weight.detach().clone()
    stats = offline.update(learner, offline.OfflineBatch([], [], 2, 0), OfflineConfig(), LR)
    assert torch.equal(learner.model.embed.weight, before)
    assert stats == {"sets": 0, "grad_norm": 0.0, "learning_rate": LR, "tokens": 0}


# --- data of a step ---------------------------------------------------------------------------------------------------


def options(root, **more):
    """One token per completion, so all strings can be enumerated."""
    given = {
        "model.path": root / "policy",
        "model.dtype": "float64",
        "data.source": root / "prompts.jsonl",
        "data.evaluation": root / "prompts.jsonl",
        "rollout.prompts": 4,
        "rollout.samples": 12,
        "rollout.max_new_tokens": 1,
        "rewards.first.function": f"{root / 'rewards.py'}:first",
        "rewards.first.objective": "mean",
        "rewards.low.function": f"{root / 'rewards.py'}:low",
        "rewards.low.objective": "mean",
        "rewards.low.weight": 0.0,
        "rewards.of_some.function": f"{root / 'rewards.py'}:of_some",
        "rewards.of_some.weight": 0.0,
        "calibration.rollouts": root / "rollouts",
        "loss.beta": 0.5,
        "train.steps": 2,
        "evaluation.prompts": 0,
    }
    given |= {name.replace("__", "."): value for name, value in more.items()}
    return ["blank", *(part for name, value in given.items() for part in (f"--{name}", str(value)))]


def rolled_out(root, out, samples, **more):
    extra = ["--prompts", str(more.pop("prompts"))] if "prompts" in more else []
    assert cli.main(["rollout", *options(root, **more), "--samples", str(samples), "--out", str(out), *extra]) == 0
    return out


@pytest.fixture(scope="module")
def rollouts(root):
    return rolled_out(root, root / "rollouts", 50)


def run_of(root, **more):
    return build_setup(from_arguments(options(root, **more))[0], ALONE)


def of_step(run, cursor, count, ranks=ALONE):
    chosen = run.samples.choose(cursor, count, ranks)
    flat = list(zip(map(tuple, chosen.prompt_ids), map(tuple, chosen.completion_ids), strict=True))
    return chosen, [tuple(flat[i] for i in own) for own in chosen.sets]


@pytest.mark.parametrize("algorithm", ["dpo", "bon_sft"])
def test_no_sample_is_used_twice_in_a_pass(root, rollouts, algorithm):
    """n = 1 or pairs of 2: 4 visits take 12 of 50 samples each, which are those that were drawn."""
    run = run_of(root, loss__algorithm=algorithm, offline__n=2 if algorithm == "dpo" else 1)
    kept = load_rollouts(rollouts)
    for again in range(2):
        seen = Counter(response for v in range(4) for own in of_step(run, again * 16 + 4 * v, 4)[1] for response in own)
        for ids in run.prompts.ids:
            theirs = Counter(map(tuple, kept.ids(kept.row(ids))))
            ours = Counter({y: count for (x, y), count in seen.items() if x == tuple(ids)})
            assert ours <= theirs
            assert algorithm == "dpo" or ours.total() == 48
    assert of_step(run, 0, 4)[1] != of_step(run, 16, 4)[1]  # in another order then
    assert of_step(run, 0, 4)[1] == of_step(run, 0, 4)[1]


def test_pairs_are_the_best_and_the_worst_by_the_weighted_sum(root, rollouts):
    more = {"offline__n": 3, "rewards__low__weight": 20.0, "rewards__first__weight": -1.0}
    run = run_of(root, loss__algorithm="bonbon", **more)
    _, found = of_step(run, 0, 4)
    reward_of = {y: -float(y % 8) - 20 * (y >= 16) for y in range(len(WORDS))}
    assert len(found) > 10
    assert all(reward_of[chosen[0]] > reward_of[rejected[0]] for (_, chosen), (_, rejected) in found)
    mean = sum(reward_of[chosen[0]] for (_, chosen), _ in found) / len(found)
    single = sum(sum(reward_of[y] for (y,) in load_rollouts(rollouts).ids(p)) / 50 for p in range(4)) / 4
    assert mean > single + 5  # the best of 3, of rewards that spread over 27


def test_the_automatic_alpha_makes_both_terms_of_bonbon_equal(root, rollouts):
    """At the start h = 0, and the likelihood is that of the reference's samples."""
    run = run_of(root, loss__algorithm="bonbon", offline__n=4, offline__alpha="None")
    alpha, margin = run.samples.config.alpha, 3 * (1 + 1 / 2 + 1 / 3)
    likelihood = -float(load_rollouts(rollouts).logprobs.mean())
    assert alpha * likelihood == pytest.approx((1 - alpha) * margin**2)
    assert 0 < alpha < 1
    assert run_of(root, loss__algorithm="bonbon", offline__n=4).samples.config.alpha == 0.005


@pytest.mark.slow
def test_bond_leads_towards_the_best_of_n(root, rollouts, tmp_path, capsys):
    """Both directions of the KL to best-of-4 fall; the plan shows both terms."""
    target = best_of(of_the_rollouts(rollouts), 4)
    given = options(
        root, loss__algorithm="grpo", loss__kl_in="reward", loss__kl="k1", loss__beta=1.0, loss__jeffreys=0.5,
        offline__n=4, rewards__first__objective="mean", rewards__first__transform="vbon:4:bound", rollout__samples=48,
        optim__lr=0.02, optim__schedule="linear", train__steps=80, train__out=tmp_path / "bond",
    )  # fmt: skip
    assert train.main(given) == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert "maximise 0.5 (1 mean(vbon:4:bound of first)" in plan
    assert "+ 0.5 log pi(best of 4 reference samples)" in plan
    before, after = distributions(root / "policy"), distributions(tmp_path / "bond" / "model")

    def jeffreys(policy):
        forward = torch.special.xlogy(target, target / policy).sum(1).mean()
        seen = target > 0  # the samples do not contain all responses
        backward = torch.special.xlogy(policy, policy / target.clamp(min=1e-3))[seen].sum() / len(policy)
        return float(forward), float(backward)

    (forward_before, backward_before), (forward, backward) = jeffreys(before), jeffreys(after)
    assert forward < 0.75 * forward_before
    assert backward < 0.3 * backward_before


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one(root, rollouts, tmp_path):
    """BOND's two terms under majority voting, with minibatches: the same gradients up to the rounding of float32."""
    found = {}
    for world in (1, 2):
        given = options(
            root, loss__algorithm="grpo", loss__jeffreys=0.5, loss__minibatches=2, offline__n=3, loss__kl_in="reward",
            rewards__first__objective="maj:2:unbiased", rollout__samples=6, rollout__prompts=4, train__steps=2,
            train__out=tmp_path / str(world),
        )  # fmt: skip
        ended = fork_ranks(lambda given=given: train.main(given), world)
        assert [one.status for one in ended] == [0] * world, ended[-1].output
        found[world] = metrics_of(tmp_path / str(world))
    for one, two in zip(found[1], found[2], strict=True):
        for name in ("grad_norm", "objective/first", "loss"):
            assert two[name] == pytest.approx(one[name], rel=1e-4), name
    assert found[1][0]["grad_norm"] > 0


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_split_the_sets_of_a_step(root, rollouts, world):
    run = run_of(root, loss__algorithm="ipo")
    whole, found = of_step(run, 4, 4)
    parts = [of_step(run, 4, 4, Ranks(r, world, torch.device("cpu"))) for r in range(world)]
    assert {part.total for part, _ in parts} == {whole.total} == {len(found)}
    assert Counter(own for _, mine in parts for own in mine) == Counter(found)
    assert max(len(mine) for _, mine in parts) - min(len(mine) for _, mine in parts) <= 1


def test_prompts_without_pairs_are_dropped_and_counted(root, rollouts, tmp_path, capsys):
    given = options(root, loss__algorithm="dpo", rewards__first__weight=0.0, rewards__of_some__weight=1.0)
    assert train.main([*given, "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "rollouts 50 samples per prompt in" in printed
    assert "prompts dropped: 1 whose samples all have the same reward" in printed
    assert "PromptSet(3 prompts" in printed
    assert "4 prompts x 12 samples in 6 sets of 2 = 24 pairs, minus those with equal rewards" in printed
    few = rolled_out(root, tmp_path / "few", 14, prompts=3)
    run = run_of(root, loss__algorithm="bon_sft", calibration__rollouts=few)
    assert (run.samples.unknown, run.samples.tied, len(run.prompts)) == (1, 0, 3)
    run = run_of(root, loss__algorithm="bon_sft", rewards__first__weight=0.0, rewards__of_some__weight=1.0)
    assert (run.samples.tied, len(run.prompts)) == (0, 4)  # ties have a best one all the same
    again = tmp_path / "again.jsonl"
    again.write_text((root / "prompts.jsonl").read_text() * 3)  # whose samples would come three times a pass
    run = run_of(root, loss__algorithm="bon_sft", data__source=again)
    assert (run.samples.repeated, len(run.prompts), len({tuple(ids) for ids in run.prompts.ids})) == (8, 4, 4)


# --- where training leads ---------------------------------------------------------------------------------------------


def distributions(folder):
    """pi(y | x) over the tokens, for each prompt, by our decoder (which equals transformers')."""
    model = decoder.load(folder, dtype=torch.float64)
    prompts = [[WORDS.index(word) for word in p.split()] for p in PROMPTS]
    with torch.no_grad():
        return torch.stack([model(torch.tensor(ids), [len(ids)])[-1] for ids in prompts]).softmax(-1)


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def best_of(p, n):
    """The distribution of the best of n by the token modulo 8, with ties broken at random."""
    values = torch.arange(p.shape[1]) % 8
    out = torch.zeros_like(p)
    for v in range(8):
        level = values == v
        below, upto = p[:, values < v].sum(1), p[:, values <= v].sum(1)
        out[:, level] = p[:, level] * ((upto**n - below**n) / p[:, level].sum(1).clamp(min=1e-300))[:, None]
    return out


def of_the_rollouts(folder):
    """The distribution of the saved samples, which training uses for the reference."""
    kept = load_rollouts(folder)
    rows = [kept.row([WORDS.index(word) for word in p.split()]) for p in PROMPTS]
    counts = torch.tensor([[[y for (y,) in kept.ids(r)].count(w) for w in range(len(WORDS))] for r in rows])
    return counts.double() / counts.sum(1, keepdim=True)


def test_bon_sft_leads_to_the_best_of_n_of_the_rollouts(root, rollouts, tmp_path):
    target = best_of(of_the_rollouts(rollouts), 4)
    assert target.sum(1).tolist() == pytest.approx([1] * 4)

    def distance(folder):
        """KL(target | pi), which the likelihood of the best minimises."""
        return float(torch.special.xlogy(target, target / distributions(folder)).sum(1).mean())

    more = {"loss__algorithm": "bon_sft", "offline__n": 4, "rollout__samples": 48, "optim__lr": 0.03}
    given = options(root, **more, train__steps=60, optim__schedule="linear", train__out=tmp_path / "sft")
    assert train.main(given) == 0
    assert distance(root / "policy") > 0.5
    assert distance(tmp_path / "sft" / "model") < 0.1 * distance(root / "policy")
    steps = metrics_of(tmp_path / "sft")
    assert steps[-1]["logps/chosen"] > steps[0]["logps/chosen"] + 0.5
    assert "rewards/margins" not in steps[0]  # there is no reference


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("algorithm", "beta", "n"), [("dpo", 0.5, 2), ("ipo", 0.1, 2), ("bonbon", 1.0, 4)])
def test_pairs_raise_the_reward(root, rollouts, tmp_path, algorithm, beta, n):
    values = torch.arange(len(WORDS), dtype=torch.float64) % 8
    more = {"loss__algorithm": algorithm, "loss__beta": beta, "offline__n": n, "rollout__samples": 48}
    given = options(root, **more, optim__lr=0.01, train__steps=30, train__out=tmp_path / algorithm)
    assert train.main(given) == 0
    before, after = ((distributions(f) @ values).mean() for f in (root / "policy", tmp_path / algorithm / "model"))
    assert after > before + 1
    first, *_, last = metrics_of(tmp_path / algorithm)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-12)
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], rel=1e-9)
    assert last["rewards/accuracies"] > 0.9
    assert last["loss"] < first["loss"] / 2


def test_ipo_leads_to_its_least_squares(root, rollouts, tmp_path):
    """The margins of log pi / pi_ref are a least-squares fit to 1 / (2 beta) over all pairs with different rewards."""
    beta, values, counts = 0.5, torch.arange(len(WORDS)) % 8, of_the_rollouts(rollouts)
    more = {"loss__algorithm": "ipo", "loss__beta": beta, "rollout__samples": 50, "optim__lr": 0.01}
    given = options(root, **more, train__steps=80, optim__schedule="linear", train__out=tmp_path / "ipo")
    assert train.main(given) == 0
    found = distributions(tmp_path / "ipo" / "model").log() - distributions(root / "policy").log()
    for p, f in zip(counts, found, strict=True):
        pairs = [(a, b) for a in range(len(p)) for b in range(len(p)) if values[a] > values[b] and p[a] * p[b] > 0]
        a, b = torch.tensor(pairs).T
        roots = (p[a] * p[b]).sqrt()[:, None]
        rows = roots * torch.nn.functional.one_hot(a, len(p)) - roots * torch.nn.functional.one_hot(b, len(p))
        truth = torch.linalg.lstsq(rows, roots / (2 * beta), driver="gelsd").solution[:, 0]

        def centred(x, p=p):
            return (x - p @ x) * p.sqrt()

        assert centred(truth).norm() > 0.3
        assert centred(f - truth).norm() < 0.2 * centred(truth).norm()


@pytest.mark.parametrize("runs_of", [1, 2])
def test_the_report_shows_the_logged_curves(runs_of):
    rows = [
        {"step": i, "loss": 1.0, "logps/chosen": -3.0 - i, "logps/rejected": -4.0, "rewards/margins": 0.5 * i,
         "rewards/accuracies": 0.25 * i} for i in range(4)
    ]  # fmt: skip
    runs = {f"run {i}": Logged.of(rows) for i in range(runs_of)}
    panels = panels_of_run("run 0", runs["run 0"], {}) if runs_of == 1 else panels_of_runs(runs, {})
    shown = {panel.title: [series.points()[1].tolist() for series in panel.series] for panel in panels}
    log_probs = {"Completion log-probs": [[-3, -4, -5, -6], [-4] * 4]}
    if runs_of == 2:
        log_probs = {"Completion log-probs: chosen": [[-3, -4, -5, -6]], "Completion log-probs: rejected": [[-4] * 4]}
    others = {"Implicit reward margin": [0, 0.5, 1, 1.5], "Preference accuracy": [0, 0.25, 0.5, 0.75], "Loss": [1] * 4}
    expected = {title: curves * runs_of for title, curves in log_probs.items()}
    assert shown == expected | {title: [values] * runs_of for title, values in others.items()}


# --- stopping, and bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["bon_sft", "bonbon"])
def test_a_stopped_run_resumes_bit_for_bit(root, rollouts, tmp_path, monkeypatch, capsys, algorithm):
    more = {"loss__algorithm": algorithm, "optim__lr": 0.01, "rollout__prompts": 3, "offline__rejected": "random"}
    whole, stopped = (options(root, **more, train__steps=6, train__out=tmp_path / x) for x in ("whole", "stopped"))
    assert train.main(whole) == 0
    update, calls = offline.update, []

    def signalled(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*arguments, **keywords)

    monkeypatch.setattr(offline, "update", signalled)
    assert train.main(stopped) == 0
    assert "stopped and saved at step 3" in capsys.readouterr().out
    assert train.main(stopped) == 0
    assert "resuming from step 3" in capsys.readouterr().out
    weights = [decoder.load(tmp_path / x / "model", dtype=torch.float64).state_dict() for x in ("whole", "stopped")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    untimed = [
        [{k: v for k, v in step.items() if not k.startswith(("time/", "step_time", "perf/"))} for step in metrics]
        for metrics in (metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "stopped"))
    ]
    assert untimed[0] == untimed[1]
    assert len(untimed[0]) == 6


def test_unsuitable_rollouts_are_refused(root, rollouts, tmp_path):
    more = {"loss__algorithm": "dpo"}
    with pytest.raises(ValueError, match=r"rollout.samples = 64: .* has 50 samples per prompt; set 50 or less"):
        run_of(root, **more, rollout__samples=64)
    with pytest.raises(ValueError, match=r"sampled with temperature = 1, but the run has 0.5"):
        run_of(root, **more, rollout__temperature=0.5)
    with pytest.raises(ValueError, match="reward 'mostly' was not scored"):
        run_of(root, **more, rewards__mostly__function=f"{root / 'rewards.py'}:mostly")
    weightless = {"rewards__mostly__function": f"{root / 'rewards.py'}:mostly", "rewards__mostly__weight": 0.0}
    assert run_of(root, **more, **weightless).samples.unknown == 0
    with pytest.raises(ValueError, match=r"rollouts.json is missing"):
        run_of(root, **more, calibration__rollouts=tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "w9 w9"}) + "\n")
    with pytest.raises(ValueError, match=r"none of the 1 prompts of .*other.jsonl has rollouts in"):
        run_of(root, **more, data__source=other)


def test_rollouts_without_a_preference_or_a_reward(root, tmp_path):
    more = {"rewards__first__function": f"{root / 'rewards.py'}:same"}
    out = rolled_out(root, tmp_path / "same", 12, **more)
    with pytest.raises(ValueError, match=r"none of the 4 prompts .* has samples with different rewards"):
        run_of(root, **more, loss__algorithm="ipo", calibration__rollouts=out)
    assert run_of(root, **more, loss__algorithm="bon_sft", calibration__rollouts=out).samples.tied == 0
    more = {"rewards__first__function": f"{root / 'rewards.py'}:mostly"}
    out = rolled_out(root, tmp_path / "mostly", 12, **more)
    assert run_of(root, **more, loss__algorithm="dpo", calibration__rollouts=out).samples.rewards.isnan().any()
    (file, *_) = (out / "samples").glob("*/*.safetensors")
    file.unlink()
    with pytest.raises(ValueError, match="missing, damaged or not scored"):
        run_of(root, **more, loss__algorithm="dpo", calibration__rollouts=out)


def samples_of(rewards, per_step, n, paired=True):
    """Samples of prompts [0], [1], .. whose completions are their own number and place."""
    given = torch.tensor(rewards, dtype=torch.float64)
    rollouts = SimpleNamespace(
        row=lambda ids: ids[0], ids=lambda row: [[10 * row + place] for place in range(given.shape[1])]
    )
    prompts = PromptSet([[i] for i in range(len(given))], list("abc"[: len(given)]), [{}] * len(given), shuffle=False)
    counts = {"repeated": 0, "unknown": 0, "tied": 0, "unscored": 0}
    return offline.OfflineSamples(
        rollouts, given, prompts, **counts, paired=paired, config=OfflineConfig(n=n), per_step=per_step, seed=3
    )


@pytest.mark.parametrize("paired", [True, False])
def test_samples_without_a_reward_are_in_no_set(paired):
    """One missing reward costs one sample: the others of its prompt are still paired, and all prompts have sets."""
    nan = math.nan
    rewards = [[1.0, 2, 3, 4, 5, 6, 7, 8], [nan, 2, 3, 4, 5, 6, 7, 8], [nan] * 6 + [1.0, 2.0]]
    chosen = samples_of(rewards, per_step=8, n=2, paired=paired).choose(0, 3, ALONE)
    by_prompt = Counter(ids[0] for ids in chosen.prompt_ids[:: chosen.width])
    assert by_prompt == {0: 4, 1: 3, 2: 1}  # of 8, 7 and 2 samples
    assert chosen.total == 8
    for [prompt], [completion] in zip(chosen.prompt_ids, chosen.completion_ids, strict=True):
        assert not math.isnan(rewards[prompt][completion - 10 * prompt])
    if paired:
        for [(better,), (worse,)] in [[chosen.completion_ids[i] for i in own] for own in chosen.sets]:
            assert rewards[better // 10][better % 10] > rewards[worse // 10][worse % 10]
    whole = samples_of([rewards[0]] * 2, per_step=8, n=2, paired=paired).choose(0, 2, ALONE)
    assert [ids for ids in chosen.completion_ids if ids[0] < 10] == [ids for ids in whole.completion_ids if ids[0] < 10]


def test_prompts_with_too_few_rewards_are_counted(root, tmp_path, capsys):
    (root / "tasks.py").write_text(
        "def one(prompts, completion_ids, **_):\n"
        "    return [float(ids[0] % 8) if p in ('w3', 'w7') else None for p, ids in zip(prompts, completion_ids)]\n"
        "def other(prompts, completion_ids, **_):\n"
        "    return [float(ids[0] % 5) if p == 'w1 w2' else None for p, ids in zip(prompts, completion_ids)]\n"
    )
    more = {f"rewards__{name}__function": f"{root / 'tasks.py'}:{name}" for name in ("one", "other")}
    more |= {"rewards__first__weight": 0.0}
    out = rolled_out(root, tmp_path / "tasks", 12, **more)
    given = options(root, **more, loss__algorithm="dpo", calibration__rollouts=out)
    capsys.readouterr()
    assert train.main([*given, "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "prompts dropped: 1 with fewer than 2 samples with a reward" in printed
    assert "12 of 48 samples without a reward left out" in printed
    (root / "silent.py").write_text("def one(completion_ids, **_):\n    return [None for _ in completion_ids]\n")
    alone = {"rewards__one__function": f"{root / 'silent.py'}:one", "rewards__first__weight": 0.0}
    out = rolled_out(root, tmp_path / "none", 12, **alone)
    with pytest.raises(ValueError, match=r"none of the 4 prompts .* has offline.n = 2 samples with a reward"):
        run_of(root, **alone, loss__algorithm="dpo", calibration__rollouts=out)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"calibration": CalibrationConfig()}, "loss.algorithm = 'dpo': needs samples of the reference"),
        ({"offline": OfflineConfig(n=1)}, "offline.n = 1: allowed with .* is 2 to rollout.samples = 4"),
        ({"offline": OfflineConfig(n=5)}, "offline.n = 5: allowed with .* is 2 to rollout.samples = 4"),
        ({"offline": OfflineConfig(alpha=1.5)}, r"offline.alpha = 1.5: allowed is in \[0, 1\]"),
        ({"loss": LossConfig("dpo", beta=0.0)}, "loss.beta = 0: loss.algorithm = 'dpo' has no optimum"),
        ({"loss": LossConfig("ipo", beta=0.0)}, "loss.beta = 0: loss.algorithm = 'ipo'"),
        ({"loss": LossConfig("ipo", beta=-1.0)}, "loss.beta = -1.0: allowed is >= 0"),
        (
            {"loss": LossConfig("bonbon"), "offline": OfflineConfig(n=3, rejected="random")},
            "offline.rejected = 'random': the margin of bonbon is for the best and the worst of n",
        ),
        ({"loss": LossConfig("dpo", jeffreys=0.5)}, "loss.jeffreys = 0.5: only for online algorithms"),
        ({"loss": LossConfig("grpo", jeffreys=1.0)}, r"loss.jeffreys = 1.0: allowed is in \[0, 1\)"),
        (
            {"loss": LossConfig("grpo", jeffreys=0.5), "offline": OfflineConfig(n=5)},
            "offline.n = 5: allowed with loss.jeffreys is 1 to rollout.samples = 4",
        ),
        (
            {"loss": LossConfig("ppo", jeffreys=0.5), "calibration": CalibrationConfig(missing="draw")},
            "loss.jeffreys: needs samples of the reference",
        ),
        (
            {"loss": LossConfig("bonbon"), "offline": OfflineConfig(n=3, rejected="all")},
            "offline.rejected = 'all': the margin of bonbon is for the best and the worst of n",
        ),
        ({"loss": LossConfig("dpo", epochs=2)}, "loss.epochs = 2, loss.minibatches = 1: .* takes one optimizer step"),
        ({"loss": LossConfig("dpo", target_kl=0.1)}, "loss.target_kl needs completions of the policy"),
        ({"loss": LossConfig("dpo", aggregate="min")}, "loss.aggregate = 'min': .* the weighted sum"),
        ({"rewards": {"a": RewardConfig("equal(pattern='a')", "rao")}}, "rewards.a: .* 'rao' takes a similarity"),
    ],
)  # fmt: skip
def test_an_invalid_configuration_is_refused(changed, message):
    good = Config(
        rewards={"a": RewardConfig("length(target=2, scale=8)", transform="identity")},
        rollout=RolloutConfig(samples=4),
        calibration=CalibrationConfig("rollouts"),
        loss=LossConfig("dpo"),
    )
    validate.check_config(good)
    winners = replace(good, loss=LossConfig("bon_sft", beta=0.0), offline=OfflineConfig(n=1))
    validate.check_config(winners)
    validate.check_config(replace(winners, rollout=RolloutConfig(samples=1)))
    validate.check_config(replace(good, loss=LossConfig("bonbon"), offline=OfflineConfig(n=2, rejected="random")))
    with pytest.raises(ValueError, match=message):
        validate.check_config(replace(good, **changed))
