"""Policy-gradient losses on packed tokens: normalisations, token- and sequence-level ratios, and their statistics.

Legend: T packed tokens of R responses. The caller counts every denominator over all ranks and micro-batches, so that
the losses of any partition of the responses add up to the loss of the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nlgrpo import kernels
from nlgrpo.kernels import reference
from nlgrpo.kernels.reference import PolicyLossSettings

DEFAULT = PolicyLossSettings()

Normalisation = Literal["grpo", "bnpo", "dapo", "dr_grpo"]
Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class Targets:
    """Per-token targets (R, L) of R completions; without a critic, advantages only."""

    advantages: Tensor
    returns: Tensor | None = None
    values: Tensor | None = None  # predicted before the update


def token_weights(kind: Normalisation, lengths: Tensor, *, sequences: int, tokens: float, max_length: int) -> Tensor:
    """Return the weight in the loss of each token of response r, (R,) in float64, from the ``lengths`` (R,).

        grpo      1 / (sequences length_r)         mean over tokens, then over responses
        bnpo      1 / tokens                       ``tokens`` of the optimiser step
        dapo      1 / tokens                       ``tokens`` of the generation batch / optimiser steps per batch
        dr_grpo   1 / (sequences max_length)       constant length

    ``sequences`` and ``tokens`` count the responses and tokens of the optimiser step over all ranks and micro-batches.
    ``max_length`` is the maximum length of a response. Responses without tokens count in ``sequences``. Raises
    ValueError for another ``kind`` and for counts that are too small for ``lengths``.
    """
    if kind not in ("grpo", "bnpo", "dapo", "dr_grpo"):
        raise ValueError(f"loss {kind!r} is not known; expected 'grpo', 'bnpo', 'dapo' or 'dr_grpo'.")
    if sequences < max(1, len(lengths)):
        raise ValueError(
            f"sequences={sequences}: expected the count over the whole step, at least {max(1, len(lengths))}."
        )
    lengths = lengths.to(torch.float64)
    if kind == "grpo":
        return 1 / (sequences * lengths.clamp(min=1))
    denominator = sequences * max_length if kind == "dr_grpo" else tokens
    if not denominator > 0 and lengths.sum() > 0:
        raise ValueError(f"loss {kind!r} with tokens={tokens}, max_length={max_length}: expected numbers > 0.")
    return torch.full_like(lengths, 1 / max(denominator, 1))


def sequence_log_ratio(log_ratio: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Mean log-ratio of each response (GSPO), (R,); 0 for a response without tokens.

        log rho_r = 1/length_r sum_{t in r} (log pi(t) - log pi_old(t))

    ``log_ratio`` (T,), ``sequence`` (T,) int64: the response of each token. ``sequences``: R.
    """
    zeros = log_ratio.new_zeros(sequences)
    lengths = zeros.index_add(0, sequence, torch.ones_like(log_ratio))
    return zeros.index_add(0, sequence, log_ratio) / lengths.clamp(min=1)


def packed_loss(
    logprob: Tensor,
    old_logprob: Tensor | None,
    advantages: Tensor,
    sequence: Tensor,
    weights: Tensor,
    *,
    ref_logprob: Tensor | None = None,
    token_ratios: Tensor | None = None,
    level: Level = "token",
    settings: PolicyLossSettings = DEFAULT,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy loss summed over packed tokens, and the sums from which its metrics are computed.

        L = sum_t weights_r(t) [S_t + beta KL_t]

    S_t depends on the surrogate in ``settings`` (sg stops the gradient):

        ppo         -min(rho_t A_r(t), clip(rho_t, 1 - eps_low, 1 + eps_high) A_r(t))
        cispo       -sg(min(rho_t, 1 + eps_high)) A_r(t) log pi(t)
        reinforce   -A_r(t) log pi(t)       no off-policy correction

    logprob, old_logprob, ref_logprob (T,); ``sequence`` (T,) int64, the response r(t) of each token; advantages and
    ``weights`` (R,), the latter from `token_weights`. ``old_logprob=None`` is for a policy that has not changed since
    sampling: rho is 1, with its gradient. ``token_ratios`` (T,): further weights of the tokens, such as the importance
    weights of tokens that another policy sampled. ``level="sequence"`` gives all tokens of a response the ratio of
    `sequence_log_ratio`. ``surrogate``, ``dual_clip`` ("ppo" only) and ``kl`` ("k1", "k2", "k3", or the importance-
    weighted "k3_iw"): see `nlgrpo.kernels.policy_loss`.

    With ``kl="k3"``, or "k3_iw" for TRL's use_bias_correction_kl, this is the loss of TRL's GRPOTrainer. "cispo" with
    the weights of "dapo" is its loss_type="cispo", where epsilon_high is the cap 1 + eps_high.

    Statistics, detached, to be summed over micro-batches and ranks (``ratio_max``: the maximum):

    ``tokens``, ``ratios``  number of tokens, and of ratios (tokens or responses)
    ``clip_low``            ratios with rho < 1 - eps_low and A < 0; 0 in "cispo" and "reinforce"
    ``clip_high``           ratios with rho > 1 + eps_high and A > 0; in "cispo" for any A, 0 in "reinforce"
    ``clip_region``         clip_low + clip_high
    ``clip_dual``           with ``dual_clip``: ratios with rho > dual_clip and A < 0
    ``ratio_max``           largest ratio
    ``kl``                  with ``ref_logprob``: sum over tokens of the KL estimate, for any beta

    Raises ValueError for shapes that do not match, for an unknown level, kl or surrogate, and as `policy_loss`.
    """
    _check_packed(logprob, old_logprob, advantages, sequence, weights, level)
    logprob = reference.widen(logprob)
    advantages = advantages.to(logprob)
    old_logprob = logprob.detach() if old_logprob is None else reference.widen(old_logprob)
    log_ratio = logprob - old_logprob
    token_advantages = advantages[sequence]
    ratios = log_ratio
    if level == "sequence":
        ratios = sequence_log_ratio(log_ratio, sequence, len(advantages))
        log_ratio = ratios[sequence]
    per_token, statistics = kernels.policy_loss_with_statistics(
        logprob,
        old_logprob,
        token_advantages,
        log_ratio=None if level == "token" else log_ratio,
        ref_logprob=ref_logprob,
        **settings._asdict(),
    )
    if level == "sequence":
        statistics |= reference.policy_statistics(ratios.detach(), advantages, settings)
    per_response = weights.to(logprob)[sequence]
    if token_ratios is not None:
        per_response = per_response * token_ratios.to(logprob)
    return (per_response * per_token).sum(), _counted(statistics, len(logprob), len(ratios))


def packed_loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprob: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    *,
    bias: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    temperature: float = 1.0,
    settings: PolicyLossSettings = DEFAULT,
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """`packed_loss` from hidden states. Returns loss, statistics, and the detached log-probs and entropies (T,).

    hidden (T, D), weight (V, D) and ``targets`` (T,): see `nlgrpo.kernels.linear_policy_loss`, which computes the
    gradient in the forward. ``advantages`` and ``weights`` are per token, (T,), as in PPO they differ within a
    response. Ratios are token-level. Raises ValueError as `linear_policy_loss`.
    """
    loss, logprob, entropy, statistics = kernels.linear_policy_loss(
        hidden,
        weight,
        targets,
        old_logprob,
        advantages,
        token_weights=weights,
        bias=bias,
        ref_logprob=ref_logprob,
        temperature=temperature,
        **settings._asdict(),
    )
    return loss, _counted(statistics, len(targets), len(targets)), logprob, entropy


def _counted(statistics: dict[str, Tensor], tokens: int, ratios: int) -> dict[str, Tensor]:
    more = {"clip_region": statistics["clip_low"] + statistics["clip_high"]}  # a ratio is never in both
    like = statistics["ratio_max"]
    more["tokens"] = torch.full_like(like, tokens)  # filled on the device, where a tensor from the host waits for it
    more["ratios"] = torch.full_like(like, ratios)
    return statistics | more


def _check_packed(
    logprob: Tensor, old_logprob: Tensor | None, advantages: Tensor, sequence: Tensor, weights: Tensor, level: str
) -> None:
    if level not in ("token", "sequence"):
        raise ValueError(f"level={level!r} is not known; expected 'token' or 'sequence'.")
    if logprob.ndim != 1 or sequence.shape != logprob.shape:
        raise ValueError(f"expected logprob and sequence (T,), got {tuple(logprob.shape)} and {tuple(sequence.shape)}.")
    if old_logprob is not None and old_logprob.shape != logprob.shape:
        raise ValueError(f"expected old_logprob {tuple(logprob.shape)}, as logprob, got {tuple(old_logprob.shape)}.")
    if advantages.ndim != 1 or weights.shape != advantages.shape:
        raise ValueError(
            f"expected advantages and weights (R,), one per response, got {tuple(advantages.shape)} "
            f"and {tuple(weights.shape)}."
        )
