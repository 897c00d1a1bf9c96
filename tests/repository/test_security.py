"""Secrets are never saved, and the checks of security can fail."""

import json
import os
import subprocess
import sys

import pytest
from support.helpers import REPOSITORY, tiny_model

from nlgrpo import cli, train
from nlgrpo.rewards.specs import load_reward
from nlgrpo.runtime import secrets

SECRETS = {
    "a password in an address": "http://me:hunter2@host:8000/v1",
    "a key in an address": "https://host/v1?model=a&api_key=hunter2",
    "a token of Hugging Face": "hf_" + "Ab3" * 11,
    "a key of an API": "sk-proj-" + "Ab3_" * 8,
    "a token of GitHub": "ghp_" + "Ab3" * 12,
    "a key of AWS": "AKIA" + "ABCDEFGHIJKLMNOP",
}
HARMLESS = [
    "http://host:8000/v1",
    "https://host/v1?model=a&limit=3",
    "judge(model='gpt-5', key='OPENAI_API_KEY', criteria='is it at 10:30, me@host?')",
    "meta-llama/Llama-3.2-1B",
    "my_rewards.py:sk_learn",
    "runs/sk-short",
    "length(target=25)",
    "hf_transfer",
    "a@b://c",
]


@pytest.mark.parametrize(("kind", "text"), SECRETS.items())
def test_a_secret_is_found_and_hidden(kind, text):
    assert secrets.found(f"prefix {text} suffix") == kind
    hidden = secrets.hide(f"error: GET {text} failed")
    assert "hunter2" not in hidden
    assert "Ab3" not in hidden
    assert "***" in hidden
    [fault] = secrets.faults({"a": {"b": 1, "c": ["x", text]}})
    assert fault.startswith(f"a.c seems to hold {kind}.")
    assert text not in fault


@pytest.mark.parametrize("text", HARMLESS)
def test_other_texts_are_no_secrets(text):
    assert secrets.found(text) == ""
    assert secrets.hide(text) == text


@pytest.fixture
def work(tmp_path):
    tiny_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1"}\n{"prompt": "w2"}\n')
    return tmp_path


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rewards.a.function", "judge(model='m', base_url='http://me:hunter2@host/v1', criteria='good?')"),
        ("vllm.servers", "http://me:hunter2@host:8000"),
        ("model.path", "https://host/model?token=hunter2"),
        ("train.run-name", "hf_" + "Ab3" * 11),
    ],
)
def test_a_configuration_with_a_secret_is_refused_before_it_is_saved(work, capsys, key, value):
    options = {"model.path": work / "model", "data.source": work / "prompts.jsonl", "train.out": work / "run"}
    options |= {"rewards.a.function": "length(target=3)"} | {key: value}
    assert train.main(["blank", *(part for k, v in options.items() for part in (f"--{k}", str(v)))]) == 2
    said = capsys.readouterr()
    assert "seems to hold" in said.err
    assert "hunter2" not in said.err + said.out
    assert "Ab3" not in said.err + said.out
    assert not (work / "run").exists()


@pytest.mark.parametrize("command", [["reward-model", "train"], ["value", "train"]])
def test_other_trainings_refuse_secrets_too(work, capsys, command):
    key = "--data.source" if command[0] == "reward-model" else "--data.rollouts"
    assert cli.main([*command, key, "http://me:hunter2@host/data", "--train.out", str(work / "run")]) == 2
    said = capsys.readouterr()
    assert "seems to hold a password" in said.err
    assert "hunter2" not in said.err + said.out


def test_a_reward_with_a_secret_is_refused():
    with pytest.raises(ValueError, match="seems to hold a password in an address") as error:
        load_reward("choose", "judge(model='m', base_url='http://me:hunter2@host/v1', criteria='good?')")
    assert "hunter2" not in str(error.value)


@pytest.mark.slow
def test_secrets_of_the_environment_are_in_no_file_of_a_run(work, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "Ab3" * 14)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "Ab3" * 11)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-" + "Ab3" * 11)
    options = {
        "model.path": work / "model",
        "data.source": work / "prompts.jsonl",
        "train.out": work / "run",
        "train.steps": 1,
        "rewards.a.function": "length(target=3, scale=10)",
        "rollout.prompts": 2,
        "rollout.samples": 2,
        "rollout.max_new_tokens": 4,
        "evaluation.prompts": 0,
    }
    assert train.main(["blank", *(part for k, v in options.items() for part in (f"--{k}", str(v)))]) == 0
    files = [path for path in (work / "run").rglob("*") if path.is_file()]
    assert len(files) > 8
    assert not [path for path in files if b"Ab3Ab3" in path.read_bytes()]
    assert all(path.stat().st_mode & 0o022 == 0 for path in files)  # nobody else can write them


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("import subprocess\nsubprocess.run(name, shell=True)", "B602"),
        ("import pickle\npickle.loads(content)", "B301"),
        ("import torch\ntorch.load(path)", "B614"),
        ("import yaml\nyaml.load(text)", "B506"),
        ("eval(text)", "B307"),
        ("exec(text)", "B102"),
        ("import tarfile\ntarfile.open(path).extractall()", "B202"),
        ("import hashlib\nhashlib.md5(content)", "B324"),
        ("import requests\nrequests.get(url, verify=False)", "B501"),
    ],
)
def test_bandit_finds(tmp_path, code, test):
    pytest.importorskip("bandit", reason="pip install -e '.[dev]'")
    (tmp_path / "bad.py").write_text(f"{code}\n")
    command = [sys.executable, "-m", "bandit", "--quiet", "--configfile", str(REPOSITORY / "pyproject.toml")]
    found = subprocess.run([*command, "--format", "json", str(tmp_path / "bad.py")], capture_output=True, text=True,
                           check=False, env={**os.environ, "PYTHONWARNINGS": "ignore"})  # fmt: skip
    assert found.returncode == 1
    assert test in {issue["test_id"] for issue in json.loads(found.stdout)["results"]}
