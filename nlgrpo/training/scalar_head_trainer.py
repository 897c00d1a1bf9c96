"""Training loop for decoders with a scalar head, shared by reward models and value models.

evaluate on held-out examples
for rows in epochs:            # reshuffled every epoch
    loss       = mean over the pairs, or over the prefixes of completions, of all ranks
    parameters <- AdamW or Muon
evaluate on held-out examples
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from nlgrpo.config.schema import EpochsConfig, ModelConfig, OptimConfig
from nlgrpo.config.validate import refuse
from nlgrpo.data.prompt_dataset import visits
from nlgrpo.engine import as_trained
from nlgrpo.engine.rollouts import run_inputs, store
from nlgrpo.engine.rollouts.run_inputs import RunInputs
from nlgrpo.errors import UserError
from nlgrpo.model import adapters, decoder, fsdp, lora, reward_model
from nlgrpo.model.architectures import shape_of
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import TOO_LARGE, check_finite, clip_gradients
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime import atomic_files, checkpoint, cpu_threads
from nlgrpo.runtime.device import MicroBatchLimit, compute_dtype, master_dtype, micro_batch_limit
from nlgrpo.runtime.distributed import ParallelConfig, Ranks
from nlgrpo.runtime.seeding import seed_everything
from nlgrpo.runtime.supervision import process_group
from nlgrpo.runtime.supervision.phases import phase
from nlgrpo.runtime.supervision.stop_signal import StopSignal
from nlgrpo.runtime.timing import Clock, every, flops_utilisation
from nlgrpo.training import run_folder
from nlgrpo.training.learner import learning_rate, make_optimizer
from nlgrpo.training.tracking import run_files
from nlgrpo.training.tracking.logger import WRITTEN, MetricsLogger
from nlgrpo.training.tracking.trackers import TrackedRun

# Keys that may change when a run resumes: what it saves and shows. Its length may not: the schedule depends on it.
FREE = ("train.checkpoint_every", "train.keep_checkpoints", *run_files.TRACKER_KEYS, "train.restart", "train.out",
        "train.micro_batch_tokens", "model.compile", "evaluation.every", "parallel.replicate",
        "parallel.reshard_after_forward", "parallel.gather_for_sampling", "parallel.offload", "train.timeout",
        "train.grace_period", "train.keep_every", "train.async_save", "train.allow_changed")  # fmt: skip


class Evaluated(Protocol):
    every: int


class TrainerConfig(Protocol):
    """Sections that every configuration of a `Trainer` has."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def lora(self) -> LoraConfig: ...
    @property
    def parallel(self) -> ParallelConfig: ...
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
    """State of a run that a checkpoint holds besides tensors and random states."""

    step: int = 0
    num_tokens: int = 0  # tokens trained on so far


class Totals(Protocol):
    """Accumulates the metrics of a step over its micro-batches."""

    def metrics(self) -> dict[str, float]: ...


@dataclass(kw_only=True)
class Trainer(ABC):
    """A run that trains a model on examples. Subclasses define the examples, their loss and the evaluation."""

    config: Any  # a TrainerConfig
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    model: Decoder
    optimizer: torch.optim.Optimizer
    compute: torch.dtype
    pad: int | None
    trained: bool  # the head was loaded, not initialized
    max_length: int
    adapter: LoraConfig | None  # settings of the model's adapters
    progress: Progress = field(default_factory=Progress)
    base_digest: str = ""  # of the weights that training started from, on the first rank once `inputs` has read them

    RESULTS: ClassVar[str]  # name of the file with the results of `evaluate`
    SHOWN: ClassVar[Sequence[tuple[str, str]]]  # metrics on the progress line, with formats
    WATCHED: ClassVar[Sequence[str]]  # results of `evaluate` that are logged during training

    # --- defined by subclasses ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def examples(self) -> int:
        """Number of training examples."""

    @property
    @abstractmethod
    def per_step(self) -> int:
        """Number of examples per step, over all ranks."""

    @property
    @abstractmethod
    def tested(self) -> bool:
        """Whether there are held-out examples."""

    @abstractmethod
    def read_examples(self) -> Iterator[Any]:
        """Yield the examples as plain data, those that are held out too."""

    @abstractmethod
    def totals(self) -> Totals: ...

    @abstractmethod
    def losses(self, rows: Sequence[int], totals: Any) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch of this rank's share of the examples ``rows``.

        All ranks yield the same number of losses; the sum over micro-batches and ranks is the loss of the step. Adds
        metrics to ``totals``.
        """

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Evaluate on the held-out examples; {} without them. Collective, the same on all ranks."""

    @abstractmethod
    def plan(self) -> Table:
        """Return the plan as a table; ``--dry-run`` prints it and stops."""

    @abstractmethod
    def results_table(self, before: dict[str, Any], after: dict[str, Any]) -> Table: ...

    # --- shared -------------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.config.run

    @property
    def visits(self) -> int:
        """Number of examples over all epochs."""
        return max(1, round(self.config.train.epochs * self.examples))

    @property
    def steps(self) -> int:
        return math.ceil(self.visits / self.per_step)

    @property
    def micro_batch_limit(self) -> MicroBatchLimit:
        return micro_batch_limit(self.config.train.micro_batch_tokens, self.ranks.device)

    def rows(self, step: int) -> list[int]:
        """Indices of the examples of a step."""
        first = step * self.per_step
        return visits(self.examples, first, min(self.per_step, self.visits - first), self.config.train.seed)

    def pad_micro_batches(self, batches: list[Any], empty: Callable[[torch.device], Any]) -> list[Any]:
        """Append ``empty`` micro-batches until all ranks have the same number; collective, like each forward pass."""
        most = int(self.ranks.max(torch.tensor(len(batches), device=self.ranks.device)))
        return batches + [empty(self.ranks.device) for _ in range(most - len(batches))]

    def update(self, rows: Sequence[int]) -> dict[str, float]:
        """Take one optimizer step on the examples ``rows`` of all ranks; returns metrics.

        The loss is a mean over all examples of the step, and FSDP's mean over ranks is undone, so it depends neither
        on the number of ranks nor on the micro-batches.
        """
        optim, totals = self.config.optim, self.totals()
        lr = learning_rate(optim, self.progress.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        with lora.dropout(self.model):
            for loss in self.losses(rows, totals):
                (loss * self.ranks.world).backward()
        grad_norm = clip_gradients(self.model, optim.max_grad_norm, finite=optim.skip_grad_norm is None)
        if not optim.skips(grad_norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return totals.metrics() | {"grad_norm": grad_norm, "learning_rate": lr}

    @cached_property
    def saver(self) -> checkpoint.Saver:
        """Saves the checkpoints; created by all ranks together."""
        return run_folder.saver(self.folder, self.config.train, self.ranks, adapters=self.adapter is not None)

    @phase("checkpoint")
    def save(self, *, wait: bool = True) -> None:
        """Save a checkpoint; collective. Unless ``wait``, training may continue while it is written."""
        state = vars(self.progress) | {"config": asdict(self.config)}
        check_finite(self.model, self.ranks, TOO_LARGE)
        run_files.sync(self.folder, self.ranks)
        self.saver.save(self.progress.step, self.model, self.optimizer, state, wait=wait)

    def restore(self) -> bool:
        """Load the newest complete checkpoint; returns False if there is none."""
        state = checkpoint.load(self.folder / "checkpoints", model=self.model, optimizer=self.optimizer)
        if state is not None:
            self.progress = Progress(**{name: state[name] for name in vars(self.progress)})
        return state is not None

    @phase("export")
    def export(self) -> Path:
        """Write the model as a Hugging Face classifier, in the compute dtype; collective, complete on return."""
        check_finite(self.model, self.ranks, TOO_LARGE)

        def write(folder: Path, parameters: Iterator[tuple[str, Tensor]]) -> None:
            reward_model.save(
                self.model,
                folder,
                tokenizer=self.tokenizer,
                pad=self.pad,
                max_length=self.max_length,
                parameters=parameters,
                dtype=self.compute,
            )

        def write_beside_adapter() -> None:
            if self.ranks.first and self.adapter is not None:
                folder = self.folder / "adapter"
                with atomic_files.into(folder):
                    reward_model.save_scorer_tokenizer(self.tokenizer, folder, pad=self.pad, max_length=self.max_length)
                    reward_model.write_head(folder, self.model)
                    as_trained.write_base(folder, self.config.model.path, self.base_digest)

        exported = adapters.export(
            self.model,
            self.folder,
            write,
            config=self.adapter,
            compute=self.compute,
            ranks=self.ranks,
            base=self.config.model.path,
        )
        self.ranks.agree(write_beside_adapter)
        return exported

    def inputs(self) -> RunInputs:
        """Return digests of examples and model. Raises UserError if lora.path is an adapter of other weights."""
        found = RunInputs(self.RESULTS)
        name = self.config.model.path
        folder, saved = reward_model.locate(name)
        if self.config.lora.path:
            as_trained.check_base(self.config.lora.path, saved or folder)
        self.base_digest = store.digest_of_weights(saved or folder)
        found.add_model(folder, self.tokenizer, name)
        if saved is not None:
            found.add("checkpoint", "model", store.digest_of_model(saved), f"weights of {name}")
        examples = run_inputs.digest_of_examples(self.read_examples())
        found.add("data", "data", examples, "examples, or their order", unless=("tokenizer", "template"))
        return found

    def write_results(self, **results: dict[str, Any]) -> None:
        if self.ranks.first:
            atomic_files.atomic_write(self.folder / self.RESULTS, json.dumps(results, indent=1, allow_nan=False) + "\n")

    def logger(self) -> MetricsLogger:
        return MetricsLogger(
            self.folder,
            total_steps=self.steps,
            enabled=self.ranks.first,
            tracked=TrackedRun.of(self.config, self.folder) if self.config.train.track else None,
            resume_step=self.progress.step,
            shown=tuple(self.SHOWN),
        )


# --- building ---------------------------------------------------------------------------------------------------------


def max_length(model: str, requested: int | None) -> int:
    """Largest number of tokens per text: ``requested``, or else the context. Raises UserError if it is exceeded."""
    context = shape_of(decoder.read_config(reward_model.locate(model)[0])).context
    if requested is not None and requested > context:
        raise UserError(f"data.max_length = {requested}: {model} has a context of {context} tokens")
    return requested or context


def begin(cfg: TrainerConfig, ranks: Ranks, tokenizer: PreTrainedTokenizerBase, longest: int) -> dict[str, Any]:
    """Load and shard the model; returns the fields of a `Trainer` without examples. Raises as `reward_model.load`."""
    path, compute = cfg.model.path, compute_dtype(cfg.model.dtype, ranks.device)
    refuse(cfg.parallel.faults(ranks.world))
    adapter = adapters.resolve(cfg.lora, shape_of(decoder.read_config(reward_model.locate(path)[0])))
    sharded = partial(fsdp.prepare, adapter=adapter, ranks=ranks, compute=compute, parallel=cfg.parallel)
    stored, seed = master_dtype(compute), cfg.train.seed
    model, trained = reward_model.load(path, seed=seed, dtype=stored, device=ranks.device, shard=sharded)
    if adapter is not None:
        adapters.begin(model, adapter, seed)
    model.configure(cfg.model.activation_checkpointing, cfg.model.compile)
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
        "adapter": adapter,
    }


# --- the loop ---------------------------------------------------------------------------------------------------------


def train(run: Trainer, stop: StopSignal, log: MetricsLogger) -> bool:
    """Run the training loop from the current step. Returns False if a signal stopped it early, after a checkpoint."""
    cfg, ranks, progress, saver = run.config.train, run.ranks, run.progress, run.saver
    parameters = sum(p.numel() for p in run.model.parameters())
    for step in range(progress.step, run.steps):
        clock, rows = Clock(ranks.device, step), run.rows(step)
        clock.phase("update")
        stats = run.update(rows)
        clock.stop()
        tokens = int(stats.pop("tokens"))
        progress.step, progress.num_tokens = step + 1, progress.num_tokens + tokens
        stats |= {"epoch": (step * run.per_step + len(rows)) / run.examples, "num_tokens": progress.num_tokens}
        stats |= clock.metrics(tokens)
        flops = (6 if run.adapter is None else 4) * parameters * tokens  # frozen weights have no gradient
        stats |= flops_utilisation(ranks.device, flops / ranks.world, stats["step_time"])
        if every(run.config.evaluation.every, step + 1) and run.tested:
            results = evaluate(run)
            stats |= {f"held_out/{name}": results[name] for name in run.WATCHED}
        log.log(step, stats)
        saver.poll(ranks)
        stopping = ranks.any(stop.received) or step + 1 == run.steps
        if stopping or every(cfg.checkpoint_every, step + 1):
            run.save(wait=stopping)
        if stopping:
            return step + 1 == run.steps
    return True


@phase("evaluation")
def evaluate(run: Trainer) -> dict[str, Any]:
    return run.evaluate()


def evaluate_before(run: Trainer) -> dict[str, Any]:
    """Evaluate the model before training, or load that evaluation from the run's folder if it is saved there."""
    path = run.folder / run.RESULTS
    saved = None
    if run.ranks.first and path.is_file():
        saved = json.loads(path.read_text("utf-8")).get("before")
    before = run.ranks.gather_objects(saved)[0]
    if before is None:
        before = evaluate(run)
        run.write_results(before=before)
    return before


def launch(cfg: TrainerConfig, build: Callable[[Any, Ranks], Trainer], *, dry_run: bool = False) -> None:
    """Train on the ranks that the launcher started, resuming from the newest checkpoint if there is one."""
    disable_progress_bar()
    with StopSignal(cfg.train.grace_period) as stop, process_group.start(cfg.train.limits()) as ranks:
        if note := cpu_threads.use(cfg.run, ranks, restart=cfg.train.restart):
            Console(quiet=not ranks.first).print(note, highlight=False)
        fit(cfg, build, ranks, stop, dry_run=dry_run)  # frees the model before the process group ends


def fit(
    cfg: TrainerConfig, build: Callable[[Any, Ranks], Trainer], ranks: Ranks, stop: StopSignal, *, dry_run: bool = False
) -> bool:
    """Like `launch`, on existing ranks. Returns False if a signal stopped it early, after a checkpoint."""
    console = Console(quiet=not ranks.first)
    seed_everything(cfg.train.seed)
    run = build(cfg, ranks)
    console.print(run.plan())
    if dry_run:
        return True
    run_folder.claim(
        run.folder,
        cfg,
        ranks,
        free=FREE,
        restart=cfg.train.restart,
        removed=("checkpoints", "model", "adapter", run_inputs.FILE, *WRITTEN, cpu_threads.FILE, run.RESULTS),
        steps=run.steps,
        inputs=run.inputs,
        allowed=cfg.train.allow_changed,
    )
    before = evaluate_before(run)
    if run.restore():
        console.print(f"resuming from step {run.progress.step}")
    with run.logger() as log:
        finished = train(run, stop, log)
    if not finished:
        console.print(f"stopped and saved at step {run.progress.step}; run the same command again to resume")
        return False
    exported, after = run.export(), evaluate(run)
    run.write_results(before=before, after=after)
    if after:
        console.print(run.results_table(before, after))
    console.print(f"model   {exported}", highlight=False, soft_wrap=True)
    return True


def command(arguments: Sequence[str], name: str, modes: Mapping[str, Callable[[Sequence[str], bool], None]]) -> int:
    """Run ``nlgrpo NAME MODE [file.toml] [--section.key value ...] [--dry-run]``.

    ``modes``: function of each mode; it takes the remaining arguments and ``dry_run``. Returns 0 when done or
    stopped by a signal; 1, with a message, for bad input.
    """
    first = next(iter(modes))
    if list(arguments) in (["-h"], ["--help"]):
        arguments = [first, "--help"]
    if not arguments or arguments[0] not in modes:
        got = f", got {arguments[0]!r}" if arguments else ""
        mode = first if len(modes) == 1 else f"({'|'.join(modes)})"
        raise UserError(f"expected: nlgrpo {name} {mode} [file.toml] [--section.key value ...]{got}")
    rest = [argument for argument in arguments[1:] if argument != "--dry-run"]
    modes[arguments[0]](rest, "--dry-run" in arguments)
    return 0
