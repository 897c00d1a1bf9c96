"""The record on mazes: its tables follow from the committed successes, by another computation of pass@k."""

import json
import math
import re

import pytest
import torch
from support.helpers import REPOSITORY

from experiments.mazes import maze_curves, maze_record
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, write_evaluation
from nlgrpo.estimators import two_way_interval
from nlgrpo.training import evaluation_summary

FOLDER = REPOSITORY / "experiments" / "mazes"
RESULTS = FOLDER / "results"
COUNTS = RESULTS / "counts.json"
PAGE = FOLDER / "README.md"
KS = (1, 8, 64, 256)


def pass_at(k, right, samples):
    """Chen et al. (2021): one minus the probability that k of the samples, drawn without replacement, are all wrong."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def mean_pass_at(k, method):
    values = [pass_at(k, right, method["samples"]) for counts in method["counts"].values() for right in counts]
    return sum(values) / len(values)


def rows_of(text):
    """First cell of each row of the Markdown tables in a text, and the other cells."""
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


def test_the_tables_follow_from_the_successes(tmp_path, capsys):
    methods = json.loads(COUNTS.read_text())
    assert maze_record.main([str(COUNTS), "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    assert (tmp_path / "tables.md").read_text() == (RESULTS / "tables.md").read_text()
    assert json.loads((tmp_path / "counts.json").read_text()) == methods
    found = rows_of((tmp_path / "tables.md").read_text())
    for name, method in methods.items():
        assert len(method["counts"]) == 5
        for k, cell in zip(KS, found[name], strict=False):
            assert float(cell.split()[0]) == pytest.approx(mean_pass_at(k, method), abs=5.1e-4)


def test_the_page_and_the_readme_have_these_tables():
    page = PAGE.read_text()
    for line in (RESULTS / "tables.md").read_text().splitlines():
        if line and "---" not in line:
            assert line in page
    shown = rows_of((RESULTS / "tables.md").read_text())
    readme = rows_of((REPOSITORY / "README.md").read_text())
    for name, label in (("untrained", "before training"), ("GRPO", "GRPO"), ("bon:8:unbiased", "best-of-8 (nlgrpo)")):
        assert readme[label] == shown[name][: len(KS)]


def test_the_figures_beside_a_run_are_those_of_the_record():
    method = json.loads(COUNTS.read_text())["GRPO"]
    content = json.loads((REPOSITORY / "nlgrpo" / "data" / "assets" / evaluation_summary.RECORDED).read_text())
    for k in KS:
        value, low, high = content["pass_at_k"][str(k)]
        per_seed = [[pass_at(k, right, method["samples"]) for right in counts] for counts in method["counts"].values()]
        assert [value, low, high] == pytest.approx(two_way_interval(torch.tensor(per_seed))[:3], abs=6e-5)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def samples_of(rate, kl, seed=0):
    generator = torch.Generator().manual_seed(seed)
    solved = (torch.rand(6, 64, generator=generator) < rate).double()
    return EvaluationSamples(
        rewards={"solved": solved},
        lengths=torch.full((6, 64), 5),
        objectives={"solved": "mean"},
        weights={"solved": 1.0},
        max_length=40,
        kl={} if kl is None else {"k1": torch.full((6, 64), kl, dtype=torch.float64)},
    )


def evaluation(folder, **changed):
    models = {"reference": samples_of(0.2, None)}
    for seed in (1, 2):
        models |= {
            f"GRPO/{seed}/50": samples_of(0.4, 0.3, seed),
            f"GRPO/{seed}/100": samples_of(0.6, 0.9, seed + 2),
            f"bon:8/{seed}/50": samples_of(0.5, 0.2, seed + 4),
            f"bon:8/{seed}/100": samples_of(0.5, 0.6, seed + 6),
        }
    folder.mkdir()
    write_evaluation(folder, **models | changed)
    return models


def test_methods_are_compared_at_equal_kl(tmp_path, capsys):
    models = evaluation(tmp_path / "evaluation")
    options = ["--out", str(tmp_path / "out"), "--kl", "0.45", "--pass1", "0.3", "0.99"]
    assert maze_curves.main([str(tmp_path / "evaluation"), *options]) == 0
    capsys.readouterr()

    def at(method, low, high, share):
        """(S, P) of pass@8, linear between two steps."""
        values = []
        for seed in (1, 2):
            rows = []
            for step in (low, high):
                solved = models[f"{method}/{seed}/{step}"].rewards["solved"].sum(1).int().tolist()
                rows.append(torch.tensor([pass_at(8, right, 64) for right in solved], dtype=torch.float64))
            values.append((1 - share) * rows[0] + share * rows[1])
        return torch.stack(values)

    mean, low, high, _ = two_way_interval(at("bon:8", 50, 100, 0.25 / 0.4) - at("GRPO", 50, 100, 0.15 / 0.6))
    text = (tmp_path / "out" / "curves.md").read_text()
    (row,) = re.findall(r"\| 0\.45 \| bon:8 - GRPO \|(.*)\|", text)
    assert row.split("|")[1].strip() == f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    assert "| 0.99 |" not in text  # GRPO never has it
    mean, low, high, _ = two_way_interval(at("bon:8", 50, 100, 1.0) - at("GRPO", 50, 100, 0.3 / 0.6))
    (row,) = re.findall(r"\| 0\.600 \| bon:8 at its end - GRPO \|(.*)\|", text)
    assert row.split("|")[1].strip() == f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
    saved = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert saved["GRPO"]["counts"]["50"]["1"] == models["GRPO/1/50"].rewards["solved"].sum(1).int().tolist()
