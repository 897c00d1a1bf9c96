"""The weights of a policy as another engine takes them: full, in its compute dtype, under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nlgrpo.model import decoder, fsdp, hf_weights, lora
from nlgrpo.model.architectures import tensor_map
from nlgrpo.model.decoder import Decoder


def stored(model: Decoder, compute: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in ``compute``, with adapters merged, on every rank; collective: all must take all pairs."""
    kept = None if lora.adapted(model) else compute
    places = tensor_map(model.shape)
    for name, parameter in lora.merged(model, fsdp.each_replicated(model, kept), compute):
        for theirs, shape, view in hf_weights.as_stored(parameter, places[name], model.shape):
            yield theirs, view.reshape(tuple(shape))


def shapes(model: Decoder, compute: torch.dtype) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of each pair of `stored`, without gathering anything."""
    assert model.config is not None
    places = tensor_map(model.shape)
    return [
        (theirs, compute, tuple(shape))
        for name, parameter in decoder.blueprint(model.config).named_parameters()
        for theirs, shape, _ in hf_weights.as_stored(parameter, places[name], model.shape)
    ]
