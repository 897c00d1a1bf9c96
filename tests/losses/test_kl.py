"""KL estimates against the exact divergence by enumeration, and the controller by hand."""

import pytest
import torch

from nlgrpo.losses.kl import AdaptiveBeta, estimate

LOGITS = torch.tensor([[0.3, -1.0, 0.7, 0.1, -0.2], [-0.4, 0.2, 0.5, 0.9, 0.0]], dtype=torch.float64)


def policies():
    logits = LOGITS[0].clone().requires_grad_()
    return logits, logits.log_softmax(0), LOGITS[1].log_softmax(0)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    _, pi, ref = policies()
    truth = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (pi, ref)))
    torch.testing.assert_close((pi.exp() * estimate(pi, ref, kind)).sum(), truth)


def test_each_estimate_at_one_point():
    """d = log 2: k1 = -log 2, k2 = log(2)^2 / 2, k3 = 1 - log 2."""
    pi, ref = torch.tensor([-1.0, -3.0]), torch.tensor([-1.0, -3.0]) + torch.tensor(2.0).log()
    log2 = torch.tensor(2.0).log().item()
    for kind, truth in {"k1": -log2, "k2": log2**2 / 2, "k3": 1 - log2}.items():
        torch.testing.assert_close(estimate(pi, ref, kind), torch.tensor([truth, truth]))
        assert (estimate(pi, pi, kind) == 0).all()


def test_gradient_of_k2_is_that_of_the_divergence_on_policy():
    logits, pi, ref = policies()
    (truth,) = torch.autograd.grad((pi.exp() * (pi - ref)).sum(), logits, retain_graph=True)
    (ours,) = torch.autograd.grad((pi.exp().detach() * estimate(pi, ref, "k2")).sum(), logits)
    torch.testing.assert_close(ours, truth)


def test_k3_is_exact_for_close_policies():
    """d = 1e-4 in float32: e^d - d - 1 = 5e-9 drowns in rounding unless written with expm1."""
    ref = torch.tensor([1e-4])
    torch.testing.assert_close(
        estimate(torch.zeros(1), ref, "k3"), (ref.double().square() / 2).float(), rtol=1e-2, atol=0
    )


def test_estimate_refuses():
    with pytest.raises(ValueError, match="'k1', 'k2' or 'k3'"):
        estimate(torch.ones(2), torch.ones(2), "k4")
    with pytest.raises(ValueError, match=r"\(2,\) and \(1,\)"):
        estimate(torch.ones(2), torch.ones(1))


def test_adaptive_beta_follows_the_target():
    controller = AdaptiveBeta(beta=0.01, target=0.1)
    assert controller.step(0.1) == 0.01
    assert controller.step(0.11) == pytest.approx(0.01 * 1.01)
    assert controller.step(5.0) == pytest.approx(0.01 * 1.01 * 1.02), "the error is clipped at 0.2"
    assert controller.step(-1.0) == pytest.approx(0.01 * 1.01 * 1.02 * 0.98)
    assert controller.beta == AdaptiveBeta(beta=controller.beta, target=0.1).beta


@pytest.mark.parametrize(
    "change", [{"beta": -1.0}, {"beta": float("nan")}, {"target": 0.0}, {"gain": 0.0}, {"clip": -0.2}, {"gain": 6.0}]
)
def test_adaptive_beta_refuses(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        AdaptiveBeta(**{"beta": 0.01, "target": 0.1, **change})


def test_adaptive_beta_refuses_nan():
    controller = AdaptiveBeta(0.01, 0.1)
    with pytest.raises(ValueError, match="NaN"):
        controller.step(float("nan"))
    assert controller.beta == 0.01
