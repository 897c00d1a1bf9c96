"""Reward models against transformers and plain PyTorch: every family, read, scored, trained on and written."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import tiny_model
from safetensors.torch import load_file, save_file
from test_decoder import CASES, random_model
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from nlgrpo.model import reward_model
from nlgrpo.model.packing import empty_pair_batch, pack_pairs, scored_at
from nlgrpo.model.reward_model import padding_id, scores
from nlgrpo.training.losses.bradley_terry import bradley_terry_loss

PAD, EOS = 0, 2
FAMILIES = ["llama", "llama-tied-bias", "mistral-window", "qwen2", "qwen3-tied", "neox", "gpt2", "gpt2-untied"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    tiny_model(folder)
    return AutoTokenizer.from_pretrained(folder)


def sequences(seed=0, lengths=(17, 1, 9, 40, 2, 3)):
    """Random ids that end in EOS; one ends in padding ids, and one holds nothing else."""
    generator = torch.Generator().manual_seed(seed)
    rows = [[*torch.randint(3, 99, (n - 1,), generator=generator).tolist(), EOS] for n in lengths]
    rows[2] = [*rows[2][:-3], PAD, 5, PAD, PAD]
    rows[4] = [PAD, PAD]
    return rows


def their_scores(model, rows, pad=PAD):
    """Of transformers, in one batch that is padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return model(ids, attention_mask=mask).logits[:, 0]


def our_scores(model, rows, max_tokens=64, pad=PAD):
    """Of pairs (0, 1), (2, 3), .. in their order."""
    found = torch.empty(len(rows), dtype=model.embed.weight.dtype)
    for batch in pack_pairs(rows[0::2], rows[1::2], range(len(rows) // 2), max_tokens, pad):
        found[2 * batch.row], found[2 * batch.row + 1] = scores(model, batch)
    return found


def started(case, folder, **options):
    theirs = random_model(case)
    theirs.save_pretrained(folder)
    return theirs, reward_model.load(str(folder), **options)


# --- scores and directories -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILIES)
def test_transformers_gives_the_same_scores(case, tmp_path, tokenizer):
    theirs, (ours, trained) = started(case, tmp_path / "in", seed=3)
    assert not trained
    rows = sequences()
    with torch.no_grad():
        found = our_scores(ours, rows)
        # the body is that of the causal model, and the head is the new one
        last = [
            theirs(torch.tensor([r]), output_hidden_states=True).hidden_states[-1][0, scored_at(r, PAD)] for r in rows
        ]
        torch.testing.assert_close(torch.stack(last) @ ours.head.weight[0], found, atol=1e-5, rtol=1e-5)

        reward_model.save(ours, tmp_path / "out", tokenizer=tokenizer, pad=PAD, max_length=64)
        again, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(report.values()), report
        assert type(again).__name__ == json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0]
        assert (again.config.num_labels, again.config.pad_token_id) == (1, PAD)
        torch.testing.assert_close(their_scores(again.eval(), rows), found, atol=1e-5, rtol=1e-5)
    assert found.std() > 0.1

    back, trained = reward_model.load(str(tmp_path / "out"))
    assert trained
    with torch.no_grad():
        assert torch.equal(our_scores(back, rows), found)


@pytest.mark.parametrize("case", ["llama", "neox", "gpt2"])
def test_a_classifier_of_transformers_is_read_with_its_head(case, tmp_path):
    kind, arguments = CASES[case]
    config = getattr(transformers, kind)(**arguments, num_labels=1, pad_token_id=PAD)
    torch.manual_seed(1)
    theirs = AutoModelForSequenceClassification.from_config(config).eval()
    torch.nn.init.normal_(theirs.score.weight)
    theirs.save_pretrained(tmp_path)
    ours, trained = reward_model.load(str(tmp_path), seed=8)
    assert trained
    with torch.no_grad():
        torch.testing.assert_close(
            our_scores(ours, sequences()), their_scores(theirs, sequences()), atol=1e-5, rtol=1e-5
        )


def test_the_real_reward_model(shared):
    folder = shared / "models" / "sentiment-rm-656k"
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ours, trained = reward_model.load(str(folder))
    rows = [[1, 50, 60, 70, 2], [1, 900, 2], [1, 4, 2], [1, *range(100, 400), 2]]
    with torch.no_grad():
        torch.testing.assert_close(our_scores(ours, rows), their_scores(theirs, rows), atol=1e-5, rtol=1e-5)
    assert trained


def test_the_saved_tokenizer_pads_as_the_model_expects(tmp_path, tokenizer):
    _, (ours, _) = started("llama", tmp_path / "in")
    reward_model.save(ours, tmp_path / "out", tokenizer=tokenizer, pad=3, max_length=5)
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (saved.pad_token_id, saved.padding_side, saved.truncation_side, saved.model_max_length) == (
        3,
        "right",
        "left",
        5,
    )
    assert tokenizer.pad_token_id == 0  # the caller's is as it was


def test_a_new_head_has_a_seed_and_a_size(tmp_path):
    _, (first, _) = started("llama", tmp_path, seed=1)
    again, other = (reward_model.load(str(tmp_path), seed=seed)[0] for seed in (1, 2))
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)
    heads = torch.cat([reward_model.load(str(tmp_path), seed=seed)[0].head.weight for seed in range(20)])
    assert heads.detach().std().item() == pytest.approx(49**-0.5, rel=0.1)  # 960 draws: within 2.3%, one sigma


# --- the trap: embeddings under the name of the head -----------------------------------------------------------------


def only_lm_head(folder, embedding="model.embed_tokens.weight", **more):
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state.pop(embedding)
    save_file(state | more, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("case", "embedding"), [("llama-tied-bias", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")]
)
def test_tied_embeddings_that_are_stored_as_the_head_are_not_random(case, embedding, tmp_path, tokenizer):
    theirs, _ = started(case, tmp_path)
    only_lm_head(tmp_path, embedding)
    random = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)  # says nothing that a user sees
    assert not torch.equal(random.get_input_embeddings().weight, theirs.get_input_embeddings().weight)

    ours, trained = reward_model.load(str(tmp_path))
    assert not trained
    assert torch.equal(ours.embed.weight, theirs.get_input_embeddings().weight)
    reward_model.save(ours, tmp_path / "out", tokenizer=tokenizer, pad=PAD, max_length=64)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(again.get_input_embeddings().weight, theirs.get_input_embeddings().weight)


def test_directories_that_cannot_be_a_reward_model(tmp_path):
    started("llama", tmp_path / "untied")
    state = load_file(tmp_path / "untied" / "model.safetensors")
    del state["model.embed_tokens.weight"]
    save_file(state, tmp_path / "untied" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no tensor 'model.embed_tokens.weight', and its config.json does not tie"):
        reward_model.load(str(tmp_path / "untied"))

    config = transformers.LlamaConfig(**CASES["llama"][1], num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match="classifier of 3 outputs"):
        reward_model.load(str(tmp_path / "three"))
    with pytest.raises(ValueError, match="neither a directory, nor embedded"):
        reward_model.load(str(tmp_path / "nowhere"))


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "max_tokens"), [("llama", 10**6), ("neox", 1), ("gpt2", 60), ("gpt2", 10**6)])
def test_gradients_are_those_of_transformers(case, max_tokens, tmp_path, tokenizer):
    _, (ours, _) = started(case, tmp_path / "in", dtype=torch.float64)
    reward_model.save(ours, tmp_path / "out", tokenizer=tokenizer, pad=PAD, max_length=64)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    rows, margins = sequences(), torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64)
    truth = their_scores(theirs, rows)
    (-logsigmoid(truth[0::2] - truth[1::2] - margins)).mean().backward()
    for batch in pack_pairs(rows[0::2], rows[1::2], range(3), max_tokens, PAD):
        (bradley_terry_loss(*scores(ours, batch), margins[batch.row]).sum() / 3).backward()
    # the norms of transformers' Llama compute in float32, whatever the type of the rest
    close = {"atol": 2e-6, "rtol": 1e-2} if case == "llama" else {"atol": 1e-9, "rtol": 1e-9}
    embedding = theirs.get_input_embeddings().weight.grad
    # its embedding gives padding ids in the text no gradient, ours does
    torch.testing.assert_close(ours.embed.weight.grad[1:], embedding[1:], **close)
    torch.testing.assert_close(ours.head.weight.grad, theirs.score.weight.grad, **close)
    final = {"llama": "model.norm", "neox": "gpt_neox.final_layer_norm", "gpt2": "transformer.ln_f"}[case]
    torch.testing.assert_close(ours.norm.weight.grad, theirs.get_submodule(final).weight.grad, **close)


def test_scores_of_a_bfloat16_model_are_float32(tmp_path):
    _, (ours, _) = started("llama", tmp_path, dtype=torch.bfloat16)
    (batch,) = pack_pairs([[5, 6, 2]], [[7, 2]], [0], 99, PAD)
    assert {x.dtype for x in scores(ours, batch)} == {torch.float32}


# --- places and padding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "pad", "place"),
    [([5, 6, 2], 0, 2), ([5, 0, 0], 0, 0), ([0, 5, 0], 0, 1), ([0, 0], 0, 0), ([5, 0], None, 1)],
)
def test_the_place_of_the_score(ids, pad, place):
    assert scored_at(ids, pad) == place


def test_pairs_stay_together_and_fill_the_batches():
    chosen, rejected = [[5] * n for n in (4, 9, 2, 30)], [[6] * n for n in (3, 1, 8, 30)]
    batches = pack_pairs(chosen, rejected, [3, 0, 1, 2, 0], 20, PAD)  # 0 twice, where two epochs meet
    assert [batch.row.tolist() for batch in batches] == [[3], [1, 2], [0, 0]]
    for batch in batches:
        parts = iter(batch.tokens.split(batch.lengths))
        assert [(c.tolist(), r.tolist()) for c, r in zip(parts, parts, strict=True)] == [
            (chosen[i], rejected[i]) for i in batch.row.tolist()
        ]
        assert batch.select.tolist() == [sum(batch.lengths[: i + 1]) - 1 for i in range(len(batch.lengths))]


def test_an_empty_batch_has_a_gradient_of_zero(tmp_path):
    _, (ours, _) = started("llama", tmp_path)
    bradley_terry_loss(*scores(ours, empty_pair_batch())).sum().backward()
    assert all((p.grad == 0).all() for p in ours.parameters())


@pytest.mark.parametrize(
    ("own", "ids", "trained", "expected"),
    [
        (None, {"pad": 0, "unk": 3, "bos": 1, "eos": 2}, False, 0),
        (None, {"pad": 2, "unk": 3, "bos": 1, "eos": 2}, False, 3),
        (None, {"pad": None, "unk": None, "bos": 1, "eos": 2}, False, 1),
        (2, {"pad": 2, "unk": 2, "bos": 2, "eos": 2}, False, 2),  # GPT-2: nothing but EOS
        (None, {"pad": 30, "unk": None, "bos": None, "eos": 2}, False, 2),  # 30 has no embedding
        (5, {"pad": 0, "unk": 3, "bos": 1, "eos": 2}, True, 5),
        (5, {"pad": 0, "unk": 3, "bos": 1, "eos": 2}, False, 0),
        (None, {"pad": None, "unk": None, "bos": None, "eos": None}, False, None),
    ],
)
def test_the_padding_id_is_not_the_end(own, ids, trained, expected):
    config = SimpleNamespace(pad_token_id=own, vocab_size=30)
    fake = SimpleNamespace(**{f"{name}_token_id": value for name, value in ids.items()})
    assert padding_id(config, fake, trained) == expected


def test_a_model_whose_only_token_to_pad_with_is_the_end(tmp_path, tokenizer):
    """The score is read before EOS, by us and by transformers."""
    _, (ours, _) = started("gpt2", tmp_path / "in")
    reward_model.save(ours, tmp_path / "out", tokenizer=tokenizer, pad=EOS, max_length=64)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    rows = sequences()
    with torch.no_grad():
        found = our_scores(ours, rows, pad=EOS)
        torch.testing.assert_close(found, their_scores(theirs, rows, pad=EOS), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[0], our_scores(ours, [rows[0][:-1], [5]], pad=EOS)[0], atol=1e-5, rtol=1e-5)


def test_a_causal_model_of_a_classifier_keeps_its_body(tmp_path, tokenizer):
    """What was a reward model is still a causal model's body; only its own head is gone."""
    theirs, (ours, _) = started("llama-tied-bias", tmp_path / "in")
    reward_model.save(ours, tmp_path / "out", tokenizer=tokenizer, pad=PAD, max_length=64)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(again(ids).logits, theirs(ids).logits)
