"""Packed attention compared with softmax(q k^T) v of each sequence, in float64; every implementation."""

import os

import pytest
import torch

from nlgrpo.kernels import Segments, extension, packed_attention

IMPLS = ["torch", "cpp"] if extension.available() or os.environ.get("NLGRPO_BUILD_EXT") == "1" else ["torch"]
CPU = torch.device("cpu")
LENGTHS = [5, 5, 3, 3, 3, 7, 1, 1, 5]  # consecutive sequences of equal length share a call
SHARED = Segments([5, 4, 3, 1, 1, 6, 9, 2, 2, 8, 1, 0], [None, None, 1, 1, 1, None, 5, 5, 5, None, 9, None])
LONG = Segments([130, 70, 1, 30, 200, 25], [None, 0, 0, 0, None, None])  # several blocks of queries and keys


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs_for(segments, heads=6, kv_heads=2, d=8, rotary=4, dtype=torch.float64):
    """qkv, rope and the upstream gradient."""
    tokens = sum(segments.lengths)
    angle = segments.positions(CPU)[:, None] * normal(rotary // 2, seed=2)
    rope = (angle.cos().to(dtype), angle.sin().to(dtype)) if rotary else None
    qkv = normal(tokens, heads + 2 * kv_heads, d).to(dtype)
    return qkv.requires_grad_(), rope, normal(tokens, heads, d, seed=1).to(dtype)


def truth(qkv, rope, segments, heads, scale, window):
    """Attention token by token over the keys of its sequence, found by their positions."""
    kv_heads = (qkv.shape[1] - heads) // 2
    if rope is not None:
        half = rope[0].shape[1]
        turn = torch.complex(*rope)[:, None]
        rotated = torch.complex(qkv[..., :half], qkv[..., half : 2 * half]) * turn
        qk = torch.cat((rotated.real, rotated.imag, qkv[..., 2 * half :]), -1)
        qkv = torch.cat((qk[:, : heads + kv_heads], qkv[:, heads + kv_heads :]), 1)
    tokens = qkv.split(segments.lengths)
    out = [qkv[:0, :heads]]
    for i, prefix in enumerate(segments.prefixes):
        sequence = tokens[i] if prefix is None else torch.cat((tokens[prefix], tokens[i]))
        keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in sequence[:, heads:].split(kv_heads, 1))
        for t in range(len(sequence) - len(tokens[i]), len(sequence)):
            seen = slice(0 if window is None else max(0, t + 1 - window), t + 1)
            weights = (scale * torch.einsum("hd,khd->hk", sequence[t, :heads], keys[seen])).softmax(-1)
            out.append(torch.einsum("hk,khd->hd", weights, values[seen])[None])
    return torch.cat(out)


def assert_equals_truth(segments, window, impl, tolerance, dtype, **shape):
    qkv, rope, grad = inputs_for(segments, dtype=dtype, **shape)
    options = {"heads": grad.shape[1], "scale": 0.3, "window": window}
    ours = packed_attention(qkv, rope, segments, **options, impl=impl)
    assert ours.dtype == dtype
    exact = qkv.detach().double().requires_grad_()
    rope = None if rope is None else tuple(x.double() for x in rope)
    expected = truth(exact, rope, segments, **options)
    gradients = torch.autograd.grad(ours, qkv, grad) + torch.autograd.grad(expected, exact, grad.double())
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("segments", [Segments(LENGTHS), SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 11, 100])
@pytest.mark.parametrize("impl", IMPLS)
def test_sequences_attend_to_their_prefix_and_themselves(segments, window, impl):
    dtype, tolerance = (torch.float64, 1e-12) if impl == "torch" else (torch.float32, 3e-6)
    assert_equals_truth(segments, window, impl, tolerance, dtype)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [None, 7, 64, 150])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "rotary"), [(2, 2, 16, 16), (3, 1, 5, 2), (2, 1, 64, 0), (4, 2, 20, 10), (1, 1, 1, 0)]
)
def test_long_sequences(impl, window, heads, kv_heads, d, rotary):
    dtype, tolerance = (torch.float64, 1e-12) if impl == "torch" else (torch.float32, 2e-5)
    shape = {"heads": heads, "kv_heads": kv_heads, "d": d, "rotary": rotary}
    assert_equals_truth(LONG, window, impl, tolerance, dtype, **shape)


@pytest.mark.parametrize("window", [None, 3, 11])
def test_off_the_cpu_each_segment_is_a_call_of_sdpa(window, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert_equals_truth(SHARED, window, "torch", 1e-12, torch.float64)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
def test_lower_precision_in_plain_pytorch(dtype, tolerance):
    assert_equals_truth(SHARED, None, "torch", tolerance, dtype, rotary=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_sequence_does_not_depend_on_the_others_bit_for_bit(impl):
    segments = Segments(LENGTHS)
    qkv, rope, _ = inputs_for(segments, dtype=torch.float32)
    options = {"heads": 6, "scale": 0.3, "impl": impl}
    together = packed_attention(qkv, rope, segments, **options)
    parts = (x.split(LENGTHS) for x in (qkv, *rope, together))
    for length, own, cos, sin, out in zip(LENGTHS, *parts, strict=True):
        assert torch.equal(packed_attention(own, (cos, sin), [length], **options), out)


def test_large_scores_do_not_overflow():
    """The largest score of a query is in its last block of keys, and 2,000 times the others."""
    qkv = torch.ones(200, 3, 8)
    qkv[-1, :2] = 50
    qkv[:, 2] = torch.arange(200)[:, None]
    for impl in IMPLS:
        out = packed_attention(qkv, None, [200], heads=1, scale=1.0, impl=impl)
        torch.testing.assert_close(out[-1], torch.full((1, 8), 199.0))
        torch.testing.assert_close(out[:-1, 0, 0], torch.arange(199) / 2)


@pytest.mark.skipif("cpp" not in IMPLS, reason="this install has no compiled ops (no compiler when it was built)")
class TestCompiled:
    def test_the_number_of_threads_does_not_change_a_bit(self):
        qkv, rope, grad = inputs_for(LONG, heads=6, kv_heads=2, d=16, rotary=16, dtype=torch.float32)
        before, results = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                out = packed_attention(qkv, rope, LONG, heads=6, scale=0.25, impl="cpp")
                results.append((out, *torch.autograd.grad(out, qkv, grad)))
        finally:
            torch.set_num_threads(before)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))

    def test_any_strides(self):
        qkv, rope, grad = inputs_for(SHARED, dtype=torch.float32)
        options = {"heads": 6, "scale": 0.3, "impl": "cpp"}
        strided = qkv.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        wide = tuple(x.repeat_interleave(2, 1)[:, ::2] for x in rope)
        results = [packed_attention(x, r, SHARED, **options) for x, r in ((qkv, rope), (strided, wide))]
        assert torch.equal(*results)
        upstream = grad.transpose(0, 2).contiguous().transpose(0, 2)
        ours = torch.autograd.grad(results[0], qkv, grad), torch.autograd.grad(results[1], strided, upstream)
        assert torch.equal(ours[0][0], ours[1][0])

    def test_no_tokens(self):
        for segments in (Segments([]), Segments([0, 0], [None, 0])):
            qkv = torch.zeros(0, 3, 8, requires_grad=True)
            out = packed_attention(qkv, None, segments, heads=1, scale=1.0, impl="cpp")
            assert out.shape == (0, 1, 8)
            out.sum().backward()

    def test_a_window_longer_than_any_sequence_changes_nothing(self):
        assert_equals_truth(SHARED, 2**63 - 1, "cpp", 1e-5, torch.float32)

    def test_it_is_differentiable_once(self):
        qkv, rope, grad = inputs_for(SHARED, dtype=torch.float32)
        out = packed_attention(qkv, rope, SHARED, heads=6, scale=0.3)
        (first,) = torch.autograd.grad(out, qkv, grad.requires_grad_(), create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"heads": 3}, "heads"),
            ({"heads": 0}, "heads"),
            ({"heads": -(2**63)}, "heads"),
            ({"window": -1}, "window"),
            ({"rope": (torch.ones(6, 4), torch.ones(6, 3))}, "cos and sin"),
            ({"rope": (torch.ones(6, 5), torch.ones(6, 5))}, "cos and sin"),
            ({"qkv": torch.zeros(6, 32)}, "qkv must have 3 dimensions"),
        ],
    )
    def test_shapes_that_do_not_match_are_refused(self, change, message):
        given = {"qkv": torch.zeros(6, 4, 8), "rope": None, "heads": 2, "scale": 1.0} | change
        with pytest.raises(RuntimeError, match=message):
            packed_attention(given.pop("qkv"), given.pop("rope"), [2, 4], **given, impl="cpp")

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([[2, -1], [3, -1]], "add up to 5, but qkv has 6"),
            ([[2, -1], [5, 0]], "up to that of segment 1 add up to more than the 6 tokens"),
            ([[6, -1], [2**63 - 1, -1]], "add up to more than the 6 tokens"),
            ([[2, -1], [-1, -1]], "segment 1 has the length -1"),
            ([[6, 0]], "segment 0 continues segment 0"),
            ([[2, -1], [2, -1], [2, 0]], "segment 2 continues segment 0"),
            ([[2, -1], [4, 1]], "segment 1 continues segment 1"),
            ([[2, -1], [4, -2]], "segment 1 continues segment -2"),
            ([6, -1], r"segments must be \(S, 2\)"),
        ],
    )
    def test_layouts_that_are_not_valid_are_refused(self, rows, message):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.nlgrpo.packed_attention(torch.zeros(6, 3, 8), None, None, torch.tensor(rows), 0, 1.0, 1)


def test_lengths_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="the sequence lengths add up to 5, but there are 6 tokens"):
        packed_attention(torch.zeros(6, 3, 8), None, [2, 3], heads=1, scale=1.0)
    with pytest.raises(ValueError, match="float32 on a CPU"):
        packed_attention(torch.zeros(6, 3, 8).double(), None, [6], heads=1, scale=1.0, impl="cpp")


# --- layout -----------------------------------------------------------------------------------------------------------


def test_segments_continue_their_prefix():
    segments = Segments([3, 2, 4, 1], [None, 0, 0, None])
    assert segments.positions(CPU).tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 0]
    assert segments.key_index(CPU).tolist() == [0, 1, 2, *(0, 1, 2, 3, 4), *(0, 1, 2, 5, 6, 7, 8), 9]
    assert segments.key_lengths == [3, 5, 7, 1]
    assert segments.tensor.tolist() == [[3, -1], [2, 0], [4, 0], [1, -1]]
    assert segments.groups() == [(0, 3, [2, 4]), (9, 1, [])]
    assert segments.shared
    assert not Segments([3, 2]).shared
    assert Segments([]).positions(CPU).shape == (0,)


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
