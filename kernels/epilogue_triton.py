"""Statistics and gradient of a block of logits in Triton: one read for the former, one read and write for the latter.

The same two functions as `epilogue_torch`, computed in float32 and in powers of 2. Reading at a GPU's full bandwidth
leaves about 18 instructions per bfloat16 number, so everything possible is moved out of the loops. Length and
temperature are run-time values, so that new ones do not recompile a kernel. Rows with the target `IGNORE` are not read.
A target outside the vocabulary gives NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import on_its_device

IGNORE = tl.constexpr(-100)
LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-1e4)  # replaces -inf, whose product with a probability of 0 would be NaN
BLOCK, WARPS = 4096, 8


@triton.jit
def _at_least(x, floor):
    return tl.maximum(x, floor, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["temperature"])
def _statistics_kernel(
    logits, targets, logprob, entropy, tops, log_totals, V, stride, temperature, BLOCK: tl.constexpr
):
    """``tops``: the largest logit; ``log_totals``: log2 of the sum of 2^(scale (logit - top))."""
    row = tl.program_id(0).to(tl.int64)  # row * stride may exceed 2^31
    target = tl.load(targets + row)
    if target == IGNORE:
        tl.store(logprob + row, 0.0)
        tl.store(entropy + row, 0.0)
        tl.store(tops + row, 0.0)
        tl.store(log_totals + row, 0.0)
    else:
        logits += row * stride
        scale = 1.0 / (LN2 * temperature)
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)  # sum of 2^below, below = scale (logit - top)
        below_sum = tl.full((), 0.0, tl.float32)  # sum of 2^below below
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32)
            new_top = tl.maximum(top, tl.max(x, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # all logits so far are -inf
            below = _at_least((x - base) * scale, FLOOR)
            share = tl.exp2(below)
            shift = _at_least((top - base) * scale, FLOOR)
            keep = tl.exp2(shift)
            below_sum = keep * (below_sum + total * shift) + tl.sum(share * below, 0)
            total = keep * total + tl.sum(share, 0)
            top = new_top
        known = (target >= 0) & (target < V)
        picked = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)
        tl.store(logprob + row, (picked - top) / temperature - tl.log(total))
        tl.store(entropy + row, tl.log(total) - below_sum * LN2 / total)
        tl.store(tops + row, top)
        tl.store(log_totals + row, tl.log2(total))


@triton.jit(do_not_specialize=["temperature"])
def _gradient_kernel(
    logits, targets, tops, log_totals, entropy, grad_logprob, grad_entropy, out, V, stride, out_stride, temperature,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    out += row * out_stride
    target = tl.load(targets + row).to(tl.int32)
    if target == IGNORE:
        tl.store(out + column, tl.zeros((BLOCK,), out.dtype.element_ty), mask=inside)
    else:
        scale = 1.0 / (LN2 * temperature)
        x = tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        logp = (x - tl.load(tops + row)) * scale - tl.load(log_totals + row)  # log2 p
        g = tl.load(grad_logprob + row) / temperature
        slope = tl.exp2(logp)
        if HAS_ENTROPY:
            h = tl.load(grad_entropy + row) * LN2 / temperature
            slope *= g + h * (_at_least(logp, FLOOR) + tl.load(entropy + row) / LN2)
        else:
            slope *= g
        tl.store(out + column, (tl.where(column == target, g, 0.0) - slope).to(out.dtype.element_ty), mask=inside)


@on_its_device
def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `epilogue_torch.statistics`. Saved are the largest logit and log2 of the sum relative to it, separately."""
    logits = _rows(logits)
    n, V = logits.shape
    logprob, entropy = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(2))
    kept = torch.empty(2, n, dtype=torch.float32, device=logits.device)
    if n:
        _statistics_kernel[(n,)](
            logits, targets.contiguous(), logprob, entropy, *kept, V, logits.stride(0), float(temperature),
            BLOCK=_block(V), num_warps=WARPS,
        )  # fmt: skip
    return logprob, entropy, kept


@on_its_device
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
    """See `epilogue_torch.gradient`. The rows of ``out`` are contiguous."""
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
    """Return ``x`` with contiguous rows, copied if necessary. The stride between rows may be any."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _block(V: int) -> int:
    return min(BLOCK, triton.next_power_of_2(V))
