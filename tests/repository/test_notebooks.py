"""The notebooks run from the first cell to the last, and what they say about their numbers is true."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# the number of steps in a notebook, and a small one
STEPS = {
    "best_of_n_in_ten_minutes": ("--train.steps 200", "--train.steps 3"),
    "the_ops_in_trl": ("max_steps=120", "max_steps=3"),
    "your_own_rewards_and_several_users": ("\nsteps = 150", "\nsteps = 3"),
}


def outputs(book):
    return [output for cell in book["cells"] for output in cell.get("outputs", ())]


def printed(book):
    """Text that the cells of a notebook printed."""
    return "".join("".join(output.get("text", "")) for output in outputs(book))


def numbers_of(text, name):
    """The numbers in the lines of a table that begin with ``name``, in the order of the tables."""
    return [
        [float(number) for number in re.findall(r"-?\d+\.\d+", line)]
        for line in text.splitlines()
        if line.startswith(f"{name} ")
    ]


def check(name, text):
    """What the texts of a notebook say about its numbers."""
    assert "\x1b[2K" not in text, "a live line"
    if name == "best_of_n_in_ten_minutes":
        untrained = numbers_of(text, "untrained")[0]
        grpo, distances_of_grpo = numbers_of(text, "plain GRPO")
        best_of_4, distances = numbers_of(text, "best-of-4")
        assert best_of_4[1] > max(grpo[1], untrained[1])
        assert grpo[1] - grpo[0] < best_of_4[1] - best_of_4[0], "the best of four gains little"
        for distance, of_grpo in zip(distances, distances_of_grpo, strict=True):
            assert distance < of_grpo
    elif name == "the_ops_in_trl":
        [[of_mean, best_of_mean]] = numbers_of(text, "mean")
        [[of_best, best_of_best]] = numbers_of(text, "bon:4")
        assert of_mean > of_best
        assert best_of_best > best_of_mean
        assert float(re.search(r"gradients: (\S+)", text)[1]) < 1e-6
    else:
        assert "maximise smooth_min:4 of" in " ".join(text.split())


def run(path, folder, monkeypatch, steps=None):
    """Run the notebook, with other ``steps`` if given, as (text, replacement)."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    if steps is not None:
        changed = [cell for cell in book.cells if steps[0] in cell.source]
        assert changed
        for cell in changed:
            cell.source = cell.source.replace(*steps)
    nbclient.NotebookClient(
        book, timeout=900, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()
    return book


@EACH
def test_what_a_notebook_shows_is_what_it_says(path):
    book = json.loads(path.read_text("utf-8"))
    assert not [output for output in outputs(book) if output["output_type"] == "error"]
    check(path.stem, printed(book))


@pytest.mark.slow
@EACH
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    book = run(path, tmp_path, monkeypatch, STEPS[path.stem])
    assert not [output for output in outputs(book) if output["output_type"] == "error"]
    assert "error:" not in printed(book)


@pytest.mark.slow
@pytest.mark.records
@EACH
def test_a_notebook_is_right_again(path, tmp_path, monkeypatch):
    check(path.stem, printed(run(path, tmp_path, monkeypatch)))
