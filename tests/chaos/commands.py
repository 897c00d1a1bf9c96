"""The commands that are disturbed: real ones, on a tiny model, with everything that they write."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from chaos.processes import Forked, entitle
from nlgrpo import cli

REWARDS = '''
import random


def digest(completions, **columns):
    """Depends on each token."""
    return [sum((i + 1) * len(word) for i, word in enumerate(text.split())) % 7 / 7 for text in completions]


def noisy(completions, **columns):
    """Depends on the state of the random generator too."""
    return [value + random.random() / 100 for value in digest(completions)]
'''
QUESTIONS = 20
RESTARTS = 1  # of the ranks, by torchrun
RANKS_END = 12  # seconds from torchrun's SIGTERM to its SIGKILL, in place of 30; longer than any grace period here


# --- commands ---------------------------------------------------------------------------------------------------------


def flags(options: dict[str, Any]) -> list[str]:
    parts = []
    for name, value in options.items():
        parts += [f"--{name}", *([str(part) for part in value] if isinstance(value, tuple) else [str(value)])]
    return parts


def common(work: Path) -> dict[str, Any]:
    return {
        "model.path": work / "model", "model.dtype": "float64", "data.source": work / "prompts.jsonl",
        "rollout.max-new-tokens": 8, "rewards.digest.function": reward(work),
    }  # fmt: skip


def reward(work: Path, function: str = "digest") -> str:
    return f"{work / 'rewards.py'}:{function}"


def training(work: Path) -> dict[str, Any]:
    return common(work) | {
        "rollout.prompts": 4, "rollout.samples": 4, "optim.lr": 0.01, "optim.eps": 1e-4, "loss.beta": 0.05,
        "loss.target-kl": 0.01, "train.steps": 6, "train.checkpoint-every": 2, "train.samples-every": 2,
        "train.timeout": 5, "train.grace-period": 10, "evaluation.prompts": 4, "evaluation.samples": 4,
        "evaluation.ns": (1, 2), "rewards.digest.timeout": 5, "rewards.digest.function": reward(work, "noisy"),
    }  # fmt: skip


def train(work: Path, out: Path) -> int:
    return cli.main(["train", "blank", *flags(training(work) | {"train.out": out})])


def train_with_server(work: Path, out: Path) -> int:
    """A run whose rewards come from a server, which may be down."""
    url = (work / "url").read_text("utf-8")
    function = f"reward_server(url='{url}', protocol='openrlhf', retries=3, timeout=1)"
    options = {"train.out": out, "rewards.digest.function": function, "rewards.digest.timeout": 20}
    return cli.main(["train", "blank", *flags(training(work) | options)])


def sweep(work: Path, out: Path) -> int:
    """Two runs, one after another, each in a new interpreter."""
    options = {"out": out, "optim.lr": "0.01,0.02", "train.steps": 4, "evaluation.ns": "[1,2]"}
    return cli.main(["sweep", "blank", *flags(training(work) | options)])


def rollout(work: Path, out: Path) -> int:
    return cli.main(["rollout", "blank", *flags(common(work) | {"out": out, "samples": 6, "rollout.max-rows": 6})])


def iro(work: Path, out: Path) -> int:
    options = {
        "out": out, "rollout.max-rows": 24, "evaluation.prompts": 2, "iterations": 2, "samples": 8, "beams": 2,
        "successors": 2, "chunk": 2, "betas": (1.0, 0.5), "value.lr": 1e-2, "value.epochs": 2, "value.completions": 32,
        "value.held-out": 2,
    }  # fmt: skip
    return cli.main(["iro", "blank", *flags(common(work) | options)])


def responder(work: Path) -> dict[str, Any]:
    return {"model": work / "model", "dtype": "float64", "max-new-tokens": 8, "choose": reward(work)}


def generate(work: Path, out: Path) -> int:
    finished = (out / "completions.jsonl").exists()
    out.mkdir(exist_ok=True)
    options = {"source": work / "prompts.jsonl", "procedure": "bon:4", "max-rows": 8, "out": out / "completions.jsonl"}
    status = cli.main(["generate", *flags(responder(work) | options)])
    return 0 if finished else status  # it refuses to write over its result


def serve(work: Path, out: Path) -> int:
    """A server, and a client that starts it, asks for completions one after another, and stops it.

    The client keeps the answers in a file, and does not ask again, so this command resumes as the others do.
    """
    out.mkdir(exist_ok=True)
    if len(_answers(out)) == QUESTIONS:
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"procedure": "bon:2", "name": "model", "port": port, "grace": 5}
    server = Forked(lambda: cli.main(["serve", *flags(responder(work) | options)]))
    try:
        _ask_all(port, out, server)
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"error: the server does not answer: {error!r}", file=sys.stderr)
        return 1
    finally:
        if not server.ended():
            os.kill(server.pid, signal.SIGTERM)
        stopped = server.wait(30)
    return 0 if stopped and server.status == 0 else 1


def _answers(out: Path) -> list[str]:
    file = out / "answers.jsonl"
    return file.read_text("utf-8").splitlines() if file.exists() else []


def _ask_all(port: int, out: Path, server: Forked) -> None:
    done = _answers(out)
    for number in range(len(done), QUESTIONS):
        done.append(json.dumps(_ask(port, number, server)))
        (out / "answers.jsonl").write_text("".join(f"{line}\n" for line in done), "utf-8")


def _ask(port: int, number: int, server: Forked) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    while True:
        try:
            connection.connect()
            break
        except ConnectionRefusedError:  # it is starting
            if server.ended():
                raise
            time.sleep(0.05)
    body = {"model": "model", "prompt": f"w{number} w{number + 3}", "seed": number, "max_tokens": 8}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise ValueError(answer)
    return [answer["choices"][0][name] for name in ("text", "finish_reason")]


# --- several ranks ----------------------------------------------------------------------------------------------------


def on_ranks(main: Callable[[Path, Path], int], ranks: int) -> Callable[[Path, Path], int]:
    """Run ``main`` under torchrun, which restarts the ranks; they are forked instead of new interpreters."""

    def launch(work: Path, out: Path) -> int:
        def fork(_: object, __: object, environment: dict[str, str]) -> ForkedRank:
            return ForkedRank(lambda: main(work, out), environment)

        SubprocessHandler._popen = fork
        LocalElasticAgent._shutdown.__defaults__ = (signal.SIGTERM, RANKS_END)
        options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={RESTARTS}", "--monitor-interval=0.1"]
        try:
            torchrun.main([*options, "rank"])
        except (ChildFailedError, SignalException) as error:  # torchrun prints a traceback of its own
            print(f"{type(error).__name__} in torchrun", file=sys.stderr)
            return 1
        return 0

    return launch


class ForkedRank(Forked):
    """The process of a rank, with the methods of `subprocess.Popen` that torchrun's agent calls."""

    def __init__(self, main: Callable[[], int], environment: dict[str, str]) -> None:
        def run() -> int:
            os.setsid()
            os.environ |= environment
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            entitle(f"rank-{os.environ['RANK']}")
            return main()

        super().__init__(run)

    def poll(self) -> int | None:
        return self.status if self.ended() else None

    def wait(self, timeout: float) -> bool:
        if not super().wait(timeout):
            raise subprocess.TimeoutExpired("rank", timeout)
        return True
