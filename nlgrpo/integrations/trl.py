"""Non-linear GRPO in TRL's ``GRPOTrainer``: reward functions that return linearised rewards.

    GRPOTrainer(model, reward_funcs=linearized(accuracy, "bon:4", samples=8),
                args=GRPOConfig(num_generations=8, scale_rewards="none", loss_type="dr_grpo", ...), ...)

The rewards that come out are centred in each group, so that TRL's advantage, the reward less the group's mean, is the
first variation of the objective. What TRL's other settings then make of it:

- ``scale_rewards`` must be "none". "group", TRL's default, and "batch" divide by the standard deviation of the
  linearised rewards, and ``multi_objective_aggregation="normalize_then_sum"`` does both, whatever ``scale_rewards`` is;
  "sum_then_normalize", the default, adds the functions with ``reward_weights``. A warning is logged once.
- ``loss_type``: "dr_grpo" and "luspo" divide by a constant, and the gradient is that of the objective. "dapo", TRL's
  default, "cispo" and "vespo" divide by the tokens of the batch: the direction is kept, and the size of a step depends
  on the lengths of the completions. "bnpo" does so in each micro-batch, which weighs micro-batches unequally. "grpo"
  and "sapo" divide each completion by its own length, which is another direction.
- ``num_iterations=1`` with a ``steps_per_generation`` that divides ``gradient_accumulation_steps``, the defaults, is
  on-policy: all ratios are 1, and what the losses do with them, clipping included, does nothing. Otherwise the later
  steps take the linearised rewards at the policy that has drawn the completions, right to first order, and
  ``epsilon``, ``epsilon_high``, ``delta`` and ``off_policy_mask_threshold`` drop what has moved far. Completions from
  vLLM differ a little from the policy's; ``vllm_importance_sampling_correction`` corrects that within its bounds.
- ``mask_truncated_completions`` and ``top_entropy_quantile`` < 1 leave completions or tokens out of the gradient, which
  biases it. ``beta`` and ``entropy_coef`` add terms of their own and leave this one as it is.

Written for TRL 1.16, which is not imported. Legend: P prompts, M samples per prompt, m rewards.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from nlgrpo.integrations import ranks
from nlgrpo.integrations.returned import read_rewards, read_similarities
from nlgrpo.objectives import aggregation
from nlgrpo.objectives.aggregation import Aggregate, combine
from nlgrpo.objectives.registry import Objective, linearize_present, parse, value_present
from nlgrpo.rewards.calling import is_async

log = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]  # f(prompts, completions, completion_ids, **columns) -> list[float | None]
LogMetric = Callable[[str, float], None]


def linearized(
    reward: RewardFunction, objective: Objective | str, samples: int, name: str | None = None
) -> RewardFunction:
    """A reward function for TRL that returns the first variation of ``objective`` instead of the rewards.

        r_j -> dR/dpi(y_j) - (its mean over the group),      R the objective at the group's M rewards

    ``reward`` has TRL's signature and may be async, as the result then is. ``objective`` is any of nlgrpo.objectives.
    ``samples`` is TRL's ``num_generations``; in an evaluation TRL's ``num_generations_eval`` is taken. A group that
    lies on several ranks is gathered. Which of TRL's settings keep the gradient: see the module.

    A pairwise objective ("rao", "dpp:3") takes a *kernel function* for ``reward``. It has the same signature, and the
    keyword ``samples`` (M) if it takes that. For each completion it returns the M similarities with the completions of
    its group in their order, itself included. It needs whole groups: per rank, TRL's batch of generation
    (``per_device_train_batch_size * steps_per_generation``) must be a multiple of M.

    - ``None`` and NaN abstain: the others of the group count as a smaller group, and the absent ones stay ``None``. A
      kernel function gives ``None`` for a completion, or NaN as its similarity with itself. A group that has too few
      left for the objective gets 0; so does one of n for "bon:n:unbiased", whose baseline for n of n is not TRL's.
    - Several rewards: TRL adds them with ``reward_weights`` w_i. That is the gradient of sum_i w_i R_i, as that of a
      weighted sum is its weights. Each has an objective and needs a name of its own. Other aggregates: `aggregated`.
    - Logged: ``rewards/<name>/mean`` are the rewards that ``reward`` gave, and ``objective/<name>`` is R; of a kernel
      function both are about R, over completions and over groups. TRL's own columns are about what it gets:
      ``rewards/<name>_linearized/mean`` and ``reward`` are 0, as groups are centred.

    ``name`` is that of ``reward`` unless given. Raises ValueError here for an argument that does not fit, and in use
    for completions that are no whole groups, another ``num_generations``, rewards that are not one finite number or
    None a completion, and similarities that are not finite and symmetric.
    """
    _check_samples(samples)
    part = _part(reward, objective, samples, name)
    return _reward_function(_Wrapped((part,), samples, None, f"{part.name}_linearized"))


def aggregated(
    rewards: Sequence[RewardFunction] | Mapping[str, RewardFunction],
    objectives: Sequence[Objective | str] | Mapping[str, Objective | str] | Objective | str,
    samples: int,
    aggregate: Aggregate | str = "sum",
    weights: Sequence[float] | None = None,
    name: str = "aggregate",
) -> RewardFunction:
    """One reward function for TRL out of several: the first variation of g(R_1, .., R_m).

        r_j -> sum_i dg/dR_i (dR_i/dpi(y_j) - its mean over the group)      (IAMA, Alg. 2)

    dg/dR_i is taken at the means of R_1, .., R_m over all groups of all ranks that have one (one all-reduce).
    ``rewards`` are functions, or kernel functions, as `linearized` takes them, each with its objective in
    ``objectives`` (one for all, if only one is given); sync, async or both, and the result is async if one of them is:
    the sync ones then compute in turn while the others wait for their answers. ``aggregate`` is one of
    nlgrpo.aggregation, or its name: "sum", "min", "smooth_min:4", with ``weights``, which are 1 unless given.

    - A completion from which a reward abstains gets nothing from that reward, and ``None`` if all abstain. A reward
      that is given nowhere in the batch has no value, and "min" and "smooth_min" leave it out.
    - Logged: ``rewards/<its name>/mean`` and ``objective/<its name>`` for each, and g as ``objective/<name>``. A
      mapping names the rewards; otherwise they have their functions' names.

    Raises ValueError as `linearized`, for no rewards, for two of one name, for another number of objectives or weights,
    and for weights beside an `Aggregate`, which has its own.
    """
    _check_samples(samples)
    functions = _by_name(rewards, name)
    chosen = _for_each(objectives, list(functions))
    parts = [_part(f, o, samples, key) for (key, f), o in zip(functions.items(), chosen, strict=True)]
    return _reward_function(_Wrapped(tuple(parts), samples, _aggregate(aggregate, weights, len(parts)), name))


# ---- arguments ----


@dataclass(frozen=True)
class _Part:
    """A reward and its objective. Groups are (P, M) rewards, or (P, M, M) similarities; NaN where it abstained."""

    function: RewardFunction
    objective: Objective
    name: str

    @property
    def needed(self) -> int:
        """Samples that a group must have, so that a baseline of mean 0 exists: TRL subtracts the mean of a group.

        An unbiased estimator that chooses from all samples of a group has another baseline.
        """
        fewest = self.objective.fewest
        return fewest + 1 if fewest > 1 and not self.objective.pairwise else fewest

    def call(self, samples: int, arguments: dict[str, Any]) -> Callable[[], Any]:
        own = {"samples": samples} if self.objective.pairwise and _takes_samples(self.function) else {}
        return functools.partial(self.function, **(arguments | own))

    def groups(self, output: Any, count: int, samples: int) -> Tensor:
        """The whole groups in which the ``count`` completions of this rank are, from what the function returned."""
        if self.objective.pairwise:
            return read_similarities(output, count, samples, self.name)
        rewards = read_rewards(output, count, self.name)
        return (rewards if count % samples == 0 else ranks.gather(rewards)).view(-1, samples)

    def absent(self, groups: Tensor) -> Tensor:
        """(P, M) bool."""
        return (groups.diagonal(dim1=-2, dim2=-1) if self.objective.pairwise else groups).isnan()

    def values(self, groups: Tensor) -> Tensor:
        """R of each group, (P,); NaN for a group of too few."""
        return value_present(self.objective, self._of_at_least(self.objective.fewest, groups))

    def linear(self, groups: Tensor) -> Tensor:
        """The first variation, (P, M), of mean 0 in each group; 0 for the absent and in groups of too few."""
        return linearize_present(self.objective, self._of_at_least(self.needed, groups))

    def log(self, log_metric: LogMetric, groups: Tensor, values: Tensor) -> None:
        """Mean reward, of a kernel each completion's share in R, and mean value over the groups in which there is one.

        One call a number: TRL takes the mean over all calls of all ranks, and ranks may have different numbers.
        """
        present = groups
        if self.objective.pairwise:
            present = torch.where(self.absent(groups), torch.nan, values[:, None])
        for column, numbers in ((f"rewards/{self.name}/mean", present), (f"objective/{self.name}", values)):
            for number in numbers[~numbers.isnan()].tolist():
                log_metric(column, number)

    def _of_at_least(self, least: int, groups: Tensor) -> Tensor:
        """The groups, all NaN where fewer than ``least`` samples are there."""
        few = (~self.absent(groups)).sum(-1) < least
        return groups.masked_fill(few.view(-1, *[1] * (groups.ndim - 1)), torch.nan)


def _part(reward: RewardFunction, objective: Objective | str, samples: int, name: str | None) -> _Part:
    if isinstance(reward, str | torch.nn.Module) or not callable(reward):
        raise ValueError(
            f"expected a reward function f(prompts, completions, **columns), got {type(reward).__name__}; "
            "for a reward model, write the function that calls it."
        )
    if not isinstance(objective, str | Objective):
        raise ValueError(f'objective={objective!r}: expected one of nlgrpo.objectives, or its name, such as "bon:4".')
    objective = parse(objective) if isinstance(objective, str) else objective
    part = _Part(reward, objective, name or _name(reward))
    if samples < part.needed:
        raise ValueError(
            f"objective {objective} with samples={samples}: expected more samples, {part.needed} at least, because TRL "
            "subtracts the mean of a group, which is no baseline for an estimator that draws all of them."
        )
    return part


def _check_samples(samples: object) -> None:
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
        raise ValueError(f"samples={samples!r}: expected TRL's num_generations, an integer >= 2.")


def _name(function: RewardFunction) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _takes_samples(function: RewardFunction) -> bool:
    parameters = inspect.signature(function).parameters
    return "samples" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _by_name(rewards: object, aggregate: str) -> dict[str, RewardFunction]:
    """The functions with their names, of which each is another, and another than the aggregate's."""
    if isinstance(rewards, Mapping):
        named = list(rewards.items())
    elif isinstance(rewards, Sequence) and not isinstance(rewards, str):
        named = [(_name(function), function) for function in rewards]
    else:
        raise ValueError(
            f"expected several reward functions, [f, g] or {{name: f}}, got {reprlib.repr(rewards)}; "
            "for a single one there is linearized."
        )
    names = [name for name, _ in named]
    twice = [name for name in names if [aggregate, *names].count(name) > 1]
    if not names or twice:
        raise ValueError(
            f"rewards {names} of aggregate {aggregate!r}: expected one at least, each with a name of its own; "
            "a mapping {name: function} gives them names."
        )
    return dict(named)


def _for_each(given: object, names: Sequence[str]) -> list[Any]:
    """The objective of each reward."""
    if isinstance(given, str | Objective):
        return [given] * len(names)
    if isinstance(given, Mapping) and given.keys() == set(names):
        return [given[name] for name in names]
    if isinstance(given, Sequence) and len(given) == len(names):
        return list(given)
    raise ValueError(f"objectives={given!r}: expected one for each of the rewards {list(names)}, or one for all.")


def _aggregate(aggregate: Aggregate | str, weights: Sequence[float] | None, count: int) -> Aggregate:
    if isinstance(aggregate, str):
        aggregate = aggregation.parse(aggregate, [1.0] * count if weights is None else weights)
    elif not isinstance(aggregate, Aggregate) or weights is not None:
        raise ValueError(
            f"aggregate={aggregate!r} with weights={weights!r}: expected the name of one, or one of "
            "nlgrpo.aggregation, which has its own weights."
        )
    aggregate.gradient(torch.zeros(count))  # refuses weights that are not one for each reward
    return aggregate


# ---- a call ----


@dataclass(frozen=True)
class _Wrapped:
    """What a function for TRL is made of."""

    parts: tuple[_Part, ...]
    samples: int
    aggregate: Aggregate | None  # None: the only part as it is
    name: str

    def calls(self, prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, Any]) -> list[Any]:
        """The functions with their arguments, where the completions can be put into groups."""
        size, count = _group_size(self.samples, columns.get("log_metric")), len(prompts)
        ranks.own_part(count, size)
        kernels = [part.name for part in self.parts if part.objective.pairwise]
        if kernels and count % size:
            raise ValueError(
                f"kernel function {kernels[0]!r} needs all {size} samples of a prompt on one rank, which has {count} "
                "completions; expected per_device_train_batch_size * steps_per_generation, in an evaluation "
                f"per_device_eval_batch_size, to be a multiple of {size}."
            )
        arguments = {"prompts": prompts, "completions": completions, **columns}
        return [part.call(size, arguments) for part in self.parts]

    def finish(self, outputs: Sequence[Any], count: int, log_metric: LogMetric | None) -> list[float | None]:
        """The linearised rewards of this rank's completions; collective."""
        size = _group_size(self.samples, log_metric)
        groups = [part.groups(output, count, size) for part, output in zip(self.parts, outputs, strict=True)]
        values = torch.stack([part.values(g) for part, g in zip(self.parts, groups, strict=True)])  # (m, P)
        linear = torch.stack([part.linear(g) for part, g in zip(self.parts, groups, strict=True)])  # (m, P, M)
        absent = torch.stack([part.absent(g) for part, g in zip(self.parts, groups, strict=True)]).all(0)
        if log_metric is not None:
            for part, g, value in zip(self.parts, groups, values, strict=True):
                part.log(log_metric, g, value)
        own = ranks.own_part(count, size)
        together = self._together(linear, values, log_metric).flatten()[own].tolist()
        return [None if out else x for x, out in zip(together, absent.flatten()[own].tolist(), strict=True)]

    def _together(self, linear: Tensor, values: Tensor, log_metric: LogMetric | None) -> Tensor:
        """(m, P, M) -> (P, M)."""
        if self.aggregate is None:
            return linear[0]
        means = ranks.means(values)
        worth = float(self.aggregate.value(means))
        if log_metric is not None and not math.isnan(worth):
            log_metric(f"objective/{self.name}", worth)
        return combine(linear, self.aggregate.gradient(means))


def _reward_function(parts: _Wrapped) -> RewardFunction:
    def wrapped(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        outputs = [call() for call in parts.calls(prompts, completions, columns)]
        return parts.finish(outputs, len(prompts), columns.get("log_metric"))

    async def wrapped_async(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        outputs = asyncio.ensure_future(_results(parts.calls(prompts, completions, columns)))
        # Functions run together, but finish in the order in which TRL has called them, which is that of every rank:
        # collectives in the order of arrival would mix up the rewards.
        async with _turns():
            return parts.finish(await outputs, len(prompts), columns.get("log_metric"))

    chosen = wrapped_async if any(is_async(part.function) for part in parts.parts) else wrapped
    chosen.__name__ = chosen.__qualname__ = parts.name  # TRL names its columns by it
    return chosen


async def _results(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returns. The async ones are under way while the sync ones compute, one after another."""
    tasks = {i: asyncio.ensure_future(call()) for i, call in enumerate(calls) if is_async(call)}
    try:
        await asyncio.sleep(0)  # they start, and send their requests
        with ranks.on_own_accelerator():
            results = {i: call() for i, call in enumerate(calls) if i not in tasks}
        for i, task in tasks.items():
            results[i] = await task
    finally:
        for task in tasks.values():
            task.cancel()  # those that another's error has left behind
    return [results[i] for i in range(len(calls))]


_LOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def _turns() -> asyncio.Lock:
    """The lock of the running loop. It is given in the order in which it was asked for."""
    return _LOCKS.setdefault(asyncio.get_running_loop(), asyncio.Lock())


# ---- TRL's trainer ----


_WARNED: WeakSet[Any] = WeakSet()


def _group_size(samples: int, log_metric: object) -> int:
    """M of this call: ``samples``, or in an evaluation TRL's ``num_generations_eval``.

    Of all that TRL gives to a reward function, only ``log_metric`` leads to both, being a method of its trainer.
    """
    trainer = getattr(log_metric, "__self__", None)
    trained = getattr(trainer, "num_generations", samples)
    if trained != samples:
        raise ValueError(f"samples={samples}, but the trainer's num_generations is {trained}; they must be equal.")
    _warn_of_scaling(trainer)
    evaluating = trainer is not None and hasattr(trainer, "model") and not trainer.model.training
    return getattr(trainer, "num_generations_eval", samples) if evaluating else samples


def _warn_of_scaling(trainer: Any) -> None:
    """Once a trainer, on the first rank."""
    scale = getattr(trainer, "scale_rewards", "none")
    several = getattr(trainer, "multi_objective_aggregation", "sum_then_normalize")
    wanted = scale == "none" and several == "sum_then_normalize"
    if wanted or trainer in _WARNED or not ranks.is_first():
        return
    _WARNED.add(trainer)
    log.warning(
        "TRL divides the linearised rewards by their standard deviation (scale_rewards=%r, "
        "multi_objective_aggregation=%r), which is not the gradient of the objective; for that one, set "
        'scale_rewards="none" and multi_objective_aggregation="sum_then_normalize".',
        scale,
        several,
    )
