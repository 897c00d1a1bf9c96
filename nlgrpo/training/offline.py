"""Steps of the offline algorithms: BoN-SFT, DPO, IPO and BoNBoN on samples of the reference (`losses.preference`).

A step takes P prompts and M of the K samples of each. Every prompt has its own random order of samples, reshuffled
after K // M visits; until then no sample repeats. The M samples are split into M // N sets of N. Each set yields its
best sample, or a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nlgrpo.config.schema import Config, LossConfig, OfflineConfig
from nlgrpo.data.prompt_dataset import PromptSet, order
from nlgrpo.engine import logprobs
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.collect import Provenance, scorers
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.errors import UserError
from nlgrpo.losses.policy import token_weights
from nlgrpo.losses.preference import best_of_n_sft, bonbon, bonbon_margin, dpo, ipo, pairs, winners
from nlgrpo.model import lora
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import accumulated, clip_gradients
from nlgrpo.model.packing import MicroBatch, pack_sets
from nlgrpo.objectives.aggregation import sum_of_applicable
from nlgrpo.objectives.registry import Objective
from nlgrpo.rewards.reward_functions import Reward
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.learner import Learner

# --- data of a step ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfflineBatch:
    """This rank's part of a step: sets of responses, (chosen,) or (chosen, rejected), concatenated."""

    prompt_ids: list[list[int]]  # of each response
    completion_ids: list[list[int]]  # of each response
    width: int  # responses per set: 1 or 2
    total: int  # sets on all ranks

    @property
    def sets(self) -> list[list[int]]:
        rows = range(len(self.completion_ids))
        return [list(rows[i : i + self.width]) for i in rows[:: self.width]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompt_ids)) + sum(map(len, self.completion_ids))


@dataclass(frozen=True)
class OfflineSamples:
    """Samples of the reference for the run's prompts, with their rewards."""

    rollouts: ReferenceRollouts
    rewards: Tensor  # (P, K) float64, weighted sums, NaN where one abstains; row p belongs to row p of the rollouts
    prompts: PromptSet  # prompts to train on
    repeated: int  # dropped: prompts that occur earlier in the data
    unknown: int  # dropped: prompts without rollouts
    tied: int  # dropped: prompts whose samples all have the same reward, so there is no pair
    unscored: int  # dropped: prompts with fewer than N samples with a reward
    paired: bool
    config: OfflineConfig  # with an alpha
    per_step: int  # M
    seed: int
    tokens: int | None = None  # number of ids that have a token, if the head has more rows

    def choose(self, cursor: int, count: int, ranks: Ranks) -> OfflineBatch:
        """Choose responses for prompts ``cursor`` to ``cursor + count - 1``. Returns those of this rank.

        Raises UserError for a response with an id that has no token: an older version sampled them, too.
        """
        batch = self.prompts.take(cursor, count)
        rows = []
        used = []
        for ids, index in zip(batch.ids, batch.index, strict=True):
            row = self.rollouts.row(ids)
            assert row is not None  # every prompt of the run has rollouts
            rows.append(row)
            used.append(self._visited(row, index // len(self.prompts)))
        prompt, picked = self._picked(rows, used)
        mine = slice(ranks.rank, None, ranks.world)
        prompt_ids = []
        chosen = []
        completions: dict[int, list[list[int]]] = {}
        for p, samples in zip(prompt[mine].tolist(), picked[mine].tolist(), strict=True):
            if p not in completions:
                completions[p] = self.rollouts.ids(rows[p])
            for sample in samples:
                prompt_ids.append(batch.ids[p])
                chosen.append(completions[p][sample])
        largest = max((max(ids, default=0) for ids in chosen), default=0)
        if self.tokens is not None and largest >= self.tokens:
            raise UserError(
                f"{self.rollouts.folder} has a sample with the id {largest}, which has no token: expected ids below "
                f"{self.tokens}, as the tokenizer has. An older version sampled it; sample again with `nlgrpo rollout`"
            )
        return OfflineBatch(prompt_ids, chosen, picked.shape[1], len(prompt))

    def _picked(self, rows: Sequence[int], used: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the prompt of each set (B,), in order, and its samples (B, 1 or 2): its best one, or its pair.

        ``used``: samples of each prompt. Prompts with equally many are split into sets together.
        """
        prompts: list[Tensor] = []
        samples: list[Tensor] = []
        for count in sorted({len(indices) for indices in used}):
            alike = torch.tensor([p for p, indices in enumerate(used) if len(indices) == count])
            drawn = torch.tensor([used[p] for p in alike.tolist()])
            rewards = self.rewards[torch.tensor([rows[p] for p in alike.tolist()])[:, None], drawn]
            if self.paired:
                chosen = pairs(rewards, self.config.n, rejected=self.config.rejected, seed=self.seed)
                prompt = chosen.prompt
                places = torch.stack([chosen.chosen, chosen.rejected], 1)
            else:
                prompt, best = winners(rewards, self.config.n, seed=self.seed)
                places = best[:, None]
            prompts.append(alike[prompt])
            samples.append(drawn[prompt[:, None], places])
        order_of_prompts = torch.cat(prompts).argsort(stable=True)
        return torch.cat(prompts)[order_of_prompts], torch.cat(samples)[order_of_prompts]

    def _visited(self, row: int, visit: int) -> list[int]:
        """Indices of the M samples that are used at visit number ``visit`` of a prompt, of those that have a reward.

        All of these, if there are fewer than M.
        """
        scored = (~self.rewards[row].isnan()).nonzero()[:, 0]
        shuffle, part = divmod(visit, max(1, len(scored) // self.per_step))
        shuffled = torch.as_tensor(order(len(scored), self.seed ^ (row + 1 << 64), shuffle))
        indices: list[int] = scored[shuffled].tolist()
        return indices[part * self.per_step : (part + 1) * self.per_step]


def load_samples(
    cfg: Config,
    rewards: Sequence[Reward],
    objectives: Mapping[str, Objective],
    prompts: PromptSet,
    origin: Callable[[], Provenance],
) -> OfflineSamples:
    """Load the samples for an offline algorithm, or for loss.jeffreys.

    Raises UserError if the rollouts are incomplete, do not fit the run or have fewer than M samples per prompt, or if
    no prompt is left to train on.
    """
    weighted = [reward for reward in rewards if cfg.rewards[reward.name].weight != 0]
    rollouts = reference_rollouts.load_checked(
        cfg.calibration.rollouts, origin, scorers(cfg.rewards, objectives, weighted), prompts
    )
    K = rollouts.index.samples
    M = cfg.rollout.samples
    if M > K:
        raise UserError(
            f"rollout.samples = {M}: {rollouts.folder} has {K} samples per prompt; "
            f"set {K} or less, or sample more with `nlgrpo rollout --samples`"
        )
    stacked = torch.stack([rollouts.rewards[r.name] for r in weighted])
    totals = sum_of_applicable(stacked, [cfg.rewards[r.name].weight for r in weighted])
    rows = [rollouts.row(ids) for ids in prompts.ids]
    known: list[tuple[int, int]] = []  # the first place of each prompt with rollouts, and its row there
    seen = set[int]()
    unknown = 0
    for i, row in enumerate(rows):
        if row is None:
            unknown += 1
        elif row not in seen:
            seen.add(row)
            known.append((i, row))
    absent = totals.isnan()
    enough = (~absent).sum(1) >= cfg.offline.n
    scored = [(i, row) for i, row in known if enough[row]]
    has_pair = totals.masked_fill(absent, -torch.inf).amax(1) > totals.masked_fill(absent, torch.inf).amin(1)
    kept = [i for i, row in scored if has_pair[row] or not cfg.loss.paired]
    if not kept:
        lacking = "has samples with different rewards, so there are no pairs" if scored else "has rollouts"
        if known and not scored:
            lacking = f"has offline.n = {cfg.offline.n} samples with a reward: the rewards abstained for the others"
        raise UserError(f"none of the {len(rows)} prompts of {cfg.data.source} {lacking} in {rollouts.folder}")
    return OfflineSamples(
        rollouts=rollouts,
        rewards=totals,
        prompts=prompts.only(kept),
        repeated=len(rows) - len(known) - unknown,
        unknown=unknown,
        tied=len(scored) - len(kept),
        unscored=len(known) - len(scored),
        paired=cfg.loss.paired,
        config=_with_alpha(cfg, rollouts),
        per_step=M,
        seed=cfg.train.seed,
        tokens=origin().tokens,
    )


def _with_alpha(cfg: Config, rollouts: ReferenceRollouts) -> OfflineConfig:
    """Set alpha, if it is None: alpha L = (1 - alpha) c^2, for both terms of BoNBoN at the start, where h = 0.

    L is the mean of -log pi_ref over the samples, and c the margin.
    """
    if cfg.offline.alpha is not None or cfg.loss.algorithm != "bonbon":
        return cfg.offline
    margin = bonbon_margin(cfg.offline.n) ** 2
    likelihood = -float(rollouts.logprobs.mean())
    return replace(cfg.offline, alpha=margin / (margin + likelihood))


# --- the update -------------------------------------------------------------------------------------------------------


def update(learner: Learner, chosen: OfflineBatch, config: OfflineConfig, lr: float) -> dict[str, float]:
    """Take one optimizer step on the ``chosen`` responses of all ranks; returns metrics; collective.

    The loss is the mean over the sets of all ranks: their number is known in advance, and FSDP's mean over ranks is
    undone, so the loss depends neither on the number of ranks nor on the micro-batches. Without sets (all rewards tie),
    the parameters do not change.
    """
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    sums = torch.zeros(len(NAMES), dtype=torch.float64, device=learner.ranks.device)
    shape = (len(chosen.completion_ids), chosen.width)
    ids = (chosen.prompt_ids, chosen.completion_ids)
    device = learner.ranks.device
    learner.optimizer.zero_grad()
    limit = learner.micro_batch_limit
    packed = pack_sets(*ids, chosen.sets, limit.tokens, device, group_tokens=limit.group)
    for batch in accumulated(learner.model, learner.pad_micro_batches(packed)):
        with torch.no_grad(), learner.as_reference() as reference:
            ref = None if reference is None else _response_logprobs(reference, batch, shape, learner.temperature)
        with lora.dropout(learner.model):
            logps = _response_logprobs(learner.model, batch, shape, learner.temperature)
        loss = losses(learner.loss, config, logps, ref)
        (loss.sum() / chosen.total * learner.ranks.world).backward()
        sums += _sums(loss.detach(), logps.detach(), ref)
    optim = learner.optim
    grad_norm = clip_gradients(learner.model, optim.max_grad_norm, finite=optim.skip_grad_norm is None)
    if not optim.skips(grad_norm):
        learner.optimizer.step()
    learner.optimizer.zero_grad()
    totals = learner.ranks.sum(torch.cat([sums, sums.new_tensor([chosen.tokens])])).tolist()
    metrics = _metrics(dict(zip(NAMES, totals[:-1], strict=True)), chosen, implicit_beta(learner.loss, config))
    return metrics | {"grad_norm": grad_norm, "learning_rate": lr, "tokens": totals[-1]}


def add_likelihood(learner: Learner, chosen: OfflineBatch) -> None:
    """Add the gradient of the weighted negative log-likelihood of the ``chosen`` responses of all ranks; collective.

    Its weight is loss.jeffreys, and its tokens are weighted as those of the policy's loss (loss.normalization).
    """
    device = learner.ranks.device
    limit = learner.micro_batch_limit
    ranks = learner.ranks
    lengths = torch.tensor([len(ids) for ids in chosen.completion_ids], dtype=torch.float64)
    (tokens,) = ranks.sums(float(lengths.sum()))
    if not tokens:
        return
    weights = token_weights(
        learner.loss.normalization, lengths, sequences=chosen.total, tokens=tokens, max_length=learner.max_new_tokens
    ).to(device, non_blocking=True)
    ids = (chosen.prompt_ids, chosen.completion_ids)
    packed = pack_sets(*ids, chosen.sets, limit.tokens, device, group_tokens=limit.group)
    for batch in accumulated(learner.model, learner.pad_micro_batches(packed)):
        logprob, _ = logprobs.logprobs(learner.model, batch, learner.temperature)
        loss = -(logprob.double() * weights[batch.row]).sum()
        (learner.loss.jeffreys * loss * ranks.world).backward()


def losses(loss: LossConfig, config: OfflineConfig, logps: Tensor, ref: Tensor | None) -> Tensor:
    """Losses (B,) of B sets from the log-probs of their responses, (B, 1 or 2): ``logps`` and ``ref`` (reference)."""
    if loss.algorithm == "bon_sft":
        return best_of_n_sft(logps[:, 0])
    assert ref is not None  # pairs have a reference
    of_pairs = (logps[:, 0], logps[:, 1], ref[:, 0], ref[:, 1])
    if loss.algorithm == "bonbon":
        assert config.alpha is not None
        return bonbon(*of_pairs, n=config.n, alpha=config.alpha)
    if loss.algorithm == "dpo":
        return dpo(*of_pairs, loss.beta)
    return ipo(*of_pairs, loss.beta)


def implicit_beta(loss: LossConfig, config: OfflineConfig) -> float:
    """Beta of the implicit reward beta log(pi / pi_ref); for BoNBoN it follows from N."""
    return 1 / (2 * bonbon_margin(config.n)) if loss.algorithm == "bonbon" else loss.beta


def _response_logprobs(model: Decoder, batch: MicroBatch, shape: tuple[int, int], temperature: float) -> Tensor:
    """Log-probs (b, width) of the batch's responses, float64; ``shape``: (responses on this rank, width)."""
    responses, width = shape
    logprob, _ = logprobs.logprobs(model, batch, temperature)
    summed = logprob.new_zeros(responses, dtype=torch.float64).index_add(0, batch.row, logprob.double())
    return summed.view(responses // width, width)[batch.sets(width)]


NAMES = ("loss", "chosen", "rejected", "ratio_chosen", "ratio_rejected", "right")


def _sums(losses: Tensor, logps: Tensor, ref: Tensor | None) -> Tensor:
    """Sums of the `NAMES` over a micro-batch; 0 for those that do not apply."""
    sums = torch.zeros(len(NAMES), dtype=torch.float64, device=losses.device)
    sums[0] = losses.sum()
    sums[1] = logps[:, 0].sum()
    if ref is not None:
        ratios = logps - ref
        sums[2] = logps[:, 1].sum()
        sums[3:5] = ratios.sum(0)
        sums[5] = (ratios[:, 0] > ratios[:, 1]).sum()
    return sums


def _metrics(total: Mapping[str, float], chosen: OfflineBatch, beta: float) -> dict[str, float]:
    """Means over the sets, with the names and definitions of TRL's DPOTrainer; only "sets" if there is no set."""
    if not chosen.total:
        return {"sets": 0}
    mean = {name: value / chosen.total for name, value in total.items()}
    out = {"loss": mean["loss"], "sets": chosen.total, "logps/chosen": mean["chosen"]}
    if chosen.width == 2:
        out |= {
            "logps/rejected": mean["rejected"],
            "rewards/chosen": beta * mean["ratio_chosen"],
            "rewards/rejected": beta * mean["ratio_rejected"],
            "rewards/margins": beta * (mean["ratio_chosen"] - mean["ratio_rejected"]),
            "rewards/accuracies": mean["right"],
        }
    return out
