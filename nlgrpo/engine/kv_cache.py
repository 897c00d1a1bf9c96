"""KV cache: each prompt is stored once for all rows that continue it, and rows can be copied (branched) or dropped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nlgrpo.kernels import BlockWeights, Branches, branch_attention, decode_block
from nlgrpo.model.attention import Rope


class KVCache:
    """Keys and values of R rows. Each row continues one of P prompts by ``column`` tokens; each prompt is stored once.

    Per layer, ``prompts`` (2, P, Hk, C, d) has the keys and the values of the prompts, padded on the right, and ``own``
    (2, R, Hk, columns, d) those of the continuations. ``branches``: prompt lengths, and the prompt of each row.

    As the attention of a block with n new tokens per row, it writes their keys and values at ``column``. Each token
    attends to its prompt and causally to its row. `advance` then moves ``column``, once for all layers.
    """

    def __init__(self, prompts: list[Tensor], lengths: Sequence[int]) -> None:
        """Start with one row per prompt. ``prompts``: per layer, see above; ``lengths``: those of the prompts."""
        self.prompts = prompts
        self.own = [x[:, :, :, :0] for x in prompts]
        self.column = 0
        device = prompts[0].device
        self.branches = Branches(torch.tensor(lengths, device=device), torch.arange(len(lengths), device=device))

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.prompts, *self.own))

    @property
    def prompt(self) -> Tensor:
        """Index (R,) of each row's prompt."""
        return self.branches.prompt

    @property
    def room(self) -> int:
        """Number of tokens that can be read before the next `branch` or `grow`."""
        return self.own[0].shape[3] - self.column

    def branch(self, rows: Tensor, tokens: int) -> None:
        """Make row i a copy of row ``rows[i]`` and allocate ``tokens`` more columns. Prompts are not copied."""
        for layer, own in enumerate(self.own):
            _, _, heads, _, d = own.shape
            self.own[layer] = own.new_empty(2, len(rows), heads, self.column + tokens, d)
            torch.index_select(own[:, :, :, : self.column], 1, rows, out=self.own[layer][:, :, :, : self.column])
        self.branches = Branches(self.branches.lengths, self.prompt[rows])

    def grow(self, tokens: int) -> None:
        """Allocate ``tokens`` more columns, one layer after another."""
        for layer, own in enumerate(self.own):
            self.own[layer] = F.pad(own[:, :, :, : self.column], (0, 0, 0, tokens))

    def drop(self, source: Tensor, target: Tensor, rows: int) -> None:
        """Copy rows ``source`` over rows ``target`` and keep the first ``rows``."""
        for layer, own in enumerate(self.own):
            own[:, target, :, : self.column] = own[:, source, :, : self.column]
            self.own[layer] = own[:, :rows]
        prompt = self.prompt.clone()
        prompt[target] = prompt[source]
        self.branches = Branches(self.branches.lengths, prompt[:rows])

    def advance(self, tokens: int) -> None:
        self.column += tokens

    def positions(self, tokens: int) -> Tensor:
        """Positions (R * n,) of the next n tokens of each row, counted from the start of its prompt."""
        return self.branches.positions(self.column, tokens)

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        return branch_attention(
            qkv, rope, self.own[layer], self.column, self.prompts[layer], self.branches,
            heads=heads, scale=scale, window=window,
        )  # fmt: skip

    def run_block(
        self,
        x: Tensor,
        weights: BlockWeights,
        rope: Rope,
        *,
        heads: int,
        layer: int,
        scale: float,
        window: int | None,
        eps: float,
    ) -> Tensor:
        """Run a block of Llama's form on the new tokens ``x`` (R n, D), see `decode_block`."""
        return decode_block(
            x, weights, rope, self.own[layer], self.column, self.prompts[layer], self.branches,
            eps=eps, heads=heads, scale=scale, window=window,
        )  # fmt: skip
