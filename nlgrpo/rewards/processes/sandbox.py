"""Runs a program with limits and without a network. Standard library only: ``python -I -S sandbox.py LIMITS PROGRAM``.

It is a process of its own, because namespaces and limits are set for the process that asks for them. On Linux with user
namespaces and Landlock (kernel 5.13 or newer).
"""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

NOT_ISOLATED = 97  # exit status
NEW_USER = 0x10000000
NEW_NET = 0x40000000
NEW_PID = 0x20000000
NEW_IPC = 0x08000000
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
# system calls, the same on all architectures
LANDLOCK_CREATE = 444
LANDLOCK_ADD = 445
LANDLOCK_RESTRICT = 446
# Of seccomp filters: instructions, and for each machine its audit number, the number of clone, and those of the calls
# that are forbidden: fork, vfork, and those that change the mode, owner, times or attributes of a file.
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
RETURN = 0x06
NEW_THREAD = 0x00010000
NUMBERS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        56,
        (57, 58, 90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452),
    ),
    "aarch64": (0xC00000B7, 220, (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88, 452)),
}
READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a directory

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Call libc. Raises OSError."""
    result = int(getattr(libc, name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def isolate() -> None:
    """Continue in new namespaces, as process 1 of one without a network; this process waits and returns its status."""
    call("unshare", NEW_USER | NEW_NET | NEW_PID | NEW_IPC)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # all processes of a namespace end with its first one


def write_only_in(folder: str) -> None:
    """Allow to read everywhere and to write in ``folder`` and to /dev/null only (Landlock)."""
    version = call("syscall", LANDLOCK_CREATE, None, 0, 1)
    every = (1 << (13 if version == 1 else 14 if version == 2 else 15 if version < 5 else 16)) - 1
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    attributes = struct.pack("Q", every)
    rules = call("syscall", LANDLOCK_CREATE, attributes, len(attributes), 0)
    for path, access in (("/", READ), (folder, every), ("/dev/null", READ & ~(1 << 3) | 1 << 1)):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = access if os.path.isdir(path) else access & (1 << 0 | 1 << 1 | 1 << 2)
        call("syscall", LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed & every, place), 0)
        os.close(place)
    call("syscall", LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def forbid_calls() -> None:
    """Forbid (seccomp) new processes, but not threads, because a fork bomb of root cannot be limited in another way.

    Also forbid changes of modes, owners, times and attributes of files, which Landlock allows.
    """
    machine = os.uname().machine
    if machine not in NUMBERS:
        raise OSError(errno.ENOSYS, f"not available on {machine}")
    audit, clone, forbidden = NUMBERS[machine]
    steps: list[tuple[int, int, str, str]] = [  # code, value, label if true, label if false
        (LOAD, 4, "", ""), (EQUAL, audit, "", "deny"),  # another kind of system calls
        (LOAD, 0, "", ""), (AT_LEAST, 0x40000000, "deny", ""),  # x32
        *((EQUAL, number, "deny", "") for number in forbidden),
        (EQUAL, 435, "absent", ""),  # clone3: libraries then use clone
        (EQUAL, clone, "", "allow"), (LOAD, 16, "", ""), (ANY_BIT, NEW_THREAD, "allow", "deny"),
    ]  # fmt: skip
    ends = {"allow": 0x7FFF0000, "deny": 0x00050000 | errno.EPERM, "absent": 0x00050000 | errno.ENOSYS}
    places = {name: len(steps) + i for i, name in enumerate(ends)} | {"": 0}
    code = b""
    for i, (kind, value, yes, no) in enumerate(steps):
        code += struct.pack("HBBI", kind, max(places[yes] - i - 1, 0), max(places[no] - i - 1, 0), value)
    for value in ends.values():
        code += struct.pack("HBBI", RETURN, 0, 0, value)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_SECCOMP, 2, program, 0, 0)


def limit(seconds: int, memory: int) -> None:
    """Limit processor time, memory per process (bytes), sizes of files, open files, processes, and core files."""
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 16 * 2**20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def main() -> None:
    options = json.loads(sys.argv[1])
    program = sys.argv[2]
    if options["isolated"]:
        try:
            isolate()
            write_only_in(os.path.dirname(program))
            forbid_calls()
        except OSError as error:
            print(error, file=sys.stderr)
            os._exit(NOT_ISOLATED if error.errno != errno.ENOMEM else 1)
    limit(options["seconds"], options["memory"])
    os.execv(sys.executable, [sys.executable, "-I", "-B", program])  # nosec B606  # in the sandbox


if __name__ == "__main__":
    main()
