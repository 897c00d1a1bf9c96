"""Sampling and scoring of a batch of completions, for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.data.conversations import Prompt, is_continued, transcript
from nlgrpo.data.encoding import as_answer, decode
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine.backends.base import Engine
from nlgrpo.engine.generation import Conversation, Rollout, RolloutRequest
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserCodeError
from nlgrpo.objectives.diversity import Diversity
from nlgrpo.objectives.registry import Functional, Objective, per_completion
from nlgrpo.rewards import reward_functions
from nlgrpo.rewards.calling import needs_main_thread
from nlgrpo.rewards.reward_functions import Scores
from nlgrpo.runtime import host_memory
from nlgrpo.runtime.supervision import phases

if TYPE_CHECKING:
    from nlgrpo.engine.environments import Environment

ENVIRONMENT = "environment"  # column of the outcomes of conversations, for rewards


@dataclass(frozen=True)
class Sampler:
    """Samples M completions per prompt from a model and scores them."""

    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    samples: int
    max_rows: int | None
    seed: int
    rewards: Sequence[reward_functions.Reward]
    environment: Environment | None = None
    on_progress: Callable[[int], None] | None = None  # see `RolloutRequest`; an environment does not call it

    @phases.phase("generate")
    def draw(self, engine: Engine, batch: Batch) -> Rollout:
        """Sample completions of the prompts in ``batch``, or conversations of the environment.

        Collective if the engine's model is sharded, or with an environment.
        """
        if self.environment is not None:
            return self.environment.draw(
                engine, batch, self.samples, self.sampling, seed=self.seed, max_rows=self.max_rows
            )
        request = RolloutRequest(
            batch.ids, self.samples, self.sampling, seed=self.seed, index=batch.index, max_rows=self.max_rows,
            on_progress=self.on_progress,
        )  # fmt: skip
        rollout = engine.generate(request)
        host_memory.release()  # the KV cache and gathered parameters
        return rollout

    def texts(self, prompts: Sequence[Prompt], rollout: Rollout) -> list[str]:
        """Decode the P*M completions without special tokens: as continuations of texts, or as assistant messages.

        Conversations of an environment have the roles of their other messages.
        """
        if rollout.conversations is not None:
            return [transcript(conversation.messages) for conversation in rollout.conversations]
        before = [ids if is_continued(p) else [] for p, ids in zip(prompts, rollout.prompt_ids, strict=True)]
        repeated = [ids for ids in before for _ in range(rollout.tokens.shape[1])]
        return decode(self.tokenizer, repeated, rollout.completion_ids())

    @phases.phase("rewards")
    def score(
        self,
        batch: Batch,
        rollout: Rollout,
        *,
        step: int = 0,
        total_steps: int = 0,
        first_prompt: int = 0,
    ) -> Scores:
        """Score ``rollout`` with all rewards. Raises the errors of `nlgrpo.rewards.reward_functions.score`."""
        repeated = [prompt for prompt in batch.prompts for _ in range(self.samples)]
        columns = {k: [v for v in values for _ in range(self.samples)] for k, values in batch.columns.items()}
        if rollout.conversations is None:
            texts = self.texts(batch.prompts, rollout)
            completions = [as_answer(p, text) for p, text in zip(repeated, texts, strict=True)]
        else:
            completions = [conversation.messages for conversation in rollout.conversations]
            columns[ENVIRONMENT] = [conversation.outcome for conversation in rollout.conversations]
        scores = reward_functions.score(
            self.rewards,
            prompts=repeated,
            completions=completions,
            completion_ids=rollout.completion_ids(),
            columns=columns,
            samples=self.samples,
            step=step,
            total_steps=total_steps,
            first_prompt=first_prompt,
        )
        conversations = rollout.conversations if self.environment is not None else None
        return replace(scores, metrics={**scores.metrics, **_metrics(conversations or [])})

    def by_thread(self) -> tuple[Sampler, Sampler]:
        """Return a sampler with the rewards that can be called in any thread, and one with those of the main thread."""
        late = [reward for reward in self.rewards if needs_main_thread(reward.function)]
        early = [reward for reward in self.rewards if not needs_main_thread(reward.function)]
        return replace(self, rewards=early), replace(self, rewards=late, environment=None)


@contextmanager
def errors_of_user_objective(name: str, objective: Objective) -> Iterator[None]:
    """Context that computes with an objective of the reward ``name``.

    A functional, and the kernel of a diversity, are code of the user: what is wrong with them becomes a UserCodeError
    that names the reward.
    """
    try:
        yield
    except ValueError as error:
        if not isinstance(objective, Functional | Diversity):
            raise
        raise UserCodeError(f"rewards.{name}.objective: {error}") from error.__cause__


def values_of_completions(rewards: Mapping[str, Tensor], objectives: Mapping[str, Objective]) -> dict[str, Tensor]:
    """Return `per_completion` of each reward, {name: (P, M)}. Raises UserError for a kernel that is none."""
    values = {}
    for name, of_reward in rewards.items():
        with errors_of_user_objective(name, objectives[name]):
            values[name] = per_completion(objectives[name], of_reward)
    return values


def _metrics(conversations: Sequence[Conversation]) -> dict[str, list[float]]:
    """Metrics of an environment: one value per conversation without an error, and whether each ended with one."""
    outcomes = [conversation.outcome for conversation in conversations]
    found = {"environment/errors": [float(outcome["error"] is not None) for outcome in outcomes]} if outcomes else {}
    for outcome in outcomes:
        if outcome["error"] is None:
            for name, value in outcome["metrics"].items():
                found.setdefault(f"environment/{name}", []).append(value)
    return found
