"""Runs that diverge: they warn, stop, leave out a step, or roll back and continue with other samples."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.helpers import fork_ranks, training_folder
from support.runs import arguments, same, steps_in, untimed, weights

from nlgrpo import train
from nlgrpo.training import learner
from nlgrpo.training.tracking.run_files import read_jsonl

REWARDS = '''
import hashlib, os
from pathlib import Path

BROKEN = Path(__file__).with_name("broken")


def digest(completions, trainer_state, **kwargs):
    """A number in [0, 1) of each text; from step 30 on -100, while the file says so, or the same for all."""
    mode = BROKEN.read_text() if trainer_state.global_step >= 30 else ""
    numbers = [int(hashlib.sha256(c.encode()).hexdigest()[:6], 16) / 2**24 for c in completions]
    return [x - 100 for x in numbers] if mode == "low" else [1.0] * len(numbers) if mode == "constant" else numbers
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    root = training_folder(tmp_path_factory.mktemp("diverging"), REWARDS)
    (root / "broken").write_text("")
    return root


@pytest.fixture
def broken(work):
    yield (work / "broken").write_text
    (work / "broken").write_text("")


def options(work, out, **more):
    shared = {"train__steps": 45, "train__checkpoint_every": 10, "train__keep_checkpoints": 9, "rollout__prompts": 2}
    return arguments(
        work, out, {"digest": "digest"}, **(shared | {"optim__lr": 0.001, "train__samples_every": 0} | more)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("low", "warning: objective/aggregate is -99.4 at step 33, outside of [-"),
        (
            "constant",
            "warning: all completions of a prompt have had the same linearised reward for 10 steps, so nothing is",
        ),
    ],
)
def test_a_run_warns_with_what_to_change_and_continues(work, broken, capsys, mode, text):
    broken(mode)
    assert train.main(options(work, f"warns {mode}")) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert line.startswith(text.split("-99")[0])
    assert line.endswith("(divergence.action)")
    assert len(read_jsonl(work / f"warns {mode}" / "metrics.jsonl")) == 45


@pytest.mark.slow
def test_no_action_is_silent(work, broken, capsys):
    broken("low")
    assert train.main(options(work, "silent", divergence__action="none")) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_run_stops_and_can_be_resumed(work, broken, capsys):
    broken("low")
    out = options(work, "stops", divergence__action="stop")
    assert train.main(out) == 2
    assert "error: objective/aggregate is -" in capsys.readouterr().err
    assert steps_in(work / "stops") == [10, 20, 30]
    broken("")
    assert train.main(out) == 0
    assert len(untimed(work / "stops")) == 45


@pytest.mark.slow
def test_a_run_rolls_back_and_draws_other_samples(work, broken, monkeypatch, capsys):
    """The reward is low from step 30 until the first rollback. Killed and resumed, the run ends in the same way."""
    plain = options(work, "plain", divergence__action="rollback", train__samples_every=1)
    assert train.main(plain) == 0
    broken("low")
    original = train.PolicyTrainer.roll_back

    def repaired(run, *given):
        original(run, *given)
        (work / "broken").write_text("")

    monkeypatch.setattr(train.PolicyTrainer, "roll_back", repaired)
    assert train.main(options(work, "rolls", divergence__action="rollback", train__samples_every=1)) == 0
    shown = capsys.readouterr()
    assert "rolled back to step 30, rollback 1" in shown.out
    assert "warning: objective/aggregate is -" in shown.err
    ours, theirs = untimed(work / "rolls"), untimed(work / "plain")
    assert [row["step"] for row in ours] == list(range(45))
    assert ours[:30] == theirs[:30]
    assert all(ours[step]["reward"] != theirs[step]["reward"] for step in range(30, 45))  # other samples
    assert ours[30]["reward"] > -1
    rows = read_jsonl(work / "rolls" / "samples.jsonl")
    assert sorted({row["step"] for row in rows}) == list(range(45))
    assert steps_in(work / "rolls") == [10, 20, 30, 40, 45]

    broken("low")
    killed = options(work, "killed", divergence__action="rollback", train__samples_every=1)
    calls, clip = [], learner.clip_gradients

    def dies(*given, **more):
        calls.append(1)
        if len(calls) == 33 + 12:  # 12 steps after the rollback, of which 10 are saved
            raise KeyboardInterrupt
        return clip(*given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(learner, "clip_gradients", dies)
        with pytest.raises(KeyboardInterrupt):
            train.main(killed)
    assert train.main(killed) == 0
    assert same(work / "killed", work / "rolls")


@pytest.mark.slow
def test_rollbacks_have_an_end(work, broken, capsys):
    broken("low")
    limits = {"divergence__action": "rollback", "divergence__rollbacks": 2}
    assert train.main(options(work, "ends", **limits)) == 2
    shown = capsys.readouterr()
    assert shown.out.count("rolled back to step 30") == 2
    assert "error: objective/aggregate is -" in shown.err
    assert "; this after 2 rollbacks (divergence.rollbacks)" in shown.err
    assert steps_in(work / "ends") == [10, 20, 30]


@pytest.mark.slow
def test_without_a_checkpoint_before_it_nothing_is_rolled_back(work, broken, capsys):
    broken("low")
    late = {"train__checkpoint_every": 40, "divergence__action": "rollback"}
    assert train.main(options(work, "late", **late)) == 2
    assert "there is no checkpoint from before step 31" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"divergence__action": "rollback", "train__checkpoint_every": 0},
            "needs checkpoints: set train.checkpoint_e",
        ),
        ({"divergence__window": 3}, "divergence.window = 3: allowed is >= 20"),
        ({"optim__skip_grad_norm": 0}, "optim.skip_grad_norm"),
    ],
)
def test_impossible_settings_are_refused(work, capsys, more, text):
    assert train.main(options(work, "refused", **more)) == 2
    assert text in capsys.readouterr().err


# --- gradients that are not finite ------------------------------------------------------------------------------------


def poisoned(at, ranks=(0,)):
    """Make a gradient NaN before the clipping number ``at``, on some ranks."""
    original, calls = learner.clip_gradients, []

    def clip(model, *given, **more):
        calls.append(1)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if len(calls) == at and rank in ranks:
            gradient = next(p.grad for p in model.parameters() if p.grad is not None)
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = math.nan
        return original(model, *given, **more)

    return clip


def test_a_step_with_a_gradient_that_is_not_finite_is_left_out(work, monkeypatch):
    few = {"train__steps": 4, "train__checkpoint_every": 0, "optim__skip_grad_norm": 1e9}
    monkeypatch.setattr(learner, "clip_gradients", poisoned(3))
    assert train.main(options(work, "skipped", **few)) == 0
    rows = read_jsonl(work / "skipped" / "metrics.jsonl")
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 0]
    assert [row["grad_norm"] is None for row in rows] == [False, False, True, False]
    assert torch.isfinite(load_file(work / "skipped" / "model" / "model.safetensors")["lm_head.weight"]).all()


@pytest.mark.slow
def test_large_gradients_are_left_out(work):
    few = {"train__steps": 3, "train__checkpoint_every": 0, "optim__skip_grad_norm": 1e-9}
    assert train.main(options(work, "large", **few)) == 0
    assert [row["skipped_steps"] for row in read_jsonl(work / "large" / "metrics.jsonl")] == [1, 1, 1]
    assert train.main(options(work, "frozen", **(few | {"optim__lr": 0.0, "optim__skip_grad_norm": 1e9}))) == 0
    assert weights(work / "large") == weights(work / "frozen")


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True])
def test_nan_on_one_rank_only(work, monkeypatch, skip):
    """Both ranks stop, or leave out the same step."""
    few = {"train__steps": 4, "train__checkpoint_every": 0} | ({"optim__skip_grad_norm": 1e9} if skip else {})
    monkeypatch.setattr(learner, "clip_gradients", poisoned(3, ranks=(1,)))
    out = f"one rank {skip}"
    ended = fork_ranks(partial(train.main, options(work, out, **few)))
    assert [end.status for end in ended] == ([0, 0] if skip else [2, 2]), ended[0].output
    rows = read_jsonl(work / out / "metrics.jsonl")
    if skip:
        assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 0]
    else:
        assert "the norm of the gradient is nan" in ended[0].output
        assert len(rows) == 2
