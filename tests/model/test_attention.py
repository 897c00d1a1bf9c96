"""Packed attention compared with softmax(q k^T) v of each sequence, in float64; every implementation."""

import sys
from types import SimpleNamespace

import pytest
import torch

from nlgrpo.model import attention
from nlgrpo.model.attention import PackedAttention
from nlgrpo.model.segments import Segments

LENGTHS = [5, 5, 3, 3, 3, 7, 1, 1, 5]  # consecutive sequences of equal length share a call
SHARED = Segments([5, 4, 3, 1, 1, 6, 9, 2, 2, 8, 1], [None, None, 1, 1, 1, None, 5, 5, 5, None, 9])
HEADS, KEY_HEADS, WIDTH, SCALE = 6, 2, 8, 0.3


def inputs_for(segments, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(segments.lengths), heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in inputs], torch.randn(shapes[0], generator=generator, dtype=torch.float64)


def dense(q, k, v, scale, window):
    """Attention (l, H, d) of the last l tokens of a sequence with keys (n + l, Hk, d)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = (behind >= 0) & (behind < (window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def truth(segments, q, k, v, window):
    parts = [x.split(segments.lengths) for x in (q, k, v)]
    rows = []
    for i, prefix in enumerate(segments.prefixes):
        before = [] if prefix is None else [prefix]
        key, value = (torch.cat([x[j] for j in (*before, i)]) for x in parts[1:])
        rows.append(dense(parts[0][i], key, value, SCALE, window))
    return torch.cat(rows)


def assert_equals_truth(segments, window, tolerance=1e-12, dtype=torch.float64):
    inputs, cotangent = inputs_for(segments, dtype)
    packed = PackedAttention(segments, torch.device("cpu"), dtype).attend(*inputs, SCALE, window)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = truth(segments, *exact, window)
    ours = torch.autograd.grad((packed * cotangent.to(dtype)).sum(), inputs)
    theirs = torch.autograd.grad((expected * cotangent).sum(), exact)
    for mine, its in zip((packed, *ours), (expected, *theirs), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), its, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("segments", [Segments(LENGTHS), SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 11, 100])
@pytest.mark.parametrize("kind", ["flash_cpu", "sdpa"])
def test_sequences_attend_to_their_prefix_and_themselves(segments, window, kind, monkeypatch):
    monkeypatch.setattr(attention, "implementation", lambda *_: kind)
    assert_equals_truth(segments, window)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
def test_lower_precision(dtype, tolerance):
    assert_equals_truth(SHARED, None, tolerance, dtype)


def flash_attention(q, k, v, ends_q, ends_k, longest_q, longest_k, *, softmax_scale, causal, window_size):
    """What flash_attn documents: the masks of a sequence are aligned to the last query and the last key."""
    assert causal
    assert window_size[1] == 0
    assert (longest_q, longest_k) == (int(ends_q.diff().max()), int(ends_k.diff().max()))
    q, k, v = (x.tensor_split(ends[1:-1].long()) for x, ends in ((q, ends_q), (k, ends_k), (v, ends_k)))
    window = None if window_size[0] < 0 else window_size[0] + 1
    return torch.cat([dense(*qkv, softmax_scale, window) for qkv in zip(q, k, v, strict=True)])


def varlen_attention(q, k, v, *ends, scale, window_size):
    assert q.shape[1] == k.shape[1] == v.shape[1]
    return flash_attention(q, k, v, *ends, softmax_scale=scale, causal=True, window_size=window_size)


@pytest.mark.parametrize("segments", [Segments(LENGTHS), SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["flash_attn", "varlen"])
def test_calls_of_the_gpu_kernels(segments, window, kind, monkeypatch):
    """The arguments are right if the kernels do what they document; the kernels themselves need a GPU."""
    monkeypatch.setattr(attention, "implementation", lambda *_: kind)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attention))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=varlen_attention))
    assert_equals_truth(segments, window)


def test_a_sequence_does_not_depend_on_the_others_bit_for_bit():
    segments = Segments(LENGTHS)
    inputs, _ = inputs_for(segments, torch.float32, seed=1)
    together = PackedAttention(segments, torch.device("cpu"), torch.float32).attend(*inputs, SCALE, None)
    for length, *own, out in zip(LENGTHS, *(x.split(LENGTHS) for x in (*inputs, together)), strict=True):
        alone = PackedAttention([length], torch.device("cpu"), torch.float32).attend(*own, SCALE, None)
        assert torch.equal(alone, out)


# --- layout -----------------------------------------------------------------------------------------------------------


def test_segments_continue_their_prefix():
    segments = Segments([3, 2, 4, 1], [None, 0, 0, None])
    assert segments.positions(torch.device("cpu")).tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 0]
    assert segments.key_index(torch.device("cpu")).tolist() == [0, 1, 2, *(0, 1, 2, 3, 4), *(0, 1, 2, 5, 6, 7, 8), 9]
    assert segments.groups() == [(0, 3, [2, 4]), (9, 1, [])]
    assert segments.shared
    assert not Segments([3, 2]).shared
    assert Segments([]).positions(torch.device("cpu")).shape == (0,)


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ([None, 0], "3 segments have 2 prefixes"),
        ([0, None, None], "segment 0 continues segment 0"),
        ([None, 1, None], "segment 1 continues segment 1"),
        ([None, 2, None], "segment 1 continues segment 2"),
        ([None, None, 0], "segment 2 continues segment 0: expected the segment before it, or its prefix"),
        ([None, 0, 1], "segment 2 continues segment 1"),
        ([None, 0, -1], "segment 2 continues segment -1"),
    ],
)
def test_prefixes_out_of_place_are_refused(prefixes, message):
    with pytest.raises(ValueError, match=message):
        Segments([1, 2, 3], prefixes)
