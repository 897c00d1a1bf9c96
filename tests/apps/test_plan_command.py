"""``nlgrpo plan``: what it prints for 7B and 70B, its JSON, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForSequenceClassification, LlamaConfig

from nlgrpo import cli
from nlgrpo.apps.plan import plan
from nlgrpo.model.attention import takes_fewer_key_heads
from nlgrpo.runtime.console import size
from nlgrpo.runtime.device import GPUS, gpu_named, gpu_of_device

GIB = 2**30
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "plan.md"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("models")
    LlamaConfig().save_pretrained(folder / "7b")
    LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                num_key_value_heads=8, max_position_embeddings=4096).save_pretrained(folder / "70b")  # fmt: skip
    return folder


def record(capsys, *arguments, status=0):
    assert plan.main(["length-bon", *map(str, arguments), "--json", "-"]) == status
    return json.loads(capsys.readouterr().out)


def test_7b_with_lora_fits_one_80_gb_gpu(models, capsys):
    found = record(capsys, "--model.path", models / "7b", "--gpu", "h100", "--lora.rank", 16, "--rollout.prompts", 8,
                   "--rollout.max_new_tokens", 512, "--train.micro_batch_tokens", 8192, "--rollout.max_rows", 64,
                   "--prompt-tokens", 512)  # fmt: skip
    assert found["fits"]
    assert found["parameters"] == 6_738_415_616
    assert found["persistent"]["parameters"] == 2 * 6_738_415_616 + 4 * 39_976_960  # bfloat16, adapters in float32
    assert "unsharded parameters" not in found["phases"]["update"]
    assert found["phases"]["sampling"]["KV cache"] == (8 * 512 + 64 * 512) * 2 * 32 * 128 * 32 * 2
    assert list(found["phases"]) == ["load", "sampling", "evaluation", "scoring", "update", "optimizer step"]
    assert found["recommended"]["settings"] == {}


def test_7b_is_trained_on_8(models, capsys):
    arguments = ("--model.path", models / "7b", "--gpus", 8, "--rollout.prompts", 64, "--rollout.max_new_tokens", 512)
    good = record(capsys, *arguments, "--gpu", "h100")
    assert good["fits"]
    assert good["persistent"]["parameters"] == 4 * 6_738_415_616 // 8
    assert good["phases"]["optimizer step"]["optimizer"] == 8 * 6_738_415_616 // 8


def test_recommended_settings_make_a_run_fit(models, capsys):
    arguments = ("--model.path", models / "7b", "--gpu", "l40s", "--gpus", 8, "--rollout.prompts", 64)
    found = record(capsys, *arguments, "--rollout.max_new_tokens", 512, status=1)
    better = [part for key, value in found["recommended"]["settings"].items() for part in (f"--{key}", value)]
    good = record(capsys, *arguments, "--rollout.max_new_tokens", 512, *better)
    assert good["fits"]
    assert good["peak_bytes"] == found["recommended"]["peak_bytes"]


def test_offloaded_shards_are_in_the_memory_of_the_host(models, capsys):
    arguments = ("--model.path", models / "7b", "--gpu", "h100", "--rollout.prompts", 8, "--rollout.max_rows", 64,
                 "--model.activation_checkpointing", True, "--train.micro_batch_tokens", 4096)  # fmt: skip
    plain = record(capsys, *arguments, status=1)
    found = record(capsys, *arguments, "--parallel.offload", True)
    parameters = plain["parameters"]
    assert plain["host"] == {}
    assert "--parallel.offload True" in plain["alternatives"][-1]["options"]
    state = {"parameters": 4, "reference": 2, "gradients": 4, "optimizer": 8}
    assert found["host"] == {name: size * parameters for name, size in state.items()}
    assert found["fits"]
    assert "parameters" not in found["persistent"]
    assert not {"gradients", "optimizer"} & set(found["phases"]["update"])


def test_70b_on_64_must_be_sampled_by_block(models, capsys):
    arguments = ("--model.path", models / "70b", "--gpu", "h100", "--gpus", 64, "--rollout.prompts", 64)
    found = record(capsys, *arguments, status=1)
    assert found["recommended"]["settings"]["parallel.gather_for_sampling"] == "block"
    assert found["phases"]["sampling"]["unsharded parameters"] == 2 * found["parameters"]
    good = record(capsys, *arguments, "--parallel.gather_for_sampling", "block",
                  "--model.activation_checkpointing", True)  # fmt: skip
    assert good["fits"]
    assert good["phases"]["sampling"]["unsharded parameters"] < 10 * GIB


def test_what_fits_with_no_settings_gets_alternatives(models, capsys):
    """Each alternative, added to the command, is a plan that fits, with the peak that was promised."""
    arguments = ("--model.path", models / "7b", "--gpu", "l40s", "--prompt-tokens", 64)
    found = record(capsys, *arguments, status=1)
    assert found["recommended"] is None
    assert [a["change"] for a in found["alternatives"]] == ["4 GPUs", "adapters (LoRA)", "shards on the host"]
    assert "--rollout.prompts 8" in found["alternatives"][0]["options"]
    for alternative in found["alternatives"]:
        good = record(capsys, *arguments, *alternative["options"].split())
        assert good["peak_bytes"] == alternative["peak_bytes"]


def test_the_table_names_what_matters(models, capsys):
    arguments = [
        "plan",
        "length-bon",
        "--model.path",
        str(models / "7b"),
        "--gpu",
        "h100",
        "--gpus",
        "8",
        "--rollout.prompts",
        "8",
    ]
    assert cli.main(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("6,738,415,616 parameters", "8 x h100 (79.1 GiB) in 1 node; sharded over 8", "at most about",
                 "optimizer step", "fits:"):  # fmt: skip
        assert text in out, text
    assert "recommended" not in out
    assert cli.main([*arguments, "--rollout.max_rows", "8", "--parallel.replicate", "8"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    for text in ("not sharded, 8 replicas", "does not fit:", "recommended --parallel.replicate 1 at most"):
        assert text in out, text


def test_reward_models_are_counted_by_their_configs(models, capsys, tmp_path):
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         vocab_size=100, num_labels=1)  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    config.save_pretrained(tmp_path / "rm")
    size = sum(p.numel() for p in model.parameters())
    file = tmp_path / "run.toml"
    file.write_text(
        f"[rewards.a]\nfunction = \"classifier(path='{tmp_path}/rm', dtype='bfloat16')\"\n"
        f"[rewards.b]\nfunction = \"ensemble(paths=['{tmp_path}/rm', '{tmp_path}/none'])\"\n"
    )
    found = record(capsys, file, "--model.path", models / "7b", "--gpu", "b200", "--gpus", 8,
                   "--rollout.prompts", 8)  # fmt: skip
    assert found["persistent"]["reward models"] == size * 2 + size * 4
    assert found["not_counted"] == [f"{tmp_path}/none"]


def test_ppo_counts_its_critic(models, capsys):
    arguments = ("--model.path", models / "7b", "--gpu", "b200", "--gpus", 8, "--rollout.prompts", 8)
    plain, ppo = record(capsys, *arguments), record(capsys, *arguments, "--loss.algorithm", "ppo")
    assert ppo["persistent"]["parameters"] == 2 * plain["persistent"]["parameters"]
    assert ppo["phases"]["optimizer step"]["optimizer"] == 2 * plain["phases"]["optimizer step"]["optimizer"]


def test_the_json_file_is_complete(models, tmp_path, capsys):
    file = tmp_path / "plan.json"
    options = ["--gpu", "h200", "--gpus", "8", "--rollout.prompts", "8"]
    plan.main(["length-bon", "--model.path", str(models / "7b"), *options, "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["peak_bytes"] == found["totals"][found["largest_phase"]]
    assert capsys.readouterr().out


def test_the_memory_of_a_host_is_that_of_all_its_ranks(models, capsys):
    arguments = [
        "plan",
        "length-bon",
        "--model.path",
        str(models / "7b"),
        "--gpu",
        "h100",
        "--gpus",
        "16",
        "--rollout.prompts",
        "16",
    ]
    assert cli.main([*arguments, "--parallel.offload", "True"]) == 0
    shards = 18 * 6_738_415_616 / 16 * 8 / GIB
    assert f"{shards:.1f} GiB for 8 GPUs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [["--loss.algorithm", "ppo", "--critic.trunk", "shared", "--loss.beta", "0"]])
def test_a_shared_critic_scores_the_completions(models, capsys, arguments):
    found = record(
        capsys, "--model.path", models / "7b", "--gpu", "b200", "--gpus", 8, "--rollout.prompts", 8, *arguments
    )
    assert found["phases"]["scoring"]["activations"] > 0


def test_the_table_of_the_guide(models, capsys):
    """Peaks and phases in docs/guides/plan.md are those that the command prints."""
    rows = re.findall(r"^\| (7B|70B) \| `(.*)` \| (.*), (.*) \|$", GUIDE.read_text(), re.MULTILINE)
    assert len(rows) == 4
    # The varlen attention of PyTorch 2.11 needs a key for each query head: 70B, which shares them, takes more memory.
    repeated = {"70B"} if not takes_fewer_key_heads(varlen_attn) else set()
    for model, options, peak, phase in rows:
        found = record(capsys, "--model.path", models / model.lower(), "--gpu", "h100", "--prompt-tokens", 512,
                       "--rollout.max_new_tokens", 512, *options.split())  # fmt: skip
        assert found["largest_phase"] == phase, options
        if model in repeated:
            assert 0.99 < GIB * float(peak.removesuffix(" GiB")) / found["peak_bytes"] < 1.002, options
        else:
            assert size(found["peak_bytes"]) == peak, options


def test_float32_needs_twice_the_memory_of_bfloat16_and_not_the_square(models, capsys):
    arguments = ("--model.path", models / "7b", "--gpu", "b200", "--gpus", 8, "--rollout.prompts", 8)
    half, single = record(capsys, *arguments), record(capsys, *arguments, "--model.dtype", "float32")
    ratio = single["phases"]["update"]["activations"] / half["phases"]["update"]["activations"]
    assert 1.5 < ratio < 2.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h100", "--rewards.short.function", "classifier(path='rm', dtype='foo')"], "got 'foo'"),
        (["--gpu", "h10"], "unknown GPU 'h10'; did you mean 'h100'"),
        (["--gpu", "h100", "--gpus", "0"], "--gpus 0: expected a number >= 1"),
        (["--gpu", "h100", "--gpus", "12", "--rollout.prompts", "12"], "not a multiple of --gpus-per-node 8"),
        (["--gpu", "h100", "--gpus", "8"], "rollout.prompts = 6: it must be a multiple of the number of ranks, 8"),
        (["--gpu", "h100", "--prompt-tokens", "100000"], "exceed the model's context"),
        (["--gpu", "h100", "--prompt-tokens", "-1"], "--prompt-tokens -1: expected a number >= 1"),
        (["--gpu", "h100", "--json", "/no/such/folder/x.json"], "expected a file in a folder that exists"),
        (["--gpu", "h100", "--model.path", "/tmp"], "has no config.json"),
        (["--gpu", "h100", "--optim.lr", "-1"], "optim.lr"),
    ],
)
def test_nonsense_is_refused_in_one_line(arguments, message, capsys):
    assert cli.main(["plan", "length-bon", *arguments]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_an_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "--gpu", "h100", "--nodes", "2"])
    assert "--nodes" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "key"), [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100")])
def test_a_named_gpu_is_the_one_that_the_driver_reports(name, key):
    assert gpu_of_device(name) is gpu_named(key.upper())


def test_limits_of_gpus_have_their_order_of_magnitude():
    for name, gpu in GPUS.items():
        assert 16 * GIB < gpu.memory < 300 * GIB, name
        assert 50 < gpu.flops / gpu.bandwidth < 500, name  # operations per byte
