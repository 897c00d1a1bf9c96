"""The tables of GPU measurements: from which files they come, and that the committed pages are theirs."""

import copy
import json
import shutil

import pytest
from gpu_kit import plan, tables

ROOT = plan.ROOT
ROW = {
    "rows": 256, "tokens_per_second": 23456.7, "seconds_per_token": 0.0109, "kernel_seconds_per_token": 0.004,
    "launches_per_token": 1120, "launches_per_layer": 45.0, "sampler_seconds_per_token": 0.0015,
    "attention_seconds_per_token": 0.002, "peak_bytes": 3 * 2**30, "planned_bytes": 2.5 * 2**30, "prefill_seconds": 1.0,
}  # fmt: skip
TRL = {"title": "TRL", "seconds": 3.0, "tokens_per_s": 4000.0, "peak_mib": 2048.0}
RECORD = {
    "format": plan.FORMAT,
    "date": "2026-12-01T10:00:00+00:00",
    "rehearsal": False,
    "card": "NVIDIA H100 80GB HBM3",
    "driver": "580.1",
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0"},
    "commit": "0123456789abcdef",
    "dirty": False,
    "steps": {
        "smoke": {"status": "ok", "seconds": 12.0, "values": {}},
        "train": {"status": "failed", "seconds": 60.0, "values": {}, "error": "a | b\nc"},
        "ceilings": {"status": "ok", "seconds": 5.0, "values": {"copy_bytes_per_second": 3.0e12}},
        "engine": {"status": "ok", "seconds": 50.0, "values": {"0.5B": {"parameters": 5, "rows": [ROW]}}},
        "step": {"status": "ok", "seconds": 50.0, "values": {"ratio": 2.0, "trl": TRL}},
    },
}


@pytest.fixture
def tree(tmp_path):
    """A copy of the generated files, and a folder for results."""
    for name in ("README.md", "docs/guides/kernels.md", "experiments/gpu/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bench/results/gpu").mkdir(parents=True)
    return tmp_path


def add(tree, name, **changes):
    record = copy.deepcopy(RECORD) | changes
    (tree / "bench/results/gpu" / name).write_text(json.dumps(record))
    return record


def test_the_committed_pages_are_what_the_generator_makes(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_without_a_file_all_pages_say_not_measured(tree):
    for name in ("README.md", "docs/guides/kernels.md"):
        (tree / name).write_text("before <!-- gpu -->old<!-- /gpu --> after")
    assert tables.main(["--check"], tree) == 1
    assert tables.main([], tree) == 0
    assert (tree / "README.md").read_text() == f"before <!-- gpu -->{tables.MISSING}<!-- /gpu --> after"
    assert "**not measured**" in (tree / "experiments/gpu/README.md").read_text()
    assert tables.main(["--check"], tree) == 0


def test_figures_of_a_card_are_shown_and_missing_steps_are_not_measured(tree):
    add(tree, "h100-80gb-hbm3-2026-12-01.json")
    assert tables.main([], tree) == 0
    page = (tree / "experiments/gpu/README.md").read_text()
    assert "## NVIDIA H100 80GB HBM3" in page
    assert "| 0.5B | 256 | 23,457 | 10.9 | 4 | 45 | 1.5 | 2 | 3 | 2.5 |" in page
    assert "moves 3 TB/s" in page
    assert "runs at not measured TFLOP/s" in page
    assert "Update: not measured." in page
    assert "| nlgrpo | not measured |" in page
    assert "| TRL | 3 | 4,000 | 2 |" in page
    assert "| failed | 60 | a / b c |" in page
    readme = (tree / "README.md").read_text()
    assert "On one NVIDIA H100 80GB HBM3, a 0.5B model samples 23,457 tokens per second" in readme
    assert "a training step takes 1/2 of TRL's time" in readme
    assert "not measured yet" not in readme


def test_the_newest_file_of_each_card_counts(tree):
    add(tree, "h100-80gb-hbm3-2026-12-01.json")
    add(tree, "h100-80gb-hbm3-2026-12-01-2.json", date="2026-12-01T12:00:00+00:00")
    add(tree, "x-2026-11-01.json", card="NVIDIA Unknown", date="2026-11-01T12:00:00+00:00")
    found = tables.newest(tree / "bench/results/gpu")
    assert [record["file"] for record in found.values()] == ["h100-80gb-hbm3-2026-12-01-2.json", "x-2026-11-01.json"]


def test_a_step_comes_from_the_newest_file_that_ran_it(tree):
    checked = {"smoke": {"status": "failed", "seconds": 1.0}, "engine": {"status": "ok", "seconds": 1.0}}
    skipped = {"engine": {"status": "skipped", "seconds": 0.0}, "tests": {"status": "skipped", "seconds": 0.0}}
    add(tree, "h100-80gb-hbm3-2026-12-01-2.json", date="2026-12-01T12:00:00+00:00", steps=checked)
    add(tree, "h100-80gb-hbm3-2026-12-01-3.json", date="2026-12-01T13:00:00+00:00", steps=skipped)
    add(tree, "h100-80gb-hbm3-2026-12-01.json")
    (record,) = tables.newest(tree / "bench/results/gpu").values()
    assert record["file"] == "h100-80gb-hbm3-2026-12-01-3.json"
    expected = RECORD["steps"] | checked | {"tests": skipped["tests"]}
    origins = {name: entry.pop("origin") for name, entry in record["steps"].items()}
    assert record["steps"] == expected
    assert origins["smoke"] == "h100-80gb-hbm3-2026-12-01-2.json, `0123456`"
    assert origins["train"] == "h100-80gb-hbm3-2026-12-01.json, `0123456`"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(RECORD | {"format": 2}), "expected a result of the GPU kit of format 1, got 2"),
        (json.dumps({"bench": "step"}), "expected a result of the GPU kit of format 1, got None"),
        (json.dumps([]), "expected a result of the GPU kit of format 1, got 'list'"),
        ("{", "not a JSON file"),
        (json.dumps(RECORD | {"rehearsal": True}), "this is a rehearsal on a CPU"),
        (json.dumps({k: v for k, v in RECORD.items() if k != "card"}), "the keys card are missing"),
    ],
)
def test_another_file_is_refused_with_its_name(tree, content, message, capsys):
    before = (tree / "README.md").read_text()
    (tree / "bench/results/gpu/strange.json").write_text(content)
    assert tables.main([], tree) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "strange.json" in line
    assert message in line
    assert (tree / "README.md").read_text() == before


def test_a_page_without_its_markers_is_refused_with_its_name(tree, capsys):
    (tree / "README.md").write_text("no markers")
    assert tables.main([], tree) == 2
    assert capsys.readouterr().err.startswith("error: README.md: expected <!-- gpu -->")
