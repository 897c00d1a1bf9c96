"""Logits of a language model for one block of tokens at a time, shared by the ops that start from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import linear, times_weight

IGNORE = -100
# Size of a block of logits: 32 MiB on a CPU; on a GPU 4,096 tokens of a vocabulary of 151,936 (Qwen) in bfloat16.
BLOCK_BYTES = {"cpu": 2**25, "cuda": 4096 * 151_936 * 2}


def checked(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden, weight and bias as plain tensors of the dtype in which a linear layer would compute.

    Raises ValueError as `nlgrpo.kernels.linear_logprob`.
    """
    hidden, weight, bias = _as_a_linear_layer(hidden, weight, bias)
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden (T, D) and weight (V, D), got {shape(hidden)} and {shape(weight)}.")
    if not weight.shape[0]:
        raise ValueError(f"expected weight (V, D) with V >= 1, got {shape(weight)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias ({weight.shape[0]},), one per row of weight, got {shape(bias)}.")
    dtypes = {x.dtype for x in (hidden, weight, bias) if x is not None}
    if len(dtypes) > 1:
        raise ValueError(f"expected hidden, weight and bias of one dtype, got {', '.join(sorted(map(str, dtypes)))}.")
    check_devices(hidden, weight=weight, bias=bias)
    check_targets(targets, hidden, temperature)
    return hidden, weight, bias


def check_devices(first: Tensor, **others: Tensor | None) -> None:
    for name, x in others.items():
        if x is not None and x.device != first.device:
            raise ValueError(f"expected {name} on {first.device}, as the first argument, got {x.device}.")


def check_targets(targets: Tensor, rows: Tensor, temperature: float) -> None:
    if targets.shape != rows.shape[:1]:
        raise ValueError(f"expected targets ({rows.shape[0]},), one per row of {shape(rows)}, got {shape(targets)}.")
    if targets.dtype != torch.int64:
        raise ValueError(f"expected targets of dtype torch.int64, got {targets.dtype}; call targets.long().")
    check_devices(rows, targets=targets)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: expected a number > 0.")


def shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _as_a_linear_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    device = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    weight = gathered(weight, dtype)
    bias = None if bias is None else gathered(bias, dtype)
    return hidden, weight, bias


def blocks(targets: Tensor, vocabulary: int, itemsize: int) -> list[slice | Tensor]:
    """Return the indices of the tokens that are not ignored, one entry per block: slices if no token is ignored.

    On a CPU, raises ValueError for a target outside the vocabulary. On a GPU its log-probability is NaN.
    """
    if targets.is_cpu:
        _check_range(targets, vocabulary)
    kept = (targets != IGNORE).nonzero()[:, 0]
    budget = BLOCK_BYTES["cpu" if targets.is_cpu else "cuda"]
    size = max(64, budget // max(1, vocabulary * itemsize))
    starts = range(0, len(kept), size)
    if len(kept) == len(targets):
        return [slice(start, start + size) for start in starts]
    return [kept[start : start + size] for start in starts]


def _check_range(targets: Tensor, vocabulary: int) -> None:
    wrong = ((targets < 0) | (targets >= vocabulary)) & (targets != IGNORE)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(f"targets[{i}] = {int(targets[i])}: expected {IGNORE} or a token in [0, {vocabulary}).")


def block_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, emulate_bf16: bool) -> Tensor:
    """Return the logits (n, V) of a block of hidden states. ``emulate_bf16``: rounded to bfloat16."""
    out = linear(hidden, weight, bias)
    return out.bfloat16().to(out.dtype) if emulate_bf16 else out


class Gradients:
    """Gradients of hidden, weight and bias, accumulated over ``count`` blocks.

    ``dtype``: dtype of the results for weight and bias, by default that of ``weight``. Several blocks of a narrow dtype
    are summed in float32, which takes 4 V D additional bytes.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, wanted: list[bool], count: int = 1, dtype: torch.dtype | None = None
    ) -> None:
        self.wanted = wanted
        self.dtype = dtype or weight.dtype
        self.empty = True
        wide = torch.promote_types(weight.dtype, torch.float32)
        new = weight.new_empty if count else weight.new_zeros
        self.hidden = hidden.new_zeros(hidden.shape if wanted[0] else 0)
        self.weight = new(weight.shape if wanted[1] else 0, dtype=self.dtype if count < 2 else wide)
        self.bias = weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=wide)

    def add(self, rows: slice | Tensor, grad: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Add a block whose logits have the gradient ``grad (n, V)``."""
        if self.wanted[0]:
            self.hidden[rows] = times_weight(grad, weight)
        if self.wanted[1]:
            _add_product(self.weight, grad.T, hidden, beta=0 if self.empty else 1)
        if self.wanted[2]:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        self.empty = False

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight.to(self.dtype), self.bias.to(self.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """Compute total = beta total + a @ b in place. ``total`` has their dtype or float32; with beta 0 it may be NaN."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total), b.to(total), beta=beta)


def gathered(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a sharded parameter (a DTensor) gathered and in ``dtype``; other parameters unchanged.

    Each rank computes a gradient of the full parameter from its own tokens. The parameter gets their mean, as under
    FSDP2.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import DTensor, Partial  # the import takes a second, so only if needed

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    sharded = parameter.to(dtype)
    assert isinstance(sharded, DTensor)
    full = sharded.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda grad: grad / mesh.size())
    return full
