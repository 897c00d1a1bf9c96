"""The command ``nlgrpo verify``: checks the mathematics of the project against exact answers.

Prints a table of claims with source, measured and required value, and writes it as ``verify.json``, with pictures. The
checks are `check_estimators`, `check_shape`, `check_training` and `check_inexact` (IAMA),
`check_infalign`, `check_vbon` and `check_iro`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nlgrpo import __version__
from nlgrpo.apps.report import figures
from nlgrpo.apps.verify import check_estimators as estimators
from nlgrpo.apps.verify import check_inexact as inexact
from nlgrpo.apps.verify import check_infalign as infalign
from nlgrpo.apps.verify import check_iro as iro
from nlgrpo.apps.verify import check_shape as shape
from nlgrpo.apps.verify import check_training as training
from nlgrpo.apps.verify import check_vbon as vbon
from nlgrpo.apps.verify import verification_figures
from nlgrpo.apps.verify.claims import Proof, Result
from nlgrpo.apps.verify.options import Verify, read_options
from nlgrpo.errors import UserError
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes
from nlgrpo.runtime.progress import track

VERIFY_FILE = "verify.json"


@dataclass(frozen=True)
class Check:
    """One part of the table: its title, whose claims they are, the check, and the picture ``<name of the check>.png``.

    ``paper`` is a paper, or `OURS` for what this package adds.
    """

    title: str
    paper: str
    prove: Callable[[bool], Proof]
    draw: Callable[..., Figure] | None = None


IAMA = "IAMA"
INFALIGN = "InfAlign"
VBON = "vBoN"
IRO = "IRO"
OURS = "this package"
CHECKS = (
    Check("First variations", IAMA, estimators.first_variations),
    Check("Unbiased estimators", OURS, estimators.unbiased),
    Check("Plug-in estimators", IAMA, estimators.plugin, verification_figures.plugin),
    Check("Linearised loss", IAMA, estimators.linearised_loss, verification_figures.linearised_loss),
    Check("Concavity", IAMA, shape.lemma_5_4),
    Check("Smoothness", IAMA, shape.lemma_5_5),
    Check("First variation of a group", IAMA, shape.lemma_5_6, verification_figures.lemma_5_6),
    Check("Two opposed users of best-of-N", IAMA, training.proposition_3_1, verification_figures.proposition_3_1),
    Check("Rate of convergence", IAMA, training.theorem_5_2, verification_figures.theorem_5_2),
    Check("Convergence of inexact updates", IAMA, inexact.theorem_5_3, verification_figures.theorem_5_3),
    Check("Two rewards at once", IAMA, training.pareto, verification_figures.pareto),
    Check("Calibration", INFALIGN, infalign.calibration),
    Check("Win rates and KL of a transform", INFALIGN, infalign.theorem_3, verification_figures.theorem_3),
    Check("The best transform", INFALIGN, infalign.corollary_2),
    Check("Best-of-N of u^N", INFALIGN, infalign.definition_5),
    Check("Distribution of best-of-N", VBON, vbon.proposition_1),
    Check("Variational best-of-N and its lower bounds", VBON, vbon.lower_bounds, verification_figures.lower_bounds),
    Check("Cost of guided search", IRO, iro.proposition_1),
    Check("Convergence of iterated values", IRO, iro.theorem_1, verification_figures.theorem_1),
    Check("Search by iterated values", IRO, iro.iterated_search),
)


def main(arguments: Sequence[str]) -> int:
    """Run all checks and print the table. Returns 0 if every claim holds, else 1."""
    options = read_options(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / VERIFY_FILE).unlink(missing_ok=True)  # remove the results of an earlier run
    except OSError as error:
        raise UserError(
            f"cannot write into {options.out}: {error.strerror}; choose another folder with --out"
        ) from None
    console = Console()
    start = time.perf_counter()
    with _one_thread():
        found = [_run(check, options, console) for check in track(CHECKS, "checks", len(CHECKS), console)]
    seconds = time.perf_counter() - start
    atomic_write(options.out / VERIFY_FILE, json.dumps(_record(found, options.quick, seconds), indent=1) + "\n")
    console.print(_table(found))
    return _verdict(found, options.out, seconds, console)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: the tensors are small, and several threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(check: Check, options: Verify, console: Console) -> tuple[Check, Sequence[Result]]:
    start = time.perf_counter()
    proof = check.prove(options.quick)
    if check.draw is not None:
        picture = figures.render(partial(check.draw, **proof.drawn), parse_math=True)
        atomic_write_bytes(options.out / f"{check.prove.__name__}.png", picture)
    holding = sum(result.holds for result in proof.results)
    took = time.perf_counter() - start
    console.print(f"{check.title}: {holding} of {len(proof.results)} hold, {took:.1f} s", highlight=False)
    return check, proof.results


def _record(found: Sequence[tuple[Check, Sequence[Result]]], quick: bool, seconds: float) -> dict[str, Any]:
    results = [
        {"part": check.title, "paper": check.paper, **result.as_json()} for check, part in found for result in part
    ]
    setting = {"nlgrpo": __version__, "torch": torch.__version__, "quick": quick, "seconds": round(seconds, 1)}
    papers = {paper: {"holding": holding, "claims": claims} for paper, (holding, claims) in _by_paper(found).items()}
    return {**setting, "holds": all(result["holds"] for result in results), "papers": papers, "results": results}


def _by_paper(found: Sequence[tuple[Check, Sequence[Result]]]) -> dict[str, tuple[int, int]]:
    """Number of claims of each paper that hold, and number of all its claims; `OURS` is last."""
    counts: dict[str, tuple[int, int]] = {}
    for check, part in found:
        holding, claims = counts.get(check.paper, (0, 0))
        counts[check.paper] = holding + sum(result.holds for result in part), claims + len(part)
    return dict(sorted(counts.items(), key=lambda item: item[0] == OURS))


def _table(found: Sequence[tuple[Check, Sequence[Result]]]) -> Table:
    """Build a table with one row per claim; source and quantity are below the claim, to fit 80 columns."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("claim (source; what is measured)")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("required", no_wrap=True)
    table.add_column("", no_wrap=True)
    for check, part in found:
        table.add_row(Text(check.title, style="bold"))
        for result in part:
            table.add_row(*_cells(check.paper, result))
        table.add_section()
    return table


def _cells(paper: str, result: Result) -> tuple[Text, ...]:
    claim = Text(result.claim)
    more = f"; {result.note}" if result.note else ""
    claim.append(f"\n({paper}, {result.source}; {result.quantity}{more})", style="dim")
    verdict = Text("ok", style="green") if result.holds else Text("FAILED", style="bold red")
    return claim, Text(f"{result.measured:.3g}"), Text(result.required), verdict


def _verdict(found: Sequence[tuple[Check, Sequence[Result]]], out: Path, seconds: float, console: Console) -> int:
    results = [result for _, part in found for result in part]
    failed = [result.claim for result in results if not result.holds]
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    say(", ".join(f"{paper} {held} of {claims}" for paper, (held, claims) in _by_paper(found).items()))
    holding = len(results) - len(failed)
    say(f"{holding} of {len(results)} claims hold, {seconds:.0f} s; {VERIFY_FILE} and pictures in {out}")
    for claim in failed:
        say(f"FAILED: {claim}", style="bold red")
    return 1 if failed else 0
