"""Values of prefixes by a decoder with one output: the expected final reward of a completion.

The states of a completion of H tokens are its H + 1 prefixes, from the prompt alone to the whole. R completions, S
states in a batch.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from nlgrpo.model.decoder import Decoder
from nlgrpo.model.packing import MicroBatch
from nlgrpo.model.reward_model import score

Kind = Literal["mse", "bce"]
PROBLEM_TYPES: dict[Kind, str] = {
    "mse": "regression",
    "bce": "multi_label_classification",
}  # as transformers calls them


def outputs(model: Decoder, batch: MicroBatch) -> Tensor:
    """(S,) of the head behind the tokens that the batch selects, in float32 at least."""
    return model(batch.tokens, batch.lengths, batch.select, score)[:, 0]


def kind_of(model: Decoder) -> Kind:
    """What the model was fitted by, as its config says; squared error where that says nothing."""
    return "bce" if getattr(model.config, "problem_type", None) == "multi_label_classification" else "mse"


def set_kind(model: Decoder, kind: Kind) -> None:
    """Write into the model's config what it is fitted by, as transformers calls it."""
    assert model.config is not None  # it was read from a directory
    model.config.problem_type = "multi_label_classification" if kind == "bce" else "regression"


def as_values(raw: Tensor, kind: Kind) -> Tensor:
    """What a head's outputs stand for: themselves, or after cross-entropy the probability sigmoid(raw)."""
    return raw.sigmoid() if kind == "bce" else raw
