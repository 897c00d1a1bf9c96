"""The command ``nlgrpo push``: a finished run to the Hugging Face Hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

from nlgrpo.errors import UserError


@dataclass
class Push:
    """Upload the model of a finished run to the Hugging Face Hub, with a model card and its report.

    The card has the base model, the data, the objectives, the results with intervals, and versions. Log in with
    ``hf auth login``, or set HF_TOKEN.
    """

    run: Positional[Path]
    """Folder of the run."""
    repo: str = ""
    """Name of the repository: NAME or USER/NAME. It is created if it is not there."""
    private: bool = False
    """Create it as a private one."""
    dry_run: bool = False
    """Print the model card, and upload nothing."""


def main(arguments: Sequence[str]) -> int:
    """Upload, and print the address."""
    options = tyro.cli(Push, args=list(arguments), prog="nlgrpo push")
    from nlgrpo.apps.report import hub  # imports matplotlib, which is slow

    if not options.repo:
        raise UserError("give the repository: nlgrpo push RUN --repo USER/NAME")
    hub.check_name(options.repo)
    if options.dry_run:
        sys.stdout.write(hub.model_card(options.run, options.repo))
        return 0
    print(hub.push(options.run, options.repo, private=options.private))
    return 0
