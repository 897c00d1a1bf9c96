"""Recommended settings against a search by hand, and the refusal of runs that do not fit."""

import dataclasses

import pytest
import torch

from nlgrpo import train
from nlgrpo.apps.plan import advice, memory, roofline, sampling_memory
from nlgrpo.apps.plan.machine import Machine
from nlgrpo.apps.plan.workload import CONTEXT, Workload
from nlgrpo.config.recipes import recipe
from nlgrpo.model.architectures import Shape
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime import host_memory
from nlgrpo.runtime.device import GPUS

GIB = 2**30
LLAMA_7B = Shape("llama", vocab=32000, width=4096, layers=32, heads=32, kv_heads=32, head_dim=128, ffn=11008,
                 context=4096, rotary_dim=128, windows=(None,) * 32, scales=(0.088,) * 32)  # fmt: skip
LLAMA_70B = dataclasses.replace(LLAMA_7B, width=8192, layers=80, heads=64, kv_heads=8, ffn=28672,
                                windows=(None,) * 80, scales=(0.088,) * 80)  # fmt: skip
H100 = Machine(GPUS["h100"], 8)


def workload(adapter=None, world=1, shape=LLAMA_7B, **changes):
    cfg = recipe("length-bon")
    for key, value in ({"rollout__prompts": 8, "rollout__max_new_tokens": 512} | changes).items():
        section, name = key.split("__")
        setattr(getattr(cfg, section), name, value)
    return Workload(cfg, shape, adapter, torch.bfloat16, "cuda", world, 512, process=CONTEXT)


def test_recommended_settings_fit_and_are_the_fastest_that_fit():
    work, limit = workload(LoraConfig(rank=16)), advice.FITS * H100.gpu.memory
    choice = advice.best(work, H100, limit)
    variant = advice.with_settings(work, choice.settings)
    assert memory.estimate(variant).peak == choice.peak <= limit
    seconds = []
    for budget in (2048, 4096, 8192, 16384):
        for checkpointing in (False, True):
            for rows in (8, 16, 32, 64, 256):
                settings = {"train.micro_batch_tokens": budget, "rollout.max_rows": rows,
                            "model.activation_checkpointing": checkpointing}  # fmt: skip
                other = advice.with_settings(work, settings)
                if memory.estimate(other).peak <= limit:
                    seconds.append(sum(roofline.seconds(other, H100).values()))
    assert choice.seconds * advice.FASTER <= min(seconds)


def test_settings_that_fit_are_kept():
    work = workload(LoraConfig(rank=16), train__micro_batch_tokens=8192, rollout__max_rows=64)
    assert advice.best(work, H100, advice.FITS * H100.gpu.memory).settings == {}


def test_a_model_that_fits_with_no_settings_needs_more_gpus_or_adapters():
    work = workload()
    assert advice.best(work, H100, advice.FITS * H100.gpu.memory) is None
    more, adapters, offloaded = advice.alternatives(work, H100)
    assert offloaded.options.startswith("--parallel.offload True")
    assert offloaded.host == 18 * LLAMA_7B.parameters
    assert "in the memory of the host; about" in str(offloaded)
    assert more.change in ("2 GPUs", "4 GPUs")
    assert more.options.startswith(f"--gpus {more.change[0]}")
    assert adapters.options.startswith("--lora.rank 16")


@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=16)], ids=["full", "lora"])
def test_as_many_rows_as_fit_are_recommended(adapter):
    """By default on a GPU whose memory is known: fewer rows are slower, and one more prompt would not fit."""
    work = workload(adapter, world=1 if adapter else 8, rollout__prompts=512, train__micro_batch_tokens=4096)
    work = dataclasses.replace(work, gpu_memory=H100.gpu.memory)
    limit = advice.FITS * H100.gpu.memory
    assert memory.estimate(work).total("sampling") <= limit
    choice = advice.best(work, H100, limit)
    assert "rollout.max_rows" not in choice.settings
    few = advice.best(advice.with_settings(work, {"rollout.max_rows": 8}), H100, limit)
    assert few.settings["rollout.max_rows"] is None
    assert "--rollout.max_rows None" in few.options
    prompts, rows = sampling_memory.rows(work, 512, 8)
    assert rows == 8 * prompts < 512
    more = advice.with_settings(work, {"rollout.max_rows": rows + rows // 6})
    assert memory.estimate(more).total("sampling") > limit


@pytest.mark.slow
def test_adapters_are_not_suggested_twice():
    shape = dataclasses.replace(LLAMA_7B, layers=120, windows=(None,) * 120, scales=(1.0,) * 120)
    found = advice.alternatives(workload(LoraConfig(rank=16), shape=shape), H100)
    assert found[0].change.endswith("GPUs")
    assert "adapters" not in " ".join(map(str, found))


def test_a_run_that_does_not_fit_is_refused_with_settings_that_do():
    work = workload(LoraConfig(rank=16), rollout__max_rows=256)
    message = r"needs about 101.3 GiB .* evaluation .*KV cache, 68.0 GiB\), but the GPU has 79.1 GiB; it fits with"
    with pytest.raises(ValueError, match=message) as e:
        advice.check_fits(work, H100.gpu.memory, "the GPU")
    options = str(e.value).split("fits with ")[1].split(",")[0].split()
    settings = {k[2:]: {"True": True}.get(v) or int(v) for k, v in zip(options[::2], options[1::2], strict=True)}
    assert memory.estimate(advice.with_settings(work, settings)).peak <= H100.gpu.memory


def test_a_model_that_is_larger_than_a_gpu_is_sampled_by_block():
    work = workload(world=64, shape=LLAMA_70B, rollout__prompts=64, model__activation_checkpointing=True)
    with pytest.raises(ValueError, match=r"it fits with --parallel.gather_for_sampling block, or set") as e:
        advice.check_fits(work, H100.gpu.memory, "the GPU")
    assert "unsharded parameters" in str(e.value)
    block = advice.with_settings(work, {"parallel.gather_for_sampling": "block"})
    assert memory.estimate(block).peak <= H100.gpu.memory


def test_the_whole_model_is_gathered_where_it_fits():
    """Also where the time for gathering by block would be hidden."""
    work = workload(world=8, rollout__max_new_tokens=1, rollout__max_rows=8)
    choice = advice.best(work, H100, advice.FITS * H100.gpu.memory)
    assert "parallel.gather_for_sampling" not in choice.settings


def test_the_host_must_hold_what_is_offloaded():
    work = workload(parallel__offload=True)
    needed = 18 * LLAMA_7B.parameters  # float32 shards, gradients and two moments, a reference in bfloat16
    advice.check_host(work, needed)
    with pytest.raises(ValueError, match=r"parallel.offload needs 113.0 GiB per rank in the memory of the host"):
        advice.check_host(work, needed - 1)
    advice.check_host(workload(), 0)


def test_a_run_that_fits_with_no_settings_is_refused():
    with pytest.raises(ValueError, match="use more ranks, adapters"):
        advice.check_fits(workload(), 2 * GIB, "the GPU")


def test_the_refusal_can_be_turned_off():
    advice.check_fits(workload(train__check_memory=False), H100.gpu.memory, "the GPU")


def test_training_is_refused_on_a_machine_that_is_too_small(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(host_memory, "of_machine", lambda: (200 * 2**20, 100 * 2**20))
    out = tmp_path / "run"
    assert train.main(["length-bon", "--train.out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "the run needs about" in error
    assert "the machine has 200.0 MiB" in error
    assert not out.exists()
    assert train.main(["length-bon", "--train.out", str(out), "--dry-run"]) == 2
    assert train.main(["length-bon", "--train.out", str(out), "--dry-run", "--train.check_memory", "False"]) == 0


def test_ranks_of_a_machine_share_its_memory(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(host_memory, "of_machine", lambda: (2**32, 2**32))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert train.main(["length-bon", "--train.out", str(tmp_path / "run"), "--dry-run"]) == 2
    assert "each of 8 ranks of the machine has 512.0 MiB" in capsys.readouterr().err
