"""Metrics against TRL's definitions in NumPy and names in its source; a run's files through kills and resumes."""

import importlib.util
import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from nlgrpo.runtime.atomic_files import atomic_write
from nlgrpo.training.global_batch import rollout_metrics
from nlgrpo.training.tracking import terminal
from nlgrpo.training.tracking.logger import MetricsLogger
from nlgrpo.training.tracking.run_files import TAIL, last_step, read_jsonl
from nlgrpo.training.tracking.terminal import Sample, phase_shares, samples_table


def rollouts(prompts=5, samples=4, abstain=0.0, seed=0):
    generator = np.random.default_rng(seed)
    rewards = {name: generator.normal(size=(prompts, samples)) for name in ("short", "long")}
    for values in rewards.values():
        values[generator.random(values.shape) < abstain] = np.nan
    lengths = generator.integers(1, 30, (prompts, samples))
    return rewards, {"short": 0.25, "long": 2.0}, lengths, generator.random((prompts, samples)) < 0.7


def ours(rewards, weights, lengths, finished):
    tensors = {name: torch.tensor(values) for name, values in rewards.items()}
    return rollout_metrics(tensors, weights, torch.tensor(lengths), torch.tensor(finished))


def trl(rewards, weights, lengths, finished):
    """The definitions of TRL 1.16.0 (``_generate`` and ``_generate_and_score_completions``), in NumPy."""
    table = np.stack([values.ravel() for values in rewards.values()], axis=1)
    total = np.nansum(table * np.array([weights[name] for name in rewards]), axis=1)
    total[np.isnan(table).all(axis=1)] = np.nan
    group_std = np.nanstd(total.reshape(lengths.shape), axis=1, ddof=1)
    ended = lengths[finished] if finished.any() else np.zeros(1)
    names = {f"rewards/{name}/mean": np.nanmean(values) for name, values in rewards.items()}
    names |= {f"rewards/{name}/std": np.nanstd(values, ddof=1) for name, values in rewards.items()}
    return names | {
        "reward": np.nanmean(total),
        "reward_std": np.nanstd(total, ddof=1),
        "frac_reward_zero_std": np.isclose(group_std, 0, rtol=0, atol=1e-8).mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": (~finished).mean(),
        "completions/mean_terminated_length": ended.mean(),
        "completions/min_terminated_length": ended.min(),
        "completions/max_terminated_length": ended.max(),
    }


@pytest.mark.parametrize("abstain", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_rollout_metrics_are_trl_s(seed, abstain):
    case = rollouts(abstain=abstain, seed=seed)
    assert ours(*case) == pytest.approx(trl(*case), rel=1e-12, abs=1e-12)


def test_groups_of_equal_rewards_are_counted():
    rewards, weights, lengths, finished = rollouts()
    for values in rewards.values():
        values[:2] = 0.1
    metrics = ours(rewards, weights, lengths, finished)
    assert metrics["frac_reward_zero_std"] == 2 / 5 == trl(rewards, weights, lengths, finished)["frac_reward_zero_std"]
    single = {name: values[:, :1] for name, values in rewards.items()}
    assert ours(single, weights, lengths[:, :1], finished[:, :1])["frac_reward_zero_std"] == 1


def test_nothing_finished_and_everything_abstained():
    rewards, weights, lengths, finished = rollouts()
    metrics = ours(rewards, weights, lengths, np.zeros_like(finished))
    assert metrics["completions/clipped_ratio"] == 1
    assert metrics["completions/mean_terminated_length"] == 0
    rewards["short"][:] = np.nan
    metrics = ours(rewards, weights, lengths, finished)
    assert math.isnan(metrics["rewards/short/mean"])
    assert metrics["reward"] == pytest.approx(2 * rewards["long"].mean())
    rewards["long"][:] = np.nan
    metrics = ours(rewards, weights, lengths, finished)
    assert math.isnan(metrics["reward"])
    assert math.isnan(metrics["reward_std"])
    assert math.isnan(metrics["frac_reward_zero_std"])


def test_abstentions_count_in_no_metric():
    """Groups without two rewards are in no share, and a reward of weight 0 does not stand in for one that abstains."""
    nan = np.nan
    rewards = {"judge": np.array([[1.0, 2.0, 6.0, nan], [4.0, 4.0, nan, nan], [nan] * 4, [5.0, nan, nan, nan]])}
    lengths, finished = np.ones((4, 4), dtype=int), np.ones((4, 4), dtype=bool)
    metrics = ours(rewards, {"judge": 1.0}, lengths, finished)
    values = np.array([1.0, 2, 6, 4, 4, 5])
    assert metrics["frac_reward_zero_std"] == 1 / 2
    assert metrics["rewards/judge/mean"] == metrics["reward"] == pytest.approx(values.mean())
    assert metrics["rewards/judge/std"] == metrics["reward_std"] == pytest.approx(values.std(ddof=1))
    watched = ours(rewards | {"watch": np.ones((4, 4))}, {"judge": 1.0, "watch": 0.0}, lengths, finished)
    assert {name: watched[name] for name in metrics} == metrics
    only = ours({"watch": np.full((4, 4), 3.0)}, {"watch": 0.0}, lengths, finished)
    assert (only["reward"], only["rewards/watch/mean"]) == (0, 3)


def test_names_are_those_in_trl_s_source():
    source = (Path(importlib.util.find_spec("trl").origin).parent / "trainer" / "grpo_trainer.py").read_text("utf-8")
    names = [name.replace("short", "{reward_func_name}") for name in ours(*rollouts()) if "long" not in name]
    assert len(names) == 12
    for name in names:
        assert f'"{name}"].append(' in source, name


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": np.ones((5, 3), dtype=int)},
        {"finished": np.ones((4, 4), dtype=bool)},
        {"weights": {"short": 1.0}},
        {"rewards": {}},
        {"lengths": np.ones(20, dtype=int)},
    ],
)
def test_inconsistent_shapes_and_names_are_refused(change):
    case = dict(zip(("rewards", "weights", "lengths", "finished"), rollouts(), strict=True))
    with pytest.raises(ValueError, match=r"must all be|needs a weight"):
        ours(**{**case, **change})


def logger(run, **options):
    options = {"total_steps": 10, "enabled": True, **options}
    return MetricsLogger(run, **{"console": Console(file=io.StringIO(), width=120), **options})


def strict_lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_metrics_are_on_disk_as_valid_json_at_once(tmp_path):
    with logger(tmp_path / "new" / "run") as log:
        log.log(0, {"loss": torch.tensor(0.5), "kl": float("nan"), "grad_norm": math.inf})
        expected = [{"step": 0, "loss": 0.5, "kl": None, "grad_norm": None}]
        assert strict_lines(tmp_path / "new" / "run" / "metrics.jsonl") == expected  # before it is closed


def test_resume_removes_the_steps_that_run_again_and_a_half_written_line(tmp_path):
    with logger(tmp_path) as log:
        for step in range(6):
            log.log(step, {"loss": step / 3})
            log.table(step, [Sample("p", "c", {"r": 1.0}, {"r": math.nan}, 0.0)])
    whole = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with logger(tmp_path, resume_step=4) as log:
        assert (tmp_path / "metrics.jsonl").read_text() == "".join(whole[:4])
        log.log(4, {"loss": 7.0})
    assert [line["step"] for line in strict_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in strict_lines(tmp_path / "samples.jsonl")] == [0, 1, 2, 3]
    assert strict_lines(tmp_path / "samples.jsonl")[0]["linearized"] == {"r": None}
    with logger(tmp_path):  # from step 0: a new run in an old folder
        assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_whole_line_without_its_newline_is_kept_when_others_follow(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n[1]\n"x"\n{"step": 1, "loss": 2.0}')
    with logger(tmp_path, resume_step=2) as log:
        log.log(2, {"loss": 3.0})
    assert [line["loss"] for line in strict_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_atomic_write_leaves_the_old_file_where_it_fails(tmp_path):
    path = tmp_path / "file"
    atomic_write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic_write(path, "new \udc80")
    assert path.read_text() == "old"
    atomic_write(path, "é")
    assert path.read_bytes() == b"\xc3\xa9"


def test_a_log_file_gets_plain_lines_at_intervals(tmp_path):
    file = io.StringIO()
    with logger(tmp_path, total_steps=400, console=Console(file=file, width=120)) as log:
        for step in range(400):
            log.log(step, {"reward": -0.5, "completions/mean_length": 12.3, "perf/tokens_per_s": 12345.6})
    lines = file.getvalue().splitlines()
    assert "\x1b" not in file.getvalue()
    assert 40 <= len(lines) <= 42
    assert lines[-1] == "step 400/400  0:00 left  reward -0.5000  len 12  12,346 tok/s"


def test_output_without_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert terminal.output().width == terminal.PLAIN_WIDTH


def test_a_pipe_with_forced_colours_gets_plain_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with MetricsLogger(tmp_path, total_steps=3, enabled=True) as log:
        for step in range(3):
            log.log(step, {"reward": 1.0})
    shown = capsys.readouterr().out
    assert [line.split()[:2] for line in shown.splitlines()] == [["step", f"{step}/3"] for step in (1, 2, 3)]
    assert "\r" not in shown
    assert "\x1b[2K" not in shown  # erase a line


def test_terminal_gets_one_live_line(tmp_path):
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=True, _environ={"TERM": "xterm-256color"})
    with logger(tmp_path, console=console) as log:
        log.log(0, {"reward": -0.5})
        log.log(1, {"reward": -0.25})
    log.close()  # a second time does nothing
    assert "2/10" in file.getvalue()
    assert "\x1b" in file.getvalue()
    assert "reward -0.2500" in file.getvalue()


def test_other_ranks_write_nothing(tmp_path):
    with MetricsLogger(tmp_path / "run", total_steps=1, enabled=False) as log:
        log.log(0, {"loss": 1.0})
        log.table(0, [Sample("p", "c", {}, {}, 0.0)])
    assert not (tmp_path / "run").exists()


def test_samples_table_shows_text_literally_on_one_line_without_control_characters():
    samples = [
        Sample("[bold]x[/bold] [/oops]", "a\x1b[31m\x07b\n\nc\u202e", {"short": -0.5}, {"short": math.nan}, 0.25),
        Sample("p" * 500, "c" * 500, {"short": 1.0}, {"short": 2.0}, -1.0),
    ]
    console = Console(file=io.StringIO(), width=140)
    console.print(samples_table(7, samples))
    text = console.file.getvalue()
    assert "[bold]x[/bold] [/oops]" in text
    assert not set("\x1b\x07\u202e") & set(text)
    assert "b c" in text
    title = "samples at step 7 (lin.: linearized reward)"
    headings = (title, "prompt", "completion", "short", "lin. short", "advantage")
    for heading in (*headings, "-0.5000", "0.2500"):
        assert heading in text
    assert text.count("c" * 40) <= 3


def test_samples_table_on_an_ascii_terminal():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(file=file, width=100)
    console.print(samples_table(0, [Sample("é", "日本", {"r": 1.0}, {"r": 1.0}, 0.0)], console.encoding))
    file.flush()
    assert b"?" in raw.getvalue()


def test_the_live_display_has_the_phases_in_a_wide_terminal(tmp_path):
    times = {
        "time/update": 0.5,
        "time/generate": 0.375,
        "time/reference": 0.124,
        "time/rewards": 0.001,
        "step_time": 1.0,
    }
    assert phase_shares(times) == "update 50%  generate 38%  reference 12%"
    assert phase_shares({"loss": 1.0}) == ""
    for width in (120, 80):
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=True, _environ={"TERM": "xterm-256color"})
        with logger(tmp_path / str(width), console=console) as log:
            log.log(0, {"reward": -0.5, **times})
        assert ("update 50%  generate 38%" in file.getvalue()) == (width == 120)
        assert "1/10" in file.getvalue()


def test_the_last_step_is_read_from_the_end_of_a_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    assert last_step(path) is None
    path.write_text("".join(json.dumps({"step": step, "x": "y" * 2000}) + "\n" for step in range(200)))
    assert path.stat().st_size > 2 * TAIL
    assert last_step(path) == 199
    with path.open("a") as file:
        file.write('{"step": 200, "x"')  # a kill, or a line that is being written
    assert last_step(path) == 199
