"""Ops that PyTorch has only on a GPU, computed on a CPU in float32.

Each function takes the arguments of the op, all tensors on the CPU, and checks what the op's CUDA version requires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def implements(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        IMPLEMENTATIONS[name] = function
        return function

    return register


def require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"fake CUDA: {what}")


# --- products with another dtype of the result ------------------------------------------------------------------------


@implements("aten::mm.dtype")
def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return _wide_product(a, b, out_dtype)


@implements("aten::bmm.dtype")
def bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return _wide_product(a, b, out_dtype)


@implements("aten::addmm.dtype_out")
def addmm_out(
    added: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    require(out.dtype == out_dtype, f"addmm: out is {out.dtype}, and out_dtype {out_dtype}")
    require(added.dtype in (out_dtype, a.dtype), f"addmm: the added tensor is {added.dtype}")
    result = alpha * _wide_product(a, b, out_dtype)
    if beta != 0:
        result = result + beta * added
    return out.copy_(result)


def _wide_product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    require(a.dtype == b.dtype, f"a product of {a.dtype} and {b.dtype}")
    narrow = a.dtype in (torch.bfloat16, torch.float16)
    require(out_dtype == a.dtype or (narrow and out_dtype == torch.float32), f"{a.dtype} with out_dtype {out_dtype}")
    return (a.float() @ b.float()).to(out_dtype)


# --- fused RMS norm ---------------------------------------------------------------------------------------------------


@implements("aten::_fused_rms_norm")
def fused_rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    require(len(normalized_shape) == 1, "an RMS norm over several dimensions")
    smallest = torch.finfo(torch.float32).eps if eps is None else eps
    inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + smallest)
    result = x.float() * inverse
    if weight is not None:
        result = result * weight.float()
    return result.to(x.dtype), inverse


@implements("aten::_fused_rms_norm_backward")
def fused_rms_norm_backward(
    grad: Tensor, x: Tensor, normalized_shape: list[int], inverse: Tensor, weight: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor | None]:
    normalized = x.float() * inverse
    scaled = grad.float()
    if weight is not None:
        scaled = scaled * weight.float()
    grad_x = (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)) * inverse
    grad_weight = None
    if weight is not None and wanted[1]:
        grad_weight = (grad.float() * normalized).flatten(0, -2).sum(0).to(weight.dtype)
    return grad_x.to(x.dtype), grad_weight


# --- flash attention over packed sequences ----------------------------------------------------------------------------


@implements("aten::_flash_attention_forward")
def flash_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q (T, H, d), k and v (K, Hk, d); ``ends``: int32 offsets of the sequences. Queries and keys end together.

    Returns the output (T, H, d), the log-sum-exp of the scores (H, T), and states of a random generator.
    """
    _check_flash(q, k, v, ends_q, ends_k, longest_q, longest_k, dropout)
    groups = q.shape[1] // k.shape[1]
    outputs = []
    sums = []
    for queries, keys in _sequences(ends_q, ends_k):
        scores = _scores(q[queries], k[keys], scale, causal, window_size_left, window_size_right)
        values = v[keys].float().repeat_interleave(groups, dim=1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    state = torch.zeros(2, dtype=torch.uint64)
    return torch.cat(outputs).to(q.dtype), torch.cat(sums, dim=1), state, state.clone(), torch.zeros(0)


@implements("aten::_flash_attention_backward")
def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    *unused: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. The probabilities are exp(scores - log_sum), as in the kernel."""
    _check_flash(q, k, v, ends_q, ends_k, longest_q, longest_k, dropout)
    groups = q.shape[1] // k.shape[1]
    factor = q.shape[2] ** -0.5 if scale is None else scale
    grad_q, grad_k, grad_v = (torch.zeros(x.shape) for x in (q, k, v))
    for queries, keys in _sequences(ends_q, ends_k):
        scores = _scores(q[queries], k[keys], scale, causal, window_size_left, window_size_right)
        probs = torch.exp(scores - log_sum[:, queries, None])
        upstream = grad[queries].float()
        key = k[keys].float().repeat_interleave(groups, dim=1)
        value = v[keys].float().repeat_interleave(groups, dim=1)
        grad_probs = torch.einsum("qhd,khd->hqk", upstream, value)
        total = (upstream * out[queries].float()).sum(-1).T[:, :, None]  # sum over keys of probs * grad_probs
        grad_scores = probs * (grad_probs - total) * factor
        grad_q[queries] = torch.einsum("hqk,khd->qhd", grad_scores, key)
        by_head_k = torch.einsum("hqk,qhd->khd", grad_scores, q[queries].float())
        by_head_v = torch.einsum("hqk,qhd->khd", probs, upstream)
        grad_k[keys] = by_head_k.unflatten(1, (-1, groups)).sum(2)
        grad_v[keys] = by_head_v.unflatten(1, (-1, groups)).sum(2)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _check_flash(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, longest_q: int, longest_k: int, dropout: float
) -> None:
    require(q.dtype in (torch.bfloat16, torch.float16), f"flash attention in {q.dtype}")
    require(q.dtype == k.dtype == v.dtype, "flash attention with several dtypes")
    require(k.shape == v.shape, f"keys {tuple(k.shape)} and values {tuple(v.shape)}")
    require(q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} query heads with {k.shape[1]} key heads")
    require(q.shape[2] == k.shape[2] and q.shape[2] <= 256, f"heads of {q.shape[2]} and {k.shape[2]}")
    require(q.shape[2] % 8 == 0, "head_size must be a multiple of 8, this is ensured by padding!")  # PyTorch's words
    require(all(x.stride(-1) == 1 for x in (q, k, v)), "the last dimension is not contiguous")
    require(ends_q.dtype == ends_k.dtype == torch.int32, "the offsets are not int32")
    require(ends_q.is_contiguous() and ends_k.is_contiguous(), "the offsets are not contiguous")
    require(len(ends_q) == len(ends_k), "different numbers of sequences of queries and keys")
    require(int(ends_q[0]) == 0 and int(ends_q[-1]) == len(q), "the offsets do not cover the queries")
    require(int(ends_k[0]) == 0 and int(ends_k[-1]) == len(k), "the offsets do not cover the keys")
    require(int(ends_q.diff().max()) == longest_q, f"the longest sequence of queries is not {longest_q}")
    require(int(ends_k.diff().max()) == longest_k, f"the longest sequence of keys is not {longest_k}")
    require(dropout == 0, "dropout")


def _sequences(ends_q: Tensor, ends_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each sequence."""
    offsets_q = ends_q.tolist()
    offsets_k = ends_k.tolist()
    for i in range(len(offsets_q) - 1):
        yield slice(offsets_q[i], offsets_q[i + 1]), slice(offsets_k[i], offsets_k[i + 1])


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool, left: int | None, right: int | None) -> Tensor:
    """Scores (H, queries, keys) of one sequence, -inf where a query does not see a key."""
    factor = q.shape[2] ** -0.5 if scale is None else scale
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * factor
    first = len(k) - len(q)  # the position of the first query among the keys
    query = torch.arange(first, len(k))[:, None]
    key = torch.arange(len(k))
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if causal or right == 0:
        seen &= key <= query
    elif right is not None and right > 0:
        seen &= key <= query + right
    if left is not None and left >= 0:
        seen &= key >= query - left
    return scores.masked_fill(~seen, -torch.inf)
