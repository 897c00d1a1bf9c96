"""The calls of attention kernels for a GPU, whose arguments are checked without one."""

import sys
from types import SimpleNamespace

import pytest
import torch

from nlgrpo.kernels import Segments, packed_attention
from nlgrpo.model import attention
from nlgrpo.model.attention import PackedAttention

ALONE = Segments([5, 5, 3, 3, 3, 7, 1, 1, 5])
SHARED = Segments([5, 4, 3, 1, 1, 6, 9, 2, 2, 8, 1], [None, None, 1, 1, 1, None, 5, 5, 5, None, 9])


def dense(q, k, v, scale, window):
    """Attention (l, H, d) of the last l tokens of a sequence with keys (n + l, Hk, d)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = (behind >= 0) & (behind < (window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


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


@pytest.mark.parametrize("segments", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["flash_attn", "varlen"])
def test_calls_of_the_gpu_kernels(segments, window, kind, monkeypatch):
    """The arguments are right if the kernels do what they document; the kernels themselves need a GPU."""
    monkeypatch.setattr(attention, "implementation", lambda *_: kind)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attention))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=varlen_attention))
    generator = torch.Generator().manual_seed(0)
    tokens = sum(segments.lengths)
    qkv = torch.randn(tokens, 10, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(tokens, 6, 8, generator=generator, dtype=torch.float64)
    attend = PackedAttention(segments, torch.device("cpu"), torch.float64)
    ours = attend(qkv, None, heads=6, layer=0, scale=0.3, window=window)
    plain = packed_attention(qkv, None, segments, heads=6, scale=0.3, window=window)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(out, qkv, upstream) for out in (ours, plain)))


@pytest.fixture
def uncached():
    attention.implementation.cache_clear()
    yield
    attention.implementation.cache_clear()


@pytest.mark.parametrize(
    ("chosen", "installed", "expected"),
    [
        ("", True, "flash_attn"),
        ("", False, "varlen"),
        ("flash_attn", True, "flash_attn"),
        ("varlen", True, "varlen"),
        ("packed", True, "packed"),
        ("flash_attn", False, "flash-attn is not installed"),
        ("sdpa", True, "expected one of flash_attn, varlen, packed"),
    ],
)
def test_an_environment_variable_names_the_attention_on_a_gpu(chosen, installed, expected, monkeypatch, uncached):
    monkeypatch.setenv("NLGRPO_ATTENTION", chosen)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda _: True if installed else None)
    assert attention.implementation("cpu", torch.float32) == "packed"
    assert attention.implementation("cuda", torch.float32) == "packed"
    if expected in attention.KINDS:
        assert attention.implementation("cuda", torch.bfloat16) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            attention.implementation("cuda", torch.bfloat16)
