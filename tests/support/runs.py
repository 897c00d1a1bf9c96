"""Training runs on a tiny model: their arguments, and comparisons of what they leave."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from chaos import commands
from support.helpers import Forked

from nlgrpo import train
from nlgrpo.training.tracking.run_files import read_jsonl


def arguments(work: Path, out: str | Path, rewards: dict[str, str] | None = None, **changes) -> list[str]:
    """Arguments of a run in the folder ``out``; ``changes`` has __ for dots, a reward is its function and options."""
    options = {
        "model.path": work / "model",
        "model.dtype": "float64",
        "data.source": work / "prompts.jsonl",
        "rollout.prompts": 4,
        "rollout.samples": 4,
        "rollout.max_new_tokens": 10,
        "optim.lr": 0.01,
        "optim.eps": 1e-4,
        "loss.beta": 0.05,
        "train.steps": 5,
        "train.samples_every": 1,
        "evaluation.prompts": 0,
        "train.out": work / out,
    }
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    for name, function in (rewards or {"short": "length(target=3, scale=10)", "digest": "digest"}).items():
        options.setdefault(f"rewards.{name}.objective", "bon:4")
        options[f"rewards.{name}.function"] = function if "(" in function else f"{work / 'rewards.py'}:{function}"
    parts = []
    for name, value in options.items():
        if value is False:
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        parts += [f"--{name}", *map(str, values)]
    return ["blank", *parts]


def torchrun(ranks: int, options: list[str]) -> Forked:
    """Train under torchrun, in processes forked from this one."""
    launch = commands.on_ranks(lambda *_: train.main(options), ranks)
    return Forked(partial(launch, work=None, out=None))


def untimed(folder: Path, *names: str) -> list[dict]:
    """The lines of metrics.jsonl without timings, or with the given metrics only."""
    timed = re.compile(r"time/|step_time|perf/")
    lines = read_jsonl(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if (k in names if names else not timed.match(k))} for line in lines]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def same(folder: Path, truth: Path) -> bool:
    assert untimed(folder) == untimed(truth)
    return weights(folder) == weights(truth)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def assert_same_curve(folder: Path, truth: Path) -> None:
    """To 1e-9; the sampler's own log-probs are float32, and compared with those of the trainer."""
    ours, theirs = untimed(folder), untimed(truth)
    assert len(ours) == len(theirs)
    for line, expected in zip(ours, theirs, strict=True):
        assert line.keys() == expected.keys()
        for name, value in expected.items():
            loose = name.startswith("sampling/")
            assert line[name] == pytest.approx(value, rel=1e-2 if loose else 1e-9, abs=1e-6 if loose else 1e-12), name
