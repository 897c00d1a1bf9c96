"""Linearised rewards of groups in one Triton launch: sort, gaps and suffix sum, in the dtype of the rewards.

A float32 reward is sorted in one integer with its column, to which its result is scattered. A float64 reward fills the
integer: the rewards are sorted alone, and each one then finds its result by bisection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import on_its_device

ELEMENTS = 1024  # rewards that one program sorts at once; 2,048 would spill thousands of bytes per thread
# Rewards of a float64 group that stays in registers. Bisection gathers once per step, and a gather of 1,024 float64 in
# registers would spill hundreds of bytes per thread.
GATHERED = 256
# For larger groups a program keeps two sorted copies in global memory, 64 KiB at M = 4,096. This number of programs
# fills an H100 four times, and the copies fit in its L2 cache.
PROGRAMS = 528
REGISTERS = 128  # of a thread for such groups in float64: left alone, the compiler takes fewer and spills


@triton.jit
def _weighted_gap(value, above, weight):
    return tl.where((value == above) | (weight == 0.0), 0.0, weight * (value - above))


@triton.jit
def _count_smaller(packed, chunk, CHUNK: tl.constexpr, STEPS: tl.constexpr):
    """Count the integers at ``chunk``, CHUNK = 2^STEPS sorted ones, that are smaller than each of ``packed``."""
    smaller = tl.zeros_like(packed)
    half = CHUNK
    for _ in range(STEPS):
        half //= 2
        smaller += tl.where(tl.load(chunk + smaller + half - 1) < packed, half, 0)
    return smaller + (tl.load(chunk + smaller) < packed)


# --- float32 ----------------------------------------------------------------------------------------------------------


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
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _suffix_sums(column, value, above, below, weight):
    """Sum the weighted gaps from each column of sorted rewards to the last one; ``above``, ``below``: neighbours.

    Equal rewards take the sum of the first of them, as the scan adds in another order and may round them differently.
    """
    sums = tl.cumsum(_weighted_gap(value, above, weight), 1, reverse=True)
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


# --- float64 ----------------------------------------------------------------------------------------------------------


@triton.jit
def _flip_negative_float64(bits):
    """Map the bits of a float64 to an integer of the same order, and back."""
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _key(rewards, column, inside):
    """Map rewards to integers in their order, equal ones to the same integer. NaN come after them, by column.

    Entries outside the group come last.
    """
    x = tl.load(rewards, mask=inside, other=0.0) + 0.0  # -0 becomes 0
    nan = 0x7FF8000000000000 + column.to(tl.int64)
    key = tl.where(x == x, _flip_negative_float64(x.to(tl.int64, bitcast=True)), nan)
    return tl.where(inside, key, 0x7FFFFFFFFFFFFFFE)


@triton.jit
def _reward(key):
    return _flip_negative_float64(key).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["P", "M"])
def _small_kernel_float64(
    rewards, weights, out, P, M, stride_p, stride_m, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr
):
    """Process ROWS groups of up to COLUMNS = 2^STEPS rewards per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.broadcast_to(tl.arange(0, COLUMNS)[None, :], (ROWS, COLUMNS))
    inside = (row < P) & (column < M)
    key = _key(rewards + row * stride_p + column * stride_m, column, inside)
    ordered = tl.sort(key, dim=1)
    value = _reward(ordered)
    above = tl.gather(value, tl.minimum(column + 1, M - 1), 1)
    weight = tl.load(weights + column, mask=column < M - 1, other=0.0)
    sums = tl.cumsum(_weighted_gap(value, above, weight), 1, reverse=True)
    place = tl.zeros_like(column)  # number of smaller rewards
    half = COLUMNS
    for _ in range(STEPS):
        half //= 2
        place += tl.where(tl.gather(ordered, place + half - 1, 1) < key, half, 0)
    tl.store(out + row * M + column, tl.gather(sums, place, 1), mask=inside)


@triton.jit(do_not_specialize=["P", "M", "chunks"])
def _large_kernel_float64(
    rewards, weights, out, memory, P, M, stride_p, stride_m, chunks, CHUNK: tl.constexpr, STEPS: tl.constexpr
):
    """Process groups one by one in chunks, as `_large_kernel`; the sums replace the sorted chunks."""
    program = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, CHUNK)[None, :]
    sorted_chunks = memory + program * 2 * chunks * CHUNK
    merged = sorted_chunks + chunks * CHUNK
    for row in range(program, P, tl.num_programs(0)):
        group = rewards + row * stride_p
        for c in range(chunks):
            column = c * CHUNK + i
            key = _key(group + column.to(tl.int64) * stride_m, column, column < M)
            tl.store(sorted_chunks + column, tl.sort(key, dim=1))
        tl.debug_barrier()
        for c in range(chunks):
            key = tl.load(sorted_chunks + c * CHUNK + i)
            rank = i.to(tl.int64)
            for other in range(c):  # equal keys keep the order of their chunks, so those of earlier ones count too
                rank += _count_smaller(key + 1, sorted_chunks + other * CHUNK, CHUNK, STEPS)
            for other in range(c + 1, chunks):
                rank += _count_smaller(key, sorted_chunks + other * CHUNK, CHUNK, STEPS)
            tl.store(merged + rank, key)
        tl.debug_barrier()
        above_chunk = tl.zeros((1,), tl.float64)
        for k in range(chunks):
            rank = (chunks - 1 - k) * CHUNK + i
            above = _reward(tl.load(merged + tl.minimum(rank + 1, M - 1)))
            weight = tl.load(weights + rank, mask=rank < M - 1, other=0.0)
            gap = _weighted_gap(_reward(tl.load(merged + rank)), above, weight)
            sums = tl.cumsum(gap, 1, reverse=True) + above_chunk[:, None]
            tl.store(sorted_chunks + rank, sums.to(tl.int64, bitcast=True))
            above_chunk = tl.sum(tl.where(i == 0, sums, 0.0), 1)
        tl.debug_barrier()
        for c in range(chunks):
            column = c * CHUNK + i
            inside = column < M
            key = _key(group + column.to(tl.int64) * stride_m, column, inside)
            place = tl.zeros_like(key)
            for other in range(chunks):
                place += _count_smaller(key, merged + other * CHUNK, CHUNK, STEPS)
            sums = tl.load(sorted_chunks + place, mask=inside).to(tl.float64, bitcast=True)
            tl.store(out + row * M + column, sums, mask=inside)
        tl.debug_barrier()  # slower threads may still read what the next group overwrites


# --- launch -----------------------------------------------------------------------------------------------------------


@on_its_device
def linearize(rewards: Tensor, weights: Tensor) -> Tensor:
    """See `reference.linearize`; ``rewards (P, M)`` of any strides and ``weights (M,)``, both float32 or float64."""
    out = torch.empty_like(rewards, memory_format=torch.contiguous_format)
    P, M = rewards.shape
    most = GATHERED if rewards.dtype == torch.float64 else ELEMENTS
    if P:
        launch = _launch_large if most < M else _launch_small
        launch(rewards, weights.contiguous(), out)
    return out


def _launch_small(rewards: Tensor, weights: Tensor, out: Tensor) -> None:
    P, M = rewards.shape
    columns = triton.next_power_of_2(M)
    rows = ELEMENTS // columns
    kernel, more = _small_kernel, {}
    if rewards.dtype == torch.float64:
        kernel, more = _small_kernel_float64, {"STEPS": columns.bit_length() - 1}
    kernel[(triton.cdiv(P, rows),)](
        rewards, weights, out, P, M, *rewards.stride(), ROWS=rows, COLUMNS=columns, num_warps=4, **more
    )


def _launch_large(rewards: Tensor, weights: Tensor, out: Tensor) -> None:
    P, M = rewards.shape
    chunk = min(ELEMENTS, triton.next_power_of_2(M))
    programs, chunks = min(P, PROGRAMS), triton.cdiv(M, chunk)
    memory = torch.empty(programs * 2 * chunks * chunk, dtype=torch.int64, device=rewards.device)
    kernel, more = _large_kernel, {}
    if rewards.dtype == torch.float64:
        kernel, more = _large_kernel_float64, {"maxnreg": REGISTERS}
    kernel[(programs,)](
        rewards, weights, out, memory, P, M, *rewards.stride(), chunks,
        CHUNK=chunk, STEPS=chunk.bit_length() - 1, num_warps=4, **more,
    )  # fmt: skip
