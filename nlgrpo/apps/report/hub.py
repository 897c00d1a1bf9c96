"""A finished run on the Hugging Face Hub: its model, its report, and a model card made from its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData

from nlgrpo import __version__
from nlgrpo.apps.report import configurations, recorded_tables, report, run_loader
from nlgrpo.config import comparing, toml_file
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, read_evaluation
from nlgrpo.errors import UserError, as_user_error
from nlgrpo.training.evaluation_summary import changes, format_change, format_interval
from nlgrpo.training.tracking import run_files

MODELS = ("model", "adapter")
ATTACHED = (run_files.METRICS_FILE, report.FILE)  # of the run, in the folder `nlgrpo` of the repository
TOML = "run.toml"  # its configuration, in the same folder


def exported(run: Path) -> Path:
    """Return the folder of the trained model, or of its adapter. Raises UserError for a run that has not finished."""
    for name in MODELS:
        if (run / name / "config.json").is_file() or (run / name / "adapter_config.json").is_file():
            return run / name
    raise UserError(f"{run} has no trained model: the run has not finished, or the folder is not that of a run")


def model_card(run: Path, repository: str) -> str:
    """Return the model card of a finished run, with its metadata.

    It has the data, the objectives, the results before and after training with intervals, the command and the versions.
    Raises UserError as `exported`.
    """
    adapter = exported(run).name == "adapter"
    notes: list[str] = []
    config = configurations.read(run, notes)
    base = configurations.section(config, "model").get("path") or ""
    source = configurations.section(config, "data").get("source") or ""
    kind = recorded_tables.command_of(config)
    of_kind = {"train": ["grpo", "reinforcement-learning"], "reward-model train": ["reward-model"]}
    tags = ["nlgrpo", *of_kind.get(kind, ["value-model"]), *(["lora"] if adapter else [])]
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation" if kind == "train" else "text-classification",
        base_model=base if _on_hub(base) else None,
        datasets=[source] if _on_hub(source) else None,
        tags=tags,
    )
    start = _shown(base) or "its embedded model"
    if kind == "train":
        parts = [
            f"Trained with nlgrpo from `{start}` on `{_shown(source)}`, for the objectives below.",
            "## Objectives",
            _objectives(config),
            "## Results",
            _results(run, config),
        ]
    else:
        on = f" on `{_shown(source)}`" if source else ""
        parts = [
            f"A {tags[1].replace('-', ' ')}, trained with nlgrpo from `{start}`{on}.",
            "## Results",
            _recorded(run),
        ]
    parts = [f"# {repository.rpartition('/')[2]}", *parts, "## Training", _training(run, config, kind)]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"))


def _on_hub(name: str) -> bool:
    """Whether a name is that of a repository and not a local path."""
    return name.count("/") == 1 and not Path(name).exists() and not name.startswith((".", "/", "~"))


def _shown(name: str) -> str:
    """Return a name for the card: that of a repository or of a data set, or the last part of a local path."""
    return name if _on_hub(name) else Path(name).name


def _objectives(config: Mapping[str, Any]) -> str:
    rows = []
    for name, reward in configurations.section(config, "rewards").items():
        function = reward.get("function", "")
        objective = reward.get("objective", "")
        rows.append(f"| {name} | `{function}` | `{objective}` | {reward.get('weight', 1.0):g} |")
    table = "\n".join(["| reward | function | objective | weight |", "|---|---|---|---|", *rows])
    if len(rows) < 2:
        return table
    aggregate = configurations.section(config, "loss").get("aggregate", "sum")
    return f"{table}\n\nThe objectives are joined by `{aggregate}`."


def _results(run: Path, config: Mapping[str, Any]) -> str:
    """Return the table of results, or a sentence if the run was not evaluated."""
    try:
        found: dict[str, EvaluationSamples] = read_evaluation(run)
    except ValueError:
        found = {}
    if not {"before", "after"} <= found.keys():
        return "The run was not evaluated."
    samples = found["after"].lengths.shape[1]
    ns = [n for n in configurations.section(config, "evaluation").get("ns", (1, 4)) if n <= samples]
    lines = ["| reward | procedure | before | after | change |", "|---|---|---|---|---|"]
    for x in changes(found["before"], found["after"], ns):
        cells = [x.after.reward, x.after.procedure]
        cells += [format_interval(x.before), format_interval(x.after), format_change(x)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"{found['after'].size}, 95% intervals over prompts."]
    return "\n".join(lines)


def _recorded(run: Path) -> str:
    """Return the table of a model with one output, or a sentence if the run was not evaluated."""
    found = list(recorded_tables.sections(run, []))
    if not found:
        return "The run was not evaluated."
    table = found[0].content
    lines = [f"| {' | '.join(table.heads)} |", "|---" * len(table.heads) + "|"]
    lines += [f"| {' | '.join(cell.text for cell in row)} |" for row in table.rows]
    return "\n".join([*lines, "", found[0].about])


def _training(run: Path, config: Mapping[str, Any], kind: str) -> str:
    loss = configurations.section(config, "loss")
    optim = configurations.section(config, "optim")
    rollout = configurations.section(config, "rollout")
    logged = run_files.read_jsonl(run / run_files.METRICS_FILE)
    last = [entry["kl"] for entry in logged[-20:] if isinstance(entry.get("kl"), float)]
    kl = f", KL per token {math.fsum(last) / len(last):.3g} at the end" if last else ""
    steps = f"{len(logged)} steps"
    if kind == "train":
        steps += f" of {rollout.get('prompts')} prompts x {rollout.get('samples')} completions"
        steps += f", {loss.get('algorithm', 'grpo')}, beta {loss.get('beta', 0):g}"
    facts = f"{steps}, learning rate {optim.get('lr', 0):g}{kl}."
    versions = run_loader.versions(run) or {"torch": torch.__version__, "transformers": transformers.__version__}
    versions = {"nlgrpo": __version__, **versions}
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{facts}\n\n`nlgrpo {kind} nlgrpo/{TOML}` trains this model again. `nlgrpo/{report.FILE}` is the report, with "
        f"all curves, and `nlgrpo/{run_files.METRICS_FILE}` has the metrics of every step.\n\nVersions: {shown}."
    )


def push(run: Path, repository: str, *, private: bool = False) -> str:
    """Upload the model, its card and the report in one commit, and return the address.

    The token is that of ``hf auth login`` or HF_TOKEN. Creates the repository if it is not there. Raises UserError as
    `exported`, and for what the Hub refuses.
    """
    folder = exported(run)
    card = model_card(run, repository)
    if not (run / report.FILE).is_file():
        report.write_report(run)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files |= {f"nlgrpo/{name}": run / name for name in ATTACHED if (run / name).is_file()}
    operations = [CommitOperationAdd(name, path) for name, path in files.items() if name != "README.md"]
    operations.append(CommitOperationAdd("README.md", card.encode()))
    keys = configurations.read(run, [])
    if recorded_tables.command_of(keys) == "train":
        keys = comparing.without_defaults(keys)  # the other commands have defaults of their own
    operations.append(CommitOperationAdd(f"nlgrpo/{TOML}", toml_file.text(keys).encode()))
    api = HfApi(library_name="nlgrpo", library_version=__version__)
    try:
        created = api.create_repo(repository, private=private, exist_ok=True)
        api.create_commit(created.repo_id, operations, commit_message="Upload a run of nlgrpo")
    except Exception as error:  # of httpx, the hub, and its upload extension
        text = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"cannot push to {repository}: {type(error).__name__}: {text}. The run is saved; `nlgrpo push {run} --repo "
            f"{repository}` tries again"
        ) from error
    return str(created)


def check_name(repository: str) -> None:
    """Raise UserError for a name that no repository can have."""
    from huggingface_hub.utils import validate_repo_id

    with as_user_error():
        validate_repo_id(repository)
