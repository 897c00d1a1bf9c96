"""Whole training runs on a GPU with one rank: NCCL, FSDP2, background checkpoints, offloading and compiling.

In float32 they are compared with the same run on the CPU. In bfloat16, where sampled tokens may differ, gradients of
the sharded model are compared with those of float32.
"""

import json
from functools import partial

import pytest
import torch
from precision import check, error
from support.helpers import tiny_model

from nlgrpo import train
from nlgrpo.kernels import linear_logprob
from nlgrpo.model import adapters, decoder, fsdp
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.supervision import process_group
from nlgrpo.sections import ParallelConfig
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("no_figures", "one_thread")

LENGTHS = [17, 1, 40, 2]
SHOWN = ("loss", "entropy", "grad_norm", "kl", "value", "reward")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A model and prompts."""
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "model")
    lines = [json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(8)]
    (root / "prompts.jsonl").write_text("".join(lines))
    return root


def run(work, name, device, **changes):
    """Train with ``section__key`` changes, on a device that the command chooses itself; return its log."""
    options = {
        "model.path": work / "model",
        "model.dtype": "float32",
        "data.source": work / "prompts.jsonl",
        "rewards.short.function": "length(target=3, scale=10)",
        "rollout.prompts": 2,
        "rollout.samples": 4,
        "rollout.max_new_tokens": 6,
        "loss.beta": 0.1,
        "optim.lr": 1e-3,
        "train.steps": 2,
        "train.out": work / name,
        "evaluation.prompts": 0,
    }
    options |= {key.replace("__", "."): value for key, value in changes.items()}
    arguments = [str(part) for key, value in options.items() for part in (f"--{key}", value)]
    with pytest.MonkeyPatch.context() as patched:
        if device.type == "cpu":
            patched.setattr(torch.cuda, "is_available", lambda: False)
        assert train.main(["blank", *arguments]) == 0
    return read_jsonl(work / name / "metrics.jsonl")


def numbers(log):
    """Metrics that depend on tokens, losses and gradients, of all steps."""
    lines = [[line[key] for key in sorted(line) if key.startswith(SHOWN)] for line in log]
    return torch.tensor(lines, dtype=torch.float64)


CPU = torch.device("cpu")


def test_a_run_in_float32(gpu_or_cpu, work):
    place = gpu_or_cpu.type
    found = run(work, f"{place}-found", gpu_or_cpu)
    truth = run(work, f"{place}-truth", CPU)
    planted = run(work, f"{place}-planted", CPU, rollout__temperature=1.02)
    check(numbers(found), numbers(truth), 1e-3, planted=numbers(planted))


def test_background_checkpoints_and_resuming(gpu_or_cpu, work):
    """The second background checkpoint is as good as the first, and a resumed run goes the same way."""
    place = gpu_or_cpu.type
    saving = {"train__checkpoint_every": 1, "train__async_save": True}
    whole = run(work, f"{place}-whole", gpu_or_cpu, train__steps=4, **saving)
    run(work, f"{place}-parts", gpu_or_cpu, train__steps=3, **saving)
    parts = run(work, f"{place}-parts", gpu_or_cpu, train__steps=4, **saving)
    assert [line["step"] for line in parts] == [0, 1, 2, 3]
    other = run(work, f"{place}-other", CPU, train__steps=4, train__seed=1)
    check(numbers(parts), numbers(whole), 1e-3, planted=numbers(other))


SETTINGS = {
    "sharded": {"model__dtype": "bfloat16"},
    "offloaded": {"model__dtype": "bfloat16", "parallel__offload": True},
    "gathered by block": {"model__dtype": "bfloat16", "parallel__gather_for_sampling": "block"},
    "adapters": {"model__dtype": "bfloat16", "lora__rank": 2},
    "critic": {"model__dtype": "bfloat16", "loss__algorithm": "ppo"},
    "muon": {"model__dtype": "bfloat16", "optim__algorithm": "muon"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_runs_in_bfloat16_save_and_resume(gpu_or_cpu, work, name):
    """Tokens may differ from those in float32, but the entropy of the first step is near."""
    folder = f"{gpu_or_cpu.type}-{name.replace(' ', '-')}"
    run(work, folder, gpu_or_cpu, train__steps=1, **SETTINGS[name])
    log = run(work, folder, gpu_or_cpu, train__steps=2, **SETTINGS[name])
    assert [line["step"] for line in log] == [0, 1]
    plain = run(work, f"{folder}-plain", CPU, train__steps=1, **(SETTINGS[name] | {"model__dtype": "float32"}))
    assert log[0]["entropy"] == pytest.approx(plain[0]["entropy"], rel=0.1)
    assert log[1]["grad_norm"] > 0


def test_rows_that_are_decoded_together_do_not_change_the_run(gpu_or_cpu, work):
    """By default, on a GPU, as many as fit into its free memory."""
    place = gpu_or_cpu.type
    many = run(work, f"{place}-many", gpu_or_cpu, train__steps=1)
    few = run(work, f"{place}-few", gpu_or_cpu, train__steps=1, rollout__max_rows=4)
    other = run(work, f"{place}-other-seed", CPU, train__steps=1, train__seed=1)
    check(numbers(few), numbers(many), 1e-3, planted=numbers(other))


# --- gradients of a sharded model -------------------------------------------------------------------------------------


def gradients(model, device, scale=1.0):
    """Gradients of a loss of packed sequences, in the order of the parameters."""
    tokens = torch.randint(3, 99, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    picked = torch.arange(sum(LENGTHS) - 1)
    head = partial(linear_logprob, targets=tokens[1:].to(device))
    logprob, _ = model(tokens.to(device), LENGTHS, picked.to(device), head)
    (scale * logprob.mean()).backward()
    found = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            grad = parameter.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            found.append(whole.flatten().float().cpu())
    return torch.cat(found)


PARALLEL = {"sharded": ParallelConfig(), "offloaded": ParallelConfig(offload=True)}


@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=3)], ids=["", "lora"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_gradients_of_a_sharded_model(gpu_or_cpu, models, parallel, adapter):
    with pytest.MonkeyPatch.context() as patched:
        if gpu_or_cpu.type == "cpu":
            patched.setattr(torch.cuda, "is_available", lambda: False)
        with process_group.start() as ranks:
            options = {"adapter": adapter, "ranks": ranks, "compute": torch.bfloat16, "parallel": PARALLEL[parallel]}
            prepare = partial(fsdp.prepare, **options)
            model = decoder.load(models("qwen2"), device=ranks.device, shard=prepare)
            if adapter is not None:
                adapters.init_adapters(model, adapter, 0)
            found = gradients(model, ranks.device)
            del model
    plain = decoder.load(
        models("qwen2"), shard=None if adapter is None else partial(adapters_in_float32, config=adapter)
    )
    if adapter is not None:
        adapters.init_adapters(plain, adapter, 0)
    truth = gradients(plain, CPU)
    check(found, truth, 0.05, planted=1.1 * truth)


def adapters_in_float32(model, config):
    from nlgrpo.model import lora

    lora.attach(model, config, torch.float32)


def test_compiled_blocks(gpu_or_cpu, models):
    """In float32; on a CPU with a backend that does not compile, which takes less time."""
    backend = "inductor" if gpu_or_cpu.type == "cuda" else "aot_eager"
    model = decoder.load(models("qwen2"), device=gpu_or_cpu)
    model.configure(compiled=True, backend=backend)
    found = gradients(model, gpu_or_cpu)
    truth = gradients(decoder.load(models("qwen2")), CPU)
    check(found, truth, 1e-4, planted=1.01 * truth)
    assert error(found, truth) > 0 or gpu_or_cpu.type == "cpu"
