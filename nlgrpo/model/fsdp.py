"""A model over ranks (FSDP2): sharding it, gathering its parameters, and checks on all shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nlgrpo.model.decoder import Decoder
from nlgrpo.runtime.distributed import Ranks


def shard(model: Decoder, ranks: Ranks, compute: torch.dtype) -> Decoder:
    """Shard parameters, gradients and optimiser state over the ranks, block by block; reductions run in float32.

    The sharded parameters keep their dtype: they are the master weights of a model that computes in ``compute``.
    One rank on a CPU that computes in its parameters' dtype needs none of it.
    """
    stored = model.head_weight.dtype
    if ranks.world == 1 and compute == stored:
        return model
    reduce = torch.float64 if stored == torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)  # in place
    return model


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within, every rank holds the whole parameters in the type they compute in, as generation needs them."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def full_parameters(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole parameters by name, on the CPU; collective."""
    full = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        full[name] = value.to("cpu", dtype)
    return full


def check_finite(model: nn.Module, ranks: Ranks, why: str) -> None:
    """ValueError on all ranks for a parameter with NaN or an infinity, so that none is ever written; collective.

    ``why`` ends the message.
    """
    owned = ((name, p.to_local() if isinstance(p, DTensor) else p) for name, p in model.named_parameters())
    bad = next((name for name, part in owned if not part.detach().isfinite().all()), None)
    if found := [name for name in ranks.gather_objects(bad) if name is not None]:
        raise ValueError(f"{found[0]} holds NaN or infinities{why}")


TOO_LARGE = ", and nothing was written; rewards, weight decay or the learning rate may be too large"


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradient to a norm of at most ``max_norm`` (0: leave it); the norm before, over all shards.

    Raises ValueError for one that is not finite, of which a step would leave no finite weight.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else float("inf"))
    found = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not math.isfinite(found):
        raise ValueError(
            f"the gradient has the norm {found}: rewards, weights or the learning rate are too large for the type that "
            "computes. It was not applied, and the last checkpoint is from before"
        )
    return found
