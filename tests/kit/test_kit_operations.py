"""The kit's operations of an update against PyTorch's count, enumerated pairs, and worked examples."""

import pytest
import torch
from gpu_kit import operations
from torch.utils.flop_counter import FlopCounterMode

from nlgrpo.apps.plan.workload import Workload
from nlgrpo.config.recipes import recipe
from nlgrpo.kernels import Segments
from nlgrpo.model import lora
from nlgrpo.model.architectures import Shape
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.lora import LoraConfig

SHAPE = Shape("llama", vocab=40, width=64, layers=2, heads=8, kv_heads=2, head_dim=8, ffn=160, context=4096,
              rotary_dim=8, windows=(None, None), scales=(1.0, 1.0))  # fmt: skip


def workload(adapter=None, **changes):
    cfg = recipe("length-bon")
    settings = {"rollout__prompts": 1, "rollout__samples": 2, "rollout__max_new_tokens": 6} | changes
    for key, value in settings.items():
        section, name = key.split("__")
        setattr(getattr(cfg, section), name, value)
    return Workload(cfg, SHAPE, adapter, torch.float32, "cuda", world=1, prompt=9)


def counted(counter):
    """Operations that PyTorch counted, without those of attention on a CPU, which it counts since version 2.15."""
    found = counter.get_flop_counts()["Global"]
    return sum(flops for op, flops in found.items() if "scaled_dot_product" not in str(op))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(
    "adapter", [None, LoraConfig(rank=4), LoraConfig(rank=4, target_modules=("q_proj", "down_proj"))], ids=str
)
def test_the_operations_of_an_update_are_those_that_pytorch_counts(adapter, checkpointing):
    """Of the matrix products of a prompt with two completions, without attention."""
    work = workload(adapter=adapter, model__activation_checkpointing=checkpointing)
    model = Decoder(SHAPE, torch.ones(4)).double()
    if adapter is not None:
        lora.attach(model, adapter, torch.float64)
    model.configure(activation_checkpointing=checkpointing)
    segments, tokens = Segments([9, 5, 5], [None, 0, 0]), torch.zeros(19, dtype=torch.int64)
    select = torch.arange(7, 19)  # 12 targets
    with FlopCounterMode(display=False) as counter:
        model(tokens, segments, select, lambda hidden, weight: hidden @ weight.T).sum().backward()
    flops = operations.of_update(work)
    attention = operations.of_attention(work) * (1 + operations.ATTENTION_BACKWARD + checkpointing)
    truth = counted(counter)
    if adapter is not None:
        parts = {name: rows for name, rows in adapted_rows().items() if name in lora.targets(adapter, SHAPE)}
        # PyTorch does not count addmm_, which adds an adapter's product, ..
        truth += 2 * 2 * 19 * adapter.rank * (sum(parts.values()) * (1 + checkpointing))
        if checkpointing:  # .. and which is not computed again at the end of a block
            truth -= 2 * 2 * 19 * adapter.rank * 64
        # The embedding is frozen, so the input of the first block has no gradient.
        qkv = [name for name in parts if name in ("q_proj", "k_proj", "v_proj")]
        truth += 2 * 19 * 64 * (96 + adapter.rank * len(qkv))
    exact = flops - attention
    assert exact == truth if not (adapter and checkpointing) else 0.99 * truth <= exact <= 1.01 * truth


def adapted_rows():
    """Outputs of each linear layer of a block, by its Hugging Face name."""
    return {"q_proj": 64, "k_proj": 16, "v_proj": 16, "o_proj": 64, "gate_proj": 160, "up_proj": 160, "down_proj": 64}


def test_the_operations_of_a_forward_pass_are_those_that_pytorch_counts():
    model = Decoder(SHAPE, torch.ones(4)).double()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(19, dtype=torch.int64), Segments([9, 5, 5], [None, 0, 0]), torch.arange(7, 19),
              lambda hidden, weight: hidden @ weight.T)  # fmt: skip
    work = workload()
    attention = operations.of_attention(work)
    assert operations.of_forward(work) - attention == counted(counter)


@pytest.mark.parametrize("window", [None, 1, 4, 7, 100])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 9), (9, 5), (3, 0)])
def test_attention_pairs_are_those_of_the_mask(start, tokens, window):
    keys = [min(i + 1, window or i + 1) for i in range(start, start + tokens)]
    assert operations.pairs(start, tokens, window) == sum(keys)


def test_a_group_reads_its_prompt_once():
    work = workload()
    per_pair = 2 * 4 * SHAPE.heads * SHAPE.head_dim
    prompt, completion = 9 * 10 // 2, sum(9 + i + 1 for i in range(5))
    assert operations.of_attention(work) == per_pair * (prompt + 2 * completion)


def test_a_group_that_is_split_repeats_its_prompt():
    whole, split = workload(rollout__samples=8), workload(rollout__samples=8, train__micro_batch_tokens=20)
    assert (whole.parts, split.parts) == (1, 4)
    assert split.tokens - whole.tokens == 3 * 9
