"""The calls of attention kernels for a GPU, whose arguments are checked without one."""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from nlgrpo.kernels import Segments, packed_attention
from nlgrpo.model import attention
from nlgrpo.model.attention import PackedAttention
from nlgrpo.runtime.seeding import deterministic_algorithms

ALONE = Segments([5, 5, 3, 3, 3, 7, 1, 1, 5])
SHARED = Segments([5, 4, 3, 1, 1, 6, 9, 2, 2, 8, 1], [None, None, 1, 1, 1, None, 5, 5, 5, None, 9])


def dense(q, k, v, scale, window):
    """Attention (l, H, d) of the last l tokens of a sequence with keys (n + l, Hk, d)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = (behind >= 0) & (behind < (window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def flash_attention(
    q, k, v, ends_q, ends_k, longest_q, longest_k, *, softmax_scale, causal, window_size, deterministic=False
):
    """What flash_attn documents: the masks of a sequence are aligned to the last query and the last key."""
    assert causal
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert window_size[1] == 0
    assert (longest_q, longest_k) == (int(ends_q.diff().max()), int(ends_k.diff().max()))
    q, k, v = (x.tensor_split(ends[1:-1].long()) for x, ends in ((q, ends_q), (k, ends_k), (v, ends_k)))
    window = None if window_size[0] < 0 else window_size[0] + 1
    return torch.cat([dense(*qkv, softmax_scale, window) for qkv in zip(q, k, v, strict=True)])


def varlen_attention(q, k, v, *ends, scale, window_size, enable_gqa=False):
    """That of newer versions of PyTorch, which takes key heads that several query heads share."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert q.shape[2] % 8 == 0  # PyTorch 2.11: "head_size must be a multiple of 8, this is ensured by padding!"
    deterministic = torch.are_deterministic_algorithms_enabled()  # PyTorch's own reads the flag of the process
    options = {"causal": True, "window_size": window_size, "deterministic": deterministic}
    return flash_attention(q, k, v, *ends, softmax_scale=scale, **options)


def older_varlen_attention(q, k, v, *ends, scale, window_size):
    """That of versions whose signature has no ``enable_gqa``."""
    assert q.shape[1] == k.shape[1] == v.shape[1]
    return varlen_attention(q, k, v, *ends, scale=scale, window_size=window_size)


KERNELS = {"flash_attn": flash_attention, "varlen": varlen_attention, "older varlen": older_varlen_attention}


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """The call of one kernel, which is emulated; yields its name."""
    name = request.param
    calls = []

    def counted(*arguments, **options):
        calls.append(name)
        return KERNELS[name](*arguments, **options)

    counted.__signature__ = inspect.signature(KERNELS[name])
    monkeypatch.setattr(attention, "implementation", lambda *_: name.removeprefix("older "))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=counted))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=counted))
    yield name
    assert calls


def inputs(segments, dtype=torch.float64, rotary=6, size=8):
    """qkv of 6 query and 2 key heads of ``size``, rope, and the upstream gradient."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(segments.lengths)
    qkv = torch.randn(tokens, 10, size, generator=generator, dtype=dtype, requires_grad=True)
    angle = torch.randn(tokens, rotary // 2, generator=generator, dtype=dtype)
    rope = (angle.cos(), angle.sin()) if rotary else None
    return qkv, rope, torch.randn(tokens, 6, size, generator=generator, dtype=dtype)


@pytest.mark.parametrize("segments", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("rotary", "size"), [(0, 8), (6, 8), (8, 8), (6, 6), (6, 12), (6, 250)])
def test_calls_of_the_gpu_kernels(segments, window, rotary, size, kernel):
    """The arguments are right if the kernels do what they document; the kernels themselves need a GPU."""
    qkv, rope, upstream = inputs(segments, rotary=rotary, size=size)
    attend = PackedAttention(segments, torch.device("cpu"), torch.float64)
    ours = attend(qkv, rope, heads=6, layer=0, scale=0.3, window=window)
    plain = packed_attention(qkv, rope, segments, heads=6, scale=0.3, window=window)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(out, qkv, upstream) for out in (ours, plain)))


@pytest.mark.parametrize("kind", ["flash_attn", "varlen"])
def test_heads_that_are_too_large_for_flash_attention(kind):
    qkv, rope, _ = inputs(SHARED, size=264)
    attend = PackedAttention(SHARED, torch.device("cpu"), torch.float64, kind)
    ours = attend(qkv, rope, heads=6, layer=0, scale=0.3, window=None)
    assert torch.equal(ours, packed_attention(qkv, rope, SHARED, heads=6, scale=0.3))


@pytest.mark.parametrize("segments", [ALONE, SHARED], ids=["alone", "shared"])
def test_calls_of_the_gpu_kernels_in_float32(segments, kernel):
    """Against float64: products of 8 numbers, and sums of up to 3 gradients of a shared key."""
    qkv, rope, upstream = inputs(segments, torch.float32)
    exact = qkv.detach().double().requires_grad_()
    ours = PackedAttention(segments, torch.device("cpu"), torch.float32)(
        qkv, rope, heads=6, layer=0, scale=0.3, window=None
    )
    wide = tuple(x.double() for x in rope)
    plain = packed_attention(exact, wide, segments, heads=6, scale=0.3)
    torch.testing.assert_close(ours.double(), plain, rtol=1e-6, atol=1e-6)
    gradient = torch.autograd.grad(ours, qkv, upstream)[0].double()
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, exact, upstream.double())[0], rtol=5e-6, atol=5e-6)


def test_a_deterministic_run_asks_flash_attention_for_its_deterministic_gradient(kernel):
    """`flash_attention` compares its argument with the flag of the process."""
    qkv, rope, _ = inputs(SHARED)
    attend = PackedAttention(SHARED, torch.device("cpu"), torch.float64)
    with deterministic_algorithms(True):
        attend(qkv, rope, heads=6, layer=0, scale=0.3, window=None)
    attend(qkv, rope, heads=6, layer=0, scale=0.3, window=None)


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
