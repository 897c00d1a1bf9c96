"""Run what is in ``examples/``: recipes in an empty folder, and scripts on tiny random models."""

import json
import re
import runpy
import subprocess
import sys

import pytest
import torch
from support.chat_model import chat_model
from support.helpers import REPOSITORY, environment, tiny_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from nlgrpo import train
from nlgrpo.training.tracking import run_files

pytestmark = pytest.mark.slow

EXAMPLES = REPOSITORY / "examples"
LINES = ["w3 w5 w7 w9 w11", "w1 w2", "w4 w4 w4 w6 w8 w10 w12", "w20"]  # the last has nothing to predict
STEPS, LR = 3, 1e-3


SMALL = ["--train.steps", "3", "--rollout.prompts", "4", "--train.samples-every", "1"]
SMALL += ["--evaluation.prompts", "4", "--evaluation.samples", "8", "--evaluation.ns", "1", "8"]
# Rows as those of the data sets on the Hub.
ROWS = {
    "gsm8k_qwen": lambda i: {
        "question": f"Ann has {i} apples and 4 pears.",
        "answer": f"<<{i}+4={i + 4}>>\n#### {i + 4}",
    },
    "countdown": lambda i: {"target": i + 54, "nums": [i, 19, 35]},
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_trains_without_any_file(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert train.main([str(path), "--tiny", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "pass@8" in shown
    lines = run_files.read_jsonl(tmp_path / "runs" / f"{path.stem}-tiny" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert 0 < sum(line["rewards/solved/mean"] for line in lines) < 3
    assert all(line["completions/clipped_ratio"] < 0.2 for line in lines)  # --tiny has room for answers


@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_reads_the_columns_of_its_data(name, tmp_path, monkeypatch, capsys):
    """Its own data are on the Hub: a file with the same columns, and a random model in their place."""
    monkeypatch.chdir(tmp_path)
    chat_model(tmp_path / "model", max_position_embeddings=2048)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(ROWS[name](i)) + "\n" for i in range(400)))
    options = ["--data.source", "rows.jsonl", "--model.path", "model"]
    if name == "gsm8k_qwen":
        options += ["--data.evaluation", "", "--data.evaluation-split", ""]
    assert train.main([str(EXAMPLES / f"{name}.toml"), *options, "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "maximise 1 bon:8:unbiased(solved)" in shown


def test_recipes_name_no_file_outside_the_package():
    for path in EXAMPLES.glob("*.toml"):
        assert "shared" not in path.read_text()


def as_user(script, *arguments, folder):
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def here(script, *arguments, monkeypatch, capsys):
    """Like `as_user`, but in this process, which saves the time of the imports."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return capsys.readouterr().out


def losses_of_transformers(folder):
    """Losses of fine-tuning with transformers and the model's own loss."""
    model, tokenizer = (load.from_pretrained(folder) for load in (AutoModelForCausalLM, AutoTokenizer))
    optimizer = torch.optim.AdamW(model.train().parameters(), LR)
    ids = [torch.tensor(tokenizer(line).input_ids) for line in LINES[:3]]
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    losses = []
    for _ in range(STEPS):
        mask = (labels != -100).long()
        loss = model(input_ids=labels.clamp(min=0), attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tied", [True, False])
def test_fine_tune_has_the_losses_of_transformers(tmp_path, tied, monkeypatch, capsys):
    tiny_model(tmp_path, tie_word_embeddings=tied)
    truth = losses_of_transformers(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("\n".join([*LINES, ""]))
    arguments = ("--text", text, "--model", tmp_path, "--batch", 3, "--steps", STEPS, "--lr", LR)
    if tied:
        printed = as_user("fine_tune.py", *arguments, folder=tmp_path)
    else:
        printed = here("fine_tune.py", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    losses = [float(x) for x in re.findall(r"^step +\d+   loss (\S+)   peak [1-9]\d* MiB$", printed, re.MULTILINE)]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(truth[0], abs=1e-5)
    assert losses == pytest.approx(truth, abs=1e-4)
    assert truth[0] - truth[-1] > 0.01, "the steps must change the loss"


def test_a_text_with_nothing_to_predict_is_refused(tmp_path, monkeypatch, capsys):
    tiny_model(tmp_path)
    (tmp_path / "text.txt").write_text("w3\n\nw4\n")
    with pytest.raises(SystemExit, match=r"text.txt has no line of two tokens or more"):
        here(
            "fine_tune.py", "--text", tmp_path / "text.txt", "--model", tmp_path, monkeypatch=monkeypatch, capsys=capsys
        )


@pytest.mark.parametrize("rewards", [["short_sentence"], ["short_sentence", "varied_words"]])
def test_trl_best_of_n(tmp_path, rewards, monkeypatch, capsys):
    """Best-of-4 is above the mean, and rewards are possible for completions of 0 to 6 words."""
    tiny_model(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) for i in range(4, 12)))
    arguments = ("--model", tmp_path, "--prompts", prompts, "--steps", 3, "--max-length", 6)
    if len(rewards) == 1:
        printed = as_user("trl_best_of_n.py", *arguments, folder=tmp_path)
    else:
        printed = here("trl_best_of_n.py", *arguments, "--two", monkeypatch=monkeypatch, capsys=capsys)
    lines = re.findall(r"^step +(\d)   (\w+): mean +(\S+)   best of 4 +(\S+)$", printed, re.MULTILINE)
    bounds = {"short_sentence": (-1, -2 / 8), "varied_words": (0, 1)}
    assert [(int(step), name) for step, name, _, _ in lines] == [(step, name) for step in (1, 2, 3) for name in rewards]
    for _, name, mean, best in lines:
        least, most = bounds[name]
        assert least <= float(mean) < float(best) <= most
