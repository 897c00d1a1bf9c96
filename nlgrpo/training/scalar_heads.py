"""Training of decoders with a scalar head on examples: reward models on pairs, value models on rollouts.

for rows in epochs:                  reshuffled every epoch
    loss       = mean over the pairs, or over the prefixes of completions, of all ranks
    parameters <- AdamW or Muon
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.config import command_line
from nlgrpo.config.schema import ScalarHeadConfig
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
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.device import compute_dtype, master_dtype
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.progress import QUIET
from nlgrpo.runtime.supervision.phases import phase
from nlgrpo.runtime.timing import Clock, every
from nlgrpo.training.learner import make_optimizer
from nlgrpo.training.schedules import learning_rate
from nlgrpo.training.tracking.terminal import output
from nlgrpo.training.trainer import Trainer

if TYPE_CHECKING:
    from nlgrpo.training.tracking.logger import MetricsLogger


class Totals(Protocol):
    """Accumulates the metrics of a step over its micro-batches."""

    def metrics(self) -> dict[str, float]: ...


@dataclass(kw_only=True)
class ScalarHeadTrainer(Trainer):
    """Trains a model with one output. Subclasses define the examples, their loss and the evaluation."""

    tokenizer: PreTrainedTokenizerBase
    model: Decoder
    optimizer: torch.optim.Optimizer
    compute: torch.dtype
    pad: int | None
    loaded_head: bool
    """Whether the head was loaded, and not initialized."""
    max_length: int
    base_digest: str = ""  # of the weights that training started from, on the first rank once `inputs` has read them

    RESULTS: ClassVar[str]  # name of the file with the results of `evaluate`
    SHOWN: ClassVar[Sequence[tuple[str, str]]]  # metrics on the progress line, with formats
    WATCHED: ClassVar[Sequence[str]]  # results of `evaluate` that are logged during training

    def __post_init__(self) -> None:
        self.trained = self.model

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
    def evaluate(self, console: Console = QUIET) -> dict[str, Any]:
        """Evaluate on the held-out examples; {} without them. Collective, the same on all ranks.

        ``console`` shows the progress.
        """

    @abstractmethod
    def results_table(self, before: dict[str, Any], after: dict[str, Any]) -> Table: ...

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self, log: MetricsLogger) -> None:
        step = self.progress.step
        rows = self.rows(step)
        clock = Clock(self.ranks.device, step)
        clock.phase("update")
        stats = self.update(rows)
        clock.stop()
        tokens = int(stats.pop("tokens"))
        self.progress.advance(tokens)
        stats["epoch"] = (step * self.per_step + len(rows)) / self.examples
        stats |= self.speed(clock, tokens)
        if every(self.config.evaluation.every, step + 1) and self.tested:
            results = self._evaluate(QUIET)  # the progress of the training is shown
            stats |= {f"held_out/{name}": results[name] for name in self.WATCHED}
        log.log(step, stats)

    def rows(self, step: int) -> list[int]:
        """Indices of the examples of a step."""
        first = step * self.per_step
        return visits(self.examples, first, min(self.per_step, self.visits - first), self.config.train.seed)

    def update(self, rows: Sequence[int]) -> dict[str, float]:
        """Take one optimizer step on the examples ``rows`` of all ranks; returns metrics.

        The loss is a mean over all examples of the step, and FSDP's mean over ranks is undone, so it depends neither
        on the number of ranks nor on the micro-batches.
        """
        optim = self.config.optim
        totals = self.totals()
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

    def pad_micro_batches(self, batches: list[Any], empty: Callable[[torch.device], Any]) -> list[Any]:
        """Append ``empty`` micro-batches until all ranks have the same number; collective, like each forward pass."""
        most = int(self.ranks.max(torch.tensor(len(batches), device=self.ranks.device)))
        return batches + [empty(self.ranks.device) for _ in range(most - len(batches))]

    # --- before and after the steps -----------------------------------------------------------------------------------

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

    @phase("evaluation")
    def _evaluate(self, console: Console) -> dict[str, Any]:
        return self.evaluate(console)

    def evaluate_before(self) -> dict[str, Any]:
        path = self.folder / self.RESULTS
        saved = None
        if self.ranks.first and path.is_file():
            saved = json.loads(path.read_text("utf-8")).get("before")
        before = self.ranks.gather_objects(saved)[0]
        if before is None:
            before = self._evaluate(output(quiet=not self.ranks.first))
            self.write_results(before=before)
        return before

    def finish(self, before: dict[str, Any], log: MetricsLogger) -> None:
        exported = self.export()
        after = self._evaluate(output(quiet=not self.ranks.first))
        self.write_results(before=before, after=after)
        if self.ranks.first:
            if after:
                log.console.print(self.results_table(before, after))
            log.console.print(f"model   {exported}", highlight=False, soft_wrap=True)

    def write_results(self, **results: dict[str, Any]) -> None:
        if self.ranks.first:
            atomic_files.atomic_write(self.folder / self.RESULTS, json.dumps(results, indent=1, allow_nan=False) + "\n")

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

    # --- what the run is ----------------------------------------------------------------------------------------------

    @property
    def visits(self) -> int:
        """Number of examples over all epochs."""
        return max(1, round(self.config.train.epochs * self.examples))

    @property
    def steps(self) -> int:
        return math.ceil(self.visits / self.per_step)

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def shown(self) -> Sequence[tuple[str, str]]:
        return self.SHOWN

    @property
    def results(self) -> tuple[str, ...]:
        return (self.RESULTS,)


def max_length(model: str, requested: int | None) -> int:
    """Largest number of tokens per text: ``requested``, or else the context. Raises UserError if it is exceeded."""
    context = shape_of(decoder.read_config(reward_model.locate(model)[0])).context
    if requested is not None and requested > context:
        raise UserError(f"data.max_length = {requested}: {model} has a context of {context} tokens")
    return requested or context


def trainer_fields(
    cfg: ScalarHeadConfig, ranks: Ranks, tokenizer: PreTrainedTokenizerBase, longest: int
) -> dict[str, Any]:
    """Load and shard the model; returns the fields of a trainer without examples. Raises as `load_reward_model`."""
    refuse(cfg.parallel.faults(ranks.world))
    compute = compute_dtype(cfg.model.dtype, ranks.device)
    seed = cfg.train.seed
    adapter = adapters.resolve(cfg.lora, shape_of(decoder.read_config(reward_model.locate(cfg.model.path)[0])))
    model, loaded_head = reward_model.load_reward_model(
        cfg.model.path,
        seed=seed,
        dtype=master_dtype(compute),
        device=ranks.device,
        shard=partial(fsdp.prepare, adapter=adapter, ranks=ranks, compute=compute, parallel=cfg.parallel),
    )
    if adapter is not None:
        adapters.init_adapters(model, adapter, seed)
    model.configure(cfg.model.activation_checkpointing, cfg.model.compile)
    return {
        "config": cfg,
        "ranks": ranks,
        "tokenizer": tokenizer,
        "model": model,
        "optimizer": make_optimizer(model, cfg.optim),
        "compute": compute,
        "pad": reward_model.padding_id(model.config, tokenizer, loaded_head),
        "loaded_head": loaded_head,
        "max_length": longest,
        "adapter": adapter,
    }


def command(arguments: Sequence[str], name: str, modes: Mapping[str, Callable[[Sequence[str], bool], None]]) -> int:
    """Run ``nlgrpo NAME MODE [file.toml] [--section.key value ...] [--dry-run]``.

    ``modes``: function of each mode; it takes the remaining arguments and ``dry_run``. Returns 0 when done or stopped
    by a signal. Raises UserError for an unknown mode.
    """
    mode = command_line.mode_of(arguments, name, list(modes))
    given = arguments[1:] if arguments[0] == mode else arguments  # --help alone
    rest = [argument for argument in given if argument != "--dry-run"]
    modes[mode](rest, "--dry-run" in arguments)
    return 0
