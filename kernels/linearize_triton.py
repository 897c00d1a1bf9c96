"""The first variation of groups in one launch: sort, gaps, suffix sum and scatter, without leaving the program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # rewards that one program holds where groups are small


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _flip_negative(bits):
    """Between the bits of a float32 and an integer of the same order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["P", "M", "stride_p", "stride_m"])
def _linearize_kernel(rewards, weights, out, P, M, stride_p, stride_m, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < P) & (column < M)
    x = tl.load(rewards + row * stride_p + column * stride_m, mask=inside, other=0.0) + 0.0  # -0 becomes 0
    key = tl.where(column < M, _flip_negative(x.to(tl.int32, bitcast=True)), 0x7FFFFFFF)  # what is outside comes last
    packed = tl.sort((key.to(tl.int64) << 32) | column.to(tl.int64), dim=1)
    place = (packed & 0xFFFFFFFF).to(tl.int32)
    value = _flip_negative((packed >> 32).to(tl.int32)).to(tl.float32, bitcast=True)

    rank = tl.broadcast_to(column, (ROWS, COLUMNS))
    above = tl.gather(value, tl.minimum(rank + 1, M - 1), 1)
    below = tl.gather(value, tl.maximum(rank - 1, 0), 1)
    weight = tl.load(weights + rank, mask=rank < M - 1, other=0.0)
    gap = tl.where((value == above) | (weight == 0.0), 0.0, weight * (value - above))
    sums = tl.cumsum(gap, 1, reverse=True)
    # Equal rewards take the sum of the first of them: a scan adds in an order of its own, and rounds their sums apart.
    first = tl.associative_scan(tl.where((rank == 0) | (value != below), rank, 0), 1, _larger)
    tl.store(out + row * M + place, tl.gather(sums, first, 1), mask=inside)


def linearize(rewards: Tensor, weights: Tensor) -> Tensor:
    """See `reference.linearize`; float32 ``rewards (P, M)`` of any strides, ``weights (M,)``, M at most 1,024.

    From 2,048 on, a program would spill thousands of bytes a thread.
    """
    P, M = rewards.shape
    out = torch.empty(P, M, dtype=torch.float32, device=rewards.device)
    columns = triton.next_power_of_2(M)
    rows = max(1, ELEMENTS // columns)
    if P:
        _linearize_kernel[(triton.cdiv(P, rows),)](
            rewards, weights.contiguous(), out, P, M, *rewards.stride(),
            ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return out
