"""The update against plain PyTorch on transformers' model: no packing, no micro-batches, one sequence at a time.

Everything is float64 and the model a GPT-2, whose norms transformers computes in the type of the weights.
"""

import math
from dataclasses import replace

import pytest
import torch
from support.helpers import as_exported, random_rollout, tiny_model
from support.updates import (
    CASES,
    EPS,
    LIMIT,
    SEED,
    M,
    P,
    assert_near,
    by_name,
    logprobs_of,
    make_learner,
    make_rollout,
    plain_loss,
    some_advantages,
    update,
)

from nlgrpo.config.schema import LossConfig, OptimConfig
from nlgrpo.engine import logprobs
from nlgrpo.engine.generation import Rollout
from nlgrpo.kernels import head
from nlgrpo.objectives.advantages import advantages as to_advantages
from nlgrpo.objectives.registry import BestOfN, linearize_present
from nlgrpo.training.schedules import learning_rate

NORMALIZATIONS = ["grpo", "bnpo", "dapo", "dr_grpo"]
MICRO = [1, 40, 10**6]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy and a reference that differ, as directories and as transformers models."""
    root = tmp_path_factory.mktemp("models")
    theirs = {name: tiny_model(root / name, "gpt2", seed=seed) for seed, name in enumerate(("policy", "reference"))}
    return root, theirs


@pytest.fixture(scope="module")
def rollout():
    return make_rollout()


# --- plain PyTorch ----------------------------------------------------------------------------------------------------


def plain_update(theirs, reference, rollout, adv, cfg, *, lr=0.01, max_grad_norm=0.0, step=0):
    """The whole update; the gradients of each optimiser step by name, and the metrics."""
    decays = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decays}, {"params": others}], lr=lr, eps=EPS, weight_decay=0.0)
    adv, lengths = adv.flatten(), rollout.lengths.flatten().tolist()
    with torch.no_grad():
        old = [logp for logp, _ in logprobs_of(theirs, rollout)]
        ref = [logp for logp, _ in logprobs_of(reference, rollout)] if cfg.beta > 0 else [None] * len(old)
    gradients, losses, norms, sums = [], [], [], []
    for epoch in range(cfg.epochs):
        order = torch.randperm(P * M, generator=torch.Generator().manual_seed(SEED + step * cfg.epochs + epoch))
        for part in order.tensor_split(cfg.minibatches):
            rows = part.tolist()
            total = torch.zeros((), dtype=torch.float64)
            for r, (logp, entropy) in zip(rows, logprobs_of(theirs, rollout, rows), strict=True):
                divide = {
                    "grpo": lengths[r] * len(rows),
                    "bnpo": sum(lengths[i] for i in rows),
                    "dapo": sum(lengths) / cfg.minibatches,
                    "dr_grpo": len(rows) * LIMIT,
                }[cfg.normalization]
                loss, *rest = plain_loss(cfg, logp, old[r], ref[r], adv[r], divide)
                total = total + loss
                sums.append((*rest, entropy.detach().sum(), lengths[r]))
            optimizer.zero_grad()
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm or math.inf)
            gradients.append({name: p.grad.clone() for name, p in theirs.named_parameters()})
            losses.append(float(total.detach()))
            norms.append(float(norm))
            optimizer.step()
    kl, ratios, low, high, dual, entropy, tokens = zip(*sums, strict=True)
    count, ratios = sum(tokens), torch.cat(ratios)
    metrics = {
        "loss": sum(losses) / len(losses),
        "entropy": float(sum(entropy)) / count,
        "grad_norm": sum(norms) / len(norms),
        "clip_ratio/low_mean": float(sum(low)) / len(ratios),
        "clip_ratio/high_mean": float(sum(high)) / len(ratios),
        "clip_ratio/region_mean": float(sum(low) + sum(high)) / len(ratios),
        "ratio/max": float(ratios.max()),
    }
    if cfg.dual_clip is not None:
        metrics["clip_ratio/dual_mean"] = float(sum(dual)) / len(ratios)
    return gradients, metrics | ({"kl": float(sum(kl)) / count} if cfg.beta > 0 else {})


def assert_metrics(ours, truth):
    assert truth.keys() <= ours.keys()
    for name, value in truth.items():
        assert ours[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


# --- the loss and its gradient ----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_one_step_is_that_of_plain_pytorch_for_any_micro_batch_size(folders, rollout, normalization, level):
    root, theirs = folders
    cfg = LossConfig(normalization=normalization, level=level, beta=0.3)
    adv = some_advantages()
    policy = tiny_model(root / "copy", "gpt2", seed=0)
    gradients, metrics = plain_update(policy, theirs["reference"], rollout, adv, cfg)
    assert metrics["kl"] > 0.01
    for micro in MICRO:
        learner = make_learner(root, cfg, micro=micro)
        assert_metrics(update(learner, rollout, adv), metrics)
        assert len(learner.optimizer.gradients) == 1
        assert_near(by_name(learner, learner.optimizer.gradients[0]), gradients[0])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_two_epochs_of_two_minibatches_are_those_of_plain_pytorch(folders, rollout, case, tmp_path):
    root, theirs = folders
    cfg = replace(CASES[case], epochs=2, minibatches=2)
    adv = 3 * some_advantages()
    policy = tiny_model(tmp_path, "gpt2", seed=0)
    gradients, metrics = plain_update(policy, theirs["reference"], rollout, adv, cfg, step=7)
    assert metrics["ratio/max"] > 1.05  # the policy has moved away from what sampled
    if case in ("token", "sequence", "no reference"):
        assert metrics["clip_ratio/low_mean"] > 0
        assert metrics["clip_ratio/high_mean"] > 0
    if case.startswith("cispo"):
        assert metrics["clip_ratio/high_mean"] > 0
    assert metrics.get("clip_ratio/dual_mean", 1) > 0
    truth = dict(policy.named_parameters())
    for micro in (20, 10**6):
        learner = make_learner(root, cfg, micro=micro)
        ours = update(learner, rollout, adv, step=7)
        assert_metrics(ours, metrics)
        for found, expected in zip(learner.optimizer.gradients, gradients, strict=True):
            assert_near(by_name(learner, found), expected)
        assert_near(as_exported(learner.model, dict(learner.model.named_parameters())), truth)


def test_minibatches_of_unequal_size_and_more_of_them_than_groups(folders, rollout, tmp_path):
    root, _ = folders
    cfg = LossConfig(normalization="dapo", beta=0.0, minibatches=5)
    policy = tiny_model(tmp_path, "gpt2", seed=0)
    _, metrics = plain_update(policy, None, rollout, some_advantages(), cfg)
    learner = make_learner(root, cfg, micro=20)
    assert_metrics(update(learner, rollout, some_advantages()), metrics)
    assert len(learner.optimizer.gradients) == 5
    assert_near(as_exported(learner.model, dict(learner.model.named_parameters())), dict(policy.named_parameters()))


@pytest.mark.parametrize("share", [0.3, 3.0])
def test_the_gradient_is_clipped_as_torch_clips_it(folders, rollout, share, tmp_path):
    root, theirs = folders
    cfg, adv = LossConfig(beta=0.3), some_advantages()
    free = plain_update(tiny_model(tmp_path / "a", "gpt2"), theirs["reference"], rollout, adv, cfg)[1]["grad_norm"]
    limit = share * free
    policy = tiny_model(tmp_path / "b", "gpt2")
    gradients, _ = plain_update(policy, theirs["reference"], rollout, adv, cfg, max_grad_norm=limit)
    learner = make_learner(root, cfg, micro=20, optim=OptimConfig(eps=EPS, max_grad_norm=limit))
    assert update(learner, rollout, adv)["grad_norm"] == pytest.approx(free, rel=1e-9)  # the norm before
    assert_near(by_name(learner, learner.optimizer.gradients[0]), gradients[0])
    norm = torch.stack([g.norm() for g in learner.optimizer.gradients[0]]).norm()
    assert float(norm) == pytest.approx(min(limit, free), rel=1e-5)


def test_scores_and_the_kl_in_the_reward(folders, rollout):
    root, theirs = folders
    learner = make_learner(root, LossConfig(beta=0.3, kl_in="reward"), micro=20)
    with torch.no_grad():
        truth = {name: [logp for logp, _ in logprobs_of(theirs[name], rollout)] for name in theirs}
    ref = learner.reference_logprobs(rollout)
    for r, expected in enumerate(truth["reference"]):
        torch.testing.assert_close(ref[r, : len(expected)], expected, rtol=1e-12, atol=0)
        assert not ref[r, len(expected) :].any()
    ratios = [float((a - b).sum()) for a, b in zip(truth["policy"], truth["reference"], strict=True)]
    expected = -0.7 * torch.tensor(ratios, dtype=torch.float64).view(P, M)
    torch.testing.assert_close(learner.kl_reward(rollout, ref, 0.7), expected, rtol=1e-10, atol=0)


def test_the_policy_scores_a_rollout_once_before_its_update(folders, rollout, monkeypatch):
    loss = LossConfig(beta=0.3, kl_in="reward", correction="tis:2", minibatches=2)
    learner = make_learner(folders[0], loss, micro=20)
    scored = []
    completion_logprobs = logprobs.completion_logprobs

    def counted(model, *given):
        scored.append(model)
        return completion_logprobs(model, *given)

    monkeypatch.setattr(logprobs, "completion_logprobs", counted)
    corrected = learner.corrected(rollout)
    ref = learner.reference_logprobs(rollout)
    learner.kl_reward(rollout, ref, 0.3)
    learner.update(rollout, some_advantages(), step=0, lr=0.01, beta=0.3, ref_logprobs=ref, corrected=corrected)
    assert scored.count(learner.model) == 1
    assert not torch.equal(learner.policy_logprobs(rollout), corrected.policy)  # the weights have changed
    assert scored.count(learner.model) == 2


# --- groups that count nowhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_equal_rewards_have_a_gradient_of_exactly_zero(folders, rollout, normalization):
    adv = to_advantages(linearize_present(BestOfN(4), torch.full((P, M), 0.3, dtype=torch.float64)))
    learner = make_learner(folders[0], LossConfig(normalization=normalization, beta=0.0), micro=20)
    stats = update(learner, rollout, adv)
    assert stats["grad_norm"] == 0
    assert not any(g.any() for g in learner.optimizer.gradients[0])


def without(rollout, dropped):
    kept = ~dropped
    prompts = [p for p, k in zip(rollout.prompt_ids, kept.tolist(), strict=True) if k]
    return Rollout(prompts, *(x[kept] for x in (rollout.tokens, rollout.logprobs, rollout.lengths, rollout.finished)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_dropped_groups_do_not_count(folders, rollout, normalization, level, epochs):
    cfg = LossConfig(normalization=normalization, level=level, beta=0.3, epochs=epochs)
    adv, dropped = some_advantages(), torch.tensor([False, True, False, True])
    ours, truth = make_learner(folders[0], cfg, micro=30), make_learner(folders[0], cfg, micro=30)
    stats = update(ours, rollout, adv, dropped=dropped)
    expected = update(truth, without(rollout, dropped), adv[~dropped])
    assert_metrics(stats, expected)
    assert stats["loss"] != pytest.approx(update(make_learner(folders[0], cfg), rollout, adv)["loss"], rel=1e-3)
    for found, known in zip(ours.optimizer.gradients, truth.optimizer.gradients, strict=True):
        for a, b in zip(found, known, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14)


def test_an_update_with_all_groups_dropped_changes_nothing(folders, rollout):
    learner = make_learner(folders[0], LossConfig(beta=0.3, epochs=2), optim=OptimConfig(eps=EPS, weight_decay=0.1))
    update(learner, rollout, some_advantages())  # from here on AdamW has momentum
    before = [p.detach().clone() for p in learner.model.parameters()]
    stats = update(learner, rollout, some_advantages(), dropped=torch.ones(P, dtype=torch.bool))
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    assert stats["grad_norm"] == 0


def test_the_learner_reports_the_difference_to_the_samplers_log_probs(folders, rollout):
    """Compared before the policy changes: in the first minibatch of the first epoch."""
    root, theirs = folders
    with torch.no_grad():
        truth = [logp for logp, _ in logprobs_of(theirs["policy"], rollout)]
    logprobs = rollout.logprobs.double().flatten(0, 1)
    for r, logp in enumerate(truth):
        logprobs[r, : len(logp)] = logp + 0.01 * (r + 1)
    sampled = replace(rollout, logprobs=logprobs.view(rollout.tokens.shape))
    stats = update(make_learner(root, LossConfig(beta=0.0), micro=20), sampled, some_advantages())
    gaps = torch.cat([torch.full((len(logp),), 0.01 * (r + 1)) for r, logp in enumerate(truth)])
    assert stats["sampling/logp_difference/mean"] == pytest.approx(float(gaps.mean()), rel=1e-6)
    assert stats["sampling/logp_difference/max"] == pytest.approx(0.12, rel=1e-6)
    cfg = LossConfig(beta=0.0, epochs=2, minibatches=2)
    rows = torch.randperm(P * M, generator=torch.Generator().manual_seed(SEED)).tensor_split(2)[0]
    first = torch.cat([torch.full((len(truth[r]),), 0.01 * (r + 1)) for r in rows.tolist()])
    stats = update(make_learner(root, cfg, micro=20), sampled, some_advantages())
    assert stats["sampling/logp_difference/mean"] == pytest.approx(float(first.mean()), rel=1e-6)


# --- the optimiser ----------------------------------------------------------------------------------------------------


def test_norms_and_biases_do_not_decay(folders, rollout):
    optim = OptimConfig(eps=EPS, weight_decay=0.1)
    learner = make_learner(folders[0], LossConfig(beta=0.0), optim=optim)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    stats = update(learner, rollout, torch.zeros(P, M, dtype=torch.float64), lr=0.5)  # the gradient is 0
    assert stats["learning_rate"] == 0.5
    kinds = {p.dim() for p in before.values()}
    assert kinds == {1, 2}
    for name, p in learner.model.named_parameters():
        expected = before[name] * (1 - 0.5 * 0.1) if p.dim() > 1 else before[name]
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", 0, [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("cosine", 0, [(1 + math.cos(math.pi * t / 8)) / 2 for t in range(8)]),
        ("constant", 3, [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1]),
        ("linear", 4, [1 / 4, 2 / 4, 3 / 4, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", 2, [1 / 2, 1, *((1 + math.cos(math.pi * t / 6)) / 2 for t in range(6))]),
        ("linear", 20, [(t + 1) / 20 for t in range(8)]),
    ],
)
def test_learning_rates(schedule, warmup, expected):
    optim = OptimConfig(lr=0.02, schedule=schedule, warmup_steps=warmup)
    rates = [learning_rate(optim, step, 8) for step in range(8)]
    assert rates == pytest.approx([0.02 * x for x in expected], rel=1e-12)


def test_a_step_never_holds_the_logits_of_all_its_tokens(tmp_path, monkeypatch):
    """The largest single allocation of an update is a block of 64 tokens' logits; 108 tokens are trained on."""
    vocab = 5000
    for seed, name in enumerate(("policy", "reference")):
        tiny_model(tmp_path / name, "gpt2", seed=seed, vocab_size=vocab)
    learner = make_learner(tmp_path, LossConfig(beta=0.1))
    rollout = random_rollout(torch.full((P, M), LIMIT), [1, 4, 2, 6])
    monkeypatch.setattr(head, "BLOCK_BYTES", {"cpu": 1})  # as small as blocks get
    watch = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with watch:
        update(learner, rollout, some_advantages())
    largest = max(e.nbytes() for e in watch.profiler.kineto_results.events() if e.name() == "[memory]")
    assert P * M * LIMIT == 108
    assert largest == 64 * vocab * torch.float64.itemsize
