"""`policy_loss` compared with autograd through the reference in float64; masked tokens; recompilations."""

import math

import pytest
import torch
from support.head_ops import SECOND_DERIVATIVE
from torch._dynamo.testing import CompileCounterWithBackend

from nlgrpo import kernels
from nlgrpo.kernels import reference

pytest.importorskip("triton")
KINDS = ["none", "k1", "k2", "k3", "k3_iw"]
SURROGATES = ["ppo", "cispo", "reinforce"]


@pytest.fixture(params=["torch", "triton"])
def impl(request):
    """Implementations of an op that has no compiled version."""
    return request.param


def tokens(T, device, seed=0):
    """Log-probs with ratios below, inside and above the clip range, and above the clamp at e^20."""
    g = torch.Generator().manual_seed(seed)
    logprob, old, ref, A = torch.randn(4, T, generator=g, dtype=torch.float64)
    old = logprob + 0.4 * old
    ref = logprob + ref
    if T > 3:
        old[0], ref[1], old[2] = logprob[0] - 30, logprob[1] + 30, logprob[2]  # old[2]: on policy
    return [x.to(device) for x in (logprob, old, A, ref)]


def evaluate(function, inputs, upstream):
    """Return loss and gradients of the ``inputs`` (logprob, old, ref or log-ratio), and the statistics."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss, statistics = function(*leaves)
    loss.backward(upstream.to(loss))
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [loss.detach(), *grads], statistics


def close(ours, truth):
    for x, y in zip(ours, truth, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=2e-6, rtol=2e-5)


# KL, number of tokens, with a mask, dual clip: each pair of two values once or more.
PPO = [
    (kind, T, (i + j) % 2 == 1, (None, 1.6)[(i // 2 + j) % 2])
    for i, kind in enumerate(KINDS)
    for j, T in enumerate((1, 1000, 1025))
]


@pytest.mark.parametrize(("kind", "T", "with_mask", "dual_clip"), PPO)
def test_loss_gradients_and_statistics(impl, device, kind, T, with_mask, dual_clip):
    logprob, old, A, ref = tokens(T, device)
    inputs = [logprob.float(), old.float(), ref.float()]  # float64 of the very numbers that the kernel reads
    A, mask = A.float(), torch.arange(T, device=device) % 3 > 0 if with_mask else None
    upstream = torch.randn(T, 2, device=device)[:, 0]
    options = {"mask": mask, "eps_low": 0.1, "eps_high": 0.3, "dual_clip": dual_clip}

    def ours(logprob, old, ref):
        more = {} if kind == "none" else {"ref_logprob": ref, "beta": 0.7, "kl": kind}
        return kernels.policy_loss_with_statistics(logprob, old, A, impl=impl, **options, **more)

    def truth(logprob, old, ref):
        more = {} if kind == "none" else {"ref_logprob": ref, "beta": 0.7, "kl": kind}
        loss = reference.policy_loss(logprob, old, A.double(), **options, **more)
        return loss, counted(logprob, old, A.double(), ref, kind, **options)

    ours, statistics = evaluate(ours, inputs, upstream)
    truth, expected = evaluate(truth, [x.double() for x in inputs], upstream.double())
    close(ours, truth)
    assert statistics.keys() == expected.keys()
    for name in statistics:
        assert statistics[name].item() == pytest.approx(expected[name], rel=1e-4), name


def counted(logprob, old, A, ref, kind, *, mask, eps_low, eps_high, dual_clip, surrogate="ppo"):
    """Compute the statistics token by token."""
    rows = torch.stack([logprob, old, A, ref], 1).tolist()
    rows = rows if mask is None else [row for row, kept in zip(rows, mask.tolist(), strict=True) if kept]
    ratios = [math.exp(min(row[0] - row[1], 20)) for row in rows]
    pairs = [(rho, row[2]) for rho, row in zip(ratios, rows, strict=True)]
    found = {
        "clip_low": sum(rho < 1 - eps_low and a < 0 for rho, a in pairs),
        "clip_high": sum(rho > 1 + eps_high and a > 0 for rho, a in pairs),
        "ratio_max": max(ratios, default=0.0),
    }
    if surrogate != "ppo":
        above = sum(rho > 1 + eps_high for rho, _ in pairs)
        found |= {"clip_low": 0, "clip_high": above if surrogate == "cispo" else 0}
    if dual_clip is not None:
        found["clip_dual"] = sum(rho > dual_clip and a < 0 for rho, a in pairs)
    if kind != "none":
        d = [min(row[3] - row[0], 20) if kind in ("k3", "k3_iw") else row[3] - row[0] for row in rows]
        k3 = [math.expm1(x) - x for x in d]
        weighted = [rho * x for rho, x in zip(ratios, k3, strict=True)]
        terms = {"k1": [-x for x in d], "k2": [x * x / 2 for x in d], "k3": k3, "k3_iw": weighted}
        found["kl"] = sum(terms[kind])
    return found


def formula(surrogate, kind, logprob, log_ratio, A, ref, mask, *, eps_high, beta):
    """Loss of "cispo" and "reinforce" with a KL penalty by definition, in float64; 0 outside the mask."""
    rho = log_ratio.clamp(max=20).exp()
    weight = torch.minimum(rho.detach(), torch.tensor(1 + eps_high)) if surrogate == "cispo" else 1
    loss, d = -weight * A * logprob, ref - logprob
    k3 = d.clamp(max=20).exp() - d.clamp(max=20) - 1
    penalty = {"none": 0 * d, "k1": -d, "k2": d * d / 2, "k3": k3, "k3_iw": rho * k3}[kind]
    loss = loss + beta * penalty
    return loss if mask is None else loss * mask


# Surrogate, KL, with a mask, with a ratio of its own: each pair of two values once or more.
OTHERS = [
    (surrogate, kind, (i + j) % 2 == 1, (i + j // 2) % 2 == 1)
    for i, surrogate in enumerate(("cispo", "reinforce"))
    for j, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("surrogate", "kind", "with_mask", "own_ratio"), OTHERS)
def test_cispo_and_reinforce_equal_their_formulas(impl, device, surrogate, kind, with_mask, own_ratio):
    """Loss, all gradients and statistics. About a third of the ratios is above the cap."""
    T, eps_high, beta = 1025, 0.2, 0.7
    logprob, old, A, ref = (x.float() for x in tokens(T, device))
    mask = torch.arange(T, device=device) % 3 > 0 if with_mask else None
    inputs, upstream = [logprob, old, ref, 1.1 * (logprob - old)], torch.randn(T, 2, device=device)[:, 0]

    def ours(logprob, old, ref, log_ratio):
        more = {} if kind == "none" else {"ref_logprob": ref, "beta": beta, "kl": kind}
        return kernels.policy_loss_with_statistics(
            logprob, old, A, mask=mask, eps_high=eps_high, surrogate=surrogate, impl=impl,
            log_ratio=log_ratio if own_ratio else None, **more,
        )  # fmt: skip

    def truth(logprob, old, ref, log_ratio):
        ratio = log_ratio if own_ratio else logprob - old
        loss = formula(surrogate, kind, logprob, ratio, A.double(), ref, mask, eps_high=eps_high, beta=beta)
        limits = {"mask": mask, "eps_low": 0.2, "eps_high": eps_high, "dual_clip": None}
        before = logprob - ratio
        return loss, counted(logprob, before, A.double(), ref, kind, surrogate=surrogate, **limits)

    ours, statistics = evaluate(ours, inputs, upstream)
    truth, expected = evaluate(truth, [x.double() for x in inputs], upstream.double())
    close(ours, truth)
    assert surrogate == "reinforce" or 0.2 * T < expected["clip_high"] * (1.5 if with_mask else 1) < 0.5 * T
    assert statistics.keys() == expected.keys()
    for name in statistics:
        assert statistics[name].item() == pytest.approx(expected[name], rel=1e-4), name


def test_cispo_caps_the_weight_where_ppo_drops_the_token(impl, device):
    """With ratio 2 and eps_high 0.5, ppo has no gradient for A = 1, and that of the unclipped ratio for A = -1."""
    old, A = torch.full((2,), -3.0, device=device), torch.tensor([1.0, -1.0], device=device)
    found = {}
    for surrogate in SURROGATES:
        logprob = (old + math.log(2)).requires_grad_()
        loss = kernels.policy_loss(logprob, old, A, eps_high=0.5, surrogate=surrogate, impl=impl)
        (found[surrogate],) = torch.autograd.grad(loss.sum(), logprob)
    assert found["ppo"].tolist() == pytest.approx([0, 2])
    assert found["cispo"].tolist() == pytest.approx([-1.5, 1.5])
    assert found["reinforce"].tolist() == [-1, 1]


@pytest.mark.parametrize("surrogate", ["cispo", "reinforce"])
@pytest.mark.parametrize("kind", ["none", "k3", "k3_iw"])
def test_gradients_of_cispo_and_reinforce_by_finite_differences(surrogate, kind):
    """log_ratio is a separate constant, so the stopped gradient does not depend on the log-prob."""
    logprob, old, A, ref = tokens(40, "cpu", seed=3)
    ratio = (logprob - old)[3:]

    def loss(logprob, A, ref):
        more = {} if kind == "none" else {"ref_logprob": ref, "beta": 0.7, "kl": kind}
        return kernels.policy_loss(logprob, old[3:], A, log_ratio=ratio, surrogate=surrogate, **more)

    assert torch.autograd.gradcheck(loss, [x[3:].requires_grad_() for x in (logprob, A, ref)])


@pytest.mark.parametrize("surrogate", ["cispo", "reinforce"])
def test_a_logprob_of_minus_infinity_gives_no_nan(impl, device, surrogate):
    """Loss and gradient are 0 with advantage 0, and in cispo also with ratio 0. Other REINFORCE losses are infinite."""
    logprob = torch.full((4,), -math.inf, device=device).requires_grad_()
    old = torch.tensor([-1.0, -math.inf, -1.0, -1.0], device=device)
    A = torch.tensor([0.0, 0.0, 2.0, -2.0], device=device)
    loss = kernels.policy_loss(logprob, old, A, surrogate=surrogate, impl=impl)
    (grad,) = torch.autograd.grad(loss.sum(), logprob)
    if surrogate == "cispo":
        assert loss.tolist() == grad.tolist() == [0, 0, 0, 0]
    else:
        assert loss.tolist() == [0, 0, math.inf, -math.inf]
        assert grad[:2].tolist() == [0, 0]


def test_reinforce_does_not_depend_on_old_logprob(impl, device):
    logprob, _, A, ref = (x.float() for x in tokens(20, device))
    poison = torch.full_like(logprob, math.nan)
    options = {"ref_logprob": ref, "beta": 0.1, "kl": "k2", "surrogate": "reinforce", "impl": impl}
    leaf = logprob.requires_grad_()
    loss = kernels.policy_loss(leaf, poison, A, **options)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(loss, -A * logprob + 0.1 * (ref - logprob) ** 2 / 2)
    torch.testing.assert_close(grad, -A - 0.1 * (ref - logprob))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surrogate": "grpo"}, "surrogate='grpo' is not known; expected one of ppo, cispo, reinforce"),
        ({"surrogate": None}, "surrogate=None is not known"),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "expected None with surrogate='cispo'"),
        ({"surrogate": "reinforce", "dual_clip": 3.0}, "expected None with surrogate='reinforce'"),
        ({"surrogate": "cispo", "eps_high": -0.1}, "eps_high=-0.1"),
        ({"surrogate": "reinforce", "beta": 0.1}, "needs ref_logprob"),
    ],
)
@pytest.mark.parametrize("function", [kernels.policy_loss, kernels.policy_loss_with_statistics])
def test_invalid_surrogate_options_are_refused(function, change, message):
    x = torch.ones(3)
    with pytest.raises(ValueError, match=message):
        function(x, x, x, **change)


def test_log_ratio_has_its_own_gradient(device):
    logprob, old, A, ref = (x.float() for x in tokens(600, device))

    def loss(impl):
        def run(logprob, log_ratio, ref):
            return kernels.policy_loss_with_statistics(
                logprob, old.to(logprob), A.to(logprob), log_ratio=log_ratio, ref_logprob=ref, beta=0.2, kl="k3_iw",
                impl=impl,
            )  # fmt: skip

        return run

    inputs, upstream = [logprob, logprob - old, ref], torch.ones(600, device=device)
    ours, _ = evaluate(loss("triton"), inputs, upstream)
    truth, _ = evaluate(loss("torch"), [x.double() for x in inputs], upstream)
    close(ours, truth)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_masked_tokens_may_contain_anything(impl, device, poison, surrogate):
    logprob, old, A, ref = (x.float() for x in tokens(50, device))
    mask = torch.arange(50, device=device) % 2 == 0
    bad = [x.masked_fill(~mask, poison).requires_grad_() for x in (logprob, old, ref)]
    loss, statistics = kernels.policy_loss_with_statistics(
        bad[0], bad[1], A, ref_logprob=bad[2], mask=mask, beta=0.5, surrogate=surrogate, impl=impl
    )
    loss.sum().backward()
    assert (loss[~mask] == 0).all()
    assert loss.isfinite().all()
    for x in bad:
        assert x.grad is None or (x.grad.isfinite().all() and (x.grad[~mask] == 0).all())
    assert bad[0].grad[mask].abs().min() > 0
    assert all(value.isfinite() for value in statistics.values())


def test_a_small_kl_is_accurate(device):
    """e^d - 1 - d is d^2 / 2 for small d; computed as a difference it has no correct digit at d = 1e-5."""
    d = torch.tensor([1e-5, -1e-5, 1e-3, 0.3, 0.5, -0.5, 2.0], device=device)
    zero = torch.zeros_like(d)
    loss = kernels.policy_loss(zero, zero, zero, ref_logprob=d, beta=1.0, impl="triton")
    truth = torch.expm1(d.double()) - d.double()
    assert (loss.double() / truth - 1).abs().max() < 1e-6


def test_shapes_and_no_tokens(device):
    x = torch.randn(3, 5, device=device)
    loss = kernels.policy_loss(x.T, x.T - 0.1, x.T, mask=x.T > 0, impl="triton")
    torch.testing.assert_close(loss, reference.policy_loss(x.T, x.T - 0.1, x.T, mask=x.T > 0))
    for surrogate in SURROGATES:
        none = x[:0, 0].detach().requires_grad_()
        loss, statistics = kernels.policy_loss_with_statistics(
            none, none, none.detach(), surrogate=surrogate, impl="triton"
        )
        loss.sum().backward()
        assert none.grad.shape == (0,)
        assert statistics["ratio_max"] == 0


def test_advantages_may_require_a_gradient(device):
    x = torch.randn(5, device=device)
    A = torch.randn(5, device=device, requires_grad=True)
    kernels.policy_loss(x, x, A).sum().backward()
    torch.testing.assert_close(A.grad, -torch.ones_like(A))
    with pytest.raises(ValueError, match="no gradient with respect to the advantages"):
        kernels.policy_loss(x, x, A, impl="triton")


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_nan_is_not_hidden(impl, device, surrogate, advantage):
    """If a ratio is NaN, so are its loss and the largest ratio; other tokens are unchanged."""
    x = torch.tensor([0.0, math.nan, 0.1], device=device, requires_grad=True)
    old, A = torch.zeros(3, device=device), torch.full((3,), advantage, device=device)
    loss, statistics = kernels.policy_loss_with_statistics(
        x, old, A, ref_logprob=old, beta=0.1, surrogate=surrogate, impl=impl
    )
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False]
    assert x.grad[[0, 2]].isfinite().all()
    assert statistics["ratio_max"].isnan()
    assert statistics["kl"].isnan()


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_are_computed_in_float32(impl, device, dtype, surrogate):
    inputs = [x.to(dtype).requires_grad_(i == 0) for i, x in enumerate(tokens(300, device))]
    wide = [x.detach().float().requires_grad_(i == 0) for i, x in enumerate(inputs)]
    options = {"beta": 0.3, "kl": "k3", "dual_clip": 3.0 if surrogate == "ppo" else None, "surrogate": surrogate}
    ours = kernels.policy_loss(*inputs[:3], ref_logprob=inputs[3], impl=impl, **options)
    truth = reference.policy_loss(*wide[:3], ref_logprob=wide[3], **options)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-5)
    (grad,) = torch.autograd.grad(ours.sum().clamp(max=1e30), inputs[0])
    (expected,) = torch.autograd.grad(truth.sum().clamp(max=1e30), wide[0])
    fits = expected.abs() < torch.finfo(dtype).max
    torch.testing.assert_close(grad.float()[fits], expected.to(dtype).float()[fits], atol=1e-5, rtol=2e-2)


def test_second_derivatives_are_refused(device):
    x = torch.zeros(3, device=device, requires_grad=True)
    loss = kernels.policy_loss(x, x.detach(), torch.ones(3, device=device), impl="triton").sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND_DERIVATIVE):
        torch.autograd.grad(grad.sum(), x)


@pytest.mark.slow
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_few_compilations_serve_every_length_and_number(surrogate):
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def loss(logprob, old, A, beta, eps_high):
        options = {"ref_logprob": A, "beta": beta, "eps_high": eps_high, "surrogate": surrogate, "impl": "triton"}
        return kernels.policy_loss(logprob, old, A, **options).sum()

    for T in range(5, 17):
        x, old, A = torch.randn(3, T, generator=torch.Generator().manual_seed(T))
        ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        beta, eps_high = 0.1 * T, T / 20
        options = {"ref_logprob": A.double(), "beta": beta, "eps_high": eps_high, "surrogate": surrogate}
        truth = reference.policy_loss(theirs, old.double(), A.double(), **options).sum()
        value = loss(ours, old, A, beta, eps_high)
        torch.testing.assert_close(value.double(), truth, atol=1e-4, rtol=1e-5)
        grads = [torch.autograd.grad(y, leaf)[0].double() for y, leaf in ((value, ours), (truth, theirs))]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-5)
    assert counter.frame_count <= 2  # the first one is for a fixed length


@pytest.mark.sampled(3)
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize(("with_ref", "own_ratio"), [(False, False), (True, True)])
def test_opcheck(surrogate, with_ref, own_ratio):
    x, old, A, ref = (t.float() for t in tokens(20, "cpu"))
    half = torch.tensor(0.5, dtype=torch.float64)
    x.requires_grad_()
    ratio, ref = (x - old).detach().requires_grad_() if own_ratio else None, ref if with_ref else None
    numbers = (half, half, 4 * half, half, "k3_iw", surrogate)
    torch.library.opcheck(torch.ops.nlgrpo.policy_loss, (x, old, A, ratio, ref, None, *numbers))
