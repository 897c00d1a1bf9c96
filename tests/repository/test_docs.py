"""Code in README and docs runs: Python as it is, commands with ``--dry-run`` or on small models, TOML as configuration.

An HTML comment may precede a block: ``<!-- test:setup ... -->`` has Python that runs before it, and
``<!-- test:skip: REASON -->`` skips the block.
"""

import gzip
import json
import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from support.helpers import REPOSITORY, tiny_model

from nlgrpo import cli
from nlgrpo.apps.report import figures
from nlgrpo.config import validate
from nlgrpo.config.recipes import recipe
from nlgrpo.config.schema import read_toml

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
COMMENT = r"(?:<!-- test:(?P<mark>setup|skip)(?P<text>.*?)-->\s*\n)?"
BLOCK = r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```"
FENCE = re.compile(COMMENT + BLOCK, re.DOTALL | re.MULTILINE)
SECTIONS = {
    "model",
    "data",
    "rollout",
    "rewards",
    "loss",
    "critic",
    "offline",
    "calibration",
    "optim",
    "train",
    "evaluation",
}
DRY = {"train", "rollout", "sweep", "reward-model", "value", "iro", "decode"}  # commands with this option
SMALLER = {"evaluate": ["--evaluation.prompts", "2"], "doctor": ["--only", "packages", "cpu"]}
REWARDS = """
def polite(prompts, completions, completion_ids, **columns):
    return [float("w3" in text) for text in completions]

def short(prompts, completions, completion_ids, strict=False, **columns):
    return [-float(len(ids)) for ids in completion_ids]
"""
ALIKE = """
import torch

def alike(completions, samples, **columns):
    lengths = torch.tensor([[float(len(text.split()))] for text in completions]).view(-1, samples, 1)
    return (-(lengths - lengths.mT).abs()).exp().flatten(0, 1)
"""
MY = """
[model]
path = "models/my-llama"
[data]
source = "prompts.jsonl"
[rollout]
prompts = 4
samples = 4
max_new_tokens = 8
[rewards.cheerful]
function = "lexicon(path='vader_lexicon.txt')"
objective = "bon:4"
weight = 0.5
[rewards.polite]
function = "rewards.py:polite"
objective = "mean"
weight = 0.5
[loss]
beta = 0.01
[evaluation]
prompts = 4
samples = 4
ns = [1, 4]
[train]
steps = 1
"""


@dataclass
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    code: str
    setup: str = ""
    skipped: bool = False


def blocks(page):
    text = page.read_text("utf-8")
    for found in FENCE.finditer(text):
        indent = len(found["indent"])
        code = "".join(line[indent:] for line in found["code"].splitlines(keepends=True))
        setup = found["text"] if found["mark"] == "setup" else ""
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(line, found["language"], code, setup, found["mark"] == "skip")


def of_language(page, *languages):
    return [block for block in blocks(page) if block.language in languages and not block.skipped]


def pages(*languages):
    chosen = [page for page in PAGES if of_language(page, *languages)]
    slow = [page.stem == "infalign-ctrl" for page in chosen]  # half a minute of commands
    marked = [pytest.param(page, marks=[pytest.mark.slow] * long) for page, long in zip(chosen, slow, strict=True)]
    return pytest.mark.parametrize("page", marked, ids=[str(page.relative_to(REPOSITORY)) for page in chosen])


def commands(code):
    """Yield the arguments of each ``nlgrpo`` or ``torchrun`` command of a shell block."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        words = words[1:] if words[:1] and "=" in words[0] and words[0].isupper() else words
        if words[:1] == ["torchrun"]:
            script = next(i for i, word in enumerate(words[1:], 1) if not word.startswith("-") or word == "-m")
            words = ["nlgrpo", "train", *words[script + 1 :]] if words[script] != "-m" else words[script + 1 :]
        if words and Path(words[0]).name in ("nlgrpo", "nlgrpo.cli"):
            yield words[1:]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A workspace with small models, data and finished runs, named as in the docs."""
    folder = tmp_path_factory.mktemp("workspace")
    tiny_model(folder / "models" / "my-llama", max_position_embeddings=2048)
    tiny_model(folder / "models" / "my-reward-model", max_position_embeddings=2048)
    _with_score_head(folder / "models" / "my-reward-model")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "alike.py").write_text(ALIKE)
    (folder / "my.toml").write_text(MY)
    (folder / "vader_lexicon.txt").write_text("w3\t1.5\nw4\t-0.5\n")
    rows = [{"prompt": f"w{i % 20} w{i // 20} w5", "answer": f"#### {i}"} for i in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    pairs = [{"chosen": f"w{i % 20} w{i // 20} w3", "rejected": f"w{i % 20} w{i // 20} w4"} for i in range(40)]
    with gzip.open(folder / "pairs.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, pairs)) + "\n")
    for path in ("examples", "experiments", "scripts"):
        (folder / path).symlink_to(REPOSITORY / path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("nlgrpo.apps.report.report.write_report", lambda run: run)  # figures take longer than these runs
        patch.setattr(figures, "render", lambda *_, **__: b"")
        small = ["--train.steps", "1", "--rollout.max-new-tokens", "8", "--evaluation.samples", "4"]
        for name in ("maze", "maze-grpo", "length-bon", "length-mean"):
            run(["train", name, *small, "--evaluation.prompts", "2", "--evaluation.ns", "1", "4"])
        run(["train", "my.toml"])
        run(["rollout", "my.toml", "--samples", "8", "--out", "runs/rollouts"])
        value = ["--data.rollouts", "runs/rollouts", "--model.path", "models/my-reward-model"]
        run(["value", "train", *value, "--train.out", "runs/value", "--train.epochs", "0.2"])
        shutil.copytree("runs/value", "runs/value-1")
        shutil.copytree("runs/value", "runs/value-2")
        run(["evaluate", "runs/length-bon", "--n", "4", "--ns", "1,4", "--evaluation.prompts", "2"])
    return folder


def _with_score_head(folder):
    """Turn a causal model into a sequence classifier with one output."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    width = weights["model.embed_tokens.weight"].shape[1]
    weights["score.weight"] = torch.linspace(-1, 1, width)[None].to(next(iter(weights.values())).dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "pad_token_id": 0}
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def workspace(made, monkeypatch, one_thread):
    """The folder as the current one. Figures are empty: drawing them takes longer than all commands."""
    monkeypatch.chdir(made)
    monkeypatch.setattr(figures, "picture", lambda draw: figures.Picture(b"", "<svg/>", "<svg/>"))
    monkeypatch.setattr(figures, "render", lambda *_, **__: b"")
    return made


def run(arguments):
    status = cli.main(arguments)
    assert status == 0


@pytest.mark.slow
@pages("python")
def test_python_blocks_run(page, workspace):
    namespace = {"__name__": "docs"}
    for block in of_language(page, "python"):
        exec(compile(block.setup, f"{page.name}, set-up of line {block.line}", "exec"), namespace)
        exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)


@pytest.mark.sampled(5)
@pages("bash")
def test_commands_run(page, workspace, capsys):
    for block in of_language(page, "bash"):
        for arguments in commands(block.code):
            name = arguments[0] if arguments else ""
            if "--help" in arguments:
                with pytest.raises(SystemExit) as end:
                    cli.main(arguments)
                assert end.value.code in (0, None)
                continue
            dry = ["--dry-run"] if name in DRY and "--dry-run" not in arguments else []
            try:
                run([*arguments, *dry, *SMALLER.get(name, [])])
            except (AssertionError, SystemExit) as error:
                shown = capsys.readouterr()
                raise AssertionError(f"{page}:{block.line}: nlgrpo {shlex.join(arguments)}\n{shown.err}") from error


@pages("toml")
def test_toml_blocks_are_configurations(page, workspace, tmp_path):
    for block in of_language(page, "toml"):
        found = tomllib.loads(block.code)
        if found.keys() & SECTIONS:
            (tmp_path / "block.toml").write_text(block.code)
            cfg = read_toml(tmp_path / "block.toml", recipe("blank"))
            if cfg.rewards:
                validate.check_config(cfg)


def test_blocks_are_found():
    """The README has blocks of all three kinds, and none is skipped."""
    readme = list(blocks(REPOSITORY / "README.md"))
    assert {"python", "toml", "bash"} <= {block.language for block in readme}
    assert not any(block.skipped for block in readme)
    assert [
        *commands("A=1\nnlgrpo train a --x 'b c' # d\ntorchrun --nproc-per-node=8 -m nlgrpo.cli iro x \\\n  y\n")
    ] == [
        ["train", "a", "--x", "b c"],
        ["iro", "x", "y"],
    ]


def test_the_readme_fits_two_screens():
    assert len((REPOSITORY / "README.md").read_text("utf-8").splitlines()) <= 200


def test_the_site_has_at_most_seven_tabs_and_about_40_000_words():
    settings = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text("utf-8"))
    assert len(settings["nav"]) <= 7
    pages = [*(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "experiments" / "README.md"]
    assert sum(len(page.read_text("utf-8").split()) for page in pages) < 43_000
