"""Run the scripts of ``examples/`` on tiny random models."""

import json
import re
import runpy
import subprocess
import sys

import pytest
import torch
from support.helpers import REPOSITORY, environment, tiny_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

EXAMPLES = REPOSITORY / "examples"
LINES = ["w3 w5 w7 w9 w11", "w1 w2", "w4 w4 w4 w6 w8 w10 w12", "w20"]  # the last has nothing to predict
STEPS, LR = 3, 1e-3


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
