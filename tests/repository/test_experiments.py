"""Run the scripts of the experiments completely, on models with 32 words."""

import json
import random
import re
import subprocess
import sys

import pytest
import torch
import transformers
from helpers import REPOSITORY, tiny_config, tiny_model
from rich.console import Console

from nlgrpo.apps.guided import decode
from nlgrpo.engine.generation import generate
from nlgrpo.model import decoder
from nlgrpo.runtime.supervision import process_group
from nlgrpo.runtime.work_queue import WorkQueue

pytestmark = [pytest.mark.slow, pytest.mark.records]


def run(script, *arguments, cwd):
    """Run a script; the completed process, with the output of the runs that it starts."""
    command = [sys.executable, REPOSITORY / "scripts" / script, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_pareto(tmp_path):
    """examples/helpful_harmless.toml gives a run, a figure, and a line for every point and N."""
    tiny_model(tmp_path / "tiny")
    tiny_model(tmp_path / "runs" / "harmless" / "model")
    scorer = transformers.LlamaForSequenceClassification(tiny_config(num_labels=1))
    scorer.save_pretrained(tmp_path / "runs" / "harmless" / "model")
    dialogues = [{"chosen": f"\n\nHuman: w{i} w2\n\nAssistant: w3 w{i}"} for i in range(24)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dialogues))
    (tmp_path / "lexicon.txt").write_text("w3\t1.5\nw4\t-2\n")
    done = run(
        "pareto.py",
        REPOSITORY / "examples" / "helpful_harmless.toml",
        *("--weights", "0.25", "--methods", "bon:4", "--ns", "1", "2", "--out", "fronts", "--"),
        *("--model.path", "tiny", "--data.source", "pairs.jsonl", "--rollout.max_new_tokens", "6"),
        *("--rewards.helpful.function", "lexicon(path='lexicon.txt')", "--train.steps", "2"),
        *("--evaluation.prompts", "4", "--evaluation.samples", "4", "--evaluation.ns", "1", "2"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("best of ")]
    assert len(lines) == 2
    assert all(", KL 0.0" in line and "beaten" in line for line in lines)
    assert (tmp_path / "fronts" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    weights = {
        tuple(reward["weight"] for reward in json.loads(path.read_text())["rewards"].values())
        for path in (tmp_path / "fronts").glob("*/config.json")
    }
    assert weights == {(0.25, 0.75)}


def test_tradeoff(tmp_path):
    tiny_model(tmp_path / "tiny")
    (tmp_path / "lexicon.txt").write_text("".join(f"w{i}\t{(-1) ** i * i / 10}\n" for i in range(3, 28)))
    (tmp_path / "prompts.txt").write_text("".join(f"w{i} w{i + 1}\n" for i in range(5, 17)))
    arguments = [
        REPOSITORY / "examples" / "alignment.toml",
        *("--methods", "identity", "bon_sft", "--ns", "2", "--seeds", "3", "--references", "16", "--completions", "8"),
        *("--gold", "length(target=3, scale=5)"),
        *("--out", "curves", "--", "--model.path", "tiny", "--data.source", "prompts.txt", "--rollout.prompts", "2"),
        *("--rollout.max_new_tokens", "6", "--rewards.joy.function", "lexicon(path='lexicon.txt')"),
        *("--train.steps", "2", "--evaluation.prompts", "4", "--data.separator", "\n", "--data.first_words", "2"),
    ]
    first = run("tradeoff.py", *arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    found = json.loads((tmp_path / "curves" / "tradeoff.json").read_text())
    assert [(point["method"], point["n"], point["seed"]) for point in found["points"]] == [
        ("identity", 2, 3), ("bon_sft", 2, 3)
    ]  # fmt: skip
    assert all(0 <= low <= won <= high <= 1 for won, low, high in (point["single"] for point in found["points"]))
    shown = (tmp_path / "curves" / "findings.md").read_text().splitlines()
    assert {f"- {line}" for line in found["findings"]} < set(shown) <= set(first.stdout.splitlines())
    for picture in ("win_rates.png", "fronts.png"):
        assert (tmp_path / "curves" / picture).read_bytes().startswith(b"\x89PNG")
    again = run("tradeoff.py", *arguments, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "2 points, 0 to run" in again.stdout
    assert json.loads((tmp_path / "curves" / "tradeoff.json").read_text()) == found
    of_runs = [*arguments[:1], "--runs", "curves", "--best", "2", "--worst", "8", "--rewind", "rewind:0.5:8"]
    done = run("procedures.py", *of_runs, "--against", "bon_sft", *arguments[arguments.index("--") :], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:3]] == [
        "reference", "identity, N 2, seed 3", "BoN-SFT, N 2, seed 3"
    ]  # fmt: skip
    assert done.stdout.count("identity over BoN-SFT") == 5  # 1 and 2 completions, worst of 8, rewind, draws


SMALL = (
    *("--model.path", "tiny", "--data.source", "prompts.txt", "--data.separator", "\n", "--data.first_words", "2"),
    *("--rollout.prompts", "2", "--rollout.max_new_tokens", "6", "--train.steps", "2", "--evaluation.prompts", "4"),
)


@pytest.fixture
def small(tmp_path):
    """A folder with a model of 32 words, prompts and a lexicon of some of its words."""
    tiny_model(tmp_path / "tiny")
    (tmp_path / "lexicon.txt").write_text("".join(f"w{i}\t{(-1) ** i * i / 10}\n" for i in range(3, 28)))
    (tmp_path / "prompts.txt").write_text("".join(f"w{i} w{i + 1}\n" for i in range(5, 17)))
    return tmp_path


def test_poisoned_reward(small):
    functions = f"{REPOSITORY / 'examples' / 'experiment_rewards.py'}:Poisoned(lexicon='lexicon.txt', word='w9')"
    rewards = ("--rewards.poisoned.function", functions, "--rewards.true.function", "lexicon(path='lexicon.txt')")
    done = run(
        "poisoned_reward.py",
        REPOSITORY / "examples" / "poisoned.toml",
        *("--ns", "2", "--seeds", "3", "--references", "16", "--completions", "4", "--out", "poisoned", "--", *SMALL),
        *(*rewards, "--rewards.word.function", "regex(pattern='w9')"),
        cwd=small,
    )
    assert done.returncode == 0, done.stderr
    for kind in ("exact optimum, {}:", "trained, {}, N 2, seed 3:", ", {}: word "):
        assert all(kind.format(one) in done.stdout for one in ("raw reward", "by prompt", "pooled", "by the median"))
    assert done.stdout.count("trained, at KL ") == 4
    assert (small / "poisoned" / "poisoned.png").read_bytes().startswith(b"\x89PNG")


def test_poisoned_pairs(small):
    done = run(
        "poisoned_pairs.py",
        small / "recipe.toml",
        *("--fractions", "0.5", "--pairs", "2", "--references", "8", "--test-prompts", "6", "--phrase", " w9"),
        *("--out", "pairs", "--", "--train.pairs", "4"),
        cwd=_with_recipe(small),
    )
    assert done.returncode == 0, done.stderr
    assert "50% of" in done.stdout
    lines = [json.loads(line) for line in (small / "pairs" / "pairs-0.5.jsonl").open()]
    assert sum(line["chosen"].startswith(" w9") for line in lines) > 0
    assert not any(pair["prompt"].split()[0] == "w16" for pair in lines)  # the last prompts are for the test
    assert (small / "pairs" / "poisoned_pairs.png").read_bytes().startswith(b"\x89PNG")


def test_vbon_records(small):
    done = run(
        "vbon_records.py",
        small / "recipe.toml",
        *("--samples", "40", "--of", "2", "--train-samples", "4", "8", "--seeds", "0", "--repeats", "2"),
        *("--completions", "4", "--out", "records"),
        cwd=_with_recipe(small),
    )
    assert done.returncode == 0, done.stderr
    assert [size in done.stdout for size in ("from 20 samples", "M = 5,", "M = 20,", "M = 100,")] == [True] * 3 + [
        False
    ]
    assert all(f"vbon:2 on {size} samples" in done.stdout for size in (4, 8))
    for picture in ("log_f.png", "samples.png"):
        assert (small / "records" / picture).read_bytes().startswith(b"\x89PNG")


def _with_recipe(folder):
    """Write alignment.toml with the model, the data and the reward of the folder."""
    text = (REPOSITORY / "examples" / "alignment.toml").read_text()
    for old, new in (
        ("../shared/models/stories260K", "tiny"),
        ("../shared/data/tinystories/tinystories_sample.txt", "prompts.txt"),
        ("../shared/data/vader/vader_lexicon.txt", "lexicon.txt"),
        ('"<|endoftext|>"', '"\\n"'),
        ("first_words = 12", "first_words = 2"),
        ("prompts = 8", "prompts = 2"),
        ("max_new_tokens = 32", "max_new_tokens = 6"),
        ("steps = 40", "steps = 2"),
        ("[evaluation]", "[evaluation]\nprompts = 4"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "recipe.toml").write_text(text)
    return folder


def test_tradeoff_refuses_two_rewards(tmp_path):
    refused = run("tradeoff.py", "length-bon", cwd=tmp_path)
    assert refused.returncode == 2
    assert "length-bon has 2 rewards; expected one" in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_gradient_signal(tmp_path, monkeypatch):
    """There is a line per parameter and its end tokens; for Gaussian gradients signal and noise are unbiased."""
    tiny_model(tmp_path / "tiny")
    (tmp_path / "prompts.txt").write_text("".join(f"w{i} w{i + 1}\n" for i in range(5, 17)))
    data = ("--data.source", "prompts.txt", "--data.separator", "\n", "--data.first_words", "2")
    held_out = ("--data.evaluation", "", "--evaluation.prompts", "4")
    small = ("--rollout.prompts", "2", "--rollout.max_new_tokens", "4", *held_out)
    done = run("gradient_signal.py", "length-bon", "--model.path", "tiny", *data, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    measured = {line[:40].strip(): line.split() for line in done.stdout.splitlines() if "signal^2" in line}
    assert {"all", "norm.weight", "embed.weight", "head.weight, end tokens"} <= set(measured)
    unread = measured.pop("embed.weight, end tokens")  # no token follows them
    assert [float(unread[i]) for i in (-5, -3)] == [0, 0]
    assert all(float(words[-3]) > 0 for words in measured.values())
    whole = sum(float(words[-5]) for name, words in measured.items() if name != "all" and "," not in name)
    assert float(measured["all"][-5]) == pytest.approx(whole, rel=0.02)
    assert not (tmp_path / "runs").exists()
    refused = run("gradient_signal.py", "length-bon", "--model.path", "nowhere", cwd=tmp_path)
    assert "nowhere" in refused.stderr
    assert "Traceback" not in refused.stderr

    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    from gradient_signal import signal_and_noise

    generator = torch.Generator().manual_seed(0)
    mean = torch.tensor([1.0, -2.0, 0.5])
    drawn = mean + 3 * torch.randn(4000, 4, 3, generator=generator)
    signal, noise = torch.tensor([signal_and_noise(list(each)) for each in drawn]).mean(0)
    assert signal == pytest.approx(float(mean.square().sum()), abs=0.6)  # its standard error is 0.15
    assert noise == pytest.approx(3 * 3**2, rel=0.03)


def test_guided_budgets(tmp_path):
    tiny_model(tmp_path / "tiny")
    (tmp_path / "lexicon.txt").write_text("".join(f"w{i}\t{(-1) ** i * i / 10}\n" for i in range(3, 28)))
    (tmp_path / "prompts.txt").write_text("".join(f"w{i} w{i + 1}\n" for i in range(5, 17)))
    arguments = [
        REPOSITORY / "examples" / "guided.toml",
        *("--methods", "bon", "iro:1", "compressed", "cd", "args:8"),
        *("--budgets", "2", "4", "--seeds", "3", "--chunk", "2"),
        *("--choose", "reward", "value", "--latency-prompts", "2", "--latency-rounds", "2"),
        "--learn=--iterations 1 --samples 4 --beams 2 --successors 2 --value.held-out 1",
        *("--out", "budgets", "--", "--model.path", "tiny", "--data.source", "prompts.txt"),
        *("--rollout.max_new_tokens", "6", "--rewards.joy.function", "lexicon(path='lexicon.txt')"),
        *("--evaluation.prompts", "4", "--data.separator", "\n", "--data.first_words", "2"),
    ]
    done = run("guided_budgets.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "budgets"
    shown = done.stdout.splitlines()
    parts = [shown.index(f"chosen by {choose}") for choose in ("reward", "value")]
    of_choices = (shown[: parts[1]], shown[parts[1] :])
    means = []
    for choose, lines in zip(("reward", "value"), of_choices, strict=True):
        rows = json.loads((folder / "seed-3" / choose / "decode.json").read_text())
        mean = {(row["method"], row["budget"]): sum(row["rewards"]) / 4 for row in rows}
        assert len(mean) == 10
        asked = next(line for line in reversed(lines) if line.startswith("  ARGS, weight 8: "))  # of the largest N
        rewards = next(row["reward_queries"] for row in rows if (row["method"], row["budget"]) == ("args:8", 4))
        assert asked.endswith(f", 0, {rewards / 4:.0f}")
        assert ": IRO, iteration 1 over ARGS, weight 8: " in "\n".join(lines)
        for name, method in (("best-of-N", "bon"), ("IRO, iteration 1", "iro:1"), ("IRO, compressed", "compressed")):
            line = next(line for line in lines if line.startswith(f"| {name} |"))
            found = [float(cell.split()[0]) for cell in line.split("|")[2:4]]
            assert found == pytest.approx([mean[method, n] for n in (2, 4)], abs=6e-4)
        leads = [line for line in lines if "IRO, iteration 1 over best-of-N" in line]
        gap = mean["iro:1", 4] - mean["bon", 4]
        assert float(leads[1].split(": ")[2].split()[0]) == pytest.approx(gap, abs=6e-5)
        means.append(mean)
    assert all(means[1][way] <= means[0][way] for way in means[0])  # choosing by reward gives the highest reward
    assert means[0] != means[1]
    for file in ("budgets-reward.png", "budgets-value.png", "latency.png"):
        assert (folder / file).read_bytes().startswith(b"\x89PNG")
    again = run("guided_budgets.py", *arguments, cwd=tmp_path)
    assert again.stdout.splitlines()[-8:] == shown[-8:]
    refused = run("guided_budgets.py", REPOSITORY / "examples" / "guided.toml", "--methods", "cd", cwd=tmp_path)
    assert "bon is missing" in refused.stderr


def test_guided_ablations(tmp_path):
    """Rewards and leads of the tables equal those of the commands; variants in several groups are run once."""
    tiny_model(tmp_path / "tiny")
    (tmp_path / "lexicon.txt").write_text("".join(f"w{i}\t{(-1) ** i * i / 10}\n" for i in range(3, 28)))
    (tmp_path / "prompts.txt").write_text("".join(f"w{i} w{i + 1}\n" for i in range(5, 17)))
    arguments = [
        *(REPOSITORY / "examples" / "guided.toml", "--vary", "head", "equal", "--seeds", "3", "5", "--budgets", "4"),
        "--learn=--iterations 2 --samples 4 --beams 2 --successors 2 --chunk 2 --value.held-out 1 --value.lr 1e-2",
        *("--out", "ablations", "--", "--model.path", "tiny", "--data.source", "prompts.txt"),
        *("--rollout.max_new_tokens", "6", "--rewards.joy.function", "lexicon(path='lexicon.txt')"),
        *("--evaluation.prompts", "4", "--data.separator", "\n", "--data.first_words", "2"),
    ]
    done = run("guided_ablations.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {"base": "base", "--value.head-only": "value.head-only", "--value.drop-equal": "value.drop-equal"}
    written = {path.name for path in (tmp_path / "ablations").iterdir()}
    assert written == {*names.values(), "findings.md", "rewards.png"}
    assert done.stdout.count("nlgrpo iro: ablations/base/") == 2  # one per seed

    def rewards(folder, method):
        return [
            next(row["rewards"] for row in rows if row["method"] == method)
            for seed in (3, 5)
            for rows in [json.loads((tmp_path / "ablations" / folder / f"seed-{seed}/decode/decode.json").read_text())]
        ]

    tables = (tmp_path / "ablations" / "findings.md").read_text()
    base = torch.tensor(rewards("base", "iro:2"))
    for name, folder in names.items():
        cells = next(line for line in tables.splitlines() if line.startswith(f"| {name} |")).split("|")[2:]
        means = [float(cell.split()[0]) for cell in cells[:3]]
        expected = [float(torch.tensor(rewards(folder, method)).mean()) for method in ("bon", "iro:1", "iro:2")]
        assert means == pytest.approx(expected, abs=6e-4)
        if name != "base":
            gaps = torch.tensor(rewards(folder, "iro:2")) - base
            assert float(cells[3].split()[0]) == pytest.approx(float(gaps.mean()), abs=6e-4)
            each = [float(x) for x in re.search(r"seeds (.*)\)", cells[3])[1].split(", ")]
            assert each == pytest.approx(gaps.mean(1).tolist(), abs=6e-4)
    rollouts = [line for line in tables.splitlines() if line.startswith("| --value.head-only | 2 |")]
    assert rollouts[0].split("|")[3].strip() == "8 x 4"
    refused = run("guided_ablations.py", "length-bon", "--vary", "value-size", cwd=tmp_path)
    assert "name the initial value models with --value-models" in refused.stderr


def test_guided_budgets_with_a_gold_reward(tmp_path):
    tiny_model(tmp_path / "tiny")
    (tmp_path / "lexicon.txt").write_text("".join(f"w{i}\t{(-1) ** i * i / 10}\n" for i in range(3, 28)))
    (tmp_path / "other.txt").write_text("".join(f"w{i}\t{i / 10}\n" for i in range(3, 28)))
    (tmp_path / "prompts.txt").write_text("".join(f"w{i} w{i + 1}\n" for i in range(5, 17)))
    arguments = [
        *(REPOSITORY / "examples" / "guided.toml", "--methods", "bon", "iro:1", "cards:0.5", "--budgets", "4"),
        *("--seeds", "3", "--chunk", "2", "--latency-rounds", "0", "--gold", "other", "--out", "budgets"),
        "--learn=--iterations 1 --samples 4 --beams 2 --successors 2 --value.held-out 1",
        *("--", "--model.path", "tiny", "--data.source", "prompts.txt", "--rollout.max_new_tokens", "6"),
        *("--rewards.joy.function", "lexicon(path='lexicon.txt')", "--evaluation.prompts", "4"),
        *("--rewards.other.function", "lexicon(path='other.txt')", "--rewards.other.weight", "0"),
        *("--data.separator", "\n", "--data.first_words", "2"),
    ]
    done = run("guided_budgets.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "budgets" / "seed-3" / "reward" / "decode.json").read_text())
    gold = {row["method"]: sum(row["gold"]["rewards"]) / 4 for row in rows}
    shown = done.stdout.splitlines()
    shown = shown[shown.index("evaluated by other, chosen by reward") :]
    for name, method in (("best-of-N", "bon"), ("IRO, iteration 1", "iro:1"), ("CARDS, 0.5", "cards:0.5")):
        line = next(line for line in shown if line.startswith(f"| {name} |"))
        assert float(line.split("|")[2].split()[0]) == pytest.approx(gold[method], abs=6e-4)
    assert {path.name for path in (tmp_path / "budgets").glob("*.png")} == {
        "budgets-reward.png", "budgets-reward-gold.png"
    }  # fmt: skip


def test_overestimation(tmp_path, monkeypatch):
    """Rewards equal those of ``nlgrpo decode --choose value``; values of the engine's samples equal transformers'."""
    tiny_model(tmp_path / "tiny")
    (tmp_path / "lexicon.txt").write_text("".join(f"w{i}\t{(-1) ** i * i / 10}\n" for i in range(3, 28)))
    (tmp_path / "prompts.txt").write_text("".join(f"w{i} w{i + 1}\n" for i in range(5, 17)))
    same = [
        *(REPOSITORY / "examples" / "guided.toml", "--model.path", "tiny", "--data.source", "prompts.txt"),
        *("--rollout.max_new_tokens", "6", "--rewards.joy.function", "lexicon(path='lexicon.txt')", "--chunk", "2"),
        *("--evaluation.prompts", "4", "--data.separator", "\n", "--data.first_words", "2"),
    ]
    learn = ["iro", *same, "--iterations", "2", "--samples", "4", "--beams", "2", "--successors", "2", "--out", "loop"]
    guided = [*same, "--guide", "loop", "--betas", "1", "0.25", "--methods", "bon", "iro:1", "cd", "--budgets", "4"]
    for command in ([*learn, "--value.held-out", "1"], ["decode", *guided, "--choose", "value", "--out", "ways"]):
        done = subprocess.run([sys.executable, "-m", "nlgrpo.cli", *command], cwd=tmp_path, capture_output=True)
        assert done.returncode == 0, done.stderr
    done = run("overestimation.py", *guided, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "ways" / "decode.json").read_text())
    lines = done.stdout.splitlines()
    assert lines[0] == "4 prompts, 3 methods"
    for line, row in zip(lines[1:], rows, strict=True):
        assert line.split()[0] == row["method"]
        rewards = line.partition("reward ")[2]
        assert rewards == "{:.3f} [{:.3f}, {:.3f}]".format(*row["mean"])
    assert not (tmp_path / "runs").exists()

    monkeypatch.chdir(tmp_path)
    with process_group.start() as ranks:
        c = decode.build_comparison(
            *decode.read_arguments([str(word) for word in guided]), WorkQueue(ranks, Console(quiet=True))
        )
    drawn = generate(c.model, c.batch.ids, 4, c.sampler.sampling, seed=c.sampler.seed).completion_ids()
    theirs = [
        transformers.AutoModelForSequenceClassification.from_pretrained(f"loop/iteration-{t}/value/model").eval()
        for t in (1, 2)
    ]
    with torch.no_grad():
        values = [
            sum(w * m(torch.tensor([[*ids, *own]])).logits.item() for w, m in zip((0.2, 0.8), theirs, strict=True))
            for ids, own in zip((ids for ids in c.batch.ids for _ in range(4)), drawn, strict=True)
        ]
    printed = float(lines[1].partition(" V ")[2].split()[0])
    assert printed == pytest.approx(float(torch.tensor(values).view(4, 4).amax(1).mean()), abs=6e-4)

    refused = run("overestimation.py", *same, "--guide", "loop", "--methods", "args", cwd=tmp_path)
    assert "method 'args' uses no value model" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_make_arithmetic(tmp_path, monkeypatch):
    for out in ("one", "two"):
        done = run("make_arithmetic.py", "--out", out, "--terms", "3", "--problems", "8", "--steps", "3", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for file in ("sums.jsonl", "model/model.safetensors", "model/tokenizer.json", "model/config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "one" / "sums.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        assert f"#### {sum(int(term) for term in row['prompt'].rstrip('=').split('+'))}" == row["answer"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "one" / "model")
    text = "12+7+3=12+7=19 19+3=22 #### 22"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert len(tokenizer(text).input_ids) == 1 + 6 + 6 + 6 + 3  # one token per number
    largest = f"#### {3 * 12}"
    assert tokenizer.unk_token is None
    assert tokenizer.decode(tokenizer(largest).input_ids, skip_special_tokens=True) == largest
    decoder.load(tmp_path / "one" / "model")  # the decoder reads it

    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    from make_arithmetic import solution

    assert solution([12, 7, 3], 0.0, random.Random(0)) == "12+7=19 19+3=22 #### 22"
    forgetful = solution([12, 7, 3, 8], 1.0, random.Random(0))
    assert forgetful == "12+7=19 19+3=12 12+8=10 #### 10"  # every carry is lost, and the next step uses the result
    drawn = [solution([9, 4], 0.6, random.Random(seed)) for seed in range(2000)]
    assert set(drawn) == {"9+4=13 #### 13", "9+4=3 #### 3"}
    assert drawn.count("9+4=3 #### 3") / 2000 == pytest.approx(0.6, abs=0.05)
    assert "expected 2 terms or more" in run("make_arithmetic.py", "--out", "x", "--terms", "1", cwd=tmp_path).stderr
