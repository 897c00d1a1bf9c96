"""Packed attention on a CPU compared with softmax(q k^T) v of each sequence, in float64."""

import pytest
import torch

from nlgrpo.model.attention import PackedAttention

LENGTHS = [5, 5, 3, 3, 3, 7, 1, 1, 5]  # consecutive sequences of equal length share a call
HEADS, SHARED, WIDTH, SCALE = 6, 2, 8, 0.3


def truth(q, k, v, window):
    """Attention (L, H, d) of one sequence."""
    k, v = (x.repeat_interleave(HEADS // SHARED, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    behind = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (behind >= 0) & (behind < (window or len(q)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 3, 5])
def test_sequences_of_equal_length_share_a_call_and_attend_only_to_themselves(window):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, WIDTH) for heads in (HEADS, SHARED, SHARED)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    cotangent = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    packed = PackedAttention(LENGTHS, torch.device("cpu"), torch.float64).attend(*inputs, SCALE, window)
    expected = torch.cat([truth(*qkv, window) for qkv in zip(*(x.split(LENGTHS) for x in inputs), strict=True)])
    torch.testing.assert_close(packed, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad((out * cotangent).sum(), inputs) for out in (packed, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_sequence_does_not_depend_on_the_others_bit_for_bit():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(sum(LENGTHS), heads, WIDTH, generator=generator) for heads in (HEADS, SHARED, SHARED))
    together = PackedAttention(LENGTHS, torch.device("cpu"), torch.float32).attend(q, k, v, SCALE, None)
    for length, *own, out in zip(LENGTHS, *(x.split(LENGTHS) for x in (q, k, v, together)), strict=True):
        alone = PackedAttention([length], torch.device("cpu"), torch.float32).attend(*own, SCALE, None)
        assert torch.equal(alone, out)
