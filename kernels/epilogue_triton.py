"""What happens to a block of logits, in Triton: one read for the statistics, one read and one write for the gradient.

The same two functions as `epilogue_torch`, computed in float32. Length, vocabulary and temperature are values and not
constants of the kernels, so that no new ones compile another. Rows whose target is `IGNORE` are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

IGNORE = tl.constexpr(-100)
BLOCK, WARPS = 4096, 8
KEPT = 2  # numbers a token that the gradient wants besides


@triton.jit(do_not_specialize=["V", "stride", "temperature"])
def _statistics_kernel(
    logits, targets, logprob, entropy, tops, log_totals, V, stride, temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2^31
    target = tl.load(targets + row)
    if target == IGNORE:
        tl.store(logprob + row, 0.0)
        tl.store(entropy + row, 0.0)
        tl.store(tops + row, 0.0)
        tl.store(log_totals + row, 0.0)
    else:
        logits += row * stride
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)  # sum of e^(z - top)
        below_sum = tl.full((), 0.0, tl.float32)  # sum of e^(z - top) (z - top)
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32) / temperature
            new_top = tl.maximum(top, tl.max(z, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # as long as all logits were -inf
            below = z - base
            share = tl.exp(below)
            shift = tl.where(top == float("-inf"), 0.0, top - base)
            keep = tl.exp(top - base)
            below_sum = keep * (below_sum + total * shift) + tl.sum(tl.where(share == 0.0, 0.0, share * below), 0)
            total = keep * total + tl.sum(share, 0)
            top = new_top
        picked = tl.load(logits + target).to(tl.float32) / temperature
        log_total = tl.log(total)
        tl.store(logprob + row, picked - top - log_total)
        tl.store(entropy + row, log_total - below_sum / total)
        tl.store(tops + row, top)
        tl.store(log_totals + row, log_total)


@triton.jit(do_not_specialize=["V", "stride", "out_stride", "temperature"])
def _gradient_kernel(
    logits, targets, tops, log_totals, entropy, grad_logprob, grad_entropy, out, V, stride, out_stride, temperature,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    out += row * out_stride
    target = tl.load(targets + row)
    if target == IGNORE:
        tl.store(out + column, tl.zeros((BLOCK,), out.dtype.element_ty), mask=inside)
    else:
        z = tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32) / temperature
        logp = z - tl.load(tops + row) - tl.load(log_totals + row)
        p = tl.exp(logp)
        g = tl.load(grad_logprob + row)
        slope = p * g
        if HAS_ENTROPY:
            h = tl.load(grad_entropy + row)
            slope += tl.where(p == 0.0, 0.0, h * p * (logp + tl.load(entropy + row)))
        grad = (tl.where(column == target, g, 0.0) - slope) / temperature
        tl.store(out + column, grad.to(out.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `epilogue_torch.statistics`; kept are max z and log sum e^(z - max z).

    The two stay apart: their sum would lose what the largest logit has in front of the point.
    """
    logits = _rows(logits)
    n, V = logits.shape
    logprob, entropy = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(2))
    kept = torch.empty(KEPT, n, dtype=torch.float32, device=logits.device)
    if n:
        _statistics_kernel[(n,)](
            logits, targets.contiguous(), logprob, entropy, *kept, V, logits.stride(0), float(temperature),
            BLOCK=_block(V), num_warps=WARPS,
        )  # fmt: skip
    return logprob, entropy, kept


def gradient(
    logits: Tensor,
    targets: Tensor,
    kept: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    out: Tensor,
) -> None:
    """See `epilogue_torch.gradient`; ``out`` has rows without gaps."""
    logits = _rows(logits)
    n, V = logits.shape
    if n:
        block = _block(V)
        upstream = grad_logprob if grad_entropy is None else grad_entropy
        _gradient_kernel[(n, triton.cdiv(V, block))](
            logits, targets.contiguous(), *kept.contiguous(), entropy, grad_logprob.float().contiguous(),
            upstream.float().contiguous(), out, V, logits.stride(0), out.stride(0), float(temperature),
            HAS_ENTROPY=grad_entropy is not None, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """``x`` with columns that follow each other; the distance of rows is free."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _block(V: int) -> int:
    return min(BLOCK, triton.next_power_of_2(V))
