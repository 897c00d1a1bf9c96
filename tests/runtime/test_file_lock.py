"""Locks of folders: between processes, between machines, and on file systems without locks."""

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nlgrpo.runtime import file_lock
from nlgrpo.runtime.file_lock import Busy, FileLock, Owner

processes = multiprocessing.get_context("fork")


def without_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture(params=["flock", "none"])
def path(request, tmp_path, monkeypatch):
    """A file, on a file system with locks and on one without."""
    if request.param == "none":
        monkeypatch.setattr(file_lock.fcntl, "flock", without_locks)
    monkeypatch.setattr(file_lock, "PATIENCE", 0.7)
    monkeypatch.setattr(file_lock, "BEAT", 0.1)
    return tmp_path / "lock"


def hold(path, ready, release):
    lock = FileLock(path)
    ready.set()
    release.wait(30)
    lock.release()


@pytest.fixture
def other(path):
    """Another process that has the lock."""
    ready, release = processes.Event(), processes.Event()
    process = processes.Process(target=hold, args=(path, ready, release))
    process.start()
    assert ready.wait(20)
    process.release = release
    yield process
    process.kill()
    process.join()


def names(path):
    return sorted(entry.name for entry in path.parent.iterdir())


def test_a_process_that_has_the_lock_is_named(path, other):
    with pytest.raises(Busy, match=rf"^process {other.pid} on \S+$"):
        FileLock(path)
    other.release.set()
    other.join()
    assert names(path) == ["lock"]
    FileLock(path).release()
    assert names(path) == ["lock"]


def test_the_lock_of_a_killed_process_is_free(path, other, capsys):
    other.kill()
    other.join()
    begun = time.monotonic()
    FileLock(path).release()
    assert time.monotonic() - begun < 0.5
    assert capsys.readouterr().err == ""


def test_another_process_with_the_number_of_a_killed_one(path):
    lock = FileLock(path)
    lock.release()
    before = replace(Owner.this(), begun="1")
    lock.owner_file.write_text(json.dumps(asdict(before)))
    FileLock(path).release()


def elsewhere(path, **changes):
    """The file of an owner on another machine."""
    owner = replace(Owner.this(), host="node-7", boot="another", namespace="another", **changes)
    file = path.with_name("lock.owner")
    file.write_text(json.dumps(asdict(owner)))
    os.utime(file, ns=(0, 2**62))  # its clock is wrong
    return file


def test_an_owner_on_another_machine_that_is_alive(path, capsys):
    file, done = elsewhere(path), threading.Event()

    def beats():
        while not done.wait(0.2):
            os.utime(file)

    thread = threading.Thread(target=beats)
    thread.start()
    with pytest.raises(Busy, match=f"^process {os.getpid()} on node-7$"):
        FileLock(path)
    done.set()
    thread.join()
    assert "last used by process" in capsys.readouterr().err


def test_an_owner_on_another_machine_that_has_ended(path, capsys):
    elsewhere(path)
    begun = time.monotonic()
    lock = FileLock(path)
    assert 0.7 <= time.monotonic() - begun < 3
    assert "waiting 1 s for a sign of life" in capsys.readouterr().err
    assert json.loads(lock.owner_file.read_text())["pid"] == os.getpid()
    lock.release()


@pytest.mark.slow
def test_two_processes_that_find_a_dead_owner(path):
    """One gets the lock."""
    elsewhere(path)
    results = processes.Queue()

    def take():
        try:
            FileLock(path)
            results.put("taken")
            time.sleep(1.5)
        except Busy:
            results.put("busy")

    several = [processes.Process(target=take) for _ in range(4)]
    for process in several:
        process.start()
    found = sorted(results.get(timeout=20) for _ in several)
    for process in several:
        process.join()
    assert found == ["busy", "busy", "busy", "taken"]


def test_the_file_of_a_new_owner_stays(path, monkeypatch):
    """It was written after another process had looked at that of the ended owner, and before its removal."""
    elsewhere(path)
    monkeypatch.setattr(file_lock.fcntl, "flock", without_locks)  # both processes are this one
    locks, removed = [], []

    def beating(lock, owner, before):
        monkeypatch.setattr(FileLock, "_beating", lambda *_: False)
        locks.append(FileLock(path))
        unlink, rename = Path.unlink, os.rename
        monkeypatch.setattr(Path, "unlink", lambda file, **how: (removed.append(file), unlink(file, **how)))
        monkeypatch.setattr(file_lock.os, "rename", lambda file, to: (removed.append(file), rename(file, to)))
        return False

    monkeypatch.setattr(FileLock, "_beating", beating)
    with pytest.raises(Busy, match=f"^process {os.getpid()} on"):
        FileLock(path)
    (lock,) = locks
    assert lock.owner_file not in removed
    assert lock.beat()
    lock.release()


def test_the_right_to_remove_a_file_of_a_process_that_has_ended(path):
    file = elsewhere(path)
    path.with_name(f"lock.owner.{file.stat().st_ino}").touch()
    begun = time.monotonic()
    FileLock(path).release()
    assert time.monotonic() - begun < 5
    assert names(path) == ["lock"]


def test_the_owner_beats(path):
    lock = FileLock(path)
    before = lock._beats()
    time.sleep(0.4)
    assert lock._beats() != before
    lock.release()
    assert lock not in file_lock._beats.locks


def test_a_process_whose_lock_was_taken_ends(path):
    """It was suspended for longer than another machine waits."""
    ready = processes.Event()

    def suspended():
        lock = FileLock(path)
        ready.set()
        time.sleep(20)
        lock.release()

    process = processes.Process(target=suspended)
    process.start()
    assert ready.wait(20)
    os.kill(process.pid, signal.SIGSTOP)
    elsewhere(path)
    os.kill(process.pid, signal.SIGCONT)
    process.join(10)
    assert process.exitcode == 1


def test_old_files_of_processes_that_requested_the_lock_are_removed(path):
    old, new = path.with_name("lock.owner.old"), path.with_name("lock.owner.new")
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    FileLock(path).release()
    assert names(path) == ["lock", "lock.owner.new"]


def test_a_removed_folder_is_no_error(path):
    lock = FileLock(path)
    path.unlink()
    lock.owner_file.unlink()
    assert lock.beat() is False
    lock.release()


def test_a_damaged_file_of_an_owner(path):
    path.with_name("lock.owner").write_text("{")
    FileLock(path).release()


def test_a_file_system_without_hard_links(path, monkeypatch, other):
    def refuses(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(file_lock.os, "link", refuses)
    with pytest.raises(Busy):
        FileLock(path)
    other.release.set()
    other.join()
    FileLock(path).release()
    assert names(path) == ["lock"]


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "nowhere" / "lock")
