"""What a run of a policy does last: it writes its report, says where everything is, and pushes its model."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from nlgrpo.apps.report import hub, report
from nlgrpo.config.schema import Config
from nlgrpo.training.best_model import Best


def conclude(config: Config, exported: Path, best: Best | None, console: Console, *, evaluated: bool) -> None:
    """Write the report, print where it and the models are and the next command, and push to the Hub (train.push)."""
    folder = config.run
    page = report.write_report(folder)
    console.print(f"model   {exported}\nreport  {page}", highlight=False, soft_wrap=True)
    if best is not None:
        console.print(f"best    {best.text(folder)}", highlight=False, soft_wrap=True)
    if evaluated and not config.environment.id:  # of which `evaluate` has none
        again = f"nlgrpo evaluate {shlex.quote(str(folder))} --n {4 * config.evaluation.samples}"
        console.print(f"next    {again}", highlight=False, soft_wrap=True)
    if repository := config.train.push:
        pushed = hub.push(folder, repository)
        console.print(f"pushed  {pushed}", highlight=False, soft_wrap=True)
