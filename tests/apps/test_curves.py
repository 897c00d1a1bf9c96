"""`nlgrpo curves`: the paper's win rates, what it prints and writes, and its pictures."""

import csv
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from nlgrpo import cli
from nlgrpo.apps.curves import calibration_figures
from nlgrpo.calibration.alignment import alignment_curve, calibrate, parse_transform
from nlgrpo.calibration.ecdf import ranks

# At a KL of 1 (InfAlign, Figs. 2 and 11). test_best_of_4_at_a_kl_of_1_is_above_094 has the fixed point for N = 4 from a
# density on cells.
BON = {
    4: {"identity": 0.877, "log": 0.863, "exp:10": 0.935, "bon_fp": 0.941},
    2: {"identity": 0.873, "log": 0.863, "exp:10": 0.891, "bon_fp": 0.897},
}


def run(*arguments):
    return cli.main(["curves", *map(str, arguments)])


def error_of(capsys, *arguments):
    assert run(*arguments) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("n", BON)
def test_win_rates_of_the_paper(n, tmp_path, capsys):
    assert run("--n", n, "--transforms", ",".join(BON[n]), "--kls", 1, "--out", tmp_path / "new" / "folder") == 0
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "new" / "folder" / "curves.json").read_text("utf-8"))
    assert record["n"] == n
    table = {row["transform"]: row for row in record["table"]}
    assert {name: row["bon_win_rate"] for name, row in table.items()} == pytest.approx(BON[n], abs=1e-3)
    assert all(row["kl"] == pytest.approx(1, abs=1e-9) for row in table.values())
    assert table["identity"]["win_rate"] == pytest.approx(0.865, abs=1e-3)
    for row in table.values():
        assert f"{row['bon_win_rate']:.4f}" in out
        assert (row["residual"] is not None) == (row["transform"] == "bon_fp")
    assert table["bon_fp"]["residual"] < 1e-11
    assert f"best of {n}" in out
    assert "residual of Theorem 1 at most" in out


def test_files_hold_the_curves(tmp_path, capsys, monkeypatch):
    draw, crosses = calibration_figures.alignment, []
    monkeypatch.setattr(calibration_figures, "alignment", lambda curves, x: crosses.append(x) or draw(curves, x))
    assert run("--transforms", "log, exp:10", "--kls", "2,0.5", "--out", tmp_path) == 0
    record = json.loads((tmp_path / "curves.json").read_text("utf-8"))
    assert [(row["transform"], round(row["kl"], 9)) for row in record["table"]] == [
        ("log", 0.5), ("log", 2), ("exp:10", 0.5), ("exp:10", 2),
    ]  # fmt: skip
    with (tmp_path / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(record["curves"]) == 2 * 48
    for row, point in zip(rows, record["curves"], strict=True):
        assert row.pop("residual") == ""
        assert row.pop("transform") == point["transform"]
        assert {name: float(value) for name, value in row.items()} == {name: point[name] for name in row}
    for name in ("log", "exp:10"):
        points = [point for point in record["curves"] if point["transform"] == name]
        kl, won = (np.array([point[key] for point in points]) for key in ("kl", "bon_win_rate"))
        assert (np.diff(kl) > 0).all()
        assert (np.diff(won) > 0).all()
        assert (kl[0], kl[-1]) == pytest.approx((1e-3, 2), abs=1e-8)
        beta = [point["beta"] for point in points]
        curve = alignment_curve(parse_transform(name), beta, 4)
        np.testing.assert_array_equal(curve.bon_win_rate, won)
    with Image.open(tmp_path / "curves.png") as image:
        assert image.width > 1000
    assert crosses[0].win_rate.tolist() == pytest.approx([2 / 3, 4 / 5, 8 / 9])  # best of 2, 4, 8: m / (m + 1)
    assert "fixed points" not in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"curves.json", "curves.csv", "curves.png"}


def test_at_betas(tmp_path, capsys):
    assert run("--transforms", "identity,won_fp:2:0.1", "--betas", "0.1,1", "--n", 2, "--out", tmp_path) == 0
    record = json.loads((tmp_path / "curves.json").read_text("utf-8"))
    assert [row["beta"] for row in record["table"]] == [0.1, 1, 0.1, 1]
    assert record["curves"] == record["table"]
    out = capsys.readouterr().out
    assert out.split()[0] == "beta"
    assert out.index("0.1   identity") < out.index("1   identity")


def test_further_procedures_are_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(z):\n    return z ** 3\n")
    drawn, draw = [], calibration_figures.alignment
    monkeypatch.setattr(calibration_figures, "alignment", lambda *given: drawn.append(draw(*given)) or drawn[-1])
    procedures = ["bop:4.0", "distortion:0.0,1.0,2.0", "cvar:0.1", "distortion:mine.py:f"]
    given = ["--procedures", "bop:4, distortion:0,1,2,cvar:0.1,distortion:mine.py:f", "--betas", "0.1,0.5", "--n", 4]
    transforms = ["log", "fp:distortion:0,1,2", "fp:bop:4:0.1"]
    assert run(*given, "--transforms", ",".join(transforms), "--out", tmp_path / "out") == 0
    record = json.loads((tmp_path / "out" / "curves.json").read_text("utf-8"))
    assert [row["transform"] for row in record["table"]] == [name for name in transforms for _ in range(2)]
    out = capsys.readouterr().out
    for row in record["table"]:
        assert (row["residual"] is not None) == row["transform"].startswith("fp:")
        curve = alignment_curve(row["transform"], [row["beta"]], 4, procedures[:3])
        for name in procedures[:3]:
            assert row[name] == float(curve.procedures[name])
            assert f"{row[name]:.4f}" in out
        assert row["distortion:mine.py:f"] == pytest.approx(row["bon_win_rate"], abs=1e-12)  # z^3 is best-of-4
    with (tmp_path / "out" / "curves.csv").open(newline="") as file:
        assert [float(row["cvar:0.1"]) for row in csv.DictReader(file)] == [row["cvar:0.1"] for row in record["curves"]]
    (figure,) = drawn
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "One sample",
        "Best-of-4",
        "Worst-of-4",
        *procedures,
    ]
    of_log = [100 * row["bop:4.0"] for row in record["curves"][:2]]
    assert figure.axes[3].lines[0].get_ydata() == pytest.approx(of_log[::-1])  # in the order of KL
    crosses = alignment_curve("log", [1, 1 / 3, 1 / 7], 4, ["bop:4.0"]).procedures["bop:4.0"]
    assert figure.axes[3].lines[-1].get_ydata() == pytest.approx(100 * crosses)


@pytest.mark.slow
def test_a_function_of_the_user(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def top(u):\n    return (u > 0.9).double()\n\ndef back(u):\n    return -u\n")
    assert run("--transforms", "mine.py:top", "--kls", "0.5,2") == 0
    assert "mine.py:top" in capsys.readouterr().out
    assert (tmp_path / "runs" / "curves" / "curves.png").is_file()
    assert "mine.py:back decreases from f(0) =" in error_of(capsys, "--transforms", "mine.py:back")
    assert "KL = 3 is out of reach, the furthest is 2.3" in error_of(capsys, "--transforms", "mine.py:top")


@pytest.mark.parametrize(("worst", "best", "ceiling"), [(False, "exp:17.3", "bon_fp"), (True, "exp:-16", "won_fp")])
def test_a_suggestion(worst, best, ceiling, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("--suggest", 4, "--kl", 1, *(["--worst"] if worst else [])) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == f"For {'worst' if worst else 'best'}-of-4 at KL = 1: {best}"
    won = {cells[0]: float(cells[2]) for row in rows if len(cells := row.split()) == 3}
    assert list(won) == [best, "exp:-10" if worst else "exp:10", "identity", "log", ceiling]
    assert won[ceiling] >= won[best] >= max(won[name] for name in list(won)[1:-1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for arguments, message in {
        (
            "--transforms",
            "identity,lg",
        ): "transform 'lg' is not known; did you mean 'log'? Expected one of identity, log",
        ("--transforms", ","): "--transforms is empty",
        ("--kls", ""): "--kls is empty",
        ("--kls", "1;2"): "--kls '1;2': expected numbers separated by commas",
        ("--kls", "0,1"): "KL = 0.0: expected a finite number > 0",
        ("--betas", "-1"): "beta = -1.0: expected a finite number > 0",
        ("--n", "0"): "N = 0",
        ("--n", "1"): "bon_fp: N = 1; expected an integer >= 2",
        ("--suggest", "1"): "N = 1: expected an integer >= 2",
        ("--suggest", "4", "--kl", "-1"): "KL = -1.0",
        ("--procedures", "soft:0.1"): "soft:0.1: expected a rank-based objective",
        ("--procedures", "distortion:1,-1"): "f(0.500977) = -1; a procedure needs f >= 0",
        ("--procedures", "cvar:0.1,bom:4"): "objective 'bom:4' is not known",
        ("--procedures", "distortion:absent.py:f"): "there is no file 'absent.py'",
        ("--transforms", "fp:soft:0.1"): "soft:0.1: expected a rank-based objective",
        ("--transforms", "fp:cvar:0.25", "--kls", "1"): "KL = 1 is out of reach, the furthest is 0.288",
        ("--out", "file/folder"): "cannot write into file/folder",
    }.items():
        assert message in error_of(capsys, *arguments), arguments
    assert {path.name for path in tmp_path.iterdir()} <= {"file", "runs"}
    assert list(tmp_path.rglob("*.json")) == []


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_the_picture_shows_what_the_curves_say():
    curves = {name: alignment_curve(parse_transform(name), [0.5, 0.1, 2.0], 4) for name in ("identity", "won_fp:4")}
    reference = alignment_curve(parse_transform("log"), [1, 1 / 3], 4)
    panels = calibration_figures.alignment(curves, reference).axes
    assert [axes.get_title() for axes in panels] == ["One sample", "Best-of-4", "Worst-of-4"]
    for axes, column in zip(panels, ("win_rate", "bon_win_rate", "won_win_rate"), strict=True):
        *lines, crosses = axes.lines
        for line, curve in zip(lines, curves.values(), strict=True):
            assert (np.diff(line.get_xdata()) > 0).all()  # in the order of KL, whatever that of the betas was
            assert line.get_ydata() == pytest.approx(100 * getattr(curve, column).sort().values)
        assert crosses.get_ydata() == pytest.approx(100 * getattr(reference, column))
    assert panels[0].lines[2].get_ydata() == pytest.approx([100 * 2 / 3, 100 * 4 / 5])  # m / (m + 1)


def test_rewards_before_and_after_calibration():
    rewards = torch.randn(25, 40, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 26)[:, None]
    before, after = calibration_figures.calibration(rewards).axes
    assert len(before.lines) == 10
    last = rewards[-1].double()
    assert before.lines[9].get_ydata() == pytest.approx(last)
    assert before.lines[9].get_xdata() == pytest.approx(ranks(last))
    assert after.lines[9].get_ydata() == pytest.approx(calibrate(last[None, 20:], last[None, :20])[0])
    assert after.lines[9].get_xdata() == pytest.approx(ranks(last[20:]))
    for line in after.lines[:10]:  # within the band, which is wide for 20 samples
        assert np.abs(line.get_ydata() - line.get_xdata()).max() <= 2 * math.sqrt(math.log(80) / 40)
    assert len(calibration_figures.calibration(rewards[:3, :5]).axes[0].lines) == 3


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (torch.zeros(3, 3), "K >= 4"),
        (torch.zeros(0, 5), "P >= 1"),
        (torch.zeros(5), r"got \(5,\)"),
        (torch.tensor([[0.0, 1.0, math.nan, 2.0]]), "NaN"),
    ],
)
def test_rewards_that_cannot_be_drawn(rewards, message):
    with pytest.raises(ValueError, match=message):
        calibration_figures.calibration(rewards)
