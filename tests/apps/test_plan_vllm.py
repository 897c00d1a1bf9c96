"""The plan of runs that sample with vLLM: memory, remedies and the table, against counts by hand."""

import json

import pytest
import torch
from transformers import LlamaConfig

from nlgrpo import train
from nlgrpo.apps.plan import advice, memory, plan
from nlgrpo.apps.plan.workload import CONTEXT, Workload
from nlgrpo.config.recipes import recipe
from nlgrpo.model.architectures import Shape
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.device import GPUS

GIB = 2**30
SHAPE = Shape("llama", vocab=500, width=64, layers=2, heads=8, kv_heads=4, head_dim=8, ffn=160, context=4096,
              rotary_dim=8, windows=(None, None), scales=(1.0, 1.0))  # fmt: skip
N = sum(p.numel() for p in Decoder(SHAPE, torch.ones(4)).parameters())
LARGEST = SHAPE.vocab * SHAPE.width  # the embedding, and the head
LLAMA_7B = Shape("llama", vocab=32000, width=4096, layers=32, heads=32, kv_heads=32, head_dim=128, ffn=11008,
                 context=4096, rotary_dim=128, windows=(None,) * 32, scales=(0.088,) * 32)  # fmt: skip
N_7B = 6_738_415_616
H100 = GPUS["h100"].memory
ROUNDING = 1.05  # of PyTorch's allocator on a GPU
SERVERS = ("http://a:8000", "http://b:8000")
COLOCATED = {"rollout__engine": "vllm"}
SERVED = COLOCATED | {"vllm__servers": SERVERS}


def workload(shape=SHAPE, device="cuda", world=1, adapter=None, compute=None, prompt=9, total=GIB, **changes):
    cfg = recipe("length-bon")
    settings = {"rollout__prompts": 4 * world, "rollout__samples": 2, "rollout__max_new_tokens": 6} | changes
    for key, value in settings.items():
        section, name = key.split("__")
        setattr(getattr(cfg, section), name, value)
    compute = compute or (torch.float32 if device == "cpu" else torch.bfloat16)
    process = CONTEXT if device == "cuda" else 0
    return Workload(
        cfg, shape, adapter, compute, device, world, prompt, process=process, gpu_memory=total * (device == "cuda")
    )


def of_7b(**changes):
    settings = {"rollout__prompts": 8, "rollout__samples": 8, "rollout__max_new_tokens": 512} | changes
    return workload(LLAMA_7B, prompt=512, total=H100, **settings)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 4])
def test_servers_leave_the_trainer_its_memory(world):
    found = memory.estimate(workload(world=world, **SERVED))
    assert not {"sampling", "evaluation"} & set(found.phases)
    cast = 2 * LARGEST / world  # of the shard, in bfloat16, before it goes to the host
    assert found.phases["hand-over"] == {"gathered parameter": cast, "optimizer": 8 * N / world}
    total = CONTEXT + ROUNDING * (4 * N + 2 * N + 8 * N + 2 * LARGEST) / world  # policy, reference, Adam
    assert found.total("hand-over") == pytest.approx(total)
    assert "vLLM" not in str(found)


def test_servers_on_this_machine_read_weights_from_its_memory():
    here = SERVED | {"vllm__servers": ("http://localhost:8000", "http://127.0.0.1:8001")}
    assert memory.estimate(workload(world=4, **here)).host == {"weights for the servers": 2 * 2 * N / 4}
    for elsewhere in (
        SERVED,
        here | {"vllm__folder": "/mnt/weights"},
        here | {"vllm__servers": ("http://node7:8000",)},
    ):
        assert memory.estimate(workload(world=4, **elsewhere)).host == {}


def test_rank_0_of_a_cpu_gathers_a_parameter_for_the_servers():
    found = memory.estimate(workload(device="cpu", world=2, **SERVED))
    assert found.phases["hand-over"]["gathered parameter"] == 4 * LARGEST


@pytest.mark.parametrize("share", [0.25, 0.4])
def test_vllm_takes_its_share_of_a_gpu_while_it_samples(share):
    found = memory.estimate(workload(vllm__gpu_memory=share, **COLOCATED))
    for phase in ("sampling", "evaluation"):
        assert found.phases[phase]["vLLM"] == share * GIB
        gathered = (4 + 2 + 2) * LARGEST  # float32, bfloat16, and vLLM's new layer
        state = ROUNDING * (4 * N + 2 * N + 8 * N + gathered)
        assert found.total(phase) == pytest.approx(CONTEXT + share * GIB + state)
    for phase in ("load", "scoring", "update", "optimizer step"):
        assert "vLLM" not in found.phases[phase]
    assert "vLLM" not in found.persistent
    assert not {"KV cache", "unsharded parameters", "decoding"} & set(found.phases["sampling"])


def test_vllm_that_does_not_sleep_keeps_its_share():
    asleep, awake = (memory.estimate(workload(vllm__sleep=sleep, **COLOCATED)) for sleep in (True, False))
    assert awake.persistent["vLLM"] == 0.4 * GIB
    assert awake.total("sampling") == pytest.approx(asleep.total("sampling"))
    for phase in ("scoring", "update", "optimizer step"):
        assert awake.total(phase) - asleep.total(phase) == pytest.approx(0.4 * GIB)


@pytest.mark.parametrize("sleep", [True, False])
def test_the_host_keeps_the_weights_of_a_vllm_that_gets_adapters(sleep):
    work = of_7b(adapter=LoraConfig(rank=16), train__micro_batch_tokens=4096, vllm__sleep=sleep, **COLOCATED)
    assert memory.estimate(work).host == ({"vLLM weights": 2 * N_7B} if sleep else {})
    assert memory.estimate(advice.with_settings(work, {"vllm.adapters": False})).host == {}
    advice.check_host(work, 2 * N_7B)
    if sleep:
        with pytest.raises(ValueError, match=r"vllm.sleep needs 12.6 GiB per rank in the memory of the host"):
            advice.check_host(work, 2 * N_7B - 1)


@pytest.mark.parametrize(("space", "cache"), [(None, 1), ("3", 3)])
@pytest.mark.parametrize("sleep", [True, False])
def test_on_a_cpu_vllm_stays_in_all_phases(space, cache, sleep, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if space is not None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    found = memory.estimate(workload(device="cpu", vllm__sleep=sleep, **COLOCATED))
    native = memory.estimate(workload(device="cpu"))
    assert found.persistent["vLLM KV cache"] == cache * GIB
    assert found.persistent["vLLM weights"] == 4 * (N + 2 * LARGEST)  # and embedding and head, packed
    added = sum(size for use, size in found.persistent.items() if use.startswith("vLLM"))
    for phase in ("scoring", "update", "optimizer step"):
        assert found.total(phase) - native.total(phase) == pytest.approx(added)


def test_tensor_parallel_ranks_share_the_weights():
    found = memory.estimate(workload(device="cpu", world=2, vllm__tensor_parallel=2, **COLOCATED))
    assert found.persistent["vLLM weights"] == 4 * (N + 2 * LARGEST) / 2


def test_a_wrong_cache_space_is_named(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "half")
    with pytest.raises(ValueError, match="VLLM_CPU_KVCACHE_SPACE='half': expected a whole number of GiB"):
        memory.estimate(workload(device="cpu", **COLOCATED))


def test_merging_adapters_takes_a_block_parameter_in_float32():
    """In float32 two products and their sum; and in bfloat16 the frozen weight, gathered, copied, and vLLM's layer."""
    wide = Shape(**(vars(SHAPE) | {"vocab": 40}))
    gate_up = 2 * wide.ffn * wide.width
    found = memory.estimate(workload(wide, world=2, adapter=LoraConfig(rank=4), **COLOCATED))
    assert found.phases["sampling"]["gathered parameter"] == (3 * 4 + 3 * 2) * gate_up


def test_offline_algorithms_evaluate_with_nlgrpos_engine():
    changes = {"loss__algorithm": "dpo", "calibration__rollouts": "rollouts"}
    with_vllm, native = (memory.estimate(workload(**changes, **more)) for more in (SERVED, {}))
    assert "KV cache" in with_vllm.phases["evaluation"]
    assert with_vllm == native


@pytest.mark.parametrize("engine", [{}, COLOCATED, SERVED], ids=["nlgrpo", "colocated", "servers"])
def test_samples_of_the_reference_come_from_nlgrpos_engine(engine):
    work = workload(calibration__missing="draw", calibration__samples=100, rollout__max_rows=256, **engine)
    assert "reference samples" not in memory.estimate(work).phases
    next(iter(work.config.rewards.values())).transform = "log"
    cached = (2 * 9 + 2 * 100 * 6) * 2 * 4 * 8 * 2 * 2  # 2 prompts at a time; keys and values, 2 layers, bfloat16
    assert memory.estimate(work).phases["reference samples"]["KV cache"] == cached
    fewer = advice.with_settings(work, {"rollout.max_rows": 1})
    assert memory.estimate(fewer).phases["reference samples"]["KV cache"] == cached / 2


# --- advice -----------------------------------------------------------------------------------------------------------


def settings_of(text):
    """Settings that a message recommends."""
    options = text.split("fits with ")[1].split(",")[0].split()
    pairs = zip(options[::2], options[1::2], strict=True)
    return {key[2:]: {"True": True}[value] if value == "True" else float(value) for key, value in pairs}


def test_a_smaller_share_is_the_remedy_for_sampling():
    """7B with adapters and 0.9 of an H100: parameters, reference by its adapters, and Adam leave less than that."""
    work = of_7b(adapter=LoraConfig(rank=16), train__micro_batch_tokens=4096, vllm__gpu_memory=0.9, **COLOCATED)
    with pytest.raises(ValueError, match=r"in the phase (sampling|evaluation) \(most of it for vLLM, 71.2 GiB\)") as e:
        advice.check_fits(work, H100, "the GPU")
    (share,) = settings_of(str(e.value)).items()
    trained = 39_976_960
    others = CONTEXT + ROUNDING * (2 * N_7B + (4 + 8) * trained)  # and the gathered parameter, some 100 MiB
    free = (advice.FITS * H100 - others) / H100
    assert share[0] == "vllm.gpu_memory"
    assert share[1] <= free < share[1] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("sleep", [True, False])
@pytest.mark.parametrize("engine", [COLOCATED, SERVED], ids=["colocated", "servers"])
@pytest.mark.parametrize("world", [1, 8])
def test_settings_of_the_other_engine_are_no_remedy(engine, world, sleep):
    adapter = LoraConfig(rank=16) if world == 1 else None
    work = of_7b(world=world, adapter=adapter, rollout__prompts=8 * world, vllm__sleep=sleep, **engine)
    found = [advice.remedies(work, limit * GIB) for limit in range(16, 128, 8)]
    assert any("fits with" in text for text in found)
    for text in found:
        assert "max_rows" not in text
        assert "gather_for_sampling" not in text
    choice = advice.fitting(work, H100)
    assert choice is None or not {"parallel.gather_for_sampling", "rollout.max_rows"} & set(choice.settings)


def test_they_are_a_remedy_for_samples_of_the_reference():
    work = of_7b(adapter=LoraConfig(rank=16), calibration__missing="draw", train__micro_batch_tokens=4096,
                 rollout__max_rows=256, **SERVED)  # fmt: skip
    next(iter(work.config.rewards.values())).transform = "log"
    found = memory.estimate(work)
    assert found.largest == "reference samples"
    assert "rollout.max_rows" in settings_of(advice.remedies(work, 0.99 * found.peak))


def test_sleeping_is_the_remedy_for_the_update():
    """The update needs gradients, 3.1 GiB per rank, and sampling does not."""
    work = of_7b(world=8, rollout__prompts=64, model__activation_checkpointing=True, train__micro_batch_tokens=1024,
                 vllm__gpu_memory=0.2, vllm__sleep=False, **COLOCATED)  # fmt: skip
    awake, asleep = memory.estimate(work), memory.estimate(advice.with_settings(work, {"vllm.sleep": True}))
    assert (awake.largest, asleep.largest) == ("update", "sampling")
    assert settings_of(advice.remedies(work, 1.001 * asleep.peak / advice.FITS)) == {"vllm.sleep": True}


def test_a_share_that_cannot_hold_the_model_is_refused():
    needed = 2 * N_7B + (512 + 512) * 2 * 32 * 128 * 32 * 2  # weights, and the cache of one completion
    enough, little = (needed / H100 + difference for difference in (1e-6, -1e-6))
    advice.check_fits(of_7b(vllm__gpu_memory=enough, adapter=LoraConfig(rank=16), train__micro_batch_tokens=4096,
                       **COLOCATED), H100, "the GPU")  # fmt: skip
    work = of_7b(vllm__gpu_memory=little, adapter=LoraConfig(rank=16), **COLOCATED)
    with pytest.raises(ValueError, match=r"vLLM needs at least 13.1 GiB .* raise it, or vllm.tensor_parallel, or set"):
        advice.check_fits(work, H100, "the GPU")
    advice.check_fits(advice.with_settings(work, {"train.check_memory": False}), H100, "the GPU")
    halves = of_7b(vllm__gpu_memory=0.6 * little, vllm__tensor_parallel=2, world=2, adapter=LoraConfig(rank=16),
                   train__micro_batch_tokens=4096, rollout__prompts=16, **COLOCATED)  # fmt: skip
    advice.check_fits(halves, H100, "the GPU")


def test_a_share_without_room_for_the_model_is_no_remedy():
    """7B needs 13.1 GiB: of 79.1 GiB, 0.2 is enough, and 0.1 is not."""
    work = of_7b(adapter=LoraConfig(rank=16), **COLOCATED)
    least = {"parallel.offload": True, "model.activation_checkpointing": True, "train.micro_batch_tokens": 1024}
    assert memory.estimate(advice.with_settings(work, least | {"vllm.gpu_memory": 0.1})).peak < 0.95 * 18 * GIB
    assert "use more ranks" in advice.remedies(work, 18 * GIB)
    assert settings_of(advice.remedies(work, 26 * GIB))["vllm.gpu_memory"] == 0.2


@pytest.mark.slow
def test_recommended_settings_lower_the_share():
    work = of_7b(adapter=LoraConfig(rank=16), train__micro_batch_tokens=4096, vllm__gpu_memory=0.9, **COLOCATED)
    choice = advice.fitting(work, H100)
    assert 0.2 <= choice.settings["vllm.gpu_memory"] < 0.9
    assert memory.estimate(advice.with_settings(work, choice.settings)).peak <= advice.FITS * H100


# --- what is printed --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "7b"
    LlamaConfig().save_pretrained(folder)
    return ["--model.path", str(folder), "--gpu", "h100", "--gpus", "8", "--rollout.prompts", "8"]


def test_the_command_says_that_servers_sample(model, capsys):
    options = [*model, "--rollout.engine", "vllm", "--vllm.servers", *SERVERS]
    assert plan.main(options) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "vLLM on 2 servers; evaluations too" in out
    assert plan.main([*options, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["phases"]) == ["load", "hand-over", "scoring", "update", "optimizer step"]


def test_the_command_counts_the_share_of_the_named_gpu(model, capsys):
    options = [*model, "--rollout.engine", "vllm", "--vllm.gpu_memory", "0.3", "--json", "-"]
    assert plan.main(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["phases"]["sampling"]["vLLM"] == round(0.3 * 79.1 * GIB)


def test_the_command_refuses_a_share_that_is_too_small(model):
    with pytest.raises(ValueError, match=r"vllm.gpu_memory = 0.1 is 7.9 GiB of the GPU, but vLLM needs at least"):
        plan.main([*model, "--rollout.engine", "vllm", "--vllm.gpu_memory", "0.1"])


def test_a_run_prints_its_engine(capsys):
    engine = ["length-bon", "--dry-run", "--rollout.engine", "vllm"]
    assert train.main([*engine, "--vllm.servers", *SERVERS, "--rollout.ahead", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "vLLM on 2 servers, up to 1 step ahead; evaluations too" in out
    assert "hand-over" in out
    assert "rollout.ahead = 1: completions are up to 1 step old" in out
    assert train.main(engine) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "vLLM in the processes of the trainer" in out
    assert "vLLM KV cache 1.0 GiB" in out
    assert "note" not in out
