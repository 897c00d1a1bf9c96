"""Run a script of an experiment on a model of 32 words, in about a minute: what its option ``--quick`` does.

It shows that the script works. Its figures mean nothing.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WORDS = [*SPECIAL.values(), *(f"w{i}" for i in range(28))]
TINY = (
    *("--model.path", "tiny", "--data.source", "prompts.txt", "--data.separator", "\n", "--data.first_words", "2"),
    *("--data.evaluation", "", "--rollout.prompts", "2", "--rollout.samples", "4", "--rollout.max_new_tokens", "6"),
    *("--train.steps", "2", "--evaluation.prompts", "4", "--evaluation.samples", "4", "--evaluation.ns", "1", "2"),
)
"""Keys that make a recipe small enough."""

SETTINGS = """
[model]
path = "tiny"
[data]
source = "prompts.txt"
separator = "\\n"
first_words = 2
[rollout]
prompts = 2
samples = 4
max_new_tokens = 6
[loss]
kl = "k1"
kl_in = "reward"
[critic]
lr = 1e-3
[optim]
lr = 2e-4
[train]
steps = 2
samples_every = 0
checkpoint_every = 0
[evaluation]
prompts = 4
samples = 4
ns = [1, 2]
"""


def run(main: Callable[[], int | None], arguments: Sequence[str], before: Sequence[Sequence[str]] = ()) -> int | None:
    """Call ``main``; with ``--quick`` alone on the command line, in a workspace and with ``arguments`` instead.

    ``before`` are arguments of Python for what has to run first, such as ``-m nlgrpo.cli sweep ..``.
    """
    if sys.argv[1:] != ["--quick"]:
        return main()
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_workspace()
        for command in before:
            subprocess.run([sys.executable, *command], check=True)
        sys.argv[1:] = arguments
        return main()


def write_workspace() -> None:
    """Write a random model, prompts, a lexicon and three recipes into the current folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained("tiny")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, SPECIAL["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL).save_pretrained("tiny")

    Path("prompts.txt").write_text("".join(f"w{i} w{i + 1}\n" for i in range(5, 17)))
    Path("lexicon.txt").write_text("".join(f"w{i}\t{(-1) ** i * i / 10}\n" for i in range(3, 28)))

    joy, longer = "lexicon(path='lexicon.txt')", "length(target=3, scale=6)"
    functions = ROOT / "experiments" / "configs" / "experiment_rewards.py"
    poisoned = f"{functions}:Poisoned(lexicon='lexicon.txt', word='w9')"
    Path("one.toml").write_text(SETTINGS + reward("joy", joy))
    Path("two.toml").write_text(SETTINGS + reward("joy", joy, "bon:4") + reward("longer", longer, "bon:4"))
    measured = reward("true", joy, weight=0) + reward("word", "regex(pattern='w9')", weight=0)
    Path("poisoned.toml").write_text(SETTINGS + reward("poisoned", poisoned) + measured)


def reward(name: str, function: str, objective: str = "mean", weight: int = 1) -> str:
    """Section of a recipe."""
    return f'[rewards.{name}]\nfunction = "{function}"\nobjective = "{objective}"\nweight = {weight}\n'
