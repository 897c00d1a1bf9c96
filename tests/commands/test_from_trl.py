"""`nlgrpo from-trl`: TRL's defaults, all three forms of input, batch arithmetic, and configurations that train."""

import dataclasses
import tomllib

import pytest
from trl import GRPOConfig

from nlgrpo import cli
from nlgrpo.commands.conversion.from_trl import DEFAULTS, NOT_NEEDED, OTHERS, convert, read
from nlgrpo.config import validate
from nlgrpo.config.recipes import from_arguments

YAML = """
model_name_or_path: models/llama
dataset_name: data/prompts.jsonl
output_dir: out
learning_rate: 1.0e-5
bf16: true
max_completion_length: 64
use_peft: true
lora_target_modules: [q_proj, v_proj]
reward_funcs: [accuracy_reward, my_lib.rewards.polite]
reward_weights: [1.0, 0.5]
report_to: wandb
mask_truncated_completions: true
gradient_accumulation_steps: 4
max_steps: 200
"""

SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig

def polite(completions, **kwargs):
    return [0.0] * len(completions)

args = GRPOConfig(output_dir="out", beta=0.04, loss_type="dr_grpo", num_generations=4, learning_rate=LR, max_steps=10)
trainer = GRPOTrainer(model="models/llama", reward_funcs=[polite], args=args, train_dataset=data,
                      peft_config=LoraConfig(r=8, lora_alpha=16))
"""

COMMAND = """
# how we trained
accelerate launch --num_processes 4 trl/scripts/grpo.py \\
    --model_name_or_path models/llama --reward_funcs accuracy_reward think_format_reward \\
    --per_device_train_batch_size=16 --beta 0.1 --no-shuffle-dataset --scale_rewards none
"""


def keys(options, **more):
    return tomllib.loads(convert({**options, **more}).toml())


def test_the_defaults_are_trl_s():
    fields = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    for name, value in DEFAULTS.items():
        default = fields[name].default
        assert default is value if value is None else default == value, name


def test_every_option_of_trl_is_converted_named_or_not_needed():
    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    converted = convert(dict.fromkeys(names - {*DEFAULTS, *OTHERS}, "x"))
    reported = {text.partition(" = ")[0] for text in converted.missing}
    assert reported == names - {*DEFAULTS, *OTHERS, *NOT_NEEDED}
    assert {"entropy_coef", "repetition_penalty", "sync_ref_model", "mask_truncated_completions"} <= reported


def test_yaml(tmp_path):
    (tmp_path / "grpo.yaml").write_text(YAML)
    options, notes = read(tmp_path / "grpo.yaml")
    assert notes == []
    converted = convert(options)
    assert converted.missing == ["mask_truncated_completions = True"]
    found = tomllib.loads(converted.toml())
    assert found["model"] == {"path": "models/llama", "activation_checkpointing": True}
    assert found["rollout"] == {"prompts": 4, "max_new_tokens": 64}  # 8 x 4 completions, 8 per prompt
    assert found["loss"] == {"beta": 0.0, "scale": "group", "kl_importance": True}
    assert found["optim"] == {"schedule": "linear", "lr": 1e-5}
    assert found["train"] == {"steps": 200, "out": "out", "seed": 42, "checkpoint_every": 500, "track": ["wandb"],
                              "project": "huggingface"}  # fmt: skip
    assert found["lora"] == {"rank": 16, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    assert found["rewards"] == {
        "math": {"function": "math(column='solution')", "objective": "mean"},
        "polite": {"function": "my_lib.rewards:polite", "objective": "mean", "weight": 0.5},
    }


def test_a_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options, notes = read(tmp_path / "train.py")
    assert notes == ["learning_rate = LR is not a literal and was not read"]
    found = keys(options)
    assert found["loss"] == {"beta": 0.04, "normalization": "dr_grpo", "scale": "group", "kl_importance": True}
    assert found["rollout"] == {"prompts": 2, "samples": 4, "max_new_tokens": 512}
    assert found["lora"] == {"rank": 8, "alpha": 16.0, "dropout": 0.05}
    assert found["rewards"] == {"polite": {"function": "rewards.py:polite", "objective": "mean"}}
    assert found["model"]["path"] == "models/llama"


def test_a_command_line(tmp_path):
    (tmp_path / "run.sh").write_text(COMMAND)
    options, _ = read(tmp_path / "run.sh")
    converted = convert(options)
    found = tomllib.loads(converted.toml())
    assert found["rollout"]["prompts"] == 8  # 16 completions on each of 4 processes, 8 per prompt
    assert found["loss"] == {"beta": 0.1, "kl_importance": True}
    assert list(found["rewards"]) == ["math", "think_format_reward"]
    assert converted.missing == ["no_shuffle_dataset = True"]
    assert "train.steps: 3 epochs are 3 x (number of prompts) / 8" in converted.notes


@pytest.mark.parametrize(
    ("options", "world", "expected"),
    [
        ({"max_steps": 100}, 8, {"prompts": 8, "minibatches": 1, "steps": 100}),
        ({"max_steps": 100, "steps_per_generation": 4}, 1, {"prompts": 4, "minibatches": 4, "steps": 25}),
        ({"max_steps": 96, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 3}, 2,
         {"prompts": 8, "minibatches": 2, "steps": 16}),
        ({"max_steps": 10, "generation_batch_size": 64, "num_generations": 16}, 4,
         {"prompts": 4, "minibatches": 2, "steps": 5}),
    ],
)  # fmt: skip
def test_batches(options, world, expected):
    converted = convert(options, world)
    found = {name: value for section in tomllib.loads(converted.toml()).values() for name, value in section.items()}
    found = {"minibatches": 1, "steps": 100, **found}  # defaults are not written
    assert found | expected == found
    trl = GRPOConfig(output_dir="x", use_cpu=True, bf16=False, **options)
    if world == 1:
        assert trl.generation_batch_size // trl.num_generations == expected["prompts"]


def test_losses_and_engines():
    assert keys({"loss_type": "cispo", "epsilon_high": 5.0})["loss"]["eps_high"] == 4.0
    assert keys({"loss_type": "cispo", "epsilon_high": 5.0})["loss"]["surrogate"] == "cispo"
    assert convert({"loss_type": "sapo"}).missing == ["loss_type = 'sapo'"]
    assert keys({"epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0})["loss"]["dual_clip"] == 4.0
    assert "correction" not in keys({})["loss"]
    vllm = keys({"use_vllm": True})
    assert (vllm["rollout"]["engine"], vllm["loss"]["correction"]) == ("vllm", "mis:0:3")
    tis = keys({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_mode": "server"})
    assert (tis["loss"]["correction"], tis["loss"]["correction_level"]) == ("tis:3", "token")
    assert tis["vllm"]["servers"] == ["http://127.0.0.1:8000"]
    assert keys({"warmup_steps": 0.1})["optim"].get("warmup_steps", 0) == 0


@pytest.mark.parametrize("kwargs", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_data_of_chat_models(kwargs):
    data = keys({"dataset_name": "d", "chat_template_kwargs": kwargs, "dataset_streaming": True})["data"]
    assert data == {"source": "d", "streaming": True, "chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    "options", [{}, {"use_vllm": True}, {"loss_type": "cispo", "epsilon_high": 5.0}, {"delta": 4.0}]
)
def test_the_result_is_a_configuration_of_nlgrpo(tmp_path, options):
    text = convert({"model_name_or_path": "m", "reward_funcs": ["accuracy_reward"], "max_steps": 5, **options}).toml()
    (tmp_path / "my.toml").write_text(text)
    config, _ = from_arguments([str(tmp_path / "my.toml")])
    validate.check(config)
    assert config.rewards["math"].objective == "mean"
    assert config.loss.scale == "group"


def test_the_command(tmp_path, capsys):
    (tmp_path / "grpo.yaml").write_text(YAML)
    out = tmp_path / "my.toml"
    assert cli.main(["from-trl", str(tmp_path / "grpo.yaml"), "--processes", "2", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert tomllib.loads(out.read_text())["rollout"]["prompts"] == 8
    assert cli.main(["from-trl", str(tmp_path / "grpo.yaml"), "--out", str(out)]) == 1
    assert "exists" in capsys.readouterr().err
    assert cli.main(["from-trl", str(tmp_path / "grpo.yaml")]) == 0
    assert capsys.readouterr().out.startswith("# Without an equivalent: mask_truncated_completions = True\n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.yaml", None, "there is no file"),
        ("empty.yaml", "", "has no options"),
        ("list.yaml", "- a", "has no options"),
        ("broken.py", "GRPOConfig(", "not a Python script"),
        ("other.py", "x = 1", "has no options"),
        ("run.sh", "echo hello", "has no options"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert cli.main(["from-trl", str(tmp_path / name)]) == 1
    assert message in capsys.readouterr().err
