"""The console command ``nlgrpo``: train, generate, recipes, report, compare."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from tyro.conf import Positional

from nlgrpo import __version__, engine, hf_weights, report, train
from nlgrpo import model as models
from nlgrpo.recipes import RECIPES
from nlgrpo.run import load_tokenizer, stop_ids_of
from nlgrpo.sampling import Sampling


@dataclass
class Generate:
    """Draw completions from a model."""

    prompts: Positional[tuple[str, ...]]
    """Texts to continue."""
    model: str = "story-lm"
    """A Hugging Face directory or hub name, the `model` folder of a run, or the embedded "story-lm"."""
    samples: int = 1
    """Completions of each prompt."""
    max_new_tokens: int = 128
    """Longest completion."""
    temperature: float = 1.0
    """Divides the logits; 0: the most likely tokens."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the most likely tokens that hold this much probability."""
    min_p: float = 0.0
    """Keep the tokens that have this share of the likeliest one's probability."""
    seed: int = 0
    """The same seed draws the same completions."""
    json: bool = False
    """One JSON object a completion: prompt, text, token ids, log-probs, finish reason."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError('there is no prompt; give one or more texts, as in: nlgrpo generate "Once upon a time"')
        if not 1 <= self.samples < 2**31:
            raise ValueError(f"samples = {self.samples}: expected a number in [1, 2^31)")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed}: expected a number in [0, 2^63)")


def generate(arguments: Sequence[str]) -> int:
    """Draw completions from a model: nlgrpo generate "Once upon a time" --samples 4"""
    options = tyro.cli(Generate, args=list(arguments), prog="nlgrpo generate")
    source = hf_weights.locate(options.model)
    tokenizer = load_tokenizer(source)
    model = models.load(source, device="cuda" if torch.cuda.is_available() else "cpu")
    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        max_new_tokens=options.max_new_tokens,
        stop_ids=tuple(stop_ids_of(tokenizer, source)),
    )
    ids = [tokenizer(text, verbose=False).input_ids for text in options.prompts]  # too long: the engine says so
    rollout = engine.generate(model, ids, options.samples, sampling, seed=options.seed)
    completions, reasons = rollout.completion_ids(), rollout.finish_reasons()
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    logprobs = rollout.logprobs.flatten(0, 1).tolist()
    for i, (completion, text) in enumerate(zip(completions, texts, strict=True)):
        prompt = options.prompts[i // options.samples]
        if options.json:
            values = {"logprobs": logprobs[i][: len(completion)], "finish_reason": reasons[i]}
            print(json.dumps({"prompt": prompt, "text": text, "ids": completion} | values))
        else:
            print(f"{prompt}{text}\n    [{len(completion)} tokens, {reasons[i]}]")
    return 0


def list_recipes(arguments: Sequence[str]) -> int:
    """List the recipes that `nlgrpo train NAME` runs."""
    tyro.cli(_nothing, args=list(arguments), prog="nlgrpo recipes")
    for name, make in RECIPES.items():
        print(f"{name:<12} {(make.__doc__ or '').strip().splitlines()[0]}")
    return 0


def _nothing() -> None:
    """List the recipes that `nlgrpo train NAME` runs."""


@dataclass
class Report:
    """Write report.html and its pictures for a run."""

    run: Positional[Path]
    """Folder of the run."""


def write_report(arguments: Sequence[str]) -> int:
    """Write a run's report.html and pictures again: nlgrpo report runs/length-bon"""
    print(report.write_report(tyro.cli(Report, args=list(arguments), prog="nlgrpo report").run))
    return 0


@dataclass
class Compare:
    """Lay the length histograms and best-of-N curves of several runs over each other."""

    runs: Positional[tuple[Path, ...]]
    """Folders of the runs."""
    out: Path = Path("compare.png")
    """The picture."""


def compare(arguments: Sequence[str]) -> int:
    """Lay runs over each other in one picture: nlgrpo compare runs/length-bon runs/length-mean"""
    options = tyro.cli(Compare, args=list(arguments), prog="nlgrpo compare")
    print(report.compare(options.runs, options.out))
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train.main,
    "generate": generate,
    "recipes": list_recipes,
    "report": write_report,
    "compare": compare,
}
TRAIN_HELP = "Train: nlgrpo train [recipe] [file.toml] [--section.key value ...] [--dry-run]; --help lists every key"


def usage() -> str:
    lines = [f"nlgrpo {__version__}", "", "usage: nlgrpo COMMAND [--help]", ""]
    for name, command in COMMANDS.items():
        about = TRAIN_HELP if name == "train" else (command.__doc__ or "").strip()
        lines.append(f"  {name:<10} {about}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; 1, with a message, for what the user can mend; 2 for a command that does not exist."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has what it wants; Python flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0] not in COMMANDS:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(COMMANDS)}"
        print(f"error: unknown command {arguments[0]!r}; {hint}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[arguments[0]](arguments[1:])
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
