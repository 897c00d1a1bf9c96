"""Seconds of sampling with nlgrpo's engine on a GPU.

    token = max(launches x seconds of a launch, products + reads and writes of attention and sampler)

Each op of plain PyTorch is a kernel of its own. Up to several hundred rows, Python and PyTorch need more time to launch
it than the GPU to run it. So a token takes about as long for any number of rows, until the products, the scores of the
attention and the sampler take longer. Kernels are counted in the engine's code.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from nlgrpo.apps.plan import sampling_memory
from nlgrpo.apps.plan.machine import Machine
from nlgrpo.apps.plan.workload import Workload
from nlgrpo.model import lora
from nlgrpo.model.architectures import Shape

BLOCK = 9  # two norms, four products, an activation and two sums
GATED = 1  # the product of gate and up
ATTENTION = 16  # two copies to the cache, four products, four gathers by prompt or by row, scores, mask, softmax, ..
ROTATION = 5  # two products, two sums, and a copy of the values
QK_NORM = 4  # the norm, its weight, their product, and the concatenation with the values
ADAPTER = 4  # for each part of a layer with an adapter that is not merged: two casts, two products
OUTSIDE = 22  # of the layers: embedding, positions, cos and sin, the mask, norm, head, and the state of the rows
DRAW = {"triton": 2, "torch": 9, "top_p": 25}  # by sampler; a sort is several kernels


# --- operations of attention ------------------------------------------------------------------------------------------


def pairs(start: int, tokens: int, window: int | None = None) -> int:
    """Number of (query, key) pairs of ``tokens`` causal queries after ``start`` earlier tokens."""
    if window is None or start + tokens <= window:
        return tokens * start + tokens * (tokens + 1) // 2
    inside = max(0, window - start)
    return inside * start + inside * (inside + 1) // 2 + (tokens - inside) * window


def attention_flops(shape: Shape, start: int, tokens: int) -> float:
    """Operations of q k^T and of its product with v, over all layers, for one sequence."""
    layers = Counter(shape.windows)
    return 4 * shape.heads * shape.head_dim * sum(n * pairs(start, tokens, window) for window, n in layers.items())


# --- sampling ---------------------------------------------------------------------------------------------------------


def launches(work: Workload) -> int:
    """Kernels for a token of all rows. Adapters that are merged add none."""
    layer = of_a_layer(work.shape)
    if work.adapter is not None and not sampling_memory.merged(work):
        layer += ADAPTER * len(lora.targets(work.adapter, work.shape))
    return work.shape.layers * layer + OUTSIDE + DRAW[sampling_memory.sampler(work)]


def of_a_layer(shape: Shape) -> int:
    """Kernels of a layer for a token: 31 for Llama and Qwen2, 35 for Qwen3, 30 for GPT-NeoX, 25 for GPT-2."""
    rotation = ROTATION if shape.rotary_dim else 0
    return BLOCK + ATTENTION + rotation + GATED * shape.gated + QK_NORM * shape.qk_norm


def seconds(work: Workload, machine: Machine, rows: int) -> float:
    """Seconds to sample ``rows`` completions together: a prefill, which gives their first tokens, and all others."""
    samples = work.config.rollout.samples
    prompts = max(1.0, rows / samples)
    launching = launches(work) * machine.costs.launch_seconds
    first = max(launching, prefill(work, machine, prompts)) + rows * of_a_draw(work) / machine.bandwidth
    t = torch.arange(1, work.columns, dtype=torch.float64)
    moved = _cache(work, t, prompts, rows) + _scores(work, t, rows) + rows * of_a_draw(work)
    tokens = products(work, machine, rows) + moved / machine.bandwidth
    return first + float(tokens.clamp(min=launching).sum())


def prefill(work: Workload, machine: Machine, prompts: float) -> float:
    """Seconds of the products and the attention of ``prompts``, each computed once for all its completions."""
    shape = work.shape
    head = 2 * shape.vocab * shape.width
    flops = prompts * (2 * shape.matrices * work.prompt + attention_flops(shape, 0, work.prompt) + head)
    return max(flops / machine.flops, _weights(work) / machine.bandwidth)


def products(work: Workload, machine: Machine, rows: int) -> float:
    """Seconds of a token's products with weights, which are read once for all rows."""
    flops = 2 * rows * (work.shape.matrices + work.shape.vocab * work.shape.width)
    return max(flops / machine.flops, _weights(work) / machine.bandwidth)


def of_a_draw(work: Workload) -> float:
    """Bytes that the sampler reads and writes for a row.

    Triton's kernels read the logits once, and a block of them again. Plain PyTorch casts them, divides them, and makes
    log-probs, probabilities, a float64 copy and its sums. With top_p a radix sort of values and indices comes first,
    about 175 bytes a logit.
    """
    vocab = work.shape.vocab
    size = work.compute.itemsize
    plain = (size + 4) + (4 + 4) + (8 + 4) + (4 + 4) + (4 + 8) + (8 + 8)
    per_logit = {"triton": size, "torch": plain, "top_p": plain + 175}
    return float(vocab * per_logit[sampling_memory.sampler(work)])


def _weights(work: Workload) -> float:
    """Bytes of the weights that a pass reads."""
    return float((work.shape.matrices + work.shape.vocab * work.shape.width) * work.compute.itemsize)


def _cache(work: Workload, t: Tensor, prompts: float, rows: int) -> Tensor:
    """Bytes of keys and values that each token ``t`` reads: those of a prompt once for all its rows."""
    shape = work.shape
    columns = prompts * work.prompt + rows * t
    return columns * (2 * shape.kv_heads * shape.head_dim * shape.layers * work.compute.itemsize)


def _scores(work: Workload, t: Tensor, rows: int) -> Tensor:
    """Bytes of the scores and probabilities that the attention of each token ``t`` writes to the memory and reads.

    A score is float32. It is written by the product, copied from the order by prompts to that by rows (those of the
    prompt), concatenated, masked in place, and normalized. A probability is cast, copied into the order by prompts
    (again those of the prompt), and read by the product with the values. A window masks scores, but all exist.
    """
    size = work.compute.itemsize
    cast = 4 + size if size < 4 else 0
    own = 4 + 8 + 8 + 8 + cast + size
    of_prompt = own + 8 + 2 * size
    return rows * work.shape.heads * work.shape.layers * (of_prompt * work.prompt + own * t)
