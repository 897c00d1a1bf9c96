"""Non-linear GRPO in TRL's ``GRPOTrainer``: a reward function that returns linearised rewards.

    GRPOTrainer(model, reward_funcs=linearized(accuracy, "bon:4", samples=8),
                args=GRPOConfig(num_generations=8, scale_rewards="none", ...), ...)

TRL's advantage is then the reward minus its group's mean, which takes away the constant that `linearized` leaves open,
and the step is that of nlgrpo. Written for TRL 1.16, which is not imported. Legend: P prompts, M samples a prompt.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import reprlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from nlgrpo.objectives import Objective, linearize_present, parse, value_present
from nlgrpo.reward_calls import is_async

RewardFunction = Callable[..., Any]  # f(prompts, completions, completion_ids, **columns) -> list[float | None]


def linearized(
    reward: RewardFunction, objective: Objective | str, samples: int, name: str | None = None
) -> RewardFunction:
    """A reward function for TRL that returns the first variation of ``objective`` instead of the rewards.

        r_j -> dR/dpi(y_j) - (its mean over the group),      R the objective at the group's M rewards

    ``reward`` has TRL's signature and may be async, as the result then is. ``samples`` is TRL's ``num_generations``; in
    an evaluation TRL's ``num_generations_eval`` is taken. A group that lies on several ranks is gathered.

    - ``None`` and NaN abstain: the others of the group count as a smaller group, and the absent ones stay ``None``.
    - ``scale_rewards`` must be "none" for this gradient. "group", TRL's default, and "batch" divide it by the standard
      deviation of the linearised rewards; ``multi_objective_aggregation="normalize_then_sum"`` does too.
    - Several rewards: TRL adds them with ``reward_weights`` w_i. That is the gradient of sum_i w_i R_i, as that of a
      weighted sum is its weights (`nlgrpo.aggregation.WeightedSum`). Each has an objective and needs a name of its own.
    - Logged: ``rewards/<name>/mean`` are the rewards that ``reward`` gave, and ``objective/<name>`` is R. TRL's own
      columns are about what it gets: ``rewards/<name>_linearized/mean`` and ``reward`` are 0, as groups are centred.

    ``name`` is that of ``reward`` unless given. Raises ValueError here for an argument that does not fit, and in use
    for completions that are no whole groups, another ``num_generations``, and rewards that are not one finite number or
    None a completion.
    """
    if isinstance(reward, str | torch.nn.Module) or not callable(reward):
        raise ValueError(
            f"expected a reward function f(prompts, completions, **columns), got {type(reward).__name__}; "
            "for a reward model, write the function that calls it."
        )
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
        raise ValueError(f"samples={samples!r}: expected TRL's num_generations, an integer >= 2.")
    if not isinstance(objective, str | Objective):
        raise ValueError(f'objective={objective!r}: expected one of nlgrpo.objectives, or its name, such as "bon:4".')
    objective = parse(objective) if isinstance(objective, str) else objective
    if objective.fewest > 1 and objective.fewest >= samples:
        raise ValueError(
            f"objective {objective} with samples={samples}: expected more samples, because TRL subtracts the mean of a "
            "group, which is no baseline for this estimator where it draws all of them."
        )
    name = name or _name(reward)

    def finish(values: Any, prompts: Sequence[Any], log_metric: Callable[[str, float], None] | None) -> Any:
        rewards = _as_tensor(values, len(prompts), name)
        groups, own = _groups(rewards, _group_size(samples, log_metric))
        if log_metric is not None:
            _log(log_metric, name, groups, value_present(objective, groups))
        linear = linearize_present(objective, groups).flatten()[own]
        return [None if r.isnan() else x.item() for r, x in zip(rewards, linear, strict=True)]

    def wrapped(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        values = reward(prompts=prompts, completions=completions, **columns)
        return finish(values, prompts, columns.get("log_metric"))

    async def wrapped_async(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        values = asyncio.ensure_future(reward(prompts=prompts, completions=completions, **columns))
        # Functions run together, but finish in the order in which TRL has called them, which is that of every rank:
        # gathers in the order of arrival would mix up the rewards.
        async with _turns():
            return finish(await values, prompts, columns.get("log_metric"))

    chosen = wrapped_async if is_async(reward) else wrapped
    chosen.__name__ = chosen.__qualname__ = f"{name}_linearized"  # TRL names its columns by it
    return chosen


def _name(function: RewardFunction) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


_LOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def _turns() -> asyncio.Lock:
    """The lock of the running loop. It is given in the order in which it was asked for."""
    return _LOCKS.setdefault(asyncio.get_running_loop(), asyncio.Lock())


def _as_tensor(values: Any, count: int, name: str) -> Tensor:
    """What a reward function returned, (count,) in float64, NaN where it abstained."""
    try:
        rewards = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward {name!r} returned {reprlib.repr(values)}; expected a list of one number or None a completion."
        ) from error
    if len(rewards) != count:
        raise ValueError(f"reward {name!r} returned {len(rewards)} values for {count} completions; expected one each.")
    infinite = [i for i, value in enumerate(rewards) if math.isinf(value)]
    if infinite:
        raise ValueError(
            f"reward {name!r} is {rewards[infinite[0]]} for completion {infinite[0]}: its advantage would be infinite; "
            "return a finite number, or None to abstain."
        )
    return torch.tensor(rewards, dtype=torch.float64)


def _group_size(samples: int, log_metric: object) -> int:
    """M of this call: ``samples``, or in an evaluation TRL's ``num_generations_eval``.

    Of all that TRL gives to a reward function, only ``log_metric`` leads to both, being a method of its trainer.
    """
    trainer = getattr(log_metric, "__self__", None)
    trained = getattr(trainer, "num_generations", samples)
    if trained != samples:
        raise ValueError(f"samples={samples}, but the trainer's num_generations is {trained}; they must be equal.")
    evaluating = trainer is not None and hasattr(trainer, "model") and not trainer.model.training
    return getattr(trainer, "num_generations_eval", samples) if evaluating else samples


def _groups(rewards: Tensor, samples: int) -> tuple[Tensor, slice]:
    """Whole groups (P, M) with all of ``rewards`` (n,) in them, and where in P*M these are.

    TRL fills the ranks one after another with as many completions each, whether or not a group ends with a rank.
    """
    count = len(rewards)
    if count % samples == 0:
        return rewards.view(-1, samples), slice(0, count)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if count * world % samples:
        raise ValueError(
            f"{count} completions on each of {world} rank{'s' * (world > 1)} are no whole groups of {samples}; "
            "expected samples to be the number of completions that the trainer draws for a prompt."
        )
    start = dist.get_rank() * count
    return _gather(rewards, world).view(-1, samples), slice(start, start + count)


def _gather(rewards: Tensor, world: int) -> Tensor:
    """(n,) of every rank -> (world * n,) on the CPU, in the order of the ranks."""
    mine = rewards.to(_communicates_on())
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    return torch.cat(parts).cpu()


def _communicates_on() -> torch.device:
    """The CPU where the ranks can meet there, else this rank's accelerator.

    TRL awaits async functions in a thread of its own, in which the current accelerator is the first one on every rank;
    its launchers tell which one is meant.
    """
    accelerator = torch.accelerator.current_accelerator()
    if "cpu:" in dist.get_backend_config() or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index())))


def _log(log_metric: Callable[[str, float], None], name: str, groups: Tensor, values: Tensor) -> None:
    """Mean reward, and mean value of the objective over the groups in which there is one.

    One call a number: TRL takes the mean over all calls of all ranks, and ranks may have different numbers.
    """
    for column, numbers in ((f"rewards/{name}/mean", groups), (f"objective/{name}", values)):
        for number in numbers[~numbers.isnan()].tolist():
            log_metric(column, number)
