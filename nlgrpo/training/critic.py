"""PPO's critic: values of a rollout's states, generalized advantage estimation (GAE), and the value loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from nlgrpo.config.schema import Config, CriticConfig
from nlgrpo.engine.generation import Rollout
from nlgrpo.errors import UserError
from nlgrpo.losses.gae import clipped_value_loss, gae
from nlgrpo.losses.policy import Targets
from nlgrpo.model import adapters, decoder, reward_model
from nlgrpo.model.architectures import Shape, shape_of
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import clip_gradients, prepare
from nlgrpo.model.lora import LoraConfig
from nlgrpo.model.packing import MicroBatch
from nlgrpo.model.reward_model import score
from nlgrpo.runtime.device import master_dtype
from nlgrpo.runtime.distributed import Ranks

Sums = dict[str, Tensor]


@dataclass(frozen=True)
class Critic:
    """V(s_t): a separate decoder with a scalar head, or a scalar head on the policy's last hidden states.

    ``module`` is that decoder, or the head alone. A head is small, so it is not sharded.
    """

    config: CriticConfig
    module: Decoder | nn.Linear
    ranks: Ranks

    SUMS = ("value_loss", "value_clipped", "value", "return", "return_squared", "residual", "residual_squared")
    """Names of what `loss` returns besides the loss."""

    @property
    def shared(self) -> bool:
        return isinstance(self.module, nn.Linear)

    def values(self, batch: MicroBatch, scored: Tensor | None) -> Tensor:
        """Values (S,) of the states before each target token. ``scored`` (S, 1): output of `on_policy`, if shared."""
        if scored is None:
            scored = self.module(batch.tokens, batch.segments, batch.select, score)
        return scored[:, 0]

    def on_policy(self, hidden: Tensor) -> Tensor | None:
        """Values (S, 1) from the policy's hidden states (S, D); None for a separate critic."""
        return score(hidden, self.module.weight) if isinstance(self.module, nn.Linear) else None

    def _head(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        return self.on_policy(hidden)

    @torch.no_grad()
    def values_of(self, policy: Decoder, rollout: Rollout, batches: Sequence[MicroBatch]) -> Tensor:
        """Values (R, L) of the rollout's completions, packed into ``batches``; 0 past their ends."""
        out = torch.zeros_like(rollout.logprobs.flatten(0, 1), dtype=torch.float64)
        for batch in batches:
            scored = None
            if self.shared:
                scored = policy(batch.tokens, batch.segments, batch.select, self._head)
            out[batch.row, batch.offset] = self.values(batch, scored).double()
        return out

    def targets(
        self, values: Tensor, gain: Tensor, lengths: Tensor, kept: Tensor, penalty: Tensor | None = None
    ) -> Targets:
        """Compute advantages and returns by GAE; collective.

        ``gain`` (R,): reward of each completion, added at its last token. ``penalty`` (R, L): reward of each token,
        such as the KL penalty. With critic.whiten, advantages are whitened over all tokens of the ``kept`` (R,)
        completions of all ranks.
        """
        rewards = torch.zeros_like(values) if penalty is None else penalty.to(values)
        row = torch.arange(len(lengths), device=lengths.device)
        last = lengths - 1
        rewards = rewards.index_put((row, last.clamp(min=0)), torch.where(last < 0, 0, gain.to(values)), True)
        advantages, returns = gae(rewards, values, lengths, gamma=self.config.gamma, lam=self.config.lam)
        if self.config.whiten:
            mask = torch.arange(values.shape[1], device=lengths.device) < (lengths * kept)[:, None]
            advantages = whiten(advantages, mask, self.ranks)
        return Targets(advantages, returns, values)

    def loss(self, values: Tensor, batch: MicroBatch, targets: Targets, weights: Tensor) -> tuple[Tensor, Sums]:
        """Return critic.coef times the value loss of the tokens, weighted by ``weights`` (S,), and sums to log."""
        assert targets.values is not None
        assert targets.returns is not None
        old = batch.pick(targets.values).to(values)
        returns = batch.pick(targets.returns).to(values)
        losses, clipped = clipped_value_loss(values, old, returns, self.config.clip)
        residual = (returns - values).detach()
        sums = {
            "value_loss": losses.detach().sum(),
            "value_clipped": clipped.sum(),
            "value": values.detach().sum(),
            "return": returns.sum(),
            "return_squared": returns.square().sum(),
            "residual": residual.sum(),
            "residual_squared": residual.square().sum(),
        }
        return self.config.coef * (weights.to(values) * losses).sum(), sums

    @staticmethod
    def metrics(total: Mapping[str, float]) -> dict[str, float]:
        """Metrics from sums over ``total["tokens"]`` tokens."""
        tokens = max(total["tokens"], 1.0)
        variance = total["return_squared"] / tokens - (total["return"] / tokens) ** 2
        unexplained = total["residual_squared"] / tokens - (total["residual"] / tokens) ** 2
        return {
            "value/loss": total["value_loss"] / tokens,
            "value/clip_ratio": total["value_clipped"] / tokens,
            "value/mean": total["value"] / tokens,
            "value/return_mean": total["return"] / tokens,
            "value/explained_variance": 1 - unexplained / variance if variance > 0 else 0.0,
        }

    def clip_gradients(self, max_norm: float, *, finite: bool = True) -> float:
        """Clip the gradients and return their norm before clipping. A head's gradient is averaged over ranks first."""
        if isinstance(self.module, nn.Linear) and self.module.weight.grad is not None:
            self.ranks.sum(self.module.weight.grad).div_(self.ranks.world)
        return clip_gradients(self.module, max_norm, finite=finite)


def own_shape(cfg: Config, policy: Shape) -> Shape:
    """Shape of the separate critic's model, without loading its weights."""
    if not cfg.critic.path:
        return policy
    return shape_of(decoder.read_config(reward_model.locate(cfg.critic.path, config_only=True)[0]))


def check_critic(cfg: Config, policy: Shape, longest: int) -> None:
    """Check the critic's model without loading its weights. ``longest``: maximal tokens of a prompt and completion.

    Raises UserError if the model is missing, its vocabulary is not the policy's, or its context is too short.
    """
    if not cfg.critic.path:
        return
    own = own_shape(cfg, policy)
    if own.vocab != policy.vocab:
        raise UserError(
            f"critic: {cfg.critic.path} has a vocabulary of {own.vocab:,} tokens, but the policy's has "
            f"{policy.vocab:,}; set critic.path to a model with the policy's tokenizer"
        )
    if own.context < longest:
        raise UserError(
            f"critic: {cfg.critic.path} has a context of {own.context:,} tokens, but a prompt and its completion "
            f"can have {longest:,}; lower rollout.max_new_tokens or data.max_prompt_tokens, or use another model"
        )


def make_critic(
    cfg: Config, policy: Decoder, ranks: Ranks, compute: torch.dtype, adapter: LoraConfig | None = None
) -> Critic:
    """Build the critic of a checked configuration. A new head predicts 0 at first.

    ``adapter``: settings of the policy's adapters. A separate critic gets adapters of these settings and trains them
    with its head. Raises UserError as `load_reward_model` does.
    """
    stored = master_dtype(compute)
    if cfg.critic.trunk == "shared":
        head = nn.Linear(policy.shape.width, 1, bias=False, device=ranks.device, dtype=stored)
        nn.init.zeros_(head.weight)
        return Critic(cfg.critic, head, ranks)
    path = cfg.critic.path or cfg.model.path
    seed = cfg.train.seed
    if adapter is not None:
        adapter = replace(adapter, modules_to_save=(), path="")
    sharded = partial(prepare, adapter=adapter, ranks=ranks, compute=compute, parallel=cfg.parallel)
    model, trained = reward_model.load_reward_model(path, seed=seed, dtype=stored, device=ranks.device, shard=sharded)
    if not trained:
        nn.init.zeros_(reward_model.head_of(model).weight)
    if adapter is not None:
        adapters.init_adapters(model, adapter, seed)
    model.configure(cfg.model.activation_checkpointing, cfg.model.compile)
    return Critic(cfg.critic, model, ranks)


def whiten(values: Tensor, mask: Tensor, ranks: Ranks) -> Tensor:
    """Return (values - mean) / (std + 1e-8) where ``mask`` is true, and 0 elsewhere; collective.

    Mean and std (with Bessel's correction) are over the masked values of all ranks. Fewer than two values are
    returned unchanged.
    """
    kept = values[mask].double()
    count, total = ranks.sum(torch.stack([mask.sum().double(), kept.sum()])).tolist()
    if count < 2:
        return torch.where(mask, values, 0.0)
    mean = total / count
    squares = float(ranks.sum((kept - mean).square().sum()))
    return torch.where(mask, (values - mean) / ((squares / (count - 1)) ** 0.5 + 1e-8), 0.0)
