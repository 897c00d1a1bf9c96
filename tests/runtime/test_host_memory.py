"""Return of freed memory to the system, in processes of their own."""

import subprocess
import sys

import pytest

from nlgrpo.runtime import host_memory

needs_glibc = pytest.mark.skipif(host_memory._glibc() is None, reason="the C library is not glibc 2.33 or later")
MIB = 2**20
# Blocks below the size that glibc maps on its own; the last one stays, so that the heap cannot shrink.
PROGRAM = """
import ctypes
from nlgrpo.runtime import host_memory
blocks = [bytearray(100_000) for _ in range({blocks})]
last = blocks[-1]
del blocks
before = host_memory.of_process()
host_memory.release()
print(before - host_memory.of_process())
"""


def returned(blocks):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocks=blocks)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@needs_glibc
def test_freed_memory_is_returned():
    assert returned(4000) > 350 * MIB


@needs_glibc
def test_little_memory_is_kept():
    assert returned(100) < MIB


def test_another_c_library_is_left_alone(monkeypatch):
    host_memory._glibc.cache_clear()
    monkeypatch.setattr(host_memory.sys, "platform", "darwin")
    try:
        assert host_memory._glibc() is None
        host_memory.release()
    finally:
        monkeypatch.undo()
        host_memory._glibc.cache_clear()
