"""Read the model of a checkpoint into another model, such as a reward model into a critic."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nlgrpo.runtime.checkpoint import Tensors, single_process_is_fine, verify


def read_model(path: Path, parameters: Tensors, *, optional: str = "") -> set[str]:
    """Load the model of one checkpoint into ``parameters``, in place; return the names loaded.

    Of a sharded parameter, only this rank's rows are kept; one stored tensor is in memory at a time. Not collective.
    The parameter ``optional`` is left unchanged if the checkpoint does not have it in this shape. Raises ValueError for
    a damaged checkpoint, for one of another model, and for one with adapters.
    """
    if (damage := verify(path)) is not None:
        raise ValueError(f"checkpoint {path} is damaged: {damage}")
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
    prefix = "model/policy." if any(name.startswith("model/policy.") for name in tensors) else "model/"
    stored = {name.removeprefix(prefix): entry for name, entry in tensors.items()}
    if adapters := [name for name in stored if ".lora_A." in name]:
        raise ValueError(f"{path} has adapters ({adapters[0]}, ..); use the model that the run exports, RUN/model")
    shapes = {name: tuple(entry.size) for name, entry in stored.items()}
    fitting = {name: p for name, p in parameters.items() if shapes.get(name) == tuple(p.shape)}
    wrong = [name for name in parameters if name not in fitting and name != optional]
    if wrong:
        saved, expected = shapes.get(wrong[0]), tuple(parameters[wrong[0]].shape)
        raise ValueError(f"{path} does not fit: {wrong[0]} has shape {saved} there, and {expected} in the model")
    with single_process_is_fine():  # DCP converts to the dtype of the parameters
        read = {f"{prefix}{name}": parameter.detach() for name, parameter in fitting.items()}
        dcp.load(read, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return set(fitting)
