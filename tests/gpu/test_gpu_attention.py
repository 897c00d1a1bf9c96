"""Attention on a GPU: over packed sequences, with gradients, and of decoded tokens over a KV cache."""

import pytest
import torch
from precision import BFLOAT16, FLOAT32, check, error

from nlgrpo.kernels import Branches, Segments, branch_attention, packed_attention
from nlgrpo.model.attention import PackedAttention, implementation

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 16, 0.3
ALONE = Segments([17, 1, 40, 2])
SHARED = Segments([12, 5, 9, 1, 20, 3, 7], [None, 0, 0, 0, None, 4, 4])  # two prompts, three and two completions


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- packed sequences -------------------------------------------------------------------------------------------------


def packed(segments, window, qkv, upstream, scale=SCALE):
    """Output and gradient in float64, by the implementation for CPUs."""
    leaf = qkv.double().requires_grad_()
    out = packed_attention(leaf, None, segments, heads=HEADS, scale=scale, window=window, impl="torch")
    return out.detach(), torch.autograd.grad(out, leaf, upstream.double())[0]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("segments", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_attention_and_its_gradients(gpu, dtype, segments, window):
    tokens = sum(segments.lengths)
    qkv = normal(tokens, HEADS + 2 * KV_HEADS, WIDTH).to(dtype)
    upstream = normal(tokens, HEADS, WIDTH, seed=1).to(dtype)
    attend = PackedAttention(segments, gpu, dtype)
    assert attend.kind == implementation("cuda", dtype) == ("packed" if dtype == torch.float32 else attend.kind)
    leaf = qkv.to(gpu).requires_grad_()
    out = attend(leaf, None, heads=HEADS, layer=0, scale=SCALE, window=window)
    (grad,) = torch.autograd.grad(out, leaf, upstream.to(gpu))
    bound = FLOAT32 if dtype == torch.float32 else BFLOAT16
    truth = packed(segments, window, qkv, upstream)
    wrong_scale = packed(segments, window, qkv, upstream, scale=1.1 * SCALE)
    key_missing = packed(segments, 5 if window else 19, qkv, upstream)
    for found, exact, planted, missing in zip((out, grad), truth, wrong_scale, key_missing, strict=True):
        check(found, exact, bound, planted=planted)
        check(found, exact, bound, planted=missing)


# --- decoding ---------------------------------------------------------------------------------------------------------

LENGTHS, PROMPT, COLUMN = (5, 12, 1), (1, 0, 1, 1, 2, 0), 7


def cache(keys, values):
    """Tensor of a cache (2, R, Hk, C, d) from keys and values (R, Hk, C, d) each."""
    return torch.stack((keys, values))


def decoding_case(tokens):
    """Queries, keys and values of new tokens, and of what the rows and prompts hold, in float64."""
    rows = len(PROMPT)
    return {
        "qkv": normal(rows * tokens, HEADS + 2 * KV_HEADS, WIDTH),
        "own": [normal(rows, KV_HEADS, COLUMN + tokens, WIDTH, seed=seed) for seed in (1, 2)],
        "prompts": [normal(len(LENGTHS), KV_HEADS, max(LENGTHS), WIDTH, seed=seed) for seed in (3, 4)],
    }


def dense(qkv, own, prompts, window=None, scale=SCALE):
    """Attention of each row by itself, its keys laid out one after another."""
    rows = len(PROMPT)
    new = qkv.unflatten(0, (rows, -1))
    tokens = new.shape[1]
    out = []
    for row, prompt in enumerate(PROMPT):
        queries, keys, values = new[row].split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        whole = []
        for stored, shared, appended in zip(own, prompts, (keys, values), strict=True):
            before = stored[row, :, :COLUMN]
            parts = (shared[prompt, :, : LENGTHS[prompt]], before, appended.transpose(0, 1))
            whole.append(torch.cat(parts, dim=1).repeat_interleave(HEADS // KV_HEADS, dim=0))
        total = whole[0].shape[1]
        distance = torch.arange(total - tokens, total)[:, None] - torch.arange(total)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scale * torch.einsum("qhd,hkd->hqk", queries, whole[0])
        out.append(torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), whole[1]))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_branch_attention(gpu, dtype, tokens, window):
    rounded = {
        name: [x.to(dtype) for x in value] if isinstance(value, list) else value.to(dtype)
        for name, value in decoding_case(tokens).items()
    }
    own, prompts = (cache(*rounded[name]).to(gpu) for name in ("own", "prompts"))
    branches = Branches(torch.tensor(LENGTHS, device=gpu), torch.tensor(PROMPT, device=gpu))
    found = branch_attention(
        rounded["qkv"].to(gpu), None, own, COLUMN, prompts, branches, heads=HEADS, scale=SCALE, window=window
    )
    exact = {
        name: [x.double() for x in value] if isinstance(value, list) else value.double()
        for name, value in rounded.items()
    }
    truth = dense(**exact, window=window)
    bound = FLOAT32 if dtype == torch.float32 else BFLOAT16
    check(found, truth, bound, planted=dense(**exact, window=window, scale=1.1 * SCALE))
    check(found, truth, bound, planted=dense(**exact, window=8 if window else 19))
    # The new keys and values are in the cache.
    new = exact["qkv"].unflatten(0, (len(PROMPT), -1))[:, :, HEADS:].transpose(1, 2)
    written = own[:, :, :, COLUMN : COLUMN + tokens]
    assert error(torch.cat(written.unbind(), dim=1), new) == 0
