"""Value models: a decoder with one output that predicts the expected final reward of a completion from its prefixes.

The states of a completion of H tokens are its H + 1 prefixes, from the prompt alone to the full text. A batch has R
completions and S states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nlgrpo.model.decoder import Decoder
from nlgrpo.model.packing import MicroBatch
from nlgrpo.model.reward_model import score
from nlgrpo.sections import Kind

PROBLEM_TYPES: dict[Kind, str] = {"mse": "regression", "bce": "multi_label_classification"}  # transformers' names


def outputs(model: Decoder, batch: MicroBatch) -> Tensor:
    """Head outputs (S,) at the tokens that the batch selects, at least in float32."""
    return model(batch.tokens, batch.segments, batch.select, score)[:, 0]


def kind_of(model: Decoder) -> Kind:
    """Return the loss that the model was fitted with, from its config; "mse" if the config does not name one."""
    return "bce" if getattr(model.config, "problem_type", None) == "multi_label_classification" else "mse"


def set_kind(model: Decoder, kind: Kind) -> None:
    """Record the model's loss in its config, under transformers' name."""
    assert model.config is not None  # it was loaded from a directory
    model.config.problem_type = "multi_label_classification" if kind == "bce" else "regression"


def share_weights(models: Sequence[Decoder]) -> None:
    """Store parameters that equal those of the first model once, for value models that differ in their heads alone."""
    for model in models[1:]:
        first = dict(models[0].named_parameters())
        for name, parameter in model.named_parameters():
            like = first.get(name)
            if like is not None and like.shape == parameter.shape and torch.equal(like, parameter):
                parameter.data = like.data


def as_values(raw: Tensor, kind: Kind) -> Tensor:
    """Convert head outputs to values: unchanged for "mse", the probability sigmoid(raw) for "bce"."""
    return raw.sigmoid() if kind == "bce" else raw
