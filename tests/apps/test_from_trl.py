"""`nlgrpo from-trl`: every option of the installed classes, all forms of input, and runs that are TRL's."""

import dataclasses
import inspect
import runpy
import tomllib

import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from support.helpers import REPOSITORY, tiny_model
from transformers import TrainingArguments, get_scheduler
from trl import DatasetMixtureConfig, GRPOConfig, GRPOTrainer, ModelConfig, RLOOConfig, RLOOTrainer
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.rloo import RLOOScriptArguments

from nlgrpo import cli
from nlgrpo.apps.convert import trl_conversion, trl_options
from nlgrpo.apps.convert.trl_conversion import convert
from nlgrpo.apps.convert.trl_files import read
from nlgrpo.config import validate
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import OptimConfig
from nlgrpo.kernels.reference import PolicyLossSettings
from nlgrpo.losses.policy import packed_loss, token_weights
from nlgrpo.objectives.advantages import advantages
from nlgrpo.objectives.registry import Mean
from nlgrpo.training.schedules import learning_rate

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


def fields(*classes):
    """Names and defaults of dataclasses' fields."""
    found = {}
    for one in classes:
        for field in dataclasses.fields(one):
            made = field.default_factory() if field.default is dataclasses.MISSING else field.default
            found[field.name] = made
    return found


def arguments(trainer):
    return {name: p.default for name, p in inspect.signature(trainer.__init__).parameters.items() if name != "self"}


SCRIPTS = fields(GRPOScriptArguments, RLOOScriptArguments, DatasetMixtureConfig, ModelConfig)
BY_RLOO = {**{name: trl_options.GRPO[name] for name in trl_options.GRPO if name not in trl_options.WITHOUT_RLOO},
           **trl_options.RLOO}  # fmt: skip
# Options that TRL inherits from transformers, and that a version before that of constraints.txt need not have.
NEW = {"activation_checkpointing", "activation_checkpointing_kwargs"}
ABSENT = NEW - fields(TrainingArguments).keys() if Version(transformers.__version__) < Version("5.23") else set()


@pytest.mark.parametrize(
    ("table", "installed"),
    [
        (trl_options.GRPO, fields(GRPOConfig)),
        (BY_RLOO, fields(RLOOConfig)),
        (trl_options.SCRIPT, SCRIPTS),
        (trl_options.LORA, fields(LoraConfig)),
        (trl_options.TRAINER, {**arguments(RLOOTrainer), **arguments(GRPOTrainer)}),
    ],
    ids=["GRPOConfig", "RLOOConfig", "scripts", "LoraConfig", "trainers"],
)
def test_every_option_of_the_installed_classes_is_in_a_table_with_its_default(table, installed):
    assert table.keys() - ABSENT == installed.keys()
    for name, default in installed.items():
        if name == "optim":  # depends on the version of PyTorch
            assert default in trl_conversion.ADAMW
        elif name not in ("runtime_config", "peft_type") and default is not inspect.Parameter.empty:
            assert table[name].default == default, name
        assert table[name].keys or table[name].note, name


def test_an_option_that_sets_nothing_is_listed_unless_it_has_the_default():
    for name, option in trl_options.known("grpo").items():
        value = {bool: not option.default, float: 12345.0}.get(option.kind, "x")
        changed, default = (convert({name: v}).missing if not option.keys else [] for v in (value, option.default))
        assert [text.partition(" = ")[0] for text in changed] == ([] if option.keys else [name])
        assert default == []
        assert all(option.note in text for text in changed)


def test_the_tables_of_the_documentation_have_every_option():
    text = runpy.run_path(str(REPOSITORY / "scripts" / "trl_table.py"))["page"]()
    assert all(f"`{name}`" in text for name in (*trl_options.known("grpo"), *BY_RLOO, *trl_options.LORA))


def test_peft_s_modules_are_those_of_peft():
    for kind, modules in trl_conversion.TARGETS.items():
        assert list(modules) == TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[kind]


def test_yaml(tmp_path):
    (tmp_path / "grpo.yaml").write_text(YAML)
    options, notes = read(tmp_path / "grpo.yaml")
    assert notes == []
    converted = convert(options)
    assert [text.partition(" = ")[0] for text in converted.missing] == ["mask_truncated_completions"]
    found = tomllib.loads(converted.toml())
    assert found["model"] == {"path": "models/llama", "activation_checkpointing": True}
    assert found["rollout"] == {"prompts": 4, "max_new_tokens": 64}  # 8 x 4 completions, 8 per prompt
    assert found["loss"] == {"beta": 0.0, "scale": "group"}
    assert found["optim"] == {"schedule": "linear", "lr": 1e-5}
    assert found["train"] == {"steps": 200, "out": "out", "seed": 42, "checkpoint_every": 500, "keep_every": 500,
                              "track": ["wandb"], "project": "huggingface"}  # fmt: skip
    assert found["lora"] == {"rank": 16, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    assert found["rewards"] == {
        "math": {"function": "math(column='solution')", "objective": "mean"},
        "polite": {"function": "my_lib.rewards:polite", "objective": "mean", "weight": 0.5},
    }


def test_a_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options, notes = read(tmp_path / "train.py")
    assert notes == [
        "learning_rate = LR is not a literal and was not read",
        "train_dataset = data is not a literal load_dataset(..) and was not read",
    ]
    found = keys(options)
    assert found["loss"] == {"beta": 0.04, "normalization": "dr_grpo", "scale": "group"}
    assert found["rollout"] == {"prompts": 2, "samples": 4, "max_new_tokens": 512}
    assert found["lora"] == {"rank": 8, "alpha": 16.0, "target_modules": ["q_proj", "v_proj"]}
    assert found["rewards"] == {"polite": {"function": "rewards.py:polite", "objective": "mean"}}
    assert found["model"]["path"] == "models/llama"


def test_a_command_line(tmp_path):
    (tmp_path / "run.sh").write_text(COMMAND)
    options, _ = read(tmp_path / "run.sh")
    converted = convert(options)
    found = tomllib.loads(converted.toml())
    assert found["rollout"]["prompts"] == 8  # 16 completions on each of 4 processes, 8 per prompt
    assert found["loss"] == {"beta": 0.1}
    assert list(found["rewards"]) == ["math", "think_format_reward"]
    assert converted.missing == []
    assert found["data"] == {"shuffle": False}
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
    sections = tomllib.loads(converted.toml())
    found = {name: value for part in ("rollout", "loss", "train") for name, value in sections[part].items()}
    found = {"minibatches": 1, "steps": 100, **found}  # defaults are not written
    assert found | expected == found
    trl = GRPOConfig(output_dir="x", use_cpu=True, bf16=False, **options)
    if world == 1:
        assert trl.generation_batch_size // trl.num_generations == expected["prompts"]


VLLM = {"use_vllm": True}
BY_TOKEN = {**VLLM, "vllm_importance_sampling_mode": "token_truncate", "vllm_mode": "server"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss.eps_high": 4.0, "loss.surrogate": "cispo"}),
        ({"epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0}, {"loss.dual_clip": 4.0}),
        ({}, {"loss.correction": None}),
        (VLLM, {"rollout.engine": "vllm", "loss.correction": "mis:0:3"}),
        (BY_TOKEN, {"loss.correction": "tis:3", "loss.correction_level": "token"}),
        (BY_TOKEN, {"vllm.servers": ["http://127.0.0.1:8000"]}),
        ({**VLLM, "vllm_importance_sampling_cap": 2.0}, {"loss.correction": "mis:0:2"}),
        ({**VLLM, "vllm_importance_sampling_clip_max": None}, {"loss.correction": "mis:0:inf"}),
        ({"warmup_steps": 0.1}, {"optim.warmup_steps": None}),
        ({"bf16": False}, {"model.dtype": "float32"}),
        ({"dtype": "float32"}, {"model.dtype": None}),  # bf16 is TRL's default: bfloat16 with float32 weights
        ({"max_steps": 100, "save_steps": 0.1}, {"train.checkpoint_every": 10}),
        ({"save_strategy": "no"}, {"train.checkpoint_every": 0}),
        ({"save_total_limit": 3}, {"train.keep_checkpoints": 3}),
        ({"top_k": -1}, {"rollout.top_k": None}),
        ({"full_determinism": True}, {"train.deterministic": True}),
    ],
)
def test_keys_that_follow_from_options(options, expected):
    """None: the default of nlgrpo, which is not written."""
    found = keys(options)
    for key, value in expected.items():
        section, name = key.split(".")
        assert found.get(section, {}).get(name) == value, key


def test_an_unknown_loss_is_listed():
    assert convert({"loss_type": "sapo"}).missing == ["loss_type = 'sapo': this run has the loss 'dapo'"]


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
    validate.check_config(config)
    assert config.rewards["math"].objective == "mean"
    assert config.loss.scale == "group"


def test_the_command(tmp_path, capsys):
    (tmp_path / "grpo.yaml").write_text(YAML)
    out = tmp_path / "my.toml"
    assert cli.main(["from-trl", str(tmp_path / "grpo.yaml"), "--processes", "2", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert tomllib.loads(out.read_text())["rollout"]["prompts"] == 8
    assert cli.main(["from-trl", str(tmp_path / "grpo.yaml"), "--out", str(out)]) == 2
    assert "exists" in capsys.readouterr().err
    assert cli.main(["from-trl", str(tmp_path / "grpo.yaml")]) == 0
    said = "# Not carried over: mask_truncated_completions = True: nlgrpo trains on truncated"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.yaml", None, "there is no file"),
        ("empty.yaml", "", "has no options"),
        ("list.yaml", "- a", "has no options"),
        ("broken.py", "GRPOConfig(", "not a Python script"),
        ("other.py", "x = 1", "has no options"),
        ("run.sh", "echo hello", "has no options"),
        ("broken.yaml", "a: [1", "broken.yaml, line 1: not YAML: expected ',' or ']'"),
        ("tabs.yaml", "a:\n\t- 1", "tabs.yaml, line 2: not YAML"),
        ("date.yaml", "a: 2026-13-40", "date.yaml: not YAML: month must be in 1..12"),
        ("twice.yaml", "beta: 0.1\nmax_steps: 1\nbeta: 0.2", "twice.yaml, line 3: beta is given twice; give it once"),
        ("text.yaml", "hello", "it is a str; TRL reads lines such as 'beta: 0.1'"),
        ("latin.yaml", b"\xff\xfe\xff", "latin.yaml cannot be read"),
        ("quote.sh", "trl grpo --beta '0.1", "quote.sh is not a command line: No closing quotation"),
        ("dpo.sh", "trl dpo --beta 0.1", "runs 'dpo' of TRL; from-trl converts runs of GRPOTrainer and RLOOTrainer"),
        ("dpo.py", "from trl import DPOConfig\nDPOConfig(beta=0.1)", "GRPOTrainer or RLOOTrainer; it has DPOConfig"),
        ("config.sh", "trl grpo --config none.yaml", "--config none.yaml, and there is no such file"),
        ("steps.yaml", "max_steps: many", "max_steps = 'many': TRL expects a whole number"),
        ("half.yaml", "max_steps: 10.5", "max_steps = 10.5: TRL expects a whole number"),
        ("rate.yaml", "learning_rate: [1]", "learning_rate = [1]: TRL expects a number"),
        ("flag.yaml", "use_vllm: maybe", "use_vllm = 'maybe': TRL expects true or false"),
        ("none.yaml", "num_generations: 0", "num_generations = 0: expected at least 1"),
        ("none.yaml", "learning_rate: null", "learning_rate = None: TRL expects a number"),
        ("both.yaml", "generation_batch_size: 8\nsteps_per_generation: 1", "TRL takes only one of them"),
        ("scale.yaml", "scale_rewards: std", "scale_rewards = 'std': expected group, batch or none"),
        ("level.yaml", "importance_sampling_level: word", "loss.level = 'word': expected 'token' or 'sequence'"),
        ("table.yaml", "chat_template_kwargs: '{a'", "chat_template_kwargs = '{a' is not JSON"),
        ("table.yaml", "chat_template_kwargs: [a]", "chat_template_kwargs = ['a']: expected a table"),
        ("weights.yaml", "reward_funcs: [a.b, c.d]\nreward_weights: [1]", "reward_weights has 1 values for 2 rewards"),
        ("funcs.yaml", "reward_funcs: {a: b}", "reward_funcs = {'a': 'b'}: expected names of functions"),
        ("dtype.yaml", "dtype: int8", "dtype = 'int8': expected auto, bfloat16, float16 or float32"),
        ("data.yaml", "datasets: [a]", "datasets = ['a']: expected a list of tables"),
        ("lora.yaml", "use_peft: true\nlora_target_modules: 3", "target_modules = 3: expected names of modules"),
        ("steps.yaml", "warmup_steps: .inf", "warmup_steps = inf: expected a number of steps"),
        ("steps.yaml", "save_steps: -5", "save_steps = -5.0: expected a number of steps"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert cli.main(["from-trl", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


# --- what a script says -----------------------------------------------------------------------------------------------


def converted(tmp_path, text, name="train.py"):
    """The configuration of a file, and its comments as one text."""
    (tmp_path / name).write_text(text)
    options, notes = read(tmp_path / name)
    out = convert(options)
    out.notes[:0] = notes
    return tomllib.loads(out.toml()), "\n".join(line for line in out.toml().splitlines() if line.startswith("#"))


def test_arguments_of_the_trainer_that_are_not_carried_over_are_named(tmp_path):
    text = """
from trl import GRPOConfig, GRPOTrainer
from things import Env, search, short, stop_early
args = GRPOConfig(max_steps=10, optim="adafactor", num_generations=4, per_device_train_batch_size=4, eval_delay=5)
trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B", [short], args, tools=[search], environment_factory=Env,
                      callbacks=[stop_early], processing_class=None)
"""
    found, comments = converted(tmp_path, text)
    assert found["model"]["path"] == "Qwen/Qwen2.5-0.5B"
    assert found["rewards"] == {"short": {"function": "things:short", "objective": "mean"}}
    assert found["train"]["steps"] == 10
    for said in ("tools = [search]", "environment_factory = Env", "callbacks = [stop_early]", "optim = 'adafactor'",
                 "eval_delay = 5"):  # fmt: skip
        assert f"# Not carried over: {said}: " in comments
    assert "processing_class" not in comments


def test_rewards_of_one_name_get_two(tmp_path):
    found = keys({"reward_funcs": ["a.score", "b.score", "c.other"], "reward_weights": [1.0, 0.25, 1]})["rewards"]
    assert found["a_score"] == {"function": "a:score", "objective": "mean"}
    assert found["b_score"] == {"function": "b:score", "objective": "mean", "weight": 0.25}
    assert found["other"]["function"] == "c:other"
    twice = keys({"reward_funcs": ["a.score", "a.score"], "reward_model_name_or_path": "rm"})["rewards"]
    assert list(twice) == ["classifier", "a_score", "a_score_2"]
    assert len(keys({"reward_funcs": ["a.score", "b.score", "a_score"]})["rewards"]) == 3


def test_rewards_that_a_script_builds(tmp_path):
    text = """
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, get_soft_overlong_punishment
import lib
from my_rewards import get_length_penalty as penalty, right
scale = penalty(256)
GRPOTrainer("m", [right, penalty(512, 64), scale, lib.polite, accuracy_reward, "org/rm", lambda completions: [0.0],
                  get_soft_overlong_punishment(soft_punish_cache=8, max_completion_len=64)], GRPOConfig(max_steps=10))
"""
    found, comments = converted(tmp_path, text)
    assert {name: reward["function"] for name, reward in found["rewards"].items()} == {
        "right": "my_rewards:right",
        "get_length_penalty": "rewards.py:get_length_penalty",
        "scale": "rewards.py:scale",
        "polite": "lib:polite",
        "math": "math(column='solution')",
        "classifier": "classifier(path='org/rm')",
        "reward": "rewards.py:reward",
        "overlong": "overlong(limit=64, margin=8)",
    }
    assert "rewards.get_length_penalty.function: write get_length_penalty = penalty(512, 64) into" in comments
    assert "rewards.scale.function: write scale = penalty(256) into rewards.py" in comments


@pytest.mark.parametrize(
    ("lines", "data", "said"),
    [
        ("data = load_dataset('openai/gsm8k', 'main', split='train[:100]')",
         {"source": "openai/gsm8k:main", "split": "train[:100]"}, ""),
        ("data = load_dataset('org/set')['test']", {"source": "org/set", "split": "test"}, ""),
        ("data = load_dataset('json', data_files='p.jsonl', split='train')", {"source": "p.jsonl"}, ""),
        ("data = load_dataset('org/set', split='train', streaming=True)", {"source": "org/set", "streaming": True}, ""),
        ("data = load_dataset('org/set', split='train')\ndata = data.map(prepare)", {"source": "org/set"},
         "train_dataset: .map(prepare) is not carried over"),
        ("data = load_dataset('org/set', split='train').rename_column('question', 'prompt')",
         {"source": "org/set", "prompt_column": "question"}, ""),
        ("data = load_dataset('json', data_files='p.jsonl', split='train[:9]')", {"source": "p.jsonl"}, "data.limit"),
        ("data = load_dataset('org/set', revision='v1', split='train')", {"source": "org/set"}, "revision = 'v1'"),
        ("data = make()", {}, "train_dataset = data is not a literal load_dataset(..) and was not read"),
        ("data = load_dataset(NAME)", {}, "path = NAME is not a literal"),
        ("if x:\n    data = load_dataset('a/b')\nelse:\n    data = load_dataset('c/d')", {}, "train_dataset = data"),
    ],
)  # fmt: skip
def test_a_literal_data_set(tmp_path, lines, data, said):
    text = f"from trl import GRPOTrainer\nfrom datasets import load_dataset\n{lines}\n" \
           "GRPOTrainer(model='m', reward_funcs=[f], train_dataset=data)\n"  # fmt: skip
    found, comments = converted(tmp_path, text)
    assert found.get("data", {}) == data
    assert said in comments


def test_names_and_dictionaries_are_followed_and_uncertain_ones_noted(tmp_path):
    text = """
import torch
from trl import GRPOConfig as Config, GRPOTrainer as Trainer
LR, KL = 1e-5, 0.1
STEPS = 20
BETA = 0.5
if len("x"):
    BETA = 0.1
more = {"temperature": 0.7, "model_init_kwargs": {"dtype": torch.bfloat16}}
def main(top_p=0.5):
    samples = 4
    args = Config(max_steps=STEPS, beta=BETA, learning_rate=LR, num_generations=samples, top_p=top_p, **more, **other)
    Trainer(model="m", reward_funcs=[], args=args)
"""
    found, comments = converted(tmp_path, text)
    assert found["train"]["steps"] == 20
    assert (found["rollout"]["samples"], found["rollout"]["temperature"]) == (4, 0.7)
    assert found["model"]["path"] == "m"
    for name in ("beta = BETA", "learning_rate = LR", "top_p = top_p", "** = other of GRPOConfig"):
        assert f"{name} is not a literal and was not read" in comments
    assert "model_init_kwargs = more" not in comments


def test_several_configurations_are_noted(tmp_path):
    text = "from trl import GRPOConfig\nGRPOConfig(beta=0.1)\nargs = GRPOConfig(temperature=0.5)\n"
    found, comments = converted(tmp_path, text)
    assert found["rollout"]["temperature"] == 0.5
    assert found["loss"]["beta"] == 0
    assert "the script calls GRPOConfig or RLOOConfig on lines 2, 3; only line 3 was read" in comments


def test_a_script_whose_options_are_in_another_file_says_so(tmp_path):
    """TRL's own script reads them by its parser."""
    text = """
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser
from things import short
args, model_args = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
GRPOTrainer(model=model_args.model_name_or_path, reward_funcs=short, args=args)
"""
    found, comments = converted(tmp_path, text)
    assert list(found["rewards"]) == ["short"]
    assert "# Check: args = args is not a literal GRPOConfig(..) or RLOOConfig(..) and was not read" in comments
    assert "convert the YAML file or command line that sets" in comments


def test_a_class_that_derives_from_a_trainer_is_read_as_it(tmp_path):
    text = """
import trl
class Config(trl.RLOOConfig):
    own: int = 3
class Mine(trl.RLOOTrainer):
    pass
class Other(Mine):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)
Other("m", reward_funcs=[], args=Config(beta=0.5, num_generations=4))
"""
    found, comments = converted(tmp_path, text)
    assert (found["loss"]["baseline"], found["loss"]["beta"], found["rollout"]["samples"]) == ("loo", 0.5, 4)
    assert "# Check: class Config on line 3 was read as RLOOConfig, without its changes" in comments
    assert "# Check: class Other on line 7 was read as RLOOTrainer, without its changes" in comments


# --- LoRA, evaluation, secrets ----------------------------------------------------------------------------------------


def test_lora_has_the_defaults_of_peft_in_a_script_and_of_trl_in_its_own(tmp_path):
    tiny_model(tmp_path / "gpt2", "gpt2")
    text = "from trl import GRPOTrainer\nfrom peft import LoraConfig\n" \
           "GRPOTrainer(model={!r}, reward_funcs=[], peft_config=LoraConfig({}))\n"  # fmt: skip
    found, comments = converted(tmp_path, text.format(str(tmp_path / "gpt2"), ""))
    assert found["lora"] == {"rank": 8, "alpha": 8.0, "target_modules": ["c_attn"]}
    assert "lora.target_modules" not in comments
    assert "TRL trains GPT-2 with the dropout" in comments
    more = "r=4, target_modules='all-linear', use_dora=True, init_lora_weights='pissa', task_type='CAUSAL_LM', x=1"
    found, comments = converted(tmp_path, text.format("EleutherAI/pythia-70m", more))
    assert found["lora"] == {"rank": 4, "alpha": 8.0}
    for said in ("LoraConfig.use_dora = True", "LoraConfig.init_lora_weights = 'pissa'", "LoraConfig.x = 1"):
        assert f"# Not carried over: {said}: " in comments
    assert "task_type" not in comments
    found, comments = converted(tmp_path, text.format("EleutherAI/pythia-70m", "lora_dropout=0.1"))
    assert (found["lora"]["target_modules"], found["lora"]["dropout"]) == (["query_key_value"], 0.1)
    assert "PEFT's default for models of type 'gpt_neox', as the name suggests" in comments
    own = keys({"use_peft": True, "model_name_or_path": "Qwen/Qwen2.5-0.5B"})["lora"]
    assert own == {"rank": 16, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}  # alpha 32 is nlgrpo's default
    assert "lora" not in keys({"lora_r": 4})


def test_evaluation_is_that_of_trl():
    assert keys({})["evaluation"] == {"prompts": 0}
    found = keys({"dataset_name": "org/set", "dataset_config": "main", "eval_strategy": "steps",
                  "num_generations_eval": 2})  # fmt: skip
    assert found["data"] == {"source": "org/set:main", "evaluation": "org/set:main", "evaluation_split": "test"}
    assert found["evaluation"] == {"samples": 2, "ns": [1], "every": 10}  # TRL's default: logging_steps
    assert keys({"eval_strategy": False})["evaluation"] == {"prompts": 0}  # YAML reads `no` so


def test_the_kl_without_the_ratio_is_carried_over():
    assert "kl_importance" not in keys({"beta": 0.1}).get("loss", {})
    assert keys({"beta": 0.1, "use_bias_correction_kl": False})["loss"]["kl_importance"] is False


@pytest.mark.parametrize(
    ("options", "every", "keep_best"),
    [
        ({"eval_steps": 20}, 20, None),
        ({"eval_steps": 20, "num_iterations": 2}, 10, None),
        ({"eval_steps": 0.1, "max_steps": 200}, 20, None),
        ({"logging_steps": 5}, 5, None),
        ({"eval_steps": 20, "load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}, 20, "reward"),
        ({"eval_steps": 20, "load_best_model_at_end": True, "metric_for_best_model": "completions/mean_length",
          "greater_is_better": False}, 20, "min:completions/mean_length"),
        ({"eval_steps": 20, "metric_for_best_model": "reward"}, 20, None),
    ],
)  # fmt: skip
def test_evaluation_during_training(options, every, keep_best):
    found = keys({"eval_strategy": "steps"} | options)
    assert found["evaluation"]["every"] == every
    assert found.get("train", {}).get("keep_best") == keep_best


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"eval_strategy": "epoch"}, "eval_strategy = 'epoch'"),
        ({"eval_strategy": "steps", "load_best_model_at_end": True}, "metric_for_best_model = 'loss'"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end = True"),
    ],
)
def test_evaluation_options_that_are_not_carried_over(options, said):
    assert f"# Not carried over: {said}: " in convert(options).toml()


def test_evaluation_data_of_a_script(tmp_path):
    text = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
GRPOTrainer(model="m", reward_funcs=[], args=GRPOConfig(eval_strategy="steps"),
            eval_dataset=load_dataset("org/held", "main", split="test"))
"""
    found, _ = converted(tmp_path, text)
    assert found["data"] == {"evaluation": "org/held:main", "evaluation_split": "test"}


def test_secrets_are_not_written():
    given = {"hub_token": "hf_abcdefghijklmnopqrstuvwxyz", "wandb_api_key": "abc", "run": "sk-abcdefghijklmnopqrst"}
    text = convert(given)
    assert "hf_abc" not in text.toml()
    assert "'abc'" not in text.toml()
    assert "sk-abc" not in text.toml()
    assert "hub_token = ***" in text.toml()


def test_unknown_options_have_the_nearest_name():
    [text] = convert({"learning_rat": 1e-5}).missing
    assert text.startswith("learning_rat = 1e-05: not an option of GRPOConfig or TRL's scripts")
    assert "did you mean 'learning_rate'?" in text


def test_strings_are_converted_as_argparse_does(tmp_path):
    text = 'max_steps: "200"\nper_device_train_batch_size: "16"\nwarmup_steps: 5e-2\nuse_vllm: "no"\nmin_p: "none"\n'
    found, _ = converted(tmp_path, text, "recipe.yaml")
    assert found["train"]["steps"] == 200
    assert found["rollout"]["prompts"] == 2
    assert found["optim"]["warmup_steps"] == 10  # 0.05 of 200
    assert "engine" not in found["rollout"]


def test_recipes_of_other_projects(tmp_path):
    text = "dataset_name: openai/gsm8k\ndataset_config: main\ndataset_prompt_column: question\n" \
           "system_prompt: Be brief.\nmax_prompt_length: 256\nmax_steps: 100\nwarmup_ratio: 0.1\n"  # fmt: skip
    found, comments = converted(tmp_path, text, "recipe.yaml")
    assert found["data"] == {"source": "openai/gsm8k:main", "prompt_column": "question", "system_prompt": "Be brief.",
                             "max_prompt_tokens": 256}  # fmt: skip
    assert found["optim"]["warmup_steps"] == 10
    assert "Not carried over" not in comments


def test_a_command_line_with_a_yaml_file_and_variables(tmp_path):
    (tmp_path / "recipe.yaml").write_text("beta: 0.1\ntemperature: 0.5\nenv: {WANDB_MODE: offline}\n")
    text = "accelerate launch --num_processes 2 -m trl.scripts.rloo --config recipe.yaml --beta 0.2 --output_dir $OUT"
    found, comments = converted(tmp_path, text, "run.sh")
    assert (found["loss"]["beta"], found["loss"]["baseline"]) == (0.2, "loo")
    assert found["rollout"]["temperature"] == 0.5
    assert found["rollout"]["prompts"] == 8  # 8 completions on each of 2 processes, 2 per prompt
    assert "output_dir = $OUT is a variable of the shell" in comments
    assert "env: TRL sets the environment variables WANDB_MODE" in comments


def test_processes_are_given_once(tmp_path, capsys):
    (tmp_path / "run.sh").write_text("accelerate launch --num_processes 4 grpo.py --beta 0.1")
    assert cli.main(["from-trl", str(tmp_path / "run.sh"), "--processes", "8"]) == 2
    assert "num_processes = 4, and --processes is 8; give one of them" in capsys.readouterr().err
    assert cli.main(["from-trl", str(tmp_path / "run.sh"), "--processes", "0"]) == 2
    assert "processes = 0: expected at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_steps": 10, "num_iterations": 4}, "train.steps: 10 optimizer steps, and each rollout has 4"),
        ({"save_steps": 0.1}, "train.checkpoint_every: 0.1 of train.steps"),
        ({"warmup_steps": 5, "lr_scheduler_type": "constant"}, "the schedule 'constant' of TRL has no warm-up"),
        ({"max_completion_length": None}, "rollout.max_new_tokens: TRL has no limit"),
        ({"scale_rewards": "batch"}, "here the std of the advantages of a step, in TRL that of its rewards"),
        ({"dtype": "bfloat16"}, "here the master weights are float32"),
        ({"steps_per_generation": 4}, "the rate changes with each rollout"),
        ({"fp16": True}, "fp16 = True: float16 is not supported"),
        ({"delta": 1.1}, "delta = 1.1: loss.dual_clip is for losses with a clip"),
        ({"loss_type": "cispo"}, "epsilon_high = 0.2: with cispo it caps the ratio"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type = 'polynomial'"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation = 'normalize_then_sum'"),
        ({"model_init_kwargs": '{"revision": "v1"}'}, "model_init_kwargs.revision = 'v1'"),
        ({"save_strategy": "best"}, "save_strategy = 'best'"),
        ({"report_to": ["clearml"]}, "report_to = 'clearml'"),
        ({"datasets": [{"path": "a"}, {"path": "b"}]}, "TRL concatenates a, b"),
        ({"datasets": [{"path": "a", "columns": ["x"]}]}, "datasets.columns = ['x']"),
        ({"use_vllm": True}, "completions are weighted in the objectives, too"),
    ],
)
def test_what_differs_is_said(options, said):
    assert said in convert(options).toml()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant_with_warmup"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_learning_rate_is_that_of_transformers(schedule, warmup):
    """After the warm-up the rates are equal; within it nlgrpo is one step ahead, as the comment says."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=12)
    theirs = []
    for _ in range(12):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    found = convert({"learning_rate": 1e-3, "lr_scheduler_type": schedule, "warmup_steps": warmup, "max_steps": 12})
    section = found.sections()["optim"]
    optim = OptimConfig(lr=section["lr"], schedule=section.get("schedule", "constant"),
                        warmup_steps=section.get("warmup_steps", 0))  # fmt: skip
    ours = [learning_rate(optim, step, 12) for step in range(12)]
    assert ours[warmup:] == pytest.approx(theirs[warmup:])
    assert ours[: max(0, warmup - 1)] == pytest.approx(theirs[1:warmup])
    assert ("optim.warmup_steps: step t has the learning rate of TRL's step t + 1" in found.toml()) == (warmup > 0)


# --- RLOO -------------------------------------------------------------------------------------------------------------

RLOO = """
from trl import RLOOConfig, RLOOTrainer
from peft import LoraConfig
args = RLOOConfig(learning_rate=1e-5, num_generations=4, max_steps=10)
trainer = RLOOTrainer("Qwen/Qwen2.5-0.5B", reward_funcs=len, args=args, peft_config=LoraConfig(r=4))
"""


def test_an_rloo_script_is_an_rloo_run(tmp_path):
    found, comments = converted(tmp_path, RLOO)
    assert found["loss"] == {"baseline": "loo", "beta": 0.05, "kl_in": "reward", "normalization": "dr_grpo",
                             "surrogate": "reinforce"}  # fmt: skip
    assert found["rollout"] == {"prompts": 2, "samples": 4, "max_new_tokens": 512}
    assert found["optim"]["max_grad_norm"] == 1 / 512
    assert found["optim"]["eps"] == 1e-8 / 512
    assert found["lora"] == {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}
    assert "rewards.len.function" in comments
    assert keys({"normalize_advantages": True})["loss"]["scale"] == "batch"  # an option of RLOOConfig only
    assert keys({"normalize_advantages": False, "num_iterations": 2})["loss"].get("surrogate", "ppo") == "ppo"
    assert (
        "loss.level: TRL's RLOO clips the ratio of a completion"
        in convert({"normalize_advantages": True, "num_iterations": 2}).toml()
    )
    given = convert({"normalize_advantages": True, "delta": 4.0, "reward_clip_range": [0, 1]}).missing
    assert any(text.startswith("delta = 4.0: not an option of RLOOConfig") for text in given)
    assert any(text.startswith("reward_clip_range = [0, 1]: ") for text in given)


def test_a_yaml_file_of_rloo(tmp_path, capsys):
    (tmp_path / "rloo.yaml").write_text("max_steps: 10\n")
    assert cli.main(["from-trl", str(tmp_path / "rloo.yaml"), "--trainer", "rloo"]) == 0
    found = tomllib.loads(capsys.readouterr().out)
    assert (found["loss"]["baseline"], found["rollout"]["samples"]) == ("loo", 2)


@pytest.mark.parametrize("normalize", [False, True])
def test_advantages_and_gradient_of_rloo_are_those_of_trl(tmp_path, normalize):
    """TRL scores a batch and computes its loss; ours are the advantages and the loss of the converted keys."""
    tiny_model(tmp_path / "model")
    args = RLOOConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none", num_generations=4, beta=0.05,
        per_device_train_batch_size=8, max_completion_length=6, gradient_checkpointing=False,
        normalize_advantages=normalize,
    )  # fmt: skip
    trainer = RLOOTrainer(
        str(tmp_path / "model"), lambda completion_ids, **_: [float(sum(ids)) / 50 for ids in completion_ids], args,
        train_dataset=Dataset.from_dict({"prompt": ["w4 w5", "w6 w7"]}),
    )  # fmt: skip
    torch.manual_seed(0)
    for parameter in trainer.ref_model.parameters():  # so that there is a KL
        parameter.data += 0.02 * torch.randn_like(parameter)
    scored = trainer._generate_and_score_completions([{"prompt": p} for p in ["w4 w5"] * 4 + ["w6 w7"] * 4])
    trainer.model.train()
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, scored).backward()
    theirs = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}

    options = {"normalize_advantages": normalize, "num_generations": 4, "max_completion_length": 6, "max_steps": 1}
    keys_of = keys(options)["loss"]
    mask, ids = scored["completion_mask"].bool(), scored["completion_ids"]
    rewards = torch.tensor([sum(row[kept].tolist()) / 50 for row, kept in zip(ids, mask, strict=True)])

    def logprob(model):
        inputs = torch.cat([scored["prompt_ids"], ids], 1)
        attention = torch.cat([scored["prompt_mask"], scored["completion_mask"]], 1)
        logits = model(input_ids=inputs, attention_mask=attention).logits[:, -ids.shape[1] - 1 : -1]
        return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    assert keys_of["kl_in"] == "reward"
    with torch.no_grad():
        kl = ((logprob(trainer.model) - logprob(trainer.ref_model)) * mask).sum(1)
    assert kl.abs().max() > 1e-3
    linear = Mean().linearize((rewards - keys_of["beta"] * kl).view(2, 4))
    ours = advantages(linear, scale=keys_of.get("scale", "none"), baseline=keys_of["baseline"]).flatten()
    torch.testing.assert_close(ours, scored["advantages"], atol=1e-5, rtol=1e-4)
    assert ours.abs().max() > 0.01

    assert (keys_of["surrogate"], keys_of["normalization"]) == ("reinforce", "dr_grpo")
    weights = token_weights("dr_grpo", mask.sum(1), sequences=8, tokens=1, max_length=6)
    trainer.model.zero_grad()
    rows = mask.nonzero()[:, 0]
    settings = PolicyLossSettings(surrogate="reinforce")
    loss, _ = packed_loss(logprob(trainer.model)[mask], None, ours, rows, weights, settings=settings)
    loss.backward()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(6 * parameter.grad, theirs[name], atol=1e-5, rtol=1e-3, msg=name)
