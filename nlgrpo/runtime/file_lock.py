"""Locks of folders and files that one process may use at a time, also on network file systems.

The system's lock (flock) is exact where it works: on a local disk, and on NFS between the processes of all clients,
unless the file system is mounted without a lock manager. Some file systems have no locks, or locks of one machine only.
So the process that has the lock also writes who it is into ``NAME.owner``, and changes the time of this file every few
seconds. A process on another machine that finds such a file waits for longer than that: if the time changes, the owner
is alive; if not, it has ended without removing its file. Clocks of machines are not compared.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NoReturn

from nlgrpo.runtime.supervision.watchdog import begun, boot, namespace

BEAT = 10.0  # seconds between changes of the owner's file
PATIENCE = 35.0  # seconds without a change after which an owner on another machine has ended
FORGOTTEN = 3600.0  # age of a file of a process that requests a lock, which takes milliseconds


class Busy(Exception):  # not an error by itself
    """Another process has the lock; the text says which."""


@dataclass(frozen=True)
class Owner:
    """A process, as `nlgrpo.runtime.supervision.watchdog` names it, and this use of the lock."""

    host: str
    boot: str
    namespace: str
    pid: int
    begun: str
    id: str

    @classmethod
    def this(cls) -> Owner:
        pid = os.getpid()
        return cls(socket.gethostname(), boot(), namespace(), pid, begun(pid), uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FileLock:
    """The lock of ``path``, a file that is created. Raises Busy if another process has it, and OSError as `open` does.

    It is kept until `release` or the end of the process. A process that was suspended for so long that another machine
    has taken its lock ends when it notices.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.owner_file = path.with_name(path.name + ".owner")
        self.file: IO[bytes] = path.open("ab")
        self.me = Owner.this()
        try:
            locked = self._flock()
            while not self._claim():
                self._displace(locked)
            self._tidy()
        except BaseException:
            self.file.close()
            raise
        _beats.add(self)

    def release(self) -> None:
        """Give the lock back. Does nothing in a forked process."""
        if _beats.remove(self) and self.me.pid == os.getpid():
            with contextlib.suppress(OSError):
                if self._found() == self.me:
                    self.owner_file.unlink()
        self.file.close()

    def beat(self) -> bool:
        """Say that this process is alive. Returns False if the lock is no longer its own."""
        try:
            if not os.path.samestat(os.fstat(self.file.fileno()), self.path.stat()):
                return False  # the folder has been replaced
            found = self._found()
            if found == self.me:
                os.utime(self.owner_file)
        except FileNotFoundError:  # the folder was removed
            return False
        except OSError:  # the disk does not answer now
            return True
        if found is not None and found != self.me:
            _end(f"error: {found} has taken {self.path.parent}, while this process was suspended")
        return found == self.me

    def _flock(self) -> bool:
        """Take the lock of the system; returns False where there is none."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = self._found()
            raise Busy("another process" if found is None else str(found)) from None
        except OSError:
            return False
        return True

    def _claim(self) -> bool:
        """Write the owner's file; returns False if there is one. `os.link` is atomic on NFS too."""
        mine = self.owner_file.with_name(f"{self.owner_file.name}.{self.me.id}")
        try:
            mine.write_text(json.dumps(asdict(self.me)), "utf-8")
            os.link(mine, self.owner_file)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links, or a full one
            return self._create()
        finally:
            mine.unlink(missing_ok=True)
        return True

    def _tidy(self) -> None:
        """Remove files of processes that ended, or whose disk failed, while they requested the lock."""
        with contextlib.suppress(OSError):
            now = self.owner_file.stat().st_mtime  # in the clock of the file system
            for path in self.path.parent.glob(f"{self.owner_file.name}.*"):
                if now - path.stat().st_mtime > FORGOTTEN:
                    path.unlink()

    def _create(self) -> bool:
        try:
            file = self.owner_file.open("x", encoding="utf-8")
        except FileExistsError:
            return False
        try:
            with file:
                json.dump(asdict(self.me), file)
        except OSError:
            self.owner_file.unlink()
            raise
        return True

    def _found(self) -> Owner | None:
        try:
            return Owner(**json.loads(self.owner_file.read_text("utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _displace(self, locked: bool) -> None:
        """Remove the owner's file of a process that has ended. Raises Busy if it runs."""
        before = self._beats()
        owner = self._found()
        me = self.me
        if owner is not None and me.boot and owner.boot == me.boot and locked:
            alive = False  # on one machine, the lock of the system is exact
        elif owner is not None and me.namespace and owner.namespace == me.namespace:
            alive = begun(owner.pid) == owner.begun
        else:
            alive = self._beating(owner, before)
        if alive:
            raise Busy("another process" if owner is None else str(owner))
        if before is not None:
            self._remove(before)

    def _remove(self, before: tuple[int, int]) -> None:
        """Remove the owner's file if it is still that of ``before``.

        Between the look at a file and its removal, another process may remove it and write its own. So a process first
        creates a file that only one can create, which gives it the right to remove this one.
        """
        right = self.owner_file.with_name(f"{self.owner_file.name}.{before[0]}")
        try:
            right.open("x").close()
        except FileExistsError:
            self._wait_for_removal(right)
            return
        try:
            if self._beats() == before:
                self.owner_file.unlink()
        finally:
            right.unlink(missing_ok=True)

    def _wait_for_removal(self, right: Path) -> None:
        """Wait until another process has removed the owner's file. Take its right away if it has ended meanwhile."""
        until = time.monotonic() + PATIENCE
        while right.exists():
            if time.monotonic() >= until:
                right.unlink(missing_ok=True)
            time.sleep(PATIENCE / 350)

    def _beating(self, owner: Owner | None, before: tuple[int, int] | None) -> bool:
        """Whether an owner that this machine cannot see changes the time of its file."""
        who = "another process" if owner is None else owner
        print(f"{self.path.parent} was last used by {who}; waiting {PATIENCE:.0f} s for a sign of life",
              file=sys.stderr, flush=True)  # fmt: skip
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            time.sleep(PATIENCE / 35)
            if (now := self._beats()) != before:
                return now is not None
        return False

    def _beats(self) -> tuple[int, int] | None:
        """Return inode and time of the owner's file; opening it makes NFS ask the server."""
        try:
            with self.owner_file.open("rb") as file:
                status = os.fstat(file.fileno())
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns


def _end(message: str) -> NoReturn:
    """End this process, whose threads may still write."""
    try:
        print(message, file=sys.stderr, flush=True)
    finally:  # the terminal may be gone
        os._exit(1)


class _Beats:
    """One thread for all locks of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Have no locks; in a forked process they are the parent's, as is the thread."""
        self.locks: list[FileLock] = []
        self.guard = threading.Lock()
        self.added = threading.Event()
        self.thread: threading.Thread | None = None

    def add(self, lock: FileLock) -> None:
        with self.guard:
            self.locks.append(lock)
            self.added.set()
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, daemon=True, name="nlgrpo-locks")
                self.thread.start()

    def remove(self, lock: FileLock) -> bool:
        with self.guard:
            if lock not in self.locks:
                return False
            self.locks.remove(lock)
            return True

    def _run(self) -> None:
        while True:
            self.added.wait(BEAT)
            self.added.clear()
            with self.guard:  # a lock is not released meanwhile
                self.locks = [lock for lock in self.locks if lock.me.pid != os.getpid() or lock.beat()]

    def release(self) -> None:
        for lock in list(self.locks):
            lock.release()


_beats = _Beats()
atexit.register(_beats.release)
os.register_at_fork(after_in_child=_beats.forget)
