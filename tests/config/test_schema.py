"""Configurations: refused values and messages, TOML files, the command line, and their precedence."""

import ast
import dataclasses
import inspect
import json
import math
import re
import typing

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from nlgrpo import train
from nlgrpo.apps.guided.value_config import TrainerOptions, ValueConfig
from nlgrpo.apps.reward_model.config import RewardModelConfig
from nlgrpo.config import schema, validate
from nlgrpo.config.recipes import from_arguments, recipe
from nlgrpo.config.schema import Config, RewardConfig
from nlgrpo.model import hf_weights

SECTIONS = {name: kind for name, kind in typing.get_type_hints(Config).items() if dataclasses.is_dataclass(kind)}
KEYS = [f"{section}.{f.name}" for section, kind in SECTIONS.items() for f in dataclasses.fields(kind)]
QUICK = ("--evaluation.prompts", "0", "--dry-run")


def changed(**values):
    """Return the recipe `length-bon` with ``section__key`` values changed."""
    cfg = recipe("length-bon")
    for name, value in values.items():
        section, key = name.split("__", 1)
        setattr(getattr(cfg, section), key, value)
    return cfg


def faults(cfg, **ranks):
    with pytest.raises(ValueError, match="the configuration cannot be run:\n") as caught:
        validate.check_config(cfg, **ranks)
    return str(caught.value).splitlines()[1:]


def read(*arguments):
    return from_arguments(list(arguments))[0]


@pytest.fixture
def toml(tmp_path):
    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


# --- values out of range ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("rollout.samples", 1, ">= 2, because the baseline is the mean of the group; 1 with loss.baseline = 'none'"),
        ("rollout.prompts", 0, ">= 1"),
        ("rollout.max_new_tokens", 0, ">= 1"),
        ("rollout.temperature", 0.0, "> 0"),
        ("rollout.temperature", math.nan, "> 0"),
        ("rollout.temperature", math.inf, "> 0, and below 2^63"),
        ("rollout.top_k", -1, ">= 0 (0: off)"),
        ("rollout.top_p", 0.0, "in (0, 1]"),
        ("rollout.top_p", 1.5, "in (0, 1]"),
        ("rollout.min_p", -0.1, "in [0, 1]"),
        ("rollout.stop_ids", (3, -1), ">= 0"),
        ("rollout.max_rows", 0, ">= 1 or none"),
        ("loss.beta", -1e-4, ">= 0"),
        ("loss.beta", math.nan, ">= 0"),
        ("loss.target_kl", 0.0, "> 0 or none"),
        ("loss.epochs", 0, ">= 1"),
        ("loss.minibatches", 0, ">= 1"),
        ("optim.lr", -1.0, ">= 0"),
        ("optim.lr", math.inf, ">= 0, and below 2^63"),
        ("optim.warmup_steps", -1, ">= 0"),
        ("optim.betas", (0.9, 1.0), "two values in [0, 1)"),
        ("optim.betas", (0.9,), "two values in [0, 1)"),
        ("optim.eps", 0.0, "> 0"),
        ("optim.weight_decay", -0.1, ">= 0"),
        ("optim.max_grad_norm", -1.0, ">= 0 (0: never clipped)"),
        ("optim.momentum", 1.0, "in [0, 1)"),
        ("optim.momentum", math.nan, "in [0, 1)"),
        ("optim.ns_steps", 0, "in [1, 99]"),
        ("data.first_words", 0, "in [1, 2147483648) or none"),
        ("data.limit", 0, ">= 1 or none"),
        ("data.cut_after", "", "a text or none"),
        ("data.separator", "", "a text or none"),
        ("train.steps", -1, ">= 0"),
        ("train.seed", -1, ">= 0"),
        ("train.seed", 2**63, ">= 0, and below 2^63"),
        ("train.micro_batch_tokens", 0, ">= 1 or none"),
        ("train.checkpoint_every", -1, ">= 0 (0: only at the end)"),
        ("train.keep_checkpoints", 0, ">= 1"),
        ("train.samples_every", -1, ">= 0 (0: never)"),
        ("evaluation.prompts", -1, ">= 0 (0: no evaluation)"),
        ("train.timeout", math.nan, "> 0 (inf: no limit)"),
        ("evaluation.samples", 0, ">= 1"),
        ("evaluation.ns", (0, 4), "between 1 and evaluation.samples = 16"),
        ("evaluation.ns", (17,), "between 1 and evaluation.samples = 16"),
        ("evaluation.ns", (), "between 1 and evaluation.samples = 16"),
    ],
)
def test_values_out_of_range_are_reported_with_the_allowed_range(name, value, allowed):
    lines = faults(changed(**{name.replace(".", "__"): value}))
    assert f"  {name} = {value!r}: allowed is {allowed}" in lines


@pytest.mark.parametrize("kind", [Config, RewardConfig, RewardModelConfig, ValueConfig, TrainerOptions])
def test_defaults_are_within_their_bounds(kind):
    assert list(schema.out_of_bounds(kind())) == []


@pytest.mark.parametrize(
    ("bound", "text", "inside", "outside"),
    [
        ({"ge": 1}, ">= 1", (1, 2.5), (0, -math.inf)),
        ({"gt": 0}, "> 0", (1e-9,), (0, -1)),
        ({"ge": 0, "le": 1}, "in [0, 1]", (0, 1), (-0.1, 1.1)),
        ({"gt": 0, "le": 1}, "in (0, 1]", (1,), (0, 2)),
        ({"ge": 0, "lt": 1}, "in [0, 1)", (0, 0.999), (1,)),
    ],
)
def test_bounds(bound, text, inside, outside):
    made = schema.Bound(**bound)
    assert str(made) == text
    assert all(map(made.holds, inside))
    assert not any(map(made.holds, (*outside, math.nan)))


def test_limits_of_time_may_be_infinite():
    validate.check_config(changed(train__timeout=math.inf, train__grace_period=math.inf))


def test_bounds_of_the_critic_are_for_ppo():
    cfg = changed(critic__lr=-1.0)
    validate.check_config(cfg)
    cfg.loss.algorithm = "ppo"
    assert "  critic.lr = -1.0: allowed is >= 0" in faults(cfg)


def test_an_unbiased_objective_needs_enough_samples():
    cfg = recipe("length-bon")
    cfg.rewards["short"].objective, cfg.rewards["long"].objective = "bon:8:unbiased", "wor:9:unbiased"
    assert faults(cfg) == ["  rewards.long.objective = 'wor:9:unbiased': needs rollout.samples >= 9"]


@pytest.mark.parametrize(
    ("aggregate", "weights", "message"),
    [
        ("max", (1, 1), "expected 'sum', 'min' or 'smooth_min:GAMMA'"),
        ("smooth_min:-1", (1, 1), "GAMMA > 0"),
        ("min", (1, -1), "expected numbers >= 0"),
    ],
)
def test_invalid_aggregates(aggregate, weights, message):
    cfg = recipe("length-bon")
    cfg.loss.aggregate = aggregate
    for reward, weight in zip(cfg.rewards.values(), weights, strict=True):
        reward.weight = weight
    (line,) = faults(cfg)
    assert line.startswith("  loss.aggregate: ")
    assert message in line
    cfg.loss.aggregate, cfg.loss.aggregate_at, cfg.loss.aggregate_memory = "sum", "prompt", 0.5
    (line,) = faults(cfg)
    assert "loss.aggregate_memory" in line
    cfg.loss.aggregate_at, cfg.loss.aggregate_memory = "batch", 1.0
    (line,) = faults(cfg)
    assert line == "  loss.aggregate_memory = 1.0: allowed is in [0, 1)"


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("bon:0", "BestOfN(n=0): expected an integer >= 1"),
        ("bon:-2", "n=-2"),
        ("soft:0", "tau"),
        ("soft:-1", "tau"),
        ("soft:nan", "tau"),
        ("bno:4", "did you mean 'bon:N'?"),
        ("", "objective"),
    ],
)
def test_invalid_objectives(objective, message):
    cfg = recipe("length-bon")
    cfg.rewards["short"].objective = objective
    (line,) = faults(cfg)
    assert line.startswith("  rewards.short.objective: ")
    assert message in line


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("function", "", "rewards.x.function is missing"),
        ("weight", math.nan, "rewards.x.weight = nan: allowed is a finite number"),
        ("weight", 0.0, "every reward has weight 0"),
        ("scale", 0.0, "rewards.x.scale = 0.0: allowed is a finite number other than 0"),
        ("scale", math.inf, "rewards.x.scale = inf"),
        ("timeout", 0.0, "rewards.x.timeout = 0.0: allowed is > 0 (inf: no limit)"),
        ("timeout", math.nan, "rewards.x.timeout = nan"),
    ],
)
def test_invalid_rewards(key, value, message):
    cfg = Config(rewards={"x": dataclasses.replace(RewardConfig("length(target=3, scale=9)"), **{key: value})})
    (line,) = faults(cfg)
    assert message in line


def test_reward_names_must_be_valid_and_distinct_on_the_command_line():
    one = RewardConfig("length(target=3, scale=9)")
    validate.check_config(Config(rewards={"a-b": one, "ab2": one}))
    for name in ("", "a b", "a/b", "a.b", "-a", "..", "../a", "/a", "a\n", "<b>", "a" * 65):
        (line,) = faults(Config(rewards={name: one}))
        assert f"{name!r} is not a valid name" in line
    (line,) = faults(Config(rewards={"a-b": one, "a_b": one}))
    assert "differ only in - and _" in line


def test_ranks_must_divide_the_batch():
    validate.check_config(changed(rollout__prompts=6), world=3)
    (line,) = faults(changed(rollout__prompts=6), world=4)
    assert line == "  rollout.prompts = 6: it must be a multiple of the number of ranks, 4"


def test_settings_that_contradict_each_other():
    for changes, message in (
        ({"loss__kl_importance": True, "loss__kl": "k1"}, "needs loss.kl = 'k3' and loss.kl_in = 'loss', got 'k1'"),
        ({"loss__kl_importance": True, "loss__kl_in": "reward"}, "got 'k3' and 'reward'"),
        ({"loss__scale": "group", "loss__baseline": "none"}, "needs a baseline, which 'none' does"),
        ({"loss__target_kl": 0.1, "loss__beta": 0.0}, "so loss.beta must start above 0"),
        ({"loss__minibatches": 49}, "more than the completions per step"),
    ):
        assert message in faults(changed(**changes))[0]
    validate.check_config(changed(loss__scale="group", loss__baseline="loo"))
    validate.check_config(changed(loss__minibatches=48))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss__eps_low": -0.1}, r"loss\.eps_low=-0\.1, .*expected 0 <= eps_low <= 1"),
        ({"loss__eps_low": 1.5}, r"loss\.eps_low=1\.5, .*expected 0 <= eps_low <= 1"),
        ({"loss__eps_high": math.nan}, r"eps_high=nan: expected .* eps_high >= 0"),
        ({"loss__dual_clip": 1.2}, r"loss\.dual_clip=1\.2: expected None or a number > 1 \+ eps_high"),
        ({"loss__dual_clip": 3.0, "loss__surrogate": "cispo"}, r"loss\.dual_clip=3\.0: expected None with surrogate"),
    ],
)
def test_settings_of_the_policy_loss_are_checked_where_they_are_used(changes, message):
    with pytest.raises(ValueError, match=message):
        validate.check_config(changed(**changes))


def test_all_faults_are_reported_together():
    cfg = changed(rollout__samples=1, loss__eps_low=-0.1, train__steps=-1)
    cfg.rewards["short"].objective = "bon:0"
    cfg.rewards["long"].timeout = -1.0
    lines = faults(cfg, world=4)
    found = [re.match(r"  ([\w.]+)", line)[1] for line in lines]
    here = {"rollout.samples", "rollout.prompts", "loss.eps_low", "train.steps"}
    assert len(found) == 6
    assert set(found) == here | {"rewards.short.objective", "rewards.long.timeout"}


def test_a_configuration_without_rewards_is_refused(capsys):
    assert train.main(["blank", "--data.source", "story-prompts", *QUICK]) == 2
    assert "there is no reward: give one with --rewards.NAME.function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.source", "empty.jsonl"], "empty.jsonl is empty: it has no example"),
        (["--data.source", "questions.jsonl"], "has no column 'prompt'. It has question."),
        (["--data.source", "questions.jsonl", "--data.prompt_column", "qestion"], "did you mean 'question'"),
        (["--data.source", ""], "data.source is empty"),
        (["length-bon", "--rollout.max-new-tokens", "160"], "leaves no room for a prompt in the context of 160 tokens"),
        (["--rewards.x.function", "nothere.py:f"], "there is no file 'nothere.py'"),
    ],
)
def test_missing_files_and_names_end_with_a_message(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "questions.jsonl").write_text('{"question": "Why?"}\n')
    assert train.main([*arguments, *QUICK]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert message in shown
    assert "Traceback" not in shown


# --- TOML -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle.path = 'x'", "unknown key 'modle'; did you mean 'model'?"),
        ("steps = 3", "unknown key 'steps'; did you mean 'train.steps'?"),
        ("[rollout]\nsample = 3", "unknown key 'rollout.sample'; did you mean 'rollout.samples'?"),
        ("[train]\nlr = 1e-3", "unknown key 'train.lr'; did you mean 'critic.lr' or 'optim.lr'?"),
        ("[train]\nprompts = 3", "did you mean 'rollout.prompts' or 'evaluation.prompts'?"),
        ("[rewards.x]\nfuncton = 'f'", "unknown key 'rewards.x.functon'; did you mean 'rewards.x.function'?"),
        ("[optim]\nzzzzz = 1", "unknown key 'optim.zzzzz'; known keys: optim.algorithm, optim.lr, optim.schedule"),
        ("zzzzz = 1", "known keys: recipe, model, lora, parallel, data"),
        ("recipe = 'lenght-bon'", "unknown recipe 'lenght-bon'; did you mean 'length-bon'?"),
        ("recipe = 3", "recipe = 3: expected str"),
        ("model = 3", "model must be a table, got 3"),
        ("rewards = 'length'", "rewards must be a table, got 'length'"),
        ("rewards.x = 3", "rewards.x.function = 3: expected str"),
        ("[train]\nsteps = '3'", "train.steps = '3': expected int"),
        ("[train]\nsteps = 3.0", "train.steps = 3.0: expected int"),
        ("[train]\nsteps = true", "train.steps = True: expected int"),
        ("[data]\nadd_bos = 1", "data.add_bos = 1: expected bool or none"),
        ("[optim]\nlr = '1e-3'", "optim.lr = '1e-3': expected float"),
        ("[optim]\nalgorithm = 'sgd'", "optim.algorithm = 'sgd': expected 'adamw' or 'muon'"),
        ("[optim]\nlr = true", "optim.lr = True: expected float"),
        (f"[optim]\nlr = {10**400}", "expected float"),
        ("[optim]\nbetas = 0.9", "optim.betas = 0.9: expected a list of float"),
        ("[optim]\nbetas = [0.9, 'x']", "optim.betas = 'x': expected float"),
        ("[rollout]\nstop_ids = [1, 2.5]", "rollout.stop_ids = 2.5: expected int"),
        ("[loss]\nkl = 'k4'", "loss.kl = 'k4': expected 'k1' or 'k2' or 'k3'"),
        ("[loss]\nkl = ['k3']", "expected 'k1' or 'k2' or 'k3'"),
        ("[data]\nsource = 1979-05-27", "expected str"),
        ("[data", "is not TOML: Expected ']'"),
        ("a = 1\na = 2", "is not TOML: Cannot overwrite a value"),
    ],
)
def test_errors_in_a_file_name_the_file_and_the_key(text, message, toml):
    path = toml(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(path)
    assert path in str(caught.value) or "unknown recipe" in message


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"no configuration file .*folder\.toml"):
        read(str(tmp_path / "folder.toml"))
    with pytest.raises(ValueError, match=r"bytes\.toml is not TOML: 'utf-8' codec"):
        read(str(tmp_path / "bytes.toml"))


def test_every_key_can_be_set_in_a_file(toml):
    """The defaults written as TOML and read back are unchanged, so TOML can express the type of every key."""
    lines = []
    for section, kind in SECTIONS.items():
        lines += [f"[{section}]"]
        lines += [f"{k} = {json.dumps(v)}" for k, v in dataclasses.asdict(kind()).items() if v is not None]
    cfg = read(toml("\n".join(lines)))
    assert dataclasses.replace(cfg, recipe="blank") == Config()


def test_missing_keys_are_none_and_values_are_converted_to_their_type(toml):
    cfg = read(toml("[loss]\ntarget_kl = 1\n[optim]\nbetas = [0, 0.5]\n[rollout]\nstop_ids = [7]\n[data]\nlimit = 5"))
    assert cfg.loss.target_kl == 1.0
    assert isinstance(cfg.loss.target_kl, float)
    assert cfg.optim.betas == (0.0, 0.5)
    assert cfg.rollout.stop_ids == (7,)
    assert (cfg.data.limit, cfg.data.first_words) == (5, None)


def test_a_table_of_rewards_replaces_those_of_the_recipe(toml):
    cfg = read(toml("recipe = 'length-bon'\n[rewards.only]\nfunction = 'gsm8k()'\nweight = 2"))
    assert cfg.rewards == {"only": RewardConfig("gsm8k()", weight=2.0)}
    assert cfg.optim == recipe("length-bon").optim
    assert read(toml("recipe = 'length-bon'")).rewards == recipe("length-bon").rewards


def test_a_reward_can_be_given_by_its_function_only(toml):
    cfg = read(toml('rewards.x = "length(target=3, scale=9)"\nrewards.y = {function = "gsm8k()", objective = "mean"}'))
    assert cfg.rewards == {"x": RewardConfig("length(target=3, scale=9)"), "y": RewardConfig("gsm8k()", "mean")}


def test_the_command_line_overrides_the_file_which_overrides_the_recipe(toml):
    path = toml("[rollout]\nprompts = 4\nsamples = 4\n[rewards.x]\nfunction = 'gsm8k()'\nweight = 3")
    cfg = read("length-mean", path, "--rollout.samples", "2", "--rewards.x.objective", "mean")
    assert (cfg.rollout.prompts, cfg.rollout.samples) == (4, 2)
    assert cfg.rollout.max_new_tokens == recipe("length-mean").rollout.max_new_tokens
    assert cfg.rewards == {"x": RewardConfig("gsm8k()", "mean", 3.0)}
    assert cfg.recipe == "length-mean"


def test_tiny_lays_a_table_of_the_file_over_it(toml):
    path = toml("[rollout]\nprompts = 4\nsamples = 4\n[tiny.rollout]\nprompts = 2\n[tiny.optim]\nlr = 0.5", "mine.toml")
    cfg = read(path)
    assert (cfg.recipe, cfg.rollout.prompts, cfg.rollout.samples) == ("mine", 4, 4)
    tiny = read(path, "--tiny", "--rollout.samples", "8")
    assert (tiny.recipe, tiny.rollout.prompts, tiny.rollout.samples, tiny.optim.lr) == ("mine-tiny", 2, 8, 0.5)
    assert str(tiny.run) == "runs/mine-tiny"  # beside the run of the file itself
    named = toml("recipe = 'length-mean'\n[tiny.rollout]\nprompts = 2")
    assert read(named, "--tiny") == dataclasses.replace(
        recipe("length-mean"),
        recipe="length-mean-tiny",
        rollout=dataclasses.replace(recipe("length-mean").rollout, prompts=2),
    )


def test_tiny_keeps_what_it_does_not_name(toml):
    """The keys of a reward, the other rewards, and the folder of the run itself."""
    path = toml(
        "train.out = 'runs/big'\n"
        "rewards.short = {function = 'length(target=9)', objective = 'bon:8', weight = 0.5}\n"
        "rewards.long = 'length(target=90)'\n"
        "[tiny.rewards.short]\nfunction = 'length(target=3)'"
    )
    cfg = read(path, "--tiny")
    assert cfg.rewards == {
        "short": RewardConfig("length(target=3)", "bon:8", 0.5),
        "long": RewardConfig("length(target=90)"),
    }
    assert (str(cfg.run), str(read(path).run)) == ("runs/big-tiny", "runs/big")
    own = toml("train.out = 'runs/big'\n[tiny.train]\nout = 'runs/small'")
    assert str(read(own, "--tiny").run) == "runs/small"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("tiny.recipe = 'maze'", [], "[tiny] cannot name a recipe"),
        ("[rollout]\nprompts = 2", ["--tiny"], "has no table [tiny], which --tiny lays over the file"),
        ("tiny = 3", [], "tiny must be a table, got 3"),
        ("[tiny.rollout]\nprompt = 2", [], "[tiny]: unknown key 'rollout.prompt'"),  # also without --tiny
        ("[tiny.rollout]\nprompts = 'x'", [], "[tiny]: rollout.prompts = 'x': expected"),
    ],
)
def test_faults_of_the_table_tiny_are_named(toml, text, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(toml(text), *arguments)


def test_tiny_needs_a_file():
    with pytest.raises(ValueError, match=r"--tiny needs a \.toml file"):
        read("length-bon", "--tiny")


def test_a_file_may_name_its_recipe(toml):
    assert read(toml("recipe = 'length-mean'")) == recipe("length-mean")
    assert read(toml("recipe = 'length-mean'", "length-mean.toml")) == recipe("length-mean")
    assert read("length-mean", toml("recipe = 'length-mean'")) == recipe("length-mean")
    with pytest.raises(ValueError, match=r"names the recipe 'length-bon', but 'length-mean' was given"):
        read("length-mean", toml("recipe = 'length-bon'"))


def test_a_file_without_a_recipe_names_the_run(toml):
    cfg = read(toml("train.steps = 7", "seven.toml"))
    assert (cfg.recipe, cfg.train.steps, str(cfg.run)) == ("seven", 7, "runs/seven")
    assert dataclasses.replace(cfg, recipe="blank", train=schema.TrainConfig()) == recipe("blank")


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data.source = 'mine.jsonl'", "data.source = 'mine.jsonl' is beside this file"),
        ("data.evaluation = 'mine.jsonl'", "data.evaluation = 'mine.jsonl' is beside this file"),
        ("[rewards.x]\nfunction = 'mine.py:f'", "rewards.x.function = 'mine.py:f' is beside this file"),
    ],
)
def test_paths_in_a_file_are_relative_to_the_working_directory(tmp_path, monkeypatch, text, message):
    (tmp_path / "configs").mkdir()
    file = tmp_path / "configs" / "mine.toml"
    file.write_text(text)
    for name in ("mine.jsonl", "mine.py"):
        (tmp_path / "configs" / name).write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        read("configs/mine.toml")
    assert "write 'configs/mine." in str(caught.value)
    read("configs/mine.toml", "--data.source", "a", "--data.evaluation", "b", "--rewards.x.function", "gsm8k()")
    monkeypatch.chdir(tmp_path / "configs")
    read("mine.toml")
    monkeypatch.chdir(tmp_path)
    for name in ("mine.jsonl", "mine.py"):
        (tmp_path / "configs" / name).unlink()
    read("configs/mine.toml")  # nowhere: the reader of the file says so


@pytest.mark.parametrize(
    ("name", "whose", "source"),
    [
        ("", "those that a file starts from", "''"),
        ("blank", "those that a file starts from", "''"),
        ("length-bon", "those of `length-bon`", "story-prompts"),
        ("mine.toml", "those of `mine`", "mine.jsonl"),
    ],
)
def test_help_says_whose_defaults_it_shows(capsys, tmp_path, monkeypatch, name, whose, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('[data]\nsource = "mine.jsonl"\n')
    with pytest.raises(SystemExit):
        read(*[name] * bool(name), "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert f"The defaults below are {whose}." in shown
    assert f"(default: {source})" in shown


@pytest.mark.parametrize("dash", ["-", "_"])
def test_numbers_lists_and_none(dash):
    def key(name):
        return "--" + name.replace("_", dash)

    arguments = [key("data.first_words"), "3", key("rollout.stop_ids"), "1", "2"]
    cfg = read(*arguments, key("data.add_bos"), "True", "--optim.betas", "0.5", "0.6", key("loss.target_kl=0.1"))
    assert (cfg.data.first_words, cfg.rollout.stop_ids) == (3, (1, 2))
    assert (cfg.data.add_bos, cfg.optim.betas, cfg.loss.target_kl) == (True, (0.5, 0.6), 0.1)
    cfg = read(key("data.first_words"), "None", key("rollout.stop_ids"), key("data.add_bos"), "None")
    assert (cfg.data.first_words, cfg.rollout.stop_ids, cfg.data.add_bos) == (None, (), None)


@pytest.mark.parametrize(
    ("arguments", "shuffle", "importance", "restart"),
    [
        ([], True, None, False),
        (["--train.restart", "--data.no-shuffle", "--loss.kl_importance"], False, True, True),
        (["--loss.kl-importance", "--train.restart", "--data.no-shuffle"], False, True, True),
        (["--loss.no-kl-importance", "--data.shuffle", "true"], True, False, False),
        (["--loss.kl_importance", "false", "--train.restart"], True, False, True),
        (["--loss.kl-importance=none", "--train.restart=false"], True, None, False),
        (["--data.shuffle", "False", "--loss.kl_importance=true", "--train.restart", "true"], False, True, True),
        (["--data.shuffle=false", "--train.restart", "--optim.lr", "0.5"], False, None, True),
    ],
)
def test_switches(arguments, shuffle, importance, restart):
    cfg = read("length-bon", *arguments)
    assert (cfg.data.shuffle, cfg.loss.kl_importance, cfg.train.restart) == (shuffle, importance, restart)


def test_a_switch_is_on_or_off(capsys):
    with pytest.raises(SystemExit):
        read("length-bon", "--data.shuffle", "perhaps")
    assert "perhaps" in capsys.readouterr().err


def test_dry_run_may_be_at_any_position():
    for arguments in (["--dry-run", "length-mean"], ["length-mean", "--train.steps", "3", "--dry-run"]):
        cfg, dry_run = from_arguments(arguments)
        assert (cfg.recipe, dry_run) == ("length-mean", True)
    assert from_arguments([])[1] is False


def test_a_reward_from_the_command_line_is_added_to_those_of_the_recipe():
    cfg = read(
        "length-bon", "--rewards.new.function", "gsm8k()", "--rewards.new.weight=2", "--rewards.long.weight", "0.25"
    )
    assert list(cfg.rewards) == ["short", "long", "new"]
    assert cfg.rewards["new"] == RewardConfig("gsm8k()", weight=2.0)
    assert cfg.rewards["long"].weight == 0.25
    assert cfg.rewards["long"].function == recipe("length-bon").rewards["long"].function
    assert cfg.rewards["short"] == recipe("length-bon").rewards["short"]


def test_dots_in_a_value_are_not_part_of_the_key():
    cfg = read("blank", "--rewards.x.function=length(target=2.5, scale=9.0)")
    assert cfg.rewards == {"x": RewardConfig("length(target=2.5, scale=9.0)")}
    cfg = read("blank", "--rewards.x.function", "my.package:function")
    assert cfg.rewards == {"x": RewardConfig("my.package:function")}


def test_hyphens_and_underscores_in_reward_names_are_equivalent():
    cfg = read("blank", "--rewards.two_words.function", "gsm8k()", "--rewards.two-words.weight", "2")
    assert cfg.rewards == {"two_words": RewardConfig("gsm8k()", weight=2.0)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.stps", "3"], "--train.steps"),
        (["--rollot.samples", "3"], "--rollout.samples"),
        (["--steps", "3"], "--train.steps"),
        (["--rewards.new.functio", "f"], "--rewards.new.function"),
        (["--train.steps", "abc"], "'abc'"),
        (["--train.steps"], "--train.steps"),
        (["--optim.betas", "0.9"], "Expected 2 values"),
        (["--loss.kl", "k4"], "Expected one of ('k1', 'k2',"),
        (["--recipe", "blank"], "--recipe"),
    ],
)
def test_errors_on_the_command_line_suggest_the_nearest_key(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        read(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_arguments_that_are_not_utf_8_are_refused():
    with pytest.raises(ValueError, match="not valid UTF-8"):
        read("--data.template", "\udcff{prompt}")


@pytest.mark.parametrize("name", ["length-bon", "blank"])
def test_help_prints_every_key_with_its_description(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        read(name, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    flat = " ".join(re.sub(r"[^\x20-\x7e]", " ", shown).split())
    for key in KEYS:
        assert f"--{key.replace('_', '-')}" in shown, key
    for kind in (*SECTIONS.values(), RewardConfig):
        for text in documented(kind):
            assert text in flat, text
    first = "NAME" if name == "blank" else "short"
    for f in dataclasses.fields(RewardConfig):
        assert f"--rewards.{first}.{f.name.replace('_', '-')}" in shown
    assert "--dry-run" in shown


def documented(kind):
    """Yield the start of the docstring of every field, from the source; fail for a field without one."""
    body = ast.parse(inspect.getsource(kind)).body[0].body
    for node, text in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            assert isinstance(text, ast.Expr), f"{kind.__name__}.{node.target.id} has no docstring"
            yield " ".join(text.value.value.encode("unicode_escape").decode().replace("\\n", " ").split())[:40]


# --- logged rewards and the blank recipe ------------------------------------------------------------------------------


TINY = ("--rollout.prompts", "2", "--rollout.samples", "4", "--rollout.max-new-tokens", "8", "--data.limit", "4",
        "--train.steps", "2", "--optim.lr", "1e-2", "--evaluation.prompts", "0",
        "--data.source", "story-prompts")  # fmt: skip


def run(folder, *arguments):
    """Train two tiny steps. Return the metrics of each step and the final weights."""
    assert train.main([*arguments, *TINY, "--train.out", str(folder)]) == 0
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return metrics, load_file(folder / "model" / "model.safetensors")


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_reward_of_weight_0_is_logged_and_not_optimised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def total(completion_ids, **_):\n    return [float(sum(ids)) for ids in completion_ids]\n"
        "def never(completion_ids, **_):\n    return [None for ids in completion_ids]\n"
        "def highest(completion_ids, **_):\n    return [max(ids) / 1000 for ids in completion_ids]\n"
    )
    arguments = ["blank", "--rewards.x.function", "mine.py:highest"]
    metrics, weights = run(tmp_path / "alone", *arguments)
    assert not same(weights, load_file(hf_weights.locate("story-lm") / "model.safetensors"))  # the weights have changed
    arguments += ["--rewards.w.function", "mine.py:total", "--rewards.w.weight", "0"]
    arguments += ["--rewards.n.function", "mine.py:never", "--rewards.n.weight", "0"]
    watched, weights_then = run(tmp_path / "watched", *arguments)
    assert same(weights, weights_then)
    assert all(step["rewards/w/mean"] > 0 for step in watched)
    assert all(step["objective/w"] >= step["rewards/w/mean"] for step in watched)  # the best of four
    for before, after in zip(metrics, watched, strict=True):
        assert after["objective/aggregate"] == before["objective/aggregate"]
        assert after["reward"] == before["reward"]


def test_blank_with_only_command_line_arguments(capsys):
    """Model, data and reward from the command line, without a file and without rewards of a recipe."""
    arguments = ["blank", "--model.path", "story-lm", "--data.source", "story-prompts"]
    arguments += ["--rewards.x.function", "length(target=3, scale=9)", "--train.steps", "1", "--dry-run"]
    assert train.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "maximise 1 mean(x)" in shown
    assert "the mean is what GRPO maximises" in " ".join(shown.split())
    assert "short" not in shown


# --- random arguments -------------------------------------------------------------------------------------------------

NUMBERS = ["0", "-1", "1", "2", "3.5", "1e400", "nan", "-inf", "10" * 9, "9" * 40, "9" * 400, "None", "True", "0x10"]
TEXTS = [
    "", " ", "/", ".", "..", "~", "~nobody/x", "/etc", "/etc/passwd", "{", "{}", "{prompt}", "{prompt!r}", "a/b", "a:b",
    "x" * 300, "..:f", "os:getcwd", "length", "length(", "length(target=1)", "length(target='a', scale=1)",
    "lexicon(path=3)", "classifier(path=1)", "regex(pattern='(')", f"length(target={'9' * 400}, scale=1)", "bon:",
    "bon:1e9", "soft:x", ":", "mean:1", "story-lm", "story-prompts", "train", "grpo", "k1", "group",
]  # fmt: skip
REWARD_KEYS = [f"rewards.short.{f.name}" for f in dataclasses.fields(RewardConfig)]
word = st.sampled_from(NUMBERS + TEXTS) | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
option = st.tuples(st.sampled_from(KEYS + REWARD_KEYS), st.lists(word, max_size=3))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(st.lists(option, min_size=1, max_size=3), st.booleans())
def test_random_arguments_end_in_a_plan_or_a_message(capsys, options, equals):
    arguments = []
    for key, values in options:
        arguments += [f"--{key}={values[0]}", *values[1:]] if equals and values else [f"--{key}", *values]
    try:
        status = train.main(["length-bon", *arguments, "--evaluation.prompts", "0", "--data.limit", "2", "--dry-run"])
    except SystemExit as ended:
        status = ended.code
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert (status == 0 and "optimiser step" in " ".join(shown.out.split())) or (
        (status != 0 and shown.err.strip()) or "usage:" in shown.out
    )
