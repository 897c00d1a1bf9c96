"""HTML reports in a real browser: no errors, no requests, sortable tables, a layout for phones; and their parts."""

import copy
import dataclasses
import json
import math
import os
import shutil

import jinja2
import pytest
from support import browser
from support.reports import EVIL, PICTURES, make_run, read_page, sampled

from nlgrpo.apps.report import figures, page, run_loader
from nlgrpo.apps.report.report import write_report
from nlgrpo.config.schema import Config, RewardConfig
from nlgrpo.engine.rollouts.evaluation_samples import write_evaluation

needs_browser = pytest.mark.skipif(browser.PROGRAM is None, reason=browser.MISSING)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three runs with different objectives; the name and the texts of one try to inject HTML."""
    top = tmp_path_factory.mktemp("runs")
    made = [make_run(top / "a", "bon:4"), make_run(top / "b<img src=x onerror=alert(1)>", "bon:16", text=EVIL, seed=1)]
    return [*made, make_run(top / "c $\\frac$ \x01 --", "mean", seed=2)]


@pytest.fixture(scope="module")
def report(folders, tmp_path_factory):
    """One report of all three runs."""
    return write_report(folders, tmp_path_factory.mktemp("out") / "three.html")


def column(window, i, table=-1):
    script = f"[...[...document.querySelectorAll('table.sorts')].at({table}).tBodies[0].rows]"
    return window.run(f"{script}.filter(r => !r.hidden).map(r => r.cells[{i}].dataset.v ?? r.cells[{i}].textContent)")


def head(i):
    return f"[...document.querySelectorAll('table.sorts')].at(-1).tHead.rows[0].cells[{i}]"


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1000])
def test_a_page_opens_without_errors_and_requests(window, report, width, dark):
    window.requests.clear()
    window.open(report, width, dark)
    assert window.console == []
    assert [url for url in window.requests if not url.startswith("data:")] == [report.resolve().as_uri()]
    assert window.run("document.documentElement.scrollWidth") <= width
    assert window.run("[...document.images].every(i => i.naturalWidth > 0)")
    assert window.run("document.images.length") == 6
    assert window.run("[...document.images].every(i => i.getBoundingClientRect().right <= innerWidth)")
    paper = window.run("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(22, 27, 34)" if dark else "rgb(255, 255, 255)")
    shown = window.run("[...document.images].map(i => atob(i.currentSrc.split(',')[1]))")
    assert all(("#161b22" in svg) == dark for svg in shown)
    assert window.run("document.querySelectorAll('body img').length") == 6  # none comes from a completion


@pytest.mark.slow
@needs_browser
def test_a_click_on_a_heading_sorts_and_a_second_click_reverses(window, report):
    window.open(report)
    names = window.run(
        "[...[...document.querySelectorAll('table.sorts')].at(-1).tHead.rows[0].cells].map(h => h.innerText)"
    )
    value, rate, procedure = (names.index(name) for name in ("value", "win rate", "procedure"))
    window.run(f"{head(value)}.querySelector('button').click()")
    numbers = [float(text) for text in column(window, value)]
    assert len(numbers) > 40
    assert numbers == sorted(numbers)
    assert window.run(f"{head(value)}.getAttribute('aria-sort')") == "ascending"
    window.run(f"{head(value)}.querySelector('button').click()")
    assert [float(text) for text in column(window, value)] == numbers[::-1]
    window.run(f"{head(rate)}.querySelector('button').click()")
    rates = column(window, rate)
    known = [float(text) for text in rates if text]
    assert known == sorted(known)
    assert rates == [text for text in rates if text] + [""] * (len(rates) - len(known))  # empty cells are last
    assert window.run("document.querySelectorAll('[aria-sort]').length") == 1
    window.run(f"{head(procedure)}.querySelector('button').click()")
    found = list(dict.fromkeys(column(window, procedure)))
    assert found == ["bon:2", "bon:4", "bon:8", "bon:16", "mean", ""]


@pytest.mark.slow
@needs_browser
def test_tables_work_by_keyboard(window, report):
    window.open(report)
    window.run(f"{head(3)}.querySelector('button').focus()")
    window.press("Enter", 13)
    assert window.run(f"{head(3)}.getAttribute('aria-sort')") == "ascending"
    window.press("Tab", 9)
    assert window.run(f"document.activeElement === {head(4)}.querySelector('button')")


@pytest.mark.slow
@needs_browser
def test_a_table_is_filtered_by_quantity(window, report):
    window.open(report)
    choose = "(i, v) => { const s = document.querySelectorAll('.filter select')[i]; s.value = v;"
    choose += "s.dispatchEvent(new Event('change')) }"
    window.run(f"({choose})(1, 'short')")
    assert set(column(window, 1)) == {"short"}
    window.run(f"({choose})(2, 'bon:4')")
    assert len(column(window, 1)) == 6  # three models, each with a reference of its own
    window.run(f"({choose})(1, '')")
    window.run(f"({choose})(2, '')")
    assert set(column(window, 1)) == {"short", "long", "weighted sum", "length", run_loader.TRAINING_KL}


@pytest.mark.slow
@needs_browser
def test_tables_are_shown_without_scripts(window, report):
    window.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        window.open(report)
        assert window.run("document.querySelectorAll('tbody tr').length") > 40
        assert window.run("document.querySelectorAll('button, select').length") == 0
        assert "value" in window.run(f"{head(3)}.innerText")
    finally:
        window.call("Emulation.setScriptExecutionDisabled", value=False)


# --- without a browser ------------------------------------------------------------------------------------------------


def test_a_report_of_several_runs_shows_all_of_them(report, folders):
    text = read_page(report).text
    for folder in folders:
        assert folder.name in text
    others = folders[0].parent.parent / os.fsdecode(b"\xff")
    shutil.copytree(folders[0], others)
    assert run_loader.read_runs([others]).models[0].label == "?"
    assert "<script>alert(1)</script>" in text
    assert "3 models; 90 logged steps; evaluated on 8 prompts x 16 samples" in text
    assert "after training" not in text
    for name in (*PICTURES, "fronts"):
        assert report.with_name(f"three-{name}.png").is_file()


def test_a_run_has_the_same_style_in_every_figure(folders, tmp_path, monkeypatch):
    seen = {}

    def picture(draw):
        tables = [a for a in draw.args if isinstance(a, dict)]
        seen[draw.func.__name__] = next(a for a in tables if isinstance(next(iter(a.values()), None), figures.Style))
        return figures.Picture(b"", "<svg/>", "<svg/>")

    monkeypatch.setattr(figures, "picture", picture)
    write_report(folders, tmp_path / "x.html")
    assert set(seen) == {*PICTURES, "fronts"}
    assert all(looks == seen["curves"] for looks in seen.values())
    assert len({series_style.colour for series_style in seen["curves"].values()}) == 4


def test_where_the_page_is_written(folders, tmp_path, monkeypatch, undrawn):
    monkeypatch.chdir(tmp_path)
    assert write_report(folders).resolve() == tmp_path / "report.html"
    assert (tmp_path / "lengths.png").is_file()
    assert write_report(folders[:1], tmp_path / "new" / "p.html") == tmp_path / "new" / "p.html"
    with pytest.raises(ValueError, match=r"must end in \.html"):
        write_report(folders, tmp_path / "p.pdf")
    with pytest.raises(ValueError, match="no folder"):
        write_report([])


def test_report_of_an_evaluation(tmp_path, undrawn):
    write_evaluation(tmp_path, reference=sampled(20), model=sampled(10))
    text = read_page(write_report(tmp_path)).text
    assert "results.json cannot be read" in text
    assert "model" in text
    assert "weighted sum" in text


def test_the_report_of_many_runs_stays_small(tmp_path, monkeypatch):
    """Curves have fewer points, and histograms are rows."""
    logged = [{"step": i, "kl": math.sin(i / 50)} for i in range(5000)]
    runs = {str(i): logged for i in range(50)}
    axes = figures.curves(runs, {name: figures.series_style(i) for i, name in enumerate(runs)}).axes
    assert sum(len(line.get_xdata()) for line in axes[1].lines) <= figures.POINTS_IN_ALL
    models = {name: sampled() for name in runs}
    rows = figures.lengths(models, {name: figures.series_style(i) for i, name in enumerate(runs)}, []).axes[0]
    assert [text.get_text() for text in rows.get_yticklabels()] == list(runs)


def test_a_long_curve_keeps_its_spikes():
    values = [0.0] * 100_000
    values[12_345], values[54_321] = 7.0, -3.0
    axes = figures.curves({"run": [{"step": i, "kl": v} for i, v in enumerate(values)]}, {}).axes[2]
    faint, strong = axes.lines
    assert len(faint.get_xdata()) <= figures.POINTS
    assert len(strong.get_xdata()) <= figures.POINTS
    assert [12_345, 7] in faint.get_xydata().tolist()
    assert [54_321, -3] in faint.get_xydata().tolist()


def test_28_models_have_different_styles():
    assert (
        len({(series_style.colour, series_style.dash) for series_style in map(figures.series_style, range(28))}) == 28
    )
    again = figures.series_style(3, 1)
    assert again.colour == figures.series_style(3).colour
    assert again != figures.series_style(3)
    rows = [[page.Cell(str(i), style=figures.series_style(i))] for i in range(50)]
    content = page.Section("models", "table.html", page.Table(["model"], rows, "sorts"))
    shown = page.render("report.html", title="", facts=[], notes=[], sections=[content])  # has every marker
    assert shown.count("<svg") == 50


def test_cells_are_sorted_by_their_numbers_and_shown_as_text(tmp_path):
    assert page.number(math.nan, "-").sort == ""
    assert page.number(-1e-9, "-0.0000").sort == "-1e-09"
    table = page.Table(["<b>", "n"], [[page.Cell('"<i>"', "<u>&amp;"), page.number(2.0, "<2>")]], "sorts")
    assert table.numeric == {1}
    (tmp_path / "page.html").write_text(
        page.render("report.html", title="", facts=[], notes=[], sections=[page.Section("x", "table.html", table)])
    )
    assert read_page(tmp_path / "page.html").tables == [[["<b>", "n"], ['"<i>" <u>&amp;', "<2>"]]]


def test_a_name_that_a_template_lacks_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="facts"):
        page.render("report.html", title="x", notes=[], sections=[])


# --- markup in every field of the files of a run ----------------------------------------------------------------------

MARKUP = (
    "\"'></p></td><script>hit()</script><svg onload=hit()><a href=javascript:hit()><img src=x onerror=hit()>--><b>$"
)
INJECTED = "document.querySelectorAll('[onload],[onerror],a[href^=javascript],script:not(:last-of-type),b').length"


def places(value, path=()):
    """Paths of all keys and texts; of the items of a list, the first."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield (*path, key), True
            yield from places(part, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))
    elif isinstance(value, str):
        yield path, False


def injected(value, path, is_key):
    """A copy of ``value`` with markup in one place."""
    changed = copy.deepcopy(value)
    *parents, last = path
    owner = changed
    for part in parents:
        owner = owner[part]
    if is_key:
        owner[MARKUP] = owner.pop(last)
    else:
        owner[last] = MARKUP
    return changed


def pages(folder):
    """Write a report for each place of each file; yield its place, and the page, or None if it is refused."""
    config = dataclasses.asdict(Config(rewards={"short": RewardConfig("length(target=8, scale=32)")}))
    run = make_run(folder / "run")
    (run / "config.json").write_text(json.dumps(config, default=str))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    files = {name: json.loads((run / name).read_text()) for name in ("config.json", "evaluation.json")}
    files["metrics.jsonl"] = json.loads(lines[-1])
    for name, content in files.items():
        whole = (run / name).read_text()
        for place in places(content):
            text = json.dumps(injected(content, *place))
            (run / name).write_text(text if name.endswith(".json") else "\n".join([*lines[:-1], text]) + "\n")
            try:
                yield f"{name}: {place[0]}", write_report(run)
            except ValueError:
                yield f"{name}: {place[0]}", None
        (run / name).write_text(whole)


@needs_browser
@pytest.mark.slow
def test_markup_in_any_field_is_shown_as_text(tmp_path, window, undrawn):
    shown, refused, unseen = [], [], []
    for place, path in pages(tmp_path):
        if path is None:
            refused.append(place)
            continue
        if MARKUP[:20] not in read_page(path).text:
            unseen.append(place)
            continue
        window.requests.clear()
        window.open(path)
        assert window.console == [], place
        assert [url for url in window.requests if not url.startswith("data:")] == [path.resolve().as_uri()], place
        assert window.run(INJECTED) == 0, place
        shown.append(place)
    print(f"{len(shown)} shown, {len(refused)} refused, {len(unseen)} not on the page")
    assert len(shown) > 20


@needs_browser
@pytest.mark.slow
def test_markup_that_is_not_escaped_is_found(tmp_path, window, undrawn, monkeypatch):
    escaping = page.environment

    def plain():
        created = escaping()
        created.autoescape = False
        return created

    monkeypatch.setattr(page, "environment", plain)
    run = make_run(tmp_path / "run", text=MARKUP)
    window.open(write_report(run))
    assert window.run(INJECTED) > 0
    assert window.console  # the page's policy stopped the scripts
