"""The tensors of a model and its optimizer by name, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from nlgrpo.errors import UserError
from nlgrpo.runtime.checkpoint import storage

Tensors = dict[str, Tensor]


def _model_tensors(model: nn.Module, trained_only: bool) -> Tensors:
    values = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=trained_only))
    return _only_tensors({f"model/{name}": value for name, value in values.items()})


def _optimizer_tensors(states: dict[str, Any]) -> Tensors:
    """Flatten ``{parameter: {"exp_avg": ..}}`` to one name per tensor."""
    named = {f"optimizer/{name}/{key}": value for name, entry in states.items() for key, value in entry.items()}
    return _only_tensors(named)


def _only_tensors(named: dict[str, Any]) -> Tensors:
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):  # PyTorch would store it as a pickle
            raise UserError(f"{name} is a {type(value).__name__}; a checkpoint can only store tensors.")
    return named


def of_training(model: nn.Module, optimizer: torch.optim.Optimizer, trained_only: bool) -> Tensors:
    if not optimizer.state:  # get_optimizer_state_dict would create it with a step of size 0, which AdamW counts
        return _model_tensors(model, trained_only)
    states: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    return _model_tensors(model, trained_only) | _optimizer_tensors(states["state"])


def param_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the optimiser's settings by group, with the parameters' names without the prefixes of wrappers."""
    wrappers = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")
    names = {parameter: wrappers.sub("", name) for name, parameter in model.named_parameters()}
    if any(parameter not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError("The optimiser has a parameter that is not one of the model's; both are saved together.")
    return [
        {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def restore(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    *,
    trained_only: bool,
    alone: bool,
) -> None:
    """Load a checkpoint into ``model`` and ``optimizer``; collective unless ``alone``.

    Raises UserError if it does not fit; nothing has changed then.
    """
    stored = storage.stored(path)
    moments = {name: entry for name, entry in stored.items() if name.startswith("optimizer/")}
    tensors = _model_tensors(model, trained_only)
    _check_fit(path, tensors, {name: entry for name, entry in stored.items() if name not in moments})
    if [group["params"] for group in param_groups(model, optimizer)] != [group["params"] for group in groups]:
        raise UserError(f"{path} has different parameter groups of the optimiser; resume with the same groups.")
    states = _blank_states(model, optimizer, {name.split("/")[1] for name in moments})
    _check_fit(path, _optimizer_tensors(states["state"]), moments)
    storage.read(path, tensors | _optimizer_tensors(states["state"]), alone=alone)
    values: dict[str, Any] = {name.removeprefix("model/"): value for name, value in tensors.items()}
    set_model_state_dict(model, values, options=StateDictOptions(strict=not trained_only))
    if moments:
        set_optimizer_state_dict(model, optimizer, states, options=StateDictOptions(strict=False))
    _restore_settings(optimizer, groups)


def _blank_states(model: nn.Module, optimizer: torch.optim.Optimizer, names: set[str]) -> dict[str, Any]:
    """Blank optimiser state to load into, for the parameters ``names``; one without a gradient so far has no state."""
    optimizer.state.clear()
    optimizer.zero_grad(set_to_none=True)  # PyTorch creates no blank state while there are gradients
    states: dict[str, Any] = get_optimizer_state_dict(model, optimizer) if names else {"state": {}}
    return {**states, "state": {name: entry for name, entry in states["state"].items() if name in names}}


def _restore_settings(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)  # a compiled step refers to this tensor
            elif key not in ("params", "fused", "foreach"):  # the last two are how this version computes a step
                group[key] = tuple(value) if isinstance(value, list) else value


def _check_fit(path: Path, ours: Tensors, stored: Mapping[str, TensorStorageMetadata]) -> None:
    """Raise UserError unless names, shapes and dtypes are equal."""
    for only, where in ((ours.keys() - stored.keys(), "this run"), (stored.keys() - ours.keys(), "the checkpoint")):
        if only:
            raise UserError(
                f"{path} does not fit: {min(only)} is only in {where} (one of {len(only)}).\n"
                "  Resume with the model and optimiser of the save, or choose another folder to start again."
            )
    for name, tensor in ours.items():
        saved = _describe(stored[name].properties.dtype, stored[name].size)
        expected = _describe(tensor.dtype, tensor.shape)
        if saved != expected:
            raise UserError(f"{path} does not fit: {name} is {saved} in the checkpoint and {expected} in this run.")


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype} {tuple(shape)}"
