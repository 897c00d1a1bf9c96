"""Muon for the weight matrices of the blocks, and AdamW for all other parameters, in one optimizer.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; Liu et al., 2025, arXiv:2502.16982) replaces the
momentum of a matrix by the nearest orthogonal one, up to the error of a few Newton-Schulz iterations. The result is
that of `torch.optim.Muon` on separate matrices q, k, v, gate and up, which a block stores fused. A sharded matrix is
gathered, because the iterations need all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from nlgrpo.errors import UserError
from nlgrpo.model import shards
from nlgrpo.model.decoder import Block, Decoder

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of torch.optim.Muon
# Dtype of the iterations for narrower matrices. A CPU takes more than ten times as long in bfloat16 as in float32.
ITERATED = {"cpu": torch.float32, "cuda": torch.bfloat16}
EPS = 1e-7


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Approximate U V^T of ``matrix`` = U S V^T (A, B) by ``steps`` Newton-Schulz iterations.

    X_0 = G / max(||G||_F, 1e-7);  X <- a X + b (X X^T) X + c (X X^T)^2 X,  (a, b, c) = (3.4445, -4.7750, 2.0315)

    A singular value s becomes p(p(..p(s / ||G||_F))) with p(s) = a s + b s^3 + c s^5, which is between about 0.7 and
    1.2 after five iterations, unless s is tiny. They run in bfloat16 on a GPU, as in `torch.optim.Muon`, in float32 on
    a CPU, and in float64 for a float64 matrix.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.float64 if matrix.dtype == torch.float64 else ITERATED[matrix.device.type], copy=True)
    wide = x.T if len(x) > x.shape[1] else x  # X X^T is the smaller product then
    wide = wide.div_(wide.norm().clamp(min=EPS))
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if len(x) > x.shape[1] else wide


def lr_factor(adjust_lr_fn: str, rows: int, columns: int) -> float:
    """Factor of the learning rate for a matrix (A, B).

    "match_rms_adamw": 0.2 sqrt(max(A, B)); the RMS of an orthogonal matrix is 1 / sqrt(max(A, B)) and that of an update
    of AdamW is 0.2 to 0.4 (arXiv:2502.16982, 2.2). "original": sqrt(max(1, A / B)).
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def block_matrices(model: Decoder) -> list[dict[str, Any]]:
    """Parameter groups of the weight matrices of the blocks.

    "parts": the rows of each of the matrices that are fused into one parameter, from the top; empty for a single one.
    """
    shape = model.shape
    blocks = [cast(Block, block) for block in model.blocks]
    d = shape.head_dim
    single: list[Tensor] = []
    for block in blocks:
        single += [block.out.weight, block.down.weight]
    return [
        {
            "params": [block.qkv.weight for block in blocks],
            "parts": (shape.heads * d, shape.kv_heads * d, shape.kv_heads * d),
        },
        {
            "params": [block.up.weight for block in blocks],
            "parts": (shape.ffn, shape.ffn) if shape.gated else (),
        },
        {"params": single, "parts": ()},
    ]


class Muon(torch.optim.Optimizer):
    """Muon for the groups with the key "parts" (`block_matrices`), AdamW for the others.

    B <- momentum B + (1 - momentum) G;  O = orthogonalize(G (1 - momentum) + momentum B), or of B without Nesterov
    W <- (1 - lr weight_decay) W - lr lr_factor O

    Keys of a group of Muon: lr, weight_decay, momentum, nesterov, ns_steps, adjust_lr_fn, parts. AdamW's: lr, betas,
    eps, weight_decay. Parameters without a gradient are left unchanged. With sharded parameters a step is collective,
    and every rank orthogonalizes each whole matrix. Raises UserError for a group of Muon with a parameter that is not
    a matrix, or whose rows are not those of its parts.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "fused": True})
        for group in self.param_groups:
            for p in group["params"] if "parts" in group else ():
                if p.dim() != 2 or sum(group["parts"] or p.shape[:1]) != len(p):
                    raise UserError(
                        f"Muon: a parameter has shape {tuple(p.shape)}, expected a matrix with parts of "
                        f"{tuple(group['parts'])} rows; put other parameters in a group without the key 'parts'"
                    )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step. There is no ``closure``; PyTorch's state-dict functions pass None."""
        assert closure is None
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            if "parts" in group:
                for p in present:
                    self._step_matrix(p, group)
            elif present:
                self._step_adamw(present, group)

    def _step_matrix(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
        update = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        whole = update.full_tensor() if shards.is_sharded(update) else update
        parts = [
            orthogonalize(part, group["ns_steps"]).to(p.dtype) * lr_factor(group["adjust_lr_fn"], *part.shape)
            for part in whole.split(list(group["parts"] or (len(whole),)))
        ]
        step = torch.cat(parts)
        if shards.is_sharded(p):  # keeps this rank's rows, without communication
            from torch.distributed.tensor import distribute_tensor

            step = distribute_tensor(step, p.device_mesh, p.placements, src_data_rank=None)
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"])

    def _step_adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if not self.state[p]:
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        states = [self.state[p] for p in params]
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [cast(Tensor, p.grad) for p in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
