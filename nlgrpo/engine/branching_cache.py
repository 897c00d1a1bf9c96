"""KV cache for guided search: rows of one prompt share its keys and values, and can be copied (branched)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nlgrpo.kernels import Branches, branch_attention
from nlgrpo.model.attention import Rope


class SharedCache:
    """KV cache of R rows. Each row continues one of P prompts by ``column`` tokens; each prompt is stored once.

    ``prompts`` (layers, P, 2 Hk, C, d): keys, then values, of the prompts, padded on the right.
    ``suffixes`` (layers, R, 2 Hk, columns, d): those of the continuations, allocated up to the next `branch`.
    ``branches``: prompt lengths, and the prompt of each row.

    Called as the attention of a block with n new tokens per row, it writes their keys and values at ``column``. Each
    token attends to its prompt and causally to its row. `advance` then moves ``column``, once for all layers.
    """

    def __init__(self, kv: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """Start with one row per prompt. ``kv``: per layer, keys and values (T, 2 Hk, d) of the packed prompts."""
        heads, d = kv[0].shape[1:]
        self.prompts = kv[0].new_zeros(len(kv), len(lengths), heads, max(lengths), d)
        for i, layers in enumerate(zip(*(x.split(list(lengths)) for x in kv), strict=True)):
            self.prompts[:, i, :, : lengths[i]] = torch.stack(layers).transpose(1, 2)
        self.suffixes = kv[0].new_zeros(len(kv), len(lengths), heads, 0, d)
        self.column = 0
        device = kv[0].device
        self.branches = Branches(torch.tensor(lengths, device=device), torch.arange(len(lengths), device=device))

    @property
    def nbytes(self) -> int:
        return self.prompts.nbytes + self.suffixes.nbytes

    @property
    def prompt(self) -> Tensor:
        """Index (R,) of each row's prompt."""
        return self.branches.prompt

    def branch(self, rows: Tensor, tokens: int) -> None:
        """Make row i a copy of row ``rows[i]`` and allocate ``tokens`` more columns. Prompts are not copied."""
        layers, _, heads, _, d = self.suffixes.shape
        suffixes = self.suffixes.new_empty(layers, len(rows), heads, self.column + tokens, d)
        torch.index_select(self.suffixes[:, :, :, : self.column], 1, rows, out=suffixes[:, :, :, : self.column])
        self.suffixes = suffixes
        self.branches = Branches(self.branches.lengths, self.prompt[rows])

    def advance(self, tokens: int) -> None:
        self.column += tokens

    def positions(self, tokens: int) -> Tensor:
        """Positions (R * n,) of the next n tokens of each row, counted from the start of its prompt."""
        return self.branches.positions(self.column, tokens)

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        return branch_attention(
            qkv, rope, self.suffixes[layer], self.column, self.prompts[layer], self.branches,
            heads=heads, scale=scale, window=window,
        )  # fmt: skip
