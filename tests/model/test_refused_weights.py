"""Directories whose weights do not fit their config, or are not what they seem: refused, with the way out."""

import json
import logging
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.helpers import tiny_model
from support.random_models import LENGTHS, random_model, their_logits, tokens_for
from transformers import AutoTokenizer

from nlgrpo import cli
from nlgrpo.engine import transformers_backend
from nlgrpo.model import adapters, decoder, hf_weights, lora, reward_model
from nlgrpo.model import tokenizer as tokenizers_of_models
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.rewards.classifiers import Classifier

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 67108864\n"


def add(folder, tensors):
    """Add tensors to the file of a model directory."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def change(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture
def folder(tmp_path):
    random_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# --- tensors without a place ------------------------------------------------------------------------------------------


def test_biases_that_the_config_does_not_have(folder):
    add(folder, {f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(48) for i in range(3)})
    for load in (decoder.load, reward_model.load_reward_model):
        with pytest.raises(
            ValueError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.bias, .*attention_bias"
        ):
            load(str(folder))


def test_layers_that_the_config_does_not_have(folder):
    change(folder, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.2\..*9 in all.*correct config\.json"):
        decoder.load(folder)


@pytest.mark.parametrize(
    ("case", "buffers"),
    [
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.rotary_emb.inv_freq": None}),
        ("gpt2", {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.0.attn.masked_bias": None}),
        ("neox", {"gpt_neox.layers.0.attention.bias": None, "gpt_neox.layers.0.attention.rotary_emb.inv_freq": None}),
        ("qwen3-tied", {"lm_head.weight": "embedding"}),
    ],
)
def test_tensors_that_change_nothing_are_left_out(case, buffers, tmp_path, caplog):
    """Buffers, which older versions of transformers stored, and a tied head."""
    theirs = random_model(case)
    theirs.save_pretrained(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors").get("model.embed_tokens.weight")
    values = {name: torch.ones(2) if value is None else value for name, value in buffers.items()}
    add(tmp_path, {name: embedding.clone() if isinstance(value, str) else value for name, value in values.items()})
    tokens = tokens_for(99)
    found = decoder.load(tmp_path)(tokens, LENGTHS)
    torch.testing.assert_close(found, their_logits(theirs, tokens, LENGTHS), atol=1e-4, rtol=1e-4)
    assert not caplog.records


def test_a_value_head_of_trl_is_listed_for_a_policy_and_refused_for_a_reward_model(folder, caplog):
    truth = decoder.load(folder)
    add(folder, {"v_head.summary.weight": torch.ones(1, 48), "v_head.summary.bias": torch.ones(1)})
    with caplog.at_level(logging.WARNING, "nlgrpo"):
        again = decoder.load(folder)
    assert "v_head.summary.bias, v_head.summary.weight" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), truth.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"value head of TRL \(v_head\..*score\.weight"):
        reward_model.load_reward_model(str(folder))


def test_a_classifier_is_no_policy(tmp_path, capsys):
    tiny_model(tmp_path / "base")
    model, _ = reward_model.load_reward_model(str(tmp_path / "base"))
    folder = tmp_path / "classifier"
    reward_model.save(model, folder, tokenizer=load_tokenizer(tmp_path / "base"), pad=0, max_length=64)
    assert reward_model.load_reward_model(str(folder))[1]
    said = r"LlamaForSequenceClassification.*expected a causal language model.*classifier\(path"
    with pytest.raises(ValueError, match=said):
        decoder.load(folder)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1"}\n')
    run = ["blank", "--model.path", str(folder), "--data.source", str(tmp_path / "prompts.jsonl"), "--dry-run"]
    reward = ["--rewards.x.function", "length(target=5, scale=8)", "--rewards.x.objective", "mean"]
    for command in (["generate", "w1", "--model", str(folder)], ["train", *run, *reward]):
        assert cli.main(command) == 2
        assert "LlamaForSequenceClassification" in capsys.readouterr().err
    for name in ("LlamaForTokenClassification", "LlamaForQuestionAnswering"):
        change(folder, architectures=[name])
        with pytest.raises(ValueError, match=name):
            decoder.load(folder)


def test_models_that_transformers_runs_are_checked_as_well(tmp_path):
    config = transformers.OPTConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, ffn_dim=32, num_attention_heads=2,
        max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path)
    transformers_backend.load_frozen(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    add(tmp_path, {"model.decoder.layers.1.fc1.weight": torch.ones(32, 16)})
    with pytest.raises(ValueError, match=r"no place for: model\.decoder\.layers\.1\.fc1\.weight"):
        transformers_backend.load_frozen(tmp_path)
    save_file({k: v for k, v in whole.items() if k != "lm_head.weight"}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no tensor 'lm_head\.weight'.*random"):
        transformers_backend.load_frozen(tmp_path)


def test_what_transformers_does_not_load_is_refused_inside_of_the_model_and_listed_outside(folder, caplog):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with caplog.at_level(logging.WARNING, "nlgrpo"):
        buffers = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.attn.masked_bias"]
        hf_weights.check_unexpected(folder, model, ["vision_tower.layers.0.weight", *buffers])
    assert "inv_freq" not in caplog.text
    assert "does not use its tensors vision_tower.layers.0.weight" in caplog.text
    for name in ("model.layers.0.mlp.up_proj.bias", "model.layers.7.mlp.up_proj.weight"):
        with pytest.raises(ValueError, match=f"no place for: {name}"):
            hf_weights.check_unexpected(folder, model, [name])


def test_a_classifier_as_a_reward_is_checked_too(tmp_path):
    tiny_model(tmp_path / "base")
    model, _ = reward_model.load_reward_model(str(tmp_path / "base"))
    reward_model.save(model, tmp_path / "rm", tokenizer=load_tokenizer(tmp_path / "base"), pad=0, max_length=64)
    Classifier(str(tmp_path / "rm"))
    add(tmp_path / "rm", {"model.layers.0.self_attn.q_proj.bias": torch.ones(24)})
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.bias"):
        Classifier(str(tmp_path / "rm"))


# --- quantised weights, wrappers, pointers ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_quantised_models_are_named_as_such(method, folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj"
    del tensors[f"{name}.weight"]
    packed = {f"{name}.{part}": torch.ones(6, 8, dtype=torch.int32) for part in ("qweight", "qzeros")}
    save_file(tensors | packed | {f"{name}.scales": torch.ones(6, 8)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"is quantised: it has '{name}\.q\w+' in place of .*dequantise"):
        decoder.load(folder)
    change(folder, quantization_config={"quant_method": method, "bits": 4})
    for load in (decoder.load, reward_model.load_reward_model):
        with pytest.raises(ValueError, match=rf"quantization_config \({method}\).*Use the model that it was made from"):
            load(str(folder))


@pytest.mark.parametrize(
    ("prefix", "maker"), [("_orig_mod.", "torch.compile"), ("module.", "DistributedDataParallel"), ("policy.", "")]
)
def test_prefixes_of_wrappers_are_named(prefix, maker, folder):
    file = folder / "model.safetensors"
    save_file({prefix + name: x for name, x in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"the prefix '{prefix}'.*{maker}.*remove the prefix"):
        decoder.load(folder)


def test_two_models_in_one_folder(folder):
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00001.safetensors")}
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"two models, model\.safetensors and the shards of .*Remove the one"):
        decoder.load(folder)
    (folder / "model.safetensors").unlink()
    decoder.load(folder)


def test_names_without_their_prefix(folder):
    """AutoModel saves a model without its head, and without the prefix of the names."""
    file = folder / "model.safetensors"
    bare = {name.removeprefix("model."): x for name, x in load_file(file).items() if name != "lm_head.weight"}
    save_file(bare, file, metadata={"format": "pt"})
    said = r"has 'embed_tokens\.weight', without the prefix 'model\.'.*AutoModelForCausalLM"
    with pytest.raises(ValueError, match=said):
        decoder.load(folder)


def test_pointers_of_git_lfs(folder, tmp_path):
    tiny_model(tmp_path / "words")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "words" / name, folder)
    (folder / "tokenizer.json").write_text(POINTER)
    with pytest.raises(ValueError, match=r"tokenizer\.json is a pointer of Git LFS.*git lfs pull"):
        load_tokenizer(folder)
    (folder / "model.safetensors").write_text(POINTER)
    with pytest.raises(ValueError, match=r"model\.safetensors is a pointer of Git LFS.*git lfs pull"):
        decoder.load(folder)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / adapters.CONFIG).write_text("{}")
    (tmp_path / "adapter" / adapters.WEIGHTS).write_text(POINTER)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is a pointer of Git LFS"):
        adapters.read_adapter(tmp_path / "adapter")


def test_a_tokenizer_that_needs_sentencepiece(folder, monkeypatch):
    (folder / "tokenizer.model").write_bytes(b"\x0a\x07\x0a\x05<unk>")
    monkeypatch.setattr(tokenizers_of_models, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tokenizer\.model and no tokenizer\.json.*pip install sentencepiece"):
        load_tokenizer(folder)


# --- keys of other models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("residual_multiplier", 0.22),
        ("logit_scale", 0.0625),
        ("num_local_experts", 8),
        ("sliding_window", 4),
        ("is_causal", False),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_keys_that_change_what_a_model_computes(key, value, folder):
    change(folder, **{key: value})
    with pytest.raises(ValueError, match=rf"sets {key} = .*would compute something else.*Remove the key"):
        decoder.load(folder)


def test_neutral_values_of_these_keys_are_accepted(folder):
    plain = decoder.load(folder)
    change(folder, logit_scale=1.0, num_local_experts=0, sliding_window=None, is_causal=True, residual_multiplier=1)
    found = decoder.load(folder)
    assert found.shape == plain.shape
    assert all(torch.equal(x, y) for x, y in zip(found.parameters(), plain.parameters(), strict=True))


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(folder, tmp_path):
    """An adapter that PEFT wrote."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(theirs, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_no_model(adapter, capsys):
    assert cli.main(["generate", "w1", "--model", str(adapter)]) == 2
    said = capsys.readouterr().err
    assert f"{adapter} is an adapter, not a model" in said
    assert f"nlgrpo merge {adapter}" in said


def test_every_key_that_peft_writes_is_known(adapter):
    saved = json.loads((adapter / adapters.CONFIG).read_text())
    assert len(saved) > 25
    assert adapters.read_adapter(adapter).config.rank == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_other_scaling", True), ("bias", "lora_only"), ("use_dora", True), ("kasa_config", {"beta": 1.0})],
)
def test_keys_that_change_an_adapter(key, value, adapter):
    file = adapter / adapters.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=f"{key} = .*expected"):
        adapters.read_adapter(adapter)


def test_prefixes_of_wrappers_in_an_adapter(adapter, folder):
    file = adapter / adapters.WEIGHTS
    save_file({f"_orig_mod.{name}": x for name, x in load_file(file).items()}, file, metadata={"format": "pt"})
    read = adapters.read_adapter(adapter)
    model = decoder.load(folder, shard=lambda m: lora.attach(m, read.config, torch.float32))
    with pytest.raises(ValueError, match=r"prefix '_orig_mod\.', which torch\.compile.*adds"):
        adapters.load_adapter(model, read)


# --- what transformers 4 reads ----------------------------------------------------------------------------------------


ROPES = {
    "llama": {"rope_theta": 500000.0, "rope_scaling": None},
    "llama3-rope": {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "neox": {"rotary_emb_base": 20000.0, "rotary_pct": 0.5, "rope_scaling": None},
    "gpt2": {},
}


@pytest.mark.parametrize("case", ROPES)
def test_an_export_has_the_keys_of_transformers_4_beside_the_new_ones(case, tmp_path):
    """A source in the old format keeps its keys and values; transformers 5 reads the same model from both."""
    keys = ROPES[case]
    random_model(case).save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    saved = json.loads(path.read_text())
    saved.pop("rope_parameters", None)
    saved.pop("dtype", None)
    path.write_text(json.dumps(saved | keys | {"torch_dtype": "float32"}))
    ours = decoder.load(tmp_path / "in")
    decoder.save(ours, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written[name] for name in keys} == keys
    assert written["torch_dtype"] == written["dtype"] == "float32"
    if case != "gpt2":
        theta = keys.get("rope_theta", keys.get("rotary_emb_base"))
        assert written["rope_parameters"]["rope_theta"] == theta
    again = decoder.load(tmp_path / "out")
    assert again.shape == ours.shape
    assert (again.inv_freq is None and ours.inv_freq is None) or torch.equal(again.inv_freq, ours.inv_freq)
    tokens = tokens_for(99)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(again(tokens, LENGTHS), their_logits(theirs, tokens, LENGTHS), atol=1e-4, rtol=1e-4)


def test_a_yarn_model_of_transformers_5_has_no_default_that_transformers_4_would_read(tmp_path):
    """transformers 4 divides the context by original_max_position_embeddings and ignores the factor if it is there."""
    random_model("llama").save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    saved = json.loads(path.read_text())
    saved.pop("rope_parameters")
    path.write_text(json.dumps(saved | {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}))
    decoder.save(decoder.load(tmp_path / "in"), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend", None])
def test_a_tokenizer_is_saved_with_names_that_transformers_4_knows(named, tmp_path):
    tiny_model(tmp_path / "in")
    path = tmp_path / "in" / "tokenizer_config.json"
    saved = json.loads(path.read_text()) | {"tokenizer_class": named, "add_bos_token": False}
    saved |= {"additional_special_tokens": ["w3", "w4"]}
    path.write_text(json.dumps({name: value for name, value in saved.items() if value is not None}))
    tokenizer = load_tokenizer(tmp_path / "in")
    decoder.save(decoder.load(tmp_path / "in"), tmp_path / "out", tokenizer=tokenizer)
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["w3", "w4"]
    assert written["add_bos_token"] is False
    assert not isinstance(written.get("extra_special_tokens"), list)  # transformers 4 expects an object
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "<s> w3 w1 w2 </s> w4"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.all_special_ids == tokenizer.all_special_ids
    plain = [one.decode([1, 7, 8, 9], skip_special_tokens=True) for one in (again, tokenizer)]
    assert plain[0] == plain[1] == "w5"
