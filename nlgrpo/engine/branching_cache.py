"""Keys and values of rows that grow from shared prompts and branch: what a search keeps of a model between chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nlgrpo.kernels import Branches, branch_attention
from nlgrpo.model.attention import Rope


class SharedCache:
    """R rows, each the continuation of one of P prompts, all of ``column`` tokens; a prompt is kept once.

    ``prompts`` (layers, P, 2 Hk, C, d) holds the prompts' keys, then values, in their first columns; ``own``
    (layers, R, 2 Hk, columns, d) those of the continuations, with room for what is read before rows branch again;
    ``branches`` says whose a row is.

    Called as the attention of a block, it takes n new tokens of every row, row after row, writes them behind the row's
    own, and lets each see its prompt, its row, and itself. `advance` then makes them part of the rows, once for all
    layers.
    """

    def __init__(self, kv: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """A row for each prompt; ``kv``: of each layer the packed prompts' (T, 2 Hk, d)."""
        heads, d = kv[0].shape[1:]
        self.prompts = kv[0].new_zeros(len(kv), len(lengths), heads, max(lengths), d)
        for i, own in enumerate(zip(*(x.split(list(lengths)) for x in kv), strict=True)):
            self.prompts[:, i, :, : lengths[i]] = torch.stack(own).transpose(1, 2)
        self.own = kv[0].new_zeros(len(kv), len(lengths), heads, 0, d)
        self.column = 0
        device = kv[0].device
        self.branches = Branches(torch.tensor(lengths, device=device), torch.arange(len(lengths), device=device))

    @property
    def nbytes(self) -> int:
        return self.prompts.nbytes + self.own.nbytes

    @property
    def prompt(self) -> Tensor:
        """(R,) whose a row is."""
        return self.branches.prompt

    def branch(self, rows: Tensor, tokens: int) -> None:
        """Row i becomes what row ``rows[i]`` was, with room for ``tokens`` more; only its own columns are copied."""
        layers, _, heads, _, d = self.own.shape
        own = self.own.new_empty(layers, len(rows), heads, self.column + tokens, d)
        torch.index_select(self.own[:, :, :, : self.column], 1, rows, out=own[:, :, :, : self.column])
        self.own = own
        self.branches = Branches(self.branches.lengths, self.prompt[rows])

    def advance(self, tokens: int) -> None:
        self.column += tokens

    def positions(self, tokens: int) -> Tensor:
        """(R n,) of the next n tokens of every row, in its whole sequence."""
        return self.branches.positions(self.column, tokens)

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        return branch_attention(
            qkv, rope, self.own[layer], self.column, self.prompts[layer], self.branches,
            heads=heads, scale=scale, window=window,
        )  # fmt: skip
