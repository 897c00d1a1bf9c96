"""Runs with adapters: every algorithm, what they write, kills, and runs that continue an adapter."""

import json
import shutil
import signal
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.helpers import Job, run_all, tiny_model

from nlgrpo import cli, train
from nlgrpo.model import decoder, lora, reward_model
from nlgrpo.runtime.checkpoint import storage
from nlgrpo.training import policy
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

ADAPTERS = {"lora.rank": 3, "lora.alpha": 6.0, "lora.dropout": 0.1}


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with models, prompts, pairs, and samples of the model `policy`."""
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "policy")
    tiny_model(root / "tied", "gpt2")
    prompts = [" ".join(f"w{(7 * i + j) % 28}" for j in range(1 + i % 4)) for i in range(10)]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    pairs = [{"prompt": f"w{i} ", "chosen": f"w9 w{i}", "rejected": f"w20 w{i} w21"} for i in range(16)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return root


def run_of(work: Path, out: str, **changes) -> list[str]:
    """Arguments of a run in the folder ``out``; ``changes`` has __ for dots."""
    options = {
        "model.path": work / "policy",
        "model.dtype": "float64",
        "data.source": work / "prompts.jsonl",
        "rollout.prompts": 4,
        "rollout.samples": 4,
        "rollout.max_new_tokens": 8,
        "rewards.short.function": "length(target=3, scale=10)",
        "optim.lr": 0.02,
        "optim.eps": 1e-4,
        "loss.beta": 0.05,
        "train.steps": 4,
        "train.checkpoint_every": 2,
        "evaluation.prompts": 0,
        "train.out": work / out,
    }
    options |= ADAPTERS | {name.replace("__", "."): value for name, value in changes.items()}
    return ["blank", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def exported(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def logged(folder: Path) -> list[dict]:
    timed = ("time/", "step_time", "perf/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in read_jsonl(folder / "metrics.jsonl")]


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens[None]).logits[0]


TOKENS = torch.tensor([1, 5, 9, 30, 7, 7, 2])
LIKE = {"dtype": torch.float64}


# --- what a run writes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_trains_adapters_alone_and_writes_them(algorithm, work):
    folder = work / algorithm
    assert train.main(run_of(work, algorithm, loss__algorithm=algorithm, critic__lr=0.01)) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(work / "policy", **LIKE)
    plain = logits(base, TOKENS)
    adapted = logits(peft.PeftModel.from_pretrained(base, folder / "adapter").eval(), TOKENS)
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(folder / "model", **LIKE), TOKENS)
    assert (adapted - plain).abs().max() > 0.01
    torch.testing.assert_close(merged, adapted, atol=1e-5, rtol=1e-5)
    assert cli.main(["merge", str(folder / "adapter"), "--out", str(work / f"m-{algorithm}"), "--dtype=float64"]) == 0
    assert (work / f"m-{algorithm}" / "model.safetensors").read_bytes() == exported(folder)
    if algorithm == "grpo":  # the reference is the model without adapters: the KL starts at 0, and then it is not
        kls = [line["kl"] for line in logged(folder)]
        assert kls[0] == pytest.approx(0, abs=1e-12)
        assert kls[-1] > 1e-5


def test_checkpoints_hold_what_is_trained(work):
    assert train.main(run_of(work, "small")) == 0
    stored = storage.stored(work / "small" / "checkpoints" / "step-00000004")
    names = {name.removeprefix("model/") for name in stored if name.startswith("model/")}
    model = decoder.load(work / "policy", shard=lambda m: lora.attach(m, lora.LoraConfig(rank=3), torch.float32))
    assert names == {name for name, p in model.named_parameters() if p.requires_grad}
    moments = {name.split("/")[1] for name in stored if name.startswith("optimizer/")}
    assert moments == names
    with pytest.raises(ValueError, match=r"has adapters .*RUN/model"):
        reward_model.load_reward_model(str(work / "small" / "checkpoints" / "step-00000004"))


def test_the_reference_is_the_model_that_training_started_from(work, monkeypatch):
    """Log-probs of the reference in a run equal those of a copy of the model, bit for bit, after two steps too."""
    found, references = [], policy.load_learner

    def watched(setup):
        learner = references(setup)
        assert learner.reference is learner.model
        copy = decoder.load(work / "policy", dtype=torch.float64)
        original = type(learner).reference_logprobs

        def compared(self, rollout):
            ref = original(self, rollout)
            found.append((ref, self.logprobs_of(copy, rollout)))
            return ref

        monkeypatch.setattr(type(learner), "reference_logprobs", compared)
        return learner

    monkeypatch.setattr(policy, "load_learner", watched)
    assert train.main(run_of(work, "watched", train__steps=3)) == 0
    assert len(found) == 3
    for ref, truth in found:
        torch.testing.assert_close(ref, truth, atol=1e-13, rtol=0)


# --- kills, and adapters that continue --------------------------------------------------------------------------------

KILLS = {
    "in the update": ("nlgrpo.training.learner:clip_gradients", 3),
    "in the second checkpoint": ("nlgrpo.runtime.checkpoint.folders:publish", 2),
    "in the export of the adapter": ("nlgrpo.model.adapters:save", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_killed_runs_resume_with_identical_results(algorithm, work):
    changes = {"loss__algorithm": algorithm, "critic__lr": 0.01}
    jobs = [Job(run_of(work, f"whole-{algorithm}", **changes))]
    for name, (function, at) in KILLS.items():
        jobs += [Job(run_of(work, f"{name}-{algorithm}", **changes), *more) for more in ((function, at), ())]
    ended = run_all(jobs)
    assert [end.status for end in ended] == [0, *[-signal.SIGKILL, 0] * len(KILLS)], ended[-1].output
    for name in KILLS:
        folder, truth = work / f"{name}-{algorithm}", work / f"whole-{algorithm}"
        assert logged(folder) == logged(truth)
        assert exported(folder) == exported(truth)
        assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == (
            truth / "adapter" / "adapter_model.safetensors"
        ).read_bytes()


def test_a_run_continues_an_adapter(work, capsys):
    assert train.main(run_of(work, "first")) == 0
    options = run_of(work, "second", lora__rank=0, lora__path=work / "first" / "adapter", train__steps=0)
    assert train.main(options) == 0
    assert exported(work / "second") == exported(work / "first")
    assert train.main([*options, "--train.steps", "2", "--train.out", str(work / "third")]) == 0
    first, third = (load_file(work / name / "adapter" / "adapter_model.safetensors") for name in ("first", "third"))
    assert first.keys() == third.keys()
    assert not any(torch.equal(first[name], third[name]) for name in first)
    assert logged(work / "third")[0]["kl"] > 1e-5  # to the model without the adapter
    config = json.loads((work / "third" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)
    capsys.readouterr()
    assert train.main([*options, "--lora.rank", "4"]) == 2
    assert "the adapter defines its rank; leave 0" in capsys.readouterr().err
    assert train.main(run_of(work, "none", lora__rank=0, lora__path=work / "policy")) == 2
    assert "is not an adapter in PEFT's format" in capsys.readouterr().err
    assert train.main(run_of(work, "none", lora__target_modules="c_attn")) == 2
    assert "a llama model has no linear layer 'c_attn'" in capsys.readouterr().err
    assert train.main(run_of(work, "none", optim__algorithm="muon")) == 2
    assert "'muon' trains the matrices that adapters freeze; use 'adamw'" in capsys.readouterr().err


# --- offline algorithms, reward and value models ----------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["bon_sft", "dpo"])
def test_offline_algorithms(algorithm, work):
    rollouts = work / f"rollouts-{algorithm}"
    sampling = run_of(work, "unused")[1:]
    options = dict(zip(sampling[::2], sampling[1::2], strict=True))
    kept = ("--model", "--data", "--rewards", "--rollout.max")
    plain = [part for name, value in options.items() if name.startswith(kept) for part in (name, value)]
    assert cli.main(["rollout", "blank", *plain, "--samples=4", f"--out={rollouts}"]) == 0
    more = {"calibration__rollouts": rollouts, "offline__n": 2, "loss__beta": 0.1}
    assert train.main(run_of(work, algorithm, loss__algorithm=algorithm, **more)) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(work / "policy", **LIKE)
    plain = logits(base, TOKENS)
    adapted = logits(peft.PeftModel.from_pretrained(base, work / algorithm / "adapter").eval(), TOKENS)
    assert (adapted - plain).abs().max() > 0.01
    if algorithm == "dpo":
        assert logged(work / "dpo")[0]["rewards/margins"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("model", ["policy", "tied"])
def test_reward_models(model, work):
    folder = work / f"reward-{model}"
    options = {
        "model.path": work / model, "model.dtype": "float64", "data.source": work / "pairs.jsonl", "optim.lr": 0.02,
        "evaluation.pairs": 0, "train.pairs": 4, "train.out": folder, **ADAPTERS,
    }  # fmt: skip
    arguments = ["train", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
    assert cli.main(["reward-model", *arguments]) == 0
    kind = transformers.AutoModelForSequenceClassification
    base = kind.from_pretrained(work / model, num_labels=1, pad_token_id=0, **LIKE)
    adapted = logits(peft.PeftModel.from_pretrained(base, folder / "adapter").eval(), TOKENS)
    merged = logits(kind.from_pretrained(folder / "model", **LIKE), TOKENS)
    assert merged.abs().max() > 1e-3
    torch.testing.assert_close(merged, adapted, atol=1e-5, rtol=1e-5)
    before = reward_model.load_reward_model(str(work / model), dtype=torch.float64)[0]
    after = reward_model.load_reward_model(str(folder), dtype=torch.float64)[0]
    for name, parameter in before.named_parameters():
        linear = name.startswith("blocks.") and parameter.dim() == 2
        assert bool((parameter != dict(after.named_parameters())[name]).any()) == (linear or name == "head.weight")

    merge = ["merge", str(folder / "adapter"), f"--model={work / model}", f"--out={work / f'm-{model}'}"]
    assert cli.main([*merge, "--dtype=float64"]) == 0
    for file in ("model.safetensors", "config.json"):
        assert (work / f"m-{model}" / file).read_bytes() == (folder / "model" / file).read_bytes()
    again = [*arguments, "--lora.rank", "0", "--lora.path", str(folder / "adapter"), "--train.epochs", "0.01"]
    again += ["--optim.lr", "0", "--train.out", str(work / f"again-{model}")]
    assert cli.main(["reward-model", *again]) == 0
    assert exported(work / f"again-{model}") == exported(folder)  # its head too
    shutil.rmtree(work / f"again-{model}")


def test_merge_refuses_bad_input(work, capsys, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, said in (
        ([str(work / "policy"), "--out", str(tmp_path / "x")], "has no adapter_config.json, so it is not an adapter"),
        ([str(work / "nowhere"), "--out", str(tmp_path / "x")], "has no adapter_config.json"),
    ):
        assert cli.main(["merge", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert train.main(run_of(work, "for-merge", train__steps=1)) == 0
    adapter = str(work / "for-merge" / "adapter")
    for arguments, said in (
        (["--out", str(tmp_path / "full")], "exists already and is not an empty folder"),
        (["--out", str(tmp_path / "x"), "--model", str(work / "tied")], "a gpt2 model has no linear layer"),
        (["--out", str(tmp_path / "x"), "--model", str(work / "none")], "is neither a directory, nor embedded"),
    ):
        capsys.readouterr()
        assert cli.main(["merge", adapter, *arguments]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_the_plan_counts_trained_parameters(work, capsys):
    assert train.main([*run_of(work, "planned", lora__modules_to_save="lm_head"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    config = lora.LoraConfig(rank=3, modules_to_save=("lm_head",))
    model = decoder.load(work / "policy", shard=lambda m: lora.attach(m, config, torch.float32))
    assert f"{sum(p.numel() for p in model.parameters() if p.requires_grad):,} trained parameters" in shown
    assert "reference" not in shown.split("memory per rank")[1]


def test_a_reward_model_starts_from_a_run_and_is_merged_into_it(work):
    def trained(start, out, **changes):
        options = {
            "model.path": start, "model.dtype": "float64", "data.source": work / "pairs.jsonl", "optim.lr": 0.02,
            "evaluation.pairs": 0, "train.pairs": 8, "train.out": work / out, **changes,
        }  # fmt: skip
        arguments = ["train", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
        assert cli.main(["reward-model", *arguments]) == 0

    trained(work / "policy", "plain")
    trained(work / "plain", "adapted", **ADAPTERS)
    folder = work / "adapted" / "adapter"
    assert cli.main(["merge", str(folder), f"--out={work / 'from-run'}", "--dtype=float64"]) == 0  # names a run
    assert (work / "from-run" / "model.safetensors").read_bytes() == exported(work / "adapted")
    modes = {
        (work / "adapted" / name).stat().st_mode & 0o777 for name in ("config.json", "adapter/adapter_config.json")
    }
    assert modes == {(folder / "adapter_model.safetensors").stat().st_mode & 0o777}  # other users can read them


def test_values_cannot_train_the_head_alone_with_adapters(work, capsys):
    arguments = ["--data.rollouts", str(work / "x"), "--train.head-only", "--lora.rank", "2"]
    assert cli.main(["value", "train", *arguments]) == 2
    assert "train.head_only = True: allowed is false with adapters" in capsys.readouterr().err
