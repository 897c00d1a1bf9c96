"""The decoder compared with transformers: every family, packed sequences of different lengths, loading and saving."""

import copy
import json
import shutil
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.helpers import REPOSITORY, as_exported
from support.random_models import CASES, LENGTHS, random_model, their_logits, tokens_for
from torch._dynamo.utils import counters

from nlgrpo.kernels import linear_logprob
from nlgrpo.model import decoder, hf_weights, lora, safetensors_writer


def assert_same(again, theirs):
    """Compare tensors bit for bit and logits closely: on some CPUs their last bits depend on memory addresses."""
    weights, truth = again.state_dict(), theirs.state_dict()
    assert weights.keys() == truth.keys()
    assert all(torch.equal(weights[name], truth[name]) for name in truth)
    logits = (their_logits(model, tokens_for(99), LENGTHS) for model in (again, theirs))
    torch.testing.assert_close(*logits, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_before_and_after_a_round_trip(case, tmp_path):
    theirs = random_model(case)
    theirs.save_pretrained(tmp_path / "in")
    tokens = tokens_for(99)
    truth = their_logits(theirs, tokens, LENGTHS)
    assert truth.std() > 0.1

    ours = decoder.load(tmp_path / "in")
    torch.testing.assert_close(ours(tokens, LENGTHS), truth, atol=1e-4, rtol=1e-4)

    decoder.save(ours, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(theirs)
    assert_same(again, theirs)


@pytest.mark.parametrize("case", ["llama", "qwen3", "neox", "gpt2"])
def test_gradients_equal_transformers(case, tmp_path):
    theirs = random_model(case).double()
    theirs.save_pretrained(tmp_path)
    ours = decoder.load(tmp_path, dtype=torch.float64)
    tokens = tokens_for(99, [30])
    picked = torch.arange(29)
    theirs(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None]).sum().backward()
    ours(tokens, [30], picked, partial(linear_logprob, targets=tokens[1:]))[0].sum().backward()
    truth = {n: p.grad for n, p in theirs.named_parameters()}
    grads = {n: p.grad for n, p in ours.named_parameters()}
    exported = as_exported(ours, grads)
    for name, grad in exported.items():
        expected = truth["lm_head.weight" if name == "embed_out.weight" else name]
        torch.testing.assert_close(grad, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


def test_stories260k(shared):
    folder = shared / "models" / "stories260K"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = tokens_for(512, [200, 3, 512])
    truth = their_logits(theirs, tokens, [200, 3, 512])
    ours = decoder.load(folder)
    torch.testing.assert_close(ours(tokens, [200, 3, 512]), truth, atol=1e-4, rtol=1e-4)


def test_sharded_files_load_and_half_precision_is_kept(tmp_path):
    random_model("llama").bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = tokens_for(99)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    truth = their_logits(theirs, tokens, LENGTHS)
    torch.testing.assert_close(decoder.load(tmp_path)(tokens, LENGTHS), truth, atol=1e-4, rtol=1e-4)

    ours = decoder.load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    error = (ours(tokens, LENGTHS).float() - truth).norm() / truth.norm()
    assert error < 0.02  # bfloat16 has 8 bits: 0.4% per rounding


def rename(folder, renames: dict[str, str]):
    state = load_file(folder / "model.safetensors")
    save_file({renames.get(k, k): v for k, v in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("case", "renames"),
    [
        ("llama-tied-bias", {"model.embed_tokens.weight": "lm_head.weight"}),  # the file has only the head
        ("neox", {"lm_head.weight": "embed_out.weight"}),
        ("gpt2", "without prefix"),
    ],
)
def test_other_names_of_the_same_tensors_are_found(case, renames, tmp_path):
    theirs = random_model(case)
    theirs.save_pretrained(tmp_path)
    if renames == "without prefix":
        renames = {k: k.removeprefix("transformer.") for k in load_file(tmp_path / "model.safetensors")}
    rename(tmp_path, renames)
    tokens = tokens_for(99)
    torch.testing.assert_close(
        decoder.load(tmp_path)(tokens, LENGTHS), their_logits(theirs, tokens, LENGTHS), atol=1e-4, rtol=1e-4
    )


def test_sharded_export_loads_in_transformers(tmp_path, monkeypatch):
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path / "in")
    ours = decoder.load(tmp_path / "in")
    monkeypatch.setattr(safetensors_writer.write, "__kwdefaults__", {"max_file": 20_000})
    decoder.save(ours, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_same(again, theirs)


def test_an_unknown_architecture_lists_the_supported_ones(tmp_path):
    transformers.OPTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'opt'.*gpt2, gpt_neox, llama, mistral, qwen2, qwen3"):
        decoder.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "made_up"}))
    with pytest.raises(ValueError, match=r"made_up[\s\S]*gpt2, gpt_neox, llama"):
        decoder.load(tmp_path)


def test_broken_directories_report_what_is_wrong(tmp_path):
    folder = tmp_path / "model"
    random_model("llama").save_pretrained(folder)

    broken = tmp_path / "missing"
    shutil.copytree(folder, broken)
    rename(broken, {"model.norm.weight": "model.norm.wait"})
    with pytest.raises(ValueError, match=r"no tensor 'model\.norm\.weight'"):
        decoder.load(broken)

    shutil.copy(folder / "model.safetensors", broken)
    config = json.loads((folder / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 71}))
    with pytest.raises(ValueError, match=r"up_proj.*\(144, 48\).*\(142, 48\)"):
        decoder.load(broken)

    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is damaged, not a complete safetensors file"):
        decoder.load(broken)

    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(ValueError, match="only safetensors are read"):
        decoder.load(broken)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        decoder.load(tmp_path)
    with pytest.raises(ValueError, match="neither a directory, nor embedded"):
        decoder.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("maze-lm", "scripts/make_maze_model.py"),
        ("numbers-lm", "scripts/make_numbers_model.py"),
        ("story-lm", "scripts/make_story_model.py STORIES.txt"),
    ],
)
def test_a_package_without_the_files_of_its_model_says_how_to_make_it(tmp_path, monkeypatch, name, script):
    assets = tmp_path / "assets"
    shutil.copytree(hf_weights.locate(name), assets / name)
    monkeypatch.setattr(hf_weights, "files", lambda package: tmp_path)
    decoder.load(name)
    (assets / name / "model.safetensors").unlink()
    assert hf_weights.locate(name, config_only=True) == assets / name
    said = rf"the model '{name}' of this package is incomplete: model.safetensors missing in .*: python {script} --out"
    with pytest.raises(ValueError, match=said):
        decoder.load(name)
    shutil.rmtree(assets)
    with pytest.raises(ValueError, match=r"config.json, model.safetensors, tokenizer.json missing"):
        decoder.load(name)
    assert (REPOSITORY / script.split()[0]).is_file()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(tmp_path, dtype):
    """Without their scales the weights are wrong."""
    random_model("llama").save_pretrained(tmp_path)
    state, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    state[name] = (state[name] * 100).to(dtype)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError,
        match=rf"is quantised: .*down_proj\.weight has dtype {dtype}\. .*use the model that it was made from",
    ):
        decoder.load(tmp_path)


def test_embeddings_and_heads_agree_with_tie_word_embeddings(tmp_path):
    """transformers 5.23 would load these with another head, or with random embeddings."""
    random_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"ties 'lm_head\.weight' to 'model\.embed_tokens\.weight', .* both .* differ"):
        decoder.load(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens = tokens_for(99)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(
        decoder.load(tmp_path)(tokens, LENGTHS), their_logits(theirs, tokens, LENGTHS), atol=1e-4, rtol=1e-4
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    del state["model.embed_tokens.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no tensor 'model\.embed_tokens\.weight', and its config\.json does not tie"):
        decoder.load(tmp_path)


def test_damaged_configs_and_indices_are_refused(tmp_path):
    random_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="is not an index of shards"):
        decoder.load(tmp_path)
    for name in ("../model.safetensors", str(tmp_path / "model.safetensors"), "a/b.safetensors", 3):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(ValueError, match="lists shards outside of the folder"):
            decoder.load(tmp_path)
    for damaged in ("{not json", json.dumps({"model_type": "llama", "hidden_size": "48"})):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(ValueError, match="cannot read"):
            decoder.load(tmp_path)


def test_lengths_that_do_not_add_up_are_refused(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="add up to 5, but there are 6 tokens"):
        decoder.load(tmp_path)(torch.arange(6), [2, 3])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [0, 3], ids=["full", "lora"])
@pytest.mark.parametrize("case", ["llama-tied-bias", "mistral-window", "qwen3", "neox", "gpt2-scales"])
def test_recomputing_cheap_ops_changes_nothing(tmp_path, case, rank, dtype):
    """Against blocks that save what autograd saves, to the bit; the recomputed tensors are not saved."""
    random_model(case).save_pretrained(tmp_path)
    model = decoder.load(tmp_path, dtype=dtype)
    if rank:
        lora.attach(model, lora.LoraConfig(rank=rank, dropout=0.3), dtype)
        lora.reset(model, 0)
        torch.nn.init.normal_(model.blocks[0].qkv.lora_B[next(iter(model.blocks[0].qkv.parts))])
    tokens, picked, results = tokens_for(99), torch.arange(sum(LENGTHS)), []
    for on in (False, True):
        for block in model.blocks:
            block.recompute = on
        model.zero_grad()
        torch.manual_seed(0)
        with lora.dropout(model):
            out = model(tokens, LENGTHS, picked, partial(linear_logprob, targets=tokens))[0]
        out.sum().backward()
        results.append([out, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_activation_checkpointing_changes_nothing(tmp_path):
    random_model("qwen3").save_pretrained(tmp_path)
    model = decoder.load(tmp_path)
    tokens, picked = tokens_for(99), torch.arange(sum(LENGTHS))
    grads = []
    for on in (False, True):
        model.activation_checkpointing = on
        model.zero_grad()
        model(tokens, LENGTHS, picked, partial(linear_logprob, targets=tokens))[0].sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama-tied-bias", "mistral-window", "qwen2", "qwen3", "neox", "gpt2-scales"])
def test_compiled_blocks_change_nothing_and_share_two_graphs(tmp_path, case):
    """Also for other numbers of tokens, with activation checkpointing, and without gradients."""
    random_model(case).save_pretrained(tmp_path)
    plain, compiled = (decoder.load(tmp_path, dtype=torch.float64) for _ in range(2))
    torch.compiler.reset()
    counters.clear()
    compiled.configure(compiled=True, backend="aot_eager")
    for lengths in ([17, 1, 40, 2], [5, 9], [30]):
        tokens = tokens_for(99)[: sum(lengths)]
        results = []
        for model in (plain, compiled):
            model.activation_checkpointing = lengths == [5, 9]
            model.zero_grad()
            logits = model(tokens, lengths)
            logits.square().mean().backward()
            results.append([logits.detach(), *(p.grad for p in model.parameters())])
        torch.testing.assert_close(*results, rtol=1e-11, atol=1e-13)
    assert counters["stats"]["unique_graphs"] == 2
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens, lengths), plain(tokens, lengths), rtol=1e-11, atol=1e-13)
    assert counters["stats"]["unique_graphs"] == 4
    with torch.inference_mode():  # generation is not compiled
        compiled(tokens, lengths)
    copied = copy.deepcopy(compiled)
    with torch.no_grad():
        copied.blocks[0].up.weight.zero_()
        assert not torch.allclose(copied(tokens, lengths), compiled(tokens, lengths))
    compiled.configure()
    torch.testing.assert_close(compiled(tokens, lengths), plain(tokens, lengths), rtol=0, atol=0)
    assert counters["stats"]["unique_graphs"] == 4
    assert list(compiled.state_dict()) == list(plain.state_dict())
