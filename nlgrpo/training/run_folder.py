"""The folder of a run: which run it holds, and whether a command may use it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlgrpo.config.schema import FREE, LoopConfig
from nlgrpo.errors import UserError
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.tracking import run_files

if TYPE_CHECKING:
    from nlgrpo.engine.rollouts.run_inputs import RunInputs
    from nlgrpo.runtime.checkpoint import Saver
    from nlgrpo.runtime.file_lock import FileLock

CONFIG_FILE = "config.json"
LOCK = ".lock"
CHECKPOINTS = "checkpoints"
REMOVED = {"vllm.transfer": "directory"}  # keys of older versions, with the value that every run has now
_LOCKED: dict[Path, FileLock] = {}  # of the folders that this process has claimed


def written() -> tuple[str, ...]:
    """Files and folders that a run writes besides config.json."""
    from nlgrpo.engine.rollouts import run_inputs
    from nlgrpo.runtime import cpu_threads

    return (
        CHECKPOINTS,
        "model",
        "adapter",
        "engine",
        "paused-servers",
        *run_files.LOGGED,
        run_inputs.EVALUATION_FILE,
        "evaluation",
        "best",
        "best.unfinished",
        run_inputs.INPUTS_FILE,
        run_files.REPORT_FILE,
        cpu_threads.THREADS_FILE,
        *(f"{picture}.png" for picture in ("lengths", "curves", "rewards", "best_of_n", "win_rates", "fronts")),
    )


def free_keys(config: Any, prefix: str = "") -> tuple[str, ...]:
    """Keys of a configuration that may differ when its run resumes: those made by `schema.free`.

    A section that may differ as a whole is one key, which ends with a dot.
    """
    found: list[str] = []
    for key in fields(config):
        value = getattr(config, key.name)
        if key.metadata.get(FREE):
            found.append(f"{prefix}{key.name}." if is_dataclass(value) else f"{prefix}{key.name}")
        elif is_dataclass(value):
            found += free_keys(value, f"{prefix}{key.name}.")
    return tuple(found)


def claim(
    folder: Path,
    cfg: Any,
    ranks: Ranks,
    *,
    free: Sequence[str],
    restart: bool,
    removed: Sequence[str] = (),
    steps: int | None = None,
    inputs: Callable[[], RunInputs] | None = None,
    allowed: Sequence[str] = (),
    advice: str = "another folder with --train.out, or restart in this one with --train.restart",
) -> None:
    """Create the folder of a run of ``cfg``, or check that it holds this run; lock it for this process; collective.

    Keys that begin with one of ``free`` may differ from the saved configuration. Keys that an older version did not
    save have their defaults. With ``restart``, the files and folders named in ``removed`` are deleted first, and
    nothing else. ``advice``: what the error messages suggest.

    ``steps``: of the whole run. ``inputs``: what the run reads, compared with what it read when it started; called on
    the first rank only. Those whose kind is in ``allowed`` may have changed, which is reported.

    Raises UserError if the folder holds another run or something else, a run with more steps, or one that read other
    inputs, or if another process is using it.
    """
    fault = ""
    try:
        if ranks.first:
            fault = _claim(folder, cfg, free, restart, removed, steps, advice)
        if ranks.first and not fault and inputs is not None:
            fault = _compare(folder, inputs, allowed, advice)
        if ranks.first and not fault:
            atomic_files.atomic_write(folder / CONFIG_FILE, json.dumps(_plain(cfg), indent=2) + "\n")
            from nlgrpo.runtime import cpu_threads

            cpu_threads.record(folder, ranks)
    except OSError as error:
        fault = f"{folder} cannot be used as the folder of a run: {error}"
    except ValueError as error:  # the folder is fine, and writing to it failed
        fault = str(error)
    fault = ranks.gather_objects(fault)[0]
    if fault:
        raise UserError(fault)


def _claim(
    folder: Path,
    cfg: Any,
    free: Sequence[str],
    restart: bool,
    removed: Sequence[str],
    steps: int | None,
    advice: str,
) -> str:
    """Claim the folder; returns an error message, or an empty string."""
    current = _plain(cfg)
    path = folder / CONFIG_FILE
    if path.is_file():
        _lock(folder, advice)
    if restart and path.is_file():
        _clear(folder, removed)
    elif path.is_file():
        saved = _read(path)
        if saved is None:
            return f"{path} is damaged, and the configuration of its run is lost; choose {advice}"
        from nlgrpo.config import comparing

        changed = comparing.differences(completed(saved, current, type(cfg)), current)
        refused = [line for line in changed if not line.startswith(tuple(free))]
        if refused:
            lines = [f"{folder} holds a run with a different configuration:", *refused, f"Choose {advice}"]
            return "\n  ".join(lines)
        done = begun_steps(folder)
        if steps is not None and done > steps:
            return (
                f"{folder} holds a run that has {done} steps already, and this command asks for {steps}: its model "
                f"would be that of {done} steps. Ask for {done} or more, or choose {advice}"
            )
    elif folder.exists() and not (folder.is_dir() and all(_ours(entry.name) for entry in folder.iterdir())):
        return f"{folder} exists but holds no run; choose {advice.partition(',')[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    _lock(folder, advice)
    return ""


def _plain(cfg: Any) -> dict[str, Any]:
    """Return a configuration as JSON reads it again."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(cfg)))
    return found


def begun_steps(folder: Path) -> int:
    """Return the step of the newest checkpoint of the run in ``folder``; 0 without any."""
    if not (folder / CHECKPOINTS).is_dir():
        return 0
    from nlgrpo.runtime.checkpoint import folders  # takes a second

    return max(folders.steps(folder / CHECKPOINTS), default=0)


def _compare(folder: Path, inputs: Callable[[], RunInputs], allowed: Sequence[str], advice: str) -> str:
    """Compare inputs with those of the first start, and record them; returns an error message, or an empty string."""
    from nlgrpo.engine.rollouts import run_inputs

    saved = run_inputs.read_digests(folder)  # before the digests: it knows which files have been read
    current = inputs()
    begun = begun_steps(folder) > 0 or (folder / current.results).is_file()
    changed = current.changed(saved or {}) if begun else {}
    refused = {name: one for name, one in changed.items() if one.kind not in allowed}
    if refused:
        kinds = list(dict.fromkeys(one.kind for one in changed.values()))
        lines = [f"{folder} holds a run whose inputs have changed since it started:"]
        lines += [f"{one.kind}: other {one.meaning}" for one in refused.values()]
        lines.append(
            f"Restore them, go on with the new ones by --train.allow-changed {' '.join(kinds)} "
            f"(train.allow_changed in a file), or choose {advice}"
        )
        return "\n  ".join(lines)
    notes = list(current.notes)
    notes += [f"{one.kind}: other {one.meaning} than at the start (train.allow_changed)" for one in changed.values()]
    if begun and saved is None:
        notes.append(
            f"the run in {folder} began before inputs were recorded: whether data, rewards or model have changed is "
            "not known; they are recorded now"
        )
    results = folder / current.results
    of_sets = [name for name in changed if name.startswith("evaluation.sets.")]
    for name in of_sets:
        atomic_files.remove(folder / "evaluation" / f"{name.removeprefix('evaluation.sets.')}.digest")
    if results.is_file() and any(changed[name].kind != "model" for name in changed.keys() - set(of_sets)):
        results.unlink()
        atomic_files.remove(folder / "evaluation")
        notes.append(f"the evaluation before training ({results.name}) is repeated, with what has changed")
    for note in notes:
        print(f"note: {note}", file=sys.stderr, flush=True)
    current.write(folder)
    return ""


def completed(saved: dict[str, Any], current: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return a saved configuration with the keys of ``current``, which this version has.

    Keys that it lacks, because the run started before they existed, get the defaults of ``kind``, the dataclass of the
    configuration. Keys that are gone (`REMOVED`) are left out if they had the value that this version stands for.
    """

    def merged(
        theirs: dict[str, Any], ours: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
    ) -> dict[str, Any]:
        found = {key: defaults[key] for key in ours if key in defaults} | theirs
        for key, value in theirs.items():
            if REMOVED.get(f"{prefix}{key}", ...) == value:
                del found[key]
            if all(isinstance(x, Mapping) for x in (value, ours.get(key), defaults.get(key))):
                found[key] = merged(value, ours[key], defaults[key], f"{prefix}{key}.")
        return found

    return merged(saved, current, json.loads(json.dumps(asdict(kind()))))


def saver(folder: Path, train: LoopConfig, ranks: Ranks, *, adapters: bool) -> Saver:
    """Return what saves the checkpoints of the run in ``folder``; collective. ``adapters``: only they are trained."""
    from nlgrpo.runtime.checkpoint import Keep, Saver  # takes a second

    background = ranks.device.type == "cuda" if train.async_save is None else train.async_save
    keep = Keep(train.keep_checkpoints, train.keep_every)
    return Saver(folder / CHECKPOINTS, keep=keep, trained_only=adapters, background=background)


def _lock(folder: Path, advice: str) -> None:
    """Lock the folder until this process ends. Raises UserError if another process has the lock."""
    from nlgrpo.runtime.file_lock import Busy, FileLock

    path = folder / LOCK
    before = _LOCKED.get(folder.resolve())
    if before is not None:
        if path.exists() and os.path.samestat(os.fstat(before.file.fileno()), path.stat()):
            return
        _LOCKED.pop(folder.resolve()).release()  # the folder at this path has been replaced
    try:
        with atomic_files.into(folder):
            _LOCKED[folder.resolve()] = FileLock(path)
    except Busy as busy:
        raise UserError(f"{folder} is used by {busy}; wait until it ends, or choose {advice}") from None


def _ours(name: str) -> bool:
    """Whether a file is one of a run that was killed before it had a configuration."""
    from nlgrpo.engine.rollouts import run_inputs

    return name == f"{CONFIG_FILE}.tmp" or name.startswith((LOCK, run_inputs.INPUTS_FILE))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError:
        return None
    return config if isinstance(config, dict) else None


def _clear(folder: Path, names: Sequence[str]) -> None:
    """Delete the files and folders ``names``, and nothing else; the caller replaces config.json afterwards."""
    for name in names:
        atomic_files.remove(folder / name)
