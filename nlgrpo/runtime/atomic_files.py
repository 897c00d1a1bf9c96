"""Atomic files, also on full disks: a file is complete or absent, and a failed write raises one clear UserError.

Every command reports a UserError in one line with exit status 2, and resumes from complete files when it is started
again. Only this module interprets the exceptions of the libraries that write files for us.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nlgrpo.errors import UserError

CANNOT = "cannot write into"  # a sweep stops at this message, because its other points would fail too
OF_A_DISK = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ENODEV}
IN_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers have the error number only in the text
LFS = b"version https://git-lfs"  # the first bytes of a file that Git LFS has not downloaded
POINTER = "is a pointer of Git LFS and not the file itself; download it with: git lfs pull"


@contextmanager
def into(folder: Path) -> Iterator[None]:
    """Context that turns a failed write into a UserError with ``folder`` and the cause."""
    try:
        yield
    except Exception as error:  # tokenizers raises bare exceptions
        cause = _cause(error)
        if cause is None:
            raise
        raise UserError(
            f"{CANNOT} {folder}: {cause}. Complete files stay; run the same command again to resume."
        ) from error


@contextmanager
def disk_errors() -> Iterator[None]:
    """Context that turns the errors of a disk that fails, is full or is gone into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in OF_A_DISK:
            raise
        raise UserError(
            f"{error.filename or 'a file'}: {error.strerror}. Run the same command again to resume."
        ) from error


def _cause(error: Exception) -> str | None:
    """Return the message of the operating system, or None for an error that does not come from it."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = IN_RUST.search(str(error))
    return os.strerror(int(code[1])) if code else None


def atomic_write(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8) atomically: a reader sees the old or the new file, also after a kill.

    Raises UserError if it cannot be written; the old file is then unchanged.
    """
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Like `atomic_write`, for bytes."""
    with into(path.parent), replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Context with a new file, which replaces ``path`` at the end of the context; after an exception it is removed.

    A kill leaves at most its partial version, ``NAME.tmp``. Errors of the operating system are raised as they are.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)  # frees its space on a full disk
        raise


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_pointer(path: Path) -> bool:
    """Whether a file is a pointer of Git LFS: its content has not been downloaded."""
    with path.open("rb") as file:
        return file.read(len(LFS)) == LFS


def unreadable(path: Path, fault: str, error: object) -> str:
    """Return the message for a file with a ``fault``, which is another one if Git LFS has not downloaded it."""
    if is_pointer(path):
        return f"{path} {POINTER}"
    return f"{path} {fault}: {error}"
