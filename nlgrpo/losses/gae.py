"""Generalised advantage estimation and the clipped value loss of PPO. Legend: R completions of up to L tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns at every token (Schulman et al. 2016, Eqs. 11, 12, 16), (R, L) each.

        delta_t = r_t + gamma V_{t+1} - V_t,      A_t = delta_t + gamma lam A_{t+1},      return_t = A_t + V_t

    ``values`` (R, L): V_t of the state before token t. ``rewards`` (R, L): r_t of token t. After the last of the
    ``lengths`` (R,) tokens V is 0, also for truncated completions, and both results are 0. ``lam = 1`` gives the return
    minus the value, ``lam = 0`` delta_t.

    Raises ValueError for shapes that do not match and for gamma or lam outside [0, 1].
    """
    if rewards.ndim != 2 or values.shape != rewards.shape or lengths.shape != rewards.shape[:1]:
        raise ValueError(
            f"expected rewards and values (R, L) and lengths (R,), got {tuple(rewards.shape)}, {tuple(values.shape)} "
            f"and {tuple(lengths.shape)}."
        )
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: expected a number in [0, 1].")
    mask = torch.arange(rewards.shape[1], device=lengths.device) < lengths[:, None]
    values = torch.where(mask, values, 0.0)
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))
    delta = torch.where(mask, rewards + gamma * next_values - values, 0.0)
    advantages = torch.zeros_like(delta)
    running = delta.new_zeros(len(delta))
    for t in range(delta.shape[1] - 1, -1, -1):
        running = delta[:, t] + gamma * lam * running
        advantages[:, t] = running
    return advantages, torch.where(mask, advantages + values, 0.0)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return the clipped value loss of PPO per token, and the mask of tokens where the clipped term is larger.

        1/2 max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2)

    The form of the code of Schulman et al. 2017, who describe clipping of the policy only. ``values``, ``old_values``
    (at rollout time) and ``returns`` G have one shape. An infinite ``clip`` gives half the squared error. Raises
    ValueError for different shapes and for clip <= 0.
    """
    if not values.shape == old_values.shape == returns.shape:
        raise ValueError(
            f"expected values, old_values and returns of one shape, got {tuple(values.shape)}, "
            f"{tuple(old_values.shape)} and {tuple(returns.shape)}."
        )
    if not clip > 0:
        raise ValueError(f"clip={clip}: expected a number above 0.")
    clipped_values = values.clamp(old_values - clip, old_values + clip)
    plain = (values - returns).square()
    clipped = (clipped_values - returns).square()
    return torch.maximum(plain, clipped) / 2, clipped > plain


def lambda_returns(values: Tensor, rewards: Tensor, lengths: Tensor, *, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """Return the value targets G_h of all prefixes of h tokens, (R, H + 1), of completions with a final reward.

        G_H = r,      G_{H-1} = r,      G_h = gamma ((1 - lam) V_{h+1} + lam G_{h+1}) before

    ``values`` (R, H + 1), ``rewards`` r (R,), ``lengths`` (R,), H the length of a completion. ``lam`` = 1 is regression
    on the reward (IRO, Eq. 7), 0 temporal differences (Eq. 50), values between give the targets of GAE. Beyond a
    completion's end the targets are 0. Raises ValueError as `gae`.
    """
    final = F.one_hot(lengths, values.shape[1]).to(values) * rewards[:, None].to(values)
    _, returns = gae(final[:, 1:], values[:, :-1], lengths, gamma=gamma, lam=lam)
    return F.pad(returns, (0, 1)) + final
