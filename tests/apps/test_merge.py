"""`nlgrpo merge`: sums in float32 from the numbers as they are stored, rounded once, and what the adapter brings."""

import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.helpers import tiny_model

from nlgrpo import cli
from nlgrpo.model import adapters, decoder

RANK, SCALE = 4, 4.0
CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": SCALE * RANK, "lora_dropout": 0.0,
    "bias": "none", "target_modules": ["q_proj", "v_proj"], "fan_in_fan_out": False,
}  # fmt: skip


@pytest.fixture
def work(tmp_path):
    """A model in bfloat16 with norms in float32, and a random adapter of it in float32."""
    tiny_model(tmp_path / "model", hidden_size=96, num_attention_heads=4, num_key_value_heads=4)
    file = tmp_path / "model" / "model.safetensors"
    base = {name: x.float() if "norm" in name else x.bfloat16() for name, x in load_file(file).items()}
    save_file(base, file, metadata={"format": "pt"})
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in base.items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            prefix = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator) / 8
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator) / 8
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / adapters.WEIGHTS, metadata={"format": "pt"})
    config = CONFIG | {"base_model_name_or_path": str(tmp_path / "model")}
    (tmp_path / "adapter" / adapters.CONFIG).write_text(json.dumps(config))
    return tmp_path


def exact(work):
    """The merged tensors in float64, and the others as they are stored."""
    base, tensors = load_file(work / "model" / "model.safetensors"), load_file(work / "adapter" / adapters.WEIGHTS)
    found = dict(base)
    for name, a in tensors.items():
        if ".lora_A." in name:
            key = name.removeprefix("base_model.model.").replace(".lora_A", "")
            b = tensors[name.replace("lora_A", "lora_B")]
            found[key] = base[key].double() + SCALE * b.double() @ a.double()
    return found


def merged(work, *options):
    assert cli.main(["merge", str(work / "adapter"), "--out", str(work / "merged"), *options]) == 0
    return load_file(work / "merged" / "model.safetensors")


@pytest.mark.parametrize(
    ("base", "options", "dtype"),
    [
        ("bfloat16", (), torch.bfloat16),
        ("float32", ("--dtype", "bfloat16"), torch.bfloat16),
        ("float32", ("--dtype", "float16"), torch.float16),
        ("bfloat16", ("--dtype", "float32"), torch.float32),
        ("bfloat16", ("--dtype", "float64"), torch.float64),
    ],
)
def test_sums_are_rounded_once(base, options, dtype, work):
    """All but the few sums that float32 puts on the other side of a tie are the nearest number of the dtype."""
    if base == "float32":
        file = work / "model" / "model.safetensors"
        generator = torch.Generator().manual_seed(1)
        wide = {k: x.float() + 1e-3 * torch.randn(x.shape, generator=generator) for k, x in load_file(file).items()}
        save_file(wide, file, metadata={"format": "pt"})
    found, truth = merged(work, *options), exact(work)
    assert found.keys() == truth.keys()
    entries = off = 0
    for name, value in truth.items():
        nearest = value.to(dtype)
        assert found[name].dtype == dtype
        if value.dtype != torch.float64:
            assert torch.equal(found[name], nearest), name
            continue
        tolerance = 1e-14 if dtype == torch.float64 else 1e-6
        if dtype in (torch.float32, torch.float64):
            torch.testing.assert_close(found[name].double(), value, atol=tolerance, rtol=tolerance)
        entries, off = entries + nearest.numel(), off + int((nearest != found[name]).sum())
        error, least = found[name].double() - value, nearest.double() - value
        if dtype.itemsize == 2:
            assert error.norm() <= 1.0001 * least.norm()
    assert entries > 10_000
    if dtype.itemsize == 2:
        assert off <= entries / 1000


def test_a_merge_equals_that_of_peft(work):
    found = merged(work)
    base = transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, work / "adapter").merge_and_unload().state_dict()
    for name, value in found.items():
        torch.testing.assert_close(value.float(), theirs[name].bfloat16().float(), atol=1e-6, rtol=2**-7)


def test_what_the_adapter_was_trained_with_goes_with_the_merge(work):
    """The tokenizer that is saved with an adapter, as TRL does, and its files of how to sample replace the model's."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "model")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} w9{% endfor %}"
    tokenizer.save_pretrained(work / "adapter")
    (work / "model" / "generation_config.json").write_text('{"eos_token_id": 2}')
    (work / "adapter" / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    merged(work)
    again = transformers.AutoTokenizer.from_pretrained(work / "merged")
    assert again.chat_template == tokenizer.chat_template
    assert json.loads((work / "merged" / "generation_config.json").read_text())["eos_token_id"] == [2, 9]
    assert decoder.load(work / "merged").shape.width == 96
