"""``nlgrpo value``: train a value model on rewards of rollouts (``train``) or the sum of several models (``compress``).

On several ranks: ``torchrun --nproc-per-node=8 -m nlgrpo.cli value train values.toml``.

Notation: S states in a batch, the prefixes of its completions (`nlgrpo.model.value_model`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nlgrpo.apps.guided import value_dataset
from nlgrpo.apps.guided.value_config import ValueConfig, check_value_config
from nlgrpo.apps.guided.value_dataset import Outcomes
from nlgrpo.apps.report import result_tables
from nlgrpo.engine.rollouts.store import same_ids
from nlgrpo.errors import UserError
from nlgrpo.losses.gae import lambda_returns
from nlgrpo.model import decoder, reward_model
from nlgrpo.model.architectures import shape_of
from nlgrpo.model.attention import implementation
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import accumulated, shard
from nlgrpo.model.packing import MicroBatch, empty_micro_batch, pack
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.model.value_model import as_values, kind_of, outputs, set_kind
from nlgrpo.runtime.console import named_lines
from nlgrpo.runtime.device import compute_dtype
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.progress import QUIET, track
from nlgrpo.runtime.seeding import seed_everything
from nlgrpo.training import scalar_heads
from nlgrpo.training.scalar_heads import ScalarHeadTrainer

PARTS = 5  # equal parts of a completion that `evaluate` reports separately


@dataclass(frozen=True)
class Teacher:
    """A value model whose values are a target of compression, and its beta."""

    path: str
    model: Decoder
    beta: float


@dataclass(kw_only=True)
class ValueTrainer(ScalarHeadTrainer):
    """Trains a value model on outcomes, or on the values of ``teachers``."""

    config: ValueConfig
    outcomes: Outcomes
    held_out: Outcomes | None
    teachers: list[Teacher]

    RESULTS = "value.json"
    SHOWN = (("loss", "loss {:.4f}"), ("explained_variance", "explained {:.3f}"),
             ("held_out/explained_variance", "held out {:.3f}"), ("perf/tokens_per_s", "{:,.0f} tok/s"))  # fmt: skip
    WATCHED = ("mse", "explained_variance")

    @property
    def examples(self) -> int:
        return len(self.outcomes)

    @property
    def per_step(self) -> int:
        return self.config.train.completions

    @property
    def tested(self) -> bool:
        return self.held_out is not None

    def read_examples(self) -> Iterator[Any]:
        for outcomes in (self.outcomes, self.held_out):
            if outcomes is not None:
                yield from zip(outcomes.prompts, outcomes.completions, outcomes.rewards.tolist(), strict=True)

    def batches(self, outcomes: Outcomes, rows: Sequence[int]) -> list[MicroBatch]:
        """Pack this rank's share of ``rows`` with all their states, the same number of micro-batches on every rank."""
        share = rows[self.ranks.share(len(rows))]
        device = self.ranks.device
        tokens, group = self.micro_batch_limit
        packed = pack(outcomes.prompts, outcomes.open_ended, share, tokens, device, group_tokens=group)
        return self.pad_micro_batches(packed, empty_micro_batch)

    def totals(self) -> _Totals:
        return _Totals(self.ranks)

    def losses(self, rows: Sequence[int], totals: _Totals) -> Iterator[Tensor]:
        """The loss of a step is the mean over the states of its completions (Eq. 7, Eq. 49)."""
        states = sum(len(self.outcomes.completions[i]) + 1 for i in rows)
        for batch in accumulated(self.model, self.batches(self.outcomes, rows)):
            raw = outputs(self.model, batch)
            values = as_values(raw.detach(), self.config.loss.kind)
            targets = self.targets(self.outcomes, batch, values, self.config.loss.lam)
            if self.config.loss.kind == "bce":
                losses = F.binary_cross_entropy_with_logits(raw, targets.to(raw), reduction="none")
            else:
                losses = (raw - targets.to(raw)).square()
            yield losses.sum() / states
            tokens = sum(self.outcomes.sizes[i] for i in batch.row.unique().tolist())
            totals.add(losses.detach(), values, targets, tokens)

    def targets(self, outcomes: Outcomes, batch: MicroBatch, values: Tensor, lam: float) -> Tensor:
        """Regression targets (S,) float64 of the states, given their current ``values`` (S,).

        `lambda_returns` of the rewards; with teachers, the sum of their values divided by beta (Eq. 10). Collective,
        because the teachers are sharded: every rank runs them on every batch, even an empty one.
        """
        if self.teachers:
            with torch.no_grad():
                terms = [values_of(batch, t.model).double() / t.beta for t in self.teachers]
            return torch.stack(terms).sum(0)
        gamma = self.config.loss.gamma
        rewards = outcomes.rewards
        device = values.device
        if not len(values) or lam == gamma == 1:  # the target is the reward itself
            return rewards[batch.row.cpu()].to(device)
        rows, place = batch.row.unique(return_inverse=True)
        final = rewards[rows.cpu()].to(device)
        lengths = outcomes.lengths[rows.cpu()].to(device)
        grid = torch.zeros(len(rows), int(lengths.max()) + 1, dtype=torch.float64, device=device)
        grid[place, batch.offset] = values.double()
        return lambda_returns(grid, final, lengths, gamma=gamma, lam=lam)[place, batch.offset]

    @torch.no_grad()
    def evaluate(self, console: Console = QUIET) -> dict[str, Any]:
        """Measure how well the values predict the discounted held-out rewards, or the sum of the teachers' values.

        Always uses lambda = 1, because the targets of a smaller lambda depend on the values themselves.
        """
        if self.held_out is None:
            return {}
        sums = torch.zeros(PARTS, len(SUMS), dtype=torch.float64, device=self.ranks.device)
        batches = self.batches(self.held_out, range(len(self.held_out)))
        for batch in track(batches, "held-out batches", len(batches), console):
            values = values_of(batch, self.model)
            sums += _sums_by_part(self.held_out, batch, values, self.targets(self.held_out, batch, values, 1.0))
        return evaluated(self.ranks.sum(sums))

    def print_plan(self, console: Console) -> None:
        console.print(plan(self))

    def results_table(self, before: dict[str, Any], after: dict[str, Any]) -> Table:
        return result_tables.value_table(before, after)


def values_of(batch: MicroBatch, model: Decoder) -> Tensor:
    """Values (S,) of the states of a batch."""
    return as_values(outputs(model, batch), kind_of(model))


# --- metrics ----------------------------------------------------------------------------------------------------------

SUMS = ("states", "target", "target_squared", "residual_squared")


class _Totals:
    """Sums over micro-batches, reduced over ranks once at the end of a step."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sums = torch.zeros(len(SUMS) + 3, dtype=torch.float64, device=ranks.device)

    def add(self, losses: Tensor, values: Tensor, targets: Tensor, tokens: int) -> None:
        if len(losses):
            more = [losses.double().sum(), values.double().sum(), losses.new_tensor(float(tokens)).double()]
            self.sums += torch.cat([_sums(values, targets), torch.stack(more)])

    def metrics(self) -> dict[str, float]:
        *sums, loss, value, tokens = self.ranks.sum(self.sums).tolist()
        named = dict(zip(SUMS, sums, strict=True))
        states = named["states"]
        return {
            "loss": loss / states,
            "value_mean": value / states,
            "target_mean": named["target"] / states,
            "explained_variance": _explained(named) or 0.0,
            "tokens": tokens,
        }


def _sums(values: Tensor, targets: Tensor) -> Tensor:
    values = values.double()
    targets = targets.double()
    count = targets.new_tensor(float(len(targets)))
    return torch.stack([count, targets.sum(), targets.square().sum(), (targets - values).square().sum()])


def _sums_by_part(outcomes: Outcomes, batch: MicroBatch, values: Tensor, targets: Tensor) -> Tensor:
    """Sums (PARTS, 4) over the states in each part of their completions."""
    if not len(batch.row):
        return torch.zeros(PARTS, len(SUMS), dtype=torch.float64, device=values.device)
    length = outcomes.lengths[batch.row.cpu()].to(values.device)
    length = length.clamp(min=1)  # an empty completion has one state
    part = (batch.offset * PARTS // length).clamp(max=PARTS - 1)
    return torch.stack([_sums(values[part == i], targets[part == i]) for i in range(PARTS)])


def _explained(sums: dict[str, float]) -> float | None:
    """Explained variance, 1 - residual / variance; None if all targets are equal."""
    total_squares = sums["target_squared"] - sums["target"] ** 2 / sums["states"] if sums["states"] else 0.0
    return (
        1 - sums["residual_squared"] / total_squares
        if total_squares > 1e-12 * max(sums["target_squared"], 1e-300)
        else None
    )


def evaluated(sums: Tensor) -> dict[str, Any]:
    """Mean squared error and explained variance from sums (PARTS, 4) over states: of all states, and per part."""

    def summary(row: Tensor) -> dict[str, Any]:
        named = dict(zip(SUMS, row.tolist(), strict=True))
        states = int(named["states"])
        error = named["residual_squared"] / states if states else None
        return {"states": states, "mse": error, "explained_variance": _explained(named)}

    return summary(sums.sum(0)) | {"parts": [summary(part) for part in sums]}


# --- building ---------------------------------------------------------------------------------------------------------


def build_value_trainer(cfg: ValueConfig, ranks: Ranks) -> ValueTrainer:
    """Load tokenizer, rollouts and models. Raises UserError for a configuration that cannot be run."""
    check_value_config(cfg)
    seed_everything(cfg.train.seed)
    source = reward_model.locate(cfg.model.path)[0]
    tokenizer = load_tokenizer(source)
    longest = scalar_heads.max_length(cfg.model.path, cfg.data.max_length)
    outcomes = value_dataset.load_outcomes(
        cfg.data.rollouts,
        tokenizer,
        rewards=cfg.data.rewards,
        weights=cfg.data.weights,
        max_length=longest,
        need_rewards=not cfg.compress.values,
    )
    if not outcomes.rewards.square().sum().isfinite():
        raise UserError(f"rewards of up to {outcomes.rewards.abs().max().item():g} are too large to be squared")
    if cfg.loss.kind == "bce" and not bool(((outcomes.rewards >= 0) & (outcomes.rewards <= 1)).all()):
        low = outcomes.rewards.min().item()
        high = outcomes.rewards.max().item()
        raise UserError(f"loss.kind = 'bce' needs rewards in [0, 1], but these are in [{low:g}, {high:g}]")
    vocab = shape_of(decoder.read_config(source)).vocab
    largest = outcomes.largest
    held_out = None
    if largest >= vocab:
        raise UserError(
            f"{cfg.model.path} has a vocabulary of {vocab:,}, but the rollouts have the token id {largest:,}"
        )
    if cfg.evaluation.prompts:
        outcomes, rest = outcomes.split(cfg.evaluation.prompts)
        held_out = rest if len(rest) else None
        if not len(outcomes):
            raise UserError(f"no completion to train on: all are held out ({rest!r}); lower evaluation.prompts")
    if cfg.data.drop_equal:
        outcomes = outcomes.mixed()
        if not len(outcomes):
            raise UserError(
                f"no completion to train on: {outcomes!r}. data.drop_equal needs prompts with different rewards"
            )
    run = ValueTrainer(
        outcomes=outcomes, held_out=held_out, teachers=[], **scalar_heads.trainer_fields(cfg, ranks, tokenizer, longest)
    )
    if cfg.train.head_only:
        run.model.requires_grad_(False)
        reward_model.head_of(run.model).requires_grad_(True)
    set_kind(run.model, cfg.loss.kind)
    betas = cfg.compress.betas or (1.0,) * len(cfg.compress.values)
    run.teachers = [_teacher(path, beta, run) for path, beta in zip(cfg.compress.values, betas, strict=True)]
    return run


def _teacher(path: str, beta: float, run: ValueTrainer) -> Teacher:
    compute = compute_dtype(run.config.model.dtype, run.ranks.device)
    sharded = partial(shard, ranks=run.ranks, compute=compute, parallel=run.config.parallel)
    model, trained = reward_model.load_reward_model(path, dtype=compute, device=run.ranks.device, shard=sharded)
    if not trained:
        raise UserError(f"compress.values: {path} is not a value model: it has no scalar head")
    if not same_ids(load_tokenizer(reward_model.locate(path)[0]), run.tokenizer):
        raise UserError(f"compress.values: {path} has a different tokenizer from {run.config.model.path}")
    if model.shape.vocab < run.model.shape.vocab or model.shape.context < run.max_length:
        raise UserError(
            f"compress.values: {path} has a vocabulary of {model.shape.vocab:,} and a context of "
            f"{model.shape.context:,} tokens, but needs at least a vocabulary of {run.model.shape.vocab:,} and a "
            f"context of {run.max_length:,} tokens"
        )
    return Teacher(path, model.requires_grad_(False), beta)


# --- plan -----------------------------------------------------------------------------------------------------------


def plan(run: ValueTrainer) -> Table:
    """Return the plan as a table; ``--dry-run`` prints it and stops."""
    cfg = run.config
    shape = run.model.shape
    count = sum(p.numel() for p in run.model.parameters())
    head = "its saved head" if run.loaded_head else f"a new head, seed {cfg.train.seed}"
    rows = {
        "model": f"{cfg.model.path} ({shape.family}, {count:,} parameters, {head}, computes in "
        f"{str(run.compute).removeprefix('torch.')})",
        "ranks": f"{run.ranks.world} on {run.ranks.device.type}, "
        f"{implementation(run.ranks.device.type, run.compute)} attention",
        "data": f"{run.outcomes!r}",
        "held out": "nothing" if run.held_out is None else f"{run.held_out!r}",
        "target": _target(run),
        "loss": "cross-entropy of sigmoid(V)" if cfg.loss.kind == "bce" else "(V - target)^2",
        "training": f"{run.steps} step{'s' * (run.steps > 1)} of {cfg.train.completions} completions, "
        f"{cfg.train.epochs:g} epochs; {'the head alone; ' * cfg.train.head_only}"
        f"{cfg.optim.description}",
        "folder": str(run.folder),
    }
    return named_lines("plan", rows)


def _target(run: ValueTrainer) -> str:
    if run.teachers:
        return " + ".join(f"{teacher.path} / {teacher.beta:g}" for teacher in run.teachers)
    data = run.config.data
    loss = run.config.loss
    weights = data.weights or (1.0,) * len(data.rewards)
    named = (
        " + ".join(f"{w:g} {name}" for name, w in zip(data.rewards, weights, strict=True)) or "the sum of all rewards"
    )
    plain = loss.lam == loss.gamma == 1
    return named if plain else f"lambda-return of {named}, lambda {loss.lam:g}, gamma {loss.gamma:g}"
