"""Linearised rewards of groups in one Triton launch: sort, gaps, suffix sum and scatter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import on_its_device

ELEMENTS = 1024  # rewards that one program sorts at once; 2,048 would spill thousands of bytes per thread
# For larger groups a program keeps two sorted copies in global memory, 64 KiB at M = 4,096. This number of programs
# fills an H100 four times, and the copies fit in its L2 cache.
PROGRAMS = 528


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _flip_negative(bits):
    """Map the bits of a float32 to an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _packed(rewards, column, inside):
    """Pack reward (high 32 bits) and column (low 32 bits) into distinct integers in the order of the rewards, NaN last.

    Equal rewards keep the order of their columns. Entries outside the group come last.
    """
    x = tl.load(rewards, mask=inside, other=0.0) + 0.0  # -0 becomes 0
    key = tl.where(x == x, _flip_negative(x.to(tl.int32, bitcast=True)), 0x7FC00000)
    key = tl.where(inside, key, 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | column.to(tl.int64)


@triton.jit
def _value(packed):
    return _flip_negative((packed >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _suffix_sums(column, value, above, below, weight):
    """Sum the weighted gaps from each column of sorted rewards to the last one; ``above``, ``below``: neighbours.

    Equal rewards take the sum of the first of them, as the scan adds in another order and may round them differently.
    """
    gap = tl.where((value == above) | (weight == 0.0), 0.0, weight * (value - above))
    sums = tl.cumsum(gap, 1, reverse=True)
    first = tl.associative_scan(tl.where((column == 0) | (value != below), column, 0), 1, _larger)
    return tl.gather(sums, first, 1)


@triton.jit(do_not_specialize=["P", "M"])
def _small_kernel(rewards, weights, out, P, M, stride_p, stride_m, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Process ROWS groups of up to COLUMNS rewards per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < P) & (column < M)
    rank = tl.broadcast_to(column, (ROWS, COLUMNS))
    packed = tl.sort(_packed(rewards + row * stride_p + column * stride_m, rank, inside), dim=1)
    value = _value(packed)
    above = tl.gather(value, tl.minimum(rank + 1, M - 1), 1)
    below = tl.gather(value, tl.maximum(rank - 1, 0), 1)
    weight = tl.load(weights + rank, mask=rank < M - 1, other=0.0)
    sums = _suffix_sums(rank, value, above, below, weight)
    tl.store(out + row * M + (packed & 0xFFFFFFFF).to(tl.int32), sums, mask=inside)


@triton.jit
def _count_smaller(packed, chunk, CHUNK: tl.constexpr, STEPS: tl.constexpr):
    """Count the integers at ``chunk``, CHUNK = 2^STEPS sorted ones, that are smaller than each of ``packed``."""
    smaller = tl.zeros_like(packed)
    half = CHUNK
    for _ in range(STEPS):
        half //= 2
        smaller += tl.where(tl.load(chunk + smaller + half - 1) < packed, half, 0)
    return smaller + (tl.load(chunk + smaller) < packed)


@triton.jit(do_not_specialize=["P", "M", "chunks"])
def _large_kernel(
    rewards, weights, out, memory, P, M, stride_p, stride_m, chunks, CHUNK: tl.constexpr, STEPS: tl.constexpr
):
    """Process groups one by one in chunks: sort each, find ranks by counting in the other chunks, sum from the top."""
    program = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, CHUNK)[None, :]
    sorted_chunks = memory + program * 2 * chunks * CHUNK
    merged = sorted_chunks + chunks * CHUNK
    for row in range(program, P, tl.num_programs(0)):
        for c in range(chunks):
            column = c * CHUNK + i
            packed = _packed(rewards + row * stride_p + column.to(tl.int64) * stride_m, column, column < M)
            tl.store(sorted_chunks + column, tl.sort(packed, dim=1))
        tl.debug_barrier()
        for c in range(chunks):
            packed = tl.load(sorted_chunks + c * CHUNK + i)
            rank = i.to(tl.int64)
            for other in range(chunks):
                if other != c:
                    rank += _count_smaller(packed, sorted_chunks + other * CHUNK, CHUNK, STEPS)
            tl.store(merged + rank, packed)
        tl.debug_barrier()
        above_chunk = tl.zeros((1,), tl.float32)
        for k in range(chunks):
            rank = (chunks - 1 - k) * CHUNK + i
            packed = tl.load(merged + rank)
            above = _value(tl.load(merged + tl.minimum(rank + 1, M - 1)))
            below = _value(tl.load(merged + tl.maximum(rank - 1, 0)))
            weight = tl.load(weights + rank, mask=rank < M - 1, other=0.0)
            sums = _suffix_sums(i, _value(packed), above, below, weight) + above_chunk[:, None]
            tl.store(out + row * M + (packed & 0xFFFFFFFF), sums, mask=rank < M)
            above_chunk = tl.sum(tl.where(i == 0, sums, 0.0), 1)
        tl.debug_barrier()  # slower threads may still read what the next group overwrites


@on_its_device
def linearize(rewards: Tensor, weights: Tensor) -> Tensor:
    """See `reference.linearize`; float32 ``rewards (P, M)`` of any strides, ``weights (M,)``."""
    P, M = rewards.shape
    out = torch.empty(P, M, dtype=torch.float32, device=rewards.device)
    arguments = (rewards, weights.contiguous(), out)
    if P and M <= ELEMENTS:
        columns = triton.next_power_of_2(M)
        rows = ELEMENTS // columns
        _small_kernel[(triton.cdiv(P, rows),)](
            *arguments, P, M, *rewards.stride(), ROWS=rows, COLUMNS=columns, num_warps=4
        )
    elif P:
        programs, chunks = min(P, PROGRAMS), triton.cdiv(M, ELEMENTS)
        memory = torch.empty(programs * 2 * chunks * ELEMENTS, dtype=torch.int64, device=rewards.device)
        _large_kernel[(programs,)](
            *arguments, memory, P, M, *rewards.stride(), chunks,
            CHUNK=ELEMENTS, STEPS=ELEMENTS.bit_length() - 1, num_warps=4,
        )  # fmt: skip
    return out
