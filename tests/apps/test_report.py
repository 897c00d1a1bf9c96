"""The HTML report and the figures of complete, unfinished and damaged run folders, parsed as by a browser."""

import base64
import hashlib
import json
import math
import re
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image
from support.reports import EVIL, FILES, PICTURES, make_run, read_page, sampled, write_lines

from nlgrpo.apps.report import figures, run_loader
from nlgrpo.apps.report.compare import compare
from nlgrpo.apps.report.configurations import length_targets
from nlgrpo.apps.report.figures import Style
from nlgrpo.apps.report.report import write_report
from nlgrpo.engine.rollouts.evaluation_samples import write_evaluation
from nlgrpo.estimators import best_of_n
from nlgrpo.training import run_folder


def test_report_is_one_file_that_loads_nothing(tmp_path, undrawn):
    path = write_report(make_run(tmp_path / "run", text=EVIL))
    page = read_page(path)
    assert path == tmp_path / "run" / "report.html"
    assert page.urls
    assert all(url.startswith(("data:", "#")) for url in page.urls)
    assert not {"iframe", "object"} & set(page.tags)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert page.policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    text = path.read_text("utf-8")
    assert "url(" not in text
    assert "@import" not in text
    evaluation, training = page.data["completions-data"]["sources"]
    for column in evaluation["groups"][0]["columns"]:  # before and after training
        assert [sample[0] for sample in column["samples"]] == [f"completion {EVIL}"] * 16
    assert training["groups"][0]["prompt"] == f"prompt 0 {EVIL}"
    assert page.tags.count("img") == len(PICTURES)
    assert "viewport" in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.slow
def test_figures_are_written_as_files_and_for_every_screen(tmp_path):
    run = make_run(tmp_path / "run")
    page = read_page(write_report(run))
    svgs = [
        base64.b64decode(url.split(",")[1]).decode()
        for url in page.urls
        if url.startswith("data:image/svg+xml;base64,")
    ]
    assert len(set(svgs)) == 4 * len(PICTURES)  # wide and narrow, light and dark
    for svg in svgs:
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert ("#161b22" in svg) != ("#ffffff" in svg)
    for name in FILES:
        with Image.open(run / f"{name}.png") as image:
            image.load()
            assert image.info["dpi"] == pytest.approx((150, 150), abs=0.1)


def test_report_has_the_numbers_of_the_table(tmp_path, undrawn):
    run = make_run(tmp_path / "run", left_out={"dropped as too long": 3})
    page = read_page(write_report(run))
    assert "evaluated on 8 prompts x 16 samples; 3 dropped as too long" in page.text
    result, every = page.tables
    assert result[0] == ["reward", "procedure", "before", "after", "change"]
    for name in ("short", "long"):
        before, after = (best_of_n(sampled(mode).rewards[name], [1, 4]).mean(1) for mode in (20, 10))
        rows = [row for row in result if row[0] == f"{name} bon:4"]
        assert [row[1] for row in rows] == ["mean", "best-of-4"]
        for row, x, y in zip(rows, before, after, strict=True):
            assert (row[2].split()[0], row[3].split()[0]) == (f"{x:.4f}", f"{y:.4f}")
            assert float(row[4].split()[0]) == pytest.approx((y - x).item(), abs=1e-4)
        shown = {row[2]: row[3] for row in every if row[0].split()[-1] == "run" and row[1] == name}
        assert (shown["mean"], shown["bon:4"]) == (f"{after[0]:.4f}", f"{after[1]:.4f}")
    assert "weighted sum" in {row[1] for row in every}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("spoil", "message", "pictures", "has_curves"),
    [
        ({"evaluation.json": None}, "evaluation.json is missing", 0, True),
        ({"evaluation.json": '{"before": {"rew'}, "evaluation.json cannot be read", 0, True),
        ({"metrics.jsonl": None}, "metrics.jsonl has no steps yet", 3, False),
        ({"metrics.jsonl": '{"step": 0, "kl": 1.0}\n{"step": 1, "k'}, "1 logged steps", 3, True),
        ({"config.json": "{"}, "config.json cannot be read", 4, True),
        ({"config.json": None}, "config.json or config.toml is missing", 4, True),
        ({"config.json": None, "metrics.jsonl": None}, "metrics.jsonl has no steps yet", 3, False),
    ],
)
def test_report_of_a_killed_run_lists_what_is_missing(tmp_path, undrawn, spoil, message, pictures, has_curves):
    run = make_run(tmp_path / "run")
    for name, text in spoil.items():
        (run / name).unlink() if text is None else (run / name).write_text(text)
    page = read_page(write_report(run))
    assert message in page.text
    assert page.tags.count("img") == pictures
    assert ("charts-data" in page.data) == has_curves
    assert (run / "curves.png").exists() == has_curves


def test_report_before_training_has_finished(tmp_path, undrawn):
    page = read_page(write_report(make_run(tmp_path / "run", evaluated=("before",))))
    assert "There is no evaluation after training yet." in page.text
    assert "trained" not in page.text


def test_report_with_abstentions_and_a_single_sample_per_prompt(tmp_path, undrawn):
    run = make_run(tmp_path / "run", n=1)
    silent = sampled(n=1)
    silent.rewards["long"][:] = math.nan
    write_evaluation(run, before=silent, after=silent)
    page = read_page(write_report(run))
    assert "best-of-4" not in page.text
    assert "+nan" not in page.text


def test_folders_that_are_not_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has none of config\.json"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        write_report(tmp_path / "absent")
    with pytest.raises(ValueError, match="is not a folder"):
        compare([tmp_path / "absent"], tmp_path / "out.png")


def test_a_run_that_restarts_removes_its_report(tmp_path, undrawn):
    folder = make_run(tmp_path / "run")
    write_report(folder)
    assert len(list(folder.glob("*.png"))) == len(FILES)
    run_folder._clear(folder, run_folder.written())
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_toml_config_is_shown(tmp_path, undrawn):
    run = make_run(tmp_path / "run")
    (run / "config.json").unlink()
    (run / "config.toml").write_text('[reward]\nfunction = "length(target=12)"\n')
    assert "length(target=12)" in read_page(write_report(run)).text


def test_length_targets_are_found_anywhere():
    config = {
        "a": [{"f": "length(target=50, scale=256)"}, "m:strength(target=3)"],
        "b": {"c": "length( scale=1, target = 150.5)"},
    }
    assert length_targets(config) == [50, 150.5]
    assert length_targets({"n": 3, "f": "lexicon(path='target=3')", "g": None}) == []


def heights(figure, axes=0):
    """Filled histograms of a figure: (edges, values) of each."""
    patches = [p for p in figure.axes[axes].patches if isinstance(p, mpl.patches.StepPatch) and p.get_fill()]
    return [(p.get_data().edges, p.get_data().values) for p in patches]


@pytest.mark.parametrize("longest", [7, 32, 64, 100, 256])
def test_length_histogram_counts_every_completion_and_is_a_density(longest):
    data = sampled()
    data.lengths, data.max_length = (
        torch.arange(longest + 1).repeat(8, 1),
        longest,
    )  # 0, which counts as 1, to longest
    edges, values = heights(figures.lengths({"before": data}, {"before": Style()}, []))[0]
    assert (values * np.diff(edges)).sum() == pytest.approx(100)
    assert edges[-1] == longest + 0.5
    assert values[1:] == pytest.approx(np.full(len(values) - 1, 100 / (longest + 1)))
    assert 1 <= len(values) <= 40


def test_length_targets_are_lines_in_the_figure():
    models = {"reference": sampled(20), "trained: bon:4": sampled(10)}
    looks = dict(zip(models, (Style(), figures.series_style(0)), strict=True))
    axes = figures.lengths(models, looks, [8.0, 24.0]).axes[0]
    assert [line.get_xdata()[0] for line in axes.lines] == [8, 24]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["reference", "trained: bon:4", "length targets"]
    assert "tokens" in axes.get_xlabel()


def test_objective_labels():
    assert run_loader.objective_label(sampled(objective="mean")) == "mean (GRPO)"
    assert run_loader.objective_label(sampled(objective="soft:0.1")) == "soft:0.1"
    mixed = sampled()
    mixed.objectives["long"] = "mean"
    assert run_loader.objective_label(mixed) == "short bon:4, long mean"


def test_compare_draws_and_prints_best_of_n_rewards(tmp_path, capsys, monkeypatch):
    drawn = []
    draw = figures.comparison
    monkeypatch.setattr(figures, "comparison", lambda *a: drawn.append(draw(*a)) or drawn[-1])
    runs = [make_run(tmp_path / "bon"), make_run(tmp_path / "grpo", "mean", seed=1)]
    out = compare(runs, tmp_path / "new" / "overlay.png")
    with Image.open(out) as image:
        assert image.size == (1650, 630)
    right = drawn[0].axes[1]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["reference", "bon:4", "mean (GRPO)"]
    assert len(heights(drawn[0])) == 3
    ns = [1, 2, 4, 8, 16]
    truth = sum(0.5 * best_of_n(values, ns).mean(1) for values in sampled(10).rewards.values())
    assert right.lines[1].get_xydata() == pytest.approx(np.stack([ns, truth.numpy()], axis=1))
    printed = capsys.readouterr().out
    assert all(f"{value:.4f}" in printed for value in truth)
    assert "mean (GRPO)" in printed


def test_compare_distinguishes_runs_of_one_objective_and_limits_n_to_the_samples(tmp_path, capsys):
    runs = [make_run(tmp_path / "one", n=5), make_run(tmp_path / "two", n=6)]
    assert compare(runs, tmp_path) == tmp_path / "compare.png"
    printed = capsys.readouterr().out
    assert "bon:4 · one" in printed
    assert "bon:4 · two" in printed
    assert re.findall(r"^ +(\d+)  ", printed, flags=re.MULTILINE) == 2 * ["1", "2", "4"]  # values, then differences


def test_compare_distinguishes_runs_of_one_name_and_shows_a_run_once(tmp_path, capsys):
    runs = [
        make_run(tmp_path / "a" / "run"),
        make_run(tmp_path / "b" / "run", seed=1),
        make_run(tmp_path / "c" / "run"),
    ]
    compare([*runs, tmp_path / "a" / "." / "run"], tmp_path)
    printed = capsys.readouterr().out
    labels = {line.strip() for line in re.findall(r"bon:4 · [\w/]+", printed)}
    assert labels == {"bon:4 · run", "bon:4 · b/run", "bon:4 · c/run"}


def test_compare_refuses_other_rewards_of_the_same_names(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("one", "two", "three", "four")]
    for folder, target, scale in zip(runs, (3, 4, 3, 3), (1.0, 1.0, 2.0, 1.0), strict=True):
        written = (f"length(target={target}, scale=9)", f"length(scale=9.0,  target={target}.0)")[folder.name == "four"]
        reward = {"function": written, "scale": scale}
        (folder / "config.json").write_text(json.dumps({"rewards": {"short": reward, "long": reward}}))
    with pytest.raises(ValueError, match=r"of .*two is .*target=4.*of .*one .*target=3.*only runs with"):
        compare(runs[:2], tmp_path)
    with pytest.raises(ValueError, match=r"three is .*'scale': 2"):
        compare([runs[0], runs[2]], tmp_path)
    compare([runs[0], runs[3]], tmp_path)  # the same reward in another notation


def test_compare_explains_why_a_run_cannot_be_compared(tmp_path):
    unmeasured = make_run(tmp_path / "run", evaluated=())
    (unmeasured / "config.json").write_text(json.dumps({"evaluation": {"prompts": 0}}))
    with pytest.raises(
        ValueError, match=r"prompts = 0; run `nlgrpo evaluate .*run --evaluation.prompts 64` to evaluate"
    ):
        compare([unmeasured], tmp_path)
    silent = make_run(tmp_path / "silent")
    model = sampled()
    model.rewards["long"].fill_(math.nan)
    write_evaluation(silent, before=sampled(), after=model)
    with pytest.raises(
        ValueError,
        match=r"no prompt has a weighted sum that .* Of 8 prompts, the rewards score short on 8, long on [80], and",
    ):
        compare([silent], tmp_path)


def test_compare_refuses_what_it_cannot_compare(tmp_path):
    good = make_run(tmp_path / "good")
    half = make_run(tmp_path / "half", evaluated=("before",))
    with pytest.raises(
        ValueError, match=r"half has no evaluation after training; run the command that started it again"
    ):
        compare([good, half], tmp_path)
    with pytest.raises(ValueError, match=r"evaluation\.json is missing.*resume"):
        compare([good, make_run(tmp_path / "none", evaluated=())], tmp_path)
    other = make_run(tmp_path / "other")
    weighted = sampled()
    weighted.weights["long"] = 0.1
    write_evaluation(other, before=weighted, after=weighted)
    with pytest.raises(ValueError, match="same rewards and weights"):
        compare([good, other], tmp_path)
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    write_evaluation(evaluation, reference=sampled(), model=sampled())
    with pytest.raises(ValueError, match="evaluation is not a run; use `nlgrpo report`"):
        compare([good, evaluation], tmp_path)
    with pytest.raises(ValueError, match="no runs to compare"):
        compare([], tmp_path)
    with pytest.raises(ValueError, match=r"\.png, \.pdf or \.svg"):
        compare([good], tmp_path / "x.docx")


# --- several runs -----------------------------------------------------------------------------------------------------


def test_models_are_ranked_by_the_trained_procedure(tmp_path, undrawn):
    """Of the weighted sum at the largest N that was trained; the reference is not ranked."""
    made = {"low": ("mean", 14), "best": ("bon:8", 16), "other": ("bon:4", 15)}
    runs = []
    for name, (objective, mode) in made.items():
        run = make_run(tmp_path / name, objective)
        write_evaluation(run, before=sampled(20, objective), after=sampled(mode, objective))
        runs.append(run)
    page = read_page(write_report(runs, tmp_path / "all.html"))
    models = page.tables[0]
    assert models[0][:5] == ["rank", "model", "weighted sum mean", "weighted sum bon:8", "state"]
    values = {name: best_of_n_sum(sampled(mode), 8) for name, (_, mode) in made.items()}
    order = sorted(values, key=values.get, reverse=True)
    trained = [row for row in models[1:] if row[0]]
    assert [row[0] for row in trained] == ["1", "2", "3"]
    assert [row[1].strip() for row in trained] == order
    for row in trained:
        assert row[3].split()[0] == f"{values[row[1].strip()]:.4f}"
    assert [row[1].strip() for row in models[1:] if not row[0]] == ["reference"]  # of all three
    assert "Ranked by weighted sum bon:8." in page.text


def best_of_n_sum(one, n):
    return sum(0.5 * best_of_n(values, [n]).mean().item() for values in one.rewards.values())


def test_warnings_are_at_the_top_with_the_name_of_the_run(tmp_path, undrawn):
    cut = make_run(tmp_path / "cut")
    write_lines(cut / "metrics.jsonl", [{"step": i, "completions/clipped_ratio": 0.97} for i in range(20)])
    text = read_page(write_report(cut)).text
    assert "97% of the completions have no end" in text
    assert text.index("97% of the completions") < text.index("before")
    both = read_page(write_report([cut, make_run(tmp_path / "fine")], tmp_path / "both.html")).text
    assert "cut: 97% of the completions have no end" in both
    assert "fine: " not in both
