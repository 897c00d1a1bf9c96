"""What long work shows: a live bar in a terminal, lines in a log file, nothing in a pipe."""

import os
import pty
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from support.helpers import environment

from nlgrpo.config.schema import Config, EvaluationConfig
from nlgrpo.engine.generation import RolloutRequest, sample_rollout
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import decoder
from nlgrpo.model.hf_weights import locate
from nlgrpo.runtime import progress
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.work_queue import WorkQueue
from nlgrpo.training import evaluation

COUNT_SLOWLY = """
import sys
from rich.console import Console
from nlgrpo.runtime import progress
progress.LINE_EVERY = 0.0
for item in progress.track("abc", "letters", 3, Console()):
    print(item, end=",")
"""


def count(stdout, **variables):
    done = subprocess.run(
        [sys.executable, "-c", COUNT_SLOWLY], stdout=stdout, stderr=subprocess.PIPE, env=environment() | variables
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout, [line.rpartition("  ")[0] for line in done.stderr.decode().splitlines()]


def test_a_log_file_has_a_line_every_thirty_seconds(monkeypatch, capsys):
    now = iter([0.0, 10.0, 40.0, 50.0, 90.0, 100.0])  # the beginning, and when each of five pieces was done
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    queue = WorkQueue(Ranks(0, 1, torch.device("cpu")), Console(width=80))
    assert queue.work("letters", "abcde", lambda piece: None)
    assert capsys.readouterr().out.splitlines() == [
        "letters  2/5  1:00 left  0.05/s",
        "letters  4/5  0:22 left  0.0444/s",
    ]


def test_a_pipe_has_none(tmp_path):
    """Its lines go to the standard error, which a container or a cluster keeps too."""
    assert count(subprocess.PIPE, FORCE_COLOR="1") == (
        b"a,b,c,",
        ["letters  1/3  0:00 left", "letters  2/3  0:00 left"],
    )
    with (tmp_path / "log").open("wb") as log:
        count(log)
    assert "letters  2/3  0:00 left" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("notebook", [False, True])
def test_a_terminal_has_a_live_bar_and_a_notebook_none(notebook):
    """A notebook gives a command a terminal too."""
    ours, theirs = pty.openpty()
    try:
        count(theirs, TERM="xterm-color", **({"JPY_PARENT_PID": "1"} if notebook else {}))
        os.set_blocking(ours, False)
        shown = os.read(ours, 100_000)
    finally:
        os.close(ours)
        os.close(theirs)
    hides_the_cursor = b"\x1b[?25l" in shown
    assert hides_the_cursor != notebook
    assert b"3/3" in shown or notebook


def test_an_engine_reports_the_completions_that_are_finished():
    model = decoder.load(locate("story-lm"))
    done = []
    request = RolloutRequest([[1, 50]] * 5, 2, Sampling(max_new_tokens=2), max_rows=4, on_progress=done.append)
    sample_rollout(model, request)
    assert done[-1] == 10
    assert {4, 8} <= set(done)  # after each batch of rows
    assert done == sorted(done)


def test_completions_that_end_early_are_counted_while_others_are_sampled():
    model = decoder.load(locate("story-lm"))
    done = []
    sampling = Sampling(max_new_tokens=100, stop_ids=(2,))
    rollout = sample_rollout(model, RolloutRequest([[1, 50]], 64, sampling, on_progress=done.append))
    assert done == sorted(done)
    assert len(set(done)) > 5  # a part of the rows at a time
    assert done[-1] == 64
    assert rollout.finished.any()


@pytest.mark.parametrize(("world", "shown"), [(1, [5, 12]), (2, [10, 12])])
def test_an_evaluation_shows_the_completions_of_all_ranks(world, shown, monkeypatch):
    seen = []

    @contextmanager
    def recorded(what, total, console):
        assert (what, total) == ("completions sampled", 12)
        yield seen.append

    def sampled(sampler, *others):
        for finished in (5, 12):
            sampler.on_progress(finished)
        return EvaluationSamples({"r": torch.zeros(1, 1)}, torch.ones(1, 1), {"r": "mean"}, {"r": 1.0}, 1)

    monkeypatch.setattr(evaluation, "progress", recorded)
    monkeypatch.setattr(evaluation.evaluation_samples, "evaluate", sampled)
    setup = SimpleNamespace(
        config=Config(evaluation=EvaluationConfig(prompts=4, samples=3)),
        ranks=SimpleNamespace(first=True, world=world),
        evaluation_sets={
            "": SimpleNamespace(
                name="",
                batch=SimpleNamespace(ids=range(4)),
                sampler=Sampler(None, Sampling(), 3, None, 0, ()),
                left_out={},
            )
        },
        objective=SimpleNamespace(objectives={}, weights={}),
    )
    evaluation.evaluate(setup, None, "before training")
    assert seen == shown
