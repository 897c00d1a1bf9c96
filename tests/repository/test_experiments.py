"""The folder of the experiments: its table names every record, links and pictures exist, and every script runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.helpers import REPOSITORY

FOLDER = REPOSITORY / "experiments"
TABLE = FOLDER / "README.md"
RECORDS = sorted(FOLDER.glob("*/README.md"))
ROW = re.compile(r"^\| \[(?P<name>\w+)\]\((?P=name)/README\.md\) \|(?P<cells>.*)\|$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([\w-]+))?\)")
# Those of the page's own parts, and those of the repository that show a picture or a record.
PAGES = [TABLE, *RECORDS, REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

SCRIPTS = [
    "alignment_tradeoff.tradeoff",
    "default_recipe.tabular_lengths",
    "guided_ablations.guided_ablations",
    "guided_stories.guided_budgets",
    "guided_sums.make_arithmetic",
    "guided_sums.overestimation",
    "helpful_harmless.pareto",
    "inference_procedures.procedures",
    "length_objectives.length_objectives",
    "length_plateau.gradient_signal",
    "poisoned_rewards.poisoned_pairs",
    "poisoned_rewards.poisoned_reward",
    "predicted_gains.predict_gain",
    "trained_predictions.compare_seeds",
    "vbon_samples.vbon_records",
]
# `test_maze_record.py` runs these two: they only read what is committed.
READERS = ["mazes.maze_curves", "mazes.maze_record"]


def anchor(heading):
    """The anchor that Markdown gives a heading."""
    text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text))


def anchors(page):
    return {anchor(line.lstrip("#")) for line in page.read_text("utf-8").splitlines() if line.startswith("#")}


def test_the_table_has_every_record_with_all_its_cells():
    rows = list(ROW.finditer(TABLE.read_text("utf-8")))
    assert {row["name"] for row in rows} == {page.parent.name for page in RECORDS}
    for row in rows:
        claim, result, holds, date = (cell.strip() for cell in row["cells"].split(" | "))
        assert claim and result and holds, row["name"]  # noqa: PT018
        assert re.match(r"2026-\d\d-\d\d.*, .+", date), row["name"]
    lines = [line for line in TABLE.read_text("utf-8").splitlines() if line.startswith("| [")]
    assert len(lines) == len(rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_and_pictures_exist(page):
    for target, part in LINK.findall(page.read_text("utf-8")):
        if "reference/" in target or target.endswith("results.md"):
            continue  # pages that are generated
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert not part or part in anchors(file), f"{target}#{part}"


def test_every_picture_is_shown():
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target, _ in LINK.findall(page.read_text("utf-8"))
        if target.endswith(".png")
    }
    assert {path.resolve() for path in FOLDER.rglob("*.png")} <= shown


def test_every_script_is_run():
    runnable = {
        f"{path.parent.name}.{path.stem}"
        for path in FOLDER.glob("*/*.py")
        if '__name__ == "__main__"' in path.read_text("utf-8")
    }
    assert runnable == {*SCRIPTS, *READERS}


@pytest.mark.slow
@pytest.mark.records
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_quickly(name, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", f"experiments.{name}", "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert not list(Path(tmp_path).iterdir())  # it works in a folder of its own
