"""Memory that sampling with a KV cache needs, and the number of rows that fit into a given memory.

The plan of a run and the engine use the same functions, so they decode the same number of rows. Every number is bytes
of tensors, at the longest prompt and at completions of full length. What an allocator rounds up is not in it.

A row is a completion: R = P M rows of P prompts with M samples each. ``columns`` are the tokens of a completion.
"""

from __future__ import annotations

from typing import Literal

from nlgrpo.model.architectures import Shape

ROWS = 256  # decoded together where the free memory does not decide: on a CPU
USABLE = 0.9  # share of the free memory to give to rows: blocks of the allocator are rounded up, and split
BLOCK = 4096  # logits of a row that one program of the Triton sampler reads
PER_BLOCK = 32  # bytes of its results in the first pass: largest logit, sums, and the place of the token
COPIES = 0.5  # share of the free memory that copies of weights with merged adapters may take
PER_COLUMN = 8 + 8 + 8 + 4  # bytes: uniform noise and its bits, the token, its log-prob

Sampler = Literal["triton", "torch", "top_p"]


def sampler_of(*, filtered: bool, top_p: float, fused: bool) -> Sampler:
    """Return what draws the tokens. ``fused``: a Triton kernel on a GPU, or a compiled op on a CPU, can.

    They draw from the model's own distribution only: ``filtered`` (temperature 0, top_k, top_p or min_p) takes plain
    PyTorch, and ``top_p`` < 1 a sort.
    """
    if top_p < 1:
        return "top_p"
    return "triton" if fused and not filtered else "torch"


def cache_bytes(shape: Shape, tokens: float, itemsize: int) -> float:
    """Keys and values of ``tokens`` in all layers."""
    return 2.0 * shape.layers * shape.kv_heads * shape.head_dim * tokens * itemsize


def prefill_bytes(shape: Shape, prompt_tokens: int, itemsize: int) -> float:
    """Activations of a prompt in its prefill: one layer's, and the outputs of the head at its last token."""
    return (prompt_tokens * _layer_numbers(shape) + 2 * shape.vocab) * itemsize


def prompt_bytes(shape: Shape, prompt_tokens: int, itemsize: int) -> float:
    """A prompt with its keys and values, in its prefill."""
    return cache_bytes(shape, prompt_tokens, itemsize) + prefill_bytes(shape, prompt_tokens, itemsize)


def sampler_bytes(shape: Shape, itemsize: int, sampler: Sampler) -> float:
    """What drawing a row's token adds to its logits, which are numbers of ``itemsize`` bytes.

    In plain PyTorch, per logit: the scaled logits, the log-probs and the probabilities in float32, and their sums in
    float64, for which ``cumsum`` makes a copy in float64. With top_p the sort is larger: values and indices, with the
    index that it starts from and a copy of both in its workspace.
    """
    wide = max(4, itemsize)
    if sampler == "triton":
        return -(-shape.vocab // BLOCK) * PER_BLOCK
    drawn = 3 * wide + 2 * 8
    if sampler == "torch":
        return float(shape.vocab * drawn)
    ordered = wide + (wide + 8) + (8 + wide + 8)
    return float(shape.vocab * max(drawn, ordered))


def decoding_bytes(shape: Shape, prompt_tokens: int, columns: int, itemsize: int, sampler: Sampler = "triton") -> float:
    """What a row needs while its tokens are sampled, without its cache: the largest of the moments of a token.

    The logits of the last token exist until those of the next one replace them.
    """
    logits = shape.vocab * itemsize
    moments = (
        _layer_numbers(shape) * itemsize,
        _attention(shape, prompt_tokens, columns, itemsize),
        logits + 2 * shape.width * itemsize,
        sampler_bytes(shape, itemsize, sampler),
        # The cache grows one layer at a time: the old keys and values exist beside the new ones.
        cache_bytes(shape, columns, itemsize) / shape.layers,
    )
    return logits + max(moments) + columns * PER_COLUMN


def row_bytes(shape: Shape, prompt_tokens: int, columns: int, itemsize: int, sampler: Sampler = "triton") -> float:
    """A row with its cache, at the end of its completion. The prompt's keys and values are not in it."""
    decoding = decoding_bytes(shape, prompt_tokens, columns, itemsize, sampler)
    return cache_bytes(shape, columns, itemsize) + decoding


def peak_bytes(
    shape: Shape,
    *,
    prompts: int,
    rows: int,
    prompt_tokens: int,
    columns: int,
    itemsize: int,
    sampler: Sampler = "triton",
) -> float:
    """Most that sampling ``rows`` completions of ``prompts`` prompts together needs, beside the weights.

    The prefill ends before the first row has a cache.
    """
    prefill = prompts * prefill_bytes(shape, prompt_tokens, itemsize)
    decoding = rows * row_bytes(shape, prompt_tokens, columns, itemsize, sampler)
    return prompts * cache_bytes(shape, prompt_tokens, itemsize) + max(prefill, decoding)


def rows_that_fit(
    shape: Shape,
    *,
    prompt_tokens: int,
    columns: int,
    samples: int,
    itemsize: int,
    free: float,
    sampler: Sampler = "triton",
) -> int:
    """Return how many rows fit into ``free`` bytes together: a multiple of ``samples``, and at least ``samples``.

    The samples of a prompt are never divided. ``prompt_tokens``: of the longest prompt. ``columns``: most tokens of a
    completion. ``itemsize``: bytes of a number in the compute dtype. ``free`` is used up to the last byte; `USABLE` is
    the share of a GPU's free memory that is safe.
    """
    group = peak_bytes(
        shape,
        prompts=1,
        rows=samples,
        prompt_tokens=prompt_tokens,
        columns=columns,
        itemsize=itemsize,
        sampler=sampler,
    )
    return samples * max(1, int(free / group))


def _layer_numbers(shape: Shape) -> int:
    """Numbers per token that exist in a layer, without the scores: in the attention, or in the feed-forward."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    attention = 3 * shape.width + 4 * qkv  # input, norm; heads, rotated, and as the attention takes and returns them
    inside = 4 * shape.ffn if shape.gated else 2 * shape.ffn  # gate and up, silu(gate), its product with up
    return max(attention, inside + (3 if shape.gated else 4) * shape.width)


def _attention(shape: Shape, prompt_tokens: int, columns: int, itemsize: int) -> float:
    """Attention of a row's token in a layer: scores in float32, and the probabilities in the compute dtype.

    Until the end there are the scores of the prompt, and all scores with the mask applied. Beside them are, at the
    softmax, its result and a copy in the compute dtype; at the products with the values, that copy, and its part of the
    prompt grouped by prompts. With few heads, the int64 positions behind the mask take more.
    """
    wide = max(4, itemsize)
    narrow = itemsize if itemsize < wide else 0
    seen = prompt_tokens + columns
    softmax = shape.heads * (wide + narrow) * seen
    products = shape.heads * itemsize * (seen + prompt_tokens)
    positions = (8 + 8 + 1) * seen
    mask = seen  # bool
    scores = shape.heads * wide * (prompt_tokens + seen)
    return scores + mask + max(softmax, products, positions) + _layer_numbers(shape) * itemsize
