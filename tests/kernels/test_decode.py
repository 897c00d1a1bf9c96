"""Compiled and plain ops of a decoding step compared with float64."""

import math
import os
import subprocess
import sys

import pytest
import torch

from nlgrpo import kernels
from nlgrpo.kernels import extension

IMPLS = ["torch", "cpp"] if extension.available() or os.environ.get("NLGRPO_BUILD_EXT") == "1" else ["torch"]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_as_good_as_torch(ours, plain, truth):
    """The largest error is at most that of plain PyTorch in float32, plus a few roundings."""
    assert ours.dtype == torch.float32
    assert ours.shape == truth.shape
    room = 4e-7 * float(truth.abs().max())
    assert float((ours - truth).abs().max()) <= float((plain - truth).abs().max()) + room


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (7, 64), (48, 128), (3, 1), (300, 1021)])
def test_rms_norm(impl, rows, width):
    x, weight = 3 * normal(rows, width), normal(width, seed=1)
    truth = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert_as_good_as_torch(kernels.rms_norm(x, weight, 1e-5, impl=impl), plain, truth)
    strided = kernels.rms_norm(x.t().contiguous().t(), weight.repeat_interleave(2)[::2], 1e-5, impl=impl)
    assert_as_good_as_torch(strided, plain, truth)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (7, 64), (48, 344), (300, 1021)])
def test_swiglu(impl, rows, width):
    x = 4 * normal(rows, 2 * width)
    gate, up = x.double().chunk(2, -1)
    plain = torch.nn.functional.silu(x[:, :width]) * x[:, width:]
    assert_as_good_as_torch(kernels.swiglu(x, impl=impl), plain, gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("impl", IMPLS)
def test_swiglu_at_the_ends_of_the_exponential(impl):
    gate = torch.tensor([[-1e30, -200.0, -90.0, -87.0, 0.0, 87.0, 90.0, 1e30, math.nan]])
    out = kernels.swiglu(torch.cat((gate, torch.ones_like(gate)), -1), impl=impl)[0]
    assert out[:4].abs().max() < 1e-7
    assert out[4:8].tolist() == gate[0, 4:8].tolist()
    assert out[8].isnan()


def case(rows, heads, kv_heads, d, columns, rotary, seed=0):
    """qkv, rope, and a cache that is a view of a larger tensor and has unused columns."""
    angle = 3 * normal(rows, rotary // 2, seed=seed + 1)
    rope = (angle.cos(), angle.sin()) if rotary else None
    cache = normal(2, rows + 1, 2 * kv_heads, columns + 3, d, seed=seed + 2)[1, :rows, :, 1:]
    return normal(rows, heads + 2 * kv_heads, d, seed=seed), rope, cache


def by_hand(qkv, rope, cache, column, *, heads, scale, first, window):
    """Compute the result and the updated cache row by row and head by head in float64."""
    qkv, cache = qkv.double(), cache.double().clone()
    rows, kv_heads = len(qkv), cache.shape[1] // 2
    if rope is not None:
        half = rope[0].shape[1]
        turn = torch.complex(rope[0].double(), rope[1].double())[:, None]
        rotated = torch.complex(qkv[..., :half], qkv[..., half : 2 * half]) * turn
        qk = torch.cat((rotated.real, rotated.imag, qkv[..., 2 * half :]), -1)
        qkv = torch.cat((qk[:, : heads + kv_heads], qkv[:, heads + kv_heads :]), 1)
    cache[:, :, column] = qkv[:, heads:]
    out = qkv.new_zeros(rows, heads, qkv.shape[2])
    for r in range(rows):
        begin = max(0 if first is None else int(first[r]), 0 if window is None else column + 1 - window)
        for h in range(heads):
            g = h * kv_heads // heads
            keys, values = cache[r, g, begin : column + 1], cache[r, kv_heads + g, begin : column + 1]
            out[r, h] = (scale * keys @ qkv[r, h]).softmax(0) @ values
    return out, cache


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "d", "rotary"),
    [(1, 1, 1, 5, 4), (7, 6, 3, 16, 16), (48, 6, 1, 16, 4), (3, 6, 2, 64, 64), (7, 4, 4, 80, 20), (2, 2, 2, 128, 0)],
)
@pytest.mark.parametrize("window", [None, 1, 6])
def test_decode_attention(impl, rows, heads, kv_heads, d, rotary, window):
    column = 21
    qkv, rope, cache = case(rows, heads, kv_heads, d, column, rotary)
    firsts = torch.randint(0, column + 1, (rows,), generator=torch.Generator().manual_seed(3))
    for first in (None, firsts):
        options = {"heads": heads, "scale": d**-0.5, "first": first, "window": window}
        truth, after = by_hand(qkv, rope, cache, column, **options)
        plain = kernels.decode_attention(qkv, rope, cache.clone(), column, impl="torch", **options)
        written = cache.clone()
        ours = kernels.decode_attention(qkv, rope, written, column, impl=impl, **options)
        assert_as_good_as_torch(ours, plain, truth)
        torch.testing.assert_close(written.double(), after, atol=1e-6, rtol=0)
        untouched = torch.arange(written.shape[2]) != column
        assert torch.equal(written[:, :, untouched], cache[:, :, untouched])
        strided = torch.zeros(rows, 2 * kv_heads, 64, d)[:, :, 5 : 5 + written.shape[2]]  # a view that is not dense
        strided.copy_(cache)
        again = kernels.decode_attention(qkv, rope, strided, column, impl=impl, **options)
        assert torch.equal(again, ours) or impl == "torch"


@pytest.mark.skipif("cpp" not in IMPLS, reason="this install has no compiled ops (no compiler when it was built)")
class TestCompiled:
    def test_the_first_column_and_no_rows(self):
        qkv, rope, cache = case(4, 4, 2, 16, 0, 16)
        out = kernels.decode_attention(qkv, rope, cache, 0, heads=4, scale=0.25, impl="cpp")
        torch.testing.assert_close(out, qkv[:, 6:].repeat_interleave(2, 1))  # one column: its value
        none = kernels.decode_attention(qkv[:0], None, cache[:0], 0, heads=4, scale=0.25, impl="cpp")
        assert none.shape == (0, 4, 16)
        assert kernels.rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-5, impl="cpp").shape == (0, 8)

    def test_the_number_of_threads_does_not_change_a_bit(self):
        qkv, rope, cache = case(48, 8, 4, 64, 200, 64)
        x = normal(400, 1000)
        before, results = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                out = kernels.decode_attention(qkv, rope, cache, 199, heads=8, scale=0.125, impl="cpp")
                results.append((out, kernels.swiglu(x, impl="cpp"), kernels.rms_norm(x, x[0], 1e-5, impl="cpp")))
        finally:
            torch.set_num_threads(before)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"column": 30}, "column 30 is outside"),
            ({"column": -1}, "column -1 is outside"),
            ({"heads": 3}, "heads"),
            ({"heads": 0}, "heads"),
            ({"window": -2}, "window"),
            ({"first": torch.zeros(4, dtype=torch.int32)}, "first must be"),
            ({"first": torch.zeros(3, dtype=torch.int64)}, "first must be"),
            ({"rope": (torch.ones(4, 8), torch.ones(4, 7))}, "cos and sin"),
            ({"rope": (torch.ones(4, 9), torch.ones(4, 9))}, "cos and sin"),
            ({"cache": torch.zeros(4, 4, 22, 15)}, "cache must be"),
            ({"cache": torch.zeros(4, 4, 16, 22).transpose(2, 3)}, "contiguous along"),
            ({"qkv": torch.zeros(4, 8)}, "qkv must have 3 dimensions"),
        ],
    )
    def test_invalid_arguments_are_refused_before_the_cache_is_written(self, change, message):
        qkv, rope, cache = case(4, 4, 2, 16, 21, 16)
        given = {"qkv": qkv, "rope": rope, "cache": cache, "column": 21, "heads": 4, "scale": 0.25} | change
        before = cache.clone()
        with pytest.raises(RuntimeError, match=message):
            kernels.decode_attention(**given, impl="cpp")
        assert torch.equal(cache, before)

    def test_unsupported_tensors_use_torch(self):
        x, weight = normal(4, 8), torch.ones(8)
        for y in (x.double(), x.bfloat16()):
            assert kernels.rms_norm(y, weight.to(y), 1e-5).dtype == kernels.swiglu(y).dtype == y.dtype
            with pytest.raises(ValueError, match="float32 on a CPU"):
                kernels.swiglu(y, impl="cpp")
        with pytest.raises(ValueError, match="gradient"):
            kernels.swiglu(x.clone().requires_grad_(), impl="cpp")
        leaf = x.clone().requires_grad_()
        kernels.swiglu(leaf).sum().backward()
        assert leaf.grad is not None
        with pytest.raises(RuntimeError, match="must be float32"):
            torch.ops.nlgrpo.swiglu(x.double())
        with pytest.raises(RuntimeError, match="even number"):
            torch.ops.nlgrpo.swiglu(x[:, :7])
        with pytest.raises(RuntimeError, match="weight must have 8"):
            torch.ops.nlgrpo.rms_norm(x, weight[:3], 1e-5)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="'auto', 'cpp' or 'torch'"):
        kernels.swiglu(torch.ones(2, 2), impl="triton")


def test_without_the_compiled_ops():
    code = (
        "import torch; from nlgrpo import kernels; x = torch.ones(2, 4); print(kernels.swiglu(x).shape)\n"
        "try: kernels.swiglu(x, impl='cpp')\nexcept ValueError as e: print(e)"
    )
    env = os.environ | {"NLGRPO_EXT": "0"}
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert "torch.Size([2, 2])" in shown
    assert "no compiled ops" in shown
