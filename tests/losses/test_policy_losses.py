"""Losses on packed tokens against padded loops, partitions, and the exact KL gradient by enumeration."""

import itertools
import math

import pytest
import torch

from nlgrpo import kernels
from nlgrpo.config.schema import LossConfig
from nlgrpo.kernels.reference import PolicyLossSettings
from nlgrpo.losses import policy
from nlgrpo.losses.policy import sequence_log_ratio, token_weights

LENGTHS = torch.tensor([5, 1, 0, 7, 3])
KINDS = ["grpo", "bnpo", "dapo", "dr_grpo"]
SURROGATES = ["ppo", "cispo", "reinforce"]


def with_settings(loss):
    """Return a loss that takes the fields of its settings as keywords."""

    def called(*tensors, **options):
        given = {name: options.pop(name) for name in PolicyLossSettings._fields if name in options}
        return loss(*tensors, **options, settings=PolicyLossSettings(**given))

    return called


packed_loss = with_settings(policy.packed_loss)
packed_loss_from_hidden = with_settings(policy.packed_loss_from_hidden)


def batch(seed=1):
    """Packed tokens of five responses, some of them far off the policy that sampled them."""
    g = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS)
    logprob, noise, ref = torch.randn(3, len(sequence), generator=g, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), generator=g, dtype=torch.float64)
    return {
        "logprob": logprob.requires_grad_(),
        "old_logprob": (logprob + 0.4 * noise).detach(),
        "advantages": advantages,
        "sequence": sequence,
        "ref_logprob": ref,
    }


def weights_of(kind, lengths=LENGTHS):
    """Of some of the five responses, which have 16 tokens together."""
    return token_weights(kind, lengths, sequences=5, tokens=16, max_length=8)


def normalised(kind, per_token):
    """Loss of a whole step from lists of per-token losses, one list a response, as the definitions say."""
    tokens = sum(map(len, per_token))
    if kind == "grpo":
        return sum(sum(row) / len(row) for row in per_token if row) / len(per_token)
    return sum(map(sum, per_token)) / (len(per_token) * 8 if kind == "dr_grpo" else tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "k3_iw"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_packed_loss_by_definition(kind, level, kl, surrogate):
    inputs = batch()
    logprob, old, ref, A = (inputs[n].tolist() for n in ("logprob", "old_logprob", "ref_logprob", "advantages"))
    per_token, start = [], 0
    for r, length in enumerate(LENGTHS.tolist()):
        tokens = range(start, start + length)
        mean = sum(logprob[t] - old[t] for t in tokens) / max(length, 1)
        row = []
        for t in tokens:
            rho = math.exp(mean if level == "sequence" else logprob[t] - old[t])
            d = ref[t] - logprob[t]
            k3 = math.exp(d) - d - 1
            penalty = {"k1": -d, "k2": d * d / 2, "k3": k3, "k3_iw": rho * k3}[kl]
            terms = {"ppo": -min(rho * A[r], min(max(rho, 0.9), 1.3) * A[r])}
            terms |= {"cispo": -min(rho, 1.3) * A[r] * logprob[t], "reinforce": -A[r] * logprob[t]}
            row.append(terms[surrogate] + 0.04 * penalty)
        per_token.append(row)
        start += length
    weights = weights_of(kind)
    options = {"eps_low": 0.1, "eps_high": 0.3, "beta": 0.04, "kl": kl, "surrogate": surrogate}
    loss, _ = packed_loss(**inputs, weights=weights, level=level, **options)
    assert loss.item() == pytest.approx(normalised(kind, per_token), abs=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", ["cispo", "reinforce"])
@pytest.mark.parametrize("kl", ["k1", "k3", "k3_iw"])
def test_gradients_of_the_score_by_autograd(level, surrogate, kl):
    """Compared with a padded loop: token weights are detached, the ratio of the importance-weighted k3 is not."""
    inputs = batch()
    truth = inputs["logprob"].detach().clone().requires_grad_()
    rows = [x.split(LENGTHS.tolist()) for x in (truth, inputs["old_logprob"], inputs["ref_logprob"])]
    loss = 0
    for r, (logprob, old, ref) in enumerate(zip(*rows, strict=True)):
        if not len(logprob):
            continue
        rho = ((logprob - old).mean() if level == "sequence" else logprob - old).exp()
        weight = rho.clamp(max=1.3).detach() if surrogate == "cispo" else 1
        d = ref - logprob
        penalty = {"k1": -d, "k3": d.exp() - d - 1, "k3_iw": rho * (d.exp() - d - 1)}[kl]
        loss = loss + (-weight * inputs["advantages"][r] * logprob + 0.3 * penalty).mean() / len(LENGTHS)
    loss.backward()
    weights = weights_of("grpo")
    options = {"level": level, "eps_high": 0.3, "beta": 0.3, "kl": kl, "surrogate": surrogate}
    packed_loss(**inputs, weights=weights, **options)[0].backward()
    torch.testing.assert_close(inputs["logprob"].grad, truth.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_any_partition_into_micro_batches_gives_the_same_loss_and_gradient(kind, level, surrogate):
    inputs = batch()
    weights = weights_of(kind)
    options = {"level": level, "beta": 0.1, "surrogate": surrogate}
    whole, stats = packed_loss(**inputs, weights=weights, **options)
    whole.backward()
    gradient, inputs["logprob"].grad = inputs["logprob"].grad, None
    sums = []
    for part in ([0, 3], [2], [4, 1]):
        here = [(inputs["sequence"] == r).nonzero()[:, 0] for r in part]
        tokens, sequence = torch.cat(here), torch.repeat_interleave(torch.arange(len(part)), LENGTHS[part])
        some = {n: inputs[n][tokens] for n in ("logprob", "old_logprob", "ref_logprob")}
        their_weights = weights_of(kind, LENGTHS[part])
        A = inputs["advantages"][part]
        loss, part_stats = packed_loss(**some, advantages=A, sequence=sequence, weights=their_weights, **options)
        loss.backward()
        sums.append({**part_stats, "loss": loss.detach()})
    torch.testing.assert_close(sum(s["loss"] for s in sums), whole.detach(), rtol=0, atol=1e-14)
    torch.testing.assert_close(inputs["logprob"].grad, gradient, rtol=0, atol=1e-14)
    for name, total in stats.items():
        parts = torch.stack([s[name] for s in sums])
        torch.testing.assert_close(parts.max() if name == "ratio_max" else parts.sum(), total)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_on_policy_gradient_is_that_of_the_score(level, surrogate):
    """rho = 1 everywhere: the gradient is -weight A grad log pi, at sequence level with A spread over the tokens."""
    inputs = batch()
    weights = weights_of("grpo")
    loss, stats = packed_loss(**{**inputs, "old_logprob": None}, weights=weights, level=level, surrogate=surrogate)
    loss.backward()
    truth = -(weights * inputs["advantages"])[inputs["sequence"]]
    torch.testing.assert_close(inputs["logprob"].grad, truth)
    assert stats["clip_region"] == 0
    assert stats["ratio_max"] == 1


def test_sequence_level_gradient_by_finite_differences():
    inputs = batch()
    weights = weights_of("dapo")
    others = {n: x for n, x in inputs.items() if n != "logprob"}
    assert torch.autograd.gradcheck(
        lambda x: packed_loss(x, **others, weights=weights, level="sequence", beta=0.3, kl="k3_iw")[0],
        inputs["logprob"],
    )


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_from_hidden_states_it_is_the_same(surrogate):
    inputs, g = batch(), torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 4, generator=g, dtype=torch.float64).requires_grad_() for n in (16, 7))
    targets = torch.randint(7, (16,), generator=g)
    logprob, _ = kernels.linear_logprob(hidden, weight, targets)
    inputs |= {"logprob": logprob, "old_logprob": (logprob + 0.4 * torch.randn(16, generator=g)).detach()}
    weights = weights_of("grpo")
    options = {"beta": 0.3, "kl": "k3_iw", "surrogate": surrogate}
    expected, expected_stats = packed_loss(**inputs, weights=weights, **options)
    sequence = inputs.pop("sequence")
    inputs |= {"advantages": inputs["advantages"][sequence], "weights": weights[sequence]}
    del inputs["logprob"]
    loss, stats, *_ = packed_loss_from_hidden(hidden, weight, targets, **inputs, **options)
    grads = [torch.autograd.grad(x, (hidden, weight)) for x in (loss, expected)]
    torch.testing.assert_close((loss, *grads[0]), (expected, *grads[1]), rtol=0, atol=1e-12)
    torch.testing.assert_close(stats, expected_stats)


def test_sequence_log_ratio():
    mean = sequence_log_ratio(torch.tensor([1.0, 2.0, 6.0, 4.0]), torch.tensor([2, 0, 2, 0]), 4)
    assert mean.tolist() == [3.0, 0.0, 3.5, 0.0]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_statistics_by_counting(level, surrogate):
    inputs = batch(seed=1)
    options = {"level": level, "eps_low": 0.1, "eps_high": 0.2, "surrogate": surrogate}
    _, stats = packed_loss(**inputs, weights=torch.ones(5), **options)
    log_ratio = (inputs["logprob"] - inputs["old_logprob"]).detach()
    A = inputs["advantages"]
    if level == "sequence":
        rows = log_ratio.split(LENGTHS.tolist())
        ratios = [(math.exp(row.mean()) if len(row) else 1.0, a) for row, a in zip(rows, A, strict=True)]
    else:
        ratios = [(math.exp(x), A[r]) for x, r in zip(log_ratio, inputs["sequence"], strict=True)]
    low = sum(rho < 0.9 and a < 0 for rho, a in ratios)
    high = sum(rho > 1.2 and a > 0 for rho, a in ratios)
    assert low > 0
    assert high > 0
    if surrogate != "ppo":
        low, high = 0, sum(rho > 1.2 for rho, _ in ratios) if surrogate == "cispo" else 0
    counted = {"clip_low": low, "clip_high": high, "clip_region": low + high, "ratios": len(ratios), "tokens": 16}
    assert {name: stats[name].item() for name in counted} == counted
    assert stats["ratio_max"].item() == pytest.approx(max(rho for rho, _ in ratios))
    d = (inputs["ref_logprob"] - inputs["logprob"]).detach()
    torch.testing.assert_close(stats["kl"], (d.exp() - d - 1).sum())
    assert not any(x.requires_grad for x in stats.values())


def test_only_the_weighted_k3_has_the_gradient_of_the_divergence_off_policy():
    """All letters of a small policy, weighted by the older policy that sampled them; d KL(pi || ref) by autograd."""
    old, ref = torch.randn(2, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64).log_softmax(1)
    logits = torch.linspace(-1, 1, 6, dtype=torch.float64, requires_grad=True)
    logprob = logits.log_softmax(0)
    (truth,) = torch.autograd.grad((logprob.exp() * (logprob - ref)).sum(), logits, retain_graph=True)
    errors = {}
    for kl in ("k3", "k3_iw"):
        loss, _ = packed_loss(
            logprob, old, torch.zeros(6), torch.arange(6), old.exp(), ref_logprob=ref, beta=1.0, kl=kl
        )
        (ours,) = torch.autograd.grad(loss, logits, retain_graph=True)
        errors[kl] = (ours - truth).abs().max().item()
    assert errors["k3_iw"] < 1e-12
    assert errors["k3"] > 1e-2


def test_no_tokens():
    empty = torch.zeros(0, requires_grad=True)
    loss, stats = packed_loss(
        empty, None, torch.ones(2), torch.zeros(0, dtype=torch.long), token_weights("grpo", torch.zeros(2), sequences=2,
        tokens=0, max_length=4), ref_logprob=torch.zeros(0), beta=0.1, level="sequence",
    )  # fmt: skip
    loss.backward()
    assert loss == 0
    assert stats["tokens"] == 0
    assert empty.grad.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_token_weights_of_nothing_are_finite(kind):
    assert token_weights(kind, torch.zeros(3), sequences=3, tokens=0, max_length=4).isfinite().all()
    assert token_weights(kind, torch.zeros(0), sequences=3, tokens=9, max_length=4).shape == (0,)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "ppo"}, "'grpo', 'bnpo', 'dapo' or 'dr_grpo'"),
        ({"sequences": 2}, "at least 3"),
        ({"tokens": 0}, "tokens=0"),
        ({"kind": "dr_grpo", "max_length": 0}, "max_length=0"),
    ],
)
def test_token_weights_refuse(change, says):
    good = {"kind": "dapo", "lengths": torch.tensor([1, 2, 3]), "sequences": 3, "tokens": 6, "max_length": 4}
    with pytest.raises(ValueError, match=says):
        token_weights(**{**good, **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"level": "batch"}, "'token' or 'sequence'"),
        ({"logprob": torch.ones(2, 8)}, r"\(T,\)"),
        ({"sequence": torch.zeros(3, dtype=torch.long)}, r"\(3,\)"),
        ({"old_logprob": torch.ones(1)}, r"old_logprob \(16,\)"),
        ({"ref_logprob": torch.ones(1)}, "ref_logprob"),
        ({"weights": torch.ones(4)}, r"\(5,\) and \(4,\)"),
        ({"kl": "kl"}, "k1, k2, k3, k3_iw"),
        ({"surrogate": "grpo"}, "surrogate='grpo' is not known; expected one of ppo, cispo, reinforce"),
        ({"surrogate": "cispo", "dual_clip": 2.0}, "dual_clip=2.0: expected None with surrogate='cispo'"),
        ({"surrogate": "reinforce", "dual_clip": 2.0, "level": "sequence"}, "surrogate='reinforce'"),
        ({"beta": 0.1, "ref_logprob": None}, "needs ref_logprob"),
    ],
)
def test_packed_loss_refuses(change, says):
    with pytest.raises(ValueError, match=says):
        packed_loss(**{**batch(), "weights": torch.ones(5), **change})


def test_every_combination_is_finite_for_wild_ratios():
    """A response that the policy has all but forgotten, and one that only it would write."""
    logprob = torch.tensor([-1e4, -1e4, -1e-3, -1e-3], requires_grad=True)
    old, sequence = torch.tensor([-1.0, -1.0, -1e4, -1e4]), torch.tensor([0, 0, 1, 1])
    kls = ("k1", "k2", "k3", "k3_iw")
    for level, kl, sign, surrogate in itertools.product(("token", "sequence"), kls, (1, -1), SURROGATES):
        A = sign * torch.tensor([1.0, -1.0])
        options = {"level": level, "beta": 0.1, "kl": kl, "surrogate": surrogate}
        loss, stats = packed_loss(logprob, old, A, sequence, torch.ones(2), ref_logprob=old, **options)
        (gradient,) = torch.autograd.grad(loss, logprob)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert all(x.isfinite() for x in stats.values())


def gradients_of_the_kl(config, *, off_policy):
    """Expected gradient of the KL in the loss, and that of KL(pi || ref) at each token; over all responses of 2 tokens.

    The response is sampled by ``old``, which is the policy itself unless ``off_policy``. Each prefix has logits of its
    own: 3 for the first token, and 3 after each of them.
    """
    generator = torch.Generator().manual_seed(3)
    logits, shift, ref = torch.randn(3, 4, 3, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logprob = logits.log_softmax(-1)
    old = (logits.detach() + 0.5 * off_policy * shift).log_softmax(-1)
    ref = ref.log_softmax(-1)
    responses = list(itertools.product(range(3), repeat=2))
    places = torch.tensor([place for a, b in responses for place in ((0, a), (1 + a, b))])
    taken = [table[places[:, 0], places[:, 1]] for table in (logprob, old, ref)]
    drawn = taken[1].view(-1, 2).sum(-1).exp()  # probability of each response
    loss, _ = policy.packed_loss(
        taken[0], taken[1], torch.zeros(9), torch.arange(9).repeat_interleave(2), drawn, level=config.level,
        ref_logprob=taken[2], settings=config.settings(1.0),
    )  # fmt: skip
    (ours,) = torch.autograd.grad(loss, logits, retain_graph=True)
    divergence = (logprob.exp() * (logprob - ref)).sum(-1)
    visits = torch.cat([torch.ones(1, dtype=torch.float64), old[0].exp()])
    (truth,) = torch.autograd.grad((visits * divergence).sum(), logits)
    return ours.flatten(), truth.flatten()


@pytest.mark.parametrize("off_policy", [False, True])
def test_the_default_kl_has_the_gradient_of_the_divergence_at_each_token(off_policy):
    ours, truth = gradients_of_the_kl(LossConfig(beta=1.0), off_policy=off_policy)
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("change", [{"kl_importance": False}, {"level": "sequence"}])
def test_other_forms_of_k3_have_another_gradient(change):
    ours, truth = gradients_of_the_kl(LossConfig(beta=1.0, **change), off_policy=False)
    assert (ours - truth).norm() > 0.05 * truth.norm()


def test_k2_has_the_gradient_of_the_divergence_on_policy_at_any_level():
    ours, truth = gradients_of_the_kl(LossConfig(beta=1.0, kl="k2", level="sequence"), off_policy=False)
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)
