"""`nlgrpo evaluate` on tiny models, compared with transformers and with the samples of runs."""

import json
import os
import shutil

import pytest
import torch
from support.helpers import fork_ranks, tiny_model
from transformers import AutoModelForCausalLM

from nlgrpo import cli, train
from nlgrpo.apps.evaluate import evaluate, model_evaluation, named_models
from nlgrpo.apps.sweep.state import Point, SweepState
from nlgrpo.engine.rollouts.evaluation_samples import read_evaluation
from nlgrpo.estimators import best_of_n, maj_at_k, paired_test, selected_value, win_rate
from nlgrpo.model import decoder
from nlgrpo.objectives.registry import parse
from nlgrpo.runtime.distributed import Ranks

pytestmark = pytest.mark.usefixtures("no_figures")

REWARDS = '''
from pathlib import Path

MODE = Path(__file__).with_name("mode")


def short(completion_ids, **kwargs):
    return [-abs(len(ids) - 4) / 10 for ids in completion_ids]


def even(completions, **kwargs):
    """Reward 1 for an even number of words; the number is the answer."""
    return [float(len(text.split()) % 2 == 0) for text in completions]


def fickle(prompts, completion_ids, **kwargs):
    """Raise after the first prompts, if the file says so."""
    if MODE.read_text() == "fail" and len(prompts[0].split()) > 1:
        raise KeyError("no such word")
    return [float(len(ids)) for ids in completion_ids]
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = tmp_path_factory.mktemp("evaluate")
    tiny_model(root / "base", seed=0)
    tiny_model(root / "other", seed=1)
    prompts = [" ".join(f"w{(7 * i + j) % 28}" for j in range(1 + i % 3)) for i in range(6)]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (root / "rewards.py").write_text(REWARDS)
    (root / "mode").write_text("")
    return root


def arguments(work, out, *models, **changes):
    options = {
        "reference": work / "base",
        "out": work / out,
        "n": 6,
        "ns": "1,2,4",
        "model.dtype": "float64",
        "data.source": work / "prompts.jsonl",
        "data.shuffle": "false",
        "rollout.max-new-tokens": 8,
        "rewards.short.function": f"{work / 'rewards.py'}:short",
        "rewards.even.function": f"{work / 'rewards.py'}:even",
    }
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    parts = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return ["evaluate", *map(str, models or [work / "other"]), *parts]


def kept(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


@pytest.fixture(scope="module")
def results(work):
    assert cli.main(arguments(work, "first", gold="even", procedures="bon,wor,soft:0.5")) == 0
    return read_evaluation(work / "first")


def entry(folder, model, quantity, procedure):
    rows = json.loads((folder / "results.json").read_text())["results"]
    (found,) = [r for r in rows if (r["model"], r["quantity"], r["procedure"]) == (model, quantity, procedure)]
    return found


def test_every_model_has_completions_of_every_prompt(work, results):
    assert list(results) == ["reference", "other"]
    for sampled in results.values():
        assert sampled.lengths.shape == (6, 6)
        torch.testing.assert_close(sampled.rewards["short"], -(sampled.lengths.double() - 4).abs() / 10)
        assert set(sampled.distinct) == {"1", "2", "3"}
    assert not torch.equal(results["reference"].lengths, results["other"].lengths)
    assert results["reference"].kl == {}


def test_results_equal_the_estimators(work, results):
    ours, base = results["other"], results["reference"]
    for n, procedure in ((1, "mean"), (2, "bon:2"), (4, "bon:4")):
        found = entry(work / "first", "other", "short", procedure)
        values = best_of_n(ours.rewards["short"], [n])[0]
        assert found["estimate"]["value"] == pytest.approx(values.mean().item())
        won = win_rate(ours.rewards["short"], base.rewards["short"], n)
        assert found["win_rate"]["value"] == pytest.approx(won.mean().item())
        mean, low, high, p = paired_test(values, best_of_n(base.rewards["short"], [n])[0])
        assert list(found["change"].values()) == pytest.approx([mean, low, high])
        assert found["p_value"] == pytest.approx(p)
        assert found["estimate"]["low"] <= found["estimate"]["value"] <= found["estimate"]["high"]
    judged = entry(work / "first", "other", "even by choice of short", "bon:4")
    truth = selected_value(ours.rewards["short"], ours.rewards["even"], parse("bon:4"))
    assert judged["estimate"]["value"] == pytest.approx(truth.mean().item())
    assert entry(work / "first", "reference", "short", "bon:2")["change"] is None
    mean = entry(work / "first", "other", "length", "")["estimate"]["value"]
    assert mean == pytest.approx(ours.lengths.double().mean().item())


def test_kl_equals_that_of_transformers(work, results):
    """Sum over the completion's tokens of log pi - log pi_ref, and of e^d - d - 1."""
    models = {
        name: AutoModelForCausalLM.from_pretrained(work / name, dtype=torch.float64) for name in ("base", "other")
    }
    folder = work / "first"
    cfg = evaluate.read_arguments(arguments(work, "first")[1:])
    e = model_evaluation.build_evaluation(*cfg, Ranks(0, 1, torch.device("cpu")))
    candidate = e.candidates[1]
    for row, chunk in enumerate(candidate.chunks[:1]):
        rollout = candidate.rollout(chunk)
        for i, completion in enumerate(rollout.completion_ids()[:8]):
            prompt = rollout.prompt_ids[i // 6]
            logp = {}
            for name, model in models.items():
                logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
                logp[name] = logits.log_softmax(-1)[torch.arange(len(completion)), completion]
            d = logp["base"] - logp["other"]
            found = results["other"].kl
            assert found["k1"][4 * row + i // 6, i % 6].item() == pytest.approx(-d.sum().item(), abs=1e-5)
            assert found["k3"][4 * row + i // 6, i % 6].item() == pytest.approx(
                (d.exp() - d - 1).sum().item(), abs=1e-5
            )
    assert folder.is_dir()


def test_nothing_is_drawn_or_scored_twice(work, results, monkeypatch, capsys):
    before = kept(work / "first")
    monkeypatch.setattr(decoder, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    again = arguments(work, "first", "renamed=" + str(work / "other"), gold="even", ns="1,4")
    assert cli.main(again) == 0
    assert kept(work / "first") == before
    assert "renamed" in capsys.readouterr().out


def test_another_sampling_seed_or_reward_has_its_own_files(work, results):
    before = kept(work / "first")
    assert cli.main(arguments(work, "first", rollout__temperature=0.7)) == 0
    hotter = kept(work / "first")
    assert len(hotter) > len(before)
    source = (work / "rewards.py").read_text()
    try:
        (work / "rewards.py").write_text(source.replace("- 4", "- 5"))
        assert cli.main(arguments(work, "first", rewards__short__scale=1.0)) == 0
    finally:
        (work / "rewards.py").write_text(source)
    scored = kept(work / "first").keys() - hotter.keys()
    assert {str(path).split(".")[1].split("-")[0] for path in scored} == {"score"}


def test_completions_are_saved_per_dtype(work, results):
    """ "auto" is float32 here and bfloat16 on a GPU; their completions differ."""
    assert cli.main(arguments(work, "types", model__dtype="float32")) == 0
    before = kept(work / "types")
    assert cli.main(arguments(work, "types", model__dtype="auto")) == 0
    own = "float32" if not torch.cuda.is_available() else "bfloat16"
    assert (kept(work / "types") == before) == (own == "float32")
    identities = [json.loads(path.read_text()) for path in (work / "types").rglob("identity.json")]
    assert {identity["dtype"] for identity in identities} == {"torch.float32", f"torch.{own}"}


def test_a_reward_that_fails_midway(work, capsys):
    (work / "mode").write_text("fail")
    options = arguments(work, "fickle", rewards__fickle__function=f"{work / 'rewards.py'}:fickle")
    assert cli.main(options) == 2
    said = capsys.readouterr().err
    assert "reward 'fickle' raised KeyError" in said
    assert "are saved; run the same command again" in said
    before = kept(work / "fickle")
    assert before
    (work / "mode").write_text("")
    assert cli.main(options) == 0
    after = kept(work / "fickle")
    assert all(after[path] == time for path, time in before.items())
    assert "fickle" in read_evaluation(work / "fickle")["other"].rewards


def test_a_damaged_file_is_drawn_again(work, results):
    shutil.copytree(work / "first", work / "damaged")
    for path in (work / "damaged" / "samples").rglob("00000*.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])
    assert cli.main(arguments(work, "damaged", gold="even")) == 0
    found = read_evaluation(work / "damaged")
    assert torch.equal(found["other"].lengths, results["other"].lengths)


def test_a_full_disk_is_reported(work, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert cli.main(arguments(work, "full")) == 2
    assert "No space left on device. Complete files stay" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_two_ranks_have_the_results_of_one(work, results):
    own = ["--samples" if part == "--n" else part for part in arguments(work, "two", gold="even")]
    ended = fork_ranks(lambda: cli.main(own))
    assert [end.status for end in ended] == [0, 0], ended[0].output
    found = read_evaluation(work / "two")
    for label, sampled in found.items():
        assert torch.equal(sampled.lengths, results[label].lengths)
        torch.testing.assert_close(sampled.kl, results[label].kl)


def test_evaluation_of_a_run_uses_its_configuration_and_repeats_its_samples(work):
    """The first samples equal those of the run's own evaluation after training."""
    from nlgrpo import train

    options = [
        "blank", "--model.path", work / "base", "--model.dtype", "float64", "--data.source", work / "prompts.jsonl",
        "--rollout.prompts", "2", "--rollout.samples", "4", "--rollout.max-new-tokens", "8", "--train.steps", "2",
        "--optim.lr", "0.01", "--evaluation.prompts", "3", "--evaluation.samples", "4", "--train.out", work / "run",
        "--rewards.short.function", f"{work / 'rewards.py'}:short",
    ]  # fmt: skip
    assert train.main([str(part) for part in options]) == 0
    assert cli.main(["evaluate", str(work / "run"), "--n", "6", "--ns", "1,4", "--out", str(work / "of-run")]) == 0
    own, found = read_evaluation(work / "run"), read_evaluation(work / "of-run")
    assert torch.equal(found["reference"].lengths[:, :4], own["before"].lengths)
    assert torch.equal(found["run"].lengths[:, :4], own["after"].lengths)
    assert found["run"].objectives == {"short": "mean"}


def test_majority_votes(work, tmp_path, monkeypatch):
    monkeypatch.setattr(model_evaluation, "CHUNK", 2)
    (tmp_path / "vote.py").write_text(
        "class Vote:\n"
        "    def __init__(self): pass\n"
        "    def __call__(self, completions, **kwargs):\n"
        "        return [float(self.answer(text) == 2) for text in completions]\n"
        "    def answer(self, text):\n"
        "        words = len(text.split())\n"
        "        return words if words < 6 else None\n"
    )
    options = arguments(work, "votes", rewards__vote__function=f"{tmp_path / 'vote.py'}:Vote")
    assert cli.main(options) == 0
    sampled = read_evaluation(work / "votes")["other"]
    assert (sampled.answers["vote"] == -1).any()
    found = entry(work / "votes", "other", "vote", "maj@4")["estimate"]["value"]
    assert found == pytest.approx(maj_at_k(sampled.rewards["vote"], sampled.answers["vote"], [4]).mean().item())


def test_models_with_another_tokenizer_have_no_kl(work, capsys):
    tiny_model(work / "shifted", seed=2)
    path = work / "shifted" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]
    path.write_text(json.dumps(content))
    assert cli.main(arguments(work, "shift", work / "shifted", work / "other")) == 0
    found = read_evaluation(work / "shift")
    assert found["shifted"].kl == {}
    assert set(found["other"].kl) == {"k1", "k3"}
    assert "shifted has a different tokenizer than the reference" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("models", "changes", "says"),
    [
        ([], {"n": 3}, "--ns 1,2,4: expected numbers between 1 and --n 3"),
        ([], {"ns": "1,x"}, "--ns 1,x: expected whole numbers separated by commas"),
        ([], {"ns": "0"}, "expected numbers between 1 and"),
        ([], {"gold": "truth"}, "--gold truth: unknown reward; the rewards are short, even"),
        ([], {"procedures": "bom"}, "objective 'bom' is not known"),
        ([], {"data__source": "nowhere.jsonl"}, "nowhere.jsonl"),
        ([], {"evaluation__prompts": 0}, "an evaluation needs at least one prompt"),
        (["nothing"], {}, "model 'nothing' is neither a directory"),
        (["a={other}", "a={base}"], {}, "two models have the label 'a'; set another one with LABEL=PATH"),
        (["reference={other}"], {}, "the label 'reference' is that of the reference"),
    ],
)
def test_invalid_options_are_refused(work, models, changes, says, capsys):
    named = [text.format(other=work / "other", base=work / "base") for text in models]
    assert cli.main(arguments(work, "refused", *named, **changes)) == 2
    assert says in " ".join(capsys.readouterr().err.split())


# --- runs, sweeps and checkpoints -------------------------------------------------------------------------------------


def train_run(work, folder, seed):
    """A finished run of four steps, with a checkpoint after two of them."""
    options = {
        "model.path": work / "base",
        "model.dtype": "float64",
        "data.source": work / "other-prompts.jsonl",
        "data.evaluation": work / "prompts.jsonl",
        "rewards.short.function": f"{work / 'rewards.py'}:short",
        "rollout.prompts": 2,
        "rollout.samples": 4,
        "rollout.max-new-tokens": 8,
        "loss.beta": 0,
        "optim.lr": 0.01,
        "train.steps": 4,
        "train.seed": seed,
        "train.checkpoint-every": 2,
        "train.out": folder,
        "evaluation.prompts": 0,
    }
    (work / "other-prompts.jsonl").write_text('{"prompt": "w9 w10"}\n{"prompt": "w11"}\n')
    assert train.main(["blank", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]) == 0


@pytest.fixture(scope="module")
def sweep(work):
    """A sweep of two runs whose folders have names like "train.seed=1,loss.beta=0"; one of them has finished."""
    folder = work / "sweep"
    train_run(work, folder / "train.seed=1,loss.beta=0", seed=0)
    points = [
        Point({"train.seed": seed}, folder / f"train.seed={seed},loss.beta=0", state)
        for seed, state in ((1, "done"), (2, "failed"))
    ]
    SweepState(folder, {}, points).write()
    return folder


def test_names_of_models(work, sweep, monkeypatch):
    monkeypatch.chdir(sweep)
    run = sweep / "train.seed=1,loss.beta=0"
    checkpoint = run / "checkpoints" / "step-00000002"
    for given, label, path in (
        ("train.seed=1,loss.beta=0", "train.seed=1,loss.beta=0", run),  # not the label "train.seed"
        (f"ours={run}", "ours", run),
        (str(sweep), "train.seed=1,loss.beta=0", run),  # without the run that failed
        (f"all={sweep}", "all/train.seed=1,loss.beta=0", run),
        (str(checkpoint), "train.seed=1,loss.beta=0/step-00000002", checkpoint),
        (f"half={checkpoint}", "half", checkpoint),
    ):
        (model,) = named_models.named([given])
        assert model.label == label
        assert model.path.resolve() == path.resolve()
        assert model.run.resolve() == run.resolve()
    (model,) = named_models.named(["owner/name"])
    assert (model.label, str(model.path), model.run) == ("name", "owner/name", None)
    with pytest.raises(ValueError, match="two models have the label"):
        named_models.named([str(run), str(sweep)])


def test_a_sweep_without_a_finished_run_is_refused(tmp_path):
    SweepState(tmp_path, {}, [Point({"train.seed": 1}, tmp_path / "train.seed=1", "failed")]).write()
    with pytest.raises(ValueError, match="is a sweep of 1 runs; none has finished"):
        named_models.named([str(tmp_path)])


def test_a_run_a_sweep_and_checkpoints_are_evaluated(work, sweep):
    """The last checkpoint is the model that the run exported; an earlier one is another model."""
    checkpoints = sweep / "train.seed=1,loss.beta=0" / "checkpoints"
    models = [f"last={checkpoints / 'step-00000004'}", f"half={checkpoints / 'step-00000002'}", sweep]
    assert cli.main(arguments(work, "checkpoints", *models, evaluation__prompts=6)) == 0
    found = read_evaluation(work / "checkpoints")
    assert list(found) == ["reference", "last", "half", "train.seed=1,loss.beta=0"]
    last, half, exported = (found[label] for label in list(found)[1:])
    assert torch.equal(last.rewards["short"], exported.rewards["short"])
    torch.testing.assert_close(last.kl["k1"], exported.kl["k1"], rtol=1e-4, atol=1e-5)  # float32 against float64
    assert not torch.equal(half.rewards["short"], last.rewards["short"])
    exports = work / "checkpoints" / "checkpoints"
    names = [f"train.seed=1,loss.beta=0-step-0000000{step}" for step in (2, 4)]
    assert sorted(path.name.rpartition("-")[0] for path in exports.iterdir()) == names
    before = kept(exports)
    assert cli.main(arguments(work, "checkpoints", *models, evaluation__prompts=6)) == 0
    assert kept(exports) == before


def test_checkpoints_of_runs_with_the_same_name_are_different_models(work, sweep, tmp_path):
    """Sweeps name their runs by the options that differ, so runs of two sweeps can have the same name."""
    first = sweep / "train.seed=1,loss.beta=0"
    second = tmp_path / first.name
    train_run(work, second, seed=7)
    step = "checkpoints/step-00000002"
    models = [f"one={first / step}", f"other={second / step}"]
    assert cli.main(arguments(work, "same-name", *models, evaluation__prompts=6)) == 0
    found = read_evaluation(work / "same-name")
    assert not torch.equal(found["one"].kl["k1"], found["other"].kl["k1"])


def test_a_damaged_checkpoint_is_refused(work, sweep, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(sweep / "train.seed=1,loss.beta=0", run)
    checkpoint = run / "checkpoints" / "step-00000002"
    file = max(checkpoint.rglob("*"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-8])
    assert cli.main(arguments(work, "damaged", checkpoint, evaluation__prompts=6)) == 2
    assert f"checkpoint {checkpoint} is damaged" in " ".join(capsys.readouterr().err.split())
    assert not [*(work / "damaged" / "checkpoints").glob("*")]


def test_the_kl_can_be_left_out(work, monkeypatch):
    monkeypatch.setattr(model_evaluation, "measure_kl", None)
    assert cli.main([*arguments(work, "no-kl"), "--no-kl"]) == 0
    assert read_evaluation(work / "no-kl")["other"].kl == {}


def test_no_model_and_empty_prompts_are_refused(work, tmp_path, capsys):
    assert cli.main(["evaluate", "--n", "4"]) == 2
    assert "no model to evaluate" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text("")
    assert cli.main(arguments(work, "refused", data__source=tmp_path / "empty.jsonl")) == 2
    assert "empty" in capsys.readouterr().err
