"""Importance weights of a rollout: their definition, the update with them, and the expected gradient by enumeration.

As in test_learner, the update is compared with plain PyTorch on transformers' model, in float64.
"""

import itertools
import math

import pytest
import torch
from support.helpers import tiny_model
from support.updates import (
    CASES,
    LIMIT,
    TEMPERATURE,
    assert_near,
    by_name,
    logprobs_of,
    make_learner,
    make_rollout,
    plain_loss,
    some_advantages,
)

from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import LossConfig
from nlgrpo.engine import generation
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.sampling import Sampling
from nlgrpo.losses.correction import metrics
from nlgrpo.model import decoder
from nlgrpo.objectives.aggregation import combine
from nlgrpo.objectives.importance_sampling import Correction, kl_sum, parse_correction
from nlgrpo.objectives.registry import BestOfN, Mean, WorstOfN
from nlgrpo.rewards.reward_functions import Scores
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.global_batch import GlobalBatch

ONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    theirs = {name: tiny_model(root / name, "gpt2", seed=seed) for seed, name in enumerate(("policy", "reference"))}
    return root, theirs


@pytest.fixture(scope="module")
def sampled(folders):
    """A rollout whose log-probs are those of another model."""
    rollout, logprobs = make_rollout(), torch.zeros(make_rollout().tokens.shape, dtype=torch.float64).flatten(0, 1)
    other = tiny_model(folders[0] / "sampler", "gpt2", seed=9)
    with torch.no_grad():
        policy = [logp for logp, _ in logprobs_of(folders[1]["policy"], rollout)]
        for row, (here, (there, _)) in enumerate(zip(policy, logprobs_of(other, rollout), strict=True)):
            logprobs[row, : len(here)] = here + 0.3 * (there - here)
    return Rollout(rollout.prompt_ids, rollout.tokens, logprobs.view(rollout.tokens.shape), rollout.lengths,
                   rollout.finished)  # fmt: skip


# --- the weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ratio", "expected"),
    [
        ("tis:2", [0.0, 0.5, 2.0, 2.5, 9.0], [0.0, 0.5, 2.0, 2.0, 2.0]),
        ("tis:inf", [0.0, 0.5, 2.0, 2.5, 9.0], [0.0, 0.5, 2.0, 2.5, 9.0]),
        ("mis:0.5:2", [0.4, 0.5, 1.0, 2.0, 2.1], [0.0, 0.5, 1.0, 2.0, 0.0]),
        ("mis:0:inf", [0.0, 0.5, 9.0], [0.0, 0.5, 9.0]),
        ("mis:0.1:inf", [0.05, 0.5, 9.0], [0.0, 0.5, 9.0]),
    ],
)
def test_ratios_are_truncated_or_masked(text, ratio, expected):
    correction = parse_correction(text)
    assert str(correction) == text
    assert correction.cut(torch.tensor(ratio)).tolist() == pytest.approx(expected)


def test_no_correction():
    assert parse_correction("none") is None
    assert LossConfig().correction == "none"


@pytest.mark.parametrize("text", ["", "tis", "tis:", "tis:a", "tis:1:2", "mis:1", "mis:1:2:3", "ris:2", "tis:nan", "2"])
def test_an_unknown_correction_is_refused(text):
    with pytest.raises(ValueError, match=r"expected 'none', 'tis:C' or 'mis:LOW:HIGH'"):
        parse_correction(text)


@pytest.mark.parametrize("text", ["tis:0", "tis:-1", "mis:2:1", "mis:-1:1", "mis:1:1"])
def test_bounds_that_are_not_ordered_are_refused(text):
    with pytest.raises(ValueError, match="expected bounds 0 <= LOW < HIGH"):
        parse_correction(text)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_products_over_tokens(level):
    generator = torch.Generator().manual_seed(0)
    policy, sampler = (-torch.rand(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    sampler[1, 2:] = -torch.inf  # past the end
    lengths = torch.tensor([4, 2, 0])
    ratios = Correction("tis", 0.0, 1.1, level).ratios(policy, sampler, lengths)
    expected, all_tokens, all_rows = torch.zeros(3, 4, dtype=torch.float64), [], []
    for row, length in enumerate(lengths.tolist()):
        each = [math.exp(policy[row, t] - sampler[row, t]) for t in range(length)]
        all_tokens += each
        all_rows.append(math.prod(each))
        for t in range(length):
            expected[row, t] = min(1.1, each[t] if level == "token" else math.prod(each))
    torch.testing.assert_close(ratios.tokens, expected)
    uncut = torch.tensor(all_tokens if level == "token" else all_rows, dtype=torch.float64)
    torch.testing.assert_close(ratios.uncut, uncut)
    torch.testing.assert_close(ratios.weights, uncut.clamp(max=1.1))
    assert (ratios.completions is None) == (level == "token")
    k3 = sum(ratio - 1 - math.log(ratio) for ratio in all_tokens)
    assert float(kl_sum(policy, sampler, lengths)) == pytest.approx(k3)


def test_a_ratio_too_large_for_float64_is_limited():
    policy, sampler = torch.zeros(1, 2), torch.full((1, 2), -900.0)
    ratios = Correction("tis", 0.0, math.inf).ratios(policy, sampler, torch.tensor([2]))
    assert float(ratios.completions) == pytest.approx(math.exp(20))


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_log_prob_that_no_sampler_can_have_is_refused(value):
    with pytest.raises(ValueError, match="log-prob of the sampler is not finite"):
        Correction("tis", 0.0, 2.0).ratios(torch.zeros(1, 2), torch.tensor([[-1.0, value]]), torch.tensor([2]))


def test_metrics(folders, sampled):
    learner = make_learner(folders[0], LossConfig(correction="mis:0.7:1.3"))
    corrected = learner.corrected(sampled)
    found = metrics(corrected.sums, corrected.extremes)
    policy = learner.logprobs_of(learner.model, sampled)
    w = (policy - sampled.logprobs.flatten(0, 1)).sum(-1).exp()
    kept = torch.where((w >= 0.7) & (w <= 1.3), w, 0)
    name = "sampling/importance_sampling_ratio"
    assert found[f"{name}/mean"] == pytest.approx(float(kept.mean()))
    assert (found[f"{name}/min"], found[f"{name}/max"]) == pytest.approx((float(kept.min()), float(kept.max())))
    assert found[f"{name}/cut"] == pytest.approx(float((kept != w).double().mean()))
    assert 0 < found[f"{name}/cut"] < 1
    assert found[f"{name}/ess"] == pytest.approx(float(kept.sum() ** 2 / kept.square().sum() / len(kept)))
    each = torch.cat([row[:n] for row, n in zip(policy - sampled.logprobs.flatten(0, 1), sampled.lengths.flatten())])
    assert found["sampling/kl"] == pytest.approx(float((each.exp() - 1 - each).mean()))


# --- the update -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("correction", ["tis:1.05", "mis:0.9:1.1", "tis:inf"])
@pytest.mark.parametrize("correction_level", ["token", "sequence"])
@pytest.mark.parametrize("case", ["token", "sequence", "cispo", "no reference"])
def test_the_update_is_that_of_plain_pytorch(folders, sampled, case, correction, correction_level):
    root, theirs = folders
    cfg = LossConfig(**{**vars(CASES[case]), "correction": correction, "correction_level": correction_level})
    adv, lengths = some_advantages(), sampled.lengths.flatten().tolist()
    policy = tiny_model(root / "copy", "gpt2", seed=0)
    with torch.no_grad():
        ref = [logp for logp, _ in logprobs_of(theirs["reference"], sampled)] if cfg.beta else [None] * len(lengths)
    total, cuts = torch.zeros((), dtype=torch.float64), 0
    for row, (logp, _) in enumerate(logprobs_of(policy, sampled)):
        w = (logp.detach() - sampled.logprobs.flatten(0, 1)[row, : len(logp)]).exp()
        w = w.prod().expand_as(w) if correction_level == "sequence" else w
        cut = {
            "tis:1.05": w.clamp(max=1.05),
            "mis:0.9:1.1": torch.where((w >= 0.9) & (w <= 1.1), w, 0),
            "tis:inf": w,
        }[correction]
        cuts += int((cut != w).sum())
        divide = {"grpo": lengths[row] * len(lengths), "dapo": sum(lengths)}[cfg.normalization]
        loss, *_ = plain_loss(cfg, logp, logp.detach(), ref[row], adv.flatten()[row], divide / cut)
        total = total + loss
    assert (cuts > 0) == (correction != "tis:inf")
    total.backward()
    for micro in (1, 40, 10**6):
        learner = make_learner(root, cfg, micro=micro)
        corrected = learner.corrected(sampled)
        stats = learner.update(
            sampled, adv, step=0, lr=0.01, beta=cfg.beta, ref_logprobs=learner.reference_logprobs(sampled),
            corrected=corrected,
        )  # fmt: skip
        assert stats["loss"] == pytest.approx(float(total.detach()), rel=1e-9)
        assert stats.items() >= metrics(corrected.sums, corrected.extremes).items()
        gradients = {name: p.grad for name, p in policy.named_parameters()}
        assert_near(by_name(learner, learner.optimizer.gradients[0]), gradients)


def test_weights_of_1_are_no_correction(folders, sampled):
    """Two epochs of two minibatches with log-probs of the policy itself as those of the sampler."""
    adv, updated = some_advantages(), []
    for correction in ("none", "tis:2"):
        learner = make_learner(folders[0], LossConfig(beta=0.0, epochs=2, minibatches=2, correction=correction))
        own = learner.logprobs_of(learner.model, sampled).view(sampled.tokens.shape)
        rollout = Rollout(sampled.prompt_ids, sampled.tokens, own, sampled.lengths, sampled.finished)
        learner.update(rollout, adv, step=0, lr=0.01, beta=0.0, corrected=learner.corrected(rollout))
        updated.append([p.detach().clone() for p in learner.model.parameters()])
    assert all(map(torch.equal, *updated))


# --- exact by enumeration ---------------------------------------------------------------------------------------------

V, PROMPT, M = 4, [3], 3
WORDS = [[2], *([a, b] for a in (0, 1, 3) for b in range(V))]  # every completion of at most 2 tokens; 2 ends one
REWARDS = torch.randn(len(WORDS), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
OTHERS = torch.randn(len(WORDS), generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def word_logprobs(model):
    """Log-prob (words, 2) of each token of each completion, by transformers' model at the temperature."""
    out = torch.zeros(len(WORDS), 2, dtype=torch.float64)
    rows = []
    for word in WORDS:
        logits = model(torch.tensor([PROMPT + word])).logits[0, :-1, :V] / TEMPERATURE
        logp = logits.log_softmax(-1)[range(len(word)), word]
        rows.append(torch.cat([logp, out.new_zeros(2 - len(word))]))
    return torch.stack(rows)


def expected_best(logprobs, rewards, n, sign=1.0):
    """E max (or -max of the negated) of n completions, over all n-tuples."""
    tuples = torch.tensor(list(itertools.product(range(len(WORDS)), repeat=n)))
    chance = logprobs.sum(-1)[tuples].sum(-1).exp()
    return (chance * sign * (sign * rewards)[tuples].amax(-1)).sum()


MIXTURES = {
    "GRPO": {"a": (Mean(), 1.0)},
    "best of 2": {"a": (BestOfN(2, "unbiased"), 1.0)},
    "best of 3": {"a": (BestOfN(3, "unbiased"), 1.0)},
    "a mixture": {"a": (BestOfN(2, "unbiased"), 0.6), "b": (WorstOfN(2, "unbiased"), 0.3)},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    root = tmp_path_factory.mktemp("small")
    changes = {"vocab_size": V, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    models = {name: tiny_model(root / name, "gpt2", seed=seed, scale=0.12, **changes)
              for seed, name in enumerate(("policy", "sampler"))}  # fmt: skip
    return root, models


@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_expected_gradient_of_another_sampler_is_exact(small, mixture):
    """All groups of 3 completions that the sampler can draw, through linearisation, loss and backward pass."""
    root, models = small
    users = MIXTURES[mixture]
    with torch.no_grad():
        sampler = word_logprobs(models["sampler"])
    groups = torch.tensor(list(itertools.product(range(len(WORDS)), repeat=M)))
    chance = sampler.sum(-1)[groups].sum(-1).exp()
    assert float(chance.sum()) == pytest.approx(1)
    tokens = torch.tensor([word + [0] * (2 - len(word)) for word in WORDS])[groups]
    lengths = torch.tensor([len(word) for word in WORDS])[groups]
    rollout = Rollout([PROMPT] * len(groups), tokens, sampler[groups], lengths, lengths < 2)
    cfg = LossConfig(beta=0.0, normalization="dr_grpo", baseline="loo", correction="tis:inf")

    learner = make_learner(root, cfg)
    corrected = learner.corrected(rollout)
    rewards = {name: (REWARDS if name == "a" else OTHERS)[groups] for name in users}
    scores = Scores(values=rewards, skipped=torch.zeros(len(groups), dtype=torch.bool))
    batch = GlobalBatch.gather(ONE, scores, rollout, weights=corrected.completions)
    objectives = {name: objective for name, (objective, _) in users.items()}
    weights = torch.tensor([weight for _, weight in users.values()], dtype=torch.float64)
    linear = combine(batch.linearize(objectives, "loo"), weights)
    share = chance[:, None] * len(groups) * LIMIT  # in place of the mean over groups and the constant length
    learner.update(rollout, linear * share, step=0, lr=0.0, beta=0.0, corrected=corrected)
    found = by_name(learner, learner.optimizer.gradients[0])

    policy = models["policy"]
    policy.zero_grad()
    logprobs = word_logprobs(policy)
    truth = sum(
        weight * {
            "mean": lambda r: (logprobs.sum(-1).exp() * r).sum(),
            "bon": lambda r, o=objective: expected_best(logprobs, r, o.n),
            "wor": lambda r, o=objective: expected_best(logprobs, r, o.n, sign=-1.0),
        }[objective.name.split(":")[0]](REWARDS if name == "a" else OTHERS)
        for name, (objective, weight) in users.items()
    )  # fmt: skip
    (-truth).backward()
    assert_near(found, {name: p.grad for name, p in policy.named_parameters()}, rtol=1e-8)

    uncorrected = make_learner(root, LossConfig(beta=0.0, normalization="dr_grpo", baseline="loo"))
    plain = combine(GlobalBatch.gather(ONE, scores, rollout).linearize(objectives, "loo"), weights)
    uncorrected.update(rollout, plain * share, step=0, lr=0.0, beta=0.0)
    with pytest.raises(AssertionError):
        assert_near(by_name(uncorrected, uncorrected.optimizer.gradients[0]),
                    {name: p.grad for name, p in policy.named_parameters()}, rtol=0.05)  # fmt: skip


@pytest.mark.parametrize("sampling", [Sampling(top_k=4), Sampling(top_p=0.6), Sampling(min_p=0.4)], ids=str)
def test_a_filter_is_another_sampler(folders, sampling):
    """The ratio of policy and filtered policy is the probability of the tokens that a filter kept."""
    model = decoder.load(folders[0] / "policy", dtype=torch.float64)
    sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=LIMIT, top_k=sampling.top_k, top_p=sampling.top_p,
                        min_p=sampling.min_p)  # fmt: skip
    rollout = generation.generate(model, [[5, 6], [7]], 4, sampling, seed=1)
    learner = make_learner(folders[0], LossConfig())
    ratios = Correction("tis", 0.0, math.inf, "token").ratios(
        learner.logprobs_of(learner.model, rollout), rollout.logprobs.flatten(0, 1), rollout.lengths.flatten()
    )
    theirs, kept = folders[1]["policy"], []
    for r, completion in enumerate(rollout.completion_ids()):
        prompt = rollout.prompt_ids[r // 4]
        with torch.no_grad():
            probs = (theirs(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).softmax(
                -1
            )
        for row in probs.sort(descending=True, dim=-1).values:
            if sampling.top_k:
                kept.append(float(row[: sampling.top_k].sum()))
            elif sampling.top_p < 1:
                kept.append(float(row[: int((row.cumsum(0) < sampling.top_p).sum()) + 1].sum()))
            else:
                kept.append(float(row[row >= sampling.min_p * row[0]].sum()))
    assert max(kept) < 1
    torch.testing.assert_close(ratios.uncut, torch.tensor(kept, dtype=torch.float64), rtol=1e-6, atol=1e-8)


# --- the configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss.correction", "tis"], "loss.correction: correction 'tis' is not known; expected 'none', 'tis:C'"),
        (["--loss.correction", "mis:3:2"], "expected bounds 0 <= LOW < HIGH"),
        (["--loss.correction", "tis:2", "--loss.algorithm", "dpo"], "only for online algorithms; 'dpo' is offline"),
        (["--loss.correction", "tis:2", "--rewards.short.objective", "bon:4:kde"], "takes no importance weights"),
    ],
)
def test_a_correction_that_does_not_fit_is_refused(arguments, message):
    from nlgrpo.config import validate

    cfg, _ = from_arguments(["length-bon", *arguments])
    with pytest.raises(ValueError, match=message):
        validate.check_config(cfg)
