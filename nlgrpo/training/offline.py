"""Steps that draw nothing: BoN-SFT, DPO, IPO and BoNBoN on the reference's samples (`preference_losses`).

A step takes P prompts, and of each the next M of its K samples in a random order of its own, which is another one
after K // M visits: none is used twice before. They are cut into M // N sets of N; each gives its best one, or a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlgrpo.config.schema import Config, LossConfig, OfflineConfig
from nlgrpo.data.prompt_dataset import PromptSet, order
from nlgrpo.engine import logprobs
from nlgrpo.engine.rollouts.collect import Provenance
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import clip_gradients
from nlgrpo.model.packing import MicroBatch, pack_sets
from nlgrpo.objectives.registry import Objective
from nlgrpo.rewards.reward_functions import Reward
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.learner import Learner
from nlgrpo.training.losses.preference import best_of_n_sft, bonbon, bonbon_margin, dpo, ipo, pairs, winners
from nlgrpo.training.reference_rewards import matching_rollouts

# what the progress line shows
SHOWN = (
    ("loss", "loss {:.4f}"),
    ("rewards/accuracies", "acc {:.3f}"),
    ("rewards/margins", "margin {:.4f}"),
    ("logps/chosen", "logp {:.2f}"),
    ("perf/tokens_per_s", "{:,.0f} tok/s"),
)

# --- what a step learns from ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfflineBatch:
    """A rank's share of a step: each set of responses is (chosen,) or (chosen, rejected), one set after another."""

    prompt_ids: list[list[int]]  # of each response
    completion_ids: list[list[int]]
    width: int  # responses of a set: 1 or 2
    total: int  # sets of all ranks

    @property
    def sets(self) -> list[list[int]]:
        rows = range(len(self.completion_ids))
        return [list(rows[i : i + self.width]) for i in rows[:: self.width]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompt_ids)) + sum(map(len, self.completion_ids))


@dataclass(frozen=True)
class OfflineSamples:
    """The reference's samples of the run's prompts, and what they are worth."""

    rollouts: ReferenceRollouts
    rewards: Tensor  # (P, K) float64, the weighted sum, by the rows of the rollouts
    prompts: PromptSet  # those that there is something to learn from
    repeated: int  # prompts of the data that came before
    unknown: int  # prompts of the data without rollouts
    tied: int  # prompts all of whose samples have one reward, which make no pair
    paired: bool
    config: OfflineConfig
    per_step: int  # M
    seed: int

    def choose(self, cursor: int, count: int, ranks: Ranks) -> OfflineBatch:
        """This rank's share of what prompts ``cursor`` to ``cursor + count - 1`` of the run give."""
        batch = self.prompts.take(cursor, count)
        rows = [self._row(ids) for ids in batch.ids]
        places = torch.tensor([self._places(r, i // len(self.prompts)) for r, i in zip(rows, batch.index, strict=True)])
        rewards = self.rewards[torch.tensor(rows)[:, None], places]
        if self.paired:
            found = pairs(rewards, self.config.n, rejected=self.config.rejected, seed=self.seed)
            prompt, picked = found.prompt, torch.stack([found.chosen, found.rejected], 1)
        else:
            prompt, best = winners(rewards, self.config.n, seed=self.seed)
            picked = best[:, None]
        own = slice(ranks.rank, None, ranks.world)
        at = [(p, j) for p, ids in zip(prompt[own].tolist(), picked[own].tolist(), strict=True) for j in ids]
        known = {p: self.rollouts.ids(rows[p]) for p in {p for p, _ in at}}
        return OfflineBatch(
            [batch.ids[p] for p, _ in at],
            [known[p][int(places[p, j])] for p, j in at],
            picked.shape[1],
            len(prompt),
        )

    def _row(self, prompt_ids: Sequence[int]) -> int:
        row = self.rollouts.row(prompt_ids)
        assert row is not None  # the prompts are those that have one
        return row

    def _places(self, row: int, visit: int) -> list[int]:
        """Which M of a prompt's K samples its visit number ``visit`` takes."""
        K = self.rewards.shape[1]
        again, part = divmod(visit, K // self.per_step)
        places: list[int] = order(K, self.seed ^ (row + 1 << 64), again).tolist()
        return places[part * self.per_step : (part + 1) * self.per_step]


def make(
    cfg: Config,
    rewards: Sequence[Reward],
    objectives: Mapping[str, Objective],
    prompts: PromptSet,
    origin: Callable[[], Provenance],
) -> OfflineSamples | None:
    """The samples that a run learns from; None for an algorithm that draws its own.

    Raises ValueError for rollouts that are cut short, do not fit the run or hold less than M samples a prompt, and
    where there is no prompt to learn from.
    """
    if not cfg.loss.offline:
        return None
    counting = [reward for reward in rewards if cfg.rewards[reward.name].weight != 0]
    rollouts = matching_rollouts(cfg, counting, objectives, prompts, origin)
    K, M = rollouts.index.samples, cfg.rollout.samples
    if M > K:
        raise ValueError(
            f"rollout.samples = {M}: a step takes so many of a prompt's samples, and {rollouts.folder} holds {K}; "
            f"take {K} or less, or draw more with `nlgrpo rollout --samples`"
        )
    worth = torch.stack([cfg.rewards[r.name].weight * rollouts.rewards[r.name] for r in counting]).sum(0)
    rows = [rollouts.row(ids) for ids in prompts.ids]
    first = {row: i for i, row in reversed(list(enumerate(rows))) if row is not None}
    known = sorted((i, row) for row, i in first.items())
    unknown = sum(row is None for row in rows)
    uneven = worth.amax(1) > worth.amin(1)
    kept = [i for i, row in known if uneven[row] or not cfg.loss.paired]
    if not kept:
        why = "has samples of different rewards, so no pair prefers one" if known else "has rollouts"
        raise ValueError(f"none of the {len(rows)} prompts of {cfg.data.source} {why} in {rollouts.folder}")
    return OfflineSamples(
        rollouts=rollouts,
        rewards=worth,
        prompts=prompts.only(kept),
        repeated=len(rows) - len(known) - unknown,
        unknown=unknown,
        tied=len(known) - len(kept),
        paired=cfg.loss.paired,
        config=cfg.offline,
        per_step=M,
        seed=cfg.train.seed,
    )


# --- the update -------------------------------------------------------------------------------------------------------


def update(learner: Learner, chosen: OfflineBatch, config: OfflineConfig, lr: float) -> dict[str, float]:
    """One step of the optimiser on what all ranks have ``chosen``, and what was measured; collective.

    The loss is the mean over the sets of all ranks, whose number is known first, and FSDP's mean over ranks is undone,
    so that neither ranks nor micro-batches change it. Without a set, as where all rewards tie, there is no gradient
    and nothing moves.
    """
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    sums = torch.zeros(len(NAMES), dtype=torch.float64, device=learner.ranks.device)
    shape = (len(chosen.completion_ids), chosen.width)
    ids, device = (chosen.prompt_ids, chosen.completion_ids), learner.ranks.device
    learner.optimizer.zero_grad()
    for batch in learner.pad_micro_batches(pack_sets(*ids, chosen.sets, learner.micro_batch_tokens, device)):
        logps, ref = _of_responses(learner.model, batch, shape, learner.temperature), None
        if learner.reference is not None:
            with torch.no_grad():
                ref = _of_responses(learner.reference, batch, shape, learner.temperature)
        each = losses(learner.loss, config, logps, ref)
        (each.sum() / chosen.total * learner.ranks.world).backward()
        sums += _sums(each.detach(), logps.detach(), ref)
    grad_norm = clip_gradients(learner.model, learner.optim.max_grad_norm)
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    totals = learner.ranks.sum(torch.cat([sums, sums.new_tensor([chosen.tokens])])).tolist()
    measured = _metrics(dict(zip(NAMES, totals[:-1], strict=True)), chosen, implicit_beta(learner.loss, config))
    return measured | {"grad_norm": grad_norm, "learning_rate": lr, "tokens": totals[-1]}


def losses(loss: LossConfig, config: OfflineConfig, logps: Tensor, ref: Tensor | None) -> Tensor:
    """(B,) of sets whose responses have log-probs ``logps`` (B, 1 or 2), and ``ref`` under the reference."""
    if loss.algorithm == "bon_sft":
        return best_of_n_sft(logps[:, 0])
    assert ref is not None  # pairs have a reference
    of_pairs = (logps[:, 0], logps[:, 1], ref[:, 0], ref[:, 1])
    if loss.algorithm == "bonbon":
        return bonbon(*of_pairs, n=config.n, alpha=config.alpha)
    return (dpo if loss.algorithm == "dpo" else ipo)(*of_pairs, loss.beta)


def implicit_beta(loss: LossConfig, config: OfflineConfig) -> float:
    """What log(pi / pi_ref) is multiplied by to be a reward; BoNBoN's follows from N."""
    return 1 / (2 * bonbon_margin(config.n)) if loss.algorithm == "bonbon" else loss.beta


def _of_responses(model: Decoder, batch: MicroBatch, shape: tuple[int, int], temperature: float) -> Tensor:
    """Log-probs (b, width) of the batch's whole responses, float64, differentiable; ``shape``: of all, and a set's."""
    responses, width = shape
    logprob, _ = logprobs.logprobs(model, batch, temperature)
    summed = logprob.new_zeros(responses, dtype=torch.float64).index_add(0, batch.row, logprob.double())
    return summed.view(responses // width, width)[batch.row.div(width, rounding_mode="floor").unique()]


NAMES = ("loss", "chosen", "rejected", "ratio_chosen", "ratio_rejected", "right")


def _sums(each: Tensor, logps: Tensor, ref: Tensor | None) -> Tensor:
    """`NAMES` over a micro-batch; of what there is not, 0."""
    found = torch.zeros(len(NAMES), dtype=torch.float64, device=each.device)
    found[0], found[1] = each.sum(), logps[:, 0].sum()
    if ref is not None:
        ratios = logps - ref
        found[2:5] = torch.stack([logps[:, 1].sum(), *ratios.sum(0)])
        found[5] = (ratios[:, 0] > ratios[:, 1]).sum()
    return found


def _metrics(total: Mapping[str, float], chosen: OfflineBatch, beta: float) -> dict[str, float]:
    """Means over the sets, with the names and definitions of TRL's DPOTrainer; none where there is no set."""
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
