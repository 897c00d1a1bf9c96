"""Folders of runs with two rewards, and pages of reports parsed as by a browser."""

import json
import math
from html.parser import HTMLParser

import torch

from nlgrpo.apps.report import figures
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, write_evaluation

EVIL = "</p><script>alert(1)</script><img src=http://evil.test/x.png> & \x00\x1b[2J {{ 7 * 7 }} 🙂"
PICTURES = ("lengths", "curves", "rewards", "best_of_n", "win_rates")  # of one run
VOID = {"meta", "img", "source", "br", "link"}


class Page(HTMLParser):
    """What a page shows; fails unless all tags are closed in order and none has an event handler.

    ``text``: all of it. ``tables``: the texts of their cells, by row, the headings first. ``scripts``: their sources.
    ``policy``: the content security policy.
    """

    def __init__(self, text):
        super().__init__()
        self.tags, self.urls, self.text, self.tables, self.scripts = [], [], "", [], []
        self.policy = ""
        self._open = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.urls += [value for name, value in attrs if name in ("src", "srcset", "href", "data", "action")]
        assert not any(name.startswith("on") for name in values)
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
            return
        if self._open and self._open[-1] == "style":
            return
        self.text += data
        if {"td", "th"} & set(self._open):
            row = self.tables[-1][-1]
            row[-1] += data


def read_page(path):
    return Page(path.read_text("utf-8"))


def picture_without_drawing(draw):
    """In place of `figures.picture`: build the figure for both widths, but skip rendering, which takes seconds."""
    assert draw().axes
    assert draw(narrow=True).axes
    return figures.Picture(b"not drawn", "<svg/>", "<svg/>")


def sampled(mode=10, objective="bon:4", text="a story", prompts=8, n=16, seed=0, left_out=()):
    """Samples with rewards for short and for long completions, of lengths around ``mode``."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (mode + 3 * torch.randn(prompts, n, generator=generator)).round().long().clamp(1, 32)
    rewards = {name: -(((lengths - t) / 32).float() ** 2) for name, t in (("short", 8), ("long", 24))}
    names = dict.fromkeys(rewards, objective)
    weights = dict.fromkeys(rewards, 0.5)
    shown = [f"prompt {text}"], [[f"completion {text}"] * n]
    return EvaluationSamples(rewards, lengths, names, weights, 32, *shown, left_out=dict(left_out))


def make_run(folder, objective="bon:4", steps=30, evaluated=("before", "after"), text="a story", **options):
    """Folder of a run that has ``steps`` steps; ``text`` is in its prompts, completions and configuration."""
    folder.mkdir(parents=True)
    config = {"rewards": [{"function": "length(target=8, scale=32)"}, {"function": "length(scale=32, target=24.5)"}]}
    (folder / "config.json").write_text(json.dumps({**config, "note": text}))
    names = ("rewards/short/mean", "rewards/long/mean", "objective/short", "kl", "completions/mean_length")
    lines = [{"step": step, **{name: math.sin(step + i) for i, name in enumerate(names)}} for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = {when: sampled(mode, objective, text, **options) for when, mode in (("before", 20), ("after", 10))}
    if evaluated:
        write_evaluation(folder, **{when: made[when] for when in evaluated})
    return folder
