"""The rollouts of the training steps, drawn when they are needed or some steps before (``rollout.ahead``)."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine.backends.base import EngineError, PolicyEngine
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.errors import UserCodeError, UserError
from nlgrpo.rewards.reward_functions import Scores
from nlgrpo.runtime.seeding import random_state, set_random_state
from nlgrpo.runtime.supervision.phases import phase
from nlgrpo.runtime.supervision.threads import in_thread
from nlgrpo.training.build import Setup
from nlgrpo.training.learner import Learner
from nlgrpo.training.trainer import Progress

if TYPE_CHECKING:
    from nlgrpo.training.reference_rewards import CalibratedReward

SUSPICIOUS = 0.1  # mean difference of log-probs per token, in nats


@dataclass(frozen=True)
class Drawn:
    """Completions of this rank's share of a step's prompts."""

    batch: Batch
    rollout: Rollout
    scores: Callable[[], Scores]
    """Scores of the rewards. If the rollout was drawn ahead, those that any thread can call are computed in the
    background, and those that need the main thread (see `calling.needs_main_thread`) by this call."""


@dataclass
class Rollouts:
    """Draws the rollout of each step, and those of ``ahead`` later steps while this one trains.

    The order is fixed: before step t trains, the rollout of step t is complete, then the engine takes the weights after
    step t - 1, then the rollouts up to step t + ahead are requested. They are sampled in the background, and scored
    there by the rewards that any thread can call. A rollout is at most ``ahead`` steps older than the policy that it
    trains; this is checked.
    Rollouts are not saved: a run that resumes draws again.

    With ``ahead`` = 0 all happens in the calling thread.
    """

    setup: Setup
    sampler: Sampler
    """With the seed of this part of the run."""
    learner: Learner
    engine: PolicyEngine
    progress: Progress
    save: Callable[[], None]
    """Saves a checkpoint of the state before the current step."""
    waiting: deque[Future[Drawn]] = field(default_factory=deque)
    scored: Future[Scores] | None = None  # of the last rollout that was requested ahead
    warned: bool = False

    @property
    def ahead(self) -> int:
        return self.setup.config.rollout.ahead

    def draw(self) -> Drawn:
        """Return the rollout of the current step; collective.

        If its engine fails on any rank, all ranks save the state before this step and raise UserError.
        """
        try:
            return self.next()
        except UserError as error:  # on all ranks
            if self.setup.ranks.any(isinstance(error, EngineError)):
                self.save()
            raise

    def score(self, drawn: Drawn, ref: Tensor | None) -> tuple[Scores, dict[str, CalibratedReward]]:
        """Score this rank's completions, and calibrate the rewards that have a transform on samples of the reference.

        ``ref``: log-probs of the reference. If a reward fails on any rank, all ranks save the state before this step
        and raise RewardError.
        """
        generators = random_state()
        try:
            scores = self.scores(drawn)
            if self.setup.references is None:
                return scores, {}
            with self.learner.as_reference() as reference:
                calibrated = self.setup.references.calibrate(scores.values, drawn.batch, drawn.rollout, ref, reference)
                return scores, calibrated
        except UserCodeError:
            set_random_state(generators)
            self.save()
            raise

    def next(self) -> Drawn:
        """Return the rollout of the current step; collective.

        Raises UserError on all ranks if it cannot be drawn, or is older than ``ahead`` steps: EngineError on those
        whose engine failed.
        """
        ranks = self.setup.ranks
        step = self.progress.step
        if not self.waiting:  # at the start, and for ahead = 0
            self.engine.take(self.learner.model, step)
            self.waiting.append(self._request(step))
        drawn = ranks.agree(lambda: self._drawn(self.waiting.popleft()))
        last = min(step + self.ahead, self.setup.config.train.steps - 1)
        if step + len(self.waiting) < last:
            if self.engine.version != step:
                self.engine.take(self.learner.model, step)
            self.waiting.extend(self._request(later) for later in range(step + len(self.waiting) + 1, last + 1))
        self.engine.sleep()
        return drawn

    def settle(self) -> None:
        """Wait until what was requested ahead is sampled and scored, so that the engine and the rewards are free."""
        with phase("generate"):
            wait(self.waiting)
        with phase("rewards"):
            wait([] if self.scored is None else [self.scored])

    def _drawn(self, waiting: Future[Drawn]) -> Drawn:
        drawn = waiting.result()
        step = self.progress.step
        version = drawn.rollout.version
        if version is None or not 0 <= step - version <= self.ahead:
            raise EngineError(
                f"the rollout of step {step} was sampled by the policy of step {version}; rollout.ahead = {self.ahead} "
                "allows no other than the last ones"
            )
        return drawn

    def batch(self, later: int = 0) -> Batch:
        """This rank's share of the prompts of the step that is ``later`` steps after the current one."""
        prompts = self.setup.config.rollout.prompts
        share = prompts // self.setup.ranks.world
        first = self.progress.cursor + later * prompts + self.setup.ranks.rank * share
        return self.setup.prompts.take(first, share)

    def _score(self, batch: Batch, rollout: Rollout, step: int, sampler: Sampler) -> Scores:
        """Score this rank's completions of the prompts of ``step`` with the rewards of ``sampler``."""
        return sampler.score(
            batch,
            rollout,
            step=step,
            total_steps=self.setup.config.train.steps,
            first_prompt=self.setup.ranks.rank * len(batch.ids),  # among those of the step
        )

    def _request(self, step: int) -> Future[Drawn]:
        """Request the rollout of ``step``, in the background if anything is drawn ahead."""
        batch = self.batch(step - self.progress.step)
        if self.ahead:
            return self._in_background(batch, step)
        future: Future[Drawn] = Future()
        try:
            rollout = self.sampler.draw(self.engine, batch)
            future.set_result(Drawn(batch, rollout, lambda: self._score(batch, rollout, step, self.sampler)))
        except UserError as error:
            future.set_exception(error)
        return future

    def _in_background(self, batch: Batch, step: int) -> Future[Drawn]:
        """Draw and score in threads. Rollouts are scored one after another, in the order of their steps."""
        drawing = in_thread(lambda: self.sampler.draw(self.engine, batch))
        before = self.scored
        early, late = self.sampler.by_thread()

        def score() -> Scores:
            rollout = drawing.result()
            if before is not None:
                wait([before])
            return self._score(batch, rollout, step, early)

        self.scored = scored = in_thread(score)

        def scores() -> Scores:
            found = scored.result()
            if not late.rewards:
                return found
            names = [reward.name for reward in self.sampler.rewards]
            return found.joined(self._score(batch, drawing.result(), step, late), names)

        return in_thread(lambda: Drawn(batch, drawing.result(), scores))

    def metrics(self, drawn: Drawn, step: int, stats: Mapping[str, float]) -> dict[str, float]:
        """Version of the weights that sampled the rollout of ``step``, and how many steps old they were; collective.

        Warns once if the log-probs of the same weights differ from the policy's in ``stats``, those of the update.
        """
        if self.setup.config.rollout.engine == "nlgrpo" or drawn.rollout.version is None:
            return {}
        gap = stats["sampling/logp_difference/mean"]
        same = drawn.rollout.version == step and not self.sampler.sampling.filtered
        if same and gap > SUSPICIOUS and not self.warned and self.setup.ranks.first:
            print(
                f"vLLM: its log-probs differ from those of the policy by {gap:.2g} nats per token on average, with the "
                "same weights; check that both have the same dtype and model, and use loss.correction",
                file=sys.stderr,
            )
            self.warned = True
        oldest = -float(
            self.setup.ranks.max(torch.tensor(-float(drawn.rollout.version), device=self.setup.ranks.device))
        )
        return {"sampling/version": oldest, "sampling/staleness": step - oldest}

    def scores(self, drawn: Drawn) -> Scores:
        """Return the scores of a rollout; collective. Raises RewardError on all ranks if a reward failed on one."""
        return self.setup.ranks.agree(drawn.scores)
