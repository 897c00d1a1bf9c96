"""Sharded models (FSDP2): sharding, gathering parameters, and checks over all shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nlgrpo.model.decoder import Decoder
from nlgrpo.runtime.distributed import Ranks


def shard(model: Decoder, ranks: Ranks, compute: torch.dtype) -> Decoder:
    """Shard parameters, gradients and optimiser state over the ranks, block by block, in place.

    The sharded parameters keep their dtype: they are the master weights of a model that computes in ``compute``.
    Frozen weights may have the dtype ``compute`` beside adapters in float32.
    Reductions run in float32 (float64 for float64 parameters). A single rank that computes in the dtype of its
    parameters is left unsharded.
    """
    stored = model.embed.weight.dtype
    if ranks.world == 1 and compute == stored:
        return model
    reduce = torch.float64 if stored == torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Context in which every rank holds the full parameters in their compute dtype, as generation needs them."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def full_parameters(
    model: nn.Module, dtype: torch.dtype, *, only: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Full parameters whose names satisfy ``only``, by name, on the CPU. Collective."""
    full = {}
    for name, parameter in model.named_parameters():
        if not only(name):
            continue
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        full[name] = value.to("cpu", dtype)
    return full


def check_finite(model: nn.Module, ranks: Ranks, why: str) -> None:
    """Raise ValueError on all ranks if a parameter is NaN or infinite, before it is saved. Collective.

    ``why`` is the end of the message.
    """
    shards = ((name, p.to_local() if isinstance(p, DTensor) else p) for name, p in model.named_parameters())
    bad = next((name for name, part in shards if not part.detach().isfinite().all()), None)
    if names := [name for name in ranks.gather_objects(bad) if name is not None]:
        raise ValueError(f"{names[0]} has NaN or infinite values{why}")


TOO_LARGE = "; nothing was saved. The rewards, the weight decay or the learning rate may be too large"


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Clip the gradient to the norm ``max_norm`` (0: no clipping) and return its norm before, over all shards.

    Raises ValueError if the norm is not finite.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else float("inf"))
    total = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not math.isfinite(total):
        raise ValueError(
            f"the norm of the gradient is {total}: the rewards, the weights or the learning rate are too large for the "
            "compute dtype. The gradient was not applied; the last checkpoint is from before it"
        )
    return total
