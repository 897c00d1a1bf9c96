"""Attention of rows that share prompts, used by search to sample candidates and to score them."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import rotate_queries_and_keys
from .dispatch import use_cpp


class Slots(NamedTuple):
    """Rows grouped by prompt, ``width`` slots for each of P prompts; ``width`` is the largest number of rows."""

    width: int
    rank: Tensor  # (R,) slot of each row among those of its prompt
    row: Tensor  # (P, width) row in each slot; in an empty slot any row


class Branches:
    """Prompt of each row: ``prompt`` (R,) int64, the index of one of P prompts; ``lengths`` (P,) int64 of the prompts.

    All rows are at the same column of their own cache. Caches what the layers of a model share in plain attention.
    """

    def __init__(self, lengths: Tensor, prompt: Tensor) -> None:
        self.lengths = lengths
        self.prompt = prompt
        self._head: Tensor | None = None
        self._hidden: dict[tuple[int, int, int, int | None], Tensor] = {}

    def positions(self, column: int, tokens: int) -> Tensor:
        """Positions (R n,) in the whole sequences of the n tokens of every row that start at its own ``column``."""
        new = torch.arange(column, column + tokens, device=self.prompt.device)
        return (self._row_lengths[:, None] + new).flatten()

    def per_prompt(self, x: Tensor) -> Tensor:
        """Group rows by prompt, (R, Hk, m, e) -> (P, Hk, width m, e), so that a prompt's keys are multiplied once.

        Empty slots hold copies of other rows. `per_row` does not read them.
        """
        return x[self._slots.row[:, None], self._heads(x)[:, None]].flatten(2, 3)

    def per_row(self, x: Tensor) -> Tensor:
        """Invert `per_prompt`."""
        slots = self._slots
        return x.unflatten(2, (slots.width, -1))[self.prompt[:, None], self._heads(x), slots.rank[:, None]]

    def _heads(self, x: Tensor) -> Tensor:
        """Index (Hk,) of the key heads in dimension 1 of ``x``, which is the same for all layers."""
        if self._head is None or len(self._head) != x.shape[1]:
            self._head = torch.arange(x.shape[1], device=x.device)
        return self._head

    @cached_property
    def _row_lengths(self) -> Tensor:
        """Length (R,) of each row's prompt."""
        return self.lengths[self.prompt]

    @cached_property
    def _slots(self) -> Slots:
        order = self.prompt.argsort(stable=True)
        counts = torch.bincount(self.prompt, minlength=len(self.lengths))
        width = int(counts.max())
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self.prompt[order]]
        row = torch.zeros(len(counts), width, dtype=torch.int64, device=order.device)
        row[self.prompt, rank] = torch.arange(len(order), device=order.device)
        return Slots(width, rank, row)

    def hidden(self, column: int, tokens: int, columns: int, window: int | None) -> Tensor:
        """Mask (R, 1, 1, n, C + column + n): the prompt's (C) and the row's columns that a new token does not see."""
        key = (column, tokens, columns, window)
        if key not in self._hidden:
            # one mask per window
            self._hidden = {k: mask for k, mask in self._hidden.items() if k[:3] == key[:3]}
            self._hidden[key] = self._mask(*key)
        return self._hidden[key]

    def _mask(self, column: int, tokens: int, columns: int, window: int | None) -> Tensor:
        device = self.prompt.device
        lengths = self._row_lengths[:, None, None]
        position = lengths + torch.arange(column, column + tokens, device=device)[:, None]
        shared = torch.arange(columns, device=device)
        own = lengths + torch.arange(column + tokens, device=device)
        keys = torch.cat((torch.where(shared < lengths, shared, torch.iinfo(torch.int64).max), own), dim=-1)
        hidden = keys > position
        if window is not None:
            hidden |= keys <= position - window
        return hidden[:, None, None]


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

        q, k = rotate(q), rotate(k);   own[:, :, :, column : column + n] = (k, v)
        out = softmax(scale q k_c^T over the columns c that the token sees) v_c

    Keys and values of a prompt are stored once for all its rows. qkv (R n, H + 2 Hk, d), row after row: H = ``heads``
    query heads, then Hk key heads, then Hk value heads, H a multiple of Hk. ``rope``: cos and sin, each (R n, r/2) with
    r <= d, of the token's position (`reference.rotate`); None: no rotation. ``own`` (2, R, Hk, columns, d), keys and
    values, is **modified in place**. ``prompts`` (2, P, Hk, C, d): prompt p in its first ``branches.lengths[p]``
    columns. ``window``: maximum number of tokens that a token sees, itself included. Returns (R n, H, d). Not
    differentiable.

    ``impl``: "auto", "cpp" (float32 on a CPU) or "torch". Raises ValueError for an ``impl`` that cannot run, and
    RuntimeError for shapes that do not match.
    """
    if use_cpp(impl, "branch_attention", qkv, own, prompts, *(rope or ())):
        cos, sin = rope or (None, None)
        return torch.ops.nlgrpo.branch_attention(
            qkv, cos, sin, own, column, prompts, branches.lengths, branches.prompt, window or 0, scale, heads
        )
    rows = own.shape[1]
    n = len(qkv) // rows
    end = column + n
    kv_heads = own.shape[2]
    rotated = rotate_queries_and_keys(qkv, rope, heads).unflatten(0, (-1, n)).transpose(1, 2)
    q, k, v = rotated.split((heads, kv_heads, kv_heads), dim=1)
    own[0, :, :, column:end] = k
    own[1, :, :, column:end] = v
    q = (scale * q).unflatten(1, (kv_heads, -1)).flatten(2, 3)  # (R, Hk, G n, d): the queries of a key head
    # Views in which a head's columns are one matrix, so that no product copies its keys or values.
    keys, values = prompts
    own_keys, own_values = own[:, :, :, :end]
    by_prompt = branches.per_row(_scores(branches.per_prompt(q), keys))
    scores = torch.cat((by_prompt, _scores(q, own_keys)), dim=-1)
    hidden = branches.hidden(column, n, prompts.shape[3], window)
    scores = scores.unflatten(2, (-1, n)).masked_fill_(hidden, -torch.inf)
    probs = scores.softmax(-1).to(values.dtype).flatten(2, 3)
    prompt_probs, own_probs = probs.split((prompts.shape[3], end), dim=-1)
    out = branches.per_row(branches.per_prompt(prompt_probs) @ values) + own_probs @ own_values
    return out.unflatten(2, (-1, n)).flatten(1, 2).transpose(1, 2).flatten(0, 1)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """q keys^T, in float32 for narrow dtypes: rounded to 8 bits, a score of 10 would be off by 0.02."""
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    if q.is_cuda and narrow:
        out = torch.bmm(q.flatten(0, 1), keys.flatten(0, 1).mT, out_dtype=torch.float32)
        return out.unflatten(0, q.shape[:2])
    if q.is_cuda:
        return q @ keys.mT
    if narrow:
        return q.float() @ keys.float().mT
    # MKL rounds a product with a transposed matrix differently. The copy keeps the draws of a seed as they were.
    return q @ (keys.mT.contiguous() if len(keys) > 1 else keys.mT)
