"""The policy update: one or more optimizer steps on a rollout and its advantages. The loss: `losses.policy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nlgrpo.config.schema import LossConfig, OptimConfig
from nlgrpo.engine import logprobs
from nlgrpo.engine.generation import Rollout
from nlgrpo.losses.policy import Targets, packed_loss, packed_loss_from_hidden, token_weights
from nlgrpo.model import lora
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import accumulated, clip_gradients
from nlgrpo.model.packing import MicroBatch, empty_micro_batch, pack
from nlgrpo.runtime.device import MicroBatchLimit
from nlgrpo.runtime.distributed import Ranks

if TYPE_CHECKING:
    from nlgrpo.losses.correction import Corrected
    from nlgrpo.training.critic import Critic


def make_optimizer(model: nn.Module, optim: OptimConfig, critic: nn.Module | None = None) -> torch.optim.Optimizer:
    """Build the optimizer, without weight decay on norms and biases. Groups of the critic have the key "critic"."""
    groups = _groups(model, optim)
    if critic is not None:
        groups += [group | {"critic": True} for group in _groups(critic, optim)]
    if optim.algorithm == "muon":
        from nlgrpo.model.muon import Muon

        return Muon(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def _groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    taken = set[int]()
    if optim.algorithm == "muon" and isinstance(model, Decoder):
        from nlgrpo.model.muon import block_matrices

        settings = {
            "weight_decay": optim.weight_decay,
            "momentum": optim.momentum,
            "nesterov": optim.nesterov,
            "ns_steps": optim.ns_steps,
            "adjust_lr_fn": optim.adjust_lr_fn,
        }
        for group in block_matrices(model):
            groups.append(group | settings)
            for parameter in group["params"]:
                taken.add(id(parameter))
    matrices = []
    vectors = []  # norms and biases
    for parameter in model.parameters():
        if not parameter.requires_grad or id(parameter) in taken:
            continue
        if parameter.dim() > 1:
            matrices.append(parameter)
        else:
            vectors.append(parameter)
    if matrices:
        groups.append({"params": matrices, "weight_decay": optim.weight_decay})
    if vectors:  # adapters have none
        groups.append({"params": vectors, "weight_decay": 0.0})
    return groups


@dataclass
class PackedRollout:
    """What is computed once of this rank's rollout, and kept until the update of the step is done."""

    rollout: Rollout | None = None
    batches: list[MicroBatch] = field(default_factory=list)
    """Micro-batches of all rows."""
    policy: Tensor | None = None
    """Log-probs (R, L) under the policy."""

    def keep(self, rollout: Rollout | None, batches: list[MicroBatch]) -> None:
        self.rollout = rollout
        self.batches = batches
        self.policy = None


@dataclass(frozen=True)
class Learner:
    """The policy, the frozen reference (None without a KL penalty), PPO's critic, and their optimizer.

    If the policy has adapters, it is its own reference: without them it is the model that training started from.
    """

    model: Decoder
    reference: Decoder | None
    optimizer: torch.optim.Optimizer
    loss: LossConfig
    optim: OptimConfig
    ranks: Ranks
    temperature: float
    max_new_tokens: int
    micro_batch_limit: MicroBatchLimit
    seed: int
    critic: Critic | None = None
    packed: PackedRollout = field(default_factory=PackedRollout, init=False, repr=False)

    @cached_property
    def trained(self) -> nn.Module:
        """The module with all trained parameters."""
        if self.critic is None:
            return self.model
        return nn.ModuleDict({"policy": self.model, "critic": self.critic.module})

    def micro_batches(self, rollout: Rollout, rows: list[int]) -> list[MicroBatch]:
        """Pack this rank's ``rows`` of the rollout into micro-batches, the same number on every rank.

        All rows are packed once a step: the reference, the policy, the critic and the update read the same.
        """
        if len(rows) < rollout.lengths.numel():
            return self.pad_micro_batches(self._pack(rollout, rows))
        if self.packed.rollout is not rollout:
            self.packed.keep(rollout, self._pack(rollout, rows))
        return self.pad_micro_batches(self.packed.batches)

    def _pack(self, rollout: Rollout, rows: list[int]) -> list[MicroBatch]:
        samples = rollout.tokens.shape[1]
        prompts = [prompt for prompt in rollout.prompt_ids for _ in range(samples)]
        padded = rollout.tokens.flatten(0, 1).cpu().numpy()
        lengths = rollout.lengths.flatten().tolist()
        completions = [ids[:n] for ids, n in zip(padded, lengths, strict=True)]
        tokens, group = self.micro_batch_limit
        return pack(
            prompts, completions, rows, tokens, self.ranks.device, group_tokens=group, inserted=rollout.inserted
        )

    def pad_micro_batches(self, packed: list[MicroBatch]) -> list[MicroBatch]:
        """Append empty micro-batches until all ranks have the same number; collective, like each forward pass."""
        if self.ranks.world == 1:
            return packed
        device = self.ranks.device
        most = int(self.ranks.max(torch.tensor(len(packed), device=device)))
        return packed + [empty_micro_batch(device) for _ in range(most - len(packed))]

    def logprobs_of(self, model: Decoder, rollout: Rollout) -> Tensor:
        """Log-probs (R, L) of the completions under ``model``; 0 past their ends."""
        rows = list(range(rollout.lengths.numel()))
        return logprobs.completion_logprobs(model, rollout, self.micro_batches(rollout, rows), self.temperature)

    def policy_logprobs(self, rollout: Rollout) -> Tensor:
        """Log-probs (R, L) of the completions under the policy before the update of the step, computed once."""
        if self.packed.rollout is not rollout or self.packed.policy is None:
            found = self.logprobs_of(self.model, rollout)  # which forgets those of another rollout
            self.packed.policy = found
        return self.packed.policy

    @contextmanager
    def as_reference(self) -> Iterator[Decoder | None]:
        """Context that yields the reference; a policy that is its own reference runs without its adapters in it."""
        if self.reference is None:
            yield None
            return
        with lora.disabled(self.reference):
            yield self.reference

    def reference_logprobs(self, rollout: Rollout) -> Tensor | None:
        with self.as_reference() as reference:
            return None if reference is None else self.logprobs_of(reference, rollout)

    def corrected(self, rollout: Rollout) -> Corrected | None:
        """Importance weights of a rollout that another distribution sampled; None with loss.correction = "none"."""
        if self.loss.correction == "none":
            return None
        from nlgrpo.losses import correction
        from nlgrpo.objectives import importance_sampling

        settings = importance_sampling.parse_correction(self.loss.correction, self.loss.correction_level)
        if settings is None:
            return None
        policy = self.policy_logprobs(rollout)
        return self.ranks.agree(lambda: correction.correct(settings, policy, rollout.logprobs, rollout.lengths))

    def kl_reward(self, rollout: Rollout, ref_logprobs: Tensor, beta: float) -> Tensor:
        """First variation of -beta KL, (P, M), up to a constant: -beta log(pi(y) / pi_ref(y))."""
        from nlgrpo.losses import kl

        log_ratio = kl.estimate(self.policy_logprobs(rollout), ref_logprobs, "k1").sum(-1)
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
        corrected: Corrected | None = None,
        other: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """Minimise the surrogate loss on ``rollout`` with this rank's ``advantages`` (P, M); returns metrics.

        All tokens of a completion share its advantage, unless a critic computes one per token. The loss is that of the
        global batch: its denominators count all ranks, and FSDP's mean over ranks is undone, so it depends neither on
        the number of ranks nor on the micro-batches. ``dropped``: groups (P,) or completions (P, M) to leave out.
        ``corrected``: the tokens' terms, with the KL's, are multiplied by its weights. The critic's are not.
        ``other`` adds the gradient of the other term of loss.jeffreys at each optimizer step.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = critic_lr if "critic" in group else lr
        device = self.ranks.device
        lengths = rollout.lengths.flatten().cpu()  # what a step needs to know about its rows is read here, once
        kept = torch.ones(rollout.lengths.shape, dtype=torch.bool)  # completions that are trained on, on the CPU
        if dropped is not None:
            kept[dropped.cpu()] = False
        kept = kept.flatten()
        off_policy = self.loss.epochs * self.loss.minibatches > 1  # from the second optimizer step on
        ref = ref_logprobs if self.critic is not None and self.loss.kl_in == "reward" else None
        old = None
        if corrected is not None:
            old = corrected.policy
        elif off_policy or ref is not None:
            old = self.policy_logprobs(rollout)
        penalty = None if ref is None or old is None else beta * (ref - old)
        targets = self._token_targets(rollout, advantages.flatten(), kept, penalty)
        (all_tokens,) = self.ranks.sums(int(lengths[kept].sum()))
        totals = _Totals(self.ranks, self.critic)
        skipped = 0
        for part, rows in enumerate(self._minibatches(kept, step)):
            row_lengths = lengths[rows]
            sequences, tokens = self.ranks.sums(len(rows), int(row_lengths.sum()))
            if sequences == 0 and other is None:
                continue
            if self.loss.normalization == "dapo":
                tokens = all_tokens / self.loss.minibatches
            weights = torch.zeros(len(lengths), dtype=torch.float64)
            weights[rows] = token_weights(
                self.loss.normalization,
                row_lengths,
                sequences=max(1, int(sequences)),
                tokens=tokens,
                max_length=self.max_new_tokens,
            )
            weights = weights.to(device, non_blocking=True)
            self.optimizer.zero_grad()
            with lora.dropout(self.trained):
                for batch in accumulated(self.trained, self.micro_batches(rollout, rows)):
                    previous = old if off_policy else None
                    loss, stats = self._loss(batch, targets, weights, previous, ref_logprobs, beta, corrected)
                    ((1 - self.loss.jeffreys) * loss * self.ranks.world).backward()
                    totals.add(loss, stats, batch.pick(rollout.logprobs.flatten(0, 1)) if part == 0 else None)
                if other is not None:
                    other()
            max_norm = self.optim.max_grad_norm
            finite = self.optim.skip_grad_norm is None
            norms = [clip_gradients(self.model, max_norm, finite=finite)]
            if self.critic is not None:
                norms.append(self.critic.clip_gradients(max_norm, finite=finite))
            totals.grad_norms.append(norms[0])
            if any(map(self.optim.skips, norms)):
                skipped += 1
            else:
                self.optimizer.step()
        self.optimizer.zero_grad()
        self.packed.keep(None, [])
        metrics = totals.metrics() | {"learning_rate": lr}
        if self.optim.skip_grad_norm is not None:
            metrics["skipped_steps"] = float(skipped)
        if corrected is not None:
            from nlgrpo.losses import correction

            metrics |= correction.metrics(
                self.ranks.sum(corrected.sums.clone()), self.ranks.max(corrected.extremes.clone())
            )
        return metrics

    def _minibatches(self, kept: Tensor, step: int) -> Iterator[list[int]]:
        """Yield the ``kept`` (R,) rows of this rank for each optimizer step; ``kept`` is on the CPU.

        With several minibatches, each epoch shuffles the global rows in the same order on all ranks, so the minibatches
        do not depend on the number of ranks.
        """
        rows = len(kept)
        first = rows * self.ranks.rank
        for epoch in range(self.loss.epochs):
            if self.loss.minibatches == 1:
                yield kept.nonzero()[:, 0].tolist()
                continue
            generator = torch.Generator().manual_seed(self.seed + step * self.loss.epochs + epoch)
            order = torch.randperm(rows * self.ranks.world, generator=generator)
            for part in order.tensor_split(self.loss.minibatches):
                mine = part[(part >= first) & (part < first + rows)] - first
                yield sorted(mine[kept[mine]].tolist())

    def _token_targets(self, rollout: Rollout, gain: Tensor, kept: Tensor, penalty: Tensor | None) -> Targets:
        """Per-token targets from ``gain`` (R,) per completion: equal for all its tokens, or by GAE with a critic."""
        if self.critic is None:
            return Targets(gain[:, None].expand_as(rollout.logprobs.flatten(0, 1)))
        batches = self.micro_batches(rollout, list(range(len(gain))))
        values = self.critic.values_of(self.model, rollout, batches)
        return self.critic.targets(values, gain, rollout.lengths.flatten(), kept.to(gain.device), penalty)

    def _loss(
        self,
        batch: MicroBatch,
        targets: Targets,
        weights: Tensor,
        old: Tensor | None,
        ref_logprobs: Tensor | None,
        beta: float,
        corrected: Corrected | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = None if corrected is None else batch.pick(corrected.tokens)
        old_logprob = None if old is None else batch.pick(old)
        ref_logprob = None if ref_logprobs is None else batch.pick(ref_logprobs)
        settings = self.loss.settings(beta)
        if self.loss.level == "sequence":
            present = batch.present  # absent rows would add ratios of 1
            logprob, entropy = logprobs.logprobs(self.model, batch, self.temperature)
            loss, stats = packed_loss(
                logprob,
                old_logprob,
                targets.advantages[present, 0],
                batch.sequence,
                weights[present],
                ref_logprob=ref_logprob,
                level="sequence",
                token_ratios=ratio,
                settings=settings,
            )
            return loss, stats | {"entropy": entropy.detach().sum(), "logprob": logprob.detach()}

        def head(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
            per_token = weights[batch.row]
            if ratio is not None:
                per_token = per_token * ratio
            outputs = packed_loss_from_hidden(
                hidden,
                weight,
                batch.targets,
                old_logprob,
                batch.pick(targets.advantages),
                per_token,
                bias=bias,
                ref_logprob=ref_logprob,
                temperature=self.temperature,
                settings=settings,
            )
            return (*outputs, None if self.critic is None else self.critic.on_policy(hidden))

        loss, stats, logprob, entropy, scored = self.model(batch.tokens, batch.segments, batch.select, head)
        if self.critic is not None:
            values = self.critic.values(batch, scored)
            value_loss, sums = self.critic.loss(values, batch, targets, weights[batch.row])
            loss = loss + value_loss
            stats = stats | sums
        return loss, stats | {"entropy": entropy.detach().sum(), "logprob": logprob.detach()}


class _Totals:
    """Sums of an update's statistics over micro-batches, on the device: they are reduced and read once, at the end."""

    NAMES = (
        "loss", "kl", "entropy", "tokens", "ratios", "clip_low", "clip_high", "clip_dual", "clip_region",
        "gap", "compared",
    )  # fmt: skip

    def __init__(self, ranks: Ranks, critic: Critic | None) -> None:
        self.ranks = ranks
        self.critic = critic
        self.names = self.NAMES if critic is None else (*self.NAMES, *critic.SUMS)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=ranks.device)
        self.largest = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # ratio, and gap
        self.grad_norms: list[float] = []
        self.seen: set[str] = set()

    @torch.no_grad()
    def add(self, loss: Tensor, stats: dict[str, Tensor], sampler: Tensor | None) -> None:
        """Add a micro-batch. ``sampler``: log-probs of its tokens at sampling; None after the first optimizer step."""
        self.seen |= stats.keys()
        none = torch.zeros_like(loss)
        terms = stats | {"loss": loss.detach()}
        largest_gap = none
        if sampler is not None and len(sampler):
            gap = (stats["logprob"].double() - sampler.double()).abs()
            terms["gap"] = gap.sum()
            terms["compared"] = torch.full_like(loss, len(gap), dtype=torch.float64)
            largest_gap = gap.max()
        self.sums += torch.stack([terms.get(name, none).double() for name in self.names])
        largest = torch.stack([stats["ratio_max"].double(), largest_gap.double()])
        self.largest = self.largest.fmax(largest)  # without NaN, as the loss or the norm of the gradient has them

    def metrics(self) -> dict[str, float]:
        sums = self.ranks.sum(self.sums)
        largest = self.ranks.max(self.largest)
        *read, largest_ratio, largest_gap = torch.cat([sums, largest]).tolist()
        total = dict(zip(self.names, read, strict=True))
        steps = max(len(self.grad_norms), 1)
        tokens = max(total["tokens"], 1.0)
        ratios = max(total["ratios"], 1.0)
        metrics = {
            "loss": total["loss"] / steps,
            "entropy": total["entropy"] / tokens,
            "grad_norm": sum(self.grad_norms) / steps,
            "clip_ratio/low_mean": total["clip_low"] / ratios,
            "clip_ratio/high_mean": total["clip_high"] / ratios,
            "clip_ratio/region_mean": total["clip_region"] / ratios,
            "ratio/max": largest_ratio,
            "sampling/logp_difference/mean": total["gap"] / max(total["compared"], 1.0),
            "sampling/logp_difference/max": largest_gap,
        }
        if "clip_dual" in self.seen:
            metrics["clip_ratio/dual_mean"] = total["clip_dual"] / ratios
        if self.critic is not None and "value" in self.seen:
            metrics |= self.critic.metrics(total)
        if "kl" in self.seen:
            metrics["kl"] = total["kl"] / tokens
        return metrics
