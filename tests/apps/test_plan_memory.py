"""The plan's estimate of memory against what autograd, the packing, the optimizers and PyTorch's tracker count."""

import dataclasses
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from nlgrpo.apps.plan import activations, memory, sampling_memory
from nlgrpo.apps.plan.activations import Allocated, per_token
from nlgrpo.apps.plan.workload import FITS, Workload
from nlgrpo.config.recipes import recipe
from nlgrpo.kernels import Segments, extension, linear, packed_attention, rms_norm, swiglu
from nlgrpo.model import lora
from nlgrpo.model.architectures import Shape
from nlgrpo.model.attention import PackedAttention
from nlgrpo.model.decoder import RECOMPUTED_WIDTH, Decoder
from nlgrpo.model.lora import LoraConfig
from nlgrpo.model.packing import pack
from nlgrpo.training.learner import make_optimizer

LAYERS = {"layers": 2, "windows": (None, None), "scales": (1.0, 1.0)}
LLAMA = Shape("llama", vocab=40, width=64, heads=8, kv_heads=8, head_dim=8, ffn=160, context=4096, rotary_dim=8,
              **LAYERS)  # fmt: skip
LEARNED = {"norm": "layer", "gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
SHAPES = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, kv_heads=2, qkv_bias=True),
    "qwen3": dataclasses.replace(LLAMA, kv_heads=2, qk_norm=True),
    "gpt_neox": dataclasses.replace(
        LLAMA, family="gpt_neox", activation="gelu", parallel=True, rotary_dim=2, **LEARNED
    ),
    "gpt2": dataclasses.replace(LLAMA, family="gpt2", activation="gelu_new", rotary_dim=0, **LEARNED),
    "wide llama": dataclasses.replace(LLAMA, width=RECOMPUTED_WIDTH),
    "wide gpt2": dataclasses.replace(
        LLAMA, family="gpt2", activation="gelu_new", rotary_dim=0, width=RECOMPUTED_WIDTH, **LEARNED
    ),
}


def decoder(shape, dtype, adapter=None):
    torch.manual_seed(0)
    frequencies = torch.ones(shape.rotary_dim // 2) if shape.rotary_dim else None
    model = Decoder(shape, frequencies).to(dtype)
    if adapter is not None:
        lora.attach(model, adapter, dtype)
    return model


def workload(shape=LLAMA, adapter=None, dtype=torch.float32, prompt=9, world=1, **changes):
    cfg = recipe("length-bon")
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(cfg, section), name, value)
    return Workload(cfg, shape, adapter, dtype, "cpu", world, prompt)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_block_keeps_what_autograd_saves(name, rank, dtype, monkeypatch):
    """Per token, by hooks on the tensors that autograd saves in a model with real tensors, also inside other hooks."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    adapter, tokens = (LoraConfig(rank=rank) if rank else None), 512
    kept = {}
    for layers in (1, 2):
        fields = {"layers": layers, "windows": (None,) * layers, "scales": (1.0,) * layers}
        model = decoder(dataclasses.replace(SHAPES[name], **fields), dtype, adapter)
        own, saved = {p.untyped_storage()._cdata for p in model.parameters()}, {}

        def keep(x, own=own, saved=saved):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in own:
                saved[x.untyped_storage()._cdata] = (x.untyped_storage().nbytes(), x)
            return x

        x = torch.randn(tokens, model.shape.width, dtype=dtype, requires_grad=True)
        segments = Segments([tokens])
        attend = PackedAttention(segments, x.device, dtype)
        rope = model.rope(segments.positions(x.device))
        inner = lambda pack, unpack, keep=keep: hooks(lambda x: keep(pack(x)), unpack)  # noqa: E731
        monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", inner)
        with hooks(keep, lambda x: x):
            for block in model.blocks:
                x = block(x, rope, attend)
        kept[layers] = sum(size for size, _ in saved.values())
    found = per_token(SHAPES[name], adapter, dtype, "cpu").saved
    small = 64 * dtype.itemsize  # tensors whose size does not grow with the tokens, such as the lengths
    assert found == pytest.approx((kept[2] - kept[1]) / tokens, abs=small / tokens * 4)


def test_wide_models_save_less():
    wide = dataclasses.replace(LLAMA, width=RECOMPUTED_WIDTH)
    again = per_token(wide, None, torch.float32, "cpu").saved
    all_inputs = per_token(wide, None, torch.float32, "cpu", checkpointing=True).saved
    assert all_inputs - again == 4 * (2 * wide.width + wide.ffn)  # two norms and the activation


@pytest.mark.parametrize("kind", ["cpu", "packed", "varlen", "flash_attn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_trace_is_linear_in_the_number_of_tokens(dtype, kind, monkeypatch):
    many = per_token(LLAMA, None, dtype, kind)
    monkeypatch.setattr(activations, "TOKENS", 2**10)
    few = per_token(LLAMA, None, dtype, kind)
    assert vars(few) == pytest.approx(vars(many), rel=0.01)


@pytest.mark.parametrize("name", SHAPES)
def test_the_count_of_allocations_is_that_of_pytorch(name):
    """The peak of a block's forward and backward pass, by `torch.distributed._tools.MemTracker`, on real tensors."""
    model, tokens = decoder(dataclasses.replace(SHAPES[name], layers=1), torch.float32), 512
    segments = Segments([tokens])
    attend, rope = PackedAttention(segments, torch.device("cpu"), torch.float32), model.rope(segments.positions("cpu"))

    def run():
        x = torch.zeros(tokens, model.shape.width, requires_grad=True)
        model.blocks[0](x, rope, attend).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    run()
    tracker = MemTracker()
    with tracker:
        run()
    truth = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]
    with Allocated() as ours:
        run()
    given = sum(x.nbytes for x in (rope or ())) + segments.tensor.nbytes
    assert truth - given - sum(p.nbytes for p in model.blocks[0].parameters()) <= ours.peak <= truth


@pytest.mark.skipif(not extension.available(), reason="the compiled ops are not built")
def test_the_compiled_ops_run_on_fake_tensors():
    """Shapes, dtypes and strides are those of the real results, forward and backward."""
    segments = Segments([5, 4, 3], [None, 0, 0])

    def results():
        x, weight = torch.ones(12, 32, requires_grad=True), torch.ones(32, requires_grad=True)
        matrix, qkv = torch.ones(48, 32, requires_grad=True), torch.ones(12, 8, 8, requires_grad=True)
        outputs = [rms_norm(x, weight, 1e-5), swiglu(x), linear(x, matrix, None, impl="cpp"),
                   packed_attention(qkv, None, segments, heads=4, scale=1.0)]  # fmt: skip
        sum(out.sum() for out in outputs).backward()
        return [*outputs, *(leaf.grad for leaf in (x, weight, matrix, qkv))]

    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = results()
    for ours, real in zip(fake, results(), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("seed", range(40))
def test_the_largest_micro_batch_is_that_of_the_packing(seed):
    """For prompts of equal length and completions of the full length, the most that can happen."""
    rng = random.Random(seed)
    prompt, columns, samples = rng.randint(1, 60), rng.randint(1, 90), rng.choice([1, 2, 4, 8])
    prompts, limit = rng.randint(1, 8), rng.choice([None, 30, 200, 1000, 5000])
    work = workload(prompt=prompt, rollout__max_new_tokens=columns, rollout__samples=samples, rollout__prompts=prompts,
                    train__micro_batch_tokens=limit)  # fmt: skip
    ids = [[1 + p] * prompt for p in range(prompts) for _ in range(samples)]
    completions = [[1] * columns for _ in ids]
    packed = pack(ids, completions, range(len(ids)), work.limit.tokens, group_tokens=work.limit.group)
    assert work.micro_batch >= max(len(batch.tokens) for batch in packed)
    if limit is None or limit >= prompt + samples * (columns - 1):  # else groups are split, at most down to one row
        assert work.micro_batch == max(len(batch.tokens) for batch in packed)
    assert work.targets >= max(len(batch.targets) for batch in packed)


@pytest.mark.parametrize(("rank", "algorithm"), [(0, "adamw"), (0, "muon"), (4, "adamw")])
def test_gradients_and_optimizer_states_are_exact(rank, algorithm):
    adapter = LoraConfig(rank=rank) if rank else None
    work = workload(adapter=adapter, optim__algorithm=algorithm)
    model = decoder(LLAMA, torch.float32, adapter)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.ones_like(p)
    optimizer = make_optimizer(model, work.config.optim)
    optimizer.step()
    states = sum(x.nbytes for s in optimizer.state.values() for k, x in s.items() if torch.is_tensor(x) and k != "step")
    plan = memory.estimate(work)
    assert plan.phases["update"]["gradients"] == sum(p.grad.nbytes for p in trained)
    assert plan.phases["update"]["optimizer"] == states
    assert plan.persistent["parameters"] == sum(p.nbytes for p in model.parameters())


def test_what_the_settings_change():
    plain = memory.estimate(workload())
    checkpointed = memory.estimate(workload(model__activation_checkpointing=True))
    assert checkpointed.phases["update"]["activations"] < plain.phases["update"]["activations"]
    assert "reference" not in memory.estimate(workload(loss__beta=0.0)).persistent
    assert "reference" not in memory.estimate(workload(adapter=LoraConfig(rank=4))).persistent
    two = memory.estimate(workload(world=2))
    assert two.persistent["parameters"] == plain.persistent["parameters"] / 2
    assert two.phases["sampling"]["unsharded parameters"] == plain.persistent["parameters"]
    replicas = memory.estimate(workload(world=2, parallel__replicate=2))
    assert replicas.persistent["parameters"] == plain.persistent["parameters"]
    assert plain.peak == max(plain.total(phase) for phase in plain.phases)


def test_a_cpu_keeps_the_memory_of_gathered_models():
    """Of the policy for sampling, unless servers sample, and of the reference; each is whole, in float32."""
    servers = {"rollout__engine": "vllm", "vllm__servers": ("http://a:8000",)}
    both = memory.estimate(workload(world=2)).overhead["update"]
    policy = memory.estimate(workload(world=2, loss__beta=0.0)).overhead["update"]
    neither = memory.estimate(workload(world=2, loss__beta=0.0, **servers)).overhead["update"]
    assert both - policy == 4 * LLAMA.parameters
    assert policy - neither == 4 * LLAMA.parameters


@pytest.mark.parametrize(
    ("changes", "scored"),
    [
        ({"loss__beta": 0.0}, False),
        ({"loss__beta": 0.1}, True),
        ({"loss__beta": 0.0, "loss__correction": "tis:2"}, True),
        ({"loss__beta": 0.0, "loss__epochs": 2}, True),
        ({"loss__beta": 0.0, "loss__minibatches": 2}, True),
        ({"loss__beta": 0.0, "loss__algorithm": "ppo"}, True),
    ],
)
def test_completions_are_scored_by_reference_policy_or_critic(changes, scored):
    assert ("scoring" in memory.estimate(workload(**changes)).phases) == scored


def test_every_pair_of_a_set_is_an_input():
    """Of 8 samples, 7 + 6 + .. + 1 = 28 pairs in place of one."""
    dpo = {"loss__algorithm": "dpo", "offline__n": 8, "rollout__samples": 8, "calibration__rollouts": "rollouts"}
    one = workload(**dpo)
    pairs = workload(**dpo, offline__rejected="all")
    assert pairs.tokens == 28 * one.tokens


# --- sampling on a GPU ------------------------------------------------------------------------------------------------


def on_gpu(adapter=None, world=1, total=0.0, **changes):
    """Sampling of a model that computes in bfloat16."""
    work = workload(adapter=adapter, dtype=torch.bfloat16, world=world, **changes)
    return dataclasses.replace(work, device="cuda", gpu_memory=total)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj")], ids=["all", "some"])
def test_adapters_are_merged_into_copies_of_the_weights_that_they_adapt(name, targets):
    shape = SHAPES[name]
    known = lora.layer_names(shape)
    if targets[0] not in ("all-linear", *known):
        targets = (known[0], known[-1])
    adapter = LoraConfig(rank=4, target_modules=targets)
    model = decoder(shape, torch.float32, adapter)
    adapted = [module for module in model.modules() if isinstance(module, lora.LoraLinear)]
    plan = memory.estimate(dataclasses.replace(on_gpu(adapter), shape=shape))
    assert plan.phases["sampling"]["merged adapters"] == 2 * sum(module.weight.numel() for module in adapted)
    assert "merged adapters" not in plan.phases["update"]


def test_retrained_weights_are_copied_too():
    adapter = LoraConfig(rank=4, modules_to_save=("lm_head", "embed_tokens"))
    plain = memory.estimate(on_gpu(LoraConfig(rank=4))).phases["sampling"]["merged adapters"]
    both = memory.estimate(on_gpu(adapter)).phases["sampling"]["merged adapters"]
    assert both - plain == 2 * 2 * LLAMA.vocab * LLAMA.width


def test_adapters_are_merged_on_a_gpu_if_half_of_the_free_memory_holds_the_copies():
    adapter = LoraConfig(rank=4)
    one, two = (memory.estimate(on_gpu(adapter, world=world)).phases["sampling"] for world in (1, 2))
    assert two["merged adapters"] == one["merged adapters"] > 0
    assert two["unsharded parameters"] == 2 * LLAMA.parameters
    assert "merged adapters" not in memory.estimate(workload(adapter=adapter)).phases["sampling"]  # a CPU
    by_block = on_gpu(adapter, world=2, parallel__gather_for_sampling="block")
    assert "merged adapters" not in memory.estimate(by_block).phases["sampling"]
    held = 10**9 * FITS - sampling_memory._beside(on_gpu(adapter, total=10**9), 0.0)
    for share, merged in ((1.9, False), (2.2, True)):
        small = on_gpu(adapter, total=(held + share * one["merged adapters"]) / FITS)
        assert (sampling_memory.merged(small) > 0) == merged


def test_filters_take_the_memory_of_plain_pytorch():
    """28 bytes a logit, and 36 with a sort, where the kernel of two passes needs almost nothing."""
    wide = dataclasses.replace(LLAMA, vocab=10**6)
    sizes = {}
    for name, options in {"plain": {}, "top_k": {"rollout__top_k": 50}, "top_p": {"rollout__top_p": 0.9}}.items():
        work = dataclasses.replace(on_gpu(rollout__max_rows=16, rollout__prompts=2, **options), shape=wide)
        sizes[name] = memory.estimate(work).phases["sampling"]["decoding"] / (16 * wide.vocab)
    assert sizes["plain"] == pytest.approx(2 + 2, rel=0.01)  # logits, and those of the next token
    assert sizes["top_k"] == pytest.approx(2 + 28, rel=0.01)
    assert sizes["top_p"] == pytest.approx(2 + 36, rel=0.01)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_known_gpu_256_rows_are_decoded_together(device):
    work = dataclasses.replace(workload(rollout__prompts=1000), device=device)
    assert sampling_memory.rows(work, 1000, 8) == (32, 256)
    assert sampling_memory.rows(work, 10, 8) == (10, 80)
    assert sampling_memory.rows(work, 1000, 300) == (1, 300)


def test_rows_fill_the_memory_of_a_gpu():
    """By hand: what is free beside weights and Adam, divided by the cache of a group, of which most of it consists."""
    total, columns = 10 * 2**30, 4000
    work = on_gpu(total=float(total), rollout__prompts=10**6, rollout__max_new_tokens=columns)
    prompts, rows = sampling_memory.rows(work, 10**6, work.config.rollout.samples)
    per_token = 2 * LLAMA.layers * LLAMA.kv_heads * LLAMA.head_dim * 2
    group = (9 + work.config.rollout.samples * columns) * per_token
    assert rows == prompts * work.config.rollout.samples
    assert 0.6 < prompts * group / (0.9 * 0.95 * total) < 1.0
    plan = memory.estimate(work)
    assert 0.85 * total < plan.total("sampling") <= 0.95 * total
    tight = dataclasses.replace(work, gpu_memory=1000.0)
    assert sampling_memory.rows(tight, 10**6, 8) == (1, 8)
