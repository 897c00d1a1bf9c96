"""Generalised advantage estimation and the clipped value loss of PPO. Legend: R completions of up to L tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns at every token (Schulman et al. 2016, Eqs. 11, 12, 16), (R, L) each.

        delta_t = r_t + gamma V_{t+1} - V_t,      A_t = delta_t + gamma lam A_{t+1},      return_t = A_t + V_t

    ``values`` (R, L): V_t of the state in which token t is chosen, before it is there; ``rewards`` (R, L): what comes
    with token t. Behind the last of the ``lengths`` (R,) tokens V is 0, whether an end token or the limit ended the
    completion, and so are both results. ``lam = 1`` gives the return less the value, ``lam = 0`` delta_t.

    Raises ValueError for shapes that do not fit and for gamma or lam outside of [0, 1].
    """
    if rewards.ndim != 2 or values.shape != rewards.shape or lengths.shape != rewards.shape[:1]:
        raise ValueError(
            f"expected rewards and values (R, L) and lengths (R,), got {tuple(rewards.shape)}, {tuple(values.shape)} "
            f"and {tuple(lengths.shape)}."
        )
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: expected a number in [0, 1].")
    there = torch.arange(rewards.shape[1], device=lengths.device) < lengths[:, None]
    values = torch.where(there, values, 0.0)
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    delta = torch.where(there, rewards + gamma * following - values, 0.0)
    advantages = torch.zeros_like(delta)
    running = delta.new_zeros(len(delta))
    for t in range(delta.shape[1] - 1, -1, -1):
        running = delta[:, t] + gamma * lam * running
        advantages[:, t] = running
    return advantages, torch.where(there, advantages + values, 0.0)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """1/2 max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) per token, and where the second is the larger.

    Schulman et al. 2017 bound the policy so; for values it is the form of their code. ``values``, ``old_values`` (when
    the rollout was made) and ``returns`` G are of one shape; infinite ``clip`` is the plain squared error. Raises
    ValueError for different shapes and for clip <= 0.
    """
    if not values.shape == old_values.shape == returns.shape:
        raise ValueError(
            f"expected three of one shape, got {tuple(values.shape)}, {tuple(old_values.shape)} and "
            f"{tuple(returns.shape)}."
        )
    if not clip > 0:
        raise ValueError(f"clip={clip}: expected a number above 0.")
    near = values.clamp(old_values - clip, old_values + clip)
    plain, clipped = (values - returns).square(), (near - returns).square()
    return torch.maximum(plain, clipped) / 2, clipped > plain


def lambda_returns(values: Tensor, rewards: Tensor, lengths: Tensor, *, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """Targets of all prefixes of completions of ``lengths`` H (R,) with ``rewards`` r (R,); ``values`` are (R, H + 1).

        G_H = r,      G_{H-1} = r,      G_h = gamma ((1 - lam) V_{h+1} + lam G_{h+1}) before

    h tokens are there, and the reward comes with the last one. ``lam`` = 1 is regression on the reward (IRO, Eq. 7),
    0 temporal differences (Eq. 50), between them GAE's targets. Behind a completion's end they are 0. Raises ValueError
    as `gae`.
    """
    at = values[:, :-1]
    ended = F.one_hot(lengths, values.shape[1]).to(values) * rewards[:, None].to(values)
    _, returns = gae(ended[:, 1:], at, lengths, gamma=gamma, lam=lam)
    return F.pad(returns, (0, 1)) + ended
