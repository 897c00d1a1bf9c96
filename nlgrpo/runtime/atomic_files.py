"""Writing into a folder whose disk may be full: files that are whole or not there, and one message for what went wrong.

Every command turns a ValueError into one line and exit status 1, and goes on from what is whole when it is started
again. What the libraries raise that write for us is told apart here, and nowhere else.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CANNOT = "cannot write into"  # the sweep knows by it that its other points would fail too
IN_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers, whose own types of exceptions say no more


@contextmanager
def into(folder: Path) -> Iterator[None]:
    """Within, a write that the system refuses raises ValueError, which names ``folder`` and the cause."""
    try:
        yield
    except Exception as error:  # tokenizers raises Exception itself
        cause = _cause(error)
        if cause is None:
            raise
        raise ValueError(
            f"{CANNOT} {folder}: {cause}. What is whole there stays, and the same command goes on from it."
        ) from error


def _cause(error: Exception) -> str | None:
    """What the operating system said; None for an error that does not come from it."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = IN_RUST.search(str(error))
    return os.strerror(int(code[1])) if code else None


def atomic_write(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8): a reader, also after a kill, sees all of the old or of the new file.

    Raises ValueError where it cannot be written; the old file is then as it was.
    """
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """`atomic_write` of bytes."""
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
    """A folder with all in it, or a file; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
