"""A file of lines that is written in parts, complete or absent, and resumed after a kill."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO

from nlgrpo.runtime.atomic_files import atomic_write_bytes, into


class LineFile:
    """Writes lines into ``FILE.partial``, and renames the content to ``FILE`` when the context ends without an error.

    The first line of ``FILE.partial`` is the ``identity`` of the work. If it is the same, the complete lines that are
    there are kept, and ``len`` is their number; otherwise the file starts anew. Raises ValueError if ``path`` exists,
    and if a file cannot be written.
    """

    def __init__(self, path: Path, identity: str) -> None:
        if path.exists():
            raise ValueError(f"{path} exists; remove it or choose another file")
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        first = identity.encode() + b"\n"
        with into(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            found = self.partial.read_bytes() if self.partial.exists() else b""
            kept = found[: found.rfind(b"\n") + 1] if found.startswith(first) else first
            self.file: IO[bytes] = self.partial.open("r+b" if found else "w+b")
            self.file.write(kept)
            self.file.truncate()
        self.start, self.lines = len(first), kept.count(b"\n") - 1

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
            self.file.seek(self.start)
            content = self.file.read() if kind is None else b""
            self.file.close()
        if kind is None:
            atomic_write_bytes(self.path, content)
            self.partial.unlink()
