"""Atomic files, on disks that may be full: a file is complete or absent, and a failed write is one clear message.

Every command turns a ValueError into one line and exit status 1, and resumes from complete files when it is started
again. Only this module interprets what the libraries raise that write for us.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CANNOT = "cannot write into"  # tells a sweep that its other points would fail too
IN_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers, whose own types of exceptions say no more


@contextmanager
def into(folder: Path) -> Iterator[None]:
    """Turn a write that the system refuses into a ValueError that names ``folder`` and the cause."""
    try:
        yield
    except Exception as error:  # tokenizers raises Exception itself
        cause = _cause(error)
        if cause is None:
            raise
        raise ValueError(
            f"{CANNOT} {folder}: {cause}. Complete files stay; run the same command again to resume."
        ) from error


def _cause(error: Exception) -> str | None:
    """Return the message of the operating system, or None for an error that does not come from it."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = IN_RUST.search(str(error))
    return os.strerror(int(code[1])) if code else None


def atomic_write(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8) atomically: a reader sees the old or the new file, also after a kill.

    Raises ValueError if it cannot be written; the old file is then unchanged.
    """
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Like `atomic_write`, for bytes."""
    beside = path.with_name(path.name + ".tmp")
    with into(path.parent):
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)  # half of a file on a disk that is full
            raise


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
