"""Fixtures of reports: a browser, and figures that are built but not rendered."""

import pytest
from support import browser
from support.reports import picture_without_drawing, png_without_drawing

from nlgrpo.apps.report import figures


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    """A browser without a page."""
    with browser.Browser(tmp_path_factory.mktemp("home")) as opened:
        yield opened


@pytest.fixture
def undrawn(monkeypatch):
    """Build every figure but skip rendering, which takes seconds."""
    monkeypatch.setattr(figures, "picture", picture_without_drawing)
    monkeypatch.setattr(figures, "render_png", png_without_drawing)
