"""The folder of a run: which run it holds, and whether a command may use it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlgrpo.config import comparing
from nlgrpo.config.schema import LoopConfig
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.file_lock import Busy, FileLock

if TYPE_CHECKING:
    from nlgrpo.runtime.checkpoint import Saver

FILE = "config.json"
LOCK = ".lock"
_LOCKED: dict[Path, FileLock] = {}  # of the folders that this process has claimed


def claim(
    folder: Path,
    cfg: Any,
    ranks: Ranks,
    *,
    free: Sequence[str],
    restart: bool,
    removed: Sequence[str] = (),
    advice: str = "another folder with --train.out, or restart in this one with --train.restart",
) -> None:
    """Create the folder of a run of ``cfg``, or check that it holds this run; lock it for this process; collective.

    Keys that begin with one of ``free`` may differ from the saved configuration. Keys that an older version did not
    save have their defaults. With ``restart``, the files and folders named in ``removed`` are deleted first, and
    nothing else. ``advice``: what the error messages suggest.

    Raises ValueError if the folder holds another run or something else, or another process is using it.
    """
    fault = ""
    try:
        fault = _claim(folder, cfg, free, restart, removed, advice) if ranks.first else ""
    except OSError as error:
        fault = f"{folder} cannot be used as the folder of a run: {error}"
    except ValueError as error:  # the folder is fine, and writing to it failed
        fault = str(error)
    fault = ranks.gather_objects(fault)[0]
    if fault:
        raise ValueError(fault)


def _claim(
    folder: Path,
    cfg: Any,
    free: Sequence[str],
    restart: bool,
    removed: Sequence[str],
    advice: str,
) -> str:
    """Claim the folder; returns an error message, or an empty string."""
    current = json.loads(json.dumps(asdict(cfg)))
    path = folder / FILE
    if path.is_file():
        _lock(folder, advice)
    if restart and path.is_file():
        _clear(folder, removed)
    elif path.is_file():
        saved = _read(path)
        if saved is None:
            return f"{path} is damaged, and the configuration of its run is lost; choose {advice}"
        changed = comparing.differences(completed(saved, current, type(cfg)), current)
        changed = [f"  {line}" for line in changed if not line.startswith(tuple(free))]
        if changed:
            return "\n".join(
                [
                    f"{folder} holds a run with a different configuration:",
                    *changed,
                    f"  Choose {advice}",
                ]
            )
    elif folder.exists() and not (folder.is_dir() and all(_ours(entry.name) for entry in folder.iterdir())):
        return f"{folder} exists but holds no run; choose {advice.partition(',')[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    _lock(folder, advice)
    atomic_files.atomic_write(path, json.dumps(current, indent=2) + "\n")
    return ""


def completed(saved: dict[str, Any], current: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Add the keys of ``current`` that a saved configuration lacks: the run started before they existed.

    They get the defaults of ``kind``, the dataclass of the configuration.
    """

    def merged(theirs: dict[str, Any], ours: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        found = {key: defaults[key] for key in ours if key in defaults} | theirs
        for key, value in theirs.items():
            if all(isinstance(x, Mapping) for x in (value, ours.get(key), defaults.get(key))):
                found[key] = merged(value, ours[key], defaults[key])
        return found

    return merged(saved, current, json.loads(json.dumps(asdict(kind()))))


def saver(folder: Path, train: LoopConfig, ranks: Ranks, *, adapters: bool) -> Saver:
    """Return what saves the checkpoints of the run in ``folder``; collective. ``adapters``: only they are trained."""
    from nlgrpo.runtime.checkpoint import Keep, Saver  # takes a second

    background = ranks.device.type == "cuda" if train.async_save is None else train.async_save
    keep = Keep(train.keep_checkpoints, train.keep_every)
    return Saver(folder / "checkpoints", keep=keep, trained_only=adapters, background=background)


def _lock(folder: Path, advice: str) -> None:
    """Lock the folder until this process ends. Raises ValueError if another process has the lock."""
    path = folder / LOCK
    if (before := _LOCKED.get(folder.resolve())) is not None:
        if path.exists() and os.path.samestat(os.fstat(before.file.fileno()), path.stat()):
            return
        _LOCKED.pop(folder.resolve()).release()  # the folder at this path has been replaced
    try:
        with atomic_files.into(folder):
            _LOCKED[folder.resolve()] = FileLock(path)
    except Busy as busy:
        raise ValueError(f"{folder} is used by {busy}; wait until it ends, or choose {advice}") from None


def _ours(name: str) -> bool:
    """Whether a file is one of a run that was killed before it had a configuration."""
    return name == f"{FILE}.tmp" or name.startswith(LOCK)


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
