"""Reward specs in a config: what loads, and the messages for bad specs."""

import math
import sys

import pytest

from nlgrpo.rewards.reward_functions import Reward, score
from nlgrpo.rewards.specs import load_reward

REWARD_FILE = """
import asyncio
from dataclasses import dataclass

loaded = []

def plain(completions, bonus=0.0, **columns):
    return [bonus + len(c) for c in completions]

async def waits(completions, *, answer):
    await asyncio.sleep(0)
    return [float(a) for a in answer]

@dataclass
class Constant:
    scale: float

    def __call__(self, completions, **_):
        return [self.scale] * len(completions)

constant = Constant(2.0)
number = 3
"""


@pytest.fixture
def reward_file(tmp_path, monkeypatch):
    (tmp_path / "my.rewards.py").write_text(REWARD_FILE)
    monkeypatch.chdir(tmp_path)
    return "my.rewards.py"


@pytest.mark.parametrize(
    ("target", "first"),
    [
        ("plain", 8),
        ("plain(bonus=0.5)", 8.5),
        ("plain( bonus = -1 , )", 7),
        ("waits", 0),
        ("waits(answer=['7', '7', '7', '7', '7', '7'])", 7),  # overrides the column
        ("constant", 2),
        ("Constant(scale=4)", 4),
    ],
)
def test_functions_of_a_file_load(reward_file, target, first):
    reward = load_reward("mine", f"{reward_file}:{target}", timeout=5, on_error="skip")
    assert (reward.name, reward.timeout, reward.on_error) == ("mine", 5, "skip")
    lists = {"prompts": ["q"] * 6, "completions": ["answer 0"] * 6, "completion_ids": [[1]] * 6}
    result = score([reward], **lists, columns={"answer": ["0"] * 6}, samples=2, step=0, total_steps=1)
    assert result.values["mine"].tolist() == [[first] * 2] * 3
    assert "rewards" not in sys.modules
    assert "my.rewards" not in sys.modules


def test_a_file_is_loaded_once_and_a_broken_one_is_refused(reward_file, tmp_path):
    load_reward("a", f"{reward_file}:plain").function.func.__globals__["loaded"].append(1)
    assert load_reward("b", f"{tmp_path}/{reward_file}:plain").function.func.__globals__["loaded"] == [1]
    (tmp_path / "broken.py").write_text("import json\nraise OSError('no key')\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'a' = .*OSError: no key \(.*broken.py, line 2\)"):
            load_reward("a", "broken.py:f")


def test_classes_of_a_module_load():
    value = load_reward("mine", "nlgrpo.rewards.builtin:Length(target=1, scale=2)").function(completion_ids=[[1, 2]])
    assert value == [-0.25]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("lenght(target=1)", "did you mean 'length'"),
        ("lenght", r"(?s)lexicon\(path, normalize\).*package.module:function.*path/to/file.py:function"),
        ("", "there is no reward ''"),
        (":", "there is no reward"),
        ("math:", "there is no reward"),
        (None, "expected a string"),
        ("length(taget=1, scale=2)", "does not take 'taget'; did you mean 'target'.*It takes: target, scale"),
        ("length(target=1)", "length needs scale"),
        ("length(1, 2)", "every argument needs a name"),
        ("length(target=1, target=2, scale=3)", "target is given twice"),
        ("length(**{'target': 1})", r"\*\* is not supported"),
        ("length(target=1, scale=2))", "cannot read the arguments"),
        ("length(target=1)(scale=2)", "cannot read the arguments"),
        ("length(target=1, scale=__import__('os').getpid())", "cannot read the arguments"),
        ("length(target=1, scale=0)", "scale must be above 0"),
        ("length(target='1', scale=2)", "target must be a number"),
        ("no.such.module:f", "No module named 'no'.*path/to/file.py:function"),
        ("math:sqroot", "math has no 'sqroot'; did you mean 'sqrt'"),
        ("math:pi", "is not a function; its type is float"),
        ("nowhere.py:f", "there is no file 'nowhere.py'"),
        ("my.rewards.py:plan", "did you mean 'plain'"),
        ("my.rewards.py:number", "is not a function; its type is int"),
        ("my.rewards.py:waits(bonus=1)", "does not take 'bonus'.*completions, answer"),
        ("my.rewards.py:Constant", "needs scale"),
    ],
)
def test_bad_specs_are_refused_with_a_clear_message(reward_file, spec, says):
    with pytest.raises(ValueError, match=says) as error:
        load_reward("mine", spec)
    assert "reward 'mine'" in str(error.value)


def test_nothing_in_a_spec_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="cannot read"):
        load_reward("mine", "length(target=open('hacked', 'w'), scale=1)")
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("timeout", [0, -1, math.nan, "5", None, True])
def test_bad_timeouts_are_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be a number of seconds > 0"):
        load_reward("mine", "length(target=1, scale=2)", timeout=timeout)


def test_bad_on_error_name_and_function_are_refused():
    with pytest.raises(ValueError, match="'stop' or 'skip', got 'ignore'"):
        load_reward("mine", "length(target=1, scale=2)", on_error="ignore")
    with pytest.raises(ValueError, match="needs a name"):
        load_reward("", "length(target=1, scale=2)")
    with pytest.raises(ValueError, match="expected a function"):
        Reward("mine", "length")
