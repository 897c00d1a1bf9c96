"""A full disk: one line names the folder and the cause, nothing is lost, and the same command resumes.

The operating system limits the size of files (RLIMIT_FSIZE), which the writers of PyTorch, safetensors and tokenizers
meet too. Runs have their own processes.
"""

import errno
import json
import os
import resource
from contextlib import contextmanager

import pytest
from support.checkpoints import load, make, names, save, train
from support.helpers import Job, run_all, tiny_model
from support.reports import make_run

from nlgrpo import cli
from nlgrpo.apps.report import figures
from nlgrpo.runtime.atomic_files import atomic_write, into
from nlgrpo.training.tracking.run_files import read_jsonl

TOO_LARGE = os.strerror(errno.EFBIG)
MAIN = {
    "train": "nlgrpo.train:main",
    "reward-model": "nlgrpo.cli:main",
    "evaluate": "nlgrpo.cli:main",
}
# function in which the disk is full, number of the call, maximum size of files in bytes; folder in the message
FULL = {
    ("train", "configuration"): ("nlgrpo.training.run_folder:_claim", 1, 10, ""),
    ("train", "metrics"): ("nlgrpo.training.tracking.logger:MetricsLogger.log", 3, 50, ""),
    ("train", "samples"): ("nlgrpo.training.tracking.logger:MetricsLogger.table", 3, 50, ""),
    ("train", "half of the tensors"): ("torch.distributed.checkpoint:save", 2, 30_000, "checkpoints"),
    ("train", "manifest"): ("nlgrpo.runtime.checkpoint.folders:write_manifest", 3, 100, "checkpoints"),
    ("train", "weights"): ("nlgrpo.model.safetensors_writer:_write_tensor", 3, 8000, "model"),
    ("train", "tokenizer"): ("transformers:PreTrainedTokenizerFast.save_pretrained", 1, 300, "model"),
    ("train", "last evaluation"): ("nlgrpo.engine.rollouts.evaluation_samples:write_samples", 2, 100, ""),
    ("reward-model", "tensors"): ("torch.distributed.checkpoint:save", 2, 30_000, "checkpoints"),
    ("reward-model", "weights"): ("nlgrpo.model.safetensors_writer:_write_tensor", 3, 8000, "model"),
    ("evaluate", "completions"): ("nlgrpo.engine.rollouts.store:Store.write", 2, 100, "samples"),
    ("evaluate", "scores"): ("nlgrpo.engine.rollouts.store:Store.write", 8, 100, "samples"),
    ("evaluate", "results"): ("nlgrpo.apps.evaluate.results:write", 1, 100, ""),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "model")
    tiny_model(root / "other", seed=1)
    prompts = [" ".join(f"w{(3 * i + j) % 28}" for j in range(1 + i % 4)) for i in range(10)]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    pairs = [{"prompt": f"w{i} ", "chosen": f"w9 w{i}", "rejected": "w8"} for i in range(20)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return root


def arguments(work, command, out):
    shared = {"model.path": work / "model", "model.dtype": "float64"}
    reward = {"rewards.short.function": "length(target=3, scale=10)"}
    trained = {"train.out": work / out, "train.checkpoint_every": 1, "optim.lr": 0.01}
    prompts = {"data.source": work / "prompts.jsonl", "rollout.max_new_tokens": 8}
    options = {
        "train": shared | reward | trained | prompts
        | {"rollout.prompts": 2, "rollout.samples": 4, "train.steps": 4, "train.samples_every": 1}
        | {"evaluation.prompts": 2, "evaluation.samples": 4},
        "reward-model": shared | trained
        | {"data.source": work / "pairs.jsonl", "train.pairs": 4, "evaluation.pairs": 4},
        "evaluate": shared | reward | prompts
        | {"n": 4, "ns": "1,2", "reference": work / "model", "out": work / out, "evaluation.prompts": 6},
    }[command]  # fmt: skip
    first = {
        "train": ["blank"],
        "reward-model": ["reward-model", "train"],
        "evaluate": ["evaluate", str(work / "other")],
    }[command]
    return [*first, *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


@pytest.fixture(scope="module")
def ended(work):
    """Outcomes of the commands: undisturbed, by name; and by (name, place), first with a full disk, then again."""
    jobs = [(name, Job(arguments(work, name, name), main=main)) for name, main in MAIN.items()]
    for (name, place), (function, at, limit, _) in FULL.items():
        call = arguments(work, name, f"{name} {place}")
        jobs.append(((name, place), Job(call, function, at, limit=limit, main=MAIN[name])))
        jobs.append(((name, place), Job(call, main=MAIN[name])))
    found = {}
    for (key, _), end in zip(jobs, run_all([job for _, job in jobs]), strict=True):
        found.setdefault(key, []).append(end)
    return found


def lasting(folder):
    """Results of a command, without times and the name of the folder."""
    names = ("evaluation.json", "reward_model.json", "samples.jsonl", "model/model.safetensors", "model/tokenizer.json")
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    files |= {path.name: path.read_bytes() for path in folder.glob("samples/*/*.kl-*")}
    logged = [{k: v for k, v in line.items() if "time" not in k and "per" not in k} for line in metrics(folder)]
    results = folder / "results.json"
    return files, logged, json.loads(results.read_text())["results"] if results.is_file() else []


def metrics(folder):
    return read_jsonl(folder / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), FULL)
def test_a_full_disk_is_reported_in_one_line_and_the_same_command_resumes(work, ended, name, place):
    full, again = ended[name, place]
    assert full.status == 2, full.output
    assert "Traceback" not in full.output
    message = full.output.strip().splitlines()[-1]
    assert message.startswith(f"error: cannot write into {work / f'{name} {place}' / FULL[name, place][3]}")
    assert f": {TOO_LARGE}. Complete files stay" in message or ": a file is incomplete; " in message
    assert again.status == 0, again.output
    assert not [path for path in (work / f"{name} {place}").rglob("*") if path.name.endswith((".tmp", ".partial"))]
    assert lasting(work / f"{name} {place}") == lasting(work / name)
    assert [end.status for end in ended[name]] == [0]
    steps = {"half of the tensors": 1, "manifest": 2, "weights": 4, "samples": 2}
    if name == "train" and place in steps:
        assert f"resuming from step {steps[place]}" in again.output


@contextmanager
def room(size):
    """Context in which no file of this process may be longer than ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_report_on_a_full_disk_keeps_the_old_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "picture", lambda draw: figures.Picture(b"p" * 50, "<svg/>", "<svg/>"))
    run = make_run(tmp_path / "run")
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_bytes()
    for size in (10, 1000):
        with room(size):
            assert cli.main(["report", str(run)]) == 2
        assert capsys.readouterr().err.startswith(f"error: cannot write into {run}: {TOO_LARGE}. Complete files stay")
        assert (run / "report.html").read_bytes() == page
        assert not list(run.glob("*.tmp"))
    (tmp_path / "file").write_text("")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "file" / "page.html")]) == 2
    assert f"cannot write into {tmp_path / 'file'}" in capsys.readouterr().err


def test_a_save_on_a_full_disk_leaves_the_checkpoints_unchanged(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    save(tmp_path, 1, model, optimizer)
    for size in (100, 3000):  # 3000 bytes are enough for the texts and a part of the tensors
        with room(size), pytest.raises(ValueError, match=f"cannot write into {tmp_path}: "):
            save(tmp_path, 2, model, optimizer)
        assert names(tmp_path) == ["step-00000001"]
        assert load(tmp_path, *make()) == {"step": 1}


def test_a_failed_write_keeps_the_old_file_and_removes_the_new_one(tmp_path):
    atomic_write(tmp_path / "file", "old")
    with room(2), pytest.raises(ValueError, match=f"cannot write into {tmp_path}: {TOO_LARGE}"):
        atomic_write(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError("no number"), "no number"),
        (Exception("No space left on device (os error 28)"), "No space left on device"),
        (RuntimeError("out of memory"), None),
    ],
)
def test_only_errors_of_the_operating_system_are_converted(tmp_path, error, says):
    expected = type(error) if says is None else ValueError
    with pytest.raises(expected, match=says or "out of memory"), into(tmp_path):
        raise error
