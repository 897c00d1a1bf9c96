"""Recipes: the default recipe, runs of each recipe, and their names."""

import dataclasses
import time

import pytest

from nlgrpo import train
from nlgrpo.config import comparing, schema, validate
from nlgrpo.config.recipes import DEFAULT, RECIPES, from_arguments, recipe
from nlgrpo.config.schema import Config
from nlgrpo.objectives import registry


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_their_name_and_a_one_line_description(name):
    cfg = recipe(name)
    assert cfg.recipe == name
    assert str(cfg.run) == f"runs/{name}"
    assert len(RECIPES[name].__doc__.splitlines()[0]) <= 110  # `nlgrpo recipes` prints it on one line
    assert recipe(name) == cfg
    assert recipe(name) is not cfg  # each call returns a new object


@pytest.mark.parametrize("name", ["length-bon", "length-mean", "story-mix"])
def test_recipes_run_without_arguments(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    validate.check_config(recipe(name))
    began = time.perf_counter()
    assert train.main([name, "--dry-run"]) == 0
    assert time.perf_counter() - began < 20
    shown = " ".join(capsys.readouterr().out.split())
    for message in ("plan", "parameters", "6 prompts x 8 samples = 48 completions", "memory per rank", f"runs/{name}"):
        assert message in shown
    assert not list(tmp_path.iterdir()), "a plan writes nothing"


def test_the_default_recipe_trains_mazes_for_pass_at_8():
    cfg, _ = from_arguments([])
    assert cfg == recipe("maze")
    assert DEFAULT == "maze" == next(iter(RECIPES))
    assert (cfg.model.path, cfg.data.source, cfg.data.evaluation) == ("maze-lm", "maze-train", "maze-test")
    assert [(reward.function, reward.objective) for reward in cfg.rewards.values()] == [("maze()", "bon:8:unbiased")]
    assert (cfg.evaluation.prompts, cfg.evaluation.samples, cfg.evaluation.ns) == (128, 256, (1, 8, 64, 256))
    assert (cfg.loss.beta, cfg.loss.log_kl_every, cfg.loss.scale) == (0.0, 10, "none")


def test_maze_grpo_differs_only_in_the_objective_the_scale_and_the_learning_rate():
    lines = comparing.differences(schema.to_dict(recipe("maze")), schema.to_dict(recipe("maze-grpo")))
    assert lines == [
        "recipe: 'maze' -> 'maze-grpo'",
        "rewards.solved.objective: 'bon:8:unbiased' -> 'mean'",
        "loss.scale: 'none' -> 'group'",
        "optim.lr: 0.0001 -> 3e-05",
    ]


def test_length_bon_is_best_of_4_with_two_length_rewards():
    """The experiment of IAMA 6.1 on the embedded model, with the paper's group, beta and no scaling of rewards."""
    cfg = recipe("length-bon")
    assert (cfg.model.path, cfg.data.source) == ("story-lm", "story-prompts")
    assert [(r.objective, r.weight) for r in cfg.rewards.values()] == [("bon:4", 0.5), ("bon:4", 0.5)]
    assert (cfg.rollout.samples, cfg.loss.beta, cfg.loss.scale) == (8, 1e-4, "none")
    # L1 = 50 and L2 = 150 of 256 tokens, scaled to the length of this model
    limit = cfg.rollout.max_new_tokens
    assert [r.function for r in cfg.rewards.values()] == [
        f"length(target={50 * limit // 256}, scale={limit})",
        f"length(target={150 * limit // 256}, scale={limit})",
    ]


def test_length_mean_differs_only_in_the_objective():
    lines = comparing.differences(schema.to_dict(recipe("length-bon")), schema.to_dict(recipe("length-mean")))
    assert lines == [
        "recipe: 'length-bon' -> 'length-mean'",
        "rewards.short.objective: 'bon:4' -> 'mean'",
        "rewards.long.objective: 'bon:4' -> 'mean'",
    ]
    assert isinstance(registry.parse(recipe("length-mean").rewards["short"].objective), registry.Mean)


def test_length_iama_has_the_settings_of_the_paper():
    """IAMA, Sec. 6.1, Table 2 and appendix I; `scale` is the maximum length, as in the paper's rewards."""
    cfg = recipe("length-iama")
    assert [reward.function for reward in cfg.rewards.values()] == [
        "length(target=50, scale=256)",
        "length(target=150, scale=256)",
    ]
    assert [(reward.objective, reward.weight) for reward in cfg.rewards.values()] == [("bon:4", 0.5)] * 2
    assert (cfg.rollout.samples, cfg.rollout.prompts * cfg.rollout.samples, cfg.rollout.max_new_tokens) == (8, 48, 256)
    assert (cfg.optim.lr, cfg.optim.schedule, cfg.train.steps) == (1e-6, "constant", 3000)
    assert (cfg.loss.beta, cfg.loss.target_kl, cfg.loss.scale, cfg.loss.eps_low) == (1e-4, None, "none", 0.2)


@pytest.mark.parametrize(
    ("variant", "of", "objective"),
    [
        ("length-iama-bon8", "length-iama", "bon:8"),
        ("length-iama-soft", "length-iama", "soft:0.09"),
        ("helpful-harmless-bon8", "helpful-harmless", "bon:8"),
    ],
)
def test_variants_differ_only_in_the_objective(variant, of, objective):
    lines = comparing.differences(schema.to_dict(recipe(of)), schema.to_dict(recipe(variant)))
    rewards = [f"rewards.{name}.objective: 'bon:4' -> {objective!r}" for name in recipe(of).rewards]
    assert lines == [f"recipe: {of!r} -> {variant!r}", *rewards]
    assert registry.parse(objective).name == objective
    validate.check_config(recipe(variant))


def test_blank_has_only_defaults_and_cannot_run():
    cfg = recipe("blank")
    assert dataclasses.replace(cfg, data=schema.DataConfig()) == Config()
    assert cfg.rewards == {}
    assert cfg.data.source == ""
    with pytest.raises(ValueError, match="there is no reward"):
        validate.check_config(cfg)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["lenght-bon"], r"unknown recipe 'lenght-bon'; did you mean 'length-bon'\?"),
        (
            ["zzz"],
            r"unknown recipe 'zzz'; recipes: maze, maze-grpo, length-bon, .*, helpful-harmless-bon8, blank, or",
        ),
        ([""], r"unknown recipe ''"),
        (["length-bon", "length-mean"], "expected at most one recipe and one .toml file, got length-bon length-mean"),
        (["a.toml", "b.toml"], "expected at most one recipe and one .toml file, got a.toml b.toml"),
    ],
)
def test_unknown_recipes_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        from_arguments(names)
