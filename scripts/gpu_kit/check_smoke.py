"""What has no other test on a GPU: products with out_dtype, decoding, varlen attention, ECDFs. Seconds, tiny sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_kit.child import Kit
from gpu_kit.models import SHAPES, decoder_of, qwen2
from nlgrpo import kernels
from nlgrpo.engine.generation import generate
from nlgrpo.engine.logprobs import completion_logprobs
from nlgrpo.engine.sampling import Sampling
from nlgrpo.kernels import ecdf, head, reference
from nlgrpo.model.attention import PackedAttention, implementation
from nlgrpo.model.packing import pack

# Bounds of relative errors in bfloat16, whose roundings are 2^-8 = 0.4%.
PRODUCT, ATTENTION = 0.02, 0.03
# Log-probs of the same tokens in two orders of summation; a wrong position or a lost key changes them by 1 and more.
LOGPROB = 0.15


def run(kit: Kit) -> None:
    errors: dict[str, tuple[float, float]] = {}
    for name, check in (
        ("weight gradient over blocks", weight_gradient),
        ("decoded log-probs", decoded_logprobs),
        ("varlen gradient", varlen_gradient),
        ("ecdf", ecdf_error),
    ):
        errors[name] = check(kit.device)
        kit.put(**{name: {"error": errors[name][0], "bound": errors[name][1]}})
    wrong = [f"{name}: {error:.3g} > {bound:g}" for name, (error, bound) in errors.items() if not error <= bound]
    if wrong:
        raise RuntimeError("; ".join(wrong))


def relative(ours: Tensor, truth: Tensor) -> float:
    """||ours - truth|| / ||truth||, in float64 on the CPU."""
    ours, truth = ours.double().cpu(), truth.double().cpu()
    return float((ours - truth).norm() / truth.norm())


def weight_gradient(device: str) -> tuple[float, float]:
    """Gradient of the head's weight, a sum over blocks in float32 (`addmm` with out_dtype), against float64."""
    generator = torch.Generator().manual_seed(0)
    T, D, V = 256, 64, 128
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((T, D), (V, D)))
    targets, advantages = torch.randint(V, (T,), generator=generator), torch.randn(T, generator=generator)
    hidden, weight = hidden.bfloat16(), (weight / 8).bfloat16()
    budget = dict(head.BLOCK_BYTES)
    head.BLOCK_BYTES.update(dict.fromkeys(budget, 64 * V * 2))  # four blocks
    try:
        ours = weight.to(device, copy=True).requires_grad_()
        arguments = (targets.to(device), None, advantages.to(device))
        kernels.linear_policy_loss(hidden.to(device), ours, *arguments).loss.backward()
    finally:
        head.BLOCK_BYTES.update(budget)
    truth = weight.double().requires_grad_()
    reference.linear_policy_loss(hidden.double(), truth, targets, None, advantages.double()).backward()
    assert ours.grad is not None
    assert truth.grad is not None
    return relative(ours.grad, truth.grad), PRODUCT


def decoded_logprobs(device: str) -> tuple[float, float]:
    """Largest difference of the engine's log-probs from those of one packed pass."""
    torch.manual_seed(0)
    model = decoder_of(qwen2(**SHAPES["tiny"]), device)
    prompts = [[5, 6, 7, 8], [9, 10], [11] * 9]
    rollout = generate(model, prompts, 4, Sampling(max_new_tokens=40, stop_ids=(1, 2, 3, 4)), seed=3)
    rows = list(range(12))
    batches = pack([p for p in prompts for _ in range(4)], rollout.completion_ids(), rows, 512, device)
    scored = completion_logprobs(model, rollout, batches, 1.0).view_as(rollout.logprobs)
    return float((scored - rollout.logprobs).abs().max()), LOGPROB


def varlen_gradient(device: str) -> tuple[float, float]:
    """Gradient of the attention that training takes, with shared prefixes, against packed attention in float64."""
    segments = kernels.Segments([40, 30, 9, 21, 50, 1], [None, 0, 0, 0, None, None])
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(segments.lengths), 8, 64, generator=generator).bfloat16()
    upstream = torch.randn(sum(segments.lengths), 4, 64, generator=generator)
    kind = implementation(device, torch.bfloat16)
    ours = attention_gradient(segments, qkv.to(device), upstream.to(device), kind)
    truth = attention_gradient(segments, qkv.double(), upstream, "packed")
    return relative(ours, truth), ATTENTION


def attention_gradient(segments: kernels.Segments, qkv: Tensor, upstream: Tensor, kind: str) -> Tensor:
    x = qkv.clone().requires_grad_()
    attend = PackedAttention(segments, x.device, x.dtype, kind)
    out = attend(x, None, heads=4, layer=0, scale=0.125, window=None)
    (gradient,) = torch.autograd.grad(out, x, upstream.to(out))
    return gradient


def ecdf_error(device: str) -> tuple[float, float]:
    """Largest difference of CDFs on the device from those on the CPU, with ties and weights."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(3, 2000, generator=generator).mul(8).round().div(8)
    queries, weights = torch.randn(3, 50, generator=generator), torch.rand(3, 2000, generator=generator)
    ours = ecdf.cdf(samples.to(device), queries.to(device), weights=weights.to(device))
    truth = ecdf.cdf(samples.double(), queries.double(), weights=weights.double(), impl="torch")
    return float((ours.cpu() - truth).abs().max()), 1e-12
