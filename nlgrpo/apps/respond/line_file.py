"""A file of lines that is written in parts, complete or absent, and resumed after a kill."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO

from nlgrpo.errors import UserError
from nlgrpo.runtime.atomic_files import atomic_write_bytes, into


class LineFile:
    """Writes lines into ``FILE.partial``, and renames the content to ``FILE`` when the context ends without an error.

    The first line of ``FILE.partial`` is the ``identity`` of the work. The complete lines that are there are kept, up
    to a multiple of ``together``, and ``len`` is their number. The file is locked while it is open. Raises UserError
    if ``path`` exists, if ``FILE.partial`` belongs to other work or another process, and if a file cannot be written.
    """

    def __init__(self, path: Path, identity: str, together: int = 1) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        if path.exists():
            self._remove_leftover()
            raise UserError(f"{path} exists; remove it or choose another file")
        first = identity.encode() + b"\n"
        with into(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file: IO[bytes] = self.partial.open("a+b")
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.file.close()
                raise UserError(
                    f"another process is writing {path}; wait until it ends, or choose another file"
                ) from None
            self.file.seek(0)
            found = self.file.read()
            if b"\n" in found and not found.startswith(first):
                self.file.close()
                raise UserError(
                    f"{self.partial} has results of other options, prompts, models or another version; remove it or "
                    "choose another file"
                )
            lines = found[len(first) :].split(b"\n")[:-1] if found.startswith(first) else []
            lines = lines[: len(lines) // together * together]
            self.file.truncate(len(first) + sum(len(line) + 1 for line in lines) if found.startswith(first) else 0)
            if not found.startswith(first):
                self.file.write(first)
                self.file.flush()
        self.start = len(first)
        self.lines = len(lines)

    def _remove_leftover(self) -> None:
        """Remove the partial file of work that was killed just after it had written its result."""
        with contextlib.suppress(OSError):
            if self.partial.read_bytes().partition(b"\n")[2] == self.path.read_bytes():
                self.partial.unlink()

    def __len__(self) -> int:
        return self.lines

    def add(self, lines: Iterable[str]) -> None:
        """Append lines, none of which contains a line break."""
        rows = [line.encode() + b"\n" for line in lines]
        with into(self.path.parent):
            self.file.write(b"".join(rows))
            self.file.flush()
        self.lines += len(rows)

    def __enter__(self) -> LineFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with into(self.path.parent):
            if kind is None:
                self.file.seek(self.start)
                atomic_write_bytes(self.path, self.file.read())
                self.partial.unlink(missing_ok=True)  # another process may have found it to be a leftover
            self.file.close()
