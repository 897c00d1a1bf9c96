"""The data of the browser of completions: training, evaluations, what procedures return, and damaged files."""

import json
import math

import pytest
from support.reports import make_run, read_page, sample, sampled, write_lines

from nlgrpo.apps.report import completions
from nlgrpo.apps.report.report import write_report

OBJECTIVES = {"short": "bon:4:unbiased", "long": "wor:2"}


def test_a_group_is_the_completions_of_a_prompt_in_a_step(tmp_path):
    write_lines(tmp_path / "samples.jsonl", [sample(step, i) for step in (0, 10) for i in range(6)])
    source = completions.of_training(tmp_path, "training", "run", OBJECTIVES)
    assert source.numbers == ["short", "long", "linearized short", "linearized long", "advantage", "tokens"]
    assert [(group.step, group.prompt) for group in source.groups] == [(s, f"prompt {s} a story") for s in (0, 10)]
    column = source.groups[0].columns["run"]
    assert [one.text for one in column] == [f"sample {i} a story" for i in range(6)]
    assert column[1].numbers == [3, -3, 0.5, None, 0.25, 11]
    # of the first 4 rewards 0, 3, 1, 4; of the first 2 of their negatives
    assert [one.returned for one in column] == ["", "wor:2, long", "", "bon:4, short", "", ""]


def test_two_groups_of_one_prompt_are_told_apart_where_the_file_numbers_them(tmp_path):
    rows = [sample(0, i, group=g) for g in (0, 1) for i in range(2)]
    write_lines(tmp_path / "samples.jsonl", rows)
    source = completions.of_training(tmp_path, "training", "run", {})
    assert [len(group.columns["run"]) for group in source.groups] == [2, 2]


@pytest.mark.parametrize(
    ("objective", "rewards", "expected"),
    [
        ("bon:2", [0, 1, 2], 1),
        ("bon:2", [1, 1, 2], 0),  # the first of ties
        ("bon:4:unbiased", [3, None, 5], 2),  # fewer than N
        ("bon:2", [None, 1, 5], 1),
        ("wor:3", [2, 1, 1, 0], 1),
        ("bon:2", [None, None, 1], None),
        ("bon:2", [], None),
        ("mean", [1, 2], None),
        ("soft:0.1", [1, 2], None),
        ("bon:x", [1, 2], None),
        ("bon", [1, 2], None),
    ],
)
def test_what_a_procedure_returns(objective, rewards, expected):
    assert completions.returned(objective, rewards) == expected


def test_an_evaluation_has_the_models_side_by_side():
    before, after = sampled(20, text="x"), sampled(10, text="x")
    after.rewards["long"][0, 0] = math.nan
    source = completions.of_evaluation("evaluation", {"before training": before, "after training": after})
    (group,) = source.groups
    assert list(group.columns) == ["before training", "after training"]
    assert source.numbers == ["short", "long", "tokens"]
    for label, one in (("before training", before), ("after training", after)):
        column = group.columns[label]
        assert len(column) == 16
        best = max(range(4), key=lambda j, one=one: one.rewards["short"][0, j].item())
        assert "bon:4, short" in column[best].returned
        assert column[3].numbers[0] == pytest.approx(one.rewards["short"][0, 3].item(), rel=1e-5)
        assert column[3].numbers[2] == one.lengths[0, 3].item()
    assert group.columns["after training"][0].numbers[1] is None


def test_what_was_returned_is_marked_only_if_its_text_was_saved():
    """Of the first N of all samples, of which fewer texts are kept."""
    many = sampled(n=32, objective="bon:32")
    many.completions[0] = many.completions[0][:16]
    best = int(many.rewards["short"][0].argmax())
    for saved in (16, 32):
        many.completions[0] = ["text"] * saved
        source = completions.of_evaluation("evaluation", {"model": many})
        marked = [i for i, one in enumerate(source.groups[0].columns["model"]) if "short" in one.returned]
        assert marked == ([best] if best < saved else [])
    assert best >= 16  # else this tests nothing


def test_more_texts_than_samples_are_cut():
    damaged = sampled(n=4)
    damaged.completions[0] = ["text"] * 9
    assert len(completions.of_evaluation("evaluation", {"m": damaged}).groups[0].columns["m"]) == 4


def test_the_size_of_the_page_counts_its_bytes():
    group = completions.Group("", 0, {"m": [completions.Completion("<" * 10 + "日" * 10, [])]})
    assert group.size == 200 + 10 * 6 + 10 * 3


DAMAGED = [
    {"step": 0},
    {"step": 1, "prompt": ["no", "text"], "completion": None, "rewards": [1], "linearized": 3, "advantage": "x"},
    {"step": 2, "prompt": "p", "completion": "c", "rewards": {"r": "1", "s": True}, "extra": "text", "tokens": 1e999},
    {"step": 3, "prompt": "p", "completion": "c", "rewards": {"r": float("nan")}, "extra": {"seen": 3}},
]


def test_a_damaged_file_is_shown_as_far_as_it_goes(tmp_path, undrawn):
    run = make_run(tmp_path / "run")
    with (run / "samples.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in DAMAGED) + '{"step": 4, "pro\n\x00\x00\n[1]\n"text"\n')
    data = read_page(write_report(run)).data["completions-data"]
    groups = data["sources"][1]["groups"]
    assert [group["step"] for group in groups] == [0, 10, 20, 0, 1, 2, 3]
    values = dict(zip(data["sources"][1]["numbers"], groups[-1]["columns"][0]["samples"][0][1], strict=True))
    assert values == {"short": None, "long": None, "r": None, "s": None, "linearized short": None,
                      "linearized long": None, "advantage": None, "tokens": None}  # fmt: skip
    assert groups[-1]["columns"][0]["samples"][0][2] == "seen 3"


def test_texts_are_cut_and_too_many_are_thinned_out_and_counted(tmp_path, monkeypatch):
    long = "x" * 1_000_000
    write_lines(tmp_path / "samples.jsonl", [sample(i, 0, completion=long) for i in range(10)])
    source = completions.of_training(tmp_path, "training", "run", {})
    text = source.groups[0].columns["run"][0].text
    assert text.startswith("x" * completions.TEXT + " … (980,000 more characters")
    monkeypatch.setattr(completions, "IN_ALL", 5 * source.groups[0].size)
    data = completions.browser([source], {})
    assert [group["step"] for group in data["sources"][0]["groups"]] == [0, 2, 4, 6, 8]
    assert data["sources"][0]["left_out"] == 5


@pytest.mark.parametrize(("objective", "marked"), [("bon:4", True), ("mean", False)])
def test_what_is_marked_is_explained_where_something_is(tmp_path, undrawn, objective, marked):
    page = read_page(write_report(make_run(tmp_path / "run", objective)))
    assert ("Marked: what best-of-N or worst-of-N" in page.text) == marked


def test_a_run_without_samples_has_no_browser(tmp_path, undrawn):
    run = make_run(tmp_path / "run", evaluated=())
    (run / "samples.jsonl").unlink()
    assert "completions-data" not in read_page(write_report(run)).data
