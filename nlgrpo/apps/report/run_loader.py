"""Loads runs, evaluations, sweeps and searches from their folders for a report.

A run may still be training or may have been killed, and files may be damaged: what cannot be read is listed in
``notes``, and the rest is loaded. Shapes: P prompts, n samples per prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nlgrpo.apps.evaluate import results
from nlgrpo.apps.evaluate.named_models import split_label
from nlgrpo.apps.report import configurations, recorded_tables
from nlgrpo.apps.report.logged import Logged, mean_over_runs, objective_text
from nlgrpo.apps.sweep import state as sweep_state
from nlgrpo.engine.rollouts.evaluation_samples import (
    EVALUATION_FILE,
    Coverage,
    EvaluationSamples,
    pooled,
    read_evaluation,
)
from nlgrpo.errors import UserError
from nlgrpo.objectives.rank_based import OfN
from nlgrpo.objectives.registry import is_pairwise, is_voted, parse
from nlgrpo.training.evaluation_entries import Entry, compared, entries
from nlgrpo.training.evaluation_summary import WEIGHTED_SUM, Estimate, weighted_best_of_n
from nlgrpo.training.tracking import run_files

NS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REFERENCE = "reference"
# reading a file that is damaged, of another version, or being removed
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)
TRAINING_KL = "kl/training"
OF_A_RUN = (*configurations.FILES, run_files.METRICS_FILE, EVALUATION_FILE)


@dataclass
class Model:
    """One trained model, or the models of several seeds: configuration, logged metrics and results.

    Unknown fields are empty.
    """

    label: str
    name: str  # of its folder or in its evaluation; models with the same name share a colour
    settings: str  # key of its configuration in `ReportData.settings`
    state: str = ""
    logged: Logged = field(default_factory=Logged)
    evaluated: Logged = field(default_factory=Logged)
    """The evaluations during training, with intervals."""
    sampled: EvaluationSamples | None = None
    reference: str = ""  # label of the reference that it is compared with
    entries: list[Entry] = field(default_factory=list)
    by_seed: dict[Any, EvaluationSamples] = field(default_factory=dict)
    given: str = ""  # the label that the user gave, of the whole sweep for its runs
    folders: Sequence[Path] = ()  # of its run, or of the runs of its seeds


@dataclass
class Settings:
    """A configuration and the library versions it ran with."""

    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class ReportData:
    """All loaded data; labels are unique."""

    models: list[Model] = field(default_factory=list)
    references: dict[str, EvaluationSamples] = field(default_factory=dict)
    reference_entries: list[Entry] = field(default_factory=list)
    settings: dict[str, Settings] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    recorded: list[tuple[str, Path]] = field(default_factory=list)  # folders with `recorded_tables`, by label

    @property
    def entries(self) -> list[Entry]:
        """Entries of the references, then of all models."""
        return self.reference_entries + [entry for model in self.models for entry in model.entries]

    @property
    def sampled(self) -> dict[str, EvaluationSamples]:
        """Samples by label, the references first."""
        return self.references | {m.label: m.sampled for m in self.models if m.sampled is not None}

    def reference_label(self, sampled: EvaluationSamples, of: str) -> tuple[str, bool]:
        """Return the label of a reference and whether it is new. Runs that start from the same model share it."""
        for label, known in self.references.items():
            if _same(known, sampled):
                return label, False
        label = f"{REFERENCE} of {of}" if self.references else REFERENCE
        self.references[label] = sampled
        return label, True


def read_runs(folders: Sequence[Path | str], *, join_seeds: bool = True) -> ReportData:
    """Load runs, evaluations, sweeps and searches, each with ``LABEL=`` before it for another name.

    With ``join_seeds``, finished runs that differ in the seed only are one model. Raises UserError for a folder of
    another kind.
    """
    found = ReportData()
    taken = set[str]()
    several = len(folders) > 1
    for text in folders:
        given, folder = split_label(str(text))
        kind = kind_of(folder)
        if kind == "sweep":
            _read_sweep(found, folder, given, taken)
            continue
        label = _unique(given, taken) if given else unique_label(folder, taken)
        if kind == "evaluation":
            _read_evaluation(found, folder, label, taken)
        elif kind == "search":
            _read_search(found, folder, label, named=several)
        else:
            _read_run(found, folder, label, given, named=several)
    if join_seeds:
        _join_seeds(found, taken)
    _add_weighted_sums(found)
    return found


def kind_of(folder: Path) -> str:
    """Return "run", "evaluation", "sweep" or "search". Raises UserError for a folder of another kind."""
    if (folder / sweep_state.SWEEP_FILE).is_file():
        return "sweep"
    of_a_run = _has(folder, run_files.METRICS_FILE, EVALUATION_FILE, results.RESULTS_FILE)
    if not of_a_run and recorded_tables.is_search(folder):
        return "search"
    if not _has(folder, *configurations.FILES, run_files.METRICS_FILE) and _is_evaluation(folder):
        return "evaluation"
    if not _is_run(folder):
        what = f"has none of {', '.join(OF_A_RUN)}" if folder.is_dir() else "is not a folder"
        raise UserError(
            f"{folder} {what}; give a folder written by `nlgrpo train`, such as runs/default, "
            "or by another command that trains, evaluates or decodes"
        )
    only_json = not _has(folder, *OF_A_RUN[1:])
    if only_json and "model_type" in configurations.read(folder, []):
        raise UserError(f"{folder} is a model directory; give the folder of a run, such as runs/default")
    return "run"


def _has(folder: Path, *names: str) -> bool:
    return any((folder / name).is_file() for name in names)


def _is_run(folder: Path) -> bool:
    return _has(folder, *OF_A_RUN)


def _is_evaluation(folder: Path) -> bool:
    """Whether the folder has results, or samples of models that begin with the reference."""
    if (folder / results.RESULTS_FILE).is_file():
        return True
    path = folder / EVALUATION_FILE
    return path.is_file() and path.read_bytes().startswith(f'{{"{REFERENCE}"'.encode())


def unique_label(folder: Path, taken: set[str]) -> str:
    """Return a label not in ``taken``, and add it: the folder's name, with parent folders as needed."""
    parts = [part.encode(errors="replace").decode() for part in folder.resolve().parts]  # a name may not be valid UTF-8
    labels = ["/".join(parts[-k:]).lstrip("/") or "/" for k in range(1, len(parts) + 1)]
    label = next((label for label in labels if label not in taken), labels[0])
    return _unique(label, taken)


def _unique(label: str, taken: set[str]) -> str:
    """Return the label, with a number if it is taken, and add it to ``taken``."""
    number = 2
    found = label
    while found in taken:
        found = f"{label} ({number})"
        number += 1
    taken.add(found)
    return found


def objective_label(sampled: EvaluationSamples) -> str:
    """Legend label of a run: its objective, such as ``"bon:4"`` or ``"mean (GRPO)"``, or that of each reward."""
    text = objective_text(sampled.objectives)
    return "mean (GRPO)" if text == "mean" else text


def _same(a: EvaluationSamples, b: EvaluationSamples) -> bool:
    """Whether both have the same lengths and rewards, and so are the same samples."""
    if not torch.equal(a.lengths, b.lengths) or a.rewards.keys() != b.rewards.keys():
        return False
    return all(
        torch.allclose(values, b.rewards[name], rtol=0, atol=0, equal_nan=True) for name, values in a.rewards.items()
    )


def comparable(sampled: Sequence[EvaluationSamples]) -> bool:
    """Whether all have the same number of prompts and the same rewards."""
    return len({(len(s.lengths), *sorted(s.rewards)) for s in sampled}) == 1


# --- runs and sweeps --------------------------------------------------------------------------------------------------


def _read_run(
    found: ReportData,
    folder: Path,
    label: str,
    given: str = "",
    *,
    named: bool,
    state: str = "",
    name: str = "",
) -> None:
    """Add the run in ``folder``; with ``named``, its notes begin with its label. ``name``: that of the folder if ""."""
    notes: list[str] = []
    logged = Logged.read(folder / run_files.METRICS_FILE)
    config = configurations.read(folder, notes)
    found.settings[label] = Settings(config, versions(folder))
    if not len(logged):
        notes.append(f"{run_files.METRICS_FILE} has no steps yet; the training curves are left out.")
    sampled: dict[str, EvaluationSamples] = {}
    if recorded_tables.command_of(config) == "train":
        sampled = _read_samples(folder, notes)
    else:
        state = state or ("finished" if recorded_tables.is_finished(folder) else "not finished")
    if recorded_tables.has_tables(folder):
        found.recorded.append((label, folder))
    model = Model(
        label,
        name=name or folder.resolve().name,
        settings=label,
        state=state or _state(folder, sampled),
        logged=logged,
        evaluated=Logged.of_evaluations(run_files.read_jsonl(folder / run_files.EVALUATIONS_FILE)),
        sampled=sampled.get("after"),
        given=given,
        folders=[folder],
    )
    if len(sampled) == 2 and not comparable(list(sampled.values())):
        notes.append(
            f"{EVALUATION_FILE} has different prompts or rewards before and after training; they are not compared."
        )
        sampled.pop("before")
    _evaluate_run(found, model, sampled)
    found.models.append(model)
    found.notes += [f"{label}: {note}" if named else note for note in notes]


def _read_search(found: ReportData, folder: Path, label: str, *, named: bool) -> None:
    """Add a search: its tables, and the runs of its value models."""
    notes: list[str] = []
    if _has(folder, *configurations.FILES):
        found.settings[label] = Settings(configurations.read(folder, notes))
    found.recorded.append((label, folder))
    if not recorded_tables.has_tables(folder):
        notes.append("There are no results yet: the search is running, or was stopped; the same command resumes it.")
    found.notes += [f"{label}: {note}" if named else note for note in notes]
    iterations = sorted(folder.glob("iteration-*/value"), key=lambda path: (len(str(path)), path))  # 2 before 10
    for value in [*iterations, *sorted(folder.glob("compressed-*"))]:
        if _is_run(value):
            own = f"{label}/{value.relative_to(folder)}"
            _read_run(found, value, own, named=True, name=own)


def versions(run: Path) -> dict[str, str]:
    """Library versions of the newest checkpoint."""
    known = sorted(run.glob("checkpoints/*/manifest.json"), key=lambda path: path.stat().st_mtime)
    if not known:
        return {}
    try:
        found = json.loads(known[-1].read_text("utf-8"))["versions"]
        return {str(name): str(version) for name, version in found.items()}
    except DAMAGED:
        return {}


def _read_samples(run: Path, notes: list[str]) -> dict[str, EvaluationSamples]:
    try:
        sampled = read_evaluation(run)
    except ValueError as error:
        notes.append(f"{error}.")
        return {}
    notes += [f"There is no evaluation {when} training yet." for when in ("before", "after") if when not in sampled]
    return sampled


def _state(run: Path, sampled: Mapping[str, EvaluationSamples]) -> str:
    if "after" in sampled:
        return "finished"
    return "not finished" if (run / run_files.METRICS_FILE).is_file() else "not started"


def _evaluate_run(found: ReportData, model: Model, sampled: Mapping[str, EvaluationSamples]) -> None:
    """Add the results of the model, and those of its reference if it is new."""
    if "before" in sampled:
        model.reference, new = found.reference_label(sampled["before"], model.label)
        if new:
            kept = {model.reference: sampled["before"]}
            found.reference_entries += entries(kept, _procedures(kept), ())
    if "after" not in sampled:
        return
    both = {model.label: sampled["after"]}
    if "before" in sampled:
        both = {model.reference: sampled["before"]} | both
    rows = entries(both, _procedures(both), ())
    model.entries = [entry for entry in rows if entry.model == model.label]
    distance = _training_kl(model.logged)
    if not math.isnan(distance):
        model.entries.append(Entry(model.label, TRAINING_KL, "", Estimate(distance, math.nan, math.nan)))


def _procedures(sampled: Mapping[str, EvaluationSamples]) -> list[str]:
    """Procedures for the available samples: best-of-N, the trained objectives, and worst-of-N if it was trained."""
    n = min(s.lengths.shape[1] for s in sampled.values())
    trained = [
        text for s in sampled.values() for text in s.objectives.values() if not (is_pairwise(text) or is_voted(text))
    ]
    ns = [best_of for best_of in NS if 1 < best_of <= n]
    names = ["mean", *(f"bon:{best_of}" for best_of in ns)]
    if any(text.startswith("wor:") for text in trained):
        names += [f"wor:{worst_of}" for worst_of in ns]
    names += [text for text in trained if _can_be_shown(text, n)]
    return list(dict.fromkeys(names))


def _can_be_shown(text: str, n: int) -> bool:
    """Whether an objective has a value of ``n`` samples; one of N is shown in its plain form only."""
    try:
        objective = parse(text)  # without user functions: a report never runs a run's code
    except ValueError:
        return False
    if isinstance(objective, OfN):
        return objective.n <= n and text.count(":") < 2
    return True


def _training_kl(logged: Logged) -> float:
    """KL per completion in nats: KL per token times length, over the last 10% of the steps; NaN if not logged."""
    per_token = logged.metrics.get("kl")
    length = logged.metrics.get("completions/mean_length")
    if per_token is None or length is None:
        return math.nan
    last = slice(-max(1, len(logged) // 10), None)
    products = (per_token * length)[last]
    known = products[~np.isnan(products)]
    return float(known.mean()) if len(known) else math.nan


def _read_sweep(found: ReportData, folder: Path, given: str, taken: set[str]) -> None:
    try:
        points = sweep_state.read_sweep_state(folder)
    except ValueError as error:
        found.notes.append(f"{error}.")
        return
    for point in points:
        label = _unique(f"{given}/{point.name}", taken) if given else unique_label(point.folder, taken)
        if _is_run(point.folder):
            _read_run(found, point.folder, label, given, named=True, state=point.state)
        else:
            found.settings[label] = Settings()
            found.models.append(Model(label, point.name, label, point.state))
        if point.state == "failed":
            found.notes.append(f"{label} failed: {point.error or 'see its log'}")


# --- runs that differ in the seed -------------------------------------------------------------------------------------


def _join_seeds(found: ReportData, taken: set[str]) -> None:
    """Replace the finished runs that differ in the seed only by one model, with intervals over seeds and prompts."""
    keys = []
    for model in found.models:
        config = found.settings[model.settings].config
        seed = configurations.seed_of(config) if _can_be_joined(found, model) else None
        keys.append((f"{model.given} {configurations.without_seed(config)}", seed))
    joined: list[Model] = []
    replaced: set[str] = set()  # references of single runs
    for group in configurations.grouped(keys):
        by_seed = {keys[number][1]: found.models[number] for number in group}
        if len(group) > 1 and _same_prompts([s for run in by_seed.values() for s in _before_and_after(found, run)]):
            replaced |= {model.reference for model in by_seed.values()}
            joined.append(_of_seeds(found, by_seed, taken))
        else:
            joined += [found.models[number] for number in group]
    found.models = joined
    unused = replaced - {model.reference for model in joined}
    found.references = {label: sampled for label, sampled in found.references.items() if label not in unused}
    found.reference_entries = [entry for entry in found.reference_entries if entry.model not in unused]


def _can_be_joined(found: ReportData, model: Model) -> bool:
    """Whether a run has what a mean over seeds needs: its configuration, and both evaluations."""
    own = model.settings == model.label and bool(found.settings[model.settings].config)
    return own and model.sampled is not None and model.reference in found.references


def _same_prompts(sampled: Sequence[EvaluationSamples]) -> bool:
    """Whether all have the same prompts, number of samples and rewards."""
    first = sampled[0]
    return comparable(sampled) and all(
        s.lengths.shape == first.lengths.shape and s.prompts == first.prompts for s in sampled
    )


def _before_and_after(found: ReportData, model: Model) -> list[EvaluationSamples]:
    assert model.sampled is not None
    return [found.references[model.reference], model.sampled]


def _of_seeds(found: ReportData, by_seed: Mapping[Any, Model], taken: set[str]) -> Model:
    """Return one model for runs that differ in the seed, and add its reference and its configuration."""
    ordered = dict(sorted(by_seed.items(), key=lambda item: str(item[0])))
    models = list(ordered.values())
    first = models[0]
    pairs = [_before_and_after(found, model) for model in models]
    before = pooled([pair[0] for pair in pairs])
    after = pooled([pair[1] for pair in pairs])
    label = _unique(f"{_name_without_seed(first)}, {len(models)} seeds", taken)
    config = found.settings[first.label].config
    train = {**configurations.section(config, "train"), "seed": list(ordered)}
    found.settings[label] = Settings({**config, "train": train}, found.settings[first.label].versions)
    for model in models:
        del found.settings[model.label]
    states = dict.fromkeys(model.state for model in models)
    joined = Model(label, label, label, ", ".join(states), mean_over_runs([model.logged for model in models]))
    joined.sampled = after
    joined.evaluated = mean_over_runs([model.evaluated.without_intervals() for model in models])
    joined.folders = [folder for model in models for folder in model.folders]
    joined.by_seed = {seed: model.sampled for seed, model in ordered.items() if model.sampled is not None}
    _evaluate_run(found, joined, {"before": before, "after": after})
    return joined


def _name_without_seed(model: Model) -> str:
    """Label that the user gave, or the name of a run's folder in a sweep without its seed, or the objective."""
    if model.given:
        return model.given
    parts = model.name.split(",")
    kept = [part for part in parts if not part.startswith("seed=")]
    if 0 < len(kept) < len(parts):
        return ",".join(kept)
    assert model.sampled is not None
    return objective_label(model.sampled)


# --- evaluations ------------------------------------------------------------------------------------------------------


def _read_evaluation(found: ReportData, folder: Path, label: str, taken: set[str]) -> None:
    """Add the models of an `nlgrpo evaluate`; a label that is taken gets the folder's label appended."""
    notes: list[str] = []
    rows, settings = _read_results(folder, notes)
    found.settings[label] = settings
    sampled = _read_samples_of_models(folder, notes)
    if not rows and sampled and comparable(list(sampled.values())):
        rows = entries(sampled, _procedures(sampled), ())
    names = list(dict.fromkeys([*sampled, *(entry.model for entry in rows)]))
    reference = ""
    for i, name in enumerate(names):
        if i == 0:
            reference = _reference_of_evaluation(found, sampled.get(name), label)
            found.reference_entries += [replace(e, model=reference) for e in rows if e.model == name]
            continue
        unique = f"{name} · {label}" if name in taken else name
        taken.add(unique)
        own = [replace(entry, model=unique) for entry in rows if entry.model == name]
        state = "evaluated" if own or name in sampled else "not evaluated"
        model = Model(unique, name, label, state, sampled=sampled.get(name), reference=reference, entries=own)
        found.models.append(model)
    found.notes += [f"{label}: {note}" for note in notes]


def _reference_of_evaluation(found: ReportData, sampled: EvaluationSamples | None, label: str) -> str:
    if sampled is None:
        return f"{REFERENCE} of {label}" if found.references else REFERENCE
    reference, new = found.reference_label(sampled, label)
    if not new:  # replaced by this evaluation's entries, which have its procedures
        found.reference_entries = [entry for entry in found.reference_entries if entry.model != reference]
    return reference


def _read_results(folder: Path, notes: list[str]) -> tuple[list[Entry], Settings]:
    path = folder / results.RESULTS_FILE
    try:
        content = json.loads(path.read_text("utf-8"))
        rows = [_entry(row) for row in content["results"]]
        versions = {name: str(content[name]) for name in ("nlgrpo", "torch") if name in content}
        config = content.get("config")
        return rows, Settings(config if isinstance(config, dict) else {}, versions)
    except DAMAGED as error:
        notes.append(f"{path.name} cannot be read ({error!r}); results are computed from the samples.")
        return [], Settings()


def _entry(row: Mapping[str, Any]) -> Entry:
    """Build an entry from a row of results.json; null means NaN or not measured."""
    return Entry(
        model=str(row["model"]),
        quantity=str(row["quantity"]),
        procedure=str(row["procedure"]),
        estimate=_estimate(row["estimate"]) or Estimate(math.nan, math.nan, math.nan),
        win_rate=_estimate(row["win_rate"]),
        change=_estimate(row["change"]),
        p_value=math.nan if row["p_value"] is None else float(row["p_value"]),
    )


def _estimate(data: Mapping[str, Any] | None) -> Estimate | None:
    if data is None:
        return None
    value, low, high = (math.nan if data[name] is None else float(data[name]) for name in ("value", "low", "high"))
    return Estimate(value, low, high, Coverage(**data.get("coverage") or {}))


def _read_samples_of_models(folder: Path, notes: list[str]) -> dict[str, EvaluationSamples]:
    try:
        return read_evaluation(folder)
    except ValueError as error:
        notes.append(f"{error}; histograms and completions are left out.")
        return {}


# --- the weighted sum of all rewards ----------------------------------------------------------------------------------


def _add_weighted_sums(found: ReportData) -> None:
    """Add entries of ``sum_i w_i BoN_i`` if there are several rewards and all models have the same weights.

    A model is compared with its reference at the prompts to which the same rewards apply.
    """
    every = list(found.sampled.values())
    if not every or len(every[0].weights) < 2 or any(s.weights != every[0].weights for s in every):
        return
    ns = [n for n in NS if n <= min(s.lengths.shape[1] for s in every)]
    values = {label: weighted_best_of_n(sampled, ns) for label, sampled in found.sampled.items()}
    for label, sampled in found.references.items():
        found.reference_entries += _weighted_sums(label, sampled, ns, values[label])
    for model in found.models:
        if model.sampled is None:
            continue
        sums = values[model.label]
        rows = _weighted_sums(model.label, model.sampled, ns, sums)
        reference = found.references.get(model.reference)
        if reference is not None and reference.lengths.shape[0] == model.sampled.lengths.shape[0]:
            base = values[model.reference].masked_fill(~model.sampled.same_rewards(reference), math.nan)
            for i, row in enumerate(rows):
                rows[i] = compared(row, sums[i], base[i], model.sampled.scored(), seeds=model.sampled.seeds)
        model.entries += rows


def _weighted_sums(label: str, sampled: EvaluationSamples, ns: Sequence[int], values: Tensor) -> list[Entry]:
    rows = []
    for n, of_n in zip(ns, values, strict=True):
        estimate = Estimate.of(of_n, sampled.scored(), sampled.prompts_of_rewards(), seeds=sampled.seeds)
        rows.append(Entry(label, WEIGHTED_SUM, "mean" if n == 1 else f"bon:{n}", estimate))
    return rows
