"""The commands ``nlgrpo report``, ``compare``, ``watch`` and ``push``: their options and what they print.

They import what draws after they have read their options: matplotlib takes a second, and ``--help`` needs none.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

from nlgrpo.errors import UserError

PORT = 8642  # of `nlgrpo watch`


@dataclass
class Report:
    """Write an HTML report, with its pictures next to it, about runs, evaluations, sweeps and searches."""

    folders: Positional[tuple[str, ...]]
    """Folders written by `nlgrpo train` or another command that trains, evaluates or decodes; LABEL=PATH gives a name.
    Runs that differ in the seed only are one model, with intervals over seeds and prompts."""
    out: Path | None = None
    """The HTML file. None: report.html in the folder, or for several folders in the current one."""


def write_report(arguments: Sequence[str]) -> int:
    """Write the page and print its path."""
    options = tyro.cli(Report, args=list(arguments), prog="nlgrpo report")
    from nlgrpo.apps.report import report

    print(report.write_report(options.folders, options.out))
    return 0


@dataclass
class Compare:
    """Draw the lengths, or the solved prompts, and the best-of-N curves of several runs into one picture."""

    runs: Positional[tuple[str, ...]]
    """Folders of runs, or of sweeps for all their runs; LABEL=PATH gives a name. Runs that differ in the seed only are
    one setting, with intervals over seeds and prompts."""
    out: Path = Path("compare.png")
    """The picture."""


def compare(arguments: Sequence[str]) -> int:
    """Draw the picture and print its path."""
    options = tyro.cli(Compare, args=list(arguments), prog="nlgrpo compare")
    from nlgrpo.apps.report import compare as comparison

    print(comparison.compare(options.runs, options.out))
    return 0


@dataclass
class Watch:
    """Serve the report of one or more runs on this machine, and update it while they train. Ctrl-C ends it.

    A folder may be a run of any `nlgrpo` command that trains, a sweep, or not there yet.
    """

    folders: Positional[tuple[Path, ...]]
    """One or more folders written by `nlgrpo train` or another command that trains, evaluates or decodes."""
    port: int = PORT
    """Port of the page. 0: a free one."""
    host: str = "127.0.0.1"
    """Address to serve on. The page shows prompts and completions, so other machines see it only if you change this."""


def watch(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C."""
    options = tyro.cli(Watch, args=list(arguments), prog="nlgrpo watch")
    from nlgrpo.apps.report import live_report

    if not options.folders:
        raise UserError("no folder given; give one or more folders written by `nlgrpo train` or another command")
    with tempfile.TemporaryDirectory(prefix="nlgrpo-watch-") as folder:
        live = live_report.LiveReport(options.folders, Path(folder))
        try:
            served = live_report.server(live, options.host, options.port)
        except OSError as error:
            raise UserError(f"cannot serve on {options.host}:{options.port}: {error.strerror}; try --port 0") from error
        print(f"http://{options.host}:{served.server_address[1]}  (Ctrl-C ends it)", flush=True)
        following = threading.Thread(target=live.follow, daemon=True)
        following.start()
        try:
            served.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            live.stop()
            served.server_close()
            following.join(60.0)
    return 0


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


def push(arguments: Sequence[str]) -> int:
    """Upload, and print the address."""
    options = tyro.cli(Push, args=list(arguments), prog="nlgrpo push")
    from nlgrpo.apps.report import hub

    if not options.repo:
        raise UserError("give the repository: nlgrpo push RUN --repo USER/NAME")
    hub.check_name(options.repo)
    if options.dry_run:
        sys.stdout.write(hub.model_card(options.run, options.repo))
        return 0
    print(hub.push(options.run, options.repo, private=options.private))
    return 0
