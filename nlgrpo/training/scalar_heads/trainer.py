"""Fitting a decoder with one output to examples, epoch after epoch: what reward models and value models share.

for rows in epochs:            # a fresh order each
    loss      = mean over the pairs, or the prefixes of completions, of all ranks
    parameters <- AdamW
what the model is worth on held-out examples, before and after
"""

from __future__ import annotations

import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from nlgrpo.config.schema import EpochsConfig, ModelConfig, OptimConfig
from nlgrpo.data.prompt_dataset import visits
from nlgrpo.model import decoder, fsdp, reward_model
from nlgrpo.model.architectures import shape_of
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import TOO_LARGE, check_finite, clip_gradients, full_parameters
from nlgrpo.runtime import atomic_files, checkpoint, distributed
from nlgrpo.runtime.device import compute_dtype, micro_batch_tokens
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.seeding import seed_everything
from nlgrpo.runtime.timing import Clock, StopSignal, flops_utilisation
from nlgrpo.training import metrics, run_folder
from nlgrpo.training.learner import learning_rate, make_optimizer

# What may differ when a run goes on: what it keeps and shows. Its length is part of it, as the schedule depends on it.
FREE = ("train.checkpoint_every", "train.keep_checkpoints", "train.tensorboard", "train.restart", "train.out",
        "train.micro_batch_tokens", "evaluation.every")  # fmt: skip


class Evaluated(Protocol):
    every: int


class TrainerConfig(Protocol):
    """What the configuration of every kind of fit has."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def optim(self) -> OptimConfig: ...
    @property
    def train(self) -> EpochsConfig: ...
    @property
    def evaluation(self) -> Evaluated: ...
    @property
    def run(self) -> Path: ...


@dataclass
class Progress:
    """How far a run is: all that a checkpoint holds besides tensors and random states."""

    step: int = 0
    num_tokens: int = 0  # of the examples trained on so far


class Totals(Protocol):
    """What is measured of a step, from its micro-batches."""

    def metrics(self) -> dict[str, float]: ...


@dataclass(kw_only=True)
class Trainer(ABC):
    """A run: a model, and the examples that it is fitted to. A kind of fit says what an example and its loss are."""

    config: Any  # a FitConfig of this kind
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    model: Decoder
    optimizer: torch.optim.Optimizer
    compute: torch.dtype
    pad: int | None
    trained: bool  # the head is not a new one
    max_length: int
    progress: Progress = field(default_factory=Progress)

    RESULTS: ClassVar[str]  # the file with what the model is worth
    SHOWN: ClassVar[Sequence[tuple[str, str]]]  # metrics of the progress line, and how
    WATCHED: ClassVar[Sequence[str]]  # of what `evaluate` gives, numbers to follow while it trains

    # --- what a kind of fit says --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def examples(self) -> int:
        """How many there are to train on."""

    @property
    @abstractmethod
    def per_step(self) -> int:
        """Of a step, over all ranks."""

    @property
    @abstractmethod
    def tested(self) -> bool:
        """Whether there are held-out examples."""

    @abstractmethod
    def totals(self) -> Totals: ...

    @abstractmethod
    def losses(self, rows: Sequence[int], totals: Any) -> Iterator[Tensor]:
        """Of each micro-batch of this rank's share of the examples ``rows``, as many on every rank.

        Over all of them and all ranks they add up to the loss of the step. What is measured goes into ``totals``.
        """

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """What the model is worth on held-out examples, empty without them; collective, the same on all ranks."""

    @abstractmethod
    def plan(self) -> Table:
        """What is going to happen; what ``--dry-run`` prints."""

    @abstractmethod
    def results_table(self, before: dict[str, Any], after: dict[str, Any]) -> Table: ...

    # --- what all have ------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.config.run

    @property
    def visits(self) -> int:
        """Examples in all epochs together."""
        return max(1, round(self.config.train.epochs * self.examples))

    @property
    def steps(self) -> int:
        return math.ceil(self.visits / self.per_step)

    @property
    def micro_batch_tokens(self) -> int:
        return micro_batch_tokens(self.config.train.micro_batch_tokens, self.ranks.device)

    def rows(self, step: int) -> list[int]:
        """Numbers of the examples of a step."""
        first = step * self.per_step
        return visits(self.examples, first, min(self.per_step, self.visits - first), self.config.train.seed)

    def pad_micro_batches(self, batches: list[Any], empty: Callable[[torch.device], Any]) -> list[Any]:
        """With empty ones behind, so that all ranks have as many: each is a collective."""
        most = int(self.ranks.max(torch.tensor(len(batches), device=self.ranks.device)))
        return batches + [empty(self.ranks.device) for _ in range(most - len(batches))]

    def update(self, rows: Sequence[int]) -> dict[str, float]:
        """One step of the optimiser on the examples ``rows`` of all ranks; what was measured.

        The number of examples is known first, and FSDP's mean over ranks is undone, so that neither ranks nor
        micro-batches change the loss.
        """
        optim, totals = self.config.optim, self.totals()
        lr = learning_rate(optim, self.progress.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        for loss in self.losses(rows, totals):
            (loss * self.ranks.world).backward()
        grad_norm = clip_gradients(self.model, optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return totals.metrics() | {"grad_norm": grad_norm, "learning_rate": lr}

    def save(self) -> None:
        state = vars(self.progress) | {"config": asdict(self.config)}
        where, keep = self.folder / "checkpoints", self.config.train.keep_checkpoints
        check_finite(self.model, self.ranks, TOO_LARGE)
        checkpoint.save(where, self.progress.step, model=self.model, optimizer=self.optimizer, state=state, keep=keep)

    def restore(self) -> bool:
        """Go on from the newest whole checkpoint; False where there is none."""
        state = checkpoint.load(self.folder / "checkpoints", model=self.model, optimizer=self.optimizer)
        if state is not None:
            self.progress = Progress(**{name: state[name] for name in vars(self.progress)})
        return state is not None

    def export(self) -> Path:
        """Write the model as a Hugging Face classifier, in the type that it computes in; there for all ranks then."""
        check_finite(self.model, self.ranks, TOO_LARGE)
        folder, parameters = self.folder / "model", full_parameters(self.model, self.compute)
        if self.ranks.first:
            with atomic_files.into(folder):
                reward_model.save(
                    self.model,
                    folder,
                    tokenizer=self.tokenizer,
                    pad=self.pad,
                    max_length=self.max_length,
                    parameters=parameters,
                )
        self.ranks.any(False)  # nobody reads it before it is whole
        return folder

    def write_results(self, **results: dict[str, Any]) -> None:
        if self.ranks.first:
            atomic_files.atomic_write(self.folder / self.RESULTS, json.dumps(results, indent=1, allow_nan=False) + "\n")

    def logger(self) -> metrics.MetricsLogger:
        return metrics.MetricsLogger(
            self.folder,
            total_steps=self.steps,
            enabled=self.ranks.first,
            tensorboard=self.config.train.tensorboard,
            resume_step=self.progress.step,
            shown=tuple(self.SHOWN),
        )


# --- building ---------------------------------------------------------------------------------------------------------


def max_length(model: str, asked: int | None) -> int:
    """Tokens of the longest text: what is ``asked`` for, or the model's context. ValueError where that is less."""
    context = shape_of(decoder.read_config(reward_model.locate(model)[0])).context
    if asked is not None and asked > context:
        raise ValueError(f"data.max_length = {asked}: {model} has a context of {context} tokens")
    return asked or context


def begin(cfg: TrainerConfig, ranks: Ranks, tokenizer: PreTrainedTokenizerBase, longest: int) -> dict[str, Any]:
    """The fields of a `Trainer` except its examples; the model is loaded and sharded. Raises as `reward_model.load`."""
    path, compute = cfg.model.path, compute_dtype(cfg.model.dtype, ranks.device)
    stored = torch.float32 if compute == torch.bfloat16 else compute
    model, trained = reward_model.load(path, seed=cfg.train.seed, dtype=stored, device=ranks.device)
    model.activation_checkpointing = cfg.model.activation_checkpointing
    model = fsdp.shard(model, ranks, compute)
    return {
        "config": cfg,
        "ranks": ranks,
        "tokenizer": tokenizer,
        "model": model,
        "optimizer": make_optimizer(model, cfg.optim),
        "compute": compute,
        "pad": reward_model.padding_id(model.config, tokenizer, trained),
        "trained": trained,
        "max_length": longest,
    }


# --- the loop ---------------------------------------------------------------------------------------------------------


def train(run: Trainer, stop: StopSignal, log: metrics.MetricsLogger) -> bool:
    """The loop, from where the run stands. Returns False where a signal ended it early, after a checkpoint."""
    cfg, ranks, progress = run.config.train, run.ranks, run.progress
    parameters = sum(p.numel() for p in run.model.parameters())
    for step in range(progress.step, run.steps):
        clock, rows = Clock(ranks.device), run.rows(step)
        stats = run.update(rows)
        clock.lap("update")
        tokens = int(stats.pop("tokens"))
        progress.step, progress.num_tokens = step + 1, progress.num_tokens + tokens
        stats |= {"epoch": (step * run.per_step + len(rows)) / run.examples, "num_tokens": progress.num_tokens}
        stats |= clock.metrics(tokens)
        stats |= flops_utilisation(ranks.device, 6 * parameters * tokens / ranks.world, stats["step_time"])
        if every(run.config.evaluation.every, step + 1) and run.tested:
            found = run.evaluate()
            stats |= {f"held_out/{name}": found[name] for name in run.WATCHED}
        log.log(step, stats)
        stopping = ranks.any(stop.received)
        if stopping or step + 1 == run.steps or every(cfg.checkpoint_every, step + 1):
            run.save()
        if stopping:
            return step + 1 == run.steps
    return True


def every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def evaluate_before(run: Trainer) -> dict[str, Any]:
    """What the untrained head is worth; taken from the folder where an earlier start of the run has measured it."""
    known = run.folder / run.RESULTS
    found: list[Any] = [None]
    if run.ranks.first and known.is_file():
        found = [json.loads(known.read_text("utf-8")).get("before")]
    before = run.ranks.gather_objects(found[0])[0]
    if before is None:
        before = run.evaluate()
        run.write_results(before=before)
    return before


def launch(cfg: TrainerConfig, build: Callable[[Any, Ranks], Trainer], *, dry_run: bool = False) -> None:
    """Run a configuration on the ranks that the launcher started, from its newest checkpoint if there is one."""
    stop = StopSignal()
    disable_progress_bar()
    with distributed.start() as ranks:
        fit(cfg, build, ranks, stop, dry_run=dry_run)  # whose model, and with it the group's handles, is gone on return


def fit(
    cfg: TrainerConfig, build: Callable[[Any, Ranks], Trainer], ranks: Ranks, stop: StopSignal, *, dry_run: bool = False
) -> bool:
    """`launch`, among ranks that are there already. Returns False where a signal ended it early, after a checkpoint."""
    console = Console(quiet=not ranks.first)
    seed_everything(cfg.train.seed)
    run = build(cfg, ranks)
    console.print(run.plan())
    if dry_run:
        return True
    written = ("checkpoints", "model", "tensorboard", metrics.FILE, metrics.SAMPLES_FILE, run.RESULTS)
    run_folder.claim(run.folder, cfg, ranks, free=FREE, restart=cfg.train.restart, removed=written)
    before = evaluate_before(run)
    if run.restore():
        console.print(f"going on from step {run.progress.step}")
    with run.logger() as log:
        finished = train(run, stop, log)
    if not finished:
        console.print(f"stopped and saved at step {run.progress.step}; the same command goes on from there")
        return False
    exported, after = run.export(), run.evaluate()
    run.write_results(before=before, after=after)
    if after:
        console.print(run.results_table(before, after))
    console.print(f"model   {exported}", highlight=False, soft_wrap=True)
    return True


def command(arguments: Sequence[str], name: str, modes: Mapping[str, Callable[[Sequence[str], bool], None]]) -> int:
    """``nlgrpo NAME MODE [file.toml] [--section.key value ...] [--dry-run]``; ``modes`` are given the rest.

    Exit status: 0 when done, or saved on SIGTERM; 1, with a message, for bad input.
    """
    first = next(iter(modes))
    try:
        if list(arguments) in (["-h"], ["--help"]):
            arguments = [first, "--help"]
        if not arguments or arguments[0] not in modes:
            came = f", got {arguments[0]!r}" if arguments else ""
            which = first if len(modes) == 1 else f"({'|'.join(modes)})"
            raise ValueError(f"expected: nlgrpo {name} {which} [file.toml] [--section.key value ...]{came}")
        rest = [argument for argument in arguments[1:] if argument != "--dry-run"]
        modes[arguments[0]](rest, "--dry-run" in arguments)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
