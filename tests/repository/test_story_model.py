"""The models that the package ships, and the scripts that create them."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "nlgrpo" / "data" / "assets"
LIMIT = 128  # tokens of a completion

SENTENCES = [
    "Once upon a time, there was a little girl named Lily.",
    "One day, Tom went to the park with his mom.",
    "The dog was very happy and wagged his tail.",
    "She saw a big red ball and wanted to play with it.",
]


@pytest.fixture(scope="module")
def story_lm():
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "story-lm")
    return model.eval(), AutoTokenizer.from_pretrained(ASSETS / "story-lm")


def prompts(name):
    return [json.loads(line)["prompt"] for line in (ASSETS / name).read_text().splitlines()]


def mean_loss(model, tokenizer, texts):
    """Nats per token, over all ``texts``."""
    rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    with torch.no_grad():
        total = sum(model(ids, labels=ids).loss.item() * (ids.shape[1] - 1) for ids in rows)
    return total / sum(ids.shape[1] - 1 for ids in rows)


@pytest.fixture(scope="module")
def completions(story_lm):
    """Token ids of 256 completions at temperature 1, including the end token."""
    model, tokenizer = story_lm
    chosen = random.Random(0).sample(prompts("prompts.jsonl"), 256)
    inputs = tokenizer(chosen, return_tensors="pt", padding=True, return_token_type_ids=False)
    torch.manual_seed(0)
    ids = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=LIMIT)
    rows = ids[:, inputs["input_ids"].shape[1] :].tolist()
    ends = [row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else LIMIT for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def test_assets_are_small_and_readable():
    for model in ("story-lm", "maze-lm", "numbers-lm"):
        files = [file for file in (ASSETS / model).rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) <= 2_500_000
        assert {file.name for file in files} >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
        assert all(file.stat().st_mode & 0o044 for file in files)


def test_tokenizer_adds_bos_and_no_eos_and_keeps_any_text(story_lm):
    model, tokenizer = story_lm
    ids = tokenizer("Tom saw a dog.")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.eos_token_id == model.config.eos_token_id
    for text in ["Tom saw a dog.", " two  spaces\n", "naïve 漢字 🙂"]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_prompts_are_disjoint_and_leave_room_for_the_completion(story_lm):
    model, tokenizer = story_lm
    train, held_out = prompts("prompts.jsonl"), prompts("eval_prompts.jsonl")
    assert (len(set(train)), len(set(held_out))) == (512, 64)
    assert not set(train) & set(held_out)
    longest = max(len(ids) for ids in tokenizer(train + held_out)["input_ids"])
    assert longest + LIMIT <= model.config.max_position_embeddings


def test_model_prefers_english(story_lm):
    shuffled = [" ".join(random.Random(1).sample(text.split(), len(text.split()))) for text in SENTENCES]
    english = mean_loss(*story_lm, SENTENCES)
    assert english < 2.5  # uniform guessing costs log(1024) = 6.9
    assert mean_loss(*story_lm, shuffled) > english + 1


@pytest.mark.slow
def test_completion_lengths_are_spread(story_lm, completions):
    lengths = [len(row) for row in completions]
    for third in range(3):
        share = sum(third * LIMIT / 3 < length <= (third + 1) * LIMIT / 3 for length in lengths) / len(lengths)
        assert 0.20 <= share <= 0.47, (third, share)
    eos = story_lm[1].eos_token_id
    assert sum(row[-1] != eos for row in completions) < 0.1 * len(completions)


@pytest.mark.slow
def test_final_state_encodes_the_length_of_the_text(story_lm, completions):
    """A linear probe finds windows of lengths between the recipe's two targets, as the end token's logit must."""
    model, _ = story_lm
    states, lengths = [], []
    with torch.no_grad():
        for row in completions:
            states.append(model.transformer(torch.tensor([[1, *row]])).last_hidden_state[0])
            lengths.append(torch.arange(len(row) + 1.0))
    fitted = sum(map(len, states[:192]))
    x = torch.cat(states)
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    windows = torch.exp(-(((torch.cat(lengths)[:, None] - torch.tensor([35.0, 50.0, 65.0])) / 8) ** 2) / 2)
    probe = torch.linalg.lstsq(x[:fitted], windows[:fitted]).solution
    left = (windows - x @ probe)[fitted:].var(0) / windows[fitted:].var(0)
    assert (1 - left).min() > 0.3, left


@pytest.mark.slow
@pytest.mark.records
def test_the_scripts_make_models_of_this_form(tmp_path):
    sentence = "Tom and his dog number {} went to the park to play with a ball. "
    story = "".join(sentence.format(i) for i in range(20))
    (tmp_path / "text.txt").write_text(f"{story}<|endoftext|>\n" * 3)
    stories = ["make_story_model.py", "text.txt", "--steps=2", "--retold=20", "--retold-steps=2"]
    stories += ["--batch=4", "--samples=12"]
    mazes = ["make_maze_model.py", "--steps=2", "--batch=4", "--samples=2"]
    numbers = ["make_numbers_model.py", "--steps=2", "--batch=4", "--samples=1"]
    for script, *arguments in (stories, mazes, numbers):
        command = [sys.executable, ROOT / "scripts" / script, *arguments, "--out", "out"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    for name in ("prompts.jsonl", "sums.jsonl", "countdown.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (ASSETS / name).read_bytes()
    for model in ("story-lm", "maze-lm", "numbers-lm"):
        made, shipped = ({file.name for file in (folder / model).iterdir()} for folder in (tmp_path / "out", ASSETS))
        assert made == shipped
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / model)
