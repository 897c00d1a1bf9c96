"""The update: from a rollout and its advantages to a step of the policy (SPEC of the loss: `policy_losses`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nlgrpo.config.schema import LossConfig, OptimConfig
from nlgrpo.engine import logprobs
from nlgrpo.engine.generation import Rollout
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import clip_gradients
from nlgrpo.model.packing import MicroBatch, empty_micro_batch, pack
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training import critic
from nlgrpo.training.critic import Critic, Targets
from nlgrpo.training.losses import kl
from nlgrpo.training.losses.policy import packed_loss, packed_loss_from_hidden, token_weights


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of training step ``step`` of ``steps``: a linear rise over the warm-up, then the schedule."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    progress = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return optim.lr * factor[optim.schedule]


def make_optimizer(model: nn.Module, optim: OptimConfig, critic: nn.Module | None = None) -> torch.optim.AdamW:
    """AdamW; norms and biases, which have one dimension, do not decay. A critic's groups say that they are its."""
    groups = _groups(model, optim) + [group | {"critic": True} for group in _groups(critic, optim)]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


def _groups(model: nn.Module | None, optim: OptimConfig) -> list[dict[str, Any]]:
    if model is None:
        return []
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


@dataclass(frozen=True)
class Learner:
    """A policy, the frozen reference it is held to (None: to none), PPO's critic, and how they are optimised."""

    model: Decoder
    reference: Decoder | None
    optimizer: torch.optim.Optimizer
    loss: LossConfig
    optim: OptimConfig
    ranks: Ranks
    temperature: float
    max_new_tokens: int
    micro_batch_tokens: int
    seed: int
    critic: Critic | None = None

    @property
    def trained(self) -> nn.Module:
        """All that is optimised."""
        if self.critic is None:
            return self.model
        return nn.ModuleDict({"policy": self.model, "critic": self.critic.module})

    def micro_batches(self, rollout: Rollout, rows: list[int]) -> list[MicroBatch]:
        """This rank's ``rows`` packed; as many micro-batches on every rank, because each one is a collective."""
        samples = rollout.tokens.shape[1]
        prompts = [prompt for prompt in rollout.prompt_ids for _ in range(samples)]
        packed = pack(prompts, rollout.completion_ids(), rows, self.micro_batch_tokens, self.ranks.device)
        return self.pad_micro_batches(packed)

    def pad_micro_batches(self, packed: list[MicroBatch]) -> list[MicroBatch]:
        """With empty ones behind them, so that all ranks have as many; collective."""
        device = self.ranks.device
        most = int(self.ranks.max(torch.tensor(len(packed), device=device)))
        return packed + [empty_micro_batch(device) for _ in range(most - len(packed))]

    def score(self, model: Decoder, rollout: Rollout) -> Tensor:
        """Log-probs (R, L) of the completions under ``model``; 0 behind their ends."""
        rows = list(range(rollout.lengths.numel()))
        return logprobs.completion_logprobs(model, rollout, self.micro_batches(rollout, rows), self.temperature)

    def reference_logprobs(self, rollout: Rollout) -> Tensor | None:
        return None if self.reference is None else self.score(self.reference, rollout)

    def kl_reward(self, rollout: Rollout, ref_logprobs: Tensor, beta: float) -> Tensor:
        """-beta log(pi(y)/pi_ref(y)), (P, M), which is the first variation of -beta KL, up to a constant."""
        log_ratio = kl.estimate(self.score(self.model, rollout), ref_logprobs, "k1").sum(-1)
        return -beta * log_ratio.view(rollout.lengths.shape)

    def update(
        self,
        rollout: Rollout,
        advantages: Tensor,
        *,
        step: int,
        lr: float,
        beta: float,
        critic_lr: float = 0.0,
        ref_logprobs: Tensor | None = None,
        dropped: Tensor | None = None,
    ) -> dict[str, float]:
        """Optimise the surrogate loss on ``rollout``, with ``advantages (P, M)`` of this rank; what was measured.

        All tokens of a completion have its advantage, unless a critic tells them apart. The loss is the one over all
        ranks: its denominators are counted globally first, and FSDP's mean over ranks is undone, so that neither ranks
        nor micro-batches change it. Groups (P,), or completions (P, M), that are ``dropped`` count nowhere.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = critic_lr if "critic" in group else lr
        lengths = rollout.lengths.flatten()
        kept = torch.ones_like(rollout.lengths, dtype=torch.bool)
        if dropped is not None:
            kept[dropped] = False
        kept = kept.flatten()
        several = self.loss.epochs * self.loss.minibatches > 1
        held = ref_logprobs if self.critic is not None and self.loss.kl_in == "reward" else None
        old = self.score(self.model, rollout) if several or held is not None else None
        penalty = None if held is None or old is None else beta * (held - old)
        told = self._token_targets(rollout, advantages.flatten(), kept, penalty)
        of_rollout = float(self.ranks.sum(lengths[kept].sum().double())) / self.loss.minibatches
        totals = _Totals(self.ranks)
        for part, rows in enumerate(self._minibatches(kept, step)):
            own = lengths[rows]
            counts = torch.tensor([len(rows), float(own.sum())], dtype=torch.float64, device=lengths.device)
            sequences, tokens = self.ranks.sum(counts).tolist()
            if sequences == 0:
                continue
            weights = torch.zeros(len(lengths), dtype=torch.float64, device=lengths.device)
            weights[rows] = token_weights(
                self.loss.normalization,
                own,
                sequences=int(sequences),
                tokens=of_rollout if self.loss.normalization == "dapo" else tokens,
                max_length=self.max_new_tokens,
            )
            self.optimizer.zero_grad()
            for batch in self.micro_batches(rollout, rows):
                loss, stats = self._loss(batch, told, weights, old if several else None, ref_logprobs, beta)
                (loss * self.ranks.world).backward()
                totals.add(loss, stats, batch.pick(rollout.logprobs.flatten(0, 1)) if part == 0 else None)
            totals.grad_norms.append(clip_gradients(self.model, self.optim.max_grad_norm))
            if self.critic is not None:
                self.critic.clip_gradients(self.optim.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return totals.metrics() | {"learning_rate": lr}

    def _minibatches(self, kept: Tensor, step: int) -> Iterator[list[int]]:
        """This rank's rows of every optimiser step, those that are ``kept (R,)``.

        One shuffle of the global rows an epoch, the same on all ranks: which completions meet does not depend on ranks.
        """
        rows, first = len(kept), len(kept) * self.ranks.rank
        for epoch in range(self.loss.epochs):
            if self.loss.minibatches == 1:
                yield kept.nonzero()[:, 0].tolist()
                continue
            generator = torch.Generator().manual_seed(self.seed + step * self.loss.epochs + epoch)
            order = torch.randperm(rows * self.ranks.world, generator=generator)
            for part in order.tensor_split(self.loss.minibatches):
                mine = part[(part >= first) & (part < first + rows)] - first
                yield sorted(mine[kept.cpu()[mine]].tolist())

    def _token_targets(self, rollout: Rollout, gain: Tensor, kept: Tensor, penalty: Tensor | None) -> Targets:
        """What the tokens are told of ``gain`` (R,): their completion's, or what the critic makes of it."""
        if self.critic is None:
            return Targets(gain[:, None].expand_as(rollout.logprobs.flatten(0, 1)))
        batches = self.micro_batches(rollout, list(range(len(gain))))
        values = self.critic.values_of(self.model, rollout, batches)
        return self.critic.targets(values, gain, rollout.lengths.flatten(), kept, penalty)

    def _loss(
        self,
        batch: MicroBatch,
        told: Targets,
        weights: Tensor,
        old: Tensor | None,
        ref_logprobs: Tensor | None,
        beta: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        old_logprob = None if old is None else batch.pick(old)
        options: dict[str, Any] = {
            "ref_logprob": None if ref_logprobs is None else batch.pick(ref_logprobs),
            "eps_low": self.loss.eps_low,
            "eps_high": self.loss.eps_high,
            "dual_clip": self.loss.dual_clip,
            "surrogate": self.loss.surrogate,
            "beta": beta if self.loss.kl_in == "loss" else 0.0,
            "kl": "k3_iw" if self.loss.kl_importance else self.loss.kl,
        }
        if self.loss.level == "sequence":
            here, sequence = batch.row.unique_consecutive(return_inverse=True)  # others would count as ratios of 1
            logprob, entropy = logprobs.logprobs(self.model, batch, self.temperature)
            terms = (old_logprob, told.advantages[here, 0], sequence, weights[here])
            loss, stats = packed_loss(logprob, *terms, level="sequence", **options)
            return loss, stats | {"entropy": entropy.detach().sum(), "logprob": logprob.detach()}

        def head(hidden: Tensor, weight: Tensor) -> tuple[Any, ...]:
            terms = (batch.targets, old_logprob, batch.pick(told.advantages), weights[batch.row])
            found = packed_loss_from_hidden(hidden, weight, *terms, temperature=self.temperature, **options)
            return (*found, None if self.critic is None else self.critic.on_policy(hidden))

        loss, stats, logprob, entropy, scored = self.model(batch.tokens, batch.lengths, batch.select, head)
        if self.critic is not None:
            values = self.critic.values(batch, scored)
            value_loss, sums = self.critic.loss(values, batch, told, weights[batch.row])
            loss, stats = loss + value_loss, stats | sums
        return loss, stats | {"entropy": entropy.detach().sum(), "logprob": logprob.detach()}


class _Totals:
    """Sums of an update's statistics over micro-batches, reduced over ranks once at its end."""

    NAMES = (
        "loss", "kl", "entropy", "tokens", "ratios", "clip_low", "clip_high", "clip_dual", "clip_region",
        "gap", "compared", *critic.SUMS,
    )  # fmt: skip

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sums = dict.fromkeys(self.NAMES, 0.0)
        self.largest = {"ratio": 0.0, "gap": 0.0}
        self.grad_norms: list[float] = []
        self.seen: set[str] = set()

    def add(self, loss: Tensor, stats: dict[str, Tensor], sampler: Tensor | None) -> None:
        """``sampler``: the log-probs with which the tokens were sampled, while the policy has not moved yet."""
        self.seen |= stats.keys()
        self.sums["loss"] += float(loss.detach())
        for name in self.sums.keys() & stats.keys():
            self.sums[name] += float(stats[name])
        self.largest["ratio"] = max(self.largest["ratio"], float(stats["ratio_max"]))
        if sampler is not None and len(sampler):
            gap = (stats["logprob"].double() - sampler.double()).abs()
            self.sums["gap"] += float(gap.sum())
            self.sums["compared"] += len(gap)
            self.largest["gap"] = max(self.largest["gap"], float(gap.max()))

    def metrics(self) -> dict[str, float]:
        device = self.ranks.device
        sums = self.ranks.sum(torch.tensor(list(self.sums.values()), dtype=torch.float64, device=device)).tolist()
        largest = self.ranks.max(torch.tensor(list(self.largest.values()), dtype=torch.float64, device=device)).tolist()
        total = dict(zip(self.sums, sums, strict=True))
        steps, tokens, ratios = max(len(self.grad_norms), 1), max(total["tokens"], 1.0), max(total["ratios"], 1.0)
        metrics = {
            "loss": total["loss"] / steps,
            "entropy": total["entropy"] / tokens,
            "grad_norm": sum(self.grad_norms) / steps,
            "clip_ratio/low_mean": total["clip_low"] / ratios,
            "clip_ratio/high_mean": total["clip_high"] / ratios,
            "clip_ratio/region_mean": total["clip_region"] / ratios,
            "ratio/max": largest[0],
            "sampling/logp_difference/mean": total["gap"] / max(total["compared"], 1.0),
            "sampling/logp_difference/max": largest[1],
        }
        if "clip_dual" in self.seen:
            metrics["clip_ratio/dual_mean"] = total["clip_dual"] / ratios
        metrics |= critic.metrics(total) if "value" in self.seen else {}
        return metrics | ({"kl": total["kl"] / tokens} if "kl" in self.seen else {})
