"""The attention that training uses on this machine, compared with dense attention in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from nlgrpo.apps.doctor.accuracy import against_float64, judge, normal
from nlgrpo.apps.doctor.findings import Result, attempt
from nlgrpo.kernels import Segments, extension
from nlgrpo.model.attention import PackedAttention, implementation

# A prompt of 40 tokens with three completions, one sequence alone, and one of a single token.
LENGTHS = [40, 30, 9, 21, 50, 1]
PREFIXES: list[int | None] = [None, 0, 0, 0, None, None]
HEADS = 4
KV_HEADS = 2
D = 64
SCALE = 0.125
WINDOW = 37
BOUND = 32  # roundings
SDPA_BOUND = 256  # of float32 on a GPU, whose products may be sums of products of narrower numbers
ADVICE = {
    "flash_attn": "set NLGRPO_ATTENTION=varlen (PyTorch's kernel) or NLGRPO_ATTENTION=packed (plain PyTorch)",
    "varlen": "set NLGRPO_ATTENTION=packed (plain PyTorch)",
    "packed": "set NLGRPO_EXT=0 (plain PyTorch)",
}


def attention() -> Iterator[Result]:
    """Compare the attention for each dtype that training can use, with and without a window."""
    yield attempt("cpu float32", partial(compare, "cpu", torch.float32), ADVICE["packed"])
    if torch.cuda.is_available():
        for dtype in (torch.bfloat16, torch.float32):
            name = f"cuda {str(dtype).removeprefix('torch.')}"
            kind = implementation("cuda", dtype)
            advice = ADVICE[kind] if kind != "packed" else "this is plain PyTorch: update torch, or report it"
            yield attempt(name, partial(compare, "cuda", dtype, advice), advice)


def compare(device: str, dtype: torch.dtype, advice: str = ADVICE["packed"]) -> Result:
    """Compare results and gradients, and name the implementation."""
    segments = Segments(LENGTHS, PREFIXES)
    tokens = sum(LENGTHS)
    qkv = normal(tokens, HEADS + 2 * KV_HEADS, D, device=device).to(dtype)
    angle = segments.positions(qkv.device)[:, None] * 0.7 ** torch.arange(D // 2, device=device)
    rope = angle.cos().to(dtype), angle.sin().to(dtype)
    attend = PackedAttention(segments, qkv.device, dtype)
    pairs = []
    for window in (None, WINDOW):
        ours = partial(attend, rope=rope, heads=HEADS, layer=0, scale=SCALE, window=window)
        truth = partial(dense, rope=rope, window=window)
        pairs += against_float64(ours, truth, [qkv])
    bound = SDPA_BOUND if (device, dtype) == ("cuda", torch.float32) else BOUND
    result = judge(pairs, bound, advice)
    kind = attend.kind
    if kind == "packed":
        compiled = extension.available() and device == "cpu" and dtype == torch.float32
        kind = "the compiled CPU op" if compiled else "PyTorch's scaled_dot_product_attention"
    return Result(result.status, f"{kind}, {result.detail}", result.advice, numbers=result.numbers)


def dense(qkv: Tensor, *, rope: tuple[Tensor, Tensor], window: int | None) -> Tensor:
    """Attention with one matrix of all scores: a token sees its own segment and its prefix, up to itself."""
    turn = torch.complex(rope[0].double(), rope[1].double())[:, None]
    qk, v = qkv.split((HEADS + KV_HEADS, KV_HEADS), dim=1)
    turned = torch.complex(*qk.chunk(2, -1)) * turn
    q, k = torch.cat((turned.real, turned.imag), -1).split((HEADS, KV_HEADS), dim=1)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    seen = visible(window).to(qkv.device)
    scores = SCALE * torch.einsum("qhd,khd->hqk", q, k)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def visible(window: int | None) -> Tensor:
    """Mask (T, T): which tokens, in columns, each token sees."""
    starts = [0 if prefix is None else LENGTHS[prefix] for prefix in PREFIXES]
    where = [(i, starts[i] + t) for i, length in enumerate(LENGTHS) for t in range(length)]  # segment, position
    rows = []
    for segment, position in where:
        own = (segment, PREFIXES[segment])
        rows.append([of in own and 0 <= position - other < (window or len(where)) for of, other in where])
    return torch.tensor(rows)
