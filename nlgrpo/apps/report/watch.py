"""The command ``nlgrpo watch``: the report of runs that are still training, in a browser."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

from nlgrpo.errors import UserError

PORT = 8642


@dataclass
class Watch:
    """Serve the report of one or more runs on this machine, and update it while they train. Ctrl-C ends it.

    A folder may be a run of any `nlgrpo` command that trains, a sweep, or not there yet.
    """

    folders: Positional[tuple[Path, ...]]
    """One or more folders written by `nlgrpo train`, `nlgrpo evaluate` or `nlgrpo sweep`."""
    port: int = PORT
    """Port of the page. 0: a free one."""
    host: str = "127.0.0.1"
    """Address to serve on. The page shows prompts and completions, so other machines see it only if you change this."""


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C."""
    from nlgrpo.apps.report import live_report  # imports matplotlib, which is slow

    options = tyro.cli(Watch, args=list(arguments), prog="nlgrpo watch")
    if not options.folders:
        raise UserError("no folder given; give one or more folders written by `nlgrpo train`, `evaluate` or `sweep`")
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
