"""Attention of rows that share prompts: what a search draws its candidates with, and reads them with."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from .dispatch import use_cpp
from .reference import split_and_rotate


class Branches:
    """Which of P prompts each of R rows continues: ``prompt`` (R,) int64; ``lengths`` (P,) int64, those of the prompts.

    All rows stand at the same column of their own. For the plain attention it keeps what the layers of a model share.
    """

    def __init__(self, lengths: Tensor, prompt: Tensor) -> None:
        self.lengths, self.prompt = lengths, prompt
        self._seen: dict[tuple[int, int, int, int | None], Tensor] = {}

    def positions(self, column: int, tokens: int) -> Tensor:
        """(R n,) of the n tokens of every row from ``column`` of its own, in its whole sequence."""
        new = torch.arange(column, column + tokens, device=self.prompt.device)
        return (self.lengths[self.prompt][:, None] + new).flatten()

    def per_prompt(self, x: Tensor) -> Tensor:
        """(R, Hk, m, e) -> (P, Hk, width m, e), so that a prompt's keys are multiplied once for all its rows."""
        place, width = self._stand
        out = x.new_zeros(len(self.lengths) * width, *x.shape[1:])
        out[place] = x
        return out.unflatten(0, (-1, width)).transpose(1, 2).flatten(2, 3)

    def per_row(self, x: Tensor) -> Tensor:
        """The inverse of `per_prompt`."""
        place, width = self._stand
        return x.unflatten(2, (width, -1)).transpose(1, 2).flatten(0, 1)[place]

    @cached_property
    def _stand(self) -> tuple[Tensor, int]:
        """Where each row goes when every prompt's stand together, and how many places each prompt has for that."""
        order = self.prompt.argsort(stable=True)
        counts = torch.bincount(self.prompt, minlength=len(self.lengths))
        width = int(counts.max())
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self.prompt[order]]
        return self.prompt * width + rank, width

    def seen(self, column: int, tokens: int, columns: int, window: int | None) -> Tensor:
        """(R, 1, 1, n, C + column + n): whether a new token sees a column of its prompt, which has C, or of its own."""
        key = (column, tokens, columns, window)
        if key not in self._seen:
            self._seen = {k: mask for k, mask in self._seen.items() if k[:3] == key[:3]}  # layers' windows may differ
            self._seen[key] = self._mask(*key)
        return self._seen[key]

    def _mask(self, column: int, tokens: int, columns: int, window: int | None) -> Tensor:
        lengths, device = self.lengths[self.prompt][:, None, None], self.prompt.device
        here = lengths + torch.arange(column, column + tokens, device=device)[:, None]
        shared = torch.arange(columns, device=device)
        own = lengths + torch.arange(column + tokens, device=device)
        at = torch.cat((torch.where(shared < lengths, shared, torch.iinfo(torch.int64).max), own), dim=-1)
        seen = at <= here if window is None else (at <= here) & (at > here - window)
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
    """Attention of n new tokens of each row, over its prompt, its own cache and the new tokens up to itself.

        q, k = rotate(q), rotate(k);   own[:, :, column : column + n] = (k, v)
        out = softmax(scale q k_c^T over the columns c that the token sees) v_c

    It is `decode_attention` for rows of which many continue one prompt, whose keys and values are kept once. qkv
    (R n, H + 2 Hk, d), row after row, and ``rope`` as there. ``own`` (R, 2 Hk, columns, d), keys before values, is
    **written in place**. ``prompts`` (P, 2 Hk, C, d): prompt p in its first ``branches.lengths[p]`` columns.
    ``window``: how many tokens one sees at most, itself included. Returns (R n, H, d). Not differentiable.

    ``impl``: "auto", "cpp" (float32 on a CPU) or "torch"; ValueError for one that cannot run. RuntimeError for shapes
    that do not fit.
    """
    if use_cpp(impl, "branch_attention", qkv, own, prompts, *(rope or ())):
        cos, sin = rope or (None, None)
        whose = (branches.lengths, branches.prompt)
        return torch.ops.nlgrpo.branch_attention(qkv, cos, sin, own, column, prompts, *whose, window or 0, scale, heads)
    n, end = len(qkv) // len(own), column + len(qkv) // len(own)
    q, k, v = (x.unflatten(0, (-1, n)).transpose(1, 2) for x in split_and_rotate(qkv, rope, heads))
    own[:, :, column:end] = torch.cat((k, v), dim=1)
    q = (scale * q).unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # (R, Hk, G n, d): the queries of a key head
    (keys, values), (own_keys, own_values) = (x.chunk(2, dim=1) for x in (prompts, own[:, :, :end]))
    scores = torch.cat((branches.per_row(branches.per_prompt(q) @ keys.mT), q @ own_keys.mT), dim=-1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    seen = branches.seen(column, n, prompts.shape[2], window)
    scores = scores.unflatten(2, (-1, n)).masked_fill(~seen, -torch.inf)
    shares = scores.softmax(-1).to(values.dtype).flatten(2, 3)
    of_prompt, of_own = shares.split((prompts.shape[2], end), dim=-1)
    out = branches.per_row(branches.per_prompt(of_prompt) @ values) + of_own @ own_values
    return out.unflatten(2, (-1, n)).flatten(1, 2).transpose(1, 2).flatten(0, 1)
