"""The helpful and harmless experiment (IAMA, 6.2): checks of the recipe for 6 GPUs and of its small CPU version."""

import dataclasses
import json
import subprocess
import sys
import textwrap
import tomllib

import pytest
import torch
import transformers
from support.helpers import REPOSITORY, tiny_config, tiny_model

from nlgrpo import train
from nlgrpo.apps.plan import memory, table
from nlgrpo.config import comparing, schema
from nlgrpo.config.recipes import from_arguments, recipe
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.build import build_setup

ALPACA = {"vocab_size": 32001, "architectures": ["LlamaForCausalLM"]}  # the other defaults of LlamaConfig are Llama 7B
PARAMETERS = 6_738_415_616 + 2 * 4096  # those of Llama 7B, with one more token in embedding and head
GIB = 2**30


def test_the_recipe_has_the_settings_of_the_paper():
    """Table 2 and appendix I: 48 completions per step, 8 per GPU and per group, and the settings of the KL."""
    cfg = recipe("helpful-harmless")
    assert (cfg.rollout.prompts * cfg.rollout.samples, cfg.rollout.samples) == (48, 8)
    assert (cfg.optim.lr, cfg.optim.schedule, cfg.train.steps) == (1e-6, "linear", 1000)
    assert (cfg.loss.beta, cfg.loss.target_kl, cfg.loss.scale, cfg.loss.eps_low) == (1e-2, 0.1, "none", 0.2)
    assert [reward.objective for reward in cfg.rewards.values()] == ["bon:4", "bon:4"]
    assert (cfg.data.evaluation_split, cfg.evaluation.prompts) == ("test", 1000)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A config of the 7B model without weights, two small reward models, and prompts, in the current folder."""
    monkeypatch.chdir(tmp_path)
    tiny_model(tmp_path / "alpaca")
    (tmp_path / "alpaca" / "model.safetensors").unlink()
    transformers.LlamaConfig(**ALPACA).save_pretrained(tmp_path / "alpaca")
    for name in ("helpful", "harmless"):
        tiny_model(tmp_path / "runs" / name / "model")
        scorer = transformers.LlamaForSequenceClassification(tiny_config(num_labels=1))
        scorer.save_pretrained(tmp_path / "runs" / name / "model")
    for name, second in (("train", 2), ("test", 3)):
        rows = [{"chosen": f"\n\nHuman: w{i} w{second}\n\nAssistant: w3 w{i}"} for i in range(24)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--data.source", "train.jsonl", "--data.evaluation", "test.jsonl", "--data.evaluation-split", "train"]
    return ["--model.path", "alpaca", *data]


def test_the_recipe_of_7b_has_a_plan(parts, capsys):
    assert train.main(["helpful-harmless", *parts, "--dry-run", "--train.check_memory", "False"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"llama, {PARAMETERS:,} parameters, context 2048" in shown
    assert "maximise 0.5 bon:4(helpful) + 0.5 bon:4(harmless) - 0.01 KL" in shown
    assert "6 prompts x 8 samples = 48 completions of up to 256 tokens" in shown


def test_6_gpus_of_80_gb_hold_it(parts):
    """By the plan's estimate, with prompts of 512 tokens and the memory of two 4B reward models in bfloat16 added."""
    cfg, _ = from_arguments(["helpful-harmless", *parts, "--model.dtype", "bfloat16"])
    run = build_setup(cfg, Ranks(0, 1, torch.device("cpu")))
    run.prompts.ids[0] = [1] * 512
    on_gpus = dataclasses.replace(run, ranks=Ranks(0, 6, torch.device("cuda")))
    plan = memory.estimate(table.workload(on_gpus))
    small = sum(reward.function.nbytes for reward in run.sampler.rewards)
    assert plan.persistent["reward models"] == small > 0
    state = plan.persistent["parameters"] + sum(plan.phases["optimizer step"].values())
    assert state == pytest.approx(PARAMETERS * 16 / 6, rel=1e-12)
    assert plan.persistent["reference"] == pytest.approx(PARAMETERS * 2 / 6, rel=1e-12)
    total = plan.peak - small + 2 * 4.0e9 * 2
    assert 40 * GIB < total < 74 * GIB


@pytest.mark.slow
def test_the_7b_model_on_meta_tensors():
    """Shapes equal transformers', gradients are computed, each of 6 ranks has a sixth, and no memory is used."""
    code = f"""
    import resource
    import torch, transformers
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from nlgrpo.model import decoder
    from nlgrpo.model.fsdp import shard
    from nlgrpo.runtime.distributed import Ranks

    config = transformers.LlamaConfig(**{ALPACA!r})
    ours = decoder.blueprint(config)
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config)
    count = sum(p.numel() for p in ours.parameters())
    assert count == sum(p.numel() for p in theirs.parameters()), count

    ours.inv_freq = torch.empty(ours.shape.rotary_dim // 2, device="meta")
    ours.activation_checkpointing = True
    logits = ours(torch.empty(768, dtype=torch.long, device="meta"), [500, 268])
    assert logits.shape == (768, 32001)
    logits.sum().backward()
    assert all(p.grad.shape == p.shape for p in ours.parameters())
    ours.zero_grad()

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=6)
    shard(ours, Ranks(5, 6, torch.device("cpu")), torch.bfloat16)
    held = sum(p.to_local().numel() for p in ours.parameters())
    uneven = sum(5 * p[0].numel() for p in theirs.parameters())  # 6 does not divide the numbers of rows
    assert abs(held - count / 6) <= uneven, (held, count / 6, uneven)
    assert {{p.device.type for p in ours.parameters()}} == {{"meta"}}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20  # KiB; the weights are 27 GB
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_cpu_version_differs_in_size_only():
    """Objectives, group size, target KL and scaling are those of the recipe."""
    path = REPOSITORY / "experiments" / "configs" / "helpful_harmless.toml"
    small, _ = from_arguments([str(path)])
    large = recipe("helpful-harmless")
    changed = {line.split(":")[0] for line in comparing.differences(schema.to_dict(large), schema.to_dict(small))}
    written = tomllib.loads(path.read_text())
    in_toml = {f"{name}.{key}" for name, section in written.items() if isinstance(section, dict) for key in section}
    sections = {".".join(name.split(".")[:2]) for name in changed}
    assert sections <= in_toml
    assert not sections & {"loss.target_kl", "loss.scale", "rollout.samples", "rollout.temperature"}
    assert {name for name in changed if name.startswith("rewards.")} == {
        "rewards.helpful.function",
        "rewards.harmless.function",
    }
