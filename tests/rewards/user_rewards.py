"""Reward functions of a user, for tests of those with a process of their own."""

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time

CALLS = []


def lengths(completions, **_):
    return [float(len(text)) for text in completions]


def generated(completions):
    return (float(len(text)) for text in completions)


async def later(completions, answer):
    await asyncio.sleep(0.01)
    return [float(a) for a in answer]


def alarmed(completions, **_):
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [float(threading.current_thread() is threading.main_thread())] * len(completions)
    except ValueError:
        return [0.0] * len(completions)


def process(completions, **_):
    return [float(os.getpid())] * len(completions)


def counted(completions, **_):
    CALLS.append(None)
    return [float(len(CALLS))] * len(completions)


def logs(completions, log_metric, log_extra, trainer_state):
    log_metric("steps", trainer_state.global_step)
    log_extra("upper", [text.upper() for text in completions])
    print("printed by the reward")
    print("complained by the reward", file=sys.stderr)
    return [0.0, None, float("nan"), 1.0]


def fails(completions, **_):
    raise KeyError("gold")


def exits(completions, **_):
    os._exit(3)


def hangs_in_c(completions, answer, **_):
    if "hang" in answer:
        ctypes.PyDLL(None).pthread_mutex_lock(LOCKED)
    return [float(len(text)) for text in completions]


def swallows(completions, **_):
    while True:
        try:  # noqa: SIM105
            time.sleep(600)
        except:  # noqa: E722
            pass


def reads(completions, **_):
    return [float(len(sys.stdin.read()))] * len(completions)


def alike(completions, samples):
    return [[1.0] * samples] * len(completions)


class Voted:
    data_columns = ("answer",)

    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, completions, **columns):
        return [self.scale * (text == gold) for text, gold in zip(completions, columns["answer"], strict=True)]

    def answer(self, text):
        return text[:1] or None


LOCKED = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(LOCKED)
