"""Floating-point operations of an update: the kit compares their rate with the peak of the card's data sheet.

Matrix products and attention are counted. A product of (n, k) and (k, m) has 2 n k m operations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from nlgrpo.apps.plan.workload import Workload
from nlgrpo.model import lora

ATTENTION_BACKWARD = 2.5  # of the forward pass: five matrix products, one of them computed again, instead of two


def of_update(work: Workload) -> float:
    """Operations of the policy's forward and backward passes over a step of a rank.

    A matrix product has two in its backward pass, for the gradients of input and weight; one if the weight is frozen.
    """
    shape = work.shape
    attention = of_attention(work)
    products = of_forward(work) - attention
    head = of_head(work)
    adapters = 2 * _adapter_parameters(work) * work.tokens
    if work.adapter is None:
        flops = 3 * products
    else:
        flops = 2 * products + 3 * adapters
        if lora.HEAD in work.adapter.modules_to_save:
            flops += head
    flops += (1 + ATTENTION_BACKWARD) * attention
    if work.config.model.activation_checkpointing:
        flops += products - head + adapters + attention
        if not _ends_with_adapter(work):  # then the last product of a block is not needed
            flops -= 2 * shape.layers * shape.ffn * shape.width * work.tokens
    return flops


def of_forward(work: Workload) -> float:
    """Operations of a forward pass over a step of a rank."""
    return 2 * work.shape.matrices * work.tokens + of_attention(work) + of_head(work)


def of_head(work: Workload) -> float:
    """Operations of the head for all completion tokens of a step."""
    targets = work.completions * work.columns
    return 2 * work.shape.vocab * work.shape.width * targets


def of_attention(work: Workload) -> float:
    """Operations of q k^T and of its product with v over a step: a prompt is read once for its completions."""
    shape = work.shape
    total = 0
    for window, layers in Counter(shape.windows).items():
        prompt = pairs(0, work.prompt, window)
        completion = pairs(work.prompt, work.columns - 1, window)
        total += layers * (work.parts * prompt + work.samples * completion)
    return 4 * shape.heads * shape.head_dim * work.groups * total


def pairs(start: int, tokens: int, window: int | None = None) -> int:
    """Number of (query, key) pairs of ``tokens`` causal queries after ``start`` earlier tokens."""
    if window is None or start + tokens <= window:
        return tokens * start + tokens * (tokens + 1) // 2
    inside = max(0, window - start)
    return inside * start + inside * (inside + 1) // 2 + (tokens - inside) * window


def _adapter_parameters(work: Workload) -> int:
    """Number of parameters of the low-rank adapters."""
    if work.adapter is None:
        return 0
    return lora.count(replace(work.adapter, modules_to_save=()), work.shape)


def _ends_with_adapter(work: Workload) -> bool:
    """Whether the last linear layer of a block has an adapter."""
    if work.adapter is None:
        return False
    last = set(lora.parts_of(work.shape, "blocks.0.down"))
    return last <= set(lora.targets(work.adapter, work.shape))
