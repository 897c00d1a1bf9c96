"""The folder of a run: whose it is, and whether a command may go on in it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nlgrpo.config import schema
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.distributed import Ranks

FILE = "config.json"
_LOCKED: dict[Path, int] = {}  # descriptors of the folders that this process has claimed


def claim(
    folder: Path,
    cfg: Any,
    ranks: Ranks,
    *,
    free: Sequence[str],
    restart: bool,
    removed: Sequence[str] = (),
    advice: str = "another folder with --train.out, or begin anew in this one with --train.restart",
) -> None:
    """Make the folder of a run of ``cfg``, or check that the run in it is this one; collective.

    Keys that begin with one of ``free`` may differ. With ``restart``, what a run writes there (``removed``, files and
    folders) is taken away first, and nothing else. Raises ValueError where the folder is another run's, or none's, or
    another process is at work in it; ``advice``: what may be chosen then. It stays this process's until that ends.
    """
    fault = ""
    try:
        fault = _claim(folder, cfg, free, restart, removed, advice) if ranks.first else ""
    except OSError as error:
        fault = f"{folder} cannot be the folder of a run: {error}"
    except ValueError as error:  # it can be, and cannot be written
        fault = str(error)
    fault = ranks.gather_objects(fault)[0]
    if fault:
        raise ValueError(fault)


def _claim(folder: Path, cfg: Any, free: Sequence[str], restart: bool, removed: Sequence[str], advice: str) -> str:
    """What is wrong with the folder, if anything is."""
    now = json.loads(json.dumps(asdict(cfg)))
    known, busy = folder / FILE, f"another process is at work in {folder}; wait for its end, or choose {advice}"
    if known.is_file() and not _lock(folder):
        return busy
    if restart and known.is_file():
        _clear(folder, removed)
    elif known.is_file():
        before = _read(known)
        if before is None:
            return f"{known} is damaged, so nobody knows what the run in {folder} is; choose {advice}"
        changed = schema.differences(before, now)
        changed = [f"  {line}" for line in changed if not line.startswith(tuple(free))]
        if changed:
            return "\n".join(
                [
                    f"{folder} holds a run with another configuration:",
                    *changed,
                    f"  Choose {advice}",
                ]
            )
    elif folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= {f"{FILE}.tmp"}):
        return f"{folder} exists and holds no run; choose {advice.partition(',')[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    if not _lock(folder):
        return busy
    atomic_files.atomic_write(known, json.dumps(now, indent=2) + "\n")
    return ""


def _lock(folder: Path) -> bool:
    """Whether no other process has locked the folder: then this one has, until it ends or is killed."""
    if (before := _LOCKED.get(folder.resolve())) is not None:
        if os.path.samestat(os.fstat(before), folder.stat()):
            return True
        os.close(_LOCKED.pop(folder.resolve()))  # of a folder that was here before
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:  # a file system without locks
        os.close(descriptor)
        return True
    _LOCKED[folder.resolve()] = descriptor
    return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _clear(folder: Path, names: Sequence[str]) -> None:
    """Remove what a run writes, and nothing else that stands in its folder; its config.json is replaced afterwards."""
    for name in names:
        atomic_files.remove(folder / name)
