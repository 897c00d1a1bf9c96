"""Whole runs: resumed, killed, stopped and fixed runs against undisturbed ones, and two ranks against one."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from support import random_models
from support.helpers import Forked, Job, environment, fork_ranks, run_all, tiny_model
from support.runs import arguments, assert_same_curve, same, steps_in, torchrun, untimed, weights
from transformers import AutoTokenizer

from nlgrpo import train
from nlgrpo.config.schema import Config
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.rollouts.evaluation_samples import read_evaluation
from nlgrpo.model import decoder, fsdp
from nlgrpo.model.architectures import shape_of
from nlgrpo.objectives.aggregation import WeightedSum
from nlgrpo.objectives.registry import parse
from nlgrpo.rewards.reward_functions import Scores
from nlgrpo.runtime import checkpoint, file_lock
from nlgrpo.runtime.checkpoint import folders
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training import learner, run_folder
from nlgrpo.training.global_batch import GlobalBatch
from nlgrpo.training.learner import Learner
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

REWARDS = '''
import hashlib
import random
import time
from pathlib import Path

import numpy
import torch

MODE = Path(__file__).with_name("mode")
random.seed(1), numpy.random.seed(2), torch.manual_seed(3)


def digest(completion_ids, **kwargs):
    """A number in [0, 1) that shows whether two runs drew the very same tokens."""
    return [int(hashlib.sha256(repr(ids).encode()).hexdigest()[:8], 16) / 2**32 for ids in completion_ids]


def noisy(completion_ids, **kwargs):
    """Uses every global random generator."""
    return [random.random() + numpy.random.rand() + float(torch.rand(())) for _ in completion_ids]


def slow(completion_ids, **kwargs):
    while MODE.read_text() == "hold":
        time.sleep(0.02)
    return [-abs(len(ids) - 4) / 10 for ids in completion_ids]


def fickle(completion_ids, trainer_state, **kwargs):
    """Fails at step 3 for the fifth completion, the first of the second prompt, in the way that the file names."""
    values = [-abs(len(ids) - 4) / 10 for ids in completion_ids]
    mode = MODE.read_text() if trainer_state.global_step == 3 else ""
    if mode == "raise":
        raise KeyError("no such word")
    if mode == "count":
        return values[:-1]
    values[4] = {"infinite": float("inf"), "text": "0.5"}.get(mode, values[4])
    return [float("inf")] * len(values) if mode == "all" else values


def sometimes(prompts, completion_ids, **kwargs):
    """Abstains on prompts of even length."""
    return [len(c) / 10 if len(p.split()) % 2 else None for p, c in zip(prompts, completion_ids)]
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a model, prompts and rewards."""
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "model")
    prompts = [" ".join(f"w{(3 * i + j) % 28}" for j in range(1 + i % 4)) for i in range(10)]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (root / "rewards.py").write_text(REWARDS)
    (root / "mode").write_text("")
    return root


# --- resume -----------------------------------------------------------------------------------------------------------

# every part of a run's state: all random generators, momentum, warm-up, an adaptive beta, minibatches and epochs
STATEFUL = {
    "rewards": {"short": "length(target=3, scale=10)", "noisy": "noisy"},
    "train__steps": 8,
    "train__checkpoint_every": 2,
    "optim__warmup_steps": 3,
    "loss__target_kl": 0.01,
    "loss__epochs": 2,
    "loss__minibatches": 2,
}
# optimiser steps are 4 a training step, checkpoints one every 2 training steps
KILLS = {
    "in the first step": ("nlgrpo.training.learner:clip_gradients", 2),
    "in the update of step 3": ("nlgrpo.training.learner:clip_gradients", 14),
    "while sampling in step 5": ("nlgrpo.engine.generation:CachedDecoder.begin", 6),
    "when the tensors are written": ("torch.distributed.checkpoint:save", 2),
    "before the manifest": ("nlgrpo.runtime.checkpoint.folders:write_manifest", 2),
    "before the rename": ("nlgrpo.runtime.checkpoint.folders:publish", 2),
    "before an old one goes": ("nlgrpo.runtime.checkpoint.folders:prune", 3),
    "in the log of step 6": ("nlgrpo.training.tracking.run_files:_line", 32),
    "before the export": ("nlgrpo.train:PolicyTrainer.finish", 1),
    "in the export": ("nlgrpo.model.safetensors_writer:_write_tensor", 3),
}
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


@pytest.fixture(scope="module")
def ended(work):
    """How the runs ended, by folder: an undisturbed one, and interrupted ones that resume."""
    jobs = [("whole", Job(arguments(work, "whole", **STATEFUL)))]
    for steps in (4, 8):
        jobs.append(("halves", Job(arguments(work, "halves", **(STATEFUL | {"train__steps": steps})))))
    for name, (function, at) in KILLS.items():
        jobs += [
            (name, Job(arguments(work, name, **STATEFUL), function, at)),
            (name, Job(arguments(work, name, **STATEFUL))),
        ]
    for name, number in SIGNALS.items():
        jobs.append(
            (name, Job(arguments(work, name, **STATEFUL), "nlgrpo.training.learner:clip_gradients", 18, number))
        )
        jobs.append((name, Job(arguments(work, name, **STATEFUL))))
    for _ in range(6):  # killed repeatedly until it finishes
        jobs.append(("often", Job(arguments(work, "often", **STATEFUL), "nlgrpo.training.learner:clip_gradients", 11)))
    jobs.append(("often", Job(arguments(work, "often", **STATEFUL))))
    found: dict[str, list] = {}
    for (name, _), end in zip(jobs, run_all([job for _, job in jobs]), strict=True):
        found.setdefault(name, []).append(end)
    return found


@pytest.mark.slow
def test_an_undisturbed_run(work, ended):
    assert [end.status for end in ended["whole"]] == [0]
    lines = untimed(work / "whole")
    assert [line["step"] for line in lines] == list(range(8))
    assert len({line["beta"] for line in lines}) > 4
    assert [line["learning_rate"] for line in lines[:4]] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01])
    assert steps_in(work / "whole") == [6, 8]


@pytest.mark.slow
def test_two_halves_equal_one_run(work, ended):
    assert [end.status for end in ended["halves"]] == [0, 0]
    assert "resuming from step 4" in ended["halves"][1].output
    assert same(work / "halves", work / "whole")


@pytest.mark.parametrize("name", KILLS)
@pytest.mark.slow
def test_a_killed_run_resumes_with_identical_results(work, ended, name):
    assert [end.status for end in ended[name]] == [-signal.SIGKILL, 0]
    assert ("resuming from step" in ended[name][1].output) == (name != "in the first step")
    assert same(work / name, work / "whole")
    assert not list((work / name / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_run_killed_after_its_first_evaluation_resumes_with_identical_results(work):
    """The evaluation is not repeated, so the rewards draw from another place of their generators."""
    options = STATEFUL | {"train__steps": 2, "evaluation__prompts": 2, "evaluation__samples": 4}
    whole, killed = (arguments(work, f"evaluated {name}", **options) for name in ("whole", "killed"))
    ended = run_all([Job(whole), Job(killed, "nlgrpo.training.learner:clip_gradients", 1), Job(killed)])
    assert [end.status for end in ended] == [0, -signal.SIGKILL, 0]
    assert same(work / "evaluated killed", work / "evaluated whole")


@pytest.mark.skipif(sys.platform != "linux", reason="reads names of descriptors in /proc")
def test_metrics_and_samples_are_on_the_disk_before_a_checkpoint_has_its_name(work, monkeypatch):
    synced, seen = {}, []

    def fsync(descriptor, original=os.fsync):
        original(descriptor)
        synced[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] = os.fstat(descriptor).st_size

    def publish(partial, target, original=folders.publish):
        sizes = {name: (work / "synced" / name).stat().st_size for name in ("metrics.jsonl", "samples.jsonl")}
        seen.append((target.name, len(read_jsonl(work / "synced" / "metrics.jsonl"))))
        assert sizes.items() <= synced.items()
        original(partial, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(folders, "publish", publish)
    assert train.main(arguments(work, "synced", train__steps=4, train__checkpoint_every=2)) == 0
    assert seen == [("step-00000002", 2), ("step-00000004", 4)]


@pytest.mark.slow
def test_a_run_killed_repeatedly_finishes(work, ended):
    assert [end.status for end in ended["often"]][:2] == [-signal.SIGKILL] * 2
    assert ended["often"][-1].status == 0
    assert same(work / "often", work / "whole")


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.slow
def test_a_signal_finishes_the_step_and_saves(work, ended, name):
    assert [end.status for end in ended[name]] == [0, 0]
    assert "stopped and saved at step 5; run the same command again to resume" in ended[name][0].output
    assert "resuming from step 5" in ended[name][1].output
    assert same(work / name, work / "whole")


# --- the folder of a run ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_taken(work, ended, tmp_path, capsys, caplog):
    folder = tmp_path / "run"
    shutil.copytree(work / "whole", folder)
    shutil.rmtree(folder / "model")
    largest = max((folder / "checkpoints" / "step-00000008").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    assert train.main(arguments(work, folder, **STATEFUL)) == 0
    assert "step-00000008 is damaged" in caplog.text
    assert "resuming from step 6" in capsys.readouterr().out
    assert same(folder, work / "whole")


def test_starting_a_finished_run_again(work, capsys, monkeypatch):
    options = arguments(work, "again", train__steps=2)
    assert train.main(options) == 0
    logged, exported = (work / "again" / "metrics.jsonl").read_bytes(), weights(work / "again")

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "update", lambda *a, **k: pytest.fail("a finished run trains"))
        assert train.main(options) == 0
    assert "resuming from step 2" in capsys.readouterr().out
    assert (work / "again" / "metrics.jsonl").read_bytes() == logged
    assert weights(work / "again") == exported

    assert train.main([*options, "--optim.lr", "0.02", "--rollout.samples", "6"]) == 2
    message = capsys.readouterr().err
    assert "optim.lr: 0.01 -> 0.02" in message
    assert "rollout.samples: 4 -> 6" in message
    assert "--train.restart" in message
    assert (work / "again" / "metrics.jsonl").read_bytes() == logged

    (work / "again" / "notes.txt").write_text("mine")
    assert train.main([*options, "--optim.lr", "0.02", "--train.restart"]) == 0
    assert "resuming" not in capsys.readouterr().out
    assert [line["learning_rate"] for line in untimed(work / "again")] == [0.02, 0.02]
    assert weights(work / "again") != exported
    assert (work / "again" / "notes.txt").read_text() == "mine"


def test_keys_that_may_change_on_resume(work):
    """Number of steps, micro-batches, checkpoint interval; with separate evaluation data also the evaluation."""
    assert train.main(arguments(work, "free", train__steps=1)) == 0
    changes = {"train__micro_batch_tokens": 30, "train__checkpoint_every": 1, "rollout__max_rows": 4}
    assert train.main(arguments(work, "free", train__steps=2, **changes)) == 0
    assert len(untimed(work / "free")) == 2


def test_the_number_of_steps_may_not_change_with_a_schedule(work, capsys):
    """Another number of steps would have changed the learning rates from the first step on."""
    options = {"optim__schedule": "linear", "train__checkpoint_every": 1}
    assert train.main(arguments(work, "falls", train__steps=2, **options)) == 0
    assert train.main(arguments(work, "falls", train__steps=4, **options)) == 2
    assert "train.steps: 2 -> 4" in capsys.readouterr().err


def test_the_number_of_held_out_prompts_may_not_change(work, capsys):
    """Holding out more of them would change the training prompts."""
    assert train.main(arguments(work, "held", train__steps=1)) == 0
    assert train.main(arguments(work, "held", train__steps=2, evaluation__prompts=3)) == 2
    assert "evaluation.prompts: 0 -> 3" in capsys.readouterr().err
    assert train.main(arguments(work, "held", train__steps=2, evaluation__samples=5)) == 0


HOLDS = """
import sys, time
from nlgrpo.config.schema import Config
from nlgrpo.runtime.supervision import process_group
from nlgrpo.training import run_folder

with process_group.start() as ranks:
    run_folder.claim(__import__("pathlib").Path(sys.argv[1]), Config(), ranks, free=(), restart=True)
    print("mine", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_one_process_at_a_time_uses_a_folder(work, capsys):
    options = arguments(work, "shared", train__steps=1)
    assert train.main(options) == 0
    assert train.main(options) == 0  # the same process again
    (work / "idle").mkdir()
    (work / "idle" / "config.json").write_bytes((work / "shared" / "config.json").read_bytes())
    command = [sys.executable, "-c", HOLDS, str(work / "idle")]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert other.stdout.readline() == "mine\n"
        capsys.readouterr()
        before = sorted((work / "idle").iterdir())
        for more in ([], ["--train.restart"]):
            assert train.main([*arguments(work, "idle", train__steps=1), *more]) == 2
            assert f"idle is used by process {other.pid} on" in capsys.readouterr().err
        assert sorted((work / "idle").iterdir()) == before
    finally:
        other.kill()  # releases the lock
        other.communicate()
    assert train.main([*arguments(work, "idle", train__steps=1), "--train.restart"]) == 0


def test_keys_that_did_not_exist_have_their_defaults(tmp_path):
    """The configuration of an older run lacks them, at every depth; a value other than the default is a change."""
    ranks, config = Ranks(0, 1, torch.device("cpu")), Config()
    run_folder.claim(tmp_path / "run", config, ranks, free=(), restart=False)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    for section, key in (("loss", "jeffreys"), ("loss", "beta"), ("train", "seed")):
        del saved[section][key]
    del saved["critic"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(saved))
    run_folder.claim(tmp_path / "run", config, ranks, free=(), restart=False)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["loss"]["jeffreys"] == 0.0
    (tmp_path / "run" / "config.json").write_text(json.dumps(saved))
    config.loss.jeffreys = 0.5
    with pytest.raises(ValueError, match=r"loss.jeffreys: 0.0 -> 0.5"):
        run_folder.claim(tmp_path / "run", config, ranks, free=(), restart=False)


def test_a_restart_keeps_its_lock_while_it_clears_the_folder(work, monkeypatch):
    """A folder that replaced one of this process can be claimed by another process, or by this one."""
    options = [*arguments(work, "cleared", train__steps=1), "--train.restart"]
    opened = f"open({str(work / 'cleared' / '.lock')!r}, 'ab')"
    tries = f"import fcntl; fcntl.flock({opened}, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    assert train.main(options) == 0
    faults, clear = [], run_folder._clear

    def cleared(*given):
        clear(*given)
        faults.append(subprocess.run([sys.executable, "-c", tries], capture_output=True, text=True).stderr)

    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "_clear", cleared)
        patched.setattr(file_lock.fcntl, "flock", lambda *_: pytest.fail("it was let go for an instant"))
        assert train.main(options) == 0
    assert "BlockingIOError" in faults[0]
    (work / "cleared").rename(work / "moved")
    (work / "cleared").mkdir()
    (work / "cleared" / "config.json").write_bytes((work / "moved" / "config.json").read_bytes())
    assert train.main(options) == 0
    locked = subprocess.run([sys.executable, "-c", tries], capture_output=True, text=True).stderr
    assert "BlockingIOError" in locked


def test_a_run_without_its_checkpoints_reports_that_it_restarts(work, capsys):
    options = arguments(work, "bare", train__steps=2)
    assert train.main(options) == 0
    logged, trained = untimed(work / "bare"), weights(work / "bare")
    shutil.rmtree(work / "bare" / "checkpoints")
    capsys.readouterr()
    assert train.main(options) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no checkpoint in" in said
    assert "restarting from step 0, discarding 2 logged steps" in said
    assert (untimed(work / "bare"), weights(work / "bare")) == (logged, trained)


def test_a_folder_without_a_run_is_not_changed(work, capsys):
    (work / "other").mkdir()
    (work / "other" / "thesis.tex").write_text("x")
    for extra in ([], ["--train.restart"]):
        assert train.main([*arguments(work, "other"), *extra]) == 2
        assert "holds no run; choose another folder" in capsys.readouterr().err
    assert [path.name for path in (work / "other").iterdir()] == ["thesis.tex"]
    (work / "file").write_text("x")
    assert train.main(arguments(work, "file")) == 2
    assert "holds no run" in capsys.readouterr().err
    (work / "empty").mkdir()
    assert train.main(arguments(work, "empty", train__steps=0)) == 0


# --- rewards that fail ------------------------------------------------------------------------------------------------

# The noisy one comes first: what it drew before the other failed is drawn again when the step is repeated.
FICKLE = {"rewards": {"noisy": "noisy", "fickle": "fickle", "digest": "digest"}, "train__checkpoint_every": 0}


@pytest.fixture(scope="module")
def unfailing(work):
    torch.set_num_threads(1)
    assert train.main([*arguments(work, "unfailing", **FICKLE), "--dry-run"]) == 0  # a process imports a file once,
    assert train.main(arguments(work, "unfailing", **FICKLE)) == 0  # and this one seeds the generators when it is
    return work / "unfailing"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("raise", "raised KeyError: 'no such word' (step 3, prompts 0 to 3)"),
        ("infinite", "returned inf (step 3, prompt 1, sample 0)"),
        ("text", "returned '0.5' (step 3, prompt 1, sample 0)"),
        ("count", "returned 15 values for 16 completions (step 3, prompts 0 to 3)"),
    ],
)
def test_a_failed_reward_saves_a_checkpoint_and_resumes_once_fixed(work, unfailing, capsys, mode, words):
    options = arguments(work, f"fickle {mode}", **FICKLE)
    (work / "mode").write_text(mode)
    assert train.main(options) == 2
    message = capsys.readouterr().err
    assert f"error: reward 'fickle' {words}" in message
    assert ("Traceback" in message) == (mode == "raise")
    saved = work / f"fickle {mode}" / "checkpoints" / "step-00000003"
    assert checkpoint.verify(saved) is None
    assert json.loads((saved / "state.json").read_text())["state"]["step"] == 3
    assert train.main(options) == 2  # not fixed yet
    (work / "mode").write_text("")
    assert train.main(options) == 0
    assert "resuming from step 3" in capsys.readouterr().out
    assert same(work / f"fickle {mode}", unfailing)


def test_a_reward_that_may_be_skipped_drops_its_groups(work, unfailing, capsys):
    (work / "mode").write_text("infinite")
    assert train.main([*arguments(work, "skip", **FICKLE), "--rewards.fickle.on-error", "skip"]) == 0
    (work / "mode").write_text("")
    lines, truth = untimed(work / "skip"), untimed(unfailing)
    assert [line["rewards/dropped_groups"] for line in lines] == [0, 0, 0, 1, 0]
    assert lines[:3] == truth[:3]
    assert lines[3]["completions/mean_length"] == truth[3]["completions/mean_length"]
    assert lines[3]["loss"] != truth[3]["loss"]
    assert lines[3]["objective/digest"] != truth[3]["objective/digest"]


def test_a_step_whose_groups_are_all_dropped_changes_nothing(work, capsys):
    (work / "mode").write_text("all")
    options = arguments(work, "skip all", **FICKLE, loss__target_kl=0.01, optim__weight_decay=0.1)
    assert train.main([*options, "--rewards.fickle.on-error", "skip"]) == 0
    (work / "mode").write_text("")
    lines = untimed(work / "skip all")
    assert [line["rewards/dropped_groups"] for line in lines] == [0, 0, 0, 4, 0]
    assert lines[3]["grad_norm"] == 0
    assert lines[3]["reward"] is None
    assert lines[4]["beta"] == lines[3]["beta"] != lines[2]["beta"]
    assert lines[4]["reward"] is not None


def groups_of(rewards: dict[str, list], dropped: list[bool]) -> GlobalBatch:
    values = {name: torch.tensor(r, dtype=torch.float64) for name, r in rewards.items()}
    ones = torch.ones(len(dropped), 2, dtype=torch.int64)
    rollout = Rollout([[1]] * len(dropped), ones[..., None], ones[..., None].float(), ones, ones.bool())
    return GlobalBatch.gather(Ranks(0, 1, torch.device("cpu")), Scores(values, torch.tensor(dropped)), rollout)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_dropped_groups_do_not_count(scale):
    """They affect neither the value of another reward nor the scale of the batch."""
    nan = math.nan
    ours = groups_of({"a": [[1, 3], [nan, nan], [2, 6]], "b": [[5, 4], [90, 10], [0, 1]]}, [False, True, False])
    truth = groups_of({"a": [[1, 3], [2, 6]], "b": [[5, 4], [0, 1]]}, [False, False])
    objectives = {"a": parse("bon:4"), "b": parse("mean")}
    found = []
    for groups in (ours, truth):
        linear = groups.linearize(objectives).sum(0)
        scored = groups.has_reward(objectives, torch.tensor([1.0, 2.0]))
        adv = groups.advantages(linear + 100 * groups.dropped[:, None] * torch.tensor([1.0, 2.0]), scale, scored)
        values = groups.values(objectives).nanmean(1)
        value = WeightedSum([1, 2]).value(values)
        given = (value, groups.values(objectives), groups.scores(objectives), {"a": 1.0, "b": 2.0})
        metrics = groups.metrics(*given, linear, adv, scored)
        found.append((values, adv[~groups.dropped], metrics))
    torch.testing.assert_close(found[0][:2], found[1][:2], rtol=1e-14, atol=0)
    assert found[0][2].pop("rewards/dropped_groups") == 1
    assert found[1][2].pop("rewards/dropped_groups") == 0
    assert found[1][2]["frac_reward_zero_std"] == 1 / 2
    assert found[0][2] == pytest.approx(found[1][2], nan_ok=True)


def test_a_reward_that_abstains_for_half_of_the_prompts(work):
    rewards = {"sometimes": "sometimes", "digest": "digest"}
    assert train.main(arguments(work, "abstains", rewards, train__steps=3, evaluation__prompts=4)) == 0
    samples = read_jsonl(work / "abstains" / "samples.jsonl")
    opinions = [row["rewards"]["sometimes"] for row in samples]
    assert None in opinions
    assert any(value is not None for value in opinions)
    for row in samples:
        if row["rewards"]["sometimes"] is None:
            assert row["linearized"]["sometimes"] == 0
            assert row["advantage"] == pytest.approx(row["linearized"]["digest"], abs=1e-12)
    for line in untimed(work / "abstains"):
        assert line["rewards/dropped_groups"] == 0
        assert math.isfinite(line["loss"] + line["rewards/sometimes/mean"])
    evaluated = json.loads((work / "abstains" / "evaluation.json").read_text())
    assert set(evaluated) == {"before", "after"}


def group_values(rewards: dict[str, list[float]]) -> list[float]:
    """Of one prompt: the worst of 2 in "short", the best of 4 in "digest", with the group's ranks for the CDF."""
    short, digest = (sorted(rewards[name]) for name in ("short", "digest"))
    M = len(short)
    worst = sum(r * ((1 - k / M) ** 2 - (1 - (k + 1) / M) ** 2) for k, r in enumerate(short))
    return [worst, sum(r * (((k + 1) / M) ** 4 - (k / M) ** 4) for k, r in enumerate(digest))]


AGGREGATES = {
    "min": {"loss__aggregate": "min"},
    "smooth_min with a memory": {"loss__aggregate": "smooth_min:4", "loss__aggregate_memory": 0.75},
    "smooth_min at each prompt": {"loss__aggregate": "smooth_min:4", "loss__aggregate_at": "prompt"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", AGGREGATES)
def test_objectives_of_different_kinds_are_aggregated(work, name, capsys):
    """The advantages of a step's first group follow from its linearised rewards and the logged values."""
    kinds = ["--rewards.short.objective", "wor:2", "--rewards.digest.objective", "bon:4"]
    for steps in (2, 5):  # the moving average is restored on resume
        assert train.main([*arguments(work, name, train__steps=steps, **AGGREGATES[name]), *kinds]) == 0
    plan = f"maximise {AGGREGATES[name]['loss__aggregate']} of 1 wor:2(short), 1 bon:4(digest)"
    assert plan + " at each prompt" * ("prompt" in name) + " - 0.05 KL" in capsys.readouterr().out
    lines, samples, average = untimed(work / name), read_jsonl(work / name / "samples.jsonl"), None
    for line in lines:
        rows = [row for row in samples if row["step"] == line["step"]]
        here = group_values({n: [row["rewards"][n] for row in rows] for n in ("short", "digest")})
        means = [line["objective/short"], line["objective/digest"]]
        average = means if average is None else [0.75 * a + 0.25 * b for a, b in zip(average, means, strict=True)]
        at = {"min": means, "smooth_min with a memory": average, "smooth_min at each prompt": here}[name]
        if name == "min":
            share = [float(value == min(at)) for value in at]
            assert line["objective/aggregate"] == min(means)
        else:
            raw = [math.exp(-4 * value) for value in at]
            share = [x / sum(raw) for x in raw]
            assert min(means) - 0.2 < line["objective/aggregate"] < sum(means) / 2
        for row in rows:
            asked = sum(w * row["linearized"][n] for w, n in zip(share, ("short", "digest"), strict=True))
            assert row["advantage"] == pytest.approx(asked, rel=1e-9, abs=1e-12)
    assert len(lines) == 5
    assert len({line["objective/aggregate"] for line in lines}) == 5


@pytest.mark.parametrize("objective", ["bon:4:unbiased", "wor:4:unbiased", "bon:2:unbiased"])
def test_unbiased_estimators_keep_their_own_baseline(work, objective):
    """With all four samples drawn only the chosen one has an advantage; the pipeline subtracts nothing more."""
    rewards, out = {"digest": "digest"}, work / objective.replace(":", " ")
    options = [*arguments(work, out, rewards, train__steps=3), "--rewards.digest.objective", objective]
    assert train.main([*options, "--loss.kl-in", "reward", "--loss.beta", "0"]) == 0
    samples = read_jsonl(out / "samples.jsonl")
    for step in range(3):
        rows = [row for row in samples if row["step"] == step]
        r = torch.tensor([row["rewards"]["digest"] for row in rows], dtype=torch.float64)
        ordered, truth = r.sort().values, torch.zeros(4, dtype=torch.float64)
        if objective == "bon:4:unbiased":
            truth[r.argmax()] = 4 * (ordered[3] - ordered[2])
        elif objective == "wor:4:unbiased":
            truth[r.argmin()] = -4 * (ordered[1] - ordered[0])
        else:  # what the mean of the pairs' best loses without the sample
            best = lambda x: torch.stack([torch.maximum(a, b) for a, b in itertools.combinations(x, 2)]).mean()  # noqa: E731
            truth = torch.stack([4 * (best(r) - best(torch.cat((r[:j], r[j + 1 :])))) for j in range(4)])
        torch.testing.assert_close(torch.tensor([row["advantage"] for row in rows], dtype=torch.float64), truth)


def test_the_kl_is_logged_without_a_penalty_and_changes_nothing_else(work):
    """With beta = 0, loss.log_kl_every adds the metric at every second of the five steps."""
    every_second = ["--loss.log-kl-every", "2"]
    assert train.main(arguments(work, "no kl", loss__beta=0.0)) == 0
    assert train.main([*arguments(work, "kl", loss__beta=0.0), *every_second]) == 0
    assert train.main([*arguments(work, "in reward", loss__beta=0.0), *every_second, "--loss.kl-in", "reward"]) == 0
    assert train.main(arguments(work, "tiny penalty", loss__beta=1e-30)) == 0
    without, logged, in_reward, truth = (untimed(work / n) for n in ("no kl", "kl", "in reward", "tiny penalty"))
    assert [line["step"] for line in logged if "kl" in line] == [1, 3]
    for line, other in zip(logged, truth, strict=True):
        if "kl" in line:
            assert line["kl"] == other["kl"] > 1e-6
    assert in_reward == logged
    assert [{k: v for k, v in line.items() if k != "kl"} for line in logged] == without
    assert weights(work / "no kl") == weights(work / "kl") == weights(work / "in reward")


def test_the_plan_says_that_the_kl_is_only_logged(work, capsys):
    assert train.main([*arguments(work, "planned", loss__beta=0.0), "--loss.log-kl-every", "3", "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "(KL: logged every 3 steps)" in shown
    assert re.search(r"in all phases: .*reference \d", shown)
    assert train.main([*arguments(work, "planned", loss__beta=0.0), "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "KL" not in shown.partition("objective")[2].partition("step")[0]
    assert train.main([*arguments(work, "planned", loss__beta=0.0), "--loss.log-kl-every", "-1", "--dry-run"]) == 2
    assert "loss.log_kl_every = -1: allowed is >= 0" in capsys.readouterr().err


def test_diversity_together_with_rewards(work):
    """Best-of-4, worst-of-2 and Rao's entropy in one run: advantages are those of the completions that were shown."""
    rewards = {"digest": "digest", "short": "length(target=3, scale=10)", "differ": r"equal(pattern='^\W*(\w*)')"}
    kinds = {"digest": "bon:4", "short": "wor:2", "differ": "rao"}
    options = arguments(work, "diverse", rewards, train__steps=3, evaluation__prompts=2, evaluation__samples=4)
    for name, kind in kinds.items():
        options += [f"--rewards.{name}.objective", kind]
    assert train.main([*options, "--rewards.differ.weight", "0.5", "--rewards.differ.scale", "2"]) == 0
    samples, lines = read_jsonl(work / "diverse" / "samples.jsonl"), untimed(work / "diverse")
    seen = set()
    for step in range(3):
        rows = [row for row in samples if row["step"] == step]
        starts = [re.match(r"\W*(\w*)", row["completion"])[1] for row in rows]
        share = [-2 * sum(starts[j] == starts[i] for i in range(4) if i != j) / 3 for j in range(4)]
        assert [row["rewards"]["differ"] for row in rows] == pytest.approx(share)
        linear = [2 * (c - sum(share) / 4) * 4 / (4 - 2) for c in share]
        assert [row["linearized"]["differ"] for row in rows] == pytest.approx(linear)
        for row in rows:
            x = row["linearized"]
            assert row["advantage"] == pytest.approx(x["digest"] + x["short"] + 0.5 * x["differ"], abs=1e-12)
        seen |= set(share)
        assert lines[step]["rewards/differ/mean"] == pytest.approx(lines[step]["objective/differ"])
        parts = [lines[step][f"objective/{name}"] for name in kinds]
        assert lines[step]["objective/aggregate"] == pytest.approx(parts[0] + parts[1] + 0.5 * parts[2])
    assert len(seen) > 1
    evaluated = json.loads((work / "diverse" / "evaluation.json").read_text())["after"]
    assert evaluated["objectives"] == kinds
    assert all(len(row) == 4 and max(row) <= 0 for row in evaluated["rewards"]["differ"])


@pytest.mark.parametrize(("baseline", "samples"), [("loo", 4), ("none", 4), ("none", 1)])
def test_the_baseline_can_be_chosen(work, baseline, samples):
    out = work / f"{baseline} of {samples}"
    options = arguments(
        work, out, {"digest": "digest"}, train__steps=2, loss__baseline=baseline, rollout__samples=samples
    )
    assert train.main([*options, "--rewards.digest.objective", "mean"]) == 0
    rows = read_jsonl(out / "samples.jsonl")
    for step in range(2):
        r = [row["rewards"]["digest"] for row in rows if row["step"] == step]
        ours = [row["advantage"] for row in rows if row["step"] == step]
        assert ours == pytest.approx(r if baseline == "none" else [4 / 3 * (x - sum(r) / 4) for x in r])


def test_a_distortion_from_the_users_file(work, capsys):
    (work / "rank.py").write_text("def middle(z):\n    return 6 * z * (1 - z)\n")
    options = arguments(work, "distorted", {"digest": "digest"}, train__steps=2)
    objective = f"distortion:{work / 'rank.py'}:middle"
    assert train.main([*options, "--rewards.digest.objective", objective]) == 0
    assert objective in capsys.readouterr().out.replace("\n", "").replace(" ", "")
    for line, rows in itertools.groupby(read_jsonl(work / "distorted" / "samples.jsonl"), lambda row: row["step"]):
        rows = sorted(rows, key=lambda row: row["rewards"]["digest"])
        r, w = [row["rewards"]["digest"] for row in rows], [6 * k / 4 * (1 - k / 4) for k in range(1, 5)]
        linear = [-sum(w[k] * (r[k + 1] - r[k]) for k in range(j, 3)) for j in range(4)]
        assert [row["advantage"] for row in rows] == pytest.approx([x - sum(linear) / 4 for x in linear]), line
    options[options.index("--train.out") + 1] = str(work / "none")
    assert train.main([*options, "--rewards.digest.objective", "distortion:rank.py:nothing"]) == 2
    assert "there is no file 'rank.py'" in capsys.readouterr().err


# --- ranks and micro-batches ------------------------------------------------------------------------------------------

LOADS = {
    "kl in the loss": {
        "rewards": {"slow": "slow", "digest": "digest", "differ": r"equal(pattern='^\W*(\w*)')"},
        "rewards__differ__objective": "rao",
    },
    "kl in the reward": {
        "loss__kl_in": "reward",
        "loss__minibatches": 2,
        "loss__epochs": 2,
        "loss__normalization": "grpo",
        "loss__target_kl": 0.01,
        "loss__scale": "batch",
        "evaluation__prompts": 4,
    },
}


def wait_for_steps(folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while len(read_jsonl(folder / "metrics.jsonl")) < steps:
        assert time.monotonic() < deadline, "no step in two minutes"
        time.sleep(0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("load", LOADS)
def test_micro_batches_do_not_change_the_curve(work, load):
    for micro in (16384, 1, 40):
        assert train.main(arguments(work, f"{load} {micro}", train__micro_batch_tokens=micro, **LOADS[load])) == 0
    assert len(untimed(work / f"{load} 16384")) == 5
    for micro in (1, 40):
        assert_same_curve(work / f"{load} {micro}", work / f"{load} 16384")


@pytest.mark.slow
def test_two_ranks_stopped_by_sigterm_and_resumed_equal_one(work):
    load = LOADS["kl in the loss"]
    assert train.main(arguments(work, "one rank", **load)) == 0
    options = arguments(work, "two ranks", **load)
    launcher = torchrun(2, options)
    wait_for_steps(work / "two ranks", 1)
    (work / "mode").write_text("hold")
    time.sleep(0.2)
    os.kill(launcher.pid, signal.SIGTERM)
    time.sleep(0.5)
    (work / "mode").write_text("")
    output = launcher.end().output
    # the ranks exit with 0; torchrun itself ends with an error that names the signal
    [step] = steps_in(work / "two ranks")
    assert 1 <= step < 5
    assert f"stopped and saved at step {step}" in output
    ended = torchrun(2, options).end()
    assert ended.status == 0, ended.output
    assert ended.output.count(f"resuming from step {step}") == 1  # one rank prints
    assert_same_curve(work / "two ranks", work / "one rank")
    draws = [[row["completion"] for row in read_jsonl(work / f / "samples.jsonl")] for f in ("one rank", "two ranks")]
    assert draws[0] == draws[1]


@pytest.mark.slow
def test_two_ranks_with_the_kl_in_the_reward_equal_one(work):
    load = LOADS["kl in the reward"]
    assert train.main(arguments(work, "one", train__micro_batch_tokens=40, **load)) == 0
    ended = torchrun(2, arguments(work, "two", **load)).end()
    assert ended.status == 0, ended.output
    assert_same_curve(work / "two", work / "one")
    ours, truth = (json.loads((work / f / "evaluation.json").read_text()) for f in ("two", "one"))
    assert ours == truth


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_sampling_by_block_does_not_change_a_run(work, monkeypatch, adapters):
    """Bit for bit, with an evaluation and with a reward that is calibrated on samples of the reference."""
    passes = work / "passes"
    begin = fsdp._BlockPasses.begin
    monkeypatch.setattr(fsdp._BlockPasses, "begin", lambda self: passes.touch() or begin(self))
    more = {"evaluation__prompts": 4, "rollout__max_rows": 4, "calibration__missing": "draw"}
    more |= {"calibration__samples": 3, "rewards__short__transform": "identity", "train__steps": 2}
    more |= {"lora__rank": 2} if adapters else {}
    for how in ("model", "block"):
        passes.unlink(missing_ok=True)
        options = arguments(work, f"by {how} {adapters}", parallel__gather_for_sampling=how, **more)
        ended = fork_ranks(lambda options=options: signal.alarm(120) or train.main(options))
        assert [end.status for end in ended] == [0, 0], ended[0].output
        assert passes.exists() == (how == "block")
    assert same(work / f"by block {adapters}", work / f"by model {adapters}")


def test_a_process_without_torchrun_saves_on_sigterm_and_exits_with_0(work):
    (work / "mode").write_text("hold")
    run = Forked(partial(train.main, arguments(work, "alone", **LOADS["kl in the loss"])))
    deadline = time.monotonic() + 120
    while not (work / "alone" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGTERM)
    time.sleep(0.2)
    (work / "mode").write_text("")
    ended = run.end()
    assert ended.status == 0, ended.output
    assert "stopped and saved at step 1" in ended.output
    assert steps_in(work / "alone") == [1]


def test_a_gradient_that_is_not_finite_stops_before_its_step(work, capsys, monkeypatch):
    """Neither the model nor a checkpoint may hold NaN."""
    original, calls = learner.clip_gradients, []

    def poisoned(model, max_norm, **more):
        calls.append(model)
        if len(calls) == 3:
            next(model.parameters()).grad.view(-1)[0] = math.nan
        return original(model, max_norm, **more)

    monkeypatch.setattr(learner, "clip_gradients", poisoned)
    assert train.main(arguments(work, "poisoned", **{"train.checkpoint_every": 1})) == 2
    assert "the norm of the gradient is nan" in capsys.readouterr().err
    assert not (work / "poisoned" / "model").exists()
    assert steps_in(work / "poisoned") == [1, 2]


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_creates_nothing(work, capsys, monkeypatch):
    monkeypatch.setattr(decoder, "load", lambda *a, **k: pytest.fail("a dry run loads weights"))
    before = sorted(work.iterdir())
    options = arguments(work, "dry", loss__epochs=3, loss__minibatches=2, train__steps=30)
    assert train.main([*options, "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    parameters = sum(p.numel() for p in decoder.build(decoder.read_config(work / "model")).parameters())
    assert f"{parameters:,} parameters" in shown
    assert "4 prompts x 4 samples = 16 completions of up to 10 tokens, 16 per rank; 6 optimiser steps" in shown
    assert "30 steps, 12.0 epochs; learning rate 0.01, constant schedule; AdamW" in shown
    assert train.main([*options, "--optim.algorithm", "muon", "--dry-run"]) == 0
    muon = " ".join(capsys.readouterr().out.split())
    assert "learning rate 0.01, constant schedule; Muon for the matrices of the blocks (momentum 0.95, 5" in muon
    assert re.search(r"at most about [0-9.]+ [KMG]iB, in the phase: \w+", shown)
    assert "optimizer step" in shown
    assert "maximise 1 bon:4(short) + 1 bon:4(digest) - 0.05 KL" in shown
    assert sorted(work.iterdir()) == before


def test_the_plan_shows_prompts_and_counts_those_left_out(work, tmp_path, capsys):
    """The first prompt with its ids, prompts in both sets, and evaluation prompts that do not fit."""
    long = " ".join(["w1"] * 9)
    for name, prompts in {"train": ["w1 w2", "w3", "w4", "w5"], "held": ["w4", long, "w6", long]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    more = {"data__source": tmp_path / "train.jsonl", "data__evaluation": tmp_path / "held.jsonl"}
    options = arguments(work, tmp_path / "run", **more, data__max_prompt_tokens=4, evaluation__prompts=4)
    assert train.main([*options, "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    ids = AutoTokenizer.from_pretrained(work / "model")("w1 w2")["input_ids"]
    assert f"first prompt 'w1 w2' {len(ids)} tokens: {' '.join(map(str, ids))}" in shown
    assert "3 prompts of 1 to 2 tokens; 0 dropped as too long, 0 without cut_after, 1 dropped with a held-out" in shown
    assert "evaluation 2 prompts x 16 samples; 2 dropped as too long, before and after training" in shown
    assert "clipped surrogate (PPO, GRPO)" in shown
    options = arguments(work, tmp_path / "run", **more | {"data__evaluation": ""}, evaluation__prompts=1)
    assert train.main([*options, "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 prompts x 16 samples, held out of the training data, before and after training" in shown


def test_the_table_and_the_evaluation_count_prompts_left_out(work, tmp_path, capsys):
    (tmp_path / "held.txt").write_text("w4\n" + "w1 " * 9 + "\nw6\n")
    more = {"data__evaluation": tmp_path / "held.txt", "data__max_prompt_tokens": 4, "train__steps": 1}
    options = arguments(work, tmp_path / "run", **more, evaluation__prompts=4, evaluation__samples=4)
    assert train.main(options) == 0
    counted = "2 prompts x 4 samples; 1 dropped as too long"
    assert f"before and after training ({counted}" in " ".join(capsys.readouterr().out.split())
    saved = read_evaluation(tmp_path / "run")
    assert [saved[when].size for when in ("before", "after")] == [counted] * 2


@pytest.mark.parametrize("case", random_models.CASES)
def test_the_plan_counts_the_parameters(case):
    theirs = random_models.random_model(case)
    assert shape_of(theirs.config).parameters == sum(p.numel() for p in theirs.parameters())


# --- choices that change how, and not what ----------------------------------------------------------------------------


def test_activation_checkpointing_changes_nothing(work):
    for on in (False, True):
        assert train.main(arguments(work, f"checkpointing {on}", model__activation_checkpointing=on)) == 0
    assert same(work / "checkpointing True", work / "checkpointing False")


@pytest.mark.slow
def test_compiled_blocks_train_the_same_and_may_be_chosen_when_resuming(work):
    """By the default compiler. A run that started without them may resume with them."""
    assert train.main(arguments(work, "as written", **LOADS["kl in the loss"])) == 0
    for name, steps in (("compiled", (None,)), ("compiled later", (2, None))):
        for i, until in enumerate(steps):
            options = LOADS["kl in the loss"] | ({} if until is None else {"train__steps": until})
            options |= {"model__compile": name == "compiled" or i == 1}
            assert train.main(arguments(work, name, **options)) == 0
        assert_same_curve(work / name, work / "as written")


def test_bfloat16_runs_on_a_cpu_and_goes_on(work):
    assert train.main(arguments(work, "float32", model__dtype="float32", train__steps=2)) == 0
    for steps in (1, 2):
        assert train.main(arguments(work, "bfloat16", model__dtype="bfloat16", train__steps=steps)) == 0
    one, two = untimed(work / "bfloat16"), untimed(work / "float32")
    assert [line["step"] for line in one] == [0, 1]
    assert one[0]["entropy"] == pytest.approx(two[0]["entropy"], rel=0.1)
    exported = decoder.hf_weights.locate(str(work / "bfloat16" / "model"))
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_adaptive_beta_follows_the_kl(work):
    target = 0.02
    assert train.main(arguments(work, "beta", loss__target_kl=target, train__steps=6)) == 0
    lines = untimed(work / "beta")
    assert lines[0]["beta"] == 0.05
    assert {math.copysign(1, line["kl"] - target) for line in lines[:-1]} == {-1, 1}
    for line, after in itertools.pairwise(lines):
        error = min(max(line["kl"] / target - 1, -0.2), 0.2)
        assert after["beta"] == pytest.approx(line["beta"] * (1 + 0.1 * error), rel=1e-12)
