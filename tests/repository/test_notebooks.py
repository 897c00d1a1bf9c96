"""The notebooks run from the first cell to the last, and what they say about their numbers is true."""

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.records]

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def printed(book):
    """Text that the cells of a notebook printed."""
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


def check(name, text):
    numbers = {line.split("  ")[0].strip(): re.findall(r"-?\d+\.\d+", line) for line in text.splitlines()}
    if name == "best_of_n_in_ten_minutes":
        best_of_4, grpo, untrained = (float(numbers[model][1]) for model in ("best-of-4", "plain GRPO", "untrained"))
        assert best_of_4 > grpo
        assert best_of_4 > untrained
    elif name == "the_ops_in_trl":
        of_mean, of_best = ([float(x) for x in numbers[model]] for model in ("mean", "bon:4"))
        assert of_mean[0] > of_best[0]  # one sample
        assert min(of_mean[1], of_best[1]) > -0.02  # the best of four is near the optimum, 0
        assert float(re.search(r"gradients: (\S+)", text)[1]) < 1e-6
    else:
        assert "max smooth_min(gamma=4)" in text or "smooth_min" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert not any(output.get("output_type") == "error" for cell in book.cells for output in cell.get("outputs", ()))
    client = nbclient.NotebookClient(
        book, timeout=900, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    check(path.stem, printed(book))
    assert NOTEBOOKS
