"""``nlgrpo reward-model train``: the same curve for any ranks and micro-batches, resuming, and bad input."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from support.helpers import Job, counted_sums, full_tensors, run_all, run_ranks, tiny_model
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nlgrpo import cli
from nlgrpo.apps.reward_model import reward_model as reward_model_command
from nlgrpo.apps.reward_model import training
from nlgrpo.apps.reward_model.config import RewardModelConfig, check_reward_model_config, from_arguments
from nlgrpo.model import reward_model
from nlgrpo.rewards.specs import load_reward as load_reward
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.seeding import seed_everything
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

CPU = torch.device("cpu")
COUNT = 26


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with models and pairs, in which the answer with w9 wins."""
    root = tmp_path_factory.mktemp("work")
    for family in ("llama", "gpt2"):
        tiny_model(root / family, family)
    rows = []
    for i in range(COUNT):
        prompt = " ".join(f"w{(5 * i + j) % 8}" for j in range(1 + i % 5)) + " "
        words = " ".join(f"w{10 + (3 * i + j) % 6}" for j in range(i % 4))
        rows.append({"prompt": prompt, "chosen": f"w9 {words}", "rejected": f"w20 {words} w21", "lead": 0.1 * (i % 3)})
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def arguments(work: Path, out: str, *more: str, model: str = "llama", **changes) -> list[str]:
    options = {
        "model.path": work / model,
        "model.dtype": "float64",
        "data.source": work / "pairs.jsonl",
        "evaluation.pairs": 6,
        "train.pairs": 6,
        "train.epochs": 2.3,
        "train.out": work / out,
        "optim.lr": 0.01,
        "optim.eps": 1e-3,
    }
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    return ["train", *(part for name, value in options.items() for part in (f"--{name}", str(value))), *more]


def untimed(folder: Path) -> list[dict]:
    timed = re.compile(r"time/|step_time|perf/")
    return [{k: v for k, v in line.items() if not timed.match(k)} for line in read_jsonl(folder / "metrics.jsonl")]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


# --- one curve --------------------------------------------------------------------------------------------------------

VARIANTS = {
    "plain": {},
    "one pair at a time": {"train__micro_batch_tokens": 1},
    "all at once": {"train__micro_batch_tokens": 10**6},
    "replicas": {"train__micro_batch_tokens": 1, "parallel__replicate": 2},
    "activation checkpointing": {"model__activation_checkpointing": True},
}
MUON = {"optim__algorithm": "muon", "optim__weight_decay": 0.1}
LOSS = {"loss__margin": 0.2, "loss__centering": 0.05, "data__margin_column": "lead", "optim__max_grad_norm": 0.5}


def curve(work: Path, ranks: Ranks, name: str, model: str = "llama"):
    """Metrics of five updates, the scores before and after them, and the parameters."""
    changes = dict(VARIANTS.get(name, MUON))
    if ranks.world == 1:
        changes.pop("parallel__replicate", None)
    more = ["--model.activation-checkpointing"] if changes.pop("model__activation_checkpointing", False) else []
    cfg = from_arguments(arguments(work, "none", *more, model=model, **LOSS, **changes)[1:])
    run = training.build_reward_model_trainer(cfg, ranks)
    found = [run.scores(run.held_out)]
    stats = []
    with counted_sums() as counts:
        for step in range(5):
            stats.append(run.update(run.rows(step)))
            run.progress.step += 1
    assert counts["sums"] == (15 if name == "replicas" and ranks.world > 1 else 0)  # two blocks and the rest, per step
    assert counts["backward"] > 5 or changes.get("train__micro_batch_tokens") != 1
    found.append(run.scores(run.held_out))
    # one pair for two ranks: one of them has nothing to do
    stats.append(run.update([3]))
    return stats, found, full_tensors(run.model)


CURVES = [("plain", "llama"), ("one pair at a time", "gpt2"), ("activation checkpointing", "llama"), ("muon", "llama"),
          ("replicas", "llama")]  # fmt: skip


def in_a_rank(rank: int, work: Path) -> None:
    torch.save({key: curve(work, Ranks(rank, 2, CPU), *key) for key in CURVES}, work / f"{rank}.pt")


def assert_same_curve(ours, theirs):
    for mine, its in zip(ours[0], theirs[0], strict=True):
        assert mine.keys() == its.keys()
        for key, value in its.items():
            assert mine[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_two_ranks_give_the_curve_of_one(work):
    run_ranks(in_a_rank, work)
    for rank in range(2):
        found = torch.load(work / f"{rank}.pt", weights_only=False)
        for key in CURVES:
            assert_same_curve(found[key], curve(work, Ranks(0, 1, CPU), *key))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["one pair at a time", "all at once", "activation checkpointing"])
def test_micro_batches_change_nothing(work, name):
    ours, truth = (curve(work, Ranks(0, 1, CPU), which) for which in (name, "plain"))
    assert_same_curve(ours, truth)
    assert truth[0][0]["loss"] != truth[0][1]["loss"]


def test_the_curve_is_that_of_plain_pytorch(work, tmp_path):
    """The same steps with transformers, autograd and torch.optim, on padded batches (GPT-2: it computes in float64)."""
    cfg = from_arguments(arguments(work, "none", model="gpt2", **LOSS)[1:])
    run = training.build_reward_model_trainer(cfg, Ranks(0, 1, CPU))
    reward_model.save(run.model, tmp_path, tokenizer=run.tokenizer, pad=run.pad, max_length=64)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)
    for step in range(4):
        rows = run.rows(step)
        sides = []
        for texts in (run.pairs.chosen, run.pairs.rejected):
            width = max(len(texts[i]) for i in rows)
            ids = torch.tensor([texts[i] + [0] * (width - len(texts[i])) for i in rows])
            sides.append(theirs(ids, attention_mask=(ids != 0).long()).logits[:, 0])
        margins = torch.tensor([run.pairs.margins[i] for i in rows], dtype=torch.float64) + 0.2
        loss = (-logsigmoid(sides[0] - sides[1] - margins) + 0.05 * (sides[0] + sides[1]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = (
                0.01 * (1 + torch.cos(torch.tensor(torch.pi * step / run.steps, dtype=torch.float64)).item()) / 2
            )
        optimizer.step()
        stats = run.update(rows)
        run.progress.step += 1
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-7)
        assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        assert stats["margin"] == pytest.approx((sides[0] - sides[1]).mean().item(), rel=1e-6)
        assert stats["mean_reward"] == pytest.approx(torch.cat(sides).mean().item(), rel=1e-6)
        assert stats["max_reward"] == pytest.approx(torch.cat(sides).max().item(), rel=1e-6)
        assert stats["min_reward"] == pytest.approx(torch.cat(sides).min().item(), rel=1e-6)
        assert stats["accuracy"] == (sides[0] > sides[1]).double().mean()


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_its_model_is_a_reward(work, capsys):
    assert cli.main(["reward-model", *arguments(work, "whole", model__dtype="float32", train__epochs=8)]) == 0
    shown = capsys.readouterr().out
    results = json.loads((work / "whole" / "reward_model.json").read_text())
    assert results["after"]["accuracy"] == 1
    assert results["after"]["log_loss"] < results["before"]["log_loss"]
    assert "6 held-out pairs" in shown
    assert "1.000 [0.610, 1.000]" in shown
    assert "20 pairs" in shown

    lines = read_jsonl(work / "whole" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(27))  # 8 x 20 pairs in steps of 6
    assert lines[-1]["epoch"] == 8
    assert lines[-1]["loss"] < 0.3 < lines[0]["loss"]
    pairs = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()][:20]
    tokenizer = AutoTokenizer.from_pretrained(work / "llama")
    tokens = sum(len(tokenizer(p["prompt"] + p[s]).input_ids) + 1 for p in pairs for s in ("chosen", "rejected"))
    assert lines[-1]["num_tokens"] == 8 * tokens

    reward = load_reward("r", str(work / "whole" / "model")).function
    better, worse = (reward(["w1 w2 "] * 2, [x, f"{x} w12"]) for x in ("w9", "w20"))
    assert min(better) > max(worse)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(work):
    more = {"train__checkpoint_every": 2, "evaluation__every": 3, "optim__warmup_steps": 2, **LOSS}
    update = "nlgrpo.training.scalar_heads:ScalarHeadTrainer.update"
    orders = {"truth": (), "term": (update, 4, signal.SIGTERM), "kill": (update, 6)}
    command = {"main": "nlgrpo.apps.reward_model.reward_model:main"}
    jobs = [Job(arguments(work, name, **more), *order, **command) for name, order in orders.items()]
    jobs += [Job(arguments(work, name, **more), **command) for name in ("term", "kill")]
    truth, term, kill, *again = run_all(jobs)
    assert (truth.status, term.status, kill.status) == (0, 0, -signal.SIGKILL), truth.output + term.output
    assert "stopped and saved at step 4" in term.output
    for name, ended, step in zip(("term", "kill"), again, (4, 4), strict=True):
        assert f"resuming from step {step}" in ended.output, ended.output
        assert untimed(work / name) == untimed(work / "truth")
        assert weights(work / name) == weights(work / "truth")
        assert (work / name / "reward_model.json").read_text() == (work / "truth" / "reward_model.json").read_text()


def test_starts_from_models_of_runs_and_checkpoints(work, capsys):
    assert reward_model_command.main(arguments(work, "first", train__epochs=1, train__checkpoint_every=2)) == 0
    exported, trained = reward_model.load_reward_model(str(work / "first"), dtype=torch.float64)
    assert trained
    (last, middle) = sorted((work / "first" / "checkpoints").glob("step-*"), reverse=True)
    from_last, trained = reward_model.load_reward_model(str(last), seed=5, dtype=torch.float64)
    assert trained
    for name, value in exported.named_parameters():
        assert torch.equal(value, dict(from_last.named_parameters())[name]), name
    from_middle, _ = reward_model.load_reward_model(str(middle), dtype=torch.float64)
    assert not torch.equal(from_middle.embed.weight, exported.embed.weight)

    assert reward_model_command.main([*arguments(work, "dry"), "--dry-run", "--model.path", str(last)]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # the table wraps after a long path
    assert "the head of the classifier" in shown
    assert not (work / "dry").exists()
    (last / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"damaged: .*state\.json"):
        reward_model.load_reward_model(str(last))
    (work / "first" / "model" / "config.json").unlink()
    with pytest.raises(ValueError, match="has not exported its model yet"):
        reward_model.load_reward_model(str(work / "first"))


def test_from_a_checkpoint_of_the_main_job(work):
    """The language model head is dropped."""
    from nlgrpo import train

    (work / "prompts.jsonl").write_text('{"prompt": "w1"}\n{"prompt": "w2 w3"}\n')
    options = {
        "model.path": work / "llama",
        "data.source": work / "prompts.jsonl",
        "rollout.prompts": 2,
        "rollout.samples": 2,
        "rollout.max_new_tokens": 3,
        "rewards.r.function": "length(target=1, scale=9)",
        "optim.lr": 0.1,
        "train.steps": 1,
        "train.out": work / "rl",
        "evaluation.prompts": 0,
    }
    assert train.main(["blank", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]) == 0
    begun, _ = reward_model.load_reward_model(str(work / "llama"))
    ours, trained = reward_model.load_reward_model(str(work / "rl" / "checkpoints" / "step-00000001"))
    exported, _ = reward_model.load_reward_model(str(work / "rl"))
    assert not trained
    assert not torch.equal(ours.blocks[0].qkv.weight, begun.blocks[0].qkv.weight)
    for (name, value), (_, truth) in zip(ours.named_parameters(), exported.named_parameters(), strict=True):
        assert torch.equal(value, truth), name


def test_another_configuration_is_refused_in_the_same_folder(work, capsys):
    assert reward_model_command.main(arguments(work, "claimed", train__epochs=0.3)) == 0
    assert cli.main(["reward-model", *arguments(work, "claimed", train__epochs=0.3, optim__lr=0.02)]) == 2
    assert "optim.lr: 0.01 -> 0.02" in capsys.readouterr().err
    restart = arguments(work, "claimed", "--train.restart", train__epochs=0.3, optim__lr=0.02)
    assert reward_model_command.main(restart) == 0
    assert len(read_jsonl(work / "claimed" / "metrics.jsonl")) == 1


def test_one_pair_alone(work, tmp_path, capsys):
    (tmp_path / "one.jsonl").write_text((work / "pairs.jsonl").read_text().splitlines()[0])
    assert reward_model_command.main(arguments(work, tmp_path / "one", data__source=tmp_path / "one.jsonl")) == 0
    assert "held out   nothing" in capsys.readouterr().out
    assert json.loads((tmp_path / "one" / "reward_model.json").read_text()) == {"before": {}, "after": {}}


# --- configuration ----------------------------------------------------------------------------------------------------


def test_a_file_and_the_command_line(tmp_path, work):
    file = tmp_path / "harmless.toml"
    file.write_text('[model]\npath = "here"\n[data]\nsource = "a.jsonl"\n[optim]\nlr = 1\n')
    cfg = from_arguments([str(file), "--optim.lr", "0.5", "--train.restart", "true"])
    assert (cfg.model.path, cfg.data.source, cfg.optim.lr, cfg.train.restart) == ("here", "a.jsonl", 0.5, True)
    assert cfg.run == Path("runs/harmless")
    file.write_text("[train]\nepoch = 2\n")
    with pytest.raises(ValueError, match=r"unknown key 'train.epoch'; did you mean 'train.epochs'\?"):
        from_arguments([str(file)])
    file.write_text("[train]\nchosen_column = 'a'\n")
    with pytest.raises(ValueError, match=r"did you mean 'data.chosen_column'\?"):
        from_arguments([str(file)])
    with pytest.raises(ValueError, match=r"expected a .toml file or --section.key value, got 'pairs.jsonl'"):
        from_arguments(["pairs.jsonl"])
    with pytest.raises(ValueError, match="no configuration file"):
        from_arguments(["nowhere.toml"])


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("data.source", "", "a file of pairs"),
        ("data.limit", 0, ">= 1 or none"),
        ("data.max_length", 1, ">= 2 or none"),
        ("loss.margin", float("nan"), "a finite number"),
        ("loss.centering", -1.0, ">= 0"),
        ("optim.lr", -1.0, ">= 0"),
        ("optim.betas", (0.9, 1.0), r"two values in \[0, 1\)"),
        ("train.epochs", 0.0, "> 0"),
        ("train.epochs", float("inf"), "> 0"),
        ("train.pairs", 0, ">= 1"),
        ("train.seed", -1, ">= 0"),
        ("train.micro_batch_tokens", 0, ">= 1 or none"),
        ("train.checkpoint_every", -1, ">= 0"),
        ("train.keep_checkpoints", 0, ">= 1"),
        ("evaluation.pairs", -1, ">= 0"),
        ("evaluation.every", -1, ">= 0"),
    ],
)
def test_values_out_of_range(key, value, allowed):
    cfg = RewardModelConfig()
    cfg.data.source = "pairs.jsonl"
    check_reward_model_config(cfg)
    section, name = key.split(".")
    setattr(getattr(cfg, section), name, value)
    with pytest.raises(ValueError, match=rf"{key} = .*: allowed is {allowed}"):
        check_reward_model_config(cfg)


def test_columns_need_three_names():
    cfg = RewardModelConfig()
    cfg.data.source, cfg.data.rejected_column = "pairs.jsonl", "chosen"
    with pytest.raises(ValueError, match="the three columns need different names"):
        check_reward_model_config(cfg)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data.source", "nowhere.jsonl"], "There is no file nowhere.jsonl"),
        (["--data.chosen-column", "better"], "no column 'better'. It has prompt, chosen, rejected, lead"),
        (["--data.max-length", "65"], "has a context of 64 tokens"),
        (["--model.path", "/nowhere/model"], "neither a directory, nor embedded"),
        (["--data.evaluation", "SOURCE"], "all 26 pairs of .* have a prompt that is held out; set another"),
        (["--train.restart", "maybe"], ""),
    ],
)
def test_invalid_input_ends_in_a_message(work, capsys, more, message):
    more = [str(work / "pairs.jsonl") if part == "SOURCE" else part for part in more]
    try:
        status = cli.main(["reward-model", *[*arguments(work, "bad"), *more]])
    except SystemExit as ended:  # of tyro, whose message is its own
        status = ended.code
    said = capsys.readouterr().err
    assert status
    assert re.search(message, said), said
    assert not (work / "bad").exists()


@pytest.mark.parametrize(("command", "said"), [([], r"value \.\.\.\]$"), (["serve"], "got 'serve'$")])
def test_other_subcommands(capsys, command, said):
    assert cli.main(["reward-model", *command]) == 2
    assert re.search(said, capsys.readouterr().err.strip())


def test_help_lists_the_keys(capsys):
    with pytest.raises(SystemExit, match="0"):
        reward_model_command.main(["--help"])
    shown = capsys.readouterr().out
    assert all(
        f"--{key} " in shown for key in ("data.chosen-column", "loss.centering", "train.pairs", "evaluation.every")
    )


def test_the_seed_sets_the_head_and_the_order(work):
    seed_everything(0)
    heads = []
    for seed in (0, 0, 1):
        cfg = from_arguments(arguments(work, "none", train__seed=seed)[1:])
        run = training.build_reward_model_trainer(cfg, Ranks(0, 1, CPU))
        heads.append((run.model.head.weight.detach().clone(), run.rows(0) + run.rows(1)))
    assert torch.equal(heads[0][0], heads[1][0])
    assert heads[0][1] == heads[1][1] != heads[2][1]
    assert not torch.equal(heads[0][0], heads[2][0])
    assert os.environ.get("RANK") is None
