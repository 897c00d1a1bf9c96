"""Generate pages of the documentation: the reference from the code, the results from the table of the experiments.

mkdocs runs this file (``make docs``). In the working tree it writes to ``build/`` only.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import mkdocs_gen_files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
site_pages = import_module("site_pages")
trl_table = import_module("trl_table")
EXPERIMENTS = ROOT / "experiments"

CONFIGURATIONS = {
    "train": (
        "nlgrpo.config.schema",
        "Config",
        "Keys of `nlgrpo train`, `sweep`, `evaluate`, `rollout`, `iro`, `decode`",
    ),
    "reward-model": ("nlgrpo.apps.reward_model.config", "RewardModelConfig", "Keys of `nlgrpo reward-model train`"),
    "value": (
        "nlgrpo.apps.guided.value_config",
        "ValueConfig",
        "Keys of `nlgrpo value`",
    ),
}
WITH_KEYS = {"train", "reward-model", "value"}  # commands whose options are the configuration keys

# page: (title, packages in the order in which they are shown)
PAGES = {
    "objectives": ("Objectives and aggregation", ["nlgrpo.objectives"]),
    "calibration": ("Calibration, ECDFs, variational best-of-N", ["nlgrpo.calibration"]),
    "losses": ("Losses", ["nlgrpo.losses"]),
    "evaluation": ("Evaluation", ["nlgrpo.estimators", "nlgrpo.apps.evaluate", "nlgrpo.apps.report"]),
    "kernels": ("Kernels", ["nlgrpo.kernels"]),
    "model-engine": (
        "Model and engine",
        ["nlgrpo.model", "nlgrpo.engine", "nlgrpo.engine.backends", "nlgrpo.engine.environments"],
    ),
    "inference": ("Inference-time procedures", ["nlgrpo.apps.respond"]),
    "rollouts-rewards": ("Rollouts, rewards, data", ["nlgrpo.engine.rollouts", "nlgrpo.rewards", "nlgrpo.data"]),
    "training": (
        "Training",
        ["nlgrpo.training", "nlgrpo.apps.guided", "nlgrpo.apps.reward_model", "nlgrpo.apps.sweep"],
    ),
    "integrations": ("Integrations", ["nlgrpo.integrations"]),
    "runtime": ("Runtime", ["nlgrpo.runtime"]),
}

# What a configuration names, by its first part: (meaning, a line of configuration, estimators).
OBJECTIVES = {
    "mean": ("expected reward of one sample: plain GRPO", '"mean"', "plug-in"),
    "bon": ("best of N samples; pass@N for a reward of 0 and 1", '"bon:8"', "plug-in; `:unbiased` for N <= M; `:kde`"),
    "wor": ("worst of N samples", '"wor:2"', "plug-in; `:unbiased` for N <= M; `:kde`"),
    "bop": ("best of a Poisson number of samples, with this mean", '"bop:4.0"', "plug-in; `:kde`"),
    "cvar": ("mean of the worst ALPHA of the samples", '"cvar:0.1"', "plug-in; `:kde`"),
    "soft": ("soft best-of-N: a sample in proportion to exp(r / TAU)", '"soft:0.1"', "plug-in"),
    "erm": ("entropic risk; BETA > 0 seeks good samples, BETA < 0 avoids bad ones", '"erm:-2.0"', "plug-in"),
    "distortion": ("any other weight of the rank", '"distortion:0,1,2"', "plug-in; `:kde`"),
    "maj": ("majority vote over the final answers of N samples", '"maj:8"', "plug-in; `:unbiased` for N <= M"),
    "functional": ("any R of a group's probabilities and rewards", '"functional:file.py:R"', "autograd at p = 1/M"),
    "rao": ("diversity: how unlike two completions are", '"rao"', "unbiased"),
    "dpp": ("diversity: the log-volume that N completions span", '"dpp:3"', "unbiased"),
}
OBJECTIVES_TEXT = """\
A reward's `objective` says how its samples will be used ([choosing one](../concepts/choosing-an-objective.md)). M is
`rollout.samples`. For `rao` and `dpp` the reward's `function` is a similarity kernel. `nlgrpo evaluate` measures each
of them, and `parse` reads the names in Python.
"""


def modules(room: str) -> Iterator[str]:
    """Names of the modules of a package, without its subpackages; of a module, its own."""
    folder = ROOT / "kernels" if room == "nlgrpo.kernels" else ROOT / Path(*room.split("."))
    if not folder.is_dir():
        yield room
        return
    yield from (f"{room}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__")


def document(path: str, text: str) -> None:
    with mkdocs_gen_files.open(f"reference/{path}.md", "w") as page:
        page.write(text)


def objectives_table() -> list[str]:
    """Markdown: the objectives that a configuration names."""
    forms = import_module("nlgrpo.objectives.registry").FORMS
    assert set(OBJECTIVES) == set(forms), set(OBJECTIVES) ^ set(forms)
    lines = [OBJECTIVES_TEXT, "| name | what is maximised | configuration | estimators |", "|---|---|---|---|"]
    for name, (meaning, example, estimators) in OBJECTIVES.items():
        lines.append(f"| `{forms[name].text}` | {meaning} | `objective = {example}` | {estimators} |")
    return [*lines, ""]


def api_page(title: str, rooms: list[str]) -> str:
    lines = [f"# {title}\n"]
    if rooms == ["nlgrpo.objectives"]:
        lines += objectives_table()
    for room in rooms:
        names = list(modules(room))
        if names != [room]:
            lines.append(f"{inspect.getdoc(import_module(room)) or ''}\n")
        lines += [f"::: {module}\n" for module in names]
    return "\n".join(lines)


def descriptions(section: type) -> dict[str, str]:
    """Docstrings of a dataclass's fields by name: the string below each field."""
    tree = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(tree, ast.ClassDef)
    found, field = {}, ""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field = node.target.id
        elif field and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[field] = inspect.cleandoc(str(node.value.value))
            field = ""
    inherited = [descriptions(base) for base in section.__bases__ if dataclasses.is_dataclass(base)]
    return {name: text for base in inherited for name, text in base.items()} | found


def key_table(section: Any, prefix: str) -> list[str]:
    """Markdown table with a row for each key of a section of a configuration."""
    texts = descriptions(type(section))
    rows = ["| key | default | |", "|---|---|---|"]
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        text = " ".join(texts.get(field.name, "").split()).replace("|", "\\|")
        kind = str(field.type).replace("|", "\\|")
        rows.append(f"| `{prefix}{field.name}`<br>{kind} | `{value!r}` | {text} |".replace("`''`", '`""`'))
    return rows


def configuration_page() -> str:
    lines = [
        "# Configuration keys\n",
        "A recipe or the defaults come first, then a TOML file, then `--section.key value`; later values override. "
        "[Your own model, data and reward](../guides/your-model-data-reward.md) explains how.\n",
    ]
    for place, name, title in CONFIGURATIONS.values():
        config = getattr(import_module(place), name)
        lines.append(f"## {title}\n")
        scalars = [f for f in dataclasses.fields(config) if not dataclasses.is_dataclass(_default(config, f))]
        for field in dataclasses.fields(config):
            section = _default(config, field)
            if field not in scalars:
                lines += [f"### [{field.name}]\n", *key_table(section, f"{field.name}."), ""]
            elif field.name == "rewards":
                reward = import_module(place).RewardConfig()
                lines += ["### [rewards.NAME]\n", *key_table(reward, "rewards.NAME."), ""]
    return "\n".join(lines)


def _default(config: type, field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def help_of(where: str, arguments: list[str]) -> str:
    """What ``nlgrpo COMMAND --help`` prints."""
    module, function = where.split(":")
    shown = io.StringIO()
    os.environ["COLUMNS"] = "80"
    with redirect_stdout(shown):
        try:
            getattr(import_module(module), function)([*arguments, "--help"])
        except SystemExit as end:
            if end.code not in (0, None):
                raise RuntimeError(shown.getvalue()) from end
    return "\n".join(line.rstrip() for line in shown.getvalue().splitlines()).strip()


def commands_page() -> str:
    cli = import_module("nlgrpo.cli")
    lines = ["# Commands\n", "`nlgrpo --help` lists the commands, `nlgrpo COMMAND --help` their options.\n"]
    for name, (where, about) in cli.COMMANDS.items():
        escaped = about.replace("[", "\\[")  # brackets are links in Markdown
        lines += [f"## nlgrpo {name}\n", f"{escaped}\n"]
        if name in WITH_KEYS:
            lines.append("Its options are the [configuration keys](configuration.md) and `--dry-run`.\n")
        else:
            lines.append(f"```text\n{help_of(where, [])}\n```\n")
    return "\n".join(lines)


def results_page() -> str:
    """The table of the experiments. A record's name is the name of its folder, and the anchor of its row."""
    anchors: set[str] = set()

    def named(found: re.Match[str]) -> str:
        name = found[1]
        first = name not in anchors
        anchors.add(name)
        return f'<a id="{name}"></a>`{name}`' if first else f"`{name}`"

    text = (EXPERIMENTS / "README.md").read_text("utf-8")
    return re.sub(r"\[(\w+)\]\(\1/README\.md\)", named, text)


def pictures() -> None:
    """Copy the pictures of the experiments that pages show."""
    for page in (ROOT / "docs").rglob("*.md"):
        for name in site_pages.PICTURE.findall(page.read_text("utf-8")):
            with mkdocs_gen_files.open(f"pictures/{name}", "wb") as copy:
                copy.write((EXPERIMENTS / name).read_bytes())


sys.path.insert(0, str(ROOT))
with mkdocs_gen_files.open("results.md", "w") as results:
    results.write(results_page())
pictures()
document("commands", commands_page())
document("configuration", configuration_page())
document("trl-options", trl_table.page())
for page, (title, rooms) in PAGES.items():
    document(page, api_page(title, rooms))
