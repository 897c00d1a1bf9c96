"""HTML reports in a real browser: no errors, no requests, sortable tables, a layout for phones; and their parts."""

import copy
import dataclasses
import itertools
import json
import math
import os
import shutil

import jinja2
import pytest
from support import browser
from support.reports import EVIL, FILES, make_run, read_page, sample, sampled, write_lines

from nlgrpo.apps.report import charts, figures, page, run_loader
from nlgrpo.apps.report.report import write_report
from nlgrpo.config.schema import Config, RewardConfig
from nlgrpo.engine.rollouts.evaluation_samples import write_evaluation

PAGE = {"title": "", "facts": [], "warnings": [], "notes": []}

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
    assert window.run("document.images.length") == 5
    assert window.run("[...document.images].every(i => i.getBoundingClientRect().right <= innerWidth)")
    paper = window.run("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(22, 27, 34)" if dark else "rgb(255, 255, 255)")
    shown = window.run("[...document.images].map(i => atob(i.currentSrc.split(',')[1]))")
    assert all(("#161b22" in svg) == dark for svg in shown)
    assert window.run("document.querySelectorAll('body img').length") == 5  # none comes from a completion


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
        assert window.run("[...document.querySelectorAll('button, select')].filter(e => e.offsetParent).length") == 0
        assert "value" in window.run(f"{head(3)}.innerText")
    finally:
        window.call("Emulation.setScriptExecutionDisabled", value=False)


# --- curves and completions -------------------------------------------------------------------------------------------

LEGENDS = (
    "[...document.querySelectorAll('#charts .u-legend')].map("
    "l => [...l.querySelectorAll('tr:not([hidden]) :is(.u-label, .u-value)')].map(e => e.textContent))"
)
ENDS = "['charts-first', 'charts-last'].map(id => Number(document.getElementById(id).value))"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The report of a run with 100 steps."""
    return write_report(make_run(tmp_path_factory.mktemp("one") / "run", steps=100))


def plot(window, number=0):
    """Left and right end, and height of the middle, of the area of a chart in the window."""
    window.run(f"document.querySelectorAll('.u-over')[{number}].scrollIntoView({{block: 'center'}})")
    script = f"document.querySelectorAll('.u-over')[{number}].getBoundingClientRect().toJSON()"
    place = window.run(script)
    return place["left"], place["right"], (place["top"] + place["bottom"]) / 2


@pytest.mark.slow
@needs_browser
def test_the_legend_has_the_logged_values_under_the_pointer(window, one):
    window.open(one)
    left, right, middle = plot(window)
    window.mouse("mouseMoved", left + 40 * (right - left) / 99, middle)
    window.until(f"{LEGENDS}[0].includes('40')")
    rewards, objective, kl, _ = window.run(LEGENDS)  # in all charts at the same step
    for shown, names in ((rewards, ["short", "long"]), (objective, ["short: bon:4"]), (kl, ["kl"])):
        assert shown[:2] == ["step", "40"]
        assert shown[2::2] == names
    values = [float(text) for text in (*rewards[3::2], *objective[3::2], *kl[3::2])]
    assert values == pytest.approx([math.sin(40 + i) for i in range(4)], rel=2e-5)  # five digits


@pytest.mark.slow
@needs_browser
def test_a_range_of_steps_is_shown_in_all_charts(window, one):
    window.open(one)
    assert window.run(ENDS) == [0, 99]
    left, right, middle = plot(window, 2)
    step = (right - left) / 99
    window.drag(left + 20 * step, left + 60 * step, middle)
    window.until(f"{ENDS}[1] === 60")
    assert window.run(ENDS) == [20, 60]
    left, right, middle = plot(window, 0)
    window.mouse("mouseMoved", left + 0.5 * (right - left), middle)
    window.until(f"{LEGENDS}[0].includes('40')")  # the middle of the steps that are shown
    for count in (1, 2):
        window.mouse("mousePressed", left + 10, middle, clickCount=count)
        window.mouse("mouseReleased", left + 10, middle, clickCount=count)
    window.until(f"{ENDS}[1] === 99")
    window.run("(() => { const e = document.getElementById('charts-first'); e.value = 50;"
               "e.dispatchEvent(new Event('change')) })()")  # fmt: skip
    assert window.run(ENDS) == [50, 99]
    window.run("document.getElementById('charts-all').click()")
    assert window.run(ENDS) == [0, 99]


@pytest.mark.slow
@needs_browser
def test_runs_share_one_legend_that_hides_their_curves(window, report, folders):
    window.open(report)
    names = window.run("[...document.querySelectorAll('#charts-legend button')].map(b => b.textContent)")
    assert len(names) == 3
    assert names[0] == folders[0].name
    shown = "document.querySelectorAll('#charts .u-legend .u-off').length"
    assert window.run(shown) == 0
    window.run("document.querySelectorAll('#charts-legend button')[1].click()")
    charts = window.run("document.querySelectorAll('#charts .uplot').length")
    # its curve is not in the chart of the other runs' objective
    assert window.run(shown) == charts - 2
    window.run("document.querySelectorAll('#charts-legend button')[1].click()")
    assert window.run(shown) == 0
    assert window.console == []


@pytest.mark.slow
@needs_browser
def test_other_metrics_are_drawn_when_they_are_opened(window, tmp_path):
    run = make_run(tmp_path / "run")
    rows = [{"step": i, "kl": 1.0, "my <b>own</b>": float(i), "infinite": None} for i in range(30)]
    write_lines(run / "metrics.jsonl", rows)
    window.open(write_report(run))
    assert window.run("document.querySelectorAll('.uplot').length") == 1
    window.run("document.getElementById('charts-more').open = true")
    window.until("document.querySelectorAll('.uplot').length === 2")
    assert "my <b>own</b>" in window.run("document.getElementById('charts-more').innerText")
    assert window.console == []


def choose(window, name, value, event="change"):
    window.run(f"(() => {{ const e = document.getElementById('completions-{name}'); e.value = {json.dumps(value)};"
               f"e.dispatchEvent(new Event('{event}')) }})()")  # fmt: skip


def texts(window):
    return window.run("[...document.querySelectorAll('.sample .text')].map(p => p.textContent)")


@pytest.mark.slow
@needs_browser
def test_completions_of_a_step_are_shown_searched_and_ordered(window, one):
    window.open(one)
    options = "[...document.getElementById('completions-{}').options].map(o => o.textContent)"
    assert window.run(options.format("source")) == ["evaluation (first prompts)", "training"]
    assert len(texts(window)) == 32  # of 16 samples before and after training
    choose(window, "source", "1")
    assert window.run(options.format("step")) == ["all", *map(str, range(0, 100, 10))]
    assert "prompt 90 a story" in window.run("document.getElementById('completions-list').innerText")
    assert texts(window) == [f"sample {i} a story" for i in range(6)]
    badges = window.run("[...document.querySelectorAll('.returned .text')].map(p => p.textContent)")
    assert badges == ["sample 0 a story", "sample 3 a story"]  # of rewards 0, 3, 1, 4 and their negatives
    window.run("document.getElementById('completions-before').click()")
    assert "prompt 80 a story" in window.run("document.getElementById('completions-list').innerText")
    choose(window, "order", "0")
    assert texts(window) == [f"sample {i} a story" for i in (5, 3, 1, 4, 2, 0)]
    window.run("document.getElementById('completions-returned').click()")
    assert texts(window) == ["sample 3 a story", "sample 0 a story"]
    window.run("document.getElementById('completions-returned').click()")
    choose(window, "search", "PROMPT 30", "input")
    window.until("document.querySelectorAll('.sample').length === 6 && "
                 "document.getElementById('completions-list').innerText.includes('prompt 30')")  # fmt: skip
    choose(window, "search", "", "input")
    window.until("document.getElementById('completions-list').innerText.includes('prompt 80')")  # as before
    choose(window, "search", "sample 4", "input")
    window.until("document.getElementById('completions-count').innerText.startsWith('10 completions of 10')")
    assert set(texts(window)) == {"sample 4 a story"}


@pytest.mark.slow
@needs_browser
def test_a_run_of_one_step_and_without_a_mark(window, tmp_path):
    window.open(write_report(make_run(tmp_path / "run", "mean", steps=1)))
    assert window.console == []
    assert window.run(ENDS) == [0, 0]
    assert window.run("document.getElementById('completions-returned').offsetParent === null")
    assert len(texts(window)) == 32


@pytest.mark.slow
@needs_browser
def test_a_metric_without_values_does_not_stop_the_page(window, tmp_path, monkeypatch):
    """A page once drew such a chart for ever."""
    drawn = charts.charts

    def with_an_empty_one(*arguments):
        found = drawn(*arguments)
        empty = {**found["panels"][0], "x": [], "series": [{**found["panels"][0]["series"][0], "values": []}]}
        return {**found, "panels": [empty, *found["panels"]]}

    monkeypatch.setattr(charts, "charts", with_an_empty_one)
    window.open(write_report(make_run(tmp_path / "run")))
    assert window.console == []
    assert window.run(ENDS) == [0, 29]
    assert window.run("document.querySelectorAll('#charts .uplot').length") == 4


ODD = {
    "right to left": "שלום עולם \u202e abc",
    "control characters": "a\x00b\x1b[31mc\x07",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈 日本語",
    "half of a pair": "\ud83d",
    "long": "word " * 200_000,
    "one word": "x" * 5000,
    "empty": "",
    "closing": "</script><script>hit()</script><!--",
}


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [390, 1000])
def test_odd_texts_do_not_break_the_page(window, tmp_path, width):
    run = make_run(tmp_path / "run", text="\u202e x")
    rows = [sample(0, i, completion=text, prompt=text) for i, text in enumerate(ODD.values())]
    write_lines(run / "samples.jsonl", rows)
    path = write_report(run)
    window.open(path, width)
    choose(window, "source", "1")
    assert window.console == []
    assert window.run("document.documentElement.scrollWidth") <= width
    shown = texts(window)
    assert shown[0] == ODD["right to left"]
    assert window.run("getComputedStyle(document.querySelector('.sample .text')).direction") == "rtl"
    assert shown[2] == ODD["emoji"]
    assert shown[7] == ODD["closing"]
    assert len(shown[4]) < 1000
    window.run("[...document.querySelectorAll('.sample button')][0].click()")
    assert len(texts(window)[4]) > 20_000
    assert window.run(INJECTED) == 0


@pytest.mark.slow
@needs_browser
def test_ten_thousand_completions_open_and_scroll(window, tmp_path):
    run = make_run(tmp_path / "run")
    words = "the answer is 42 because of all that we know about mazes and other puzzles " * 12
    rows = [sample(i // 8, i % 6, f"{i // 8} {words}") for i in range(10_000)]
    write_lines(run / "samples.jsonl", rows)
    path = write_report(run)
    window.open(path)
    timing = window.run("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 0 < timing <= 2000  # milliseconds
    choose(window, "source", "1")
    choose(window, "step", "")
    assert window.run("document.getElementById('completions-count').innerText").startswith(
        "10,000 completions of 1,250"
    )
    there = "document.querySelectorAll('#completions-list .group').length"
    before = window.run(there)
    assert before < 100
    for _ in range(3):
        window.run("(() => { const e = document.getElementById('completions-list'); e.scrollTop = e.scrollHeight })()")
        window.until(f"{there} > {before}")
        before = window.run(there)


# --- without a browser ------------------------------------------------------------------------------------------------


def test_a_report_of_several_runs_shows_all_of_them(report, folders):
    text = read_page(report).text
    for folder in folders:
        assert folder.name in text
    others = folders[0].parent.parent / os.fsdecode(b"\xff")
    shutil.copytree(folders[0], others)
    assert run_loader.read_runs([others]).models[0].label == "?"
    evaluation = read_page(report).data["completions-data"]["sources"][0]
    assert f"prompt {EVIL}" in [group["prompt"] for group in evaluation["groups"]]
    assert "3 models; 90 logged steps; evaluated on 8 prompts x 16 samples" in text
    assert "after training" not in text
    for name in (*FILES, "fronts"):
        assert report.with_name(f"three-{name}.png").is_file()


def test_a_run_has_the_same_style_in_every_figure(folders, tmp_path, monkeypatch):
    seen = {}

    def picture(draw):
        tables = [a for a in draw.args if isinstance(a, dict)]
        seen[draw.func.__name__] = next(a for a in tables if isinstance(next(iter(a.values()), None), figures.Style))
        return figures.Picture(b"", "<svg/>", "<svg/>")

    def png(draw):
        seen["curves"] = draw.args[1]
        return b""

    monkeypatch.setattr(figures, "picture", picture)
    monkeypatch.setattr(figures, "render_png", png)
    page = read_page(write_report(folders, tmp_path / "x.html"))
    assert set(seen) == {*FILES, "fronts"}
    looks = seen.pop("curves")
    assert all(looks.items() <= others.items() for others in seen.values())
    assert len({style.colour for style in seen["lengths"].values()}) == 4
    for chart in page.data["charts-data"]["panels"]:
        for curve in chart["series"]:
            assert curve["colour"] == looks[curve["label"]].colour


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


def test_histograms_of_many_models_are_rows():
    models = {str(i): sampled() for i in range(50)}
    rows = figures.lengths(models, {name: figures.series_style(i) for i, name in enumerate(models)}, []).axes[0]
    assert [text.get_text() for text in rows.get_yticklabels()] == list(models)


def test_28_models_have_different_styles():
    assert (
        len({(series_style.colour, series_style.dash) for series_style in map(figures.series_style, range(28))}) == 28
    )
    again = figures.series_style(3, 1)
    assert again.colour == figures.series_style(3).colour
    assert again != figures.series_style(3)
    rows = [[page.Cell(str(i), style=figures.series_style(i))] for i in range(50)]
    content = page.Section("models", "table.html", page.Table(["model"], rows, "sorts"))
    shown = page.render("report.html", **PAGE, sections=[content])  # has every marker
    assert shown.count("<svg") == 50


def test_cells_are_sorted_by_their_numbers_and_shown_as_text(tmp_path):
    assert page.number(math.nan, "-").sort == ""
    assert page.number(-1e-9, "-0.0000").sort == "-1e-09"
    table = page.Table(["<b>", "n"], [[page.Cell('"<i>"', "<u>&amp;"), page.number(2.0, "<2>")]], "sorts")
    assert table.numeric == {1}
    (tmp_path / "page.html").write_text(
        page.render("report.html", **PAGE, sections=[page.Section("x", "table.html", table)])
    )
    assert read_page(tmp_path / "page.html").tables == [[["<b>", "n"], ['"<i>" <u>&amp;', "<2>"]]]


def test_a_name_that_a_template_lacks_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="facts"):
        page.render("report.html", title="x", warnings=[], notes=[], sections=[])


# --- markup in every field of the files of a run ----------------------------------------------------------------------

MARKUP = (
    "\"'></p></td><script>hit()</script><svg onload=hit()><a href=javascript:hit()><img src=x onerror=hit()>--><b>$"
)
INJECTED = (
    "document.querySelectorAll('[onload],[onerror],a[href^=javascript],b').length"
    " + [...document.scripts].filter(s => s.textContent === 'hit()').length"
)
ALL_COMPLETIONS = """
(() => {
  const [source, step] = ["source", "step"].map((name) => document.getElementById("completions-" + name));
  let text = "";
  for (const place of source ? source.options : []) {
    source.value = place.value;
    source.dispatchEvent(new Event("change"));
    step.value = "";
    step.dispatchEvent(new Event("change"));
    text += document.body.innerText;
  }
  return text;
})()
"""


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


def pages(folder, every):
    """Write a report for each place of each file; yield its place, and the page, or None if it is refused.

    Of the places in the configuration, which has hundreds, one in ``every``.
    """
    config = dataclasses.asdict(Config(rewards={"short": RewardConfig("length(target=8, scale=32)")}))
    run = make_run(folder / "run")
    (run / "config.json").write_text(json.dumps(config, default=str))
    files = {name: json.loads((run / name).read_text()) for name in ("config.json", "evaluation.json")}
    for name in ("metrics.jsonl", "samples.jsonl"):
        files[name] = json.loads((run / name).read_text().splitlines()[-1])
    files["samples.jsonl"]["extra"] = {"note": "text"}
    for name, content in files.items():
        whole = (run / name).read_text()
        others = whole.splitlines()[:-1]
        for place in itertools.islice(places(content), 0, None, every if name == "config.json" else 1):
            text = json.dumps(injected(content, *place))
            (run / name).write_text(text if name.endswith(".json") else "\n".join([*others, text]) + "\n")
            try:
                yield f"{name}: {place[0]}", write_report(run)
            except ValueError:
                yield f"{name}: {place[0]}", None
        (run / name).write_text(whole)


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.records)])
def test_markup_in_any_field_is_shown_as_text(tmp_path, window, monkeypatch, every):
    monkeypatch.setattr(figures, "picture", lambda draw: figures.Picture(b"", "<svg/>", "<svg/>"))  # no HTML in them
    monkeypatch.setattr(figures, "render_png", lambda draw: b"")
    shown, refused, unseen = [], [], []
    for place, path in pages(tmp_path, every):
        if path is None:
            refused.append(place)
            continue
        page_ = read_page(path)
        in_data = json.dumps(MARKUP)[1:21] in json.dumps(page_.data)
        if MARKUP[:20] not in page_.text and not in_data:
            unseen.append(place)
            continue
        window.requests.clear()
        window.open(path)
        seen = window.run(ALL_COMPLETIONS)
        if place.startswith("samples.jsonl"):
            assert "hit()" in seen, place
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
