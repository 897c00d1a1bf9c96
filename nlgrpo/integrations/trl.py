"""Non-linear GRPO in TRL's ``GRPOTrainer``: reward functions that return linearised rewards.

    GRPOTrainer(model, reward_funcs=linearized(accuracy, "bon:4", samples=8),
                args=GRPOConfig(num_generations=8, scale_rewards="none", loss_type="dr_grpo", ...), ...)

The returned rewards have mean 0 in each group. TRL's advantage, the reward minus the mean of its group, is therefore
the first variation of the objective. Effects of TRL's other settings:

- ``scale_rewards`` must be "none". "group", TRL's default, and "batch" divide by the standard deviation of the
  linearised rewards. ``multi_objective_aggregation`` must be "sum_then_normalize", the default, which adds the
  functions with ``reward_weights``; "normalize_then_sum" divides by both, for any ``scale_rewards``. Other values log a
  warning once.
- ``loss_type``: "dr_grpo" and "luspo" divide by a constant, and the gradient is that of the objective. "dapo", TRL's
  default, "cispo" and "vespo" divide by the number of tokens in the batch: the direction is the same, but the size of a
  step depends on the lengths of the completions. "bnpo" does so per micro-batch, which weights micro-batches unequally.
  "grpo" and "sapo" divide each completion by its own length, which changes the direction.
- ``num_iterations=1`` with a ``steps_per_generation`` that divides ``gradient_accumulation_steps``, the defaults, is
  on-policy: all importance ratios are 1, and clipping has no effect. Otherwise the later steps use the linearised
  rewards at the policy that sampled the completions, which are correct to first order, and ``epsilon``,
  ``epsilon_high``, ``delta`` and ``off_policy_mask_threshold`` drop or limit tokens whose probability has changed too
  much. vLLM's probabilities differ slightly from the policy's; ``vllm_importance_sampling_correction`` corrects this
  within its bounds.
- ``mask_truncated_completions`` and ``top_entropy_quantile`` < 1 exclude completions or tokens from the gradient, which
  biases it. ``beta`` and ``entropy_coef`` add separate terms to the loss.

Written for TRL 1.16, which is not imported. Shapes: P prompts, M samples per prompt, m rewards.
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
from nlgrpo.rewards.history import History

log = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]  # f(prompts, completions, completion_ids, **columns) -> list[float | None]
LogMetric = Callable[[str, float], None]


def linearized(
    reward: RewardFunction, objective: Objective | str, samples: int, name: str | None = None
) -> RewardFunction:
    """Wrap a reward function for TRL: it returns the first variation of ``objective`` instead of the rewards.

        r_j -> dR/dpi(y_j) - (its mean over the group),      R: the objective for the group's M rewards

    ``reward`` has TRL's signature; if it is async, so is the result. ``objective`` is one of nlgrpo.objectives, or its
    name. ``samples`` is TRL's ``num_generations``; an evaluation uses TRL's ``num_generations_eval`` instead. A group
    that is split between ranks is gathered. See the module docstring for the settings of TRL that keep the gradient.

    A pairwise objective ("rao", "dpp:3") needs a *kernel function* as ``reward``. It has the same signature, and gets
    the keyword ``samples`` (M) if it accepts it. For each completion it returns M similarities: with all completions of
    the group in order, including itself. Groups must not be split between ranks: TRL's generation batch per rank
    (``per_device_train_batch_size * steps_per_generation``) must be a multiple of M.

    - ``None`` and NaN abstain, NaN with a warning of its share: the other completions form a smaller group, and the
      result for absent ones is ``None``. A kernel function abstains with ``None`` for a completion, or with NaN as its
      similarity to itself. A group with too few completions left for the objective gets 0. So does a group with exactly
      n left for "bon:n:unbiased", because TRL subtracts the mean, which is not the baseline of that estimator for n
      samples.
    - Several rewards: TRL adds them with ``reward_weights`` w_i, which gives the gradient of sum_i w_i R_i. Each reward
      has its own objective and needs a different name. For other aggregates, use `aggregated`.
    - Metrics: ``rewards/<name>/mean`` is the mean of the original rewards, and ``objective/<name>`` is R. For a kernel
      function both are means of R: over completions, and over groups. TRL's own columns contain the linearised rewards:
      ``rewards/<name>_linearized/mean`` and ``reward`` are 0.

    ``name`` defaults to the name of ``reward``. Raises ValueError for an invalid argument. The returned function raises
    it for incomplete groups, if ``num_generations`` differs from ``samples``, if a reward function does not return one
    finite number or None per completion, and for similarities that are not finite and symmetric.
    """
    _check_samples(samples)
    part = _part(reward, objective, samples, name)
    return _reward_function(_Linearizer((part,), samples, None, f"{part.name}_linearized"))


def aggregated(
    rewards: Sequence[RewardFunction] | Mapping[str, RewardFunction],
    objectives: Sequence[Objective | str] | Mapping[str, Objective | str] | Objective | str,
    samples: int,
    aggregate: Aggregate | str = "sum",
    weights: Sequence[float] | None = None,
    name: str = "aggregate",
) -> RewardFunction:
    """Combine several reward functions into one for TRL: it returns the first variation of g(R_1, .., R_m).

        r_j -> sum_i dg/dR_i (dR_i/dpi(y_j) - its mean over the group)      (IAMA, Alg. 2)

    dg/dR_i is evaluated at the means of R_1, .., R_m over the groups of all ranks that have a value (one all-reduce).
    ``rewards`` are reward functions or kernel functions as in `linearized`, sync or async. ``objectives``: one per
    reward, or one for all. If a function is async, so is the result; sync functions run one after another while async
    ones wait for their results. They then run in the thread of TRL's event loop, where what needs the main thread, such
    as ``signal.alarm``, fails; a warning says so. ``aggregate`` is one of nlgrpo.aggregation, or its name: "sum",
    "min", "smooth_min:4", with ``weights`` (default: 1 each).

    - A reward that abstains on a completion adds nothing to it; the result is ``None`` if all rewards abstain. A reward
      that abstains on the whole batch has no value, and "min" and "smooth_min" ignore it.
    - Metrics: ``rewards/<reward>/mean`` and ``objective/<reward>`` for each reward, and g as ``objective/<name>``. A
      mapping names the rewards; otherwise they have the names of their functions.

    Raises ValueError as `linearized`, for an empty list of rewards, for equal names, for a wrong number of objectives
    or weights, and for ``weights`` together with an `Aggregate`, which has its own.
    """
    _check_samples(samples)
    functions = _by_name(rewards, name)
    chosen = _for_each(objectives, list(functions))
    parts = [_part(f, o, samples, key) for (key, f), o in zip(functions.items(), chosen, strict=True)]
    return _reward_function(_Linearizer(tuple(parts), samples, _aggregate(aggregate, weights, len(parts)), name))


# ---- arguments ----


@dataclass(frozen=True)
class _Part:
    """One reward and its objective. Groups are rewards (P, M) or similarities (P, M, M), NaN where it abstained."""

    function: RewardFunction
    objective: Objective
    name: str
    history: History

    @property
    def needed(self) -> int:
        """Smallest group size for which the group's mean, which TRL always subtracts, is the right baseline.

        The mean is not the baseline of an unbiased estimator that uses all samples of the group at once.
        """
        fewest = self.objective.fewest
        return fewest + 1 if fewest > 1 and not self.objective.pairwise else fewest

    def call(self, samples: int, arguments: dict[str, Any]) -> Callable[[], Any]:
        """Bind the function to its arguments."""
        extra = {"samples": samples} if self.objective.pairwise and _takes_samples(self.function) else {}
        return functools.partial(self.function, **(arguments | extra))

    def groups(self, output: Any, count: int, samples: int) -> Tensor:
        """Convert the function's ``output`` for this rank's ``count`` completions to complete groups."""
        if self.objective.pairwise:
            return read_similarities(output, count, samples, self.name)
        rewards = read_rewards(output, count, self.history)
        return (rewards if count % samples == 0 else ranks.gather(rewards)).view(-1, samples)

    def absent(self, groups: Tensor) -> Tensor:
        """Whether the reward abstained, (P, M) bool."""
        return (groups.diagonal(dim1=-2, dim2=-1) if self.objective.pairwise else groups).isnan()

    def values(self, groups: Tensor) -> Tensor:
        """Return R of each group, (P,); NaN for a group with too few samples."""
        return value_present(self.objective, self._without_small(self.objective.fewest, groups))

    def linear(self, groups: Tensor) -> Tensor:
        """Return the first variation (P, M) with mean 0 per group; 0 for absent samples and in groups with too few."""
        return linearize_present(self.objective, self._without_small(self.needed, groups))

    def log(self, log_metric: LogMetric, groups: Tensor, values: Tensor) -> None:
        """Log the rewards (for a kernel function: R of the group, per completion) and the values of the groups.

        One call per number: TRL logs the mean over all calls of all ranks, and ranks can have unequal numbers.
        """
        present = groups
        if self.objective.pairwise:
            present = torch.where(self.absent(groups), torch.nan, values[:, None])
        for column, numbers in ((f"rewards/{self.name}/mean", present), (f"objective/{self.name}", values)):
            for number in numbers[~numbers.isnan()].tolist():
                log_metric(column, number)

    def _without_small(self, least: int, groups: Tensor) -> Tensor:
        """Replace groups that have fewer than ``least`` samples with NaN."""
        small = (~self.absent(groups)).sum(-1) < least
        return groups.masked_fill(small.view(-1, *[1] * (groups.ndim - 1)), torch.nan)


def _part(reward: RewardFunction, objective: Objective | str, samples: int, name: str | None) -> _Part:
    if isinstance(reward, str | torch.nn.Module) or not callable(reward):
        raise ValueError(
            f"expected a reward function f(prompts, completions, **columns), got {type(reward).__name__}; "
            "for a reward model, write a function that calls it."
        )
    if not isinstance(objective, str | Objective):
        raise ValueError(f'objective={objective!r}: expected one of nlgrpo.objectives, or its name, such as "bon:4".')
    objective = parse(objective) if isinstance(objective, str) else objective
    if objective.voted:
        raise ValueError(f"objective={str(objective)!r} needs the final answers, which reward functions do not return.")
    name = name or _name(reward)
    part = _Part(reward, objective, name, History(name))
    if samples < part.needed:
        reason = ""
        if samples == objective.fewest:
            reason = (
                ", because TRL subtracts the mean of a group, which is not the baseline of an estimator that uses all"
            )
        raise ValueError(
            f"objective {objective} with samples={samples}: expected at least {part.needed} samples{reason}."
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
    """Return the functions by name. Raises ValueError if a name is repeated or equal to that of the aggregate."""
    if isinstance(rewards, Mapping):
        named = list(rewards.items())
    elif isinstance(rewards, Sequence) and not isinstance(rewards, str):
        named = [(_name(function), function) for function in rewards]
    else:
        raise ValueError(
            f"expected several reward functions, [f, g] or {{name: f}}, got {reprlib.repr(rewards)}; "
            "for a single function, use linearized."
        )
    names = [name for name, _ in named]
    repeated = [name for name in names if [aggregate, *names].count(name) > 1]
    if not names or repeated:
        raise ValueError(
            f"rewards {names} of aggregate {aggregate!r}: expected at least one reward, and different names; "
            "to name the rewards, pass a mapping {name: function}."
        )
    return dict(named)


def _for_each(given: object, names: Sequence[str]) -> list[Any]:
    """Return one objective per reward."""
    if isinstance(given, str | Objective):
        return [given] * len(names)
    if isinstance(given, Mapping) and given.keys() == set(names):
        return [given[name] for name in names]
    if isinstance(given, Sequence) and len(given) == len(names):
        return list(given)
    raise ValueError(f"objectives={given!r}: expected one for each of the rewards {list(names)}, or one for all.")


def _aggregate(aggregate: Aggregate | str, weights: Sequence[float] | None, count: int) -> Aggregate:
    if isinstance(aggregate, str):
        aggregate = aggregation.parse_aggregate(aggregate, [1.0] * count if weights is None else weights)
    elif not isinstance(aggregate, Aggregate) or weights is not None:
        raise ValueError(
            f"aggregate={aggregate!r} with weights={weights!r}: expected the name of an aggregate, or one of "
            "nlgrpo.aggregation without weights, because it contains its own."
        )
    aggregate.gradient(torch.zeros(count))  # raises ValueError for a wrong number of weights
    return aggregate


# ---- calls ----


@dataclass(frozen=True)
class _Linearizer:
    """State of a wrapped function: calls the reward functions and linearises their rewards."""

    parts: tuple[_Part, ...]
    samples: int
    aggregate: Aggregate | None  # None if there is only one part
    name: str

    def calls(self, prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, Any]) -> list[Any]:
        """Bind the functions to their arguments. Raises ValueError for incomplete groups."""
        size = _group_size(self.samples, columns.get("log_metric"))
        count = len(prompts)
        ranks.own_part(count, size)
        kernels = [part.name for part in self.parts if part.objective.pairwise]
        if kernels and count % size:
            raise ValueError(
                f"kernel function {kernels[0]!r} needs all {size} samples of a prompt on one rank, but this rank "
                f"has {count} completions; expected per_device_train_batch_size * steps_per_generation (in an "
                f"evaluation: per_device_eval_batch_size) to be a multiple of {size}."
            )
        arguments = {"prompts": prompts, "completions": completions, **columns}
        return [part.call(size, arguments) for part in self.parts]

    def finish(self, outputs: Sequence[Any], count: int, log_metric: LogMetric | None) -> list[float | None]:
        """Return the linearised rewards of this rank's completions. Collective."""
        size = _group_size(self.samples, log_metric)
        groups = [part.groups(output, count, size) for part, output in zip(self.parts, outputs, strict=True)]
        values = torch.stack([part.values(g) for part, g in zip(self.parts, groups, strict=True)])  # (m, P)
        linear = torch.stack([part.linear(g) for part, g in zip(self.parts, groups, strict=True)])  # (m, P, M)
        absent = torch.stack([part.absent(g) for part, g in zip(self.parts, groups, strict=True)]).all(0)
        if log_metric is not None:
            for part, g, value in zip(self.parts, groups, values, strict=True):
                part.log(log_metric, g, value)
        local = ranks.own_part(count, size)
        combined = self._combined(linear, values, log_metric).flatten()[local].tolist()
        return [None if missing else x for x, missing in zip(combined, absent.flatten()[local].tolist(), strict=True)]

    def _combined(self, linear: Tensor, values: Tensor, log_metric: LogMetric | None) -> Tensor:
        """Combine the linearised rewards (m, P, M) into (P, M), and log the aggregate of the values (m, P)."""
        if self.aggregate is None:
            return linear[0]
        means = ranks.means(values)
        value = float(self.aggregate.value(means))
        if log_metric is not None and not math.isnan(value):
            log_metric(f"objective/{self.name}", value)
        return combine(linear, self.aggregate.gradient(means))


def _reward_function(linearizer: _Linearizer) -> RewardFunction:
    def wrapped(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        outputs = [call() for call in linearizer.calls(prompts, completions, columns)]
        return linearizer.finish(outputs, len(prompts), columns.get("log_metric"))

    async def wrapped_async(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        outputs = asyncio.ensure_future(_results(linearizer.calls(prompts, completions, columns)))
        # Async functions run concurrently, but `finish` has collectives: it must run in the order of TRL's calls, which
        # is the same on all ranks. In the order of completion, ranks would mix up the rewards.
        async with _turns():
            return linearizer.finish(await outputs, len(prompts), columns.get("log_metric"))

    sync = [part.name for part in linearizer.parts if not is_async(part.function)]
    if 0 < len(sync) < len(linearizer.parts):
        log.warning(
            "%s combines sync functions (%s) with async ones, so TRL runs them in the thread of its event loop, where "
            "signal.alarm and all else that needs the main thread fails; if they need it, make all functions sync.",
            linearizer.name,
            ", ".join(sync),
        )
    chosen = wrapped if len(sync) == len(linearizer.parts) else wrapped_async
    chosen.__name__ = chosen.__qualname__ = linearizer.name  # TRL names its column after it
    return chosen


async def _results(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all calls and return their results. Sync calls run one after another while async calls wait."""
    tasks = {i: asyncio.ensure_future(call()) for i, call in enumerate(calls) if is_async(call)}
    try:
        await asyncio.sleep(0)  # lets them start and send their requests
        with ranks.on_own_accelerator():
            results = {i: call() for i, call in enumerate(calls) if i not in tasks}
        for i, task in tasks.items():
            results[i] = await task
    finally:
        for task in tasks.values():
            task.cancel()  # no effect unless another call failed
    return [results[i] for i in range(len(calls))]


_LOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def _turns() -> asyncio.Lock:
    """Return the lock of the running event loop. asyncio grants it in the order of requests."""
    return _LOCKS.setdefault(asyncio.get_running_loop(), asyncio.Lock())


# ---- TRL's trainer ----


_WARNED: WeakSet[Any] = WeakSet()


def _group_size(samples: int, log_metric: object) -> int:
    """Return the group size M of this call: ``samples``, or TRL's ``num_generations_eval`` in an evaluation.

    TRL does not pass the trainer to reward functions, but ``log_metric`` is one of its methods.
    """
    trainer = getattr(log_metric, "__self__", None)
    trained = getattr(trainer, "num_generations", samples)
    if trained != samples:
        raise ValueError(f"samples={samples}, but the trainer's num_generations is {trained}; they must be equal.")
    _warn_of_scaling(trainer)
    evaluating = trainer is not None and hasattr(trainer, "model") and not trainer.model.training
    return getattr(trainer, "num_generations_eval", samples) if evaluating else samples


def _warn_of_scaling(trainer: Any) -> None:
    """Warn once per trainer, on rank 0, if TRL divides the rewards by their standard deviation."""
    scale = getattr(trainer, "scale_rewards", "none")
    aggregation_mode = getattr(trainer, "multi_objective_aggregation", "sum_then_normalize")
    wanted = scale == "none" and aggregation_mode == "sum_then_normalize"
    if wanted or trainer in _WARNED or not ranks.is_first():
        return
    _WARNED.add(trainer)
    log.warning(
        "TRL divides the linearised rewards by their standard deviation (scale_rewards=%r, "
        "multi_objective_aggregation=%r), which changes the gradient of the objective; to keep it, set "
        'scale_rewards="none" and multi_objective_aggregation="sum_then_normalize".',
        scale,
        aggregation_mode,
    )
