"""The rotation of a fused projection against the reference, to the bit, and the copied keys against indexing."""

import pytest
import torch

from nlgrpo.kernels import Segments, keys_of_segments, reference, rotate_queries_and_keys

HEADS, KV_HEADS, DIM = 4, 2, 8
CPU = torch.device("cpu")
# 2 of 5 prefixes are shared by one segment, 2 by three, one is empty; two sequences are alone, one of them empty.
SEGMENTS = Segments(
    [5, 4, 3, 1, 1, 6, 9, 0, 2, 8, 1, 0, 3, 0, 2],
    [None, None, 1, 1, 1, None, 5, 5, 5, None, 9, None, None, None, 13],
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rotary", [4, 8])
def test_the_rotation_is_that_of_the_reference_to_the_bit(dtype, rotary):
    tokens = 37
    angle = normal(tokens, rotary // 2, seed=1)
    rope = (angle.cos().to(dtype), angle.sin().to(dtype))
    qkv = normal(tokens, HEADS + 2 * KV_HEADS, DIM).to(dtype).requires_grad_()
    upstream = normal(tokens, HEADS + 2 * KV_HEADS, DIM, seed=2).to(dtype)
    ours = rotate_queries_and_keys(qkv, rope, HEADS)
    theirs = torch.cat(reference.split_and_rotate(qkv, rope, HEADS), dim=1)
    assert ours.is_contiguous()
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(out, qkv, upstream)[0] for out in (ours, theirs)))
    with torch.inference_mode():
        assert torch.equal(rotate_queries_and_keys(qkv, rope, HEADS), theirs)


def test_without_positions_nothing_is_copied():
    qkv = normal(3, HEADS + 2 * KV_HEADS, DIM)
    assert rotate_queries_and_keys(qkv, None, HEADS) is qkv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_copied_keys_and_their_gradient_are_those_of_indexing(dtype):
    """The gradient of a shared key is a sum of up to 4 numbers."""
    x = normal(sum(SEGMENTS.lengths), KV_HEADS, DIM).to(dtype).requires_grad_()
    index = SEGMENTS.key_index(CPU)
    ours, theirs = keys_of_segments(x, SEGMENTS), x[index]
    assert torch.equal(ours, theirs)
    upstream = normal(*ours.shape, seed=1).to(dtype)
    gradients = [torch.autograd.grad(out, x, upstream)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_the_gradient_of_a_shared_key_is_rounded_once():
    """In bfloat16, in which 256 + 1 is 256: copies added one by one would lose 63 of 64."""
    segments = Segments([2, *[1] * 64], [None, *[0] * 64])
    x = torch.zeros(66, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.ones(len(segments.key_index(CPU)), 1, 1, dtype=torch.bfloat16)
    upstream[:2] = 256
    (gradient,) = torch.autograd.grad(keys_of_segments(x, segments), x, upstream)
    assert gradient[:, 0, 0].tolist() == [320.0, 320.0, *[1.0] * 64]


def test_tensors_of_segments_are_made_once():
    """Also in inference mode, after which autograd must be able to save them."""
    segments = Segments([3, 2, 4], [None, 0, 0])
    with torch.inference_mode():
        first = segments.key_index(CPU)
    assert segments.key_index(CPU) is first
    assert not first.is_inference()
    assert segments.positions(CPU).tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert first.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8]
    assert [ends.tolist() for ends in segments.ends(CPU)] == [[0, 3, 5, 9], [0, 3, 8, 15]]
