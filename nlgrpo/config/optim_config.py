"""The section [optim]: the optimizer, its learning rate and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class OptimConfig:
    algorithm: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for the weight matrices of the blocks and AdamW for all other parameters (embeddings, head, norms,
    biases, scalar heads). TRL and transformers call this key `optim`."""
    lr: float = 1e-6
    """Learning rate of all parameters. With Muon too, if adjust_lr_fn is match_rms_adamw."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Training steps over which the learning rate rises from 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW and Muon; none for norms and biases."""
    max_grad_norm: float = 1.0
    """Maximum gradient norm, by clipping. 0: no clipping."""
    skip_grad_norm: float | None = None
    """Leave out an optimizer step whose gradient norm, before clipping, is above this number or not finite. None: no
    step is left out; a norm that is not finite ends the run."""
    momentum: float = 0.95
    """Muon's momentum."""
    nesterov: bool = True
    """Muon's Nesterov momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations with which Muon orthogonalizes a matrix."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of Muon's learning rate for a matrix (A, B), as in torch.optim.Muon. match_rms_adamw: 0.2 sqrt(max(A, B)),
    with which updates are about as large as AdamW's, so that both have one learning rate; original:
    sqrt(max(1, A / B))."""

    def skips(self, norm: float) -> bool:
        """Whether the optimizer step of a gradient with this norm is left out."""
        return self.skip_grad_norm is not None and not norm <= self.skip_grad_norm

    @property
    def description(self) -> str:
        """Name of the optimizer and its learning rate, for the plan of a run."""
        names = {
            "adamw": "AdamW",
            "muon": f"Muon for the matrices of the blocks (momentum {self.momentum:g}, {self.ns_steps} Newton-Schulz "
            f"steps, learning rate times {self.adjust_lr_fn}), AdamW for the rest",
        }
        return f"learning rate {self.lr:g}, {self.schedule} schedule; {names[self.algorithm]}"
