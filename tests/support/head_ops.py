"""Inputs of the ops of the language-model head, and their accuracy."""

from __future__ import annotations

import math

import torch

IGNORE = -100
SECOND_DERIVATIVE = r"no autograd formula|does not require grad"  # error messages of torch
ROWS = 70  # one full block of 64 rows and a partial one


def head(T, D, V, dtype, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in [(T, D), (V, D), (V,)])
    targets = torch.randint(V, (T,), generator=g)
    tensors = (3 * hidden / math.sqrt(D)).to(dtype), weight.to(dtype), bias.to(dtype), targets
    return [x.to(device) for x in tensors]


def truncation(impl, device, dtype):
    """Additional tolerance: Triton's interpreter truncates float32 to bfloat16 (epsilon 2^-7) instead of rounding."""
    return 2**-7 if (impl, device, dtype) == ("triton", "cpu", torch.bfloat16) else 0.0


def check_as_accurate_as_torch(ours, plain, truth, tolerance):
    """Check |truth - ours| <= |truth - plain torch in the same dtype| + tolerance for the largest error per tensor."""
    for x, y, z in zip(ours, plain, truth, strict=True):
        assert x.isfinite().all()
        scale = z.abs().amax().clamp(min=1) if len(z) else 1
        worst, allowed = (z - x).abs().amax() / scale, (z - y).abs().amax() / scale
        assert worst <= allowed + tolerance, (worst, allowed)


def largest_allocation(function):
    """Size in bytes of the largest allocation during ``function``."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return max(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
