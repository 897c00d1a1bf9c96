"""Folders of runs with two rewards, and pages of reports parsed as by a browser."""

import json
import math
from html.parser import HTMLParser

import torch

from nlgrpo.apps.report import figures
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, write_evaluation

EVIL = "</p><script>alert(1)</script><img src=http://evil.test/x.png> & \x00\x1b[2J {{ 7 * 7 }} 🙂"
PICTURES = ("lengths", "rewards", "best_of_n", "win_rates")  # of one run on its page
FILES = (*PICTURES, "curves")  # of one run
VOID = {"meta", "img", "source", "br", "link", "input"}


class Page(HTMLParser):
    """What a page shows; fails unless all tags are closed in order and none has an event handler.

    ``text``: all of it. ``tables``: the texts of their cells, by row, the headings first. ``scripts``: their sources.
    ``data``: the JSON that scripts show, by its id. ``policy``: the content security policy.
    """

    def __init__(self, text):
        super().__init__()
        self.tags, self.urls, self.text, self.tables, self.scripts = [], [], "", [], []
        self.policy, self.data, self._block = "", {}, None
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
        elif tag == "script" and values.get("type") == "application/json":
            self._block = values["id"]
            self.data[self._block] = ""
        elif tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        if tag == "script" and self._block is not None:
            self.data[self._block] = json.loads(self.data[self._block])
            self._block = None

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            if self._block is None:
                self.scripts[-1] += data
            else:
                self.data[self._block] += data
            return
        if self._open and self._open[-1] == "style":
            return
        self.text += data
        if {"td", "th"} & set(self._open):
            row = self.tables[-1][-1]
            row[-1] += data


def read_page(path):
    return Page(path.read_text("utf-8"))


def png_without_drawing(draw):
    """In place of `figures.render_png`."""
    assert draw().axes
    return b"not drawn"


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


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample(step, number, text="a story", **more):
    """A row of `samples.jsonl`: the rewards of number 0 to 5 are 0, 3, 1, 4, 2, 5."""
    value = (3 * number) % 5 if number < 5 else 5
    row = {"step": step, "prompt": f"prompt {step} {text}", "completion": f"sample {number} {text}"}
    row |= {"rewards": {"short": value, "long": -value}, "linearized": {"short": 0.5, "long": None}}
    return row | {"advantage": 0.25 * number, "extra": {}, "tokens": 10 + number} | more


def make_run(folder, objective="bon:4", steps=30, evaluated=("before", "after"), text="a story", **options):
    """Folder of a run that has ``steps`` steps; ``text`` is in its prompts, completions and configuration."""
    folder.mkdir(parents=True)
    functions = {"short": "length(target=8, scale=32)", "long": "length(scale=32, target=24.5)"}
    rewards = {name: {"function": function, "objective": objective} for name, function in functions.items()}
    (folder / "config.json").write_text(json.dumps({"rewards": rewards, "note": text}))
    names = ("rewards/short/mean", "rewards/long/mean", "objective/short", "kl", "completions/mean_length")
    lines = [{"step": step, **{name: math.sin(step + i) for i, name in enumerate(names)}} for step in range(steps)]
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "samples.jsonl", [sample(step, i, text) for step in range(0, steps, 10) for i in range(6)])
    made = {when: sampled(mode, objective, text, **options) for when, mode in (("before", 20), ("after", 10))}
    if evaluated:
        write_evaluation(folder, **{when: made[when] for when in evaluated})
    return folder
