"""``nlgrpo reward-model train``: train a Bradley-Terry reward model on preference pairs.

The initial model is a causal language model or a classifier with one output.

On several ranks: ``torchrun --nproc-per-node=8 -m nlgrpo.cli reward-model train pairs.toml``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.apps.report import result_tables
from nlgrpo.apps.reward_model.config import PairsConfig, RewardModelConfig, check_reward_model_config
from nlgrpo.data import preference_dataset
from nlgrpo.data.preference_dataset import PairSet
from nlgrpo.data.sources import is_file, unread
from nlgrpo.errors import UserError
from nlgrpo.losses.bradley_terry import bradley_terry_loss, evaluate_pairs
from nlgrpo.model import reward_model
from nlgrpo.model.attention import implementation
from nlgrpo.model.fsdp import accumulated
from nlgrpo.model.packing import PairBatch, empty_pair_batch, pack_pairs
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.runtime.console import first_tokens, named_lines
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.progress import QUIET, track
from nlgrpo.runtime.seeding import seed_everything
from nlgrpo.training import scalar_heads
from nlgrpo.training.scalar_heads import ScalarHeadTrainer


@dataclass(kw_only=True)
class RewardModelTrainer(ScalarHeadTrainer):
    """Trains a reward model on preference pairs."""

    config: RewardModelConfig
    pairs: PairSet
    held_out: PairSet | None

    RESULTS = "reward_model.json"
    SHOWN = (("loss", "loss {:.4f}"), ("accuracy", "acc {:.3f}"), ("margin", "margin {:.3f}"),
             ("held_out/accuracy", "held out {:.3f}"), ("perf/tokens_per_s", "{:,.0f} tok/s"))  # fmt: skip
    WATCHED = ("accuracy", "log_loss", "ece")

    @property
    def examples(self) -> int:
        return len(self.pairs)

    @property
    def per_step(self) -> int:
        return self.config.train.pairs

    @property
    def tested(self) -> bool:
        return self.held_out is not None

    def read_examples(self) -> Iterator[Any]:
        for pairs in (self.pairs, self.held_out):
            if pairs is not None:
                yield from zip(pairs.chosen, pairs.rejected, pairs.margins, strict=True)

    def batches(self, pairs: PairSet, rows: Sequence[int]) -> list[PairBatch]:
        """Pack this rank's share of the pairs ``rows`` into micro-batches, the same number on every rank."""
        share = rows[self.ranks.share(len(rows))]
        device = self.ranks.device
        packed = pack_pairs(pairs.chosen, pairs.rejected, share, self.micro_batch_limit.tokens, self.pad, device)
        return self.pad_micro_batches(packed, empty_pair_batch)

    @torch.no_grad()
    def scores(self, pairs: PairSet, console: Console = QUIET) -> Tensor:
        """Scores (2, n) of the chosen and the rejected answers, on the CPU, the same on all ranks."""
        scores = torch.zeros(2, len(pairs), dtype=torch.float64, device=self.ranks.device)
        batches = self.batches(pairs, range(len(pairs)))
        for batch in track(batches, "held-out batches", len(batches), console):
            scores[:, batch.row] = torch.stack(reward_model.scores(self.model, batch)).double()
        return self.ranks.sum(scores).cpu()

    def evaluate(self, console: Console = QUIET) -> dict[str, Any]:
        return {} if self.held_out is None else evaluate_pairs(*self.scores(self.held_out, console))

    def totals(self) -> _Totals:
        return _Totals(self.ranks)

    def losses(self, rows: Sequence[int], totals: _Totals) -> Iterator[Tensor]:
        """The loss of a step is the mean over its pairs."""
        margins = torch.tensor(self.pairs.margins, dtype=torch.float64, device=self.ranks.device)
        margins = margins + self.config.loss.margin
        for batch in accumulated(self.model, self.batches(self.pairs, rows)):
            chosen, rejected = reward_model.scores(self.model, batch)
            margin = margins[batch.row].to(chosen)
            centering = self.config.loss.centering
            losses = bradley_terry_loss(chosen, rejected, margin, centering=centering)
            yield losses.sum() / len(rows)
            tokens = sum(len(self.pairs.chosen[i]) + len(self.pairs.rejected[i]) for i in batch.row.tolist())
            totals.add(losses.detach(), chosen.detach(), rejected.detach(), tokens)

    def print_plan(self, console: Console) -> None:
        console.print(plan(self))

    def results_table(self, before: dict[str, Any], after: dict[str, Any]) -> Table:
        return result_tables.held_out_table(before, after)


class _Totals:
    """Sums and extremes over micro-batches, reduced over ranks once at the end of a step."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sums = torch.zeros(6, dtype=torch.float64, device=ranks.device)
        self.largest = torch.full((2,), -math.inf, dtype=torch.float64, device=ranks.device)

    def add(self, losses: Tensor, chosen: Tensor, rejected: Tensor, tokens: int) -> None:
        if not len(losses):
            return
        both = torch.cat([chosen, rejected]).double()
        margin = (chosen - rejected).double()
        right = ((margin > 0).double() + (margin >= 0).double()) / 2
        parts = [losses.double().sum(), right.sum(), margin.sum(), both.sum()]
        self.sums += torch.stack([*parts, *self.sums.new_tensor([len(losses), tokens])])
        self.largest = torch.maximum(self.largest, torch.stack([both.max(), -both.min()]))

    def metrics(self) -> dict[str, float]:
        """Metrics of the step, with the names of TRL's RewardTrainer where it has them."""
        loss, right, margin, reward, pairs, tokens = self.ranks.sum(self.sums).tolist()
        largest, smallest = self.ranks.max(self.largest).tolist()
        return {
            "loss": loss / pairs,
            "accuracy": right / pairs,
            "margin": margin / pairs,
            "mean_reward": reward / (2 * pairs),
            "min_reward": -smallest,
            "max_reward": largest,
            "tokens": tokens,
        }


# --- building ---------------------------------------------------------------------------------------------------------


def build_reward_model_trainer(cfg: RewardModelConfig, ranks: Ranks) -> RewardModelTrainer:
    """Load tokenizer, pairs and model. Raises UserError for a configuration that cannot be run."""
    check_reward_model_config(cfg)
    seed_everything(cfg.train.seed)
    tokenizer = load_tokenizer(reward_model.locate(cfg.model.path)[0])
    longest = scalar_heads.max_length(cfg.model.path, cfg.data.max_length)
    pairs, held_out = load_pairs(cfg, tokenizer, longest)
    return RewardModelTrainer(
        pairs=pairs, held_out=held_out, **scalar_heads.trainer_fields(cfg, ranks, tokenizer, longest)
    )


def load_pairs(
    cfg: RewardModelConfig, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[PairSet, PairSet | None]:
    """Load the training pairs and the held-out pairs (None if there are none). They have no common prompt."""
    data = cfg.data

    def read(source: str, split: str, limit: int | None) -> PairSet:
        return preference_dataset.load_preferences(
            source,
            tokenizer,
            max_length=max_length,
            split=split,
            prompt_column=data.prompt_column,
            chosen_column=data.chosen_column,
            rejected_column=data.rejected_column,
            margin_column=data.margin_column,
            limit=limit,
        )

    pairs = read(data.source, data.split, data.limit)
    if data.evaluation:
        inherited = "train" if is_file(data.evaluation) else data.split  # a file has no splits
        held_out = read(data.evaluation, data.evaluation_split or inherited, None)
    else:
        pairs, held_out = pairs.split(cfg.evaluation.pairs)
    if cfg.evaluation.pairs == 0 or not len(held_out):
        return pairs, None
    training = pairs.without(held_out.prompts, zip(held_out.chosen, held_out.rejected, strict=True))
    if not len(training):
        raise UserError(
            f"all {len(pairs):,} pairs of {data.source} have a prompt that is held out; "
            "set another data.evaluation, or evaluation.pairs = 0"
        )
    return training, held_out


# --- plan -----------------------------------------------------------------------------------------------------------


def plan(run: RewardModelTrainer) -> Table:
    """Return the plan as a table; ``--dry-run`` prints it and stops."""
    cfg = run.config
    shape = run.model.shape
    count = sum(p.numel() for p in run.model.parameters())
    head = "the head of the classifier" if run.loaded_head else f"a new head, seed {cfg.train.seed}"
    terms = ["-log sigmoid(r_chosen - r_rejected" + (f" - {cfg.loss.margin:g}" if cfg.loss.margin else "") + ")"]
    terms += [f"{cfg.loss.centering:g} (r_chosen + r_rejected)^2"] if cfg.loss.centering else []
    rows = {
        "model": f"{cfg.model.path} ({shape.family}, {count:,} parameters, {head}, computes in "
        f"{str(run.compute).removeprefix('torch.')})",
        "ranks": f"{run.ranks.world} on {run.ranks.device.type}, "
        f"{implementation(run.ranks.device.type, run.compute)} attention",
        "data": "\n".join([f"{run.pairs!r}", *_unread_files(cfg.data)]),
        "held out": "nothing" if run.held_out is None else f"{run.held_out!r}",
        **first_tokens("example", run.pairs.chosen[0], run.tokenizer),
        "texts": f"up to {run.max_length} tokens; {_padding(run)}",
        "loss": " + ".join(terms),
        "training": f"{run.steps} step{'s' * (run.steps > 1)} of {cfg.train.pairs} pairs, {cfg.train.epochs:g} epochs; "
        f"{cfg.optim.description}",
        "folder": str(run.folder),
    }
    return named_lines("plan", rows)


def _unread_files(data: PairsConfig) -> list[str]:
    """Say which files of the folders of [data] belong to other splits and are not read."""
    read = [(data.source, data.split)]
    if data.evaluation:
        read.append((data.evaluation, data.evaluation_split or data.split))
    return unread(read)


def _padding(run: RewardModelTrainer) -> str:
    if run.pad is None:
        return "no padding id, so transformers can score only one text at a time"
    token = run.tokenizer.convert_ids_to_tokens(run.pad)
    if run.pad == run.tokenizer.eos_token_id:
        return f"padding is EOS (id {run.pad}, {token}): the score is read at the token before it"
    return f"padding id {run.pad} ({token})"
