"""The default model that the package ships, and the script that creates it."""

import importlib
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
SCRIPT = ROOT / "scripts" / "make_story_model.py"
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
    for model in ("story-lm", "maze-lm"):
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


def test_completion_lengths_are_spread(story_lm, completions):
    lengths = [len(row) for row in completions]
    for third in range(3):
        share = sum(third * LIMIT / 3 < length <= (third + 1) * LIMIT / 3 for length in lengths) / len(lengths)
        assert 0.20 <= share <= 0.47, (third, share)
    eos = story_lm[1].eos_token_id
    assert sum(row[-1] != eos for row in completions) < 0.1 * len(completions)


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


@pytest.fixture
def script(monkeypatch):
    """The script's ``main`` for a list of arguments, in this process; the thread setting is restored."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    threads = torch.get_num_threads()
    yield importlib.import_module("make_story_model").main
    torch.set_num_threads(threads)


def tiny_text(folder, stories=3, sentences=20):
    sentence = "Tom and his dog number {} went to the park to play with a ball. "
    text = "<|endoftext|>\n".join(
        "".join(sentence.format(10 * s + i) for i in range(sentences)) for s in range(stories)
    )  # fmt: skip
    path = folder / "tiny.txt"
    path.write_text(text + "\n<|endoftext|>\nA story that was c", encoding="utf-8")
    return path


def test_documents_are_parts_of_stories_that_end_between_words(tmp_path, script):
    data = importlib.import_module("story_data")
    stories = data.read_stories(tiny_text(tmp_path, stories=4, sentences=30))
    tokenizer = data.train_tokenizer(stories)
    documents, rng = data.Documents.build(stories, tokenizer), random.Random(0)
    whole = [" ".join(story) + " " for story in stories]
    lengths = []
    for _ in range(300):
        first, *body, last = documents.draw(rng)
        assert (first, last) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert any(tokenizer.decode(body) + " " in story for story in whole)
        lengths.append(len(body))
    assert min(lengths) < 30 < 110 < max(lengths) <= data.CONTEXT - 2


@pytest.mark.slow
def test_script_gives_the_same_bytes_here_and_in_a_fresh_process(tmp_path, script):
    text, outs = tiny_text(tmp_path), [tmp_path / "a", tmp_path / "b"]
    here, there = (
        [str(text), "--out", str(out), "--steps=2", "--retold=20", "--retold-steps=2", "--batch=4", "--samples=12"]
        for out in outs
    )
    script(here)
    subprocess.run([sys.executable, str(SCRIPT), *there], check=True, capture_output=True)
    first, second = (
        {file.relative_to(out): file.read_bytes() for file in out.rglob("*") if file.is_file()} for out in outs
    )
    assert len(first) == 8
    assert first == second
    assert first[Path("prompts.jsonl")] == (ASSETS / "prompts.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent.txt", "No such file"),
        (lambda folder: tiny_text(folder, stories=2), "2 complete stories; at least 3 are needed"),
        (lambda folder: tiny_text(folder, sentences=2), "none of 2 stories has the 138 tokens"),
    ],
)
def test_script_refuses_a_text_it_cannot_use(tmp_path, script, capsys, make, message):
    with pytest.raises(SystemExit) as stop:
        script([str(make(tmp_path)), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
