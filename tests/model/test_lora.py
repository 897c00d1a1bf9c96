"""Adapters compared with PEFT, in every family: logits, gradients, files in both directions, merging, bad input."""

import json
from dataclasses import replace
from functools import partial

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.helpers import run_ranks
from support.random_models import CASES, LENGTHS, random_model, their_logits, tokens_for

from nlgrpo.engine.generation import generate
from nlgrpo.engine.sampling import Sampling
from nlgrpo.kernels import linear_logprob
from nlgrpo.model import adapters, decoder, fsdp, lora
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.distributed import Ranks

PLAIN = LoraConfig(rank=4, alpha=10.0)
EMBEDDINGS = {"neox": ("embed_in", "lm_head"), "gpt2-untied": ("wte", "lm_head")}
SETTINGS = {
    "all": PLAIN,
    "attention": replace(PLAIN, target_modules=("q_proj", "v_proj")),
    "rslora": replace(PLAIN, rslora=True, rank=3),
    "dropout": replace(PLAIN, dropout=0.25),
}
TARGETS = {
    "neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}


def adapted(folder, config=PLAIN, *, dtype=torch.float64, seed=0, noise=True):
    """Our model of ``folder`` with adapters; with ``noise``, those that start at 0 are random too."""
    model = decoder.load(folder, dtype=dtype, shard=lambda m: lora.attach(m, config, dtype))
    adapters.init_adapters(model, config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    if noise:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if lora.is_adapter(name) and ".lora_A." not in name:
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model


def save(model, folder, config, base="base"):
    adapters.save(model, folder, config, model.named_parameters(), base=base)


def with_peft(theirs, folder):
    return peft.PeftModel.from_pretrained(theirs.double(), folder).eval()


def close(found, truth, tolerance=2e-5):
    """In float64, except that transformers computes its RMS norms and rotations in float32."""
    torch.testing.assert_close(found, truth, atol=tolerance, rtol=tolerance)


@pytest.fixture
def base(tmp_path):
    def save_base(case):
        theirs = random_model(case)
        theirs.save_pretrained(tmp_path / "base")
        return theirs, tmp_path / "base"

    return save_base


# --- PEFT loads ours ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_ours_with_the_same_logits(case, base, tmp_path):
    theirs, folder = base(case)
    ours, tokens = adapted(folder), tokens_for(99)
    save(ours, tmp_path / "adapter", PLAIN)
    plain = their_logits(theirs.double(), tokens, LENGTHS)
    truth = their_logits(with_peft(theirs, tmp_path / "adapter"), tokens, LENGTHS)
    assert (truth - plain).abs().max() > 0.1
    tolerance = 1e-11 if case.startswith("gpt2") else 2e-5
    close(ours(tokens, LENGTHS), truth, tolerance)
    with lora.disabled(ours):
        close(ours(tokens, LENGTHS), plain, tolerance)
    close(ours(tokens, LENGTHS), truth, tolerance)


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_mean_what_they_mean_in_peft(settings, base, tmp_path):
    theirs, folder = base("qwen2")
    config = SETTINGS[settings]
    ours, tokens = adapted(folder, config), tokens_for(99)
    save(ours, tmp_path / "adapter", config)
    model = with_peft(theirs, tmp_path / "adapter")
    close(ours(tokens, LENGTHS), their_logits(model, tokens, LENGTHS))
    assert model.peft_config["default"].lora_dropout == config.dropout
    expected = {"q_proj", "v_proj"} if settings == "attention" else set(lora.layer_names(ours.shape))
    assert set(model.peft_config["default"].target_modules) == expected
    count = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    assert count == sum(p.numel() for p in ours.parameters() if p.requires_grad)


@pytest.mark.parametrize("case", ["llama", "neox", "gpt2-untied"])
def test_embeddings_and_head_trained_in_full(case, base, tmp_path):
    theirs, folder = base(case)
    config = replace(PLAIN, modules_to_save=EMBEDDINGS.get(case, ("embed_tokens", "lm_head")))
    ours, tokens = adapted(folder, config), tokens_for(99)
    save(ours, tmp_path / "adapter", config)
    plain = their_logits(theirs.double(), tokens, LENGTHS)
    close(ours(tokens, LENGTHS), their_logits(with_peft(theirs, tmp_path / "adapter"), tokens, LENGTHS))
    with lora.disabled(ours):
        close(ours(tokens, LENGTHS), plain)
    again = adapted(folder, config, seed=5)
    adapters.load_adapter(again, adapters.read_adapter(tmp_path / "adapter"))
    close(again(tokens, LENGTHS), ours(tokens, LENGTHS), 0)


# --- we load PEFT's -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama", "qwen3-tied", "neox", "gpt2", "gpt2-untied"])
def test_an_adapter_that_peft_wrote_continues(case, base, tmp_path):
    theirs, folder = base(case)
    torch.manual_seed(1)
    kind = next((key for key in TARGETS if case.startswith(key)), None)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, target_modules=TARGETS.get(kind, "all-linear"), task_type="CAUSAL_LM",
        init_lora_weights=False,
    )  # fmt: skip
    model = peft.get_peft_model(theirs.double(), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    read = adapters.read_adapter(tmp_path / "adapter")
    assert (read.config.rank, read.config.alpha, read.config.rslora) == (4, 6.0, True)
    ours = adapted(folder, replace(read.config, path=str(tmp_path / "adapter")), noise=False)
    tokens = tokens_for(99)
    close(ours(tokens, LENGTHS), their_logits(model, tokens, LENGTHS))

    save(ours, tmp_path / "again", read.config)  # and back, tensor by tensor
    first, second = (load_file(tmp_path / name / adapters.WEIGHTS) for name in ("adapter", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- merging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama-tied-bias", "qwen2", "neox", "gpt2-untied"])
def test_merged_equals_pefts_merge(case, base, tmp_path):
    theirs, folder = base(case)
    ours = adapted(folder)
    save(ours, tmp_path / "adapter", PLAIN)
    merged = list(lora.merged(ours, ours.named_parameters(), torch.float64))
    assert [name for name, _ in merged] == [name for name, _ in decoder.load(folder).named_parameters()]
    decoder.save(ours, tmp_path / "merged", parameters=merged)
    truth = with_peft(theirs, tmp_path / "adapter").merge_and_unload()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert again.state_dict().keys() == truth.state_dict().keys()
    for name, value in truth.state_dict().items():
        close(again.state_dict()[name], value, 1e-12)


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", ["qwen2", "neox", "gpt2"])
def test_gradients_equal_pefts_and_frozen_weights_have_none(case, checkpointing, base, tmp_path):
    theirs, folder = base(case)
    ours, tokens = adapted(folder), tokens_for(99, [12])
    ours.configure(checkpointing)
    save(ours, tmp_path / "adapter", PLAIN)
    head = partial(linear_logprob, targets=tokens[1:], temperature=1.0)
    logprobs, _ = ours(tokens, [12], torch.arange(11), head)
    weights = torch.linspace(-1, 1, 11, dtype=torch.float64)
    (logprobs * weights).sum().backward()

    model = peft.PeftModel.from_pretrained(theirs.double(), tmp_path / "adapter", is_trainable=True)
    logits = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    (logits.gather(1, tokens[1:, None])[:, 0] * weights).sum().backward()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            assert parameter.requires_grad == lora.is_adapter(name)
            assert (parameter.grad is not None) == lora.is_adapter(name)
            if lora.is_adapter(name):
                parameter.copy_(parameter.grad)  # in the places of the parameters, to compare them by PEFT's names
    save(ours, tmp_path / "gradients", PLAIN)
    found = load_file(tmp_path / "gradients" / adapters.WEIGHTS)
    truth = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == truth.keys()
    for name, gradient in truth.items():
        close(found[name], gradient, 1e-10 if case == "gpt2" else 2e-4)


def test_dropout_is_on_in_losses_alone(base):
    _, folder = base("llama")
    ours, tokens = adapted(folder, replace(PLAIN, dropout=0.5)), tokens_for(99)
    first = ours(tokens, LENGTHS)
    close(ours(tokens, LENGTHS), first, 0)
    with lora.dropout(ours):
        assert (ours(tokens, LENGTHS) - first).abs().max() > 0.01
    close(ours(tokens, LENGTHS), first, 0)


def test_a_new_adapter_changes_nothing_and_has_pefts_distribution(base):
    theirs, folder = base("llama")
    ours, tokens = adapted(folder, noise=False, dtype=torch.float32), tokens_for(99)
    with torch.no_grad():  # a linear layer of few rows is another op with a gradient, equal up to rounding
        with lora.disabled(ours):
            plain = ours(tokens, LENGTHS)
        torch.testing.assert_close(ours(tokens, LENGTHS), plain, atol=0, rtol=0)
    torch.testing.assert_close(ours(tokens, LENGTHS), plain)
    a = ours.blocks[0].qkv.lora_A["q_proj"].detach()
    model = peft.get_peft_model(theirs, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    b = next(p for name, p in model.named_parameters() if "lora_A" in name)
    assert a.shape == b.shape
    assert a.abs().max() <= 48**-0.5  # kaiming_uniform_(a=sqrt(5))
    assert b.abs().max() <= 48**-0.5
    assert abs(float(a.std()) - (3 * 48) ** -0.5) < 0.01
    other = adapted(folder, noise=False, dtype=torch.float32, seed=1)
    assert not torch.equal(a, other.blocks[0].qkv.lora_A["q_proj"])


def test_frozen_bfloat16_weights_beside_float32_adapters(base):
    _, folder = base("llama")
    ours = decoder.load(folder, dtype=torch.float32, shard=lambda m: lora.attach(m, PLAIN, torch.bfloat16))
    adapters.init_adapters(ours, PLAIN, 0)
    dtypes = {p.dtype for p in ours.parameters() if not p.requires_grad}
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    ours(tokens_for(99), LENGTHS).float().square().mean().backward()
    b = ours.blocks[0].qkv.lora_B["q_proj"]
    assert b.grad.dtype == torch.float32
    assert b.grad.abs().max() > 0


def test_generation_samples_the_adapted_model(base, tmp_path):
    theirs, folder = base("llama")
    ours = adapted(folder, dtype=torch.float32)
    save(ours, tmp_path / "adapter", PLAIN)
    model = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    rollout = generate(ours, [[5, 6, 7], [8]], 3, Sampling(max_new_tokens=9, stop_ids=()))
    for i, prompt in enumerate(rollout.prompt_ids):
        for j in range(3):
            tokens = torch.tensor([*prompt, *rollout.tokens[i, j].tolist()])
            with torch.no_grad():
                logits = model(tokens[None]).logits[0].log_softmax(-1)
            truth = logits[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])[:, 0]
            torch.testing.assert_close(rollout.logprobs[i, j], truth, atol=1e-4, rtol=1e-4)


# --- ranks ----------------------------------------------------------------------------------------------------------


def on_rank(rank, folder, compute):
    ranks = Ranks(rank, 2, torch.device("cpu"))

    def prepare(model):
        lora.attach(model, PLAIN, compute)
        fsdp.shard(model, ranks, compute)

    stored = torch.float32 if compute == torch.bfloat16 else compute
    model = decoder.load(folder / "base", dtype=stored, shard=prepare)
    adapters.init_adapters(model, replace(PLAIN, path=str(folder / "adapter")), 0)
    tokens = tokens_for(99)
    model(tokens, LENGTHS, head=lambda hidden, weight: hidden.float() @ weight.T.float()).square().mean().backward()
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    own = {n: p if p is None else p.clone() for n, p in fsdp.each_full(model, stored, only=lora.is_adapter)}
    if rank == 0:
        torch.save((gradients, own), folder / f"found-{compute}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_two_ranks_equal_one(compute, base, tmp_path):
    _, folder = base("qwen2")
    stored = torch.float32
    one = decoder.load(folder, dtype=stored, shard=lambda m: lora.attach(m, PLAIN, compute))
    adapters.init_adapters(one, PLAIN, 0)
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.2)
    save(one, tmp_path / "adapter", PLAIN)
    run_ranks(on_rank, tmp_path, compute)
    gradients, own = torch.load(tmp_path / f"found-{compute}.pt")
    tokens = tokens_for(99)
    one(tokens, LENGTHS, head=lambda hidden, weight: hidden.float() @ weight.T.float()).square().mean().backward()
    truth = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
    assert gradients.keys() == truth.keys() == own.keys()
    tolerance = 1e-5 if compute == torch.float32 else 0.05  # bfloat16 has 8 bits; adapters are cast at the gather
    for name, parameter in one.named_parameters():
        if name in own:
            assert torch.equal(own[name], parameter.detach())
            scale = truth[name].abs().max()
            assert (gradients[name] - truth[name]).abs().max() <= tolerance * scale, name


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA' is not supported"),
        ({"use_dora": True}, "use_dora = True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not supported; expected True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"r": 0}, "r = 0"),
        ({"r": "four"}, "not the config of a LoRA adapter"),
        ({"lora_alpha": -1}, "lora.alpha = -1.0: allowed is > 0"),
    ],
)
def test_configs_that_are_not_supported(change, said, base, tmp_path):
    _, folder = base("llama")
    save(adapted(folder), tmp_path / "adapter", PLAIN)
    file = tmp_path / "adapter" / adapters.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=said):
        adapters.resolve(LoraConfig(path=str(tmp_path / "adapter")), decoder.load(folder).shape)


def test_damaged_and_foreign_adapters(base, tmp_path):
    _, folder = base("llama")
    ours, adapter = adapted(folder), tmp_path / "adapter"
    save(ours, adapter, PLAIN)
    with pytest.raises(ValueError, match=r"has no adapter_config\.json, so it is not an adapter"):
        adapters.read_adapter(folder)
    tensors = load_file(adapter / adapters.WEIGHTS)
    name = next(iter(tensors))
    for changed, said in (
        ({k: v for k, v in tensors.items() if k != name}, "has no tensor .*it must adapt every layer"),
        (tensors | {"base_model.model.extra": torch.zeros(1)}, "no place for, such as base_model.model.extra"),
        (tensors | {name: torch.zeros(4, 7)}, r"has shape \(4, 7\), but the model requires"),
    ):
        save_file(changed, adapter / adapters.WEIGHTS)
        with pytest.raises(ValueError, match=said):
            adapters.load_adapter(ours, adapters.read_adapter(adapter))
    (adapter / adapters.WEIGHTS).write_bytes(b"\x00" * 40)
    with pytest.raises(ValueError, match="is not a readable adapter"):
        adapters.read_adapter(adapter)
    (adapter / adapters.WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors"):
        adapters.read_adapter(adapter)


def test_names_that_the_model_does_not_have(base):
    _, folder = base("llama-tied-bias")
    shape = decoder.load(folder).shape
    with pytest.raises(ValueError, match=r"no linear layer 'c_attn'; it has q_proj, k_proj, .*'all-linear'"):
        lora.check_layers(replace(PLAIN, target_modules=("c_attn",)), shape)
    with pytest.raises(ValueError, match="'norm' is not one of embed_tokens"):
        lora.check_layers(replace(PLAIN, modules_to_save=("norm",)), shape)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        lora.check_layers(replace(PLAIN, modules_to_save=("embed_tokens",)), shape)


def test_values_out_of_range():
    bad = LoraConfig(rank=-1, alpha=0, dropout=1.0, target_modules=())
    assert [fault.split(" = ")[0] for fault in bad.faults()] == [
        "lora.rank", "lora.alpha", "lora.dropout", "lora.target_modules",
    ]  # fmt: skip
    assert "leave 0" in LoraConfig(rank=4, path="x").faults()[0]
    assert not LoraConfig().enabled


# --- sampling with merged weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama", "qwen3", "neox", "gpt2-untied"])
def test_merged_weights_sample_what_the_adapters_sample(case, base):
    """In float64 both round far below the noise; the weights are the same objects afterwards, and unchanged."""
    _, folder = base(case)
    config = replace(PLAIN, modules_to_save=EMBEDDINGS.get(case, ()))
    ours = adapted(folder, config)
    before = {name: (p, p.clone()) for name, p in ours.named_parameters()}
    sampling = Sampling(max_new_tokens=12)
    separate = generate(ours, [[5, 6, 7], [8]], 3, sampling, seed=1)
    with lora.merged_for_sampling(ours):
        held = sum(m.merged.numel() * m.merged.itemsize for m in lora.adapted(ours))
        assert held == lora.adapted_bytes(ours)
        assert all(m.active is m.merged for m in lora.adapted(ours))
        together = generate(ours, [[5, 6, 7], [8]], 3, sampling, seed=1)
        with lora.disabled(ours):
            plain = generate(ours, [[5, 6, 7], [8]], 3, sampling, seed=1)
    assert torch.equal(together.tokens, separate.tokens)
    torch.testing.assert_close(together.logprobs, separate.logprobs, atol=1e-9, rtol=0)
    assert (plain.logprobs - separate.logprobs).abs().max() > 1e-3
    assert all(m.merged is None for m in lora.adapted(ours))
    for name, p in ours.named_parameters():
        assert p is before[name][0]
        assert torch.equal(p, before[name][1])


def test_merged_weights_are_rounded_once(base):
    """Base weights in bfloat16 beside adapters in float32, as on a GPU."""
    _, folder = base("llama")
    ours = decoder.load(folder, dtype=torch.float32, shard=lambda m: lora.attach(m, PLAIN, torch.bfloat16))
    adapters.init_adapters(ours, PLAIN, 0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    layer = ours.blocks[0].qkv
    with lora.merged_for_sampling(ours):
        assert layer.merged.dtype == torch.bfloat16
        for name, (first, rows) in layer.parts.items():
            truth = layer.lora_B[name].double() @ layer.lora_A[name].double() * layer.scaling
            truth += layer.weight[first : first + rows].double()
            error = (layer.merged[first : first + rows].double() - truth).abs()
            assert (error <= truth.abs() * 2**-8 + 1e-5).all()


def test_weights_are_not_merged_after_an_error(base):
    _, folder = base("llama")
    ours = adapted(folder)
    with pytest.raises(RuntimeError, match="in the context"), lora.merged_for_sampling(ours):
        raise RuntimeError("in the context")
    assert all(m.merged is None for m in lora.adapted(ours))
