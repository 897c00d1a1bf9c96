"""Keys and values of rows that grow from shared prompts and branch: what a search keeps of a model between chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nlgrpo.attention import Rope
from nlgrpo.kernels import split_and_rotate


class SharedCache:
    """R rows, each the continuation of one of P prompts, all of ``column`` tokens; a prompt is kept once.

    ``prompts`` (layers, P, 2 Hk, C, d) holds the prompts' keys, then values, in their first ``lengths`` (P,) columns;
    ``own`` (layers, R, 2 Hk, room, d) those of the continuations; ``prompt`` (R,) says whose a row is.

    Called as the attention of a block, it takes n new tokens of every row, row after row, writes them behind the row's
    own, and lets each see its prompt, its row, and itself. `advance` then makes them part of the rows, once for all
    layers.
    """

    def __init__(self, kv: Sequence[Tensor], lengths: Sequence[int], room: int) -> None:
        """``kv``: of each layer the packed prompts' (T, 2 Hk, d); ``room``: tokens that a continuation may have."""
        heads, d = kv[0].shape[1:]
        self.lengths = torch.tensor(lengths, device=kv[0].device)
        self.prompts = kv[0].new_zeros(len(kv), len(lengths), heads, max(lengths), d)
        for i, own in enumerate(zip(*(x.split(list(lengths)) for x in kv), strict=True)):
            self.prompts[:, i, :, : lengths[i]] = torch.stack(own).transpose(1, 2)
        self.own = kv[0].new_zeros(len(kv), len(lengths), heads, room, d)
        self.column = 0
        self._stand(torch.arange(len(lengths), device=kv[0].device))

    @property
    def nbytes(self) -> int:
        return self.prompts.nbytes + self.own.nbytes

    def branch(self, rows: Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was; nothing but the rows' own columns is copied."""
        own = self.own.new_empty(self.own.shape[0], len(rows), *self.own.shape[2:])
        own[:, :, :, : self.column] = self.own[:, rows, :, : self.column]
        self.own = own
        self._stand(self.prompt[rows])

    def advance(self, tokens: int) -> None:
        self.column += tokens
        self.seen.clear()

    def positions(self, tokens: int) -> Tensor:
        """(R n,) of the next n tokens of every row, in its whole sequence."""
        new = torch.arange(self.column, self.column + tokens, device=self.prompt.device)
        return (self.lengths[self.prompt][:, None] + new).flatten()

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        n, end = len(qkv) // len(self.prompt), self.column + len(qkv) // len(self.prompt)
        q, k, v = (x.unflatten(0, (-1, n)).transpose(1, 2) for x in split_and_rotate(qkv, rope, heads))
        own = self.own[layer]
        own[:, :, self.column : end] = torch.cat((k, v), dim=1)
        q = (scale * q).unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # (R, Hk, G n, d): the queries of a key head
        (keys, values), (own_keys, own_values) = (x.chunk(2, dim=1) for x in (self.prompts[layer], own[:, :, :end]))
        scores = torch.cat((self._per_row(self._per_prompt(q) @ keys.mT), q @ own_keys.mT), dim=-1)
        scores = scores.unflatten(2, (-1, n)).masked_fill(~self._seen(n, window), -torch.inf)
        of_prompt, of_own = scores.softmax(-1).flatten(2, 3).split((keys.shape[2], end), dim=-1)
        out = self._per_row(self._per_prompt(of_prompt) @ values) + of_own @ own_values
        return out.unflatten(2, (-1, n)).flatten(1, 2).transpose(1, 2).flatten(0, 1)

    # --- which row is whose -------------------------------------------------------------------------------------------

    def _stand(self, prompt: Tensor) -> None:
        """Rows of these prompts; ``place``: where each goes when every prompt's stand together, ``width`` of each."""
        self.prompt = prompt
        self.seen: dict[int | None, Tensor] = {}
        order = prompt.argsort(stable=True)
        counts = torch.bincount(prompt, minlength=len(self.lengths))
        self.width = int(counts.max())
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[prompt[order]]
        self.place = prompt * self.width + rank

    def _per_prompt(self, x: Tensor) -> Tensor:
        """(R, Hk, m, e) -> (P, Hk, width m, e), so that a prompt's keys are multiplied once for all its rows."""
        out = x.new_zeros(len(self.lengths) * self.width, *x.shape[1:])
        out[self.place] = x
        return out.unflatten(0, (-1, self.width)).transpose(1, 2).flatten(2, 3)

    def _per_row(self, x: Tensor) -> Tensor:
        """The inverse of `_per_prompt`."""
        return x.unflatten(2, (self.width, -1)).transpose(1, 2).flatten(0, 1)[self.place]

    def _seen(self, n: int, window: int | None) -> Tensor:
        """(R, 1, 1, n, C + column + n): whether a new token sees a column, the same for all heads and layers."""
        if window not in self.seen:
            lengths, device = self.lengths[self.prompt][:, None, None], self.prompt.device
            here = lengths + torch.arange(self.column, self.column + n, device=device)[:, None]
            columns = torch.arange(self.prompts.shape[3], device=device)
            own = lengths + torch.arange(self.column + n, device=device)
            at = torch.cat((torch.where(columns < lengths, columns, torch.iinfo(torch.int64).max), own), dim=-1)
            seen = at <= here if window is None else (at <= here) & (at > here - window)
            self.seen[window] = seen[:, None, None]
        return self.seen[window]
