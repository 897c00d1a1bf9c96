"""Markup in every field of the files of a run: the report shows it as text, in a real browser."""

import copy
import dataclasses
import html
import json

import browser
import pytest
from test_report import make_run

from nlgrpo.apps.report import figures, html_page
from nlgrpo.apps.report.report import write_report
from nlgrpo.config.schema import Config, RewardConfig

pytestmark = [pytest.mark.slow, pytest.mark.skipif(browser.PROGRAM is None, reason=browser.MISSING)]

MARKUP = (
    "\"'></p></td><script>hit()</script><svg onload=hit()><a href=javascript:hit()><img src=x onerror=hit()>--><b>$"
)
INJECTED = "document.querySelectorAll('[onload],[onerror],a[href^=javascript],script:not(:last-of-type),b').length"


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser.Browser(tmp_path_factory.mktemp("home")) as opened:
        yield opened


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(figures, "picture", lambda draw: figures.Picture(b"not drawn", "<svg/>", "<svg/>"))


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


def test_markup_in_any_field_is_shown_as_text(tmp_path, window, undrawn):
    shown, refused, unseen = [], [], []
    for place, page in pages(tmp_path):
        if page is None:
            refused.append(place)
            continue
        if html.escape(MARKUP)[:20] not in page.read_text("utf-8"):
            unseen.append(place)
            continue
        window.requests.clear()
        window.open(page)
        assert window.console == [], place
        assert [url for url in window.requests if not url.startswith("data:")] == [page.resolve().as_uri()], place
        assert window.run(INJECTED) == 0, place
        shown.append(place)
    print(f"{len(shown)} shown, {len(refused)} refused, {len(unseen)} not on the page")
    assert len(shown) > 20


def test_markup_that_is_not_escaped_is_found(tmp_path, window, undrawn, monkeypatch):
    monkeypatch.setattr(html_page.html, "escape", lambda text, quote=True: text)
    run = make_run(tmp_path / "run", text=MARKUP)
    window.open(write_report(run))
    assert window.run(INJECTED) > 0
    assert window.console  # the page's policy stopped the scripts
