"""Trackers: the real libraries read back, and every way in which one can fail without stopping a run."""

import importlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
import zipfile

import pytest
from support import browser
from support.helpers import REPOSITORY
from support.wandb_files import records

from nlgrpo import train
from nlgrpo.config.comparing import flat
from nlgrpo.engine.rollouts.evaluation_samples import read_evaluation
from nlgrpo.training.tracking import run_files, trackers
from nlgrpo.training.tracking.logger import MetricsLogger
from nlgrpo.training.tracking.run_files import read_jsonl
from nlgrpo.training.tracking.terminal import Sample
from nlgrpo.training.tracking.trackers import BackgroundTracker, Memory, TrackedRun, as_table
from nlgrpo.training.trainer import Trainer

CONFIG = {"rollout": {"samples": 8, "stop_ids": [1, 2]}, "optim": {"lr": 1e-5}, "recipe": "length-bon"}
SAMPLES = [
    Sample("Once", " a | b\nc", {"short": 0.5, "long": math.nan}, {"short": 0.25, "long": 0.0}, -1.5, {"n": 3}),
    Sample("Two", " words", {"short": -0.5, "long": 1.0}, {"short": 0.0, "long": 0.5}, 1.5, {"n": 4}),
]


class Recorder:
    """A tracker that remembers its calls, fails in one method, or waits for a gate."""

    def __init__(self, fails_in="", gate=None):
        self.calls, self.fails_in, self.gate = [], fails_in, gate

    def _call(self, name, *values):
        if self.gate is not None:
            self.gate.wait(30)
        if name == self.fails_in:
            raise ConnectionError("the server\nis gone")
        self.calls.append((name, *values))

    def log(self, step, metrics):
        self._call("log", step, dict(metrics))

    def table(self, step, columns, rows):
        self._call("table", step, columns, rows)

    def close(self):
        self._call("close")


def test_calls_arrive_in_order_and_without_what_is_not_finite():
    recorder = Recorder()
    tracker = BackgroundTracker("fake", lambda: recorder)
    for step in range(3):
        tracker.log(step, {"loss": float(step), "kl": math.nan, "grad_norm": math.inf})
    tracker.table(2, SAMPLES)
    tracker.close()
    tracker.close()
    columns, rows = as_table(2, SAMPLES)
    logged = [("log", step, {"loss": float(step)}) for step in range(3)]
    assert recorder.calls == [*logged, ("table", 2, columns, rows), ("close",)]


def test_the_table_has_trl_s_columns():
    columns, rows = as_table(7, SAMPLES)
    assert columns == ["step", "prompt", "completion", "short", "long", "linearized/short", "linearized/long",
                       "advantage", "n"]  # fmt: skip
    assert rows[0] == [7, "Once", " a | b\nc", 0.5, None, 0.25, 0.0, -1.5, "3"]
    assert as_table(7, []) == ([], [])


@pytest.mark.parametrize("where", ["begin", "log", "table", "close"])
def test_a_tracker_that_fails_is_one_warning_and_the_run_goes_on(tmp_path, monkeypatch, capsys, where):
    recorder = Recorder(where)

    def begin(run, memory):
        if where == "begin":
            raise SystemExit("no network")
        return recorder

    monkeypatch.setitem(sys.modules, "nlgrpo.training.tracking.fake_tracker", types.SimpleNamespace(begin=begin))
    run = TrackedRun(trackers=("fake",), project="p", name="n", config={})
    with MetricsLogger(tmp_path, total_steps=5, enabled=True, tracked=run) as log:
        for step in range(5):
            log.log(step, {"loss": 1.0})
            log.table(step, SAMPLES)
            time.sleep(0.02)
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(5))
    warnings = [line for line in capsys.readouterr().err.splitlines() if line]
    reason = "SystemExit: no network" if where == "begin" else "ConnectionError: the server"
    assert warnings == [
        f"warning: train.track: fake gets nothing more: {reason}. Training continues; metrics.jsonl is complete."
    ]


def test_a_tracker_that_cannot_begin_says_so_before_the_first_step(tmp_path, monkeypatch, capsys):
    def begin(run, memory):
        time.sleep(0.3)
        raise PermissionError("the folder cannot be written")

    monkeypatch.setitem(sys.modules, "nlgrpo.training.tracking.fake_tracker", types.SimpleNamespace(begin=begin))
    trackers.start(TrackedRun(trackers=("fake",), project="p", name="n", config={}), tmp_path, 0)
    assert "fake gets nothing more: PermissionError: the folder cannot be written" in capsys.readouterr().err


def test_a_tracker_that_hangs_at_its_start_delays_a_run_by_seconds_only(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "FIRST_CALL", 0.2)
    gate = threading.Event()
    begin = types.SimpleNamespace(begin=lambda run, memory: gate.wait(30))
    monkeypatch.setitem(sys.modules, "nlgrpo.training.tracking.fake_tracker", begin)
    start = time.monotonic()
    trackers.start(TrackedRun(trackers=("fake",), project="p", name="n", config={}), tmp_path, 0)
    assert 0.2 <= time.monotonic() - start < 5
    gate.set()


def test_a_tracker_that_hangs_does_not_delay_training(monkeypatch, capsys):
    monkeypatch.setattr(trackers, "LAST_CALLS", 0.3)
    gate = threading.Event()
    tracker = BackgroundTracker("fake", lambda: Recorder(gate=gate))
    start = time.monotonic()
    for step in range(trackers.WAITING + 50):
        tracker.log(step, {"loss": 1.0})
    assert time.monotonic() - start < 2
    tracker.close()
    assert time.monotonic() - start < 5
    gate.set()
    warnings = capsys.readouterr().err
    assert warnings.count("is 1000 calls behind; what does not fit is left out") == 1
    assert warnings.count("did not take everything within 0.3 s of the end of the run") == 1


def test_a_checkpoint_waits_for_a_slow_tracker_and_once_for_one_that_hangs(monkeypatch, capsys):
    monkeypatch.setattr(trackers, "LAST_CALLS", 0.3)
    slow, gate = Recorder(), threading.Event()
    slow.log = lambda step, metrics: (time.sleep(0.02), slow.calls.append(step))
    quick, hangs, fails = Recorder(), Recorder(gate=gate), Recorder("log")
    started = [BackgroundTracker("fake", lambda one=one: one) for one in (slow, quick, fails, hangs)]
    for step in range(3):
        for tracker in started:
            tracker.log(step, {"loss": 1.0})
    trackers.catch_up(started[:3])
    assert slow.calls == [0, 1, 2]
    assert [step for _, step, _ in quick.calls] == [0, 1, 2]
    assert "behind" not in capsys.readouterr().err
    begun = time.monotonic()
    trackers.catch_up(started)
    assert 0.3 <= time.monotonic() - begun < 5
    assert capsys.readouterr().err.count("fake is more than 0.3 s behind; if the run is killed, it lacks some") == 1
    begun = time.monotonic()
    trackers.catch_up(started)
    assert time.monotonic() - begun < 0.3
    assert capsys.readouterr().err == ""
    gate.set()
    started[-1].close()
    assert [name for name, *_ in hangs.calls] == ["log"] * 3 + ["close"]


@pytest.mark.usefixtures("no_warnings", "one_thread", "no_figures")
def test_trackers_have_every_step_that_a_checkpoint_has(tmp_path, monkeypatch):
    slow, logged, seen = Recorder(), [], []
    slow.log = lambda step, metrics: (time.sleep(0.3), logged.append(step))
    fake = types.SimpleNamespace(begin=lambda run, memory: slow)
    monkeypatch.setitem(sys.modules, "nlgrpo.training.tracking.tensorboard_tracker", fake)
    save = Trainer.save
    monkeypatch.setattr(Trainer, "save", lambda self, **more: (seen.append(list(logged)), save(self, **more)))
    more = ("--train.steps", "4", "--train.checkpoint-every", "2", "--train.out", str(tmp_path / "run"))
    assert train.main([*TINY, *more, "--train.track", "tensorboard"]) == 0
    assert seen[0] == [0, 1]
    assert logged == [0, 1, 2, 3]


def test_what_trackers_remember_survives_a_kill_and_not_a_restart(tmp_path):
    memory = Memory.read(tmp_path, 0)
    assert memory.get("wandb") is None
    memory.set("wandb", "abc")
    memory.set("mlflow", "def")
    assert Memory.read(tmp_path, 3).values == {"wandb": "abc", "mlflow": "def"}
    assert Memory.read(tmp_path, 0).values == {}
    for content in ("{", "[]", '"x"', "null", '{"wandb": 3}'):
        (tmp_path / run_files.TRACKERS_FILE).write_text(content)
        assert Memory.read(tmp_path, 3).values == {}


def test_flat():
    expected = {"rollout.samples": 8, "rollout.stop_ids": [1, 2], "optim.lr": 1e-5, "recipe": "length-bon"}
    assert flat(CONFIG) == expected


# --- the libraries ----------------------------------------------------------------------------------------------------


def tracked(name):
    return TrackedRun(trackers=(name,), project="best-of-n", name="first", config=CONFIG)


def log_run(folder, name, steps, resume_step=0):
    with MetricsLogger(folder, total_steps=10, enabled=True, tracked=tracked(name), resume_step=resume_step) as log:
        for step in range(resume_step, resume_step + steps):
            log.log(step, {"reward": step / 2, "rewards/short/mean": -1.0 * step, "kl": math.nan})
            if step == resume_step:
                log.table(step, SAMPLES)


@pytest.fixture
def no_warnings(capsys):
    yield
    assert "warning: train.track" not in capsys.readouterr().err


@pytest.mark.usefixtures("no_warnings")
def test_tensorboard(tmp_path):
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    log_run(tmp_path, "tensorboard", 5)
    log_run(tmp_path, "tensorboard", 3, resume_step=3)  # step 3 and 4 ran again after a kill
    read = events.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/reward")] == [(s, s / 2) for s in range(6)]
    assert read.Tags()["scalars"] == ["train/reward", "train/rewards/short/mean"]
    texts = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}
    assert "| rollout.samples | 8 |" in texts["config/text_summary"]
    table = texts["completions/text_summary"].splitlines()
    assert table[0].startswith("| step | prompt | completion | short | long |")
    assert table[2].startswith("| 0 | Once | a \\| b c | 0.5 | None |")


@pytest.fixture
def wandb():
    """W&B without the settings of another test."""
    found = pytest.importorskip("wandb")
    found.teardown()
    yield found
    found.teardown()


@pytest.mark.slow
@pytest.mark.usefixtures("no_warnings")
def test_wandb_offline(wandb, tmp_path, monkeypatch):
    """What would be uploaded: the records of both offline runs, which have one id."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_run(tmp_path, "wandb", 5)
    log_run(tmp_path, "wandb", 3, resume_step=5)
    wandb.teardown()  # its process has written everything when it ends
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    runs = [records(next(folder.glob("*.wandb"))) for folder in folders]
    ids = {run["run"].run_id for run in runs}
    assert ids == {json.loads((tmp_path / run_files.TRACKERS_FILE).read_text())["wandb"]}
    first = runs[0]
    assert (first["run"].project, first["run"].display_name) == ("best-of-n", "first")
    config = {item.key: json.loads(item.value_json) for item in first["run"].config.update}
    assert config["rollout"] == CONFIG["rollout"]
    for run, steps in zip(runs, (range(5), range(5, 8)), strict=True):
        logged = [(row["_step"], row["train/global_step"], row["train/reward"]) for row in run["history"]]
        assert logged == [(s, s, s / 2) for s in steps]
        assert not any("train/kl" in row for row in run["history"])
    content = json.loads((folders[0] / "files" / first["history"][0]["completions/path"]).read_text())
    assert content["columns"][:4] == ["step", "prompt", "completion", "short"]
    assert content["data"][1] == [0, "Two", " words", -0.5, 1.0, 0.0, 0.5, 1.5, "4"]
    assert first["stats"]  # system metrics


@pytest.mark.usefixtures("wandb")
def test_wandb_without_a_key_does_not_ask_for_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    log_run(tmp_path / "run", "wandb", 2)
    warning = "wandb gets nothing more: UserError: no API key; run wandb login, or set WANDB_MODE=offline"
    assert capsys.readouterr().err.count(warning) == 1


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow as it is after a start, in a folder of the test."""
    found = pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    found.set_tracking_uri(None)
    yield found
    os.environ.pop("MLFLOW_ALLOW_FILE_STORE", None)
    found.set_tracking_uri(None)


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("store", ["default", "folder", "sqlite", "skinny"])
def test_mlflow(tmp_path, monkeypatch, mlflow, store):
    """In the store that it has by default, in those that a user names, and in that of mlflow-skinny alone."""
    if store == "folder":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    elif store == "sqlite":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mine.db")
    elif store == "skinny":
        from nlgrpo.training.tracking import mlflow_tracker

        monkeypatch.setattr(mlflow_tracker, "_has_sqlalchemy", lambda: False)
    log_run(tmp_path / "run", "mlflow", 5)
    log_run(tmp_path / "run", "mlflow", 3, resume_step=5)
    written = {"default": "mlflow.db", "folder": "store", "sqlite": "mine.db", "skinny": "mlruns"}[store]
    assert (tmp_path / written).exists()
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("best-of-n").experiment_id])
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.params["rollout.samples"] == "8"
    history = client.get_metric_history(run.info.run_id, "reward")
    assert [(one.step, one.value) for one in history] == [(s, s / 2) for s in range(8)]
    assert "kl" not in run.data.metrics
    mlflow.set_experiment("best-of-n")
    table = mlflow.load_table("completions.json", run_ids=[run.info.run_id])
    assert table["completion"].tolist() == [" a | b\nc", " words"] * 2
    assert table["advantage"].tolist() == [-1.5, 1.5] * 2


def comet_messages(path):
    """What an offline archive of Comet would upload."""
    with zipfile.ZipFile(path) as archive:
        return [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("no_warnings")
def test_comet_offline(tmp_path, monkeypatch):
    pytest.importorskip("comet_ml")
    monkeypatch.setenv("COMET_MODE", "offline")
    log_run(tmp_path, "comet", 5)
    log_run(tmp_path, "comet", 3, resume_step=5)
    archives = sorted((tmp_path / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime)
    assert len(archives) == 2
    key = json.loads((tmp_path / run_files.TRACKERS_FILE).read_text())["comet"]
    logged, parameters = [], {}
    for archive in archives:
        for message in comet_messages(archive):
            payload = message["payload"]
            if message["type"] == "metric_msg" and payload["metric"]["metricName"] == "train/reward":
                logged.append((payload["metric"]["step"], payload["metric"]["metricValue"]))
            assert payload["metric"]["metricName"] != "train/kl" if message["type"] == "metric_msg" else True
            if message["type"] == "parameter_msg":
                parameters[payload["param"]["paramName"]] = payload["param"]["paramValue"]
        with zipfile.ZipFile(archive) as content:
            assert json.loads(content.read("experiment.json"))["offline_id"] == key
            [upload] = [m["payload"] for m in comet_messages(archive) if m["type"] == "file_upload"]
            table = content.read(upload["file_path"]).decode()
        assert upload["additional_params"]["fileName"] == f"completions-{5 * archives.index(archive)}.csv"
        assert table.startswith("step,prompt,completion,short,long")
        assert " words" in table
    assert logged == [(s, s / 2) for s in range(8)]
    assert parameters["rollout.samples"] == "8"


@pytest.mark.slow
def test_comet_without_a_key_does_not_ask_for_one(tmp_path, monkeypatch, capsys):
    pytest.importorskip("comet_ml")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("COMET_API_KEY", "COMET_MODE"):
        monkeypatch.delenv(name, raising=False)
    log_run(tmp_path / "run", "comet", 2)
    warning = (
        "comet gets nothing more: UserError: no API key; set COMET_API_KEY, run comet login, or set COMET_MODE=offline"
    )
    assert capsys.readouterr().err.count(warning) == 1


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    """Trackio with its database in a folder of the test."""
    found = pytest.importorskip("trackio")
    from trackio import context_vars, sqlite_storage, utils

    for module in (found, sqlite_storage, utils):
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    yield found
    context_vars.current_run.set(None)
    context_vars.current_project.set(None)


@pytest.mark.usefixtures("no_warnings")
def test_trackio(tmp_path, trackio):
    from trackio.sqlite_storage import SQLiteStorage

    log_run(tmp_path / "run", "trackio", 5)
    log_run(tmp_path / "run", "trackio", 3, resume_step=5)
    log_run(tmp_path / "other", "trackio", 1)  # another run of the same name
    records = SQLiteStorage.get_run_records("best-of-n")
    assert [record["name"] for record in records] == ["first", "first"]
    own = json.loads((tmp_path / "run" / run_files.TRACKERS_FILE).read_text())["trackio"]
    logs = [row for row in SQLiteStorage.get_logs("best-of-n", run_id=own) if "train/reward" in row]
    assert [(row["step"], row["train/reward"]) for row in logs] == [(s, s / 2) for s in range(8)]
    [first, second] = [row for row in SQLiteStorage.get_logs("best-of-n", run_id=own) if "completions" in row]
    assert (first["step"], second["step"]) == (0, 5)
    assert first["completions"]["_value"][1]["completion"] == " words"
    assert SQLiteStorage.get_run_config("best-of-n", run_id=own)["rollout"] == CONFIG["rollout"]


def test_trackio_does_not_continue_another_run_of_the_same_name(tmp_path, trackio, capsys):
    log_run(tmp_path / "run", "trackio", 2)
    log_run(tmp_path / "other", "trackio", 2)
    log_run(tmp_path / "run", "trackio", 2, resume_step=2)
    warning = "another run of the project 'best-of-n' has the name 'first' by now"
    assert capsys.readouterr().err.count(warning) == 1


# --- whole runs -------------------------------------------------------------------------------------------------------

TINY = ("length-bon", "--rollout.prompts", "2", "--rollout.samples", "4", "--rollout.max-new-tokens", "8",
        "--data.limit", "4",
        "--optim.lr", "1e-2", "--evaluation.prompts", "0", "--data.source", "story-prompts",
        "--train.samples-every", "2")  # fmt: skip


EVALUATED = {
    "reward": lambda model: sum(model.weights[name] * rewards.mean() for name, rewards in model.rewards.items()),
    "reward_best-of-4": lambda model: sum(model.weights[k] * v.max(1).values.mean() for k, v in model.rewards.items()),
    "rewards/short/mean": lambda model: model.rewards["short"].mean(),
    "rewards/short/best-of-4": lambda model: model.rewards["short"].max(1).values.mean(),
    "completions/mean_length": lambda model: model.lengths.double().mean(),
}


@pytest.mark.slow
@pytest.mark.usefixtures("no_warnings", "one_thread", "no_figures")
def test_a_run_that_resumes_is_one_run_of_each_tracker(tmp_path, monkeypatch, mlflow):
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    evaluated = ("--evaluation.prompts", "3", "--evaluation.samples", "4", "--evaluation.ns", "1", "4")
    for steps in (2, 4):
        more = (*evaluated, "--train.steps", str(steps), "--train.out", str(tmp_path / "run"))
        assert train.main([*TINY, *more, "--train.track", "tensorboard", "mlflow", "--train.project", "tiny"]) == 0
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    read = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"tensors": 0})
    read.Reload()
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert run.info.run_name == "run"
    assert run.data.params["train.track"] == "('tensorboard', 'mlflow')"
    for name in ("reward", "objective/aggregate", "kl", "completions/mean_length", "time/update"):
        logged = [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines]
        assert [(e.step, e.value) for e in read.Scalars(f"train/{name}")] == logged
        assert [(e.step, e.value) for e in client.get_metric_history(run.info.run_id, name)] == logged
    assert [event.step for event in read.Tensors("completions/text_summary")] == [0, 2]
    evaluations = read_evaluation(tmp_path / "run")
    assert set(evaluations) == {"before", "after"}
    for name, of in EVALUATED.items():
        wanted = [
            (step, pytest.approx(float(of(evaluations[model])), rel=1e-6))
            for step, model in ((0, "before"), (3, "after"))
        ]
        shown = [(e.step, e.value) for e in read.Scalars(f"eval/{name}")]
        assert [shown[0], shown[-1]] == wanted
        history = [(e.step, e.value) for e in client.get_metric_history(run.info.run_id, f"eval_{name}")]
        assert [history[0], history[-1]] == wanted


@pytest.mark.slow
def test_every_metric_is_at_its_step_after_a_kill_and_a_resume(tmp_path):
    """In the files of all trackers that have some at any time, read by their own libraries."""
    for name in ("mlflow", "trackio", "wandb"):
        pytest.importorskip(name)
    environment = os.environ | {
        "TRACKIO_DIR": str(tmp_path / "trackio"), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY / "tests"),
    }  # fmt: skip
    out = tmp_path / "run"
    options = ["--train.steps", "200", "--train.checkpoint-every", "50", "--train.out", str(out),
               "--train.project", "tiny", "--train.track", "tensorboard", "mlflow", "trackio", "wandb"]  # fmt: skip
    command = [sys.executable, "-m", "nlgrpo.cli", "train", *TINY, *options]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True) as started:
        deadline = time.monotonic() + 240
        while len(read_jsonl(out / "metrics.jsonl")) < 52:
            assert time.monotonic() < deadline
            assert started.poll() is None
            time.sleep(0.01)
        time.sleep(1.5)  # steps before the checkpoint do not run again; Trackio writes twice a second
        os.killpg(started.pid, signal.SIGKILL)
    assert 52 < len(read_jsonl(out / "metrics.jsonl")) < 200
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "resuming from step" in done.stdout
    assert "warning: train.track" not in done.stderr
    lines = read_jsonl(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(200))
    reader = [sys.executable, "-c", READ_BACK, str(out)]
    shown = subprocess.run(reader, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    read = json.loads(shown.splitlines()[-1])
    assert set(read) == {"tensorboard", "mlflow", "trackio", "wandb"}
    for tracker, logged in read.items():
        for line in lines:
            for name, value in line.items():
                if name == "step" or value is None:
                    continue
                found = logged.get(name, {}).get(str(line["step"]))
                assert found is not None, (tracker, name, line["step"])
                if not name.startswith(("time/", "perf/")):  # of a step that ran again after the kill
                    assert found == pytest.approx(value, rel=1e-6, abs=1e-12), (tracker, name, line["step"])


READ_BACK = """
import json, pathlib, sys
import mlflow, trackio
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage

from support.wandb_files import records

out = pathlib.Path(sys.argv[1])
found = {name: {} for name in ("tensorboard", "mlflow", "trackio", "wandb")}
events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
events.Reload()
for tag in events.Tags()["scalars"]:
    for event in events.Scalars(tag):
        found["tensorboard"].setdefault(tag.removeprefix("train/"), {})[event.step] = event.value
client = mlflow.MlflowClient()
[run] = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
for name in run.data.metrics:
    for one in client.get_metric_history(run.info.run_id, name):
        found["mlflow"].setdefault(name, {})[one.step] = one.value
own = json.loads((out / "trackers.json").read_text())
for row in SQLiteStorage.get_logs("tiny", run_id=own["trackio"]):
    for name, value in row.items():
        found["trackio"].setdefault(name.removeprefix("train/"), {})[row["step"]] = value
for folder in sorted((out / "wandb").glob("offline-run-*")):
    of_run = records(next(folder.glob("*.wandb")))
    assert of_run["run"].run_id == own["wandb"]
    for row in of_run["history"]:
        for name, value in row.items():
            found["wandb"].setdefault(name.removeprefix("train/"), {})[row["_step"]] = value
print(json.dumps(found))
"""


def test_unknown_and_missing_trackers_are_named_before_anything_starts(tmp_path, monkeypatch, capsys):
    assert train.main([*TINY, "--train.track", "wandb", "wnb", "--train.out", str(tmp_path / "run")]) == 2
    allowed = "allowed are 'wandb', 'trackio', 'mlflow', 'comet', 'tensorboard'"
    assert f"train.track = ['wandb', 'wnb']: {allowed}" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert train.main([*TINY, "--train.track", "wandb", "--train.out", str(tmp_path / "run")]) == 2
    assert "train.track has 'wandb', which is not installed: run pip install nlgrpo[wandb]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(browser.PROGRAM is None, reason=browser.MISSING)
def test_trackio_s_page_in_a_browser(tmp_path):
    pytest.importorskip("trackio")
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nlgrpo.cli", "train", *TINY, "--train.steps", "4", "--train.out",
               str(tmp_path / "run"), "--train.track", "trackio", "--train.project", "tiny"]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "warning: train.track" not in done.stderr
    show = "import trackio; trackio.show('tiny', open_browser=False, block_thread=True, share=False)"
    page = subprocess.Popen([sys.executable, "-u", "-c", show], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        lines = iter(page.stdout.readline, "")
        launched = next(line for line in lines if "launched at" in line)
        url = re.search(r"http://127\.0\.0\.1:\d+/\?project=tiny", launched)[0]
        with browser.Browser(tmp_path / "home") as opened:
            opened.visit(url)
            deadline = time.monotonic() + 60
            while opened.run("document.querySelectorAll('canvas').length") < 3:
                assert time.monotonic() < deadline, opened.run("document.body.innerText")
                time.sleep(0.2)
            text = opened.run("document.body.innerText")
    finally:
        page.kill()
        page.communicate()
    for shown in ("run", "kl", "reward", "objective", "completions"):
        assert shown in text
