"""The plan's time against PyTorch's count of operations and kernels, enumerated pairs, and worked examples."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nlgrpo.apps.plan import decoding_time, roofline
from nlgrpo.apps.plan.machine import IDEAL, Costs, Machine
from nlgrpo.apps.plan.workload import Workload
from nlgrpo.config.recipes import recipe
from nlgrpo.engine.generation import CachedDecoder
from nlgrpo.kernels import Segments, extension
from nlgrpo.model import lora
from nlgrpo.model.architectures import Shape
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.device import GPU, GPUS

SHAPE = Shape("llama", vocab=40, width=64, layers=2, heads=8, kv_heads=2, head_dim=8, ffn=160, context=4096,
              rotary_dim=8, windows=(None, None), scales=(1.0, 1.0))  # fmt: skip
# Limited by its operations, by its memory, and by what connects the GPUs.
SLOW = GPU(memory=2**30, flops=1e9, bandwidth=1e30, link=1e30, network=1e30, host=1e30, device="")
NARROW = dataclasses.replace(SLOW, flops=1e30, bandwidth=1e9)
APART = dataclasses.replace(SLOW, flops=1e30, link=1e9, network=1e7)


def ideal(gpu):
    """GPUs whose kernels reach the peaks of the data sheet, and take no time to launch."""
    return Machine(gpu, 8, IDEAL)


def workload(shape=SHAPE, adapter=None, world=1, prompt=9, compute=torch.float32, critic=None, total=0.0, **changes):
    cfg = recipe("length-bon")
    settings = {"rollout__prompts": 1, "rollout__samples": 2, "rollout__max_new_tokens": 6} | changes
    for key, value in settings.items():
        section, name = key.split("__")
        setattr(getattr(cfg, section), name, value)
    return Workload(cfg, shape, adapter, compute, "cuda", world, prompt, critic, gpu_memory=total)


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
    flops = roofline.update_flops(work, SHAPE, SHAPE.vocab)
    attention = roofline._of_groups(work, SHAPE) * (1 + roofline.ATTENTION_BACKWARD + checkpointing)
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
    attention = roofline._of_groups(work, SHAPE)
    assert roofline.forward_flops(work, SHAPE, SHAPE.vocab) - attention == counted(counter)


@pytest.mark.parametrize("window", [None, 1, 4, 7, 100])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 9), (9, 5), (3, 0)])
def test_attention_pairs_are_those_of_the_mask(start, tokens, window):
    keys = [min(i + 1, window or i + 1) for i in range(start, start + tokens)]
    assert decoding_time.pairs(start, tokens, window) == sum(keys)


def test_a_group_reads_its_prompt_once():
    work = workload()
    per_pair = 2 * 4 * SHAPE.heads * SHAPE.head_dim
    prompt, completion = 9 * 10 // 2, sum(9 + i + 1 for i in range(5))
    assert roofline._of_groups(work, SHAPE) == per_pair * (prompt + 2 * completion)


def test_a_group_that_is_split_repeats_its_prompt():
    whole, split = workload(rollout__samples=8), workload(rollout__samples=8, train__micro_batch_tokens=20)
    assert (whole.parts, split.parts) == (1, 4)
    assert split.tokens - whole.tokens == 3 * 9


# Bytes of a pair of a row's head and a column, in bfloat16, that plain PyTorch writes and reads. Scores are float32.
OWN = sum((
    4,  # written by the product
    4 + 4,  # concatenated with those of the prompt
    4 + 4,  # the mask filled in
    4 + 4,  # softmax
    4 + 2,  # cast
    2,  # read by the product with the values
))  # fmt: skip
PROMPT = OWN + (4 + 4) + (2 + 2)  # and copied to the order of the rows, and back to that of the prompts


def test_decoding_reads_the_weights_once_per_token():
    """Of a GPU that is limited by its memory: 5 passes after the prompt's, each over all rows."""
    work = workload(compute=torch.bfloat16)
    weights = 2 * (SHAPE.matrices + SHAPE.vocab * SHAPE.width)
    cache = 2 * 2 * SHAPE.kv_heads * SHAPE.head_dim * SHAPE.layers
    columns = sum(9 + 2 * t for t in range(1, 6))
    scores = 2 * SHAPE.layers * SHAPE.heads * sum(9 * PROMPT + t * OWN for t in range(1, 6))
    logits = 6 * 2 * SHAPE.vocab * 2  # 6 tokens of 2 rows; the sampler reads each logit once
    seconds = roofline.seconds(work, ideal(NARROW))["sampling"]
    assert seconds == pytest.approx((6 * weights + columns * cache + scores + logits) / 1e9)


@pytest.mark.parametrize(("top_p", "least", "most"), [(1.0, 50, 75), (0.9, 200, 300)])
def test_plain_sampling_moves_many_bytes_per_logit(top_p, least, most):
    """The sort of top_p, and passes in float32 and float64. Triton's kernels read 2 in bfloat16."""
    shape = dataclasses.replace(SHAPE, vocab=10**6)
    fused = decoding_time.of_a_draw(workload(shape, compute=torch.bfloat16))
    filtered = workload(shape, compute=torch.bfloat16, rollout__top_p=top_p, rollout__top_k=50)
    assert fused == 2e6
    assert least * 1e6 < decoding_time.of_a_draw(filtered) < most * 1e6


def test_rows_that_do_not_fit_are_decoded_in_waves():
    once = roofline.seconds(workload(rollout__prompts=4, rollout__max_rows=8), ideal(NARROW))["sampling"]
    twice = roofline.seconds(workload(rollout__prompts=4, rollout__max_rows=4), ideal(NARROW))["sampling"]
    assert 1.5 < twice / once <= 2


def test_sharded_parameters_pass_the_link_and_replicas_the_network():
    options = {"rollout__prompts": 16, "compute": torch.bfloat16}
    size = 2 * SHAPE.parameters
    within = roofline.seconds(workload(world=8, **options), ideal(APART))
    across = roofline.seconds(workload(world=16, **options), ideal(APART))
    replicas = roofline.seconds(workload(world=16, parallel__replicate=2, **options), ideal(APART))
    assert within["sampling"] == pytest.approx(size * 7 / 8 / 1e9)
    assert across["sampling"] == pytest.approx(size * 15 / 16 / 1e7)
    assert replicas["sampling"] == within["sampling"]
    gradients = 4 * SHAPE.parameters
    assert within["update"] == pytest.approx((2 * size + gradients) * 7 / 8 / 1e9)
    between = 2 * gradients / 8 * (1 / 2) / 1e7
    assert replicas["update"] == pytest.approx((2 * size + gradients) * 7 / 8 / 1e9 + between)


def test_gathering_by_block_costs_one_gather_per_token():
    options = {"world": 8, "rollout__prompts": 8, "compute": torch.bfloat16}
    model = roofline.seconds(workload(**options), ideal(APART))["sampling"]
    block = roofline.seconds(workload(parallel__gather_for_sampling="block", **options), ideal(APART))
    assert block["sampling"] == pytest.approx(6 * model)


def test_offloaded_shards_pass_the_host_link():
    slow = dataclasses.replace(SLOW, flops=1e30, host=1e9)
    options = {"world": 8, "rollout__prompts": 8, "compute": torch.bfloat16, "parallel__offload": True}
    found = roofline.seconds(workload(**options), ideal(slow))
    shard = 4 * SHAPE.parameters / 8
    assert found["sampling"] == pytest.approx(shard / 1e9)
    assert found["update"] == pytest.approx((2 * shard + shard) / 1e9)  # gathered twice, and gradients copied back
    assert found["optimizer step"] == pytest.approx(7 * shard / roofline.HOST_BANDWIDTH)


# --- launches ---------------------------------------------------------------------------------------------------------

LEARNED = {"norm": "layer", "gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
FAMILIES = {
    "qwen2": dataclasses.replace(SHAPE, family="qwen2", qkv_bias=True),
    "qwen3": dataclasses.replace(SHAPE, family="qwen3", qk_norm=True),
    "gpt_neox": dataclasses.replace(
        SHAPE, family="gpt_neox", activation="gelu", parallel=True, rotary_dim=2, **LEARNED
    ),
    "gpt2": dataclasses.replace(SHAPE, family="gpt2", activation="gelu_new", rotary_dim=0, **LEARNED),
}


class Kernels(TorchDispatchMode):
    """Counts ops that compute: all but those whose result is a view of an argument."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and "aten.empty" not in str(func) and "aten.detach" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_launches_about_the_kernels_that_are_counted(name, monkeypatch):
    """Ops of the engine for one token, between two and three layers, in plain PyTorch and in float32.

    Some launch two kernels, such as `masked_fill`, and copies inside of `matmul` are not seen.
    """
    monkeypatch.setattr(extension, "available", lambda: False)
    counts = []
    for layers in (2, 3):
        shape = dataclasses.replace(FAMILIES[name], layers=layers, windows=(None,) * layers, scales=(1.0,) * layers)
        model = Decoder(shape, torch.ones(shape.rotary_dim // 2) if shape.rotary_dim else None)
        with torch.inference_mode():
            decoder = CachedDecoder(model)
            decoder.begin([[1, 2, 3], [4, 5]])
            decoder.branch([0, 0, 1, 1], 4)
            decoder.read(torch.ones(4, 1, dtype=torch.int64))  # the order of the rows is computed once
            with Kernels() as kernels:
                decoder.read(torch.ones(4, 1, dtype=torch.int64))
        counts.append(kernels.count)
    found = counts[1] - counts[0]
    assert 0.9 * found <= decoding_time.of_a_layer(FAMILIES[name]) <= 1.3 * found


def test_launches_bound_a_token():
    """5 tokens after the prefill on a GPU that needs no other time."""
    infinite = Machine(dataclasses.replace(SLOW, flops=1e30), 8, dataclasses.replace(IDEAL, launch_seconds=1e-5))
    seconds = roofline.seconds(workload(), infinite)["sampling"]
    assert seconds == pytest.approx(6 * (2 * 31 + 22 + 2) * 1e-5)
    with_adapters = roofline.seconds(workload(adapter=LoraConfig(rank=4)), infinite)["sampling"]
    assert with_adapters == seconds


def test_a_token_takes_as_long_for_any_number_of_rows_until_the_kernels_take_longer():
    """By hand for 0.5B: 24 layers of 31 launches of 10 us, and 24 more, are 7.7 ms; reading weights takes 0.4 ms."""
    shape = dataclasses.replace(SHAPE, vocab=151936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, ffn=4864,
                                context=32768, windows=(None,) * 24, scales=(1.0,) * 24)  # fmt: skip
    machine = Machine(GPUS["h100"], 8)
    token = {}
    for rows in (8, 64, 256, 4096):
        work = workload(shape, prompt=512, compute=torch.bfloat16, rollout__samples=8, rollout__prompts=rows // 8,
                        rollout__max_new_tokens=512, rollout__max_rows=rows)  # fmt: skip
        token[rows] = roofline.seconds(work, machine)["sampling"] / 512
    assert token[8] == pytest.approx(0.00768, rel=0.01)
    assert 1.0 <= token[256] / token[8] < 1.02
    assert token[4096] > 2 * token[8]


# --- phases -----------------------------------------------------------------------------------------------------------


def test_shares_of_the_peaks_lengthen_what_they_limit():
    half = Costs(launch_seconds=1e-30, matmul_share=0.5, bandwidth_share=0.25, update_share=0.1)
    for gpu, phase, share in ((SLOW, "sampling", 0.5), (NARROW, "sampling", 0.25), (SLOW, "update", 0.1),
                              (SLOW, "scoring", 0.1), (NARROW, "optimizer step", 0.25)):  # fmt: skip
        best = roofline.seconds(workload(), ideal(gpu))[phase]
        assert roofline.seconds(workload(), Machine(gpu, 8, half))[phase] == pytest.approx(best / share)


def test_launches_bound_an_update():
    """150 a layer, in each micro-batch."""
    infinite = Machine(dataclasses.replace(SLOW, flops=1e30), 8, dataclasses.replace(IDEAL, launch_seconds=1e-5))
    work = workload(rollout__prompts=4, train__micro_batch_tokens=20)
    assert work.micro_batches == 4
    assert roofline.seconds(work, infinite)["update"] == pytest.approx(4 * 2 * 150 * 1e-5)


def test_the_last_wave_has_fewer_rows():
    options = {"rollout__prompts": 5, "compute": torch.bfloat16}
    five = roofline.seconds(workload(rollout__max_rows=8, **options), ideal(SLOW))["sampling"]
    four, one = (roofline.seconds(workload(compute=torch.bfloat16, rollout__prompts=n, rollout__max_rows=8),
                                  ideal(SLOW))["sampling"] for n in (4, 1))  # fmt: skip
    assert five == pytest.approx(four + one)


def test_phases_follow_the_algorithm():
    machine = Machine(GPUS["h100"], 8)
    assert "scoring" not in roofline.seconds(workload(loss__beta=0.0), machine)
    offline = workload(loss__algorithm="dpo", offline__n=2)
    assert "sampling" not in roofline.seconds(offline, machine)
    once = roofline.seconds(workload(), machine)
    assert roofline.seconds(workload(loss__epochs=3), machine)["update"] == pytest.approx(3 * once["update"])
    critic = roofline.seconds(workload(loss__algorithm="ppo", critic=SHAPE), machine)
    assert critic["update"] > 1.5 * once["update"]


def test_tokens_per_second_are_those_of_all_ranks():
    work, machine = workload(world=8, rollout__prompts=16), Machine(GPUS["h100"], 8)
    step = sum(roofline.seconds(work, machine).values())
    assert roofline.tokens_per_second(work, machine) == pytest.approx(16 * 2 * 6 / step)


def test_a_correction_scores_the_completions_with_the_policy():
    """As often as the reference does; before several optimizer steps the policy scores them anyway."""
    machine = ideal(SLOW)
    one = roofline.seconds(workload(), machine)["scoring"]  # of the reference
    policy = {"loss__correction": "tis:2"}
    assert roofline.seconds(workload(loss__beta=0.0, **policy), machine)["scoring"] == one
    assert roofline.seconds(workload(**policy), machine)["scoring"] == 2 * one
    assert roofline.seconds(workload(loss__epochs=2, **policy), machine)["scoring"] == 2 * one


# --- vLLM -------------------------------------------------------------------------------------------------------------

VLLM = {"rollout__engine": "vllm", "compute": torch.bfloat16}
WEIGHTS = 2 * (SHAPE.matrices + SHAPE.vocab * SHAPE.width)  # that a pass reads, in bfloat16
CACHE = 2 * 2 * 2 * 8 * 2  # bytes of a token: keys and values, 2 heads of 8, 2 layers, bfloat16


def decoding(prompts, columns=6):
    """Bytes that passes over ``prompts`` with two completions each read, after the prefill of the first."""
    tokens = sum(prompts * (9 + 2 * t) for t in range(1, columns))
    return columns * WEIGHTS + tokens * CACHE


def test_servers_sample_on_other_gpus():
    machine = Machine(GPUS["h100"], 8)
    own = roofline.seconds(workload(), machine)
    found = roofline.seconds(workload(rollout__engine="vllm", vllm__servers=("http://a:8000",)), machine)
    assert own.pop("sampling") > 0
    assert found == own


def test_vllm_decodes_all_rows_that_its_cache_holds():
    """Four prompts together; one after another where its share has room for one prompt with its completions."""
    machine = ideal(NARROW)
    group = 9 + 2 * 6
    room = 2 * SHAPE.parameters + 1.6 * group * CACHE
    options = {"rollout__prompts": 4, **VLLM}
    assert roofline.seconds(workload(**options), machine)["sampling"] == pytest.approx(decoding(4) / 1e9)
    tight = roofline.seconds(workload(total=room / 0.5, vllm__gpu_memory=0.5, **options), machine)
    rows = 3  # of 1.6 groups
    tokens = sum(rows * (9 / 2 + t) for t in range(1, 6))
    last = sum(2 * (9 / 2 + t) for t in range(1, 6))
    read = 2 * (6 * WEIGHTS + tokens * CACHE) + 6 * WEIGHTS + last * CACHE
    assert tight["sampling"] == pytest.approx(read / 1e9)
    one = roofline.seconds(workload(rollout__max_rows=2, **options), machine)
    assert one["sampling"] == pytest.approx(4 * decoding(1) / 1e9)


def test_ranks_of_an_engine_share_its_work():
    """Two ranks sample the prompts of both, and each reads half of the weights and of the cache."""
    options = {"world": 2, "rollout__prompts": 4, "parallel__replicate": 2, **VLLM}
    found = roofline.seconds(workload(vllm__tensor_parallel=2, **options), ideal(NARROW))
    assert found["sampling"] == pytest.approx(decoding(4) / 2 / 1e9)


def test_vllm_gets_the_weights_in_the_dtype_of_the_shards():
    machine, options = ideal(APART), {"world": 8, "rollout__prompts": 8, **VLLM}
    found = roofline.seconds(workload(**options), machine)["sampling"]
    assert found == pytest.approx(4 * SHAPE.parameters * 7 / 8 / 1e9)
    assert roofline.seconds(workload(parallel__gather_for_sampling="block", **options), machine)["sampling"] == found
    rank = 4
    adapter = LoraConfig(rank=rank)
    numbers = SHAPE.layers * sum(rank * (rows + columns) for rows, columns in SIZES.values())
    found = roofline.seconds(workload(adapter=adapter, **options), machine)["sampling"]
    assert found == pytest.approx(4 * numbers * 7 / 8 / 1e9)
    found = roofline.seconds(workload(adapter=adapter, vllm__adapters=False, **options), machine)["sampling"]
    assert found == pytest.approx((4 * numbers + 2 * SHAPE.parameters) * 7 / 8 / 1e9)


# Outputs and inputs of the linear layers of a block.
SIZES = {"q": (64, 64), "k": (16, 64), "v": (16, 64), "o": (64, 64), "gate": (160, 64), "up": (160, 64),
         "down": (64, 160)}  # fmt: skip
