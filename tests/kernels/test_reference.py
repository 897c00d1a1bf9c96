"""Reference ops compared with torch.distributions, loops and float64."""

import math

import pytest
import torch
from torch.distributions import Categorical

from nlgrpo import kernels


def head(T, D, V, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in [(T, D), (V, D), (V,)])
    targets = torch.randint(V, (T,), generator=g)
    return (hidden / math.sqrt(D)).to(dtype), weight.to(dtype), targets, bias.to(dtype)


@pytest.mark.parametrize(("T", "D", "V"), [(13, 7, 103), (1, 16, 64), (3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_linear_logprob_equals_torch_categorical(T, D, V, dtype, temperature):
    hidden, weight, targets, bias = head(T, D, V, dtype)
    logits = (hidden.double() @ weight.double().T + bias.double()) / temperature
    truth = Categorical(logits=logits)
    logprob, entropy = kernels.linear_logprob(hidden, weight, targets, bias=bias, temperature=temperature)
    assert logprob.dtype == entropy.dtype == dtype
    tolerance = {"atol": 2e-5 if dtype == torch.float32 else 1e-12, "rtol": 0}
    torch.testing.assert_close(logprob.double(), truth.log_prob(targets), **tolerance)
    torch.testing.assert_close(entropy.double(), truth.entropy(), **tolerance)


def test_no_tokens():
    hidden, weight, targets, bias = head(0, 16, 64, torch.float32)
    logprob, entropy = kernels.linear_logprob(hidden.requires_grad_(), weight, targets, bias=bias)
    assert logprob.shape == entropy.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 16)


def test_bfloat16_logits_are_widened_before_the_softmax():
    hidden, weight, targets, _ = head(9, 8, 50, torch.bfloat16)
    logprob, entropy = kernels.linear_logprob(hidden, weight, targets)
    truth = Categorical(logits=(hidden @ weight.T).double())
    assert logprob.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprob.double(), truth.log_prob(targets), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), truth.entropy(), atol=1e-5, rtol=0)


def test_gradients_by_finite_differences():
    hidden, weight, targets, bias = head(4, 3, 6, torch.float64)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(
        lambda h, w, b: kernels.linear_logprob(h, w, targets, bias=b, temperature=0.7), inputs, fast_mode=False
    )


def test_forbidden_tokens_have_no_entropy_and_no_gradient():
    logits = torch.tensor([[1.0, 2.0, -torch.inf], [0.0, -torch.inf, -torch.inf]], requires_grad=True)
    logprob, entropy = kernels.token_logprob(logits, torch.tensor([1, 0]))
    truth = Categorical(logits=torch.tensor([1.0, 2.0])).entropy()
    torch.testing.assert_close(entropy, torch.stack([truth, torch.tensor(0.0)]))
    (logprob.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[logits == -torch.inf] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.ones(2, 3, 4)}, r"hidden \(T, D\)"),
        ({"weight": torch.ones(5, 3)}, r"\(2, 4\) and \(5, 3\)"),
        ({"targets": torch.tensor([0, 1, 2])}, r"targets \(2,\)"),
        ({"targets": torch.tensor([0.0, 1.0])}, "int64"),
        ({"bias": torch.ones(4)}, r"bias \(5,\)"),
        ({"temperature": 0.0}, "> 0"),
        ({"temperature": math.nan}, "> 0"),
        ({"impl": "cuda"}, "'cuda' is not known"),
    ],
)
def test_linear_logprob_refuses(change, message):
    good = {"hidden": torch.ones(2, 4), "weight": torch.ones(5, 4), "targets": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=message):
        kernels.linear_logprob(**{**good, **change})


def one_token(logprob, old, A, ref, eps_low, eps_high, beta, kl, dual_clip=math.inf):
    """Loss of a single token in Python floats."""
    rho, d = math.exp(logprob - old), ref - logprob
    k3 = math.exp(d) - d - 1
    penalty = {"k1": -d, "k2": d * d / 2, "k3": k3, "k3_iw": rho * k3}[kl]
    gain = min(rho * A, min(max(rho, 1 - eps_low), 1 + eps_high) * A)
    if A < 0:
        gain = max(gain, dual_clip * A)
    return -gain + beta * penalty


@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "k3_iw"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_policy_loss_by_hand(kl, dual_clip):
    g = torch.Generator().manual_seed(1)
    logprob, noise, A, ref = torch.randn(4, 200, generator=g, dtype=torch.float64)
    old = logprob + 0.5 * noise
    ours = kernels.policy_loss(
        logprob, old, A, ref_logprob=ref, eps_low=0.1, eps_high=0.3, dual_clip=dual_clip, beta=0.04, kl=kl
    )
    hand = [
        one_token(*row, 0.1, 0.3, 0.04, kl, dual_clip or math.inf)
        for row in torch.stack([logprob, old, A, ref], 1).tolist()
    ]
    torch.testing.assert_close(ours, torch.tensor(hand, dtype=torch.float64), atol=1e-12, rtol=0)
    inside = (logprob - old).exp()
    assert ((inside < 0.9) & (A < 0)).any()
    assert ((inside > 1.5) & (A < 0)).any()
    assert ((inside > 1.3) & (A > 0)).any(), "the clips have to be met for the comparison to mean something"


@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "k3_iw"])
def test_policy_loss_gradient_by_finite_differences(kl):
    g = torch.Generator().manual_seed(2)
    logprob, noise, A, ref = torch.randn(4, 30, generator=g, dtype=torch.float64)
    old = logprob + noise
    assert torch.autograd.gradcheck(
        lambda x: kernels.policy_loss(x, old, A, ref_logprob=ref, beta=0.3, kl=kl), logprob.requires_grad_()
    )
    ratio = (0.4 * noise).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, y: kernels.policy_loss(x, old, A, log_ratio=y, ref_logprob=ref, beta=0.3, kl=kl), (logprob, ratio)
    )


def test_on_policy_gradient_is_minus_advantage():
    logprob = torch.randn(6, requires_grad=True)
    A = torch.randn(6)
    kernels.policy_loss(logprob, logprob.detach(), A).sum().backward()
    torch.testing.assert_close(logprob.grad, -A)


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "k3_iw"])
def test_masked_tokens_may_contain_anything(poison, kl):
    mask = torch.tensor([True, False, True, False])
    tensors = {name: torch.randn(4) for name in ("logprob", "old_logprob", "advantages", "ref_logprob")}
    clean = {name: x[mask].requires_grad_(name == "logprob") for name, x in tensors.items()}
    truth = kernels.policy_loss(**clean, beta=0.1, kl=kl)
    truth.sum().backward()
    for name in tensors:
        dirty = {n: x.clone() for n, x in tensors.items()}
        dirty[name][~mask] = poison
        dirty["logprob"].requires_grad_()
        ours = kernels.policy_loss(**dirty, mask=mask, beta=0.1, kl=kl)
        ours.sum().backward()
        assert (ours[~mask] == 0).all()
        assert (dirty["logprob"].grad[~mask] == 0).all()
        torch.testing.assert_close(ours[mask], truth)
        torch.testing.assert_close(dirty["logprob"].grad[mask], clean["logprob"].grad)


@pytest.mark.parametrize("kl", ["k3", "k3_iw"])
def test_extreme_log_probabilities_give_finite_results(kl):
    logprob = torch.tensor([-1e4, 0.0, -1e4, 0.0], requires_grad=True)
    old = torch.tensor([0.0, -1e4, 0.0, -1e4])
    loss = kernels.policy_loss(logprob, old, torch.tensor([1.0, -1.0, -1.0, 1.0]), ref_logprob=old, beta=0.1, kl=kl)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logprob.grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old_logprob": torch.ones(2)}, r"old_logprob of the shape of logprob \(3,\), got \(2,\)"),
        ({"advantages": torch.ones(3, 1)}, "advantages"),
        ({"mask": torch.ones(4)}, "mask"),
        ({"beta": 0.1}, "needs ref_logprob"),
        ({"kl": "k4"}, "k1, k2, k3, k3_iw"),
        ({"eps_low": 1.5}, "eps_low=1.5"),
        ({"eps_high": -0.1}, "eps_high=-0.1"),
        ({"dual_clip": 1.2}, r"dual_clip=1\.2: expected None or a number > 1 \+ eps_high"),
        ({"impl": "cuda"}, "'cuda' is not known to policy_loss"),
    ],
)
def test_policy_loss_refuses(change, message):
    good = dict.fromkeys(["logprob", "old_logprob", "advantages"], torch.ones(3))
    with pytest.raises(ValueError, match=message):
        kernels.policy_loss(**{**good, **change})


def by_definition(rewards, weights):
    """Compute r~_j as minus the sum of the weighted gaps above reward j, gap by gap."""
    out = torch.zeros(rewards.shape, dtype=torch.float64)
    for p, row in enumerate(rewards.tolist()):
        ordered = sorted(row)
        for j, r in enumerate(row):
            gaps = [(w, b - a) for w, a, b in zip(weights.tolist(), ordered, ordered[1:], strict=False) if a >= r]
            out[p, j] = -math.fsum(w * gap for w, gap in gaps)
    return out


@pytest.mark.parametrize(("P", "M"), [(5, 8), (3, 1), (2, 2), (0, 4), (4, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distinct", [1000, 3, 1])
def test_linearize_by_definition(P, M, dtype, distinct):
    g = torch.Generator().manual_seed(M)
    rewards = (torch.randint(distinct, (P, M), generator=g) / 7).to(dtype)
    weights = torch.randn(M, generator=g, dtype=dtype)
    ours = kernels.linearize(rewards, weights)
    assert ours.dtype == dtype
    torch.testing.assert_close(
        ours.double(), by_definition(rewards, weights), atol=1e-3 if dtype == torch.float32 else 1e-10, rtol=1e-5
    )


def test_linearize_weights_of_one_give_r_minus_max():
    rewards = torch.randn(4, 9, dtype=torch.float64)
    torch.testing.assert_close(kernels.linearize(rewards, torch.ones(9)), rewards - rewards.amax(1, keepdim=True))


def test_linearize_any_strides_and_narrow_dtypes():
    wide = torch.randn(8, 12, dtype=torch.float64)
    weights = torch.rand(4, dtype=torch.float64)
    for view in (wide.T[::3, ::2], wide[:, ::3], wide[:1, :4].expand(5, 4), wide.flip(1)[:, 1:5]):
        torch.testing.assert_close(kernels.linearize(view, weights), by_definition(view, weights))
    half = torch.tensor([[1.0, 3.0, 2.0, 3.0]], dtype=torch.float16)
    assert kernels.linearize(half, weights).dtype == torch.float32
    torch.testing.assert_close(kernels.linearize(half.long(), torch.ones(4)), torch.tensor([[-2.0, 0.0, -1.0, 0.0]]))


def test_linearize_infinities():
    inf = torch.inf
    rewards = torch.tensor([[-inf, 1.0, -inf, 0.0], [inf, 0.0, inf, 1.0], [inf, inf, inf, inf], [-inf, 0, 2, inf]])
    ours = kernels.linearize(rewards, torch.tensor([1.0, 1.0, 1.0, 1.0]))
    assert ours.tolist() == [[-inf, 0, -inf, -1], [0, -inf, 0, -inf], [0, 0, 0, 0], [-inf, -inf, -inf, 0]]
    ours = kernels.linearize(rewards, torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert ours[0].tolist() == [-1, 0, -1, -1], "a gap of weight 0 is 0, also when infinite"


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        (torch.tensor([[0.0, 1.0], [2.0, torch.nan]]), torch.ones(2), "group 1, sample 1 is NaN"),
        (torch.ones(3), torch.ones(3), r"rewards \(P, M\)"),
        (torch.ones(3, 0), torch.ones(0), "M >= 1"),
        (torch.ones(3, 2), torch.ones(3), r"weights \(2,\)"),
    ],
)
def test_linearize_refuses(rewards, weights, message):
    with pytest.raises(ValueError, match=message):
        kernels.linearize(rewards, weights)


@pytest.mark.slow
def test_every_op_compiles_into_one_graph():
    """aot_eager traces forward and backward as inductor would; ``fullgraph`` makes a graph break an error."""
    hidden, weight, targets, bias = head(6, 4, 11, torch.float64)
    A, ref = torch.randn(2, 6, dtype=torch.float64)

    def step(hidden, rewards):
        logprob, entropy = kernels.linear_logprob(hidden, weight, targets, bias=bias)
        loss = kernels.policy_loss(logprob, ref, A, ref_logprob=ref, mask=A > -1, beta=0.1, kl="k3_iw")
        return loss.sum() + entropy.sum(), kernels.linearize(rewards, A)

    rewards = torch.randn(3, 6, dtype=torch.float64)
    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = hidden.clone().requires_grad_()
        loss, linear = run(leaf, rewards)
        loss.backward()
        results.append((loss.detach(), linear, leaf.grad))
    torch.testing.assert_close(*results)
