"""The parts of a reward model's training, built from its configuration, its update, and what its folder holds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo import checkpoint, metrics, parallel, preferences, reward_model, writing
from nlgrpo import model as models
from nlgrpo.bradley_terry import bradley_terry_loss, evaluate_pairs
from nlgrpo.families import shape_of
from nlgrpo.learner import learning_rate, make_optimizer
from nlgrpo.model import Decoder
from nlgrpo.packing import PairBatch, empty_pair_batch, pack_pairs
from nlgrpo.parallel import Ranks, clip_gradients, full_parameters
from nlgrpo.parts import compute_dtype, load_tokenizer, micro_batch_tokens
from nlgrpo.preferences import PairSet
from nlgrpo.reward_model_config import RewardModelConfig, check

RESULTS = "reward_model.json"
WRITTEN = ("checkpoints", "model", "tensorboard", metrics.FILE, metrics.SAMPLES_FILE, RESULTS)
# What may differ when a run goes on: what it keeps and shows. Its length is part of it, as the schedule depends on it.
FREE = ("train.checkpoint_every", "train.keep_checkpoints", "train.tensorboard", "train.restart", "train.out",
        "train.micro_batch_tokens", "evaluation.every")  # fmt: skip
SHOWN = (("loss", "loss {:.4f}"), ("accuracy", "acc {:.3f}"), ("margin", "margin {:.3f}"),
         ("held_out/accuracy", "held out {:.3f}"), ("perf/tokens_per_s", "{:,.0f} tok/s"))  # fmt: skip


@dataclass
class Progress:
    """How far a run is: all that a checkpoint holds besides tensors and random states."""

    step: int = 0
    num_tokens: int = 0  # of the pairs trained on so far


@dataclass
class Run:
    """Everything that the loop works with."""

    config: RewardModelConfig
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    pairs: PairSet
    held_out: PairSet | None
    model: Decoder
    optimizer: torch.optim.Optimizer
    compute: torch.dtype
    pad: int | None
    trained: bool  # the head is not a new one
    max_length: int
    progress: Progress = field(default_factory=Progress)

    @property
    def folder(self) -> Path:
        return self.config.run

    @property
    def visits(self) -> int:
        """Pairs in all epochs together."""
        return max(1, round(self.config.train.epochs * len(self.pairs)))

    @property
    def steps(self) -> int:
        return math.ceil(self.visits / self.config.train.pairs)

    @property
    def micro_batch_tokens(self) -> int:
        return micro_batch_tokens(self.config.train.micro_batch_tokens, self.ranks.device)

    def batches(self, pairs: PairSet, rows: Sequence[int]) -> list[PairBatch]:
        """This rank's share of ``rows``, packed; as many micro-batches on every rank, as each one is a collective."""
        own, device = rows[self.ranks.share(len(rows))], self.ranks.device
        packed = pack_pairs(pairs.chosen, pairs.rejected, own, self.micro_batch_tokens, self.pad, device)
        most = int(self.ranks.max(torch.tensor(len(packed), device=device)))
        return packed + [empty_pair_batch(device) for _ in range(most - len(packed))]

    @torch.no_grad()
    def scores(self, pairs: PairSet) -> Tensor:
        """(2, n) of the preferred and the other answers, on the CPU, the same on all ranks."""
        found = torch.zeros(2, len(pairs), dtype=torch.float64, device=self.ranks.device)
        for batch in self.batches(pairs, range(len(pairs))):
            found[:, batch.row] = torch.stack(reward_model.scores(self.model, batch)).double()
        return self.ranks.sum(found).cpu()

    def evaluate(self) -> dict[str, Any]:
        """What the model is worth on the held-out pairs; empty without them."""
        return {} if self.held_out is None else evaluate_pairs(*self.scores(self.held_out))

    def update(self, rows: Sequence[int]) -> dict[str, float]:
        """One step of the optimiser on the pairs ``rows`` of all ranks; what was measured.

        The loss is the mean over these pairs, whose number is known first, and FSDP's mean over ranks is undone, so
        that neither ranks nor micro-batches change it.
        """
        lr = learning_rate(self.config.optim, self.progress.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        margins = torch.tensor(self.pairs.margins, dtype=torch.float64, device=self.ranks.device)
        margins = margins + self.config.loss.margin
        totals = _Totals(self.ranks)
        self.optimizer.zero_grad()
        for batch in self.batches(self.pairs, rows):
            chosen, rejected = reward_model.scores(self.model, batch)
            margin, centering = margins[batch.row].to(chosen), self.config.loss.centering
            losses = bradley_terry_loss(chosen, rejected, margin, centering=centering)
            (losses.sum() / len(rows) * self.ranks.world).backward()
            totals.add(losses.detach(), chosen.detach(), rejected.detach(), len(batch.tokens))
        grad_norm = clip_gradients(self.model, self.config.optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return totals.metrics() | {"grad_norm": grad_norm, "learning_rate": lr}

    def save(self) -> None:
        state = vars(self.progress) | {"config": asdict(self.config)}
        keep = self.config.train.keep_checkpoints
        where = self.folder / "checkpoints"
        checkpoint.save(where, self.progress.step, model=self.model, optimizer=self.optimizer, state=state, keep=keep)

    def restore(self) -> bool:
        """Go on from the newest whole checkpoint; False where there is none."""
        state = checkpoint.load(self.folder / "checkpoints", model=self.model, optimizer=self.optimizer)
        if state is not None:
            self.progress = Progress(**{name: state[name] for name in vars(self.progress)})
        return state is not None

    def export(self) -> Path:
        """Write the model as a Hugging Face classifier, in the type that it computes in; collective."""
        folder = self.folder / "model"
        parameters = full_parameters(self.model, self.compute)
        if self.ranks.first:
            with writing.into(folder):
                reward_model.save(
                    self.model,
                    folder,
                    tokenizer=self.tokenizer,
                    pad=self.pad,
                    max_length=self.max_length,
                    parameters=parameters,
                )
        return folder

    def write_results(self, **results: dict[str, Any]) -> None:
        if self.ranks.first:
            writing.atomic_write(self.folder / RESULTS, json.dumps(results, indent=1, allow_nan=False) + "\n")

    def logger(self) -> metrics.MetricsLogger:
        return metrics.MetricsLogger(
            self.folder,
            total_steps=self.steps,
            enabled=self.ranks.first,
            tensorboard=self.config.train.tensorboard,
            resume_step=self.progress.step,
            shown=SHOWN,
        )


class _Totals:
    """Sums and extremes over micro-batches, reduced over ranks once at the end of a step."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sums = torch.zeros(6, dtype=torch.float64, device=ranks.device)
        self.largest = torch.full((2,), -math.inf, dtype=torch.float64, device=ranks.device)

    def add(self, losses: Tensor, chosen: Tensor, rejected: Tensor, tokens: int) -> None:
        if not len(losses):
            return
        both, margin = torch.cat([chosen, rejected]).double(), (chosen - rejected).double()
        right = ((margin > 0).double() + (margin >= 0).double()) / 2
        parts = [losses.double().sum(), right.sum(), margin.sum(), both.sum()]
        self.sums += torch.stack([*parts, *self.sums.new_tensor([len(losses), tokens])])
        self.largest = torch.maximum(self.largest, torch.stack([both.max(), -both.min()]))

    def metrics(self) -> dict[str, float]:
        """TRL's names where its RewardTrainer has the metric."""
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


# --- building -----------------------------------------------------------------------------------------------------


def build(cfg: RewardModelConfig, ranks: Ranks) -> Run:
    """Read tokenizer, pairs and weights. Raises ValueError for whatever of the configuration cannot be run."""
    check(cfg)
    source, _ = reward_model.locate(cfg.model.path)
    hf_config = models.read_config(source)
    tokenizer = load_tokenizer(source)
    max_length = _max_length(cfg, shape_of(hf_config).context)
    pairs, held_out = load_pairs(cfg, tokenizer, max_length)
    compute = compute_dtype(cfg.model.dtype, ranks.device)
    stored = torch.float32 if compute == torch.bfloat16 else compute
    model, trained = reward_model.load(cfg.model.path, seed=cfg.train.seed, dtype=stored, device=ranks.device)
    model.activation_checkpointing = cfg.model.activation_checkpointing
    model = parallel.shard(model, ranks, compute)
    return Run(
        config=cfg,
        ranks=ranks,
        tokenizer=tokenizer,
        pairs=pairs,
        held_out=held_out,
        model=model,
        optimizer=make_optimizer(model, cfg.optim),
        compute=compute,
        pad=reward_model.padding_id(hf_config, tokenizer, trained),
        trained=trained,
        max_length=max_length,
    )


def _max_length(cfg: RewardModelConfig, context: int) -> int:
    asked = cfg.data.max_length
    if asked is not None and asked > context:
        raise ValueError(f"data.max_length = {asked}: {cfg.model.path} has a context of {context} tokens")
    return asked or context


def load_pairs(
    cfg: RewardModelConfig, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[PairSet, PairSet | None]:
    """The pairs to train on, and those held out (None without any), whose prompts the former do not have."""
    data = cfg.data

    def read(source: str, split: str, limit: int | None) -> PairSet:
        return preferences.load(
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
        held_out = read(data.evaluation, data.evaluation_split or data.split, None)
    else:
        pairs, held_out = pairs.split(cfg.evaluation.pairs)
    if cfg.evaluation.pairs == 0 or not len(held_out):
        return pairs, None
    kept = pairs.without(held_out.prompts)
    if not len(kept):
        raise ValueError(
            f"all {len(pairs):,} pairs of {data.source} have a prompt that is held out too; "
            "name another data.evaluation, or evaluation.pairs = 0"
        )
    return kept, held_out
