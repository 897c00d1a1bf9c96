"""Samples of a model for the evaluation prompts, and ``evaluation.json``, which stores them.

A run saves the samples of the reference and of the trained model; `nlgrpo evaluate` those of all its models. Reports
and comparisons read the file. Shapes: P prompts, n samples per prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nlgrpo.data.conversations import plain_text
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine.backends.base import Engine
from nlgrpo.engine.rollouts.run_inputs import EVALUATION_FILE
from nlgrpo.engine.rollouts.sampler import Sampler, values_of_completions
from nlgrpo.errors import UserError
from nlgrpo.objectives.registry import Objective
from nlgrpo.runtime.atomic_files import atomic_write
from nlgrpo.runtime.distributed import Ranks

# whose texts are saved
KEPT_PROMPTS = 8
KEPT_SAMPLES = 16


@dataclass(frozen=True)
class Coverage:
    """Prompts and samples behind a number, of those that were evaluated."""

    prompts: int = 0
    of_prompts: int = 0
    samples: int = 0
    of_samples: int = 0
    rewards: dict[str, int] = field(default_factory=dict)
    """Prompts of each reward of a weighted sum, if one does not apply to all of them."""

    @classmethod
    def of(cls, per_prompt: Tensor, scored: Tensor, rewards: dict[str, int] | None = None) -> Coverage:
        """``per_prompt`` (P,): NaN for a prompt without a value. ``scored`` (P, n): samples with a reward."""
        there = ~per_prompt.isnan()
        return cls(
            prompts=int(there.sum()),
            of_prompts=len(there),
            samples=int(scored[there].sum()),
            of_samples=scored.numel(),
            rewards=rewards or {},
        )

    @staticmethod
    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Dict factory for `asdict`, which leaves out the coverage of a number over all prompts and samples."""
        return {name: value for name, value in pairs if name != "coverage" or Coverage(**value).lines}

    @property
    def lines(self) -> list[str]:
        """``["19 of 20 prompts", "303 of 320 samples"]``; empty if these are all."""
        if self.prompts == self.of_prompts and self.samples == self.of_samples and not self.rewards:
            return []
        prompts = f"{self.prompts} of {self.of_prompts} prompts"
        samples = f"{self.samples} of {self.of_samples} samples"
        return [prompts, samples, *self.rewards_lines]

    @property
    def rewards_lines(self) -> list[str]:
        """``["code: 2 prompts", "math: 3 prompts"]``; empty if all rewards apply to all prompts."""
        return [f"{name}: {count} prompts" for name, count in self.rewards.items()]


def left_out(shown: Iterable[Coverage]) -> str:
    """Line below a title if some numbers are not over all prompts and samples: ``"15 to 20 of 20 prompts"``.

    If only samples are missing, their number; for sums of different rewards over all of them, the prompts of each.
    """
    known = [coverage for coverage in shown if coverage.of_prompts]
    prompts = [(coverage.prompts, coverage.of_prompts) for coverage in known]
    samples = [(coverage.samples, coverage.of_samples) for coverage in known]
    for what, counts in (("prompts", prompts), ("samples", samples)):
        if any(count < every for count, every in counts):
            least = min(count for count, _ in counts)
            most = max(count for count, _ in counts)
            span = f"{least} to {most}" if least < most else f"{least}"
            return f"\n{span} of {max(every for _, every in counts)} {what}"
    for coverage in known:
        if coverage.rewards:
            return f"\n{', '.join(coverage.rewards_lines)}"
    return ""


@dataclass
class EvaluationSamples:
    """Rewards and lengths of one model's samples for the evaluation prompts.

    ``rewards[name]`` (P, n): rewards, NaN where the reward abstained; for a kernel, the contribution of each completion
    to the diversity of its group. ``lengths`` (P, n): in tokens. ``objectives`` and ``weights``: one entry per reward,
    such as ``"bon:4"`` and 0.5. ``prompts`` and ``completions``: texts of the first few prompts.

    If measured: ``kl[estimator]`` ("k1", "k3") (P, n): KL of each completion to the reference, in nats;
    ``distinct["2"]`` (P,): fraction of distinct token bigrams in a prompt's completions; ``answers[name]`` (P, n), for
    rewards that extract an answer: equal numbers for equal answers to a prompt, -1 for no answer.

    ``left_out``: numbers of prompts of the source that could not be evaluated, by reason, such as
    ``{"dropped as too long": 5}``.

    ``seeds``: the number of runs whose samples these are, one after the other (`pooled`). All have the same prompts, so
    P is then the number of prompts times seeds.

    Raises UserError if shapes or names do not agree, or for infinite rewards.
    """

    rewards: dict[str, Tensor]
    lengths: Tensor
    objectives: dict[str, str]
    weights: dict[str, float]
    max_length: int
    prompts: list[str] = field(default_factory=list)
    completions: list[list[str]] = field(default_factory=list)
    kl: dict[str, Tensor] = field(default_factory=dict)
    distinct: dict[str, Tensor] = field(default_factory=dict)
    answers: dict[str, Tensor] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    seeds: int = 1

    def __post_init__(self) -> None:
        names = set(self.rewards)
        if not names or set(self.objectives) != names or set(self.weights) != names:
            raise UserError(
                f"every reward needs an objective and a weight: rewards {sorted(self.rewards)}, "
                f"objectives {sorted(self.objectives)}, weights {sorted(self.weights)}"
            )
        for name, values in (self.rewards | self.kl | self.answers).items():
            if values.dim() != 2 or values.shape != self.lengths.shape:
                raise UserError(
                    f"reward {name!r} has shape {tuple(values.shape)} and lengths {tuple(self.lengths.shape)}: "
                    "expected (P, n)"
                )
        for name, values in self.rewards.items():
            if values.isinf().any():
                raise UserError(f"reward {name!r} has infinite values; a reward is finite or NaN")

    def applies(self) -> dict[str, Tensor]:
        """Whether each reward with a weight scores one of a prompt's samples, (P,)."""
        names = [name for name, weight in self.weights.items() if weight != 0] or list(self.rewards)
        return {name: ~self.rewards[name].isnan().all(1) for name in names}

    def scored(self) -> Tensor:
        """Samples (P, n) that all rewards score that have a weight and apply to the prompt."""
        applies = self.applies()
        anywhere = torch.stack(list(applies.values())).any(0)
        scored = anywhere[:, None].expand_as(self.lengths)
        for name, there in applies.items():
            scored = scored & (~self.rewards[name].isnan() | ~there[:, None])
        return scored

    def same_rewards(self, other: EvaluationSamples) -> Tensor:
        """Whether the same rewards apply to a prompt in both, (P,), so that their weighted sums can be compared."""
        ours = torch.stack(list(self.applies().values()))
        theirs = torch.stack(list(other.applies().values()))
        return (ours == theirs).all(0)

    def prompts_of_rewards(self) -> dict[str, int]:
        """Number of prompts to which each reward with a weight applies; empty if all apply to all of them."""
        applies = self.applies()
        if all(there.all() for there in applies.values()):
            return {}
        return {name: int(there.sum()) for name, there in applies.items()}

    def votes(self, name: str) -> Tensor:
        """Reward and answer of each sample, (P, n, 2), as a majority vote takes them."""
        return torch.stack([self.rewards[name].double(), self.answers[name].double()], -1)

    @property
    def sizes(self) -> dict[str, Any]:
        """Numbers of prompts and samples, and of the prompts that were left out, by reason."""
        prompts, samples = self.lengths.shape
        return {"prompts": prompts // self.seeds, "samples": samples, "left_out": self.left_out}

    @property
    def size(self) -> str:
        """`sizes` in words."""
        return size_of(**self.sizes)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain lists for ``json.dump``; NaN becomes None."""
        content = dict(vars(self))
        for part in MEASURED:
            content[part] = {name: _plain(values) for name, values in content[part].items()}
        content["lengths"] = self.lengths.tolist()
        del content["seeds"]  # pooled samples are not saved
        return content

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EvaluationSamples:
        """Inverse of `to_json`; lengths and answers are int64, all other numbers float64."""
        content = dict(data)
        for part in MEASURED:
            content[part] = {name: _tensor(values) for name, values in data.get(part, {}).items()}
        content["answers"] = {name: values.long() for name, values in content["answers"].items()}
        content["lengths"] = torch.tensor(data["lengths"], dtype=torch.int64)
        return cls(**content)


def pooled(of_seeds: Sequence[EvaluationSamples]) -> EvaluationSamples:
    """Return the samples of runs that differ in the seed, as one: the prompts of the first, then of the second, ..

    Raises UserError for runs with different prompts, numbers of samples or rewards.
    """
    first = of_seeds[0]
    if len(of_seeds) == 1:
        return first
    for one in of_seeds:
        if one.lengths.shape != first.lengths.shape or one.rewards.keys() != first.rewards.keys():
            raise UserError("the runs have different prompts, numbers of samples or rewards")

    def joined(part: str) -> dict[str, Tensor]:
        values = [getattr(one, part) for one in of_seeds]
        shared = [name for name in values[0] if all(name in of_seed for of_seed in values)]
        return {name: torch.cat([of_seed[name] for of_seed in values]) for name in shared}

    return replace(
        first,
        lengths=torch.cat([one.lengths for one in of_seeds]),
        rewards=joined("rewards"),
        kl=joined("kl"),
        distinct=joined("distinct"),
        answers=joined("answers"),
        seeds=len(of_seeds),
    )


def size_of(prompts: int, samples: int, left_out: Mapping[str, int]) -> str:
    """Describe an evaluation: "5 prompts x 16 samples; 5 dropped as too long"."""
    reasons = "".join(f"; {count:,} {reason}" for reason, count in left_out.items())
    return f"{prompts:,} prompts x {samples:,} samples{reasons}"


def sizes_of(sampled: Iterable[EvaluationSamples]) -> str:
    """Describe one or several evaluations: "4 prompts x 16 samples and 8 prompts x 16 samples"."""
    return " and ".join(sorted({one.size for one in sampled}))


def where_same_rewards(sampled: Iterable[EvaluationSamples]) -> Tensor:
    """Prompts (P,) to which the same rewards apply in all models. All of them, if models have different prompts."""
    first, *others = sampled
    if any(len(other.lengths) != len(first.lengths) for other in others):
        return torch.tensor(True)
    return torch.stack([first.same_rewards(other) for other in others]).all(0)


MEASURED = ("rewards", "kl", "distinct", "answers")


def _plain(values: Tensor) -> Any:
    """Nested lists, with None for NaN."""
    if values.dim() > 1:
        return [_plain(row) for row in values]
    return [None if math.isnan(x) else x for x in values.tolist()]


def _tensor(values: Any) -> Tensor:
    """Inverse of `_plain`, (P,) or (P, n)."""
    return torch.tensor(_with_nan(values), dtype=torch.float64)


def _with_nan(values: Any) -> Any:
    if isinstance(values, list):
        return [_with_nan(x) for x in values]
    return math.nan if values is None else values


def evaluate(
    sampler: Sampler,
    engine: Engine,
    batch: Batch,
    ranks: Ranks,
    objectives: Mapping[str, Objective],
    weights: Mapping[str, float],
) -> EvaluationSamples:
    """Sample and score ``batch`` with ``sampler``, split across the ranks. Collective, with the same result on all."""
    mine = batch.only(range(len(batch.ids))[ranks.share(len(batch.ids))])
    rollout = ranks.agree(lambda: sampler.draw(engine, mine))
    first = mine.index[0] if mine.index else 0
    scores = ranks.agree(lambda: sampler.score(mine, rollout, first_prompt=first))
    values = ranks.agree(lambda: values_of_completions(scores.values, objectives))
    texts = sampler.texts(mine.prompts, rollout)
    part = {
        "rewards": values,
        "lengths": rollout.lengths.cpu(),
        "answers": scores.answers,
        "prompts": [plain_text(prompt) for prompt in mine.prompts],
        "completions": [texts[i : i + sampler.samples] for i in range(0, len(texts), sampler.samples)],
    }
    parts = ranks.gather_objects(part)
    prompts = [prompt for part in parts for prompt in part["prompts"]]
    completions = [of_prompt for part in parts for of_prompt in part["completions"]]
    return EvaluationSamples(
        rewards={name: torch.cat([part["rewards"][name] for part in parts]) for name in values},
        lengths=torch.cat([part["lengths"] for part in parts]),
        answers={name: torch.cat([part["answers"][name] for part in parts]) for name in scores.answers},
        objectives={name: str(objective) for name, objective in objectives.items()},
        weights=dict(weights),
        max_length=sampler.sampling.max_new_tokens,
        prompts=prompts[:KEPT_PROMPTS],
        completions=[of_prompt[:KEPT_SAMPLES] for of_prompt in completions[:KEPT_PROMPTS]],
    )


def write_evaluation(run: Path, /, **sampled: EvaluationSamples) -> None:
    """Write ``evaluation.json``: ``write_evaluation(run, before=..., after=...)``; ``after`` exists after training."""
    write_samples(run / EVALUATION_FILE, sampled)


def write_samples(path: Path, sampled: Mapping[str, EvaluationSamples]) -> None:
    content = {name: one.to_json() for name, one in sampled.items()}
    atomic_write(path, json.dumps(content, allow_nan=False))


def read_evaluation(run: Path) -> dict[str, EvaluationSamples]:
    """Read ``evaluation.json`` of a run: ``{"before": ..., "after": ...}``. Raises UserError if missing or damaged."""
    return read_samples(run / EVALUATION_FILE)


def read_samples(path: Path) -> dict[str, EvaluationSamples]:
    """Like `read_evaluation`, from the file of any evaluation set."""
    if not path.is_file():
        raise UserError(
            f"{path} is missing: the run is training, or was stopped before its evaluation; resume it to finish"
        )
    try:
        content = json.loads(path.read_text("utf-8"))
        return {name: EvaluationSamples.from_json(data) for name, data in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path} cannot be read ({error}); resume the run to evaluate again") from error
