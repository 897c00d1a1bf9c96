"""GPUs that a run is planned for, and what PyTorch and its kernels reach on them.

Data sheets say what a GPU can do at most. How long a launch takes, and which share of the peaks kernels reach, has to
be measured: ``measured.json`` has the results by card. Where there are none, the constants below stand in.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

from nlgrpo.errors import UserError
from nlgrpo.runtime.device import GPU, GPUS, gpu_named

MEASURED_FILE = "measured.json"
LONGEST_LAUNCH = 1e-3  # seconds; more is a mistake in the unit


@dataclass(frozen=True)
class Costs:
    """What a card reaches. The defaults are estimates, which no GPU has confirmed.

    ``launch_seconds``: from one kernel of plain PyTorch to the next, as Python and PyTorch take to launch it. 5 to 12
    microseconds are usual. ``matmul_share``: of the peak, by the matrix products of a prefill and of decoding.
    ``bandwidth_share``: of the memory's bandwidth, by kernels that read or write much. ``update_share``: of the peak,
    by whole forward and backward passes ("model FLOPs utilization"); trainers report 0.11 to 0.27 for 0.6B parameters,
    and about 0.4 for 7B. ``vllm_seconds``: of vLLM's scheduler and Python for a token of all rows, whose kernels are in
    a CUDA graph; never measured.
    """

    launch_seconds: float = 10e-6
    matmul_share: float = 0.6
    bandwidth_share: float = 0.75
    update_share: float = 0.3
    vllm_seconds: float = 4e-3
    card: str = ""
    file: str = ""
    date: str = ""
    unmeasured: tuple[str, ...] = ("launch_seconds", "matmul_share", "bandwidth_share", "update_share")

    def __str__(self) -> str:
        """One sentence on where the constants come from."""
        origin = f"constants measured on {self.card}, {self.date} ({self.file})"
        if not self.unmeasured:
            return origin
        values = ", ".join(self._described(name) for name in self.unmeasured)
        return f"{origin}; unmeasured: {values}" if self.file else f"unmeasured constants: {values}"

    def _described(self, name: str) -> str:
        value = getattr(self, name)
        return {
            "launch_seconds": f"{1e6 * value:g} us for each launch",
            "matmul_share": f"{value:.0%} of the peak in decoding",
            "bandwidth_share": f"{value:.0%} of the bandwidth",
            "update_share": f"{value:.0%} of the peak in the update",
        }[name]


UNMEASURED = Costs()
CONSTANTS = UNMEASURED.unmeasured
# What a data sheet allows: no time to launch, and all of the peaks.
IDEAL = Costs(0.0, 1.0, 1.0, 1.0, 0.0, unmeasured=())


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, ``per_node`` in each node."""

    gpu: GPU
    per_node: int
    costs: Costs = UNMEASURED

    def link(self, ranks: int) -> float:
        """Bytes per second that a GPU exchanges with others in a group of consecutive ``ranks``."""
        return self.gpu.link if ranks <= self.per_node else self.gpu.network

    @property
    def flops(self) -> float:
        """Operations per second that the matrix products of sampling reach."""
        return self.gpu.flops * self.costs.matmul_share

    @property
    def update_flops(self) -> float:
        """Operations per second that forward and backward passes reach."""
        return self.gpu.flops * self.costs.update_share

    @property
    def bandwidth(self) -> float:
        """Bytes per second that kernels read and write."""
        return self.gpu.bandwidth * self.costs.bandwidth_share


def machine(name: str, per_node: int) -> Machine:
    """Return GPUs of the kind ``name``, with what was measured on one. Raises UserError for an unknown name."""
    gpu = gpu_named(name)
    key = next(key for key, other in GPUS.items() if other is gpu)
    return Machine(gpu, per_node, read().get(key, UNMEASURED))


# --- what was measured ------------------------------------------------------------------------------------------------


def read(text: str | None = None) -> dict[str, Costs]:
    """Read measured constants by card, from the package's file or from ``text`` in its format.

        {"cards": {"h100": {"launch_seconds": 9e-06, "matmul_share": 0.55, "bandwidth_share": 0.8, "update_share": 0.3,
                            "file": "bench/results/gpu/h100-2026-12-01.json", "date": "2026-12-01"}}}

    A constant that could not be measured is null, and the default stands in. Raises UserError for another format.
    """
    if text is None:
        text = resources.files(__package__).joinpath(MEASURED_FILE).read_text("utf-8")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _broken(f"it is not JSON ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("cards"), dict):
        raise _broken("expected an object with the key 'cards', whose value has the constants of each card")
    return {card: _costs(card, entry) for card, entry in data["cards"].items()}


def _costs(card: str, entry: Any) -> Costs:
    if card not in GPUS:
        raise _broken(f"unknown card {card!r}; known are: {', '.join(GPUS)}")
    expected = {field.name for field in fields(Costs)} - {"card", "unmeasured", "vllm_seconds"}
    if not isinstance(entry, dict) or entry.keys() != expected:
        raise _broken(f"cards.{card}: expected an object with the keys {', '.join(sorted(expected))}")
    for name in ("file", "date"):
        if not isinstance(entry[name], str) or not entry[name]:
            raise _broken(f"cards.{card}.{name} = {entry[name]!r}: expected a text")
    found = {name: entry[name] for name in CONSTANTS if entry[name] is not None}
    for name, value in found.items():
        largest = LONGEST_LAUNCH if name == "launch_seconds" else 1.0
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise _broken(f"cards.{card}.{name} = {value!r}: expected a number, or null")
        if not 0 < value <= largest:
            raise _broken(f"cards.{card}.{name} = {value!r}: expected a number in (0, {largest:g}]")
    missing = tuple(name for name in CONSTANTS if name not in found)
    return Costs(**found, card=card, file=entry["file"], date=entry["date"], unmeasured=missing)


def _broken(why: str) -> UserError:
    return UserError(
        f'nlgrpo/apps/plan/{MEASURED_FILE}: {why}; generate the file again, or set it to {{"cards": {{}}}}'
    )
