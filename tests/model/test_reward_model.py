"""Reward models compared with transformers and plain PyTorch: loading, scores, gradients and saving, every family."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.helpers import tiny_model
from support.random_models import CASES, random_model
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from nlgrpo.losses.bradley_terry import bradley_terry_loss
from nlgrpo.model import reward_model
from nlgrpo.model.packing import empty_pair_batch, pack_pairs, scored_at
from nlgrpo.model.reward_model import padding_id, scores

PAD, EOS = 0, 2
FAMILIES = ["llama", "llama-tied-bias", "mistral-window", "qwen2", "qwen3-tied", "neox", "gpt2", "gpt2-untied"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    tiny_model(folder)
    return AutoTokenizer.from_pretrained(folder)


def sequences(seed=0, lengths=(17, 1, 9, 40, 2, 3)):
    """Random ids that end in EOS; one sequence ends in padding ids, and one is all padding."""
    generator = torch.Generator().manual_seed(seed)
    rows = [[*torch.randint(3, 99, (n - 1,), generator=generator).tolist(), EOS] for n in lengths]
    rows[2] = [*rows[2][:-3], PAD, 5, PAD, PAD]
    rows[4] = [PAD, PAD]
    return rows


def their_scores(model, rows, pad=PAD):
    """Scores of transformers, in one batch padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return model(ids, attention_mask=mask).logits[:, 0]


def our_scores(model, rows, max_tokens=64, pad=PAD):
    """Our scores of the pairs (0, 1), (2, 3), .. in the order of ``rows``."""
    values = torch.empty(len(rows), dtype=model.embed.weight.dtype)
    for batch in pack_pairs(rows[0::2], rows[1::2], range(len(rows) // 2), max_tokens, pad):
        values[2 * batch.row], values[2 * batch.row + 1] = scores(model, batch)
    return values


def new_reward_model(case, folder, **options):
    """A random causal model of transformers, and the reward model that starts from it."""
    theirs = random_model(case)
    theirs.save_pretrained(folder)
    return theirs, reward_model.load_reward_model(str(folder), **options)


# --- scores and directories -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILIES)
def test_scores_equal_transformers(case, tmp_path, tokenizer):
    theirs, (ours, trained) = new_reward_model(case, tmp_path / "in", seed=3)
    assert not trained
    rows = sequences()
    with torch.no_grad():
        found = our_scores(ours, rows)
        # the body of the causal model with the new head
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

    back, trained = reward_model.load_reward_model(str(tmp_path / "out"))
    assert trained
    with torch.no_grad():
        assert torch.equal(our_scores(back, rows), found)


@pytest.mark.parametrize("case", ["llama", "neox", "gpt2"])
def test_a_classifier_of_transformers_keeps_its_head(case, tmp_path):
    kind, arguments = CASES[case]
    config = getattr(transformers, kind)(**arguments, num_labels=1, pad_token_id=PAD)
    torch.manual_seed(1)
    theirs = AutoModelForSequenceClassification.from_config(config).eval()
    torch.nn.init.normal_(theirs.score.weight)
    theirs.save_pretrained(tmp_path)
    ours, trained = reward_model.load_reward_model(str(tmp_path), seed=8)
    assert trained
    with torch.no_grad():
        torch.testing.assert_close(
            our_scores(ours, sequences()), their_scores(theirs, sequences()), atol=1e-5, rtol=1e-5
        )


def test_a_trained_reward_model_scores_as_in_transformers(shared):
    folder = shared / "models" / "sentiment-rm-656k"
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ours, trained = reward_model.load_reward_model(str(folder))
    rows = [[1, 50, 60, 70, 2], [1, 900, 2], [1, 4, 2], [1, *range(100, 400), 2]]
    with torch.no_grad():
        torch.testing.assert_close(our_scores(ours, rows), their_scores(theirs, rows), atol=1e-5, rtol=1e-5)
    assert trained


def test_the_saved_tokenizer_pads_as_the_model_expects(tmp_path, tokenizer):
    _, (ours, _) = new_reward_model("llama", tmp_path / "in")
    reward_model.save(ours, tmp_path / "out", tokenizer=tokenizer, pad=3, max_length=5)
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (saved.pad_token_id, saved.padding_side, saved.truncation_side, saved.model_max_length) == (
        3,
        "right",
        "left",
        5,
    )
    assert tokenizer.pad_token_id == 0  # the caller's tokenizer is unchanged


def test_a_new_head_depends_on_the_seed_and_has_the_right_std(tmp_path):
    _, (first, _) = new_reward_model("llama", tmp_path, seed=1)
    again, other = (reward_model.load_reward_model(str(tmp_path), seed=seed)[0] for seed in (1, 2))
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)
    heads = torch.cat([reward_model.load_reward_model(str(tmp_path), seed=seed)[0].head.weight for seed in range(20)])
    assert heads.detach().std().item() == pytest.approx(49**-0.5, rel=0.1)  # 960 draws: one sigma is 2.3%


# --- embeddings stored under the name of the head --------------------------------------------------------------------


def only_lm_head(folder, embedding="model.embed_tokens.weight", **more):
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state.pop(embedding)
    save_file(state | more, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("case", "embedding"), [("llama-tied-bias", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")]
)
def test_tied_embeddings_stored_as_the_head_are_not_random(case, embedding, tmp_path, tokenizer):
    theirs, _ = new_reward_model(case, tmp_path)
    only_lm_head(tmp_path, embedding)
    random = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)  # without a visible warning
    assert not torch.equal(random.get_input_embeddings().weight, theirs.get_input_embeddings().weight)

    ours, trained = reward_model.load_reward_model(str(tmp_path))
    assert not trained
    assert torch.equal(ours.embed.weight, theirs.get_input_embeddings().weight)
    reward_model.save(ours, tmp_path / "out", tokenizer=tokenizer, pad=PAD, max_length=64)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(again.get_input_embeddings().weight, theirs.get_input_embeddings().weight)


def test_unsuitable_directories_are_refused(tmp_path):
    new_reward_model("llama", tmp_path / "untied")
    state = load_file(tmp_path / "untied" / "model.safetensors")
    del state["model.embed_tokens.weight"]
    save_file(state, tmp_path / "untied" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no tensor 'model.embed_tokens.weight', and its config.json does not tie"):
        reward_model.load_reward_model(str(tmp_path / "untied"))

    config = transformers.LlamaConfig(**CASES["llama"][1], num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match="classifier with 3 outputs"):
        reward_model.load_reward_model(str(tmp_path / "three"))
    with pytest.raises(ValueError, match="neither a directory, nor embedded"):
        reward_model.load_reward_model(str(tmp_path / "nowhere"))


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "max_tokens"), [("llama", 10**6), ("neox", 1), ("gpt2", 60), ("gpt2", 10**6)])
def test_gradients_equal_transformers(case, max_tokens, tmp_path, tokenizer):
    _, (ours, _) = new_reward_model(case, tmp_path / "in", dtype=torch.float64)
    reward_model.save(ours, tmp_path / "out", tokenizer=tokenizer, pad=PAD, max_length=64)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    rows, margins = sequences(), torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64)
    truth = their_scores(theirs, rows)
    (-logsigmoid(truth[0::2] - truth[1::2] - margins)).mean().backward()
    for batch in pack_pairs(rows[0::2], rows[1::2], range(3), max_tokens, PAD):
        (bradley_terry_loss(*scores(ours, batch), margins[batch.row]).sum() / 3).backward()
    # the norms of transformers' Llama compute in float32 for any dtype
    close = {"atol": 2e-6, "rtol": 1e-2} if case == "llama" else {"atol": 1e-9, "rtol": 1e-9}
    embedding = theirs.get_input_embeddings().weight.grad
    # transformers' embedding has no gradient for padding ids in the text, ours has
    torch.testing.assert_close(ours.embed.weight.grad[1:], embedding[1:], **close)
    torch.testing.assert_close(ours.head.weight.grad, theirs.score.weight.grad, **close)
    final = {"llama": "model.norm", "neox": "gpt_neox.final_layer_norm", "gpt2": "transformer.ln_f"}[case]
    torch.testing.assert_close(ours.norm.weight.grad, theirs.get_submodule(final).weight.grad, **close)


def test_scores_of_a_bfloat16_model_are_float32(tmp_path):
    _, (ours, _) = new_reward_model("llama", tmp_path, dtype=torch.bfloat16)
    (batch,) = pack_pairs([[5, 6, 2]], [[7, 2]], [0], 99, PAD)
    assert {x.dtype for x in scores(ours, batch)} == {torch.float32}


# --- scored token and padding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "pad", "index"),
    [([5, 6, 2], 0, 2), ([5, 0, 0], 0, 0), ([0, 5, 0], 0, 1), ([0, 0], 0, 0), ([5, 0], None, 1)],
)
def test_the_score_is_read_at_the_last_token_that_is_not_padding(ids, pad, index):
    assert scored_at(ids, pad) == index


def test_pairs_stay_together_and_fill_the_micro_batches():
    chosen, rejected = [[5] * n for n in (4, 9, 2, 30)], [[6] * n for n in (3, 1, 8, 30)]
    batches = pack_pairs(chosen, rejected, [3, 0, 1, 2, 0], 20, PAD)  # 0 twice: two epochs meet
    assert [batch.row.tolist() for batch in batches] == [[3], [1, 2], [0, 0]]
    for batch in batches:
        lengths = batch.segments.lengths
        parts = iter(batch.tokens.split(lengths))
        assert [(c.tolist(), r.tolist()) for c, r in zip(parts, parts, strict=True)] == [
            (chosen[i], rejected[i]) for i in batch.row.tolist()
        ]
        assert batch.select.tolist() == [sum(lengths[: i + 1]) - 1 for i in range(len(lengths))]


def test_an_empty_batch_has_a_gradient_of_zero(tmp_path):
    _, (ours, _) = new_reward_model("llama", tmp_path)
    bradley_terry_loss(*scores(ours, empty_pair_batch())).sum().backward()
    assert all((p.grad == 0).all() for p in ours.parameters())


@pytest.mark.parametrize(
    ("configured", "ids", "trained", "expected"),
    [
        (None, {"pad": 0, "unk": 3, "bos": 1, "eos": 2}, False, 0),
        (None, {"pad": 2, "unk": 3, "bos": 1, "eos": 2}, False, 3),
        (None, {"pad": None, "unk": None, "bos": 1, "eos": 2}, False, 1),
        (2, {"pad": 2, "unk": 2, "bos": 2, "eos": 2}, False, 2),  # GPT-2 has only EOS
        (None, {"pad": 30, "unk": None, "bos": None, "eos": 2}, False, 2),  # 30 has no embedding
        (5, {"pad": 0, "unk": 3, "bos": 1, "eos": 2}, True, 5),
        (5, {"pad": 0, "unk": 3, "bos": 1, "eos": 2}, False, 0),
        (None, {"pad": None, "unk": None, "bos": None, "eos": None}, False, None),
    ],
)
def test_the_padding_id_is_not_eos_if_possible(configured, ids, trained, expected):
    config = SimpleNamespace(pad_token_id=configured, vocab_size=30)
    fake = SimpleNamespace(**{f"{name}_token_id": value for name, value in ids.items()})
    assert padding_id(config, fake, trained) == expected


def test_a_model_that_pads_with_eos_scores_the_token_before_it(tmp_path, tokenizer):
    """Like transformers."""
    _, (ours, _) = new_reward_model("gpt2", tmp_path / "in")
    reward_model.save(ours, tmp_path / "out", tokenizer=tokenizer, pad=EOS, max_length=64)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    rows = sequences()
    with torch.no_grad():
        found = our_scores(ours, rows, pad=EOS)
        torch.testing.assert_close(found, their_scores(theirs, rows, pad=EOS), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[0], our_scores(ours, [rows[0][:-1], [5]], pad=EOS)[0], atol=1e-5, rtol=1e-5)


def test_a_saved_reward_model_loads_as_a_causal_model(tmp_path, tokenizer):
    """The body of the causal model is unchanged."""
    theirs, (ours, _) = new_reward_model("llama-tied-bias", tmp_path / "in")
    reward_model.save(ours, tmp_path / "out", tokenizer=tokenizer, pad=PAD, max_length=64)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(again(ids).logits, theirs(ids).logits)
