"""The scripts of the experiments, whole, on models of 32 words."""

import json
import subprocess
import sys

import pytest
import transformers
from helpers import REPOSITORY, tiny_config, tiny_model

pytestmark = pytest.mark.slow


def run(script, *arguments, cwd):
    """What a script did, with the output of the runs that it starts."""
    command = [sys.executable, REPOSITORY / "scripts" / script, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_pareto(tmp_path):
    """Of examples/helpful_harmless.toml: a run, a picture, and a line for every point and N."""
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
        *("--methods", "identity", "bon_sft", "--ns", "2", "--seeds", "0", "--references", "16", "--completions", "4"),
        *("--out", "curves", "--", "--model.path", "tiny", "--data.source", "prompts.txt", "--rollout.prompts", "2"),
        *("--rollout.max_new_tokens", "6", "--rewards.joy.function", "lexicon(path='lexicon.txt')"),
        *("--train.steps", "2", "--evaluation.prompts", "4", "--data.separator", "\n", "--data.first_words", "2"),
    ]
    first = run("tradeoff.py", *arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    found = json.loads((tmp_path / "curves" / "tradeoff.json").read_text())
    assert [(point["method"], point["n"], point["seed"]) for point in found["points"]] == [
        ("identity", 2, 0), ("bon_sft", 2, 0)
    ]  # fmt: skip
    assert all(0 <= low <= won <= high <= 1 for won, low, high in (point["single"] for point in found["points"]))
    assert set(found["findings"]) <= set(first.stdout.splitlines())
    for picture in ("win_rates.png", "fronts.png"):
        assert (tmp_path / "curves" / picture).read_bytes().startswith(b"\x89PNG")
    again = run("tradeoff.py", *arguments, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "2 points, 0 to run" in again.stdout
    assert json.loads((tmp_path / "curves" / "tradeoff.json").read_text()) == found


def test_two_rewards_have_no_one_win_rate(tmp_path):
    refused = run("tradeoff.py", "length-bon", cwd=tmp_path)
    assert refused.returncode == 2
    assert "length-bon has 2 rewards, and a win rate is by one" in refused.stderr
    assert not (tmp_path / "runs").exists()
