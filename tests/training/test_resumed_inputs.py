"""A run resumes with the data, rewards, weights, tokenizer and template of its start, or says what has changed."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chat_model import chat_model, chat_tokenizer
from support.helpers import tiny_model

from nlgrpo import cli, train
from nlgrpo.config.comparing import differences
from nlgrpo.config.recipes import recipe
from nlgrpo.config.schema import Config, to_dict
from nlgrpo.engine.rollouts import run_inputs, store
from nlgrpo.engine.rollouts.evaluation_samples import read_evaluation
from nlgrpo.runtime import user_code
from nlgrpo.training import run_folder

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

REWARDS = """
from beside_the_rewards import negative

def short(completion_ids, **_):
    return [negative(ids) for ids in completion_ids]
"""


@pytest.fixture
def work(tmp_path):
    tiny_model(tmp_path / "model")
    rows = [{"prompt": f"w{i} w{i + 1}", "answer": i} for i in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "w20"}\n{"prompt": "w21"}\n')
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "beside_the_rewards.py").write_text("def negative(ids):\n    return -float(len(ids))\n")
    (tmp_path / "weight.py").write_text("def weight(rank):\n    return 2 * rank\n")
    return tmp_path


def arguments(work, *more, steps=1):
    options = {
        "model.path": work / "model", "data.source": work / "prompts.jsonl", "rollout.prompts": 2, "rollout.samples": 2,
        "rollout.max_new_tokens": 4, "rewards.short.function": f"{work / 'rewards.py'}:short",
        "rewards.short.objective": f"distortion:{work / 'weight.py'}:weight",
        "data.evaluation": work / "held_out.jsonl", "train.steps": steps, "evaluation.prompts": 0,
        "train.samples_every": 0, "train.out": work / "run",
    }  # fmt: skip
    return ["blank", *(part for name, value in options.items() for part in (f"--{name}", str(value))), *more]


def append(path, text):
    path.write_text(path.read_text() + text)


def another_model(work):
    file = work / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1.0
    before = file.stat()
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time


def another_tokenizer(work):
    path = work / "model" / "tokenizer.json"
    text = path.read_text().replace('"w27": 31', '"w28": 31')
    assert text != path.read_text()
    path.write_text(text)


CHANGES = {
    "data": lambda work: append(work / "prompts.jsonl", '{"prompt": "w9"}\n'),
    "a column": lambda work: (work / "prompts.jsonl").write_text(
        (work / "prompts.jsonl").read_text().replace('"answer": 3', '"answer": 4')
    ),
    "held out": lambda work: append(work / "held_out.jsonl", '{"prompt": "w22"}\n'),
    "rewards": lambda work: append(work / "rewards.py", "# another version\n"),
    "imported by the rewards": lambda work: append(work / "beside_the_rewards.py", "# another version\n"),
    "objective": lambda work: append(work / "weight.py", "# another version\n"),
    "model": another_model,
    "tokenizer": another_tokenizer,
}
KINDS = {"a column": "data", "held out": "data", "objective": "rewards", "imported by the rewards": "rewards"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_input_is_refused_by_name_and_allowed_by_name(name, work, capsys):
    kind = KINDS.get(name, name)
    assert train.main(arguments(work)) == 0
    before = {path.name: path.read_bytes() for path in (work / "run").iterdir() if path.is_file()}
    CHANGES[name](work)
    assert train.main(arguments(work, steps=2)) == 2
    said = capsys.readouterr().err
    assert f"  {kind}: other " in said
    assert f"--train.allow-changed {kind} " in said
    assert "--train.restart" in said
    assert {path.name: path.read_bytes() for path in (work / "run").iterdir() if path.is_file()} == before
    if name in KINDS:  # another way to change something of the same kind
        return
    others = [other for other in run_inputs.KINDS if other != kind]
    assert train.main(arguments(work, "--train.allow-changed", *others, steps=2)) == 2
    capsys.readouterr()
    assert train.main(arguments(work, "--train.allow-changed", kind, steps=2)) == 0
    shown = capsys.readouterr()
    assert f"note: {kind}: other" in shown.err
    assert "resuming from step 1" in shown.out
    assert train.main(arguments(work, steps=3)) == 0  # the new input is that of the run now
    assert "other" not in capsys.readouterr().err


def test_copies_and_touched_files_are_the_same_inputs(work, capsys, monkeypatch):
    assert train.main(arguments(work)) == 0
    for name in ("model", "prompts.jsonl", "rewards.py"):
        copied = work / f"copy of {name}"
        (shutil.copytree if (work / name).is_dir() else shutil.copy)(work / name, copied)
        shutil.rmtree(work / name) if (work / name).is_dir() else (work / name).unlink()
        copied.rename(work / name)
        os.utime(work / name)
    store.READ.clear()
    assert train.main(arguments(work, steps=2)) == 0
    assert "note" not in capsys.readouterr().err
    store.READ.clear()  # as in another process: what is known is in the run's folder
    read = SimpleNamespace(file_digest=lambda *_: pytest.fail("an untouched file is read again"), sha256=hashlib.sha256)
    monkeypatch.setattr(store, "hashlib", read)
    assert train.main(arguments(work, steps=3)) == 0


def test_inputs_that_were_not_recorded(work, capsys):
    """A run of an older version resumes and says so; from then on changes are noticed."""
    assert train.main(arguments(work)) == 0
    (work / "run" / run_inputs.INPUTS_FILE).unlink()
    CHANGES["data"](work)
    assert train.main(arguments(work, steps=2)) == 0
    assert "began before inputs were recorded" in capsys.readouterr().err
    CHANGES["data"](work)
    assert train.main(arguments(work, steps=3)) == 2
    (work / "run" / run_inputs.INPUTS_FILE).write_text("[]")
    assert train.main(arguments(work, steps=3)) == 2
    assert "inputs.json cannot be read" in capsys.readouterr().err


def test_a_run_that_has_not_trained_may_change(work, capsys):
    """A reward that fails before the first checkpoint can be corrected, and a restart compares nothing."""
    fails = f"def short(prompts, **_):\n    return [float(open({str(work / 'value')!r}).read())] * len(prompts)\n"
    (work / "rewards.py").write_text(fails)
    assert train.main(arguments(work)) == 2
    (work / "value").write_text("1.0")  # this process imports the file once
    append(work / "rewards.py", "# corrected\n")
    assert train.main(arguments(work)) == 0
    CHANGES["data"](work)
    assert train.main(arguments(work, "--train.restart")) == 0
    assert train.main(arguments(work, steps=2)) == 0
    assert "changed" not in capsys.readouterr().err


def test_an_evaluation_before_training_belongs_to_its_inputs(work, capsys):
    """Without a checkpoint, but with the evaluation before training, a change is refused, too."""
    evaluated = ("--evaluation.prompts", "2", "--evaluation.samples", "2", "--evaluation.ns", "1")
    assert train.main(arguments(work, *evaluated)) == 0
    shutil.rmtree(work / "run" / "checkpoints")
    CHANGES["rewards"](work)
    assert train.main(arguments(work, *evaluated)) == 2
    assert "  rewards: other " in capsys.readouterr().err


def test_the_evaluation_before_training_is_repeated_with_other_rewards(work, capsys):
    """Before and after training have the same rewards, also if these have changed in between."""
    evaluated = ("--evaluation.prompts", "2", "--evaluation.samples", "2", "--evaluation.ns", "1")
    assert train.main(arguments(work, *evaluated)) == 0
    before = read_evaluation(work / "run")["before"]
    (work / "rewards.py").write_text(REWARDS.replace("negative(ids)", "1000 + negative(ids)"))
    for name in [name for name in sys.modules if name.startswith(user_code.PREFIX)]:
        del sys.modules[name]  # as in another process
    allowed = ("--train.allow-changed", "rewards")
    assert train.main(arguments(work, *evaluated, *allowed, steps=2)) == 0
    said = capsys.readouterr().err
    assert "the evaluation before training" in said
    assert "is repeated" in said
    again = read_evaluation(work / "run")
    assert torch.equal(again["before"].lengths, before.lengths)
    assert torch.equal(again["before"].rewards["short"], before.rewards["short"] + 1000)
    assert again["after"].rewards["short"].min() > 900


def test_weights_that_are_removed_while_a_run_trains(work):
    """The export names the weights that training started from, which need not be there any more."""
    weights = work / "model" / "model.safetensors"
    digest = store.digest_of_weights(work / "model")
    (work / "rewards.py").write_text(
        f"import os\n\ndef short(completion_ids, **_):\n    if os.path.exists({str(weights)!r}):\n"
        f"        os.remove({str(weights)!r})\n    return [0.0] * len(completion_ids)\n"
    )
    assert train.main(arguments(work)) == 0
    assert not weights.exists()
    assert json.loads((work / "run" / "model" / "nlgrpo.json").read_text())["base_digest"] == digest


@pytest.mark.slow
def test_a_stream_has_no_digest_and_says_so(work, capsys):
    more = ("--data.streaming",)
    assert train.main(arguments(work, *more)) == 0
    assert "note: a streamed data set has no digest" in capsys.readouterr().err
    CHANGES["data"](work)
    assert train.main(arguments(work, *more, steps=2)) == 0
    CHANGES["held out"](work)  # these are not streamed
    assert train.main(arguments(work, *more, steps=3)) == 2
    assert "  data: other " in capsys.readouterr().err


def test_templates(tmp_path, capsys):
    """Another template, and one that writes something else at each start, as one with the date does."""
    chat_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    def command(steps, *more):
        options = {
            "model.path": tmp_path / "model", "data.source": tmp_path / "prompts.jsonl", "data.chat": True,
            "rollout.prompts": 2, "rollout.samples": 2, "rollout.max_new_tokens": 4,
            "rewards.short.function": "length(target=3, scale=10)", "rewards.short.objective": "mean",
            "train.steps": steps, "evaluation.prompts": 0, "train.out": tmp_path / "run",
        }  # fmt: skip
        words = []
        for name, value in options.items():
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return ["blank", *words, *more]

    def rendered(text):
        chat_tokenizer(text).save_pretrained(tmp_path / "model")

    dated = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    rendered(dated)
    assert train.main(command(1)) == 0
    with pytest.MonkeyPatch.context() as patched:
        from nlgrpo.data.conversations import ChatOptions

        encode = ChatOptions.encode
        patched.setattr(ChatOptions, "encode", lambda *a, **k: [*encode(*a, **k), 7])  # a year later
        assert train.main(command(2)) == 2
        said = capsys.readouterr().err
        assert "template: other token ids of the same prompts" in said
        assert "--train.allow-changed template " in said
    rendered(dated + "!")
    assert train.main(command(2)) == 2
    assert "template: other chat template of" in capsys.readouterr().err
    assert train.main(command(2, "--train.allow-changed", "template")) == 0
    capsys.readouterr()
    append(tmp_path / "prompts.jsonl", '{"prompt": "c"}\n')
    assert train.main(command(3, "--train.allow-changed", "data")) == 0  # other ids follow from other data
    assert "note: data: other" in capsys.readouterr().err


def test_names_of_inputs_are_checked(work, capsys):
    (work / "run.toml").write_text('[train]\nallow_changed = ["dta"]\n')
    assert train.main([str(work / "run.toml"), *arguments(work)[1:], "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "train.allow_changed = 'dta'" in said
    assert "'data' or 'rewards'" in said


def test_fewer_steps_than_the_run_has(work, capsys):
    assert train.main(arguments(work, steps=3)) == 0
    before = {path.name: path.read_bytes() for path in (work / "run").iterdir() if path.is_file()}
    assert train.main(arguments(work, steps=2)) == 2
    said = capsys.readouterr().err
    assert "has 3 steps already" in said
    assert "this command asks for 2" in said
    assert "Ask for 3 or more" in said
    assert {path.name: path.read_bytes() for path in (work / "run").iterdir() if path.is_file()} == before
    assert train.main(arguments(work, steps=3)) == 0
    assert train.main(arguments(work, "--train.restart", steps=2)) == 0


def pairs_of(work, *more):
    rows = [{"prompt": f"w{i} ", "chosen": f"w9 w{i}", "rejected": f"w20 w{i} w21"} for i in range(8)]
    if not (work / "pairs.jsonl").exists():
        (work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model.path", str(work / "model"), "--data.source", str(work / "pairs.jsonl"), "--train.pairs", "4"]
    return ["reward-model", "train", *options, "--evaluation.pairs", "0", "--train.out", str(work / "rm"), *more]


def test_reward_models_compare_their_pairs_and_model(work, capsys):
    assert cli.main(pairs_of(work)) == 0
    append(work / "pairs.jsonl", '{"prompt": "w1 ", "chosen": "w2", "rejected": "w3"}\n')
    assert cli.main(pairs_of(work)) == 2
    assert "  data: other examples" in capsys.readouterr().err
    assert cli.main(pairs_of(work, "--train.allow-changed", "data")) == 0
    another_model(work)
    assert cli.main(pairs_of(work)) == 2
    assert "  model: other config.json or weights" in capsys.readouterr().err


def test_a_reward_model_whose_pairs_have_become_fewer(work, capsys):
    assert cli.main(pairs_of(work)) == 0
    lines = (work / "pairs.jsonl").read_text().splitlines(keepends=True)
    (work / "pairs.jsonl").write_text("".join(lines[:4]))
    assert cli.main(pairs_of(work, "--train.allow-changed", "data")) == 2
    assert "has 2 steps already, and this command asks for 1" in capsys.readouterr().err


def test_the_code_of_a_reward_is_that_of_the_user(tmp_path):
    """The file of a decorated function, not that of its decorator, and the functions of an objective by modules."""
    (tmp_path / "rewards.py").write_text("import functools\n\n@functools.cache\ndef one(prompts, **_):\n    return 1\n")
    named = f"{tmp_path / 'rewards.py'}:one"
    function = user_code.function(named)
    before = store.digest_of_function(function, named, "spec")
    append(tmp_path / "rewards.py", "# another version\n")
    assert store.digest_of_function(function, named, "spec") != before
    assert run_inputs._code_in(f"distortion:{run_inputs.__name__}:digest_of_ids") == [Path(run_inputs.__file__)]
    assert run_inputs._code_in(f"fp:distortion:{tmp_path / 'rewards.py'}:one") == [tmp_path / "rewards.py"]
    assert run_inputs._code_in("cvar:0.1") == run_inputs._code_in("mean") == []


def test_digests_tell_examples_apart():
    assert run_inputs.digest_of_examples([[1, 2], [3]]) == run_inputs.digest_of_examples(iter([[1, 2], [3]]))
    assert run_inputs.digest_of_examples([[1, 2], [3]]) != run_inputs.digest_of_examples([[1], [2, 3]])


@pytest.mark.parametrize(("transfer", "lines"), [("directory", []), ("nccl", ["vllm.transfer: 'nccl' -> None"])])
def test_a_key_that_is_gone_is_no_difference_if_all_runs_have_its_value_now(transfer, lines):
    current = json.loads(json.dumps(to_dict(recipe("maze"))))
    saved = current | {"vllm": current["vllm"] | {"transfer": transfer}}
    assert differences(run_folder.completed(saved, current, Config), current) == lines
