"""Read the model of a checkpoint into another model, such as a reward model into a critic."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from nlgrpo.errors import UserError
from nlgrpo.runtime.checkpoint import storage
from nlgrpo.runtime.checkpoint.folders import verify


def read_model(path: Path, parameters: dict[str, Tensor], *, optional: str = "") -> set[str]:
    """Load the model of one checkpoint into ``parameters``, in place; return the names loaded.

    Of a sharded parameter, only this rank's rows are read. Not collective. The parameter ``optional`` is left unchanged
    if the checkpoint does not have it in this shape. Raises UserError for a damaged checkpoint, for one of another
    model, and for one with adapters.
    """
    if (damage := verify(path)) is not None:
        raise UserError(f"checkpoint {path} is damaged: {damage}")
    tensors = storage.stored(path)
    prefix = "model/policy." if any(name.startswith("model/policy.") for name in tensors) else "model/"
    stored = {name.removeprefix(prefix): entry for name, entry in tensors.items()}
    if adapters := [name for name in stored if ".lora_A." in name]:
        raise UserError(f"{path} has adapters ({adapters[0]}, ..); use the model that the run exports, RUN/model")
    shapes = {name: tuple(entry.size) for name, entry in stored.items()}
    fitting = {name: p for name, p in parameters.items() if shapes.get(name) == tuple(p.shape)}
    wrong = [name for name in parameters if name not in fitting and name != optional]
    if wrong:
        saved = shapes.get(wrong[0])
        expected = tuple(parameters[wrong[0]].shape)
        raise UserError(f"{path} does not fit: {wrong[0]} has shape {saved} there, and {expected} in the model")
    # DCP converts to the dtype of the parameters.
    storage.read(path, {f"{prefix}{name}": parameter.detach() for name, parameter in fitting.items()}, alone=True)
    return set(fitting)
