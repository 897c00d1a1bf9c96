"""KV cache of a search: rows share their prompts' keys and values, grow, and branch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nlgrpo.kernels import Branches, branch_attention
from nlgrpo.model.attention import Rope


class SharedCache:
    """R rows, each a continuation of one of P prompts by ``column`` tokens. A prompt is stored once.

    ``prompts`` (layers, P, 2 Hk, C, d) has the keys, then the values, of the prompts in their first columns; ``own``
    (layers, R, 2 Hk, columns, d) those of the continuations, with room for the tokens before rows branch again;
    ``branches`` has the prompt of each row.

    Called as the attention of a block, it takes n new tokens per row, row by row, writes their keys and values after
    the row's own, and lets each token attend to its prompt, its row, and itself. `advance` then makes them part of the
    rows, once for all layers.
    """

    def __init__(self, kv: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """Start with one row per prompt. ``kv``: per layer, keys and values (T, 2 Hk, d) of the packed prompts."""
        heads, d = kv[0].shape[1:]
        self.prompts = kv[0].new_zeros(len(kv), len(lengths), heads, max(lengths), d)
        for i, layers in enumerate(zip(*(x.split(list(lengths)) for x in kv), strict=True)):
            self.prompts[:, i, :, : lengths[i]] = torch.stack(layers).transpose(1, 2)
        self.own = kv[0].new_zeros(len(kv), len(lengths), heads, 0, d)
        self.column = 0
        device = kv[0].device
        self.branches = Branches(torch.tensor(lengths, device=device), torch.arange(len(lengths), device=device))

    @property
    def nbytes(self) -> int:
        return self.prompts.nbytes + self.own.nbytes

    @property
    def prompt(self) -> Tensor:
        """Index (R,) of each row's prompt."""
        return self.branches.prompt

    def branch(self, rows: Tensor, tokens: int) -> None:
        """Make row i a copy of row ``rows[i]`` with room for ``tokens`` more. Prompts are not copied."""
        layers, _, heads, _, d = self.own.shape
        own = self.own.new_empty(layers, len(rows), heads, self.column + tokens, d)
        torch.index_select(self.own[:, :, :, : self.column], 1, rows, out=own[:, :, :, : self.column])
        self.own = own
        self.branches = Branches(self.branches.lengths, self.prompt[rows])

    def advance(self, tokens: int) -> None:
        self.column += tokens

    def positions(self, tokens: int) -> Tensor:
        """Positions (R n,) of the next n tokens of each row in its sequence, prompt included."""
        return self.branches.positions(self.column, tokens)

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        return branch_attention(
            qkv, rope, self.own[layer], self.column, self.prompts[layer], self.branches,
            heads=heads, scale=scale, window=window,
        )  # fmt: skip
