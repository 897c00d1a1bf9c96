"""Attention of rows that share prompts, used by search to sample candidates and to score them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from .dispatch import use_cpp
from .reference import split_and_rotate


class Branches:
    """Prompt of each row: ``prompt`` (R,) int64, the index of one of P prompts; ``lengths`` (P,) int64 of the prompts.

    All rows are at the same column of their own cache. Caches what the layers of a model share in plain attention.
    """

    def __init__(self, lengths: Tensor, prompt: Tensor) -> None:
        self.lengths, self.prompt = lengths, prompt
        self._seen: dict[tuple[int, int, int, int | None], Tensor] = {}

    def positions(self, column: int, tokens: int) -> Tensor:
        """Positions (R n,) in the whole sequences of the n tokens of every row that start at its own ``column``."""
        new = torch.arange(column, column + tokens, device=self.prompt.device)
        return (self.lengths[self.prompt][:, None] + new).flatten()

    def per_prompt(self, x: Tensor) -> Tensor:
        """Group rows by prompt, (R, Hk, m, e) -> (P, Hk, width m, e), so that a prompt's keys are multiplied once."""
        slot, width = self._slots
        out = x.new_zeros(len(self.lengths) * width, *x.shape[1:])
        out[slot] = x
        return out.unflatten(0, (-1, width)).transpose(1, 2).flatten(2, 3)

    def per_row(self, x: Tensor) -> Tensor:
        """Invert `per_prompt`."""
        slot, width = self._slots
        return x.unflatten(2, (width, -1)).transpose(1, 2).flatten(0, 1)[slot]

    @cached_property
    def _slots(self) -> tuple[Tensor, int]:
        """Slot of each row when rows are grouped by prompt, and the number of slots per prompt."""
        order = self.prompt.argsort(stable=True)
        counts = torch.bincount(self.prompt, minlength=len(self.lengths))
        width = int(counts.max())
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self.prompt[order]]
        return self.prompt * width + rank, width

    def seen(self, column: int, tokens: int, columns: int, window: int | None) -> Tensor:
        """Mask (R, 1, 1, n, C + column + n): columns of the prompt (C of them) and of the row that a new token sees."""
        key = (column, tokens, columns, window)
        if key not in self._seen:
            self._seen = {k: mask for k, mask in self._seen.items() if k[:3] == key[:3]}  # one mask per window
            self._seen[key] = self._mask(*key)
        return self._seen[key]

    def _mask(self, column: int, tokens: int, columns: int, window: int | None) -> Tensor:
        lengths, device = self.lengths[self.prompt][:, None, None], self.prompt.device
        position = lengths + torch.arange(column, column + tokens, device=device)[:, None]
        shared = torch.arange(columns, device=device)
        own = lengths + torch.arange(column + tokens, device=device)
        keys = torch.cat((torch.where(shared < lengths, shared, torch.iinfo(torch.int64).max), own), dim=-1)
        seen = keys <= position if window is None else (keys <= position) & (keys > position - window)
        return seen[:, None, None]


def branch_attention(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    own: Tensor,
    column: int,
    prompts: Tensor,
    branches: Branches,
    *,
    heads: int,
    scale: float,
    window: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention of n new tokens of each row over its prompt, its own cache, and the new tokens up to itself.

        q, k = rotate(q), rotate(k);   own[:, :, column : column + n] = (k, v)
        out = softmax(scale q k_c^T over the columns c that the token sees) v_c

    Keys and values of a prompt are stored once for all its rows. qkv (R n, H + 2 Hk, d), row after row: H = ``heads``
    query heads, then Hk key heads, then Hk value heads, H a multiple of Hk. ``rope``: cos and sin, each (R n, r/2) with
    r <= d, of the token's position (`reference.rotate`); None: no rotation. ``own`` (R, 2 Hk, columns, d), keys before
    values, is **modified in place**. ``prompts`` (P, 2 Hk, C, d): prompt p in its first ``branches.lengths[p]``
    columns. ``window``: maximum number of tokens that a token sees, itself included. Returns (R n, H, d). Not
    differentiable.

    ``impl``: "auto", "cpp" (float32 on a CPU) or "torch". Raises ValueError for an ``impl`` that cannot run, and
    RuntimeError for shapes that do not match.
    """
    if use_cpp(impl, "branch_attention", qkv, own, prompts, *(rope or ())):
        cos, sin = rope or (None, None)
        lengths, prompt = branches.lengths, branches.prompt
        return torch.ops.nlgrpo.branch_attention(
            qkv, cos, sin, own, column, prompts, lengths, prompt, window or 0, scale, heads
        )
    n, end = len(qkv) // len(own), column + len(qkv) // len(own)
    q, k, v = (x.unflatten(0, (-1, n)).transpose(1, 2) for x in split_and_rotate(qkv, rope, heads))
    own[:, :, column:end] = torch.cat((k, v), dim=1)
    q = (scale * q).unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # (R, Hk, G n, d): the queries of a key head
    (keys, values), (own_keys, own_values) = (x.chunk(2, dim=1) for x in (prompts, own[:, :, :end]))
    by_prompt = branches.per_row(_scores(branches.per_prompt(q), keys))
    scores = torch.cat((by_prompt, _scores(q, own_keys)), dim=-1)
    seen = branches.seen(column, n, prompts.shape[2], window)
    scores = scores.unflatten(2, (-1, n)).masked_fill(~seen, -torch.inf)
    probs = scores.softmax(-1).to(values.dtype).flatten(2, 3)
    prompt_probs, own_probs = probs.split((prompts.shape[2], end), dim=-1)
    out = branches.per_row(branches.per_prompt(prompt_probs) @ values) + own_probs @ own_values
    return out.unflatten(2, (-1, n)).flatten(1, 2).transpose(1, 2).flatten(0, 1)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """q keys^T, in float32 for narrow dtypes: rounded to 8 bits, a score of 10 would be off by 0.02."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return q @ keys.mT
    if q.is_cuda:
        out = torch.bmm(q.flatten(0, 1), keys.flatten(0, 1).mT, out_dtype=torch.float32)
        return out.unflatten(0, q.shape[:2])
    return q.float() @ keys.float().mT
