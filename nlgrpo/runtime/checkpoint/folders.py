"""The folders and files of checkpoints: which are complete, and which are removed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nlgrpo
from nlgrpo.errors import UserError
from nlgrpo.runtime import atomic_files

Digest = dict[str, Any]  # "bytes" and "sha256" of a file

_NAME = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.(step-\d{8,})\.(partial|old|gone)")


@dataclass(frozen=True)
class Keep:
    """Checkpoints that are not deleted: the ``newest`` ones, and each whose step is a multiple of ``every`` (0: none).

    Raises UserError for impossible numbers.
    """

    newest: int = 2
    every: int = 0

    def __post_init__(self) -> None:
        if self.newest < 1 or self.every < 0:
            raise UserError(f"{self}: newest must be 1 or more, every 0 or more.")

    def outdated(self, steps: list[int]) -> list[int]:
        """Return those of ``steps``, ascending, that are deleted."""
        return [step for step in steps[: -self.newest] if not self.every or step % self.every]


def named(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in ``folder``, ascending, damaged ones included."""
    matches = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in matches if match)


def verify(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """Describe the damage of a checkpoint, or return None; checks every ``parts``-th file, from number ``part``."""
    manifest = path / "manifest.json"
    try:
        files = json.loads(manifest.read_text("utf-8"))["files"]
        for name in sorted(files)[part::parts]:
            size = files[name]["bytes"]
            written = files[name]["sha256"]
            if (path / name).stat().st_size != size:
                return f"{path / name} has {(path / name).stat().st_size:,} bytes instead of {size:,}"
            if digest(path / name)["sha256"] != written:
                return f"{path / name} does not have the SHA-256 in manifest.json"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{manifest} is not readable ({error})"
    return None


def begin(partial: Path) -> None:
    """Create the folder of a checkpoint that is being written."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    tidy(partial.parent)
    partial.mkdir()


def finish(partial: Path, target: Path, ranks: int, files: dict[str, Digest], keep: Keep) -> None:
    """Make a checkpoint complete, and delete the outdated ones up to its step; later ones may be damaged."""
    write_manifest(partial, ranks, files)
    publish(partial, target)
    step = int(target.name.removeprefix("step-"))
    prune(target.parent, keep.outdated([earlier for earlier in steps(target.parent) if earlier <= step]))


def tidy(folder: Path) -> None:
    """Finish or undo a killed save; see the table of hidden folders in `nlgrpo.runtime.checkpoint`."""
    for path in sorted(folder.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match and match[2] == "old" and not (folder / match[1]).exists():
            os.replace(path, folder / match[1])
        elif match:
            atomic_files.remove(path)
    _sync(folder)


def write_manifest(partial: Path, ranks: int, files: dict[str, Digest]) -> None:
    versions = {"nlgrpo": nlgrpo.__version__, "torch": torch.__version__}
    write(partial / "manifest.json", json.dumps({"versions": versions, "ranks": ranks, "files": files}, indent=1))
    _sync(partial)


def publish(partial: Path, target: Path) -> None:
    """Give a folder its name, also if there is a checkpoint of this name."""
    old = target.with_name(f".{target.name}.old")
    if target.exists():  # a folder cannot be renamed to one that is not empty
        os.replace(target, old)
    os.replace(partial, target)
    _sync(target.parent)
    if old.exists():
        atomic_files.remove(old)


def drop(folder: Path, step: int) -> None:
    """Delete the checkpoints after ``step``. Raises UserError if they cannot be deleted."""
    with atomic_files.into(folder):
        prune(folder, [later for later in steps(folder) if later > step])


def prune(folder: Path, outdated: list[int]) -> None:
    for step in outdated:
        path = named(folder, step)
        gone = path.with_name(f".{path.name}.gone")
        os.replace(path, gone)  # a partly deleted folder must not count as a checkpoint
        atomic_files.remove(gone)


def write(path: Path, text: str) -> Digest:
    """Write a text to the disk, and return its digest."""
    content = text.encode()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def digest(path: Path) -> Digest:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def check(folder: Path, written: dict[str, Digest]) -> dict[str, Digest]:
    """Read files from the disk again, and return ``written``. Raises OSError if they are different."""
    for name, meant in written.items():
        _forget(folder / name)
        if digest(folder / name) != meant:
            raise OSError(f"{name} was written, and is different when it is read again")
    return written


def _forget(path: Path) -> None:
    """Remove a file that has been synced from the system's cache, so that the next read is one of the disk."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sync(folder: Path) -> None:
    """Sync the entries of ``folder``, so that renames and new files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
