"""What was measured on GPUs: the file is read, validated and named in the plan."""

import json

import pytest

from nlgrpo.apps.plan import machine, plan
from nlgrpo.apps.plan.machine import UNMEASURED, Costs, Machine
from nlgrpo.runtime.device import GPUS

ENTRY = {"launch_seconds": 7e-6, "matmul_share": 0.55, "bandwidth_share": 0.8, "update_share": 0.35,
         "file": "bench/results/gpu/h100-2026-12-01.json", "date": "2026-12-01"}  # fmt: skip


def text(**changes):
    return json.dumps({"cards": {"h100": ENTRY | changes}})


def test_the_packages_file_is_valid():
    assert set(machine.read()) <= set(GPUS)


def test_measured_constants_replace_the_estimates():
    found = machine.read(text())["h100"]
    assert (found.launch_seconds, found.matmul_share, found.bandwidth_share, found.update_share) == (
        7e-6,
        0.55,
        0.8,
        0.35,
    )
    assert str(found) == "constants measured on h100, 2026-12-01 (bench/results/gpu/h100-2026-12-01.json)"
    gpus = Machine(GPUS["h100"], 8, found)
    assert gpus.flops == pytest.approx(0.55 * 989e12)
    assert gpus.update_flops == pytest.approx(0.35 * 989e12)
    assert gpus.bandwidth == pytest.approx(0.8 * 3.35e12)


def test_a_constant_that_could_not_be_measured_stays_an_estimate():
    found = machine.read(text(update_share=None, launch_seconds=None))["h100"]
    assert found.unmeasured == ("launch_seconds", "update_share")
    assert (found.launch_seconds, found.update_share) == (UNMEASURED.launch_seconds, UNMEASURED.update_share)
    assert str(found).endswith("; unmeasured: 10 us for each launch, 30% of the peak in the update")


def test_without_a_measurement_the_plan_says_so():
    assert str(Costs()) == (
        "unmeasured constants: 10 us for each launch, 60% of the peak in decoding, 75% of the bandwidth, 30% of the "
        "peak in the update"
    )


def test_the_command_takes_the_constants_of_the_card(monkeypatch, capsys):
    monkeypatch.setattr(machine, "read", lambda read=machine.read: read(text(launch_seconds=20e-6)))
    arguments = ["length-bon", "--gpu", "H100", "--json", "-"]
    assert plan.main(arguments) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["constants"]["launch_seconds"] == 20e-6
    assert measured["constants"]["unmeasured"] == []
    assert measured["constants"]["date"] == "2026-12-01"
    assert plan.main(["length-bon", "--gpu", "h200", "--json", "-"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert len(other["constants"]["unmeasured"]) == 4
    assert measured["seconds"]["sampling"] == pytest.approx(2 * other["seconds"]["sampling"])  # of a small model
    assert plan.main(arguments[:-2]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "about" in printed
    assert "(seconds: constants measured on h100, 2026-12-01 (bench/results/gpu/h100-2026-12-01.json);" in printed


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("", "it is not JSON"),
        ("[]", "expected an object with the key 'cards'"),
        ('{"cards": []}', "expected an object with the key 'cards'"),
        ('{"cards": {"h1000": {}}}', "unknown card 'h1000'; known are: a100-40gb"),
        ('{"cards": {"h100": 3}}', "cards.h100: expected an object with the keys bandwidth_share, date"),
        (json.dumps({"cards": {"h100": {**ENTRY, "more": 1}}}), "cards.h100: expected an object with the keys"),
        (text(date=""), "cards.h100.date = '': expected a text"),
        (text(launch_seconds="7e-6"), "cards.h100.launch_seconds = '7e-6': expected a number, or null"),
        (text(launch_seconds=7.0), r"cards.h100.launch_seconds = 7.0: expected a number in \(0, 0.001\]"),
        (text(matmul_share=True), "cards.h100.matmul_share = True: expected a number"),
        (text(matmul_share=1.2), r"cards.h100.matmul_share = 1.2: expected a number in \(0, 1\]"),
        (text(update_share=0), r"cards.h100.update_share = 0: expected a number in \(0, 1\]"),
        (text(bandwidth_share=float("nan")), "cards.h100.bandwidth_share = nan: expected a number"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(broken, message):
    with pytest.raises(ValueError, match=message) as e:
        machine.read(broken)
    assert str(e.value).startswith("nlgrpo/apps/plan/measured.json: ")
    assert "generate the file again" in str(e.value)
