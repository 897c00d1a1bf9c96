"""A training run, from its folder to its exported model. Policies, reward models and value models share it.

claim the folder                  it holds this run, or nothing yet
evaluate                          once: a run that resumes finds the result in its folder
restore                           the newest checkpoint
for each step: evaluate, step, save       `Trainer.train`
export, evaluate, report          `Trainer.finish`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn
from transformers.utils.logging import disable_progress_bar

from nlgrpo.model.fsdp import TOO_LARGE, check_finite
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime import host_memory
from nlgrpo.runtime.device import MicroBatchLimit, micro_batch_limit
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.seeding import deterministic_algorithms
from nlgrpo.runtime.supervision import process_group
from nlgrpo.runtime.supervision.phases import TimeLimits, phase
from nlgrpo.runtime.supervision.stop_signal import StopSignal
from nlgrpo.runtime.timing import Clock, every, flops_utilisation
from nlgrpo.training import run_folder
from nlgrpo.training.divergence import Diverged
from nlgrpo.training.tracking import run_files, terminal

if TYPE_CHECKING:
    from nlgrpo.engine.rollouts.run_inputs import RunInputs
    from nlgrpo.runtime.checkpoint import Saver
    from nlgrpo.training.tracking.logger import MetricsLogger


@dataclass
class Progress:
    """State of a run that a checkpoint holds besides tensors and random states."""

    step: int = 0
    num_tokens: int = 0  # prompt and completion tokens trained on so far
    cursor: int = 0  # prompts used so far
    beta: float = 0.0
    averages: list[float] = field(default_factory=list)  # moving averages of the objectives' values
    rollbacks: int = 0
    empty_steps: int = 0  # in a row, until now: no completion had a reward

    def advance(self, tokens: int, *, prompts: int = 0, empty: bool = False) -> None:
        """Count one finished step with its tokens and prompts."""
        self.step += 1
        self.num_tokens += tokens
        self.cursor += prompts
        self.empty_steps = self.empty_steps + 1 if empty else 0


@dataclass(kw_only=True)
class Trainer(ABC):
    """A training run. A subclass says what is trained, and what a step, an evaluation and an export are."""

    config: Any
    """The configuration, with the sections ``train`` (a LoopConfig) and ``model``, and the folder ``run``."""
    ranks: Ranks
    adapter: LoraConfig | None
    """Settings of the adapters that are trained instead of the weights."""
    progress: Progress = field(default_factory=Progress)
    trained: nn.Module = field(init=False)
    """The module whose parameters a checkpoint holds."""
    optimizer: torch.optim.Optimizer = field(init=False)

    # --- defined by subclasses ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of steps of the whole run."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of parameters of the model that is trained."""

    @property
    @abstractmethod
    def shown(self) -> Sequence[tuple[str, str]]:
        """Metrics on the progress line, with formats."""

    @abstractmethod
    def print_plan(self, console: Console) -> None:
        """Print the plan; ``--dry-run`` then stops. Raises UserError if it does not fit the machine."""

    @abstractmethod
    def inputs(self) -> RunInputs:
        """Return digests of what the run reads; called on the first rank only."""

    @abstractmethod
    def step(self, log: MetricsLogger) -> None:
        """Train for one step, and log it."""

    @abstractmethod
    def evaluate_before(self) -> Any:
        """Evaluate before training, or load that evaluation from the run's folder. Collective."""

    @abstractmethod
    def finish(self, before: Any, log: MetricsLogger) -> None:
        """Export and evaluate after the last step. ``before``: of `evaluate_before`. Collective."""

    @contextmanager
    def loaded(self, stop: StopSignal) -> Iterator[None]:
        """Context in which the weights are loaded (`trained`, `optimizer`), and the engine has started; collective."""
        yield

    def begin(self, before: Any, log: MetricsLogger) -> None:  # noqa: B027 - not every run has something to prepare
        """Prepare for the steps that follow, at the start, when the run resumes, and after a rollback."""

    def evaluate_during(self, log: MetricsLogger) -> bool | None:
        """Evaluate before a step if it is time to; collective. Returns whether the run then ends; None: it was not."""
        return None

    def roll_back(self, diverged: Diverged) -> None:
        """Restore the newest checkpoint from before a divergence; collective. Raises ``diverged`` if it must not."""
        raise diverged

    def free_keys(self) -> tuple[str, ...]:
        """Keys of the configuration that may differ when the run resumes."""
        return run_folder.free_keys(self.config)

    @property
    def results(self) -> tuple[str, ...]:
        """Files of this kind of run in its folder, besides those that every run has."""
        return ()

    # --- the life of a run --------------------------------------------------------------------------------------------

    def fit(self, stop: StopSignal, *, dry_run: bool = False) -> bool:
        """Train until the last step; collective. Returns False if a signal stopped the run, after a checkpoint."""
        console = terminal.output(quiet=not self.ranks.first)
        self.print_plan(console)
        if dry_run:
            return True
        self.claim()
        with self.loaded(stop):
            before = self.evaluate_before()
            if self.restore():
                console.print(f"resuming from step {self.progress.step}")
            elif logged := len(run_files.read_jsonl(self.folder / run_files.METRICS_FILE)):
                console.print(
                    f"no checkpoint in {self.folder}: restarting from step 0, discarding {logged} logged steps"
                )
            while (finished := self._attempt(before, stop)) is None:
                console.print(f"rolled back to step {self.progress.step}, rollback {self.progress.rollbacks}")
            if not finished:
                from nlgrpo.runtime.console import how_to_resume

                stopped = f"stopped and saved at step {self.progress.step}; {how_to_resume()}"
                console.print(stopped, highlight=False, soft_wrap=True)
        return finished

    def _attempt(self, before: Any, stop: StopSignal) -> bool | None:
        """Train from the current step to the end. Returns False if a signal stopped it, None after a rollback."""
        try:
            with self.logger() as log:
                self.begin(before, log)
                finished = self.train(stop, log)
                if finished:
                    self.finish(before, log)
                return finished
        except Diverged as diverged:
            self.roll_back(diverged)
            return None

    def train(self, stop: StopSignal, log: MetricsLogger) -> bool:
        """Take steps, from the current one to the last. Returns False if a signal stopped it, after a checkpoint."""
        from nlgrpo.runtime.profiling import StepProfiler, steps_of

        train = self.config.train
        with StepProfiler(steps_of(train.profile), self.folder, self.ranks.rank) as profiler:
            for step in range(self.progress.step, self.steps):
                ends = self.evaluate_during(log)  # after the checkpoint, so that a kill in it costs no step
                if ends is not None and (ends or self.ranks.any(stop.received)):
                    self.save()
                    return ends
                profiler.begin(step)
                self.step(log)
                host_memory.release()  # the activations
                self.saver.poll(self.ranks)
                last = step + 1 == self.steps
                stopping = self.ranks.any(stop.received) or last
                if stopping or every(train.checkpoint_every, step + 1):
                    if not stopping:  # a run that stops saves first: it may be killed soon
                        log.catch_up()
                    self.save(wait=stopping)
                if stopping:
                    return last
        return True

    # --- the folder ---------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        folder: Path = self.config.run
        return folder

    def claim(self) -> None:
        """Create the folder, or check that it holds this run; collective. Raises UserError as `run_folder.claim`."""
        train = self.config.train
        run_folder.claim(
            self.folder,
            self.config,
            self.ranks,
            free=self.free_keys(),
            restart=train.restart,
            removed=(*run_folder.written(), *self.results),
            steps=self.steps,
            inputs=self.inputs,
            allowed=train.allow_changed,
        )

    def logger(self) -> MetricsLogger:
        from nlgrpo.training.tracking.logger import MetricsLogger

        tracked = None
        if self.config.train.track:
            from nlgrpo.training.tracking.trackers import TrackedRun

            tracked = TrackedRun.of(self.config, self.folder)
        return MetricsLogger(
            self.folder,
            total_steps=self.steps,
            enabled=self.ranks.first,
            tracked=tracked,
            resume_step=self.progress.step,
            shown=self.shown,
        )

    @cached_property
    def saver(self) -> Saver:
        """Saves the checkpoints; created by all ranks together."""
        return run_folder.saver(self.folder, self.config.train, self.ranks, adapters=self.adapter is not None)

    @phase("checkpoint")
    def save(self, *, wait: bool = True) -> None:
        """Save a checkpoint; collective. Unless ``wait``, training may continue while it is written."""
        check_finite(self.trained, self.ranks, TOO_LARGE)
        state = vars(self.progress) | {"config": asdict(self.config)}
        run_files.sync(self.folder, self.ranks)
        self.saver.save(self.progress.step, self.trained, self.optimizer, state, wait=wait)

    def restore(self) -> bool:
        """Load the newest complete checkpoint; returns False if there is none."""
        from nlgrpo.runtime import checkpoint

        state = checkpoint.load(self.folder / "checkpoints", model=self.trained, optimizer=self.optimizer)
        if state is None:
            return False
        saved = {key.name: state[key.name] for key in fields(Progress) if key.name in state}
        self.progress = Progress(**saved)
        return True

    # --- numbers of a step --------------------------------------------------------------------------------------------

    @property
    def micro_batch_limit(self) -> MicroBatchLimit:
        return micro_batch_limit(self.config.train.micro_batch_tokens, self.ranks.device)

    def speed(self, clock: Clock, trained: int, generated: int = 0, *, passes: int = 1) -> dict[str, float]:
        """Metrics ``time/*``, ``perf/*`` and ``num_tokens`` of a step that trained ``passes`` times on its tokens."""
        times = clock.metrics(generated or trained)
        per_token = 6 if self.adapter is None else 4  # frozen weights have no gradient
        flops = self.parameters * (per_token * trained * passes + 2 * generated)
        utilisation = flops_utilisation(self.ranks.device, flops / self.ranks.world, times["step_time"])
        return times | utilisation | {"num_tokens": self.progress.num_tokens}


def launch(cfg: Any, build: Callable[[Any, Ranks], Trainer], *, limits: TimeLimits, dry_run: bool = False) -> None:
    """Train on the ranks that the launcher started, resuming from the newest checkpoint if there is one.

    ``build``: makes the trainer of the configuration ``cfg``. ``limits``: how long a rank may be in one place.
    """
    from nlgrpo.runtime import cpu_threads

    disable_progress_bar()  # transformers shows one for every model it loads
    with (
        deterministic_algorithms(cfg.train.deterministic),  # before CUDA starts
        StopSignal(cfg.train.grace_period) as stop,
        process_group.start(limits) as ranks,
    ):
        if note := cpu_threads.use(cfg.run, ranks, restart=cfg.train.restart):
            terminal.output(quiet=not ranks.first).print(note, highlight=False)
        build(cfg, ranks).fit(stop, dry_run=dry_run)  # frees the model before the process group ends
