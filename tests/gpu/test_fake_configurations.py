"""Training commands and searches run on the fake device: tensors on different devices would raise there.

``configurations.txt`` lists the commands. They train for two steps, in bfloat16 as on a GPU, evaluate, and save.
"""

import os
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from support import random_models
from support.fake_cuda import on_fake_cuda, training_on_fake_cuda
from support.helpers import WORDS, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from nlgrpo import cli
from nlgrpo.model import reward_model
from nlgrpo.training import learner

LINES = Path(__file__).with_name("configurations.txt").read_text("utf-8").splitlines()
COMMANDS = dict(line.split(": ", 1) for line in LINES if not line.startswith("#"))
FAST = ("grpo", "lora", "search")  # the others are slow tests, and every second one is not in CI
MODELS = ("llama", "qwen2", "qwen3", "mistral-window", "neox", "gpt2")
TINY = """
[model]
dtype = "auto"
[data]
source = "prompts.jsonl"
[rollout]
prompts = 2
samples = 4
max_new_tokens = 6
[rewards.short]
function = "length(target=3, scale=10)"
objective = "bon:2"
[loss]
beta = 0.01
[train]
steps = 2
async_save = false
out = "run"
[evaluation]
prompts = 2
samples = 2
ns = [1, 2]
"""
REWARDS = '''
def last_word(completions, **columns):
    """Final answers, for a vote: the last word, and whether it is right."""
    return [float(text.split()[-1:] == ["w7"]) for text in completions]
'''


def byte_level_tokenizer():
    """Characters of the prompts as tokens: transformers reads tokenizers of Qwen2 as byte-level ones."""
    characters = ["Ġ", "w", *"0123456789"]
    vocabulary = {word: i for i, word in enumerate([*WORDS[:4], *characters, *"abcdefghijklmnop"])}
    assert len(vocabulary) == len(WORDS)
    characters_only = Tokenizer(models.BPE(vocabulary, []))
    characters_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters_only.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=characters_only, **special)


def random_(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + float(parameter.dim() == 1))
    return model


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder from which the commands run. Everything in it is made on the CPU."""
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "models/llama")
    tiny_model(root / "models/tuned", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(root / "models/llama")
    for case in MODELS[1:]:
        kind, sizes = random_models.CASES[case]
        layers = "n_layer" if "n_layer" in sizes else "num_hidden_layers"
        config = AutoConfig.for_model(
            kind.removesuffix("Config").lower().replace("gptneox", "gpt_neox"),
            **(sizes | {"vocab_size": len(WORDS), layers: 2}),
        )
        random_(AutoModelForCausalLM.from_config(config)).save_pretrained(root / "models" / case)
        (byte_level_tokenizer() if case == "qwen2" else tokenizer).save_pretrained(root / "models" / case)
    config = AutoConfig.from_pretrained(root / "models/llama", num_labels=1)
    random_(LlamaForSequenceClassification(config)).save_pretrained(root / "models/classifier")
    tokenizer.save_pretrained(root / "models/classifier")
    value, _ = reward_model.load_reward_model(str(root / "models/llama"), seed=0)
    reward_model.save(value, root / "models/value", tokenizer=tokenizer, pad=0, max_length=64)
    (root / "prompts.jsonl").write_text("".join(f'{{"prompt": "w{i} w{i + 1}"}}\n' for i in range(10)))
    (root / "rewards.py").write_text(REWARDS)
    (root / "tiny.toml").write_text(TINY)
    return root


@pytest.fixture(scope="module")
def reference(work):
    """Samples of the reference, which some commands train on."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(work)
        assert cli.main(["rollout", "tiny.toml", "--model.path=models/llama", "--samples=8", "--out=reference"]) == 0


def run(device, folder, name):
    """Run a command; return what the device counted."""
    os.chdir(folder)
    arguments = shlex.split(COMMANDS[name])[1:]
    if arguments[0] == "train":
        arguments += ["--train.out", f"runs/{name}"]
    with training_on_fake_cuda(), device.counting() as counts:
        assert cli.main(arguments) == 0
    return counts


OTHERS = [name for name in COMMANDS if name not in FAST]
SELECTED = [
    *FAST,
    *(pytest.param(name, marks=[pytest.mark.slow]) for name in OTHERS[::2]),
    *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.records]) for name in OTHERS[1::2]),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SELECTED)
def test_a_command_runs_on_the_device(name, work, request, no_figures):
    if "reference" in COMMANDS[name]:
        request.getfixturevalue("reference")
    counts = on_fake_cuda(partial(run, folder=work, name=name))
    assert counts.launches.total() > 100
    if not name.startswith("search"):
        assert (work / "runs" / name / "model/config.json").is_file() or (work / "runs" / name / "adapter").is_dir()


def test_a_tensor_on_the_wrong_device_is_noticed(work, monkeypatch, no_figures):
    take = learner.Learner.update

    def with_fault(self, rollout, advantages, **options):
        return take(self, rollout, advantages + torch.zeros(advantages.shape), **options)

    monkeypatch.setattr(learner.Learner, "update", with_fault)
    with pytest.raises(AssertionError, match="Expected all tensors to be on the same device"):
        on_fake_cuda(partial(run, folder=work, name="grpo"))


def test_the_list_has_the_configurations_and_searches():
    assert len([line for line in COMMANDS.values() if line.startswith("nlgrpo train ")]) >= 25
    assert len([name for name in COMMANDS if name.startswith("search")]) == 4
