"""Evaluations during training: what they log, the best policy, patience, interruptions, and what is refused."""

import json
import math
import signal
from pathlib import Path

import pytest
from support.helpers import Job, run_all, tiny_model
from support.runs import arguments, same, steps_in, torchrun, untimed

from nlgrpo import cli, train
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, read_evaluation, read_samples
from nlgrpo.training import best_model
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

REWARDS = '''
import random
from pathlib import Path

import numpy
import torch

MODE = Path(__file__).with_name("mode")
random.seed(1), numpy.random.seed(2), torch.manual_seed(3)


def noisy(completion_ids, **kwargs):
    """Uses every global random generator."""
    return [random.random() + numpy.random.rand() + float(torch.rand(())) for _ in completion_ids]


def fails(completion_ids, trainer_state, **kwargs):
    """Fails in evaluations, which have no step, while the file says so."""
    if MODE.read_text() == "fail" and trainer_state.max_steps == 0:
        raise KeyError("no such word")
    return [len(ids) / 10 for ids in completion_ids]


def abstains(completion_ids, trainer_state, **kwargs):
    """Abstains in evaluations while the file says so."""
    silent = MODE.read_text() == "abstain" and trainer_state.max_steps == 0
    return [None if silent else len(ids) / 10 for ids in completion_ids]


def answer(completions, solution, **kwargs):
    return [float(s in c) for c, s in zip(completions, solution)]
'''
SHORT = {"short": "length(target=3, scale=10)"}
EVALUATED = {
    "evaluation__every": 2,
    "evaluation__prompts": 3,
    "evaluation__samples": 4,
    "evaluation__ns": [1, 4],
    "train__steps": 5,
}


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a model, prompts and rewards."""
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "model")
    prompts = [" ".join(f"w{(3 * i + j) % 28}" for j in range(1 + i % 4)) for i in range(12)]
    for name, part in {"prompts": prompts, "others": [f"w{i} w{i + 1} w{i + 2} w7 w9" for i in range(5)]}.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in part))
    (root / "rewards.py").write_text(REWARDS)
    (root / "mode").write_text("")
    return root


def rows(folder):
    return read_jsonl(folder / "evaluations.jsonl")


def sets(work, **of_set):
    return json.dumps({"other": {"source": str(work / "others.jsonl")} | of_set})


# --- what is logged ---------------------------------------------------------------------------------------------------


def test_training_draws_the_same_with_and_without_evaluations(work):
    rewards = SHORT | {"noisy": "noisy"}
    table = sets(work, samples=2, ns=[1, 2])
    assert train.main(arguments(work, "with", rewards, **EVALUATED, evaluation__sets=table)) == 0
    without = EVALUATED | {"evaluation__every": 0}
    assert train.main(arguments(work, "without", rewards, **without)) == 0
    assert same(work / "with", work / "without")
    assert [row["step"] for row in rows(work / "with")] == [0, 2, 4, 5]
    assert [row["step"] for row in rows(work / "without")] == [0, 5]
    first, last = (rows(work / name)[-1]["values"] for name in ("without", "with"))
    fixed = [name for name in first if "noisy" not in name and name not in SUMS]  # noise differs between processes
    assert len(fixed) == 6
    assert {name: last[name] for name in fixed} == {name: first[name] for name in fixed}
    assert {name for name in last if name.startswith("other/")} == {f"other/{name}" for name in WITH_OTHER_NS}


SUMS = ("objective/aggregate", "reward", "reward_best-of-4")
WITH_OTHER_NS = {
    *(f"objective/{name}" for name in ("short", "noisy")),  # best-of-4, without a value for 2 samples
    *(f"rewards/{name}/{n}" for name in ("short", "noisy") for n in ("mean", "best-of-2")),
    *(f"win_rate/{name}/{n}" for name in ("short", "noisy") for n in ("mean", "best-of-2")),
    "reward",
    "reward_best-of-2",
    "completions/mean_length",
}


def test_the_numbers_are_those_of_nlgrpo_evaluate_on_the_checkpoint(work, capsys):
    more = {
        "train__checkpoint_every": 2,
        "train__keep_checkpoints": 9,
        "evaluation__procedures": ["bon", "wor", "soft:0.1"],
    }
    more |= {"model__dtype": "float32"}
    assert train.main(arguments(work, "compared", SHORT, **EVALUATED | more)) == 0
    checkpoint = work / "compared" / "checkpoints" / "step-00000002"
    options = ["--n", "4", "--ns", "1,4", "--procedures", "bon,wor,soft:0.1", "--no-kl", "--out", str(work / "out")]
    assert cli.main(["evaluate", str(checkpoint), *options]) == 0
    found = {}
    for entry in json.loads((work / "out" / "results.json").read_text())["results"]:
        if entry["model"] != "reference":
            found[entry["quantity"], entry["procedure"]] = entry
    (row,) = [row for row in rows(work / "compared") if row["step"] == 2]
    names = {"mean": "mean", "bon:4": "best-of-4", "wor:4": "worst-of-4", "soft:0.1": "soft-0.1"}
    for procedure, name in names.items():
        theirs = found["short", procedure]
        estimate, won = theirs["estimate"], theirs["win_rate"]
        assert row["values"][f"rewards/short/{name}"] == [estimate[key] for key in ("value", "low", "high")]
        assert row["values"][f"win_rate/short/{name}"] == [won[key] for key in ("value", "low", "high")]
    length = found["length", ""]["estimate"]
    assert row["values"]["completions/mean_length"] == [length[key] for key in ("value", "low", "high")]
    assert row["values"]["objective/short"] == row["values"]["rewards/short/best-of-4"]


def test_a_set_has_its_own_sampling_rewards_and_judge(work):
    rewards = SHORT | {"long": "length(target=9, scale=10)"}
    table = json.dumps({"greedy": {"top_k": 1, "samples": 2, "ns": [1], "prompts": 2, "rewards": ["long", "short"],
                                   "gold": ["long"], "max_new_tokens": 6}})  # fmt: skip
    assert train.main(arguments(work, "greedy", rewards, **EVALUATED, evaluation__sets=table)) == 0
    saved = read_samples(work / "greedy" / "evaluation" / "greedy.json")
    for samples in saved.values():
        assert samples.lengths.shape == (2, 2)
        assert (samples.lengths[:, 0] == samples.lengths[:, 1]).all()  # the likeliest completion
        assert samples.lengths.max() <= 6
    main = read_evaluation(work / "greedy")["before"]
    assert saved["before"].prompts == main.prompts[:2]  # without a source of its own
    values = rows(work / "greedy")[-1]["values"]
    judged = values["greedy/rewards/long by choice of short/mean"]
    assert judged[0] == pytest.approx(float(saved["after"].rewards["long"].mean()))


# --- the best policy --------------------------------------------------------------------------------------------------


def test_the_best_policy_is_exported(work):
    kept = {"train__keep_best": "min:completions/mean_length", "train__checkpoint_every": 1, "train__steps": 6}
    assert train.main(arguments(work, "best", SHORT, **EVALUATED | kept, train__keep_checkpoints=9)) == 0
    lengths = {row["step"]: row["values"]["completions/mean_length"][0] for row in rows(work / "best")}
    best = json.loads((work / "best" / "best" / "best.json").read_text())
    assert best["step"] == min(lengths, key=lengths.get)
    assert best["value"] == lengths[best["step"]]
    steps = best["step"]
    assert train.main(arguments(work, "as far", SHORT, **EVALUATED | {"train__steps": steps})) == 0
    exported = [work / folder / "model" / "model.safetensors" for folder in ("best/best", "as far")]
    assert exported[0].read_bytes() == exported[1].read_bytes()
    assert cli.main(["evaluate", str(work / "best" / "best"), "--n", "2", "--ns", "1", "--no-kl", "--out",
                     str(work / "of best")]) == 0  # fmt: skip


def test_patience_ends_the_run_and_more_of_it_goes_on(work, capsys):
    """Without a learning rate nothing gets better."""
    idle = {"optim__lr": 0.0, "train__keep_best": "objective/short", "train__steps": 40, "evaluation__patience": 2}
    options = EVALUATED | idle
    assert train.main(arguments(work, "idle", SHORT, **options)) == 0
    assert [row["step"] for row in rows(work / "idle")] == [0, 2, 4]
    assert "no evaluation was better than the initial policy's" in capsys.readouterr().out
    assert not (work / "idle" / "best").exists()
    assert steps_in(work / "idle") == [4]
    for _ in range(2):  # the same command again has nothing left to do
        assert train.main(arguments(work, "idle", SHORT, **options)) == 0
        assert [row["step"] for row in rows(work / "idle")] == [0, 2, 4]
    assert train.main(arguments(work, "idle", SHORT, **options | {"evaluation__patience": 3})) == 0
    assert [row["step"] for row in rows(work / "idle")] == [0, 2, 4, 6]
    assert len(untimed(work / "idle")) == 6


def row(step, value, name="r"):
    return {"step": step, "values": {name: [value, None, None]}}


@pytest.mark.parametrize(
    ("keep_best", "values", "step"),
    [
        ("r", [1.0, 3.0, 2.0], 2),
        ("r", [1.0, 1.0, 1.0], 0),
        ("r", [1.0, 3.0, 3.0], 2),
        ("min:r", [1.0, 3.0, 0.5], 4),
        ("min:r", [0.0, 3.0, 0.5], 0),
    ],
)
def test_the_first_best_one_counts(keep_best, values, step):
    selection = best_model.Selection.of(keep_best)
    best = 0
    for place, value in enumerate(values):
        if selection.better(value, values[best]):
            best = place
    assert 2 * best == step


def test_a_folder_of_another_metric_is_not_the_best(tmp_path):
    (tmp_path / "best").mkdir()
    record = tmp_path / "best" / "best.json"
    record.write_text('{"step": 8, "metric": "r", "value": 4.0}')
    assert best_model.read_exported(tmp_path, "r") == best_model.Best(8, "r", 4.0)
    assert best_model.read_exported(tmp_path, "other") is None
    record.write_text('{"step": 8')
    assert best_model.read_exported(tmp_path, "r") is None


@pytest.mark.parametrize(("complete", "published", "left"), [(True, False, "new"), (False, False, None),
                                                             (False, True, "old"), (True, True, "old")])  # fmt: skip
def test_an_export_that_was_killed_leaves_one_whole_policy(tmp_path, complete, published, left):
    for folder, there, name in (("best.unfinished", complete, "new"), ("best", published, "old")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model").write_text(name)
        if there:
            (tmp_path / folder / "best.json").write_text("{}")
    if not published and not complete:
        (tmp_path / "best" / "model").unlink()
        (tmp_path / "best").rmdir()
    best_model.recover(tmp_path)
    found = (tmp_path / "best" / "model").read_text() if (tmp_path / "best").exists() else None
    assert found == left
    assert not (tmp_path / "best.unfinished").exists()


def test_patience_counts_evaluations_since_the_best():
    best = best_model.Best(2, "r", 3.0)
    following = [row(step, 1.0) for step in (0, 2, 4, 6)]
    assert best_model.exhausted(following, best, 2)
    assert not best_model.exhausted(following, best, 3)
    assert not best_model.exhausted(following, best, 0)


# --- interruptions ----------------------------------------------------------------------------------------------------

KEPT = EVALUATED | {
    "train__steps": 8,
    "train__checkpoint_every": 3,
    "train__keep_best": "min:completions/mean_length",
    "optim__warmup_steps": 3,
    "loss__target_kl": 0.01,
}
SAMPLING = "nlgrpo.engine.rollouts.evaluation_samples:evaluate"  # called twice for each evaluation, before training too
KILLS = {
    "sampling the main set after step 2": (SAMPLING, 3),
    "sampling the other set after step 4": (SAMPLING, 6),
    "before the line after step 2": ("nlgrpo.training.tracking.logger:MetricsLogger.evaluation", 2),
    "exporting the best": ("nlgrpo.training.policy:export", 1),
    "before the best is published": ("nlgrpo.training.best_model:publish", 1),
    "while the best is published": ("nlgrpo.runtime.atomic_files:remove", 2),
    "in step 5": ("nlgrpo.training.learner:clip_gradients", 5),
    "in step 8": ("nlgrpo.training.learner:clip_gradients", 8),
    "in the last evaluation": (SAMPLING, 9),
}


def kept(work, name, **changes):
    options = KEPT | {"evaluation__sets": sets(work, samples=2, ns=[1])} | changes
    return arguments(work, name, SHORT | {"noisy": "noisy"}, **options)


@pytest.fixture(scope="module")
def ended(work):
    jobs = [("whole", Job(kept(work, "whole")))]
    for name, (function, at) in KILLS.items():
        jobs += [(name, Job(kept(work, name), function, at)), (name, Job(kept(work, name)))]
    jobs += [("signal", Job(kept(work, "signal"), SAMPLING, 5, signal.SIGTERM)), ("signal", Job(kept(work, "signal")))]
    found: dict[str, list] = {}
    for (name, _), end in zip(jobs, run_all([job for _, job in jobs]), strict=True):
        found.setdefault(name, []).append(end)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLS)
def test_a_killed_run_resumes_with_the_same_evaluations_and_the_same_best(work, ended, name):
    assert [end.status for end in ended["whole"]] == [0]
    assert [end.status for end in ended[name]] == [-signal.SIGKILL, 0]
    assert same(work / name, work / "whole")
    assert rows(work / name) == rows(work / "whole")
    assert [row["step"] for row in rows(work / name)] == [0, 2, 4, 6, 8]
    best = [json.loads((work / folder / "best" / "best.json").read_text()) for folder in (name, "whole")]
    assert best[0] == best[1]
    models = [(work / folder / "best" / "model" / "model.safetensors").read_bytes() for folder in (name, "whole")]
    assert models[0] == models[1]


@pytest.mark.slow
def test_a_signal_in_an_evaluation_stops_the_run_before_the_next_step(work, ended):
    assert [end.status for end in ended["signal"]] == [0, 0]
    assert "stopped and saved at step 4" in ended["signal"][0].output
    assert rows(work / "signal") == rows(work / "whole")
    assert same(work / "signal", work / "whole")


@pytest.mark.slow
def test_two_ranks_evaluate_like_one(work):
    assert train.main(arguments(work, "one", SHORT, **KEPT)) == 0
    ended = torchrun(2, arguments(work, "two", SHORT, **KEPT)).end()
    assert ended.status == 0, ended.output
    for ours, theirs in zip(rows(work / "two"), rows(work / "one"), strict=True):
        assert ours["step"] == theirs["step"]
        for name, numbers in theirs["values"].items():
            assert ours["values"][name] == pytest.approx(numbers, rel=1e-9), name


@pytest.mark.parametrize(("mode", "reward", "message"), [
    ("fail", "fails", "no such word"),
    ("abstain", "abstains", "objective/it has no value after step 2"),
])  # fmt: skip
def test_an_evaluation_that_fails_loses_no_step(work, mode, reward, message, capsys):
    options = EVALUATED | {"train__keep_best": "objective/it"}
    name = f"fails by {mode}"
    (work / "mode").write_text("")
    assert train.main(arguments(work, f"{name} not", {"it": reward}, **options)) == 0

    def now(*_):
        (work / "mode").write_text(mode)

    run = arguments(work, name, {"it": reward}, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nlgrpo.train.PolicyTrainer.begin", _then(train.PolicyTrainer.begin, now))
        assert train.main(run) == 2
    assert message in capsys.readouterr().err
    assert steps_in(work / name) == [2]
    assert [row["step"] for row in rows(work / name)] == [0]
    (work / "mode").write_text("")
    assert train.main(run) == 0
    assert same(work / name, work / f"{name} not")


def _then(function, after):
    def both(*args):
        function(*args)
        after()

    return both


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation__prompts": 0}, "evaluation.every = 2: nothing is evaluated with evaluation.prompts = 0"),
        ({"evaluation__prompts": 0, "evaluation__every": 0, "evaluation__sets": {"x": {}}}, "evaluation.sets: nothing"),
        ({"evaluation__sets": {"rewards": {}}}, "'rewards' is not a name"),
        ({"evaluation__procedures": "bon:9"}, "9 completions of 4 samples"),
        ({"evaluation__sets": {"x": {"max_new_tokens": 63}}}, "evaluation.sets.x: prompts of up to"),
        ({"evaluation__every": 0, "train__keep_best": "reward"}, "set evaluation.every, the steps between evaluations"),
        ({"evaluation__patience": 2}, "evaluation.patience = 2: set train.keep_best"),
        ({"evaluation__gold": "shrot"}, "evaluation.gold: there is no reward 'shrot'; did you mean 'short'?"),
        ({"evaluation__procedures": "ban:4"}, "ban:4"),
        ({"evaluation__procedures": "maj:9"}, "9 votes of 4 samples"),
        ({"evaluation__sets": {"a b": {}}}, "'a b' is not a name"),
        ({"evaluation__sets": {"x": 3}}, "evaluation.sets.x = 3: expected a table"),
        ({"evaluation__sets": {"x": {"sampels": 3}}}, "unknown key 'sampels'; did you mean 'samples'?"),
        ({"evaluation__sets": {"x": {"samples": 0}}}, "evaluation.sets.x.samples = 0: allowed is >= 1"),
        ({"evaluation__sets": {"x": {"samples": "many"}}}, "samples = 'many': expected int"),
        ({"evaluation__sets": {"x": {"ns": [9]}}}, "evaluation.sets.x.ns"),
        ({"evaluation__sets": {"x": {"temperature": 0.0}}}, "evaluation.sets.x.temperature = 0.0: allowed is > 0"),
        (
            {"evaluation__sets": {"x": {"split": "test"}}},
            "evaluation.sets.x.split is for a set with prompts of its own",
        ),
        ({"evaluation__sets": {"x": {"every": 3}}}, "unknown key 'every'"),
        ({"evaluation__sets": {"x": {"rewards": ["shrot"]}}}, "rewards = ['shrot']: expected a list of 'short'"),
        ({"evaluation__sets": {"x": {"shared": "yes"}}}, "shared = 'yes': expected true or false"),
        ({"evaluation__sets": {"x": {"source": "nowhere.jsonl"}}}, "evaluation.sets.x: "),
        ({"train__keep_best": "objective/shrot"}, "no metric 'objective/shrot'; did you mean 'objective/short'"),
    ],
)
def test_configurations_that_are_refused(work, changes, message, capsys):
    changes = {name: json.dumps(x) if isinstance(x, dict) else x for name, x in changes.items()}
    assert train.main(arguments(work, "refused", SHORT, **EVALUATED | changes, train__restart=True)) == 2
    assert message in capsys.readouterr().err
    assert untimed(work / "refused") == []


def test_a_set_without_a_column_that_a_reward_needs(work, tmp_path, capsys):
    with_column = [{"prompt": f"w{i} w{i}", "solution": "w1"} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in with_column))
    options = EVALUATED | {"data__source": tmp_path / "data.jsonl", "evaluation__sets": sets(work)}
    assert train.main(arguments(work, tmp_path / "run", {"right": "answer"}, **options)) == 2
    assert "evaluation.sets.other: reward 'right' needs 'solution'" in capsys.readouterr().err


def test_a_set_that_shares_prompts_with_the_training_data(work, tmp_path, capsys):
    shared = json.dumps({"same": {"source": str(work / "prompts.jsonl")}})
    assert train.main([*arguments(work, tmp_path / "run", SHORT, **EVALUATED, evaluation__sets=shared)]) == 2
    error = capsys.readouterr().err
    assert "evaluation.sets.same: 9 of 12 prompts are trained on too" in error
    assert "set shared = true" in error
    allowed = json.dumps({"same": {"source": str(work / "prompts.jsonl"), "shared": True}})
    assert (
        train.main([*arguments(work, tmp_path / "run", SHORT, **EVALUATED, evaluation__sets=allowed), "--dry-run"]) == 0
    )


def test_an_empty_set(work, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    table = json.dumps({"none": {"source": str(tmp_path / "empty.jsonl")}})
    assert train.main(arguments(work, tmp_path / "run", SHORT, **EVALUATED, evaluation__sets=table)) == 2
    assert "evaluation.sets.none: " in capsys.readouterr().err


def test_a_changed_set_is_a_changed_input(work, tmp_path, capsys):
    data = tmp_path / "set.jsonl"
    data.write_text('{"prompt": "w1 w2 w3 w4 w5 w6"}\n')
    table = json.dumps({"own": {"source": str(data)}})
    options = arguments(work, tmp_path / "run", SHORT, **EVALUATED, evaluation__sets=table)
    assert train.main(options) == 0
    data.write_text('{"prompt": "w1 w2 w3 w4 w5 w7"}\n')
    assert train.main(options) == 2
    assert "data: other prompts or columns of evaluation.sets.own" in capsys.readouterr().err
    before = rows(tmp_path / "run")
    assert train.main([*options, "--train.allow-changed", "data"]) == 0
    after = rows(tmp_path / "run")
    assert [row["step"] for row in after] == [0, 2, 4, 5]
    for old, new in zip(before, after, strict=True):
        own = {name for name in new["values"] if name.startswith("own/")}
        assert bool(own) == (new["step"] in (0, 5))  # those of the other prompts are gone
        assert {n: x for n, x in old["values"].items() if not n.startswith("own/")} == {
            name: x for name, x in new["values"].items() if name not in own
        }


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"samples": 2, "ns": [1, 2]}, {"max_new_tokens": 5}])
def test_a_set_that_is_sampled_in_another_way_is_measured_again(work, tmp_path, change, capsys):
    """Else the change of sampling would look like one of training."""
    options = EVALUATED | {"train__steps": 3, "train__keep_best": "min:completions/mean_length"}
    first = arguments(work, tmp_path / "run", SHORT, **options, evaluation__sets=sets(work))
    assert train.main(first) == 0
    before = rows(tmp_path / "run")
    best = (tmp_path / "run" / "best").exists() and (tmp_path / "run" / "best" / "best.json").read_text()
    capsys.readouterr()
    options |= {"train__steps": 5}
    assert train.main(arguments(work, tmp_path / "run", SHORT, **options, evaluation__sets=sets(work, **change))) == 0
    assert "earlier evaluations of other are forgotten" in capsys.readouterr().err
    saved = read_samples(tmp_path / "run" / "evaluation" / "other.json")
    assert saved["before"].lengths.shape == saved["after"].lengths.shape
    after = {row["step"]: row["values"] for row in rows(tmp_path / "run")}
    assert list(after) == [0, 2, 3, 4, 5]
    with_set = [step for step, values in after.items() if any(name.startswith("other/") for name in values)]
    assert with_set == [0, 4, 5]
    assert after[0]["objective/short"] == before[0]["values"]["objective/short"]
    if best:  # by the main set, which is as it was
        kept = json.loads((tmp_path / "run" / "best" / "best.json").read_text())
        assert kept == json.loads(best) or kept["step"] > 3


def test_what_is_measured_may_change_when_a_run_resumes(work, tmp_path):
    options = EVALUATED | {"train__steps": 3}
    assert train.main(arguments(work, tmp_path / "run", SHORT, **options)) == 0
    more = options | {"train__steps": 5, "evaluation__procedures": ["bon", "wor"]}
    more |= {"train__keep_best": "rewards/short/worst-of-4"}
    assert train.main(arguments(work, tmp_path / "run", SHORT, **more)) == 0
    values = {row["step"]: row["values"] for row in rows(tmp_path / "run")}
    assert [step for step in values if "rewards/short/worst-of-4" in values[step]] == [0, 4, 5]


def test_without_any_evaluation_there_is_no_file(work, tmp_path):
    assert train.main(arguments(work, tmp_path / "run", SHORT, train__steps=1)) == 0
    assert not (tmp_path / "run" / "evaluations.jsonl").exists()


def test_saved_samples_are_those_of_all_sets(work, tmp_path):
    options = arguments(work, tmp_path / "run", SHORT, **EVALUATED, evaluation__sets=sets(work))
    assert train.main(options) == 0
    for saved in (read_evaluation(tmp_path / "run"), read_samples(tmp_path / "run" / "evaluation" / "other.json")):
        assert list(saved) == ["before", "after"]
        assert all(isinstance(one, EvaluationSamples) for one in saved.values())
    assert not math.isnan(rows(tmp_path / "run")[0]["values"]["other/reward"][0])
