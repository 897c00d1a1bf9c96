"""Sampling of tokens in Triton: one pass over the logits for the totals of blocks, then one over the block of the draw.

The same function as `reference.sample_tokens`. Sums are in float64, relative to the largest logit of a block, so that
no token of a large vocabulary is lost to rounding. Between both kernels, 12 bytes are stored for `BLOCK` logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import on_its_device

BLOCK, WARPS = 4096, 8


@triton.jit
def _shares(x, top):
    """exp(x - top) in float64; 0 if ``top``, and so every x, is -inf."""
    base = tl.where(top == float("-inf"), 0.0, top)
    return tl.exp(x - base).to(tl.float64)


@triton.jit(do_not_specialize=["temperature"])
def _totals_kernel(logits, tops, totals, V, stride, blocks, temperature, BLOCK: tl.constexpr):
    """``tops`` (R, blocks): the largest scaled logit of each block; ``totals``: the sum of exp(logit - top)."""
    row = tl.program_id(0).to(tl.int64)  # row * stride may exceed 2^31
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < V, other=float("-inf")).to(tl.float32) / temperature
    top = tl.max(x, 0)
    tl.store(tops + row * blocks + block, top)
    tl.store(totals + row * blocks + block, tl.sum(_shares(x, top), 0))


@triton.jit(do_not_specialize=["temperature"])
def _draw_kernel(
    logits, noise, tops, totals, tokens, logprobs, V, stride, noise_stride, blocks, temperature,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Find the block in which the cumulative sum passes noise * total, then the token inside of it."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCKS)
    top_of = tl.load(tops + row * blocks + number, mask=number < blocks, other=float("-inf"))
    total_of = tl.load(totals + row * blocks + number, mask=number < blocks, other=0.0)
    top = tl.max(top_of, 0)
    share_of = total_of * _shares(top_of, top)
    through = tl.cumsum(share_of, 0)
    total = tl.max(through, 0)
    threshold = tl.load(noise + row * noise_stride) * total
    # The first block that passes the threshold. If rounding lets none pass: the last one that is not 0.
    last = tl.max(tl.where(share_of > 0, number, 0), 0)
    block = tl.minimum(tl.sum((through <= threshold).to(tl.int32), 0), last)
    before = tl.sum(tl.where(number == block - 1, through, 0.0), 0)
    block_top = tl.max(tl.where(number == block, top_of, float("-inf")), 0)

    column = tl.arange(0, BLOCK)
    inside = block * BLOCK + column < V
    logits += row * stride + block * BLOCK
    x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32) / temperature
    share = _shares(x, block_top)
    scale = tl.sum(tl.where(number == block, _shares(top_of, top), 0.0), 0)
    passed = (before + scale * tl.cumsum(share, 0)) > threshold
    last = tl.max(tl.where(share > 0, column, 0), 0)
    place = tl.minimum(tl.sum((passed == 0).to(tl.int32), 0), last)
    tl.store(tokens + row, (block * BLOCK + place).to(tl.int64))

    # The sum, unlike the maximum, is NaN if a logit is; a total of 0 means that all are -inf.
    checked = tl.sum(share_of, 0)
    picked = tl.max(tl.where(column == place, x, float("-inf")), 0)
    logprob = picked - top - tl.log(total).to(tl.float32)
    tl.store(logprobs + row, tl.where(checked > 0, logprob, float("nan")))


def sample_tokens(logits: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """See `reference.sample_tokens`. Two kernels; ``noise`` (R,) in float64 may have any stride."""
    _check(logits, noise, temperature)  # here: what is wrong with the arguments is no failure of a kernel
    return _sample(logits, noise, temperature)


@on_its_device
def _sample(logits: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
    rows, V = logits.shape
    block = min(BLOCK, triton.next_power_of_2(V))
    blocks = triton.cdiv(V, block)
    tops = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    totals = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        stride = logits.stride(0)
        _totals_kernel[(rows, blocks)](
            logits, tops, totals, V, stride, blocks, float(temperature), BLOCK=block, num_warps=WARPS
        )
        _draw_kernel[(rows,)](
            logits, noise, tops, totals, tokens, logprobs, V, stride, noise.stride(0), blocks, float(temperature),
            BLOCK=block, BLOCKS=triton.next_power_of_2(blocks), num_warps=WARPS,
        )  # fmt: skip
    return tokens, logprobs


def _check(logits: Tensor, noise: Tensor, temperature: float) -> None:
    """Raise RuntimeError for what the kernels cannot read, in the words of the compiled op."""
    if logits.dim() != 2:
        raise RuntimeError(f"logits must have 2 dimensions, got {logits.dim()}")
    if logits.shape[1] == 0:
        raise RuntimeError("logits must have at least one column")
    if noise.shape != logits.shape[:1] or noise.dtype != torch.float64 or noise.device != logits.device:
        raise RuntimeError(f"noise must be ({len(logits)},), float64, on the device of the logits")
    if not temperature > 0:
        raise RuntimeError(f"temperature must be positive, got {temperature}")
