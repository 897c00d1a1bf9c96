"""Checkpoints of a run: model, optimizer, state and random generators, complete or absent.

A folder of checkpoints belongs to one run and is visible to all ranks. The checkpoint ``step-00000012`` holds

    *.distcp, .metadata    tensors of the model and the optimiser, saved sharded by torch.distributed.checkpoint
    state.json             state of the run, the optimiser's settings by parameter group, and `trained_only`
    rng-00000.json ..      random generators of each rank
    manifest.json          size and SHA-256 of every other file

It is written as ``.step-00000012.partial``, synced to the disk and renamed, so a kill at any time leaves every
checkpoint complete or absent. Hidden folders are not checkpoints:

    .partial    being written        removed by the next save or load
    .old        being replaced       renamed back if its successor does not exist, otherwise removed
    .gone       being deleted        removed

With ``trained_only``, frozen parameters are left out: beside adapters, they are those of the model at the start.

Tensors are loaded with ``weights_only`` and the rest as JSON. The exception is ``.metadata``, which
torch.distributed.checkpoint stores as a pickle: load checkpoints only from people whose programs you would run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import nlgrpo
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.seeding import random_state, set_random_state

log = logging.getLogger("nlgrpo")

Value = TypeVar("Value")
Tensors = dict[str, torch.Tensor]

_NAME = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.(step-\d{8,})\.(partial|old|gone)")


def save(
    folder: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int = 2,
    trained_only: bool = False,
) -> Path:
    """Save checkpoint ``step`` and return its path. Every rank calls it.

    ``state``: JSON values with string keys, the same on every rank (rank 0 writes). A checkpoint of this step is
    replaced. Then all but the newest ``keep`` up to this step are deleted; later ones, maybe damaged, are left alone.

    Model, optimiser and random generators do not change. Raises ValueError on every rank if one of them cannot write;
    earlier checkpoints are then unchanged.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"save(step={step}, keep={keep}): step must be 0 or more, keep 1 or more.")
    folder, rank = Path(folder), _rank()
    target = folder / f"step-{step:08d}"
    partial = folder / f".{target.name}.partial"
    tensors = _all_tensors(model, optimizer, trained_only)
    groups = _param_groups(model, optimizer)
    text = _to_json({"state": state, "param_groups": groups, "trained_only": trained_only})
    try:
        _on_all(folder, lambda: _begin(partial) if rank == 0 else None)
        _on_all(folder, lambda: _save_tensors(partial, tensors))
        _on_all(folder, lambda: _write_state(partial, text))
        digests = _on_all(folder, lambda: _digests(partial))
        _on_all(folder, lambda: _finish(partial, target, digests, keep) if rank == 0 else None)
    except ValueError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # frees its space on a full disk
        raise
    return target


def load(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Load the newest complete checkpoint into ``model``, ``optimizer`` and the random generators. Every rank calls it.

    Returns the saved state, or None if the folder has no checkpoint. The number of ranks may differ from that of the
    save; ranks without saved random generators keep their own. Gradients are dropped. Raises ValueError if all
    checkpoints are damaged, and if the newest complete one does not fit; the model is then unchanged.
    """
    path = newest(folder)
    if path is None:
        return None
    saved = json.loads((path / "state.json").read_text())
    _restore(path, model, optimizer, saved["param_groups"], trained_only=saved.get("trained_only", False))
    _restore_random_state(path)
    return saved["state"]


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None without any; damaged ones are logged. Every rank calls it.

    Raises ValueError if all are damaged.
    """
    folder = Path(folder)
    if _rank() == 0 and folder.is_dir():
        _tidy(folder)
    paths = [folder / f"step-{step:08d}" for step in _gather(_steps(folder) if _rank() == 0 else [])[0]]
    damages = []
    for path in reversed(paths):  # each rank hashes its share of the files
        damage = next(filter(None, _gather(verify(path, _rank(), _ranks()))), None)
        if damage is None:
            return path
        damages.append(damage)
        if _rank() == 0:
            log.warning("Checkpoint %s is damaged and skipped: %s", path.name, damage)
    if damages:
        raise ValueError(
            f"All checkpoints in {folder} are damaged:\n  " + "\n  ".join(damages) + "\n"
            "  To start again, remove the folder or choose another one."
        )
    return None


def verify(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """Describe the damage of a checkpoint, or return None; checks every ``parts``-th file, from number ``part``."""
    manifest = path / "manifest.json"
    try:
        files = json.loads(manifest.read_text())["files"]
        for name in sorted(files)[part::parts]:
            size, digest = files[name]["bytes"], files[name]["sha256"]
            if (path / name).stat().st_size != size:
                return f"{path / name} has {(path / name).stat().st_size:,} bytes instead of {size:,}"
            if _digest(path / name)["sha256"] != digest:
                return f"{path / name} does not have the SHA-256 in manifest.json"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{manifest} is not readable ({error})"
    return None


# --- Ranks ------------------------------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(value: Value) -> list[Value]:
    """List the values of all ranks, on every rank. Also a barrier.

    A single rank calls no collective, here and in DCP: gloo runs collectives in its own threads, whose OpenMP workers
    would halve the speed of everything that follows if there are as many threads as cores.
    """
    values: list[Any] = [value] * _ranks()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def _on_all(folder: Path, work: Callable[[], Value]) -> list[Value]:
    """Run ``work`` on every rank and list the results; an error of a write on one rank is raised on all."""
    result: list[Value] = []
    fault = ""
    try:
        with atomic_files.into(folder):
            result = [work()]
    except ValueError as error:
        fault = str(error)
    outcomes = _gather((result, fault))
    first = next((fault for _, fault in outcomes if fault), None)
    if first is not None:
        raise ValueError(first)
    return [value for part, _ in outcomes for value in part]


@contextmanager
def single_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


# --- Files ------------------------------------------------------------------------------------------------------------


def _begin(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    _tidy(partial.parent)
    partial.mkdir()


def _save_tensors(partial: Path, tensors: Tensors) -> None:
    try:
        with single_process_is_fine():
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial), no_dist=_ranks() == 1)
    except dcp.CheckpointException as error:
        fault, _ = next(iter(error.failures.values()))
        if isinstance(fault, OSError) or "inline_container" not in str(fault):
            raise fault from None
        # PyTorch's writer reports only that its file is too short.
        free = shutil.disk_usage(partial).free
        raise OSError(errno.ENOSPC, f"a file is incomplete; {free:,} bytes are free") from error


def _write_state(partial: Path, text: str) -> None:
    _write(partial / f"rng-{_rank():05d}.json", _to_json(random_state()))
    if _rank() == 0:
        _write(partial / "state.json", text)


def _digests(partial: Path) -> dict[str, Any]:
    """Size and SHA-256 of the files that this rank wrote."""
    return {path.name: _digest(path) for path in sorted(partial.iterdir()) if _writer(path.name) == _rank()}


def _finish(partial: Path, target: Path, digests: list[dict[str, Any]], keep: int) -> None:
    _write_manifest(partial, {name: digest for part in digests for name, digest in part.items()})
    _publish(partial, target)
    _prune(target.parent, int(target.name.removeprefix("step-")), keep)


def _steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in ``folder``, ascending, damaged ones included."""
    matches = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in matches if match)


def _tidy(folder: Path) -> None:
    """Finish or undo a killed save; see the table of hidden folders in the module's docstring."""
    for path in sorted(folder.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match and match[2] == "old" and not (folder / match[1]).exists():
            os.replace(path, folder / match[1])
        elif match:
            atomic_files.remove(path)
    _sync(folder)


def _publish(partial: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    if target.exists():  # a folder cannot be renamed to one that is not empty
        os.replace(target, old)
    os.replace(partial, target)
    _sync(target.parent)
    if old.exists():
        atomic_files.remove(old)


def _prune(folder: Path, step: int, keep: int) -> None:
    for outdated in [earlier for earlier in _steps(folder) if earlier <= step][:-keep]:
        path = folder / f"step-{outdated:08d}"
        gone = path.with_name(f".{path.name}.gone")
        os.replace(path, gone)  # a partly deleted folder must not count as a checkpoint
        atomic_files.remove(gone)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Sync the entries of ``folder``, so that renames and new files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _writer(name: str) -> int:
    """Return the rank that wrote a file, from its name: 3 for ``__3_0.distcp`` and ``rng-00003.json``."""
    match = re.match(r"(?:__|rng-)(\d+)", name)
    return int(match[1]) if match else 0


def _write_manifest(partial: Path, files: dict[str, Any]) -> None:
    versions = {"nlgrpo": nlgrpo.__version__, "torch": torch.__version__}
    _write(partial / "manifest.json", json.dumps({"versions": versions, "ranks": _ranks(), "files": files}, indent=1))
    _sync(partial)


def _to_json(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value)
    except TypeError as error:
        raise ValueError(
            f"The state of a checkpoint may contain strings, numbers, lists and dicts with string keys: {error}."
        ) from error


# --- Tensors ----------------------------------------------------------------------------------------------------------


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
            raise ValueError(f"{name} is a {type(value).__name__}; a checkpoint can only store tensors.")
    return named


def _all_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, trained_only: bool) -> Tensors:
    if not optimizer.state:  # get_optimizer_state_dict would create it with a step of size 0, which AdamW counts
        return _model_tensors(model, trained_only)
    states: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    return _model_tensors(model, trained_only) | _optimizer_tensors(states["state"])


def _param_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the optimiser's settings by group, with the parameters' names without the prefixes of wrappers."""
    wrappers = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")
    names = {parameter: wrappers.sub("", name) for name, parameter in model.named_parameters()}
    if any(parameter not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("The optimiser has a parameter that is not one of the model's; both are saved together.")
    return [
        {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _restore(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], *, trained_only: bool
) -> None:
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    moments = {name: entry for name, entry in stored.items() if name.startswith("optimizer/")}
    tensors = _model_tensors(model, trained_only)
    _check_fit(path, tensors, {name: entry for name, entry in stored.items() if name not in moments})
    if [group["params"] for group in _param_groups(model, optimizer)] != [group["params"] for group in groups]:
        raise ValueError(f"{path} has different parameter groups of the optimiser; resume with the same groups.")
    states = _blank_states(model, optimizer, {name.split("/")[1] for name in moments})
    _check_fit(path, _optimizer_tensors(states["state"]), moments)
    with single_process_is_fine():
        everything = tensors | _optimizer_tensors(states["state"])
        dcp.load(everything, storage_reader=dcp.FileSystemReader(path), no_dist=_ranks() == 1)
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


def _check_fit(path: Path, ours: Tensors, stored: dict[str, Any]) -> None:
    """Raise ValueError unless names, shapes and dtypes are equal."""
    for only, where in ((ours.keys() - stored.keys(), "this run"), (stored.keys() - ours.keys(), "the checkpoint")):
        if only:
            raise ValueError(
                f"{path} does not fit: {min(only)} is only in {where} (one of {len(only)}).\n"
                "  Resume with the model and optimiser of the save, or choose another folder to start again."
            )
    for name, tensor in ours.items():
        saved, expected = _describe(stored[name]), f"{tensor.dtype} {tuple(tensor.shape)}"
        if saved != expected:
            raise ValueError(f"{path} does not fit: {name} is {saved} in the checkpoint and {expected} in this run.")


def _describe(entry: TensorStorageMetadata | BytesStorageMetadata) -> str:
    if isinstance(entry, BytesStorageMetadata):
        return "a pickle"
    return f"{entry.properties.dtype} {tuple(entry.size)}"


def _restore_random_state(path: Path) -> None:
    file = path / f"rng-{_rank():05d}.json"
    if file.exists():
        set_random_state(json.loads(file.read_text()))
    else:
        log.warning("%s was saved by fewer ranks; rank %d keeps its own random generators.", path.name, _rank())
