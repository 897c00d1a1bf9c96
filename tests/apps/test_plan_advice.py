"""Settings with which runs fit, by the estimate of their memory, and the refusal of runs that do not fit."""

import dataclasses

import pytest
import torch

from nlgrpo import train
from nlgrpo.apps.plan import advice, memory, sampling_memory
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
H100 = GPUS["h100"].memory


def workload(adapter=None, world=1, shape=LLAMA_7B, **changes):
    cfg = recipe("length-bon")
    for key, value in ({"rollout__prompts": 8, "rollout__max_new_tokens": 512} | changes).items():
        section, name = key.split("__")
        setattr(getattr(cfg, section), name, value)
    return Workload(cfg, shape, adapter, torch.bfloat16, "cuda", world, 512, process=CONTEXT)


def peak(work, settings):
    return memory.estimate(advice.with_settings(work, settings)).peak


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"rollout__max_rows": 256}, {"rollout.max_rows"}),
        ({"rollout__max_rows": 64, "train__micro_batch_tokens": 65536}, {"train.micro_batch_tokens"}),
        (
            {"rollout__max_rows": 256, "train__micro_batch_tokens": 65536},
            {"rollout.max_rows", "train.micro_batch_tokens"},
        ),
    ],
)
def test_each_change_is_needed_to_fit(changes, keys):
    work = workload(LoraConfig(rank=16), rollout__prompts=32, **changes)
    limit = advice.FITS * H100
    choice = advice.fitting(work, H100)
    assert choice.settings.keys() == keys
    assert peak(work, choice.settings) == choice.peak <= limit
    for key in keys:
        others = {name: value for name, value in choice.settings.items() if name != key}
        assert peak(work, others) > limit


def test_settings_that_fit_are_kept():
    work = workload(LoraConfig(rank=16), train__micro_batch_tokens=8192, rollout__max_rows=64)
    assert advice.fitting(work, H100).settings == {}


def test_replicas_that_do_not_fit_are_sharded():
    """A whole state of 7B, of 18 bytes a parameter, on each GPU, or an eighth of it."""
    work = workload(world=8, rollout__max_rows=8, parallel__replicate=8)
    assert peak(work, {}) > 18 * LLAMA_7B.parameters > H100
    assert advice.fitting(work, H100).settings == {"parallel.replicate": 1}


def test_a_model_that_fits_with_no_settings_needs_more_gpus_or_adapters():
    work = workload()
    assert advice.fitting(work, H100) is None
    more, adapters, offloaded = advice.alternatives(work, H100, 8)
    assert offloaded.options.startswith("--parallel.offload True")
    assert offloaded.host == 18 * LLAMA_7B.parameters
    assert "in the memory of the host" in str(offloaded)
    assert more.change in ("2 GPUs", "4 GPUs")
    assert more.options.startswith(f"--gpus {more.change[0]}")
    assert adapters.options.startswith("--lora.rank 16")


def test_more_gpus_fill_whole_nodes():
    """70B needs 64 of these GPUs; in nodes of 3 only 3 x 2^n of them fill all nodes."""
    work = workload(world=3, shape=LLAMA_70B, rollout__prompts=3, model__activation_checkpointing=True)
    more = advice.alternatives(work, H100, 3)[0]
    number = int(more.change.split()[0])
    assert number % 3 == 0
    settings = dict(zip(more.options.split()[::2], more.options.split()[1::2], strict=True))
    assert int(settings["--rollout.prompts"]) % number == 0
    fewer = dataclasses.replace(advice.with_settings(work, {"rollout.prompts": number // 2}), world=number // 2)
    assert advice.fitting(fewer, H100) is None


@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=16)], ids=["full", "lora"])
def test_as_many_rows_as_fit_are_decoded(adapter):
    """By default on a GPU whose memory is known: one more prompt would not fit."""
    work = workload(adapter, world=1 if adapter else 8, rollout__prompts=512, train__micro_batch_tokens=4096)
    work = dataclasses.replace(work, gpu_memory=H100)
    limit = advice.FITS * H100
    assert memory.estimate(work).total("sampling") <= limit
    assert "rollout.max_rows" not in advice.fitting(work, H100).settings
    prompts, rows = sampling_memory.rows(work, 512, 8)
    assert rows == 8 * prompts < 512
    more = advice.with_settings(work, {"rollout.max_rows": rows + rows // 6})
    assert memory.estimate(more).total("sampling") > limit


@pytest.mark.slow
def test_adapters_are_not_suggested_twice():
    shape = dataclasses.replace(LLAMA_7B, layers=120, windows=(None,) * 120, scales=(1.0,) * 120)
    found = advice.alternatives(workload(LoraConfig(rank=16), shape=shape), H100, 8)
    assert found[0].change.endswith("GPUs")
    assert "adapters" not in " ".join(map(str, found))


def test_a_run_that_does_not_fit_is_refused_with_settings_that_do():
    work = workload(LoraConfig(rank=16), rollout__max_rows=256)
    message = r"needs about 101.3 GiB .* evaluation .*KV cache, 68.0 GiB\), but the GPU has 79.1 GiB; it fits with"
    with pytest.raises(ValueError, match=message) as e:
        advice.check_fits(work, H100, "the GPU")
    options = str(e.value).split("fits with ")[1].split(",")[0].split()
    settings = {k[2:]: {"True": True}.get(v) or int(v) for k, v in zip(options[::2], options[1::2], strict=True)}
    assert memory.estimate(advice.with_settings(work, settings)).peak <= H100


def test_a_model_that_is_larger_than_a_gpu_is_sampled_by_block():
    work = workload(world=64, shape=LLAMA_70B, rollout__prompts=64, model__activation_checkpointing=True)
    with pytest.raises(ValueError, match=r"it fits with --parallel.gather_for_sampling block, or set") as e:
        advice.check_fits(work, H100, "the GPU")
    assert "unsharded parameters" in str(e.value)
    block = advice.with_settings(work, {"parallel.gather_for_sampling": "block"})
    assert memory.estimate(block).peak <= H100


def test_the_whole_model_is_gathered_where_it_fits():
    """Fewer rows are preferred to gathering by block, where each of the two fits."""
    work = workload(world=8, rollout__prompts=256, rollout__max_rows=256, model__activation_checkpointing=True)
    limit = 1.001 * peak(work, {"parallel.gather_for_sampling": "block"}) / advice.FITS
    assert advice.fitting(work, limit).settings == {"rollout.max_rows": 64}


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
    advice.check_fits(workload(train__check_memory=False), H100, "the GPU")


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
