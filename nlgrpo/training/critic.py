"""PPO's critic: values of the states that a rollout went through, what they make of rewards, and their loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nlgrpo.config.schema import Config, CriticConfig
from nlgrpo.engine.generation import Rollout
from nlgrpo.model import decoder, reward_model
from nlgrpo.model.architectures import Shape, shape_of
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import clip_gradients, shard
from nlgrpo.model.packing import MicroBatch
from nlgrpo.model.reward_model import score
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.losses.gae import clipped_value_loss, gae

Sums = dict[str, Tensor]
SUMS = ("value_loss", "value_clipped", "value", "return", "return_squared", "residual", "residual_squared")


@dataclass(frozen=True)
class Targets:
    """What every token of R completions is told, (R, L); without a critic, advantages only."""

    advantages: Tensor
    returns: Tensor | None = None
    values: Tensor | None = None  # of the critic that made them, before it learns


@dataclass(frozen=True)
class Critic:
    """V(s_t) by a decoder of its own with a head of one output, or by a head on the policy's last hidden states.

    ``module`` is that decoder, or the head alone, which is small: every rank holds it whole.
    """

    config: CriticConfig
    module: Decoder | nn.Linear
    ranks: Ranks

    @property
    def shared(self) -> bool:
        return isinstance(self.module, nn.Linear)

    def values(self, batch: MicroBatch, scored: Tensor | None) -> Tensor:
        """(S,) of the states in which the batch's targets are chosen; ``scored`` (S, 1): by a head on the policy."""
        if scored is None:
            scored = self.module(batch.tokens, batch.lengths, batch.select, score)
        return scored[:, 0]

    def on_policy(self, hidden: Tensor) -> Tensor | None:
        """(S, 1), what the head makes of the policy's hidden states (S, D); None for a critic of its own."""
        return score(hidden, self.module.weight) if isinstance(self.module, nn.Linear) else None

    @torch.no_grad()
    def values_of(self, policy: Decoder, rollout: Rollout, batches: Sequence[MicroBatch]) -> Tensor:
        """(R, L) of the rollout's completions, packed into ``batches``; 0 behind their ends."""
        out = torch.zeros_like(rollout.logprobs.flatten(0, 1), dtype=torch.float64)
        for batch in batches:
            scored = None
            if self.shared:
                scored = policy(batch.tokens, batch.lengths, batch.select, lambda hidden, _: self.on_policy(hidden))
            out[batch.row, batch.offset] = self.values(batch, scored).double()
        return out

    def targets(
        self, values: Tensor, gain: Tensor, lengths: Tensor, kept: Tensor, penalty: Tensor | None = None
    ) -> Targets:
        """From what each completion is worth, ``gain`` (R,), which comes with its last token; collective.

        ``penalty`` (R, L), such as that of the KL, comes with every token. Advantages are whitened, where that is
        wanted, over all tokens of the completions that are ``kept`` (R,), of all ranks.
        """
        rewards = torch.zeros_like(values) if penalty is None else penalty.to(values)
        row, last = torch.arange(len(lengths), device=lengths.device), lengths - 1
        rewards = rewards.index_put((row, last.clamp(min=0)), torch.where(last < 0, 0, gain.to(values)), True)
        advantages, returns = gae(rewards, values, lengths, gamma=self.config.gamma, lam=self.config.lam)
        if self.config.whiten:
            there = torch.arange(values.shape[1], device=lengths.device) < (lengths * kept)[:, None]
            advantages = whiten(advantages, there, self.ranks)
        return Targets(advantages, returns, values)

    def loss(self, values: Tensor, batch: MicroBatch, targets: Targets, weights: Tensor) -> tuple[Tensor, Sums]:
        """Value loss of the batch's tokens, summed by their ``weights`` (S,), times its coefficient; what is logged."""
        assert targets.values is not None
        assert targets.returns is not None
        old, returns = batch.pick(targets.values).to(values), batch.pick(targets.returns).to(values)
        each, clipped = clipped_value_loss(values, old, returns, self.config.clip)
        residual = (returns - values).detach()
        sums = {
            "value_loss": each.detach().sum(),
            "value_clipped": clipped.sum(),
            "value": values.detach().sum(),
            "return": returns.sum(),
            "return_squared": returns.square().sum(),
            "residual": residual.sum(),
            "residual_squared": residual.square().sum(),
        }
        return self.config.coef * (weights.to(values) * each).sum(), sums

    def clip_gradients(self, max_norm: float) -> float:
        """The gradient's norm before it is clipped. A head's gradient becomes the mean over ranks first, as FSDP's."""
        if isinstance(self.module, nn.Linear) and self.module.weight.grad is not None:
            self.ranks.sum(self.module.weight.grad).div_(self.ranks.world)
        return clip_gradients(self.module, max_norm)


def check(cfg: Config, policy: Shape, longest: int) -> None:
    """Look at the critic's model, before a run begins, without its weights; ``longest``: tokens that it has to read.

    Raises ValueError for one that is not there, or that cannot read what the policy writes.
    """
    if cfg.loss.algorithm != "ppo" or not cfg.critic.path:
        return
    shape = shape_of(decoder.read_config(reward_model.locate(cfg.critic.path)[0]))
    if shape.vocab != policy.vocab:
        raise ValueError(
            f"critic: {cfg.critic.path} has a vocabulary of {shape.vocab:,} tokens and the policy one of "
            f"{policy.vocab:,}; a critic reads the policy's tokens: begin it at a model with that tokenizer"
        )
    if shape.context < longest:
        raise ValueError(
            f"critic: {cfg.critic.path} has a context of {shape.context:,} tokens, and prompts with their completions "
            f"come to {longest:,}; lower rollout.max_new_tokens or data.max_prompt_tokens, or take another model"
        )


def make(cfg: Config, policy: Decoder, ranks: Ranks, compute: torch.dtype) -> Critic | None:
    """The critic of a configuration, which `check` has seen; None where it has none. A new head gives values of 0.

    Raises ValueError as `reward_model.load`.
    """
    if cfg.loss.algorithm != "ppo":
        return None
    stored = torch.float32 if compute == torch.bfloat16 else compute
    if cfg.critic.trunk == "shared":
        head = nn.Linear(policy.shape.width, 1, bias=False, device=ranks.device, dtype=stored)
        return Critic(cfg.critic, _zero(head), ranks)
    path, seed = cfg.critic.path or cfg.model.path, cfg.train.seed
    model, trained = reward_model.load(path, seed=seed, dtype=stored, device=ranks.device)
    if not trained:
        _zero(reward_model.head_of(model))
    model.activation_checkpointing = cfg.model.activation_checkpointing
    return Critic(cfg.critic, shard(model, ranks, compute), ranks)


def _zero(head: nn.Linear) -> nn.Linear:
    nn.init.zeros_(head.weight)
    return head


def whiten(values: Tensor, there: Tensor, ranks: Ranks) -> Tensor:
    """(values - mean) / (std + 1e-8) over what is ``there`` on all ranks, and 0 elsewhere; collective.

    The deviation has n - 1 in its denominator; fewer than two values are left as they are.
    """
    kept = values[there].double()
    count, total = ranks.sum(torch.stack([there.sum().double(), kept.sum()])).tolist()
    if count < 2:
        return torch.where(there, values, 0.0)
    mean = total / count
    squares = float(ranks.sum((kept - mean).square().sum()))
    return torch.where(there, (values - mean) / ((squares / (count - 1)) ** 0.5 + 1e-8), 0.0)


def metrics(total: Mapping[str, float]) -> dict[str, float]:
    """What is logged of sums over tokens, of which there are ``total["tokens"]``."""
    tokens = max(total["tokens"], 1.0)
    variance = total["return_squared"] / tokens - (total["return"] / tokens) ** 2
    left = total["residual_squared"] / tokens - (total["residual"] / tokens) ** 2
    return {
        "value/loss": total["value_loss"] / tokens,
        "value/clip_ratio": total["value_clipped"] / tokens,
        "value/mean": total["value"] / tokens,
        "value/return_mean": total["return"] / tokens,
        "value/explained_variance": 1 - left / variance if variance > 0 else 0.0,
    }
