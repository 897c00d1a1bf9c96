"""Options of ``nlgrpo plan``; without PyTorch, so that ``--help`` takes no seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

ABOUT = """Plan a training run on GPUs: nlgrpo plan [recipe] [file.toml] --gpus 8 --gpu h100 [--section.key value ...]

Estimates the memory of each phase of a step, and names settings with which it fits. Recipe, file and keys are
those of `nlgrpo train`. Only the config.json of the model is read: no weights, data or rewards.

Exit status 1 if the run does not fit into the memory."""


@dataclass
class Options:
    """Options in addition to the configuration keys."""

    gpu: str
    """Kind of GPU, such as a100, h100, h200, b200, l40s, rtx4090; a wrong name lists all."""
    gpus: int = 1
    """Number of GPUs in all nodes: one rank on each."""
    gpus_per_node: int = 8
    """GPUs of a node, which share the memory of its host."""
    prompt_tokens: int | None = None
    """Tokens of the longest prompt. None: data.max_prompt_tokens, or 512."""
    json: str = ""
    """File for the plan in JSON; - for stdout, without the table."""


def read_options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the options, and the arguments that are left: those of `nlgrpo train`."""
    return tyro.cli(Options, args=list(arguments), prog="nlgrpo plan", description=ABOUT, return_unknown_args=True)
