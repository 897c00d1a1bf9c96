"""scripts/tradeoff.py, whole, on a model of 32 words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tiny_model

REPOSITORY = Path(__file__).parent.parent


@pytest.mark.slow
def test_methods_are_trained_compared_and_drawn(tmp_path):
    tiny_model(tmp_path / "tiny")
    (tmp_path / "lexicon.txt").write_text("".join(f"w{i}\t{(-1) ** i * i / 10}\n" for i in range(3, 28)))
    (tmp_path / "prompts.txt").write_text("".join(f"w{i} w{i + 1}\n" for i in range(5, 17)))
    command = [
        *(sys.executable, REPOSITORY / "scripts" / "tradeoff.py", REPOSITORY / "examples" / "alignment.toml"),
        *("--methods", "identity", "bon_sft", "--ns", "2", "--seeds", "0", "--references", "16", "--completions", "4"),
        *("--out", "curves", "--", "--model.path", "tiny", "--data.source", "prompts.txt", "--rollout.prompts", "2"),
        *("--rollout.max_new_tokens", "6", "--rewards.joy.function", "lexicon(path='lexicon.txt')"),
        *("--train.steps", "2", "--evaluation.prompts", "4", "--data.separator", "\n", "--data.first_words", "2"),
    ]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    found = json.loads((tmp_path / "curves" / "tradeoff.json").read_text())
    assert [(point["method"], point["n"], point["seed"]) for point in found["points"]] == [
        ("identity", 2, 0), ("bon_sft", 2, 0)
    ]  # fmt: skip
    assert all(0 <= low <= won <= high <= 1 for won, low, high in (point["single"] for point in found["points"]))
    assert set(found["findings"]) <= set(first.stdout.splitlines())
    for picture in ("win_rates.png", "fronts.png"):
        assert (tmp_path / "curves" / picture).read_bytes().startswith(b"\x89PNG")
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "2 points, 0 to run" in again.stdout
    assert json.loads((tmp_path / "curves" / "tradeoff.json").read_text()) == found


def test_two_rewards_have_no_one_win_rate(tmp_path):
    command = [sys.executable, REPOSITORY / "scripts" / "tradeoff.py", "length-bon"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "length-bon has 2 rewards, and a win rate is by one" in refused.stderr
    assert not (tmp_path / "runs").exists()
