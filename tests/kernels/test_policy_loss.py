"""`policy_loss` against the reference under autograd in float64; what masks hide; one compilation."""

import math

import pytest
import torch
from test_logprob import TWICE
from torch._dynamo.testing import CompileCounterWithBackend

from nlgrpo import kernels
from nlgrpo.kernels import reference

pytest.importorskip("triton")
KINDS = ["none", "k1", "k2", "k3", "k3_iw"]


def tokens(T, device, seed=0):
    """Log-probs whose ratios fall below, inside and above the clip, and past the cut at e^20."""
    g = torch.Generator().manual_seed(seed)
    logprob, old, ref, A = torch.randn(4, T, generator=g, dtype=torch.float64)
    old = logprob + 0.4 * old
    ref = logprob + ref
    if T > 3:
        old[0], ref[1], old[2] = logprob[0] - 30, logprob[1] + 30, logprob[2]  # the last: exactly on policy
    return [x.to(device) for x in (logprob, old, A, ref)]


def evaluate(function, inputs, upstream):
    """Loss, gradients of logprob, old and ref (or log-ratio), and statistics."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss, statistics = function(*leaves)
    loss.backward(upstream.to(loss))
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [loss.detach(), *grads], statistics


def close(ours, truth):
    for x, y in zip(ours, truth, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 1000, 1025])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("dual_clip", [None, 1.6])
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


def counted(logprob, old, A, ref, kind, *, mask, eps_low, eps_high, dual_clip):
    """The statistics, one token at a time."""
    rows = torch.stack([logprob, old, A, ref], 1).tolist()
    rows = rows if mask is None else [row for row, kept in zip(rows, mask.tolist(), strict=True) if kept]
    ratios = [math.exp(min(row[0] - row[1], 20)) for row in rows]
    pairs = [(rho, row[2]) for rho, row in zip(ratios, rows, strict=True)]
    found = {
        "clip_low": sum(rho < 1 - eps_low and a < 0 for rho, a in pairs),
        "clip_high": sum(rho > 1 + eps_high and a > 0 for rho, a in pairs),
        "ratio_max": max(ratios, default=0.0),
    }
    if dual_clip is not None:
        found["clip_dual"] = sum(rho > dual_clip and a < 0 for rho, a in pairs)
    if kind != "none":
        d = [min(row[3] - row[0], 20) if kind in ("k3", "k3_iw") else row[3] - row[0] for row in rows]
        k3 = [math.expm1(x) - x for x in d]
        weighted = [rho * x for rho, x in zip(ratios, k3, strict=True)]
        terms = {"k1": [-x for x in d], "k2": [x * x / 2 for x in d], "k3": k3, "k3_iw": weighted}
        found["kl"] = sum(terms[kind])
    return found


def test_a_ratio_of_its_own_has_its_own_gradient(device):
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
def test_masked_tokens_may_hold_anything(device, poison):
    logprob, old, A, ref = (x.float() for x in tokens(50, device))
    mask = torch.arange(50, device=device) % 2 == 0
    bad = [x.masked_fill(~mask, poison).requires_grad_() for x in (logprob, old, ref)]
    loss, statistics = kernels.policy_loss_with_statistics(
        bad[0], bad[1], A, ref_logprob=bad[2], mask=mask, beta=0.5, impl="triton"
    )
    loss.sum().backward()
    assert (loss[~mask] == 0).all()
    assert loss.isfinite().all()
    assert all(x.grad.isfinite().all() and (x.grad[~mask] == 0).all() for x in bad)
    assert all(value.isfinite() for value in statistics.values())


def test_small_kl_keeps_its_digits(device):
    """e^d - 1 - d is d^2 / 2 for a small d; the plain difference has no digit left of it at d = 1e-5."""
    d = torch.tensor([1e-5, -1e-5, 1e-3, 0.3, 0.5, -0.5, 2.0], device=device)
    zero = torch.zeros_like(d)
    loss = kernels.policy_loss(zero, zero, zero, ref_logprob=d, beta=1.0, impl="triton")
    truth = torch.expm1(d.double()) - d.double()
    assert (loss.double() / truth - 1).abs().max() < 1e-6


def test_shapes_and_no_tokens(device):
    x = torch.randn(3, 5, device=device)
    loss = kernels.policy_loss(x.T, x.T - 0.1, x.T, mask=x.T > 0, impl="triton")
    torch.testing.assert_close(loss, reference.policy_loss(x.T, x.T - 0.1, x.T, mask=x.T > 0))
    none = x[:0, 0].requires_grad_()
    loss, statistics = kernels.policy_loss_with_statistics(none, none, none.detach(), impl="triton")
    loss.sum().backward()
    assert none.grad.shape == (0,)
    assert statistics["ratio_max"] == 0


def test_a_gradient_by_the_advantages_is_not_lost(device):
    x = torch.randn(5, device=device)
    A = torch.randn(5, device=device, requires_grad=True)
    kernels.policy_loss(x, x, A).sum().backward()
    torch.testing.assert_close(A.grad, -torch.ones_like(A))
    with pytest.raises(ValueError, match="no gradient by the advantages"):
        kernels.policy_loss(x, x, A, impl="triton")


def test_a_nan_is_not_hidden(impl, device):
    """A ratio that is NaN has a loss that is NaN, and so is the largest ratio; the others stay as they are."""
    x = torch.tensor([0.0, math.nan, 0.1], device=device, requires_grad=True)
    old, A = torch.zeros(3, device=device), torch.ones(3, device=device)
    loss, statistics = kernels.policy_loss_with_statistics(x, old, A, ref_logprob=old, beta=0.1, impl=impl)
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False]
    assert x.grad[[0, 2]].isfinite().all()
    assert statistics["ratio_max"].isnan()
    assert statistics["kl"].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_are_read_as_they_are_and_computed_in_float32(impl, device, dtype):
    inputs = [x.to(dtype).requires_grad_(i == 0) for i, x in enumerate(tokens(300, device))]
    wide = [x.detach().float().requires_grad_(i == 0) for i, x in enumerate(inputs)]
    options = {"beta": 0.3, "kl": "k3", "dual_clip": 3.0}
    ours = kernels.policy_loss(*inputs[:3], ref_logprob=inputs[3], impl=impl, **options)
    truth = reference.policy_loss(*wide[:3], ref_logprob=wide[3], **options)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-5)
    (grad,) = torch.autograd.grad(ours.sum().clamp(max=1e30), inputs[0])
    (expected,) = torch.autograd.grad(truth.sum().clamp(max=1e30), wide[0])
    fits = expected.abs() < torch.finfo(dtype).max
    torch.testing.assert_close(grad.float()[fits], expected.to(dtype).float()[fits], atol=1e-5, rtol=2e-2)


def test_a_second_derivative_is_refused_and_not_0(device):
    x = torch.zeros(3, device=device, requires_grad=True)
    loss = kernels.policy_loss(x, x.detach(), torch.ones(3, device=device), impl="triton").sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=TWICE):
        torch.autograd.grad(grad.sum(), x)


def test_few_compilations_serve_every_length_and_beta():
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def loss(logprob, A, beta):
        return kernels.policy_loss(logprob, logprob, A, ref_logprob=A, beta=beta, impl="triton").sum()

    for T in range(5, 17):
        x, A = torch.randn(2, T)
        expected = reference.policy_loss(x, x, A, ref_logprob=A, beta=0.1 * T).sum()
        torch.testing.assert_close(loss(x, A, 0.1 * T), expected, atol=1e-4, rtol=1e-5)
    assert counter.frame_count <= 2  # of a fixed length first


def test_opcheck():
    x, old, A, ref = (t.float() for t in tokens(20, "cpu"))
    half = torch.tensor(0.5, dtype=torch.float64)
    x.requires_grad_()
    torch.library.opcheck(torch.ops.nlgrpo.policy_loss, (x, old, A, None, ref, None, half, half, 4 * half, half, "k3"))
