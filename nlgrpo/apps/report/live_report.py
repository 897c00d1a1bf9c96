"""The report of runs that are still training: rebuilt when files change, and served with a page that follows it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from nlgrpo.apps.evaluate import results
from nlgrpo.apps.report import configurations, page, recorded_tables, report
from nlgrpo.apps.sweep import state
from nlgrpo.engine.rollouts import evaluation_samples
from nlgrpo.runtime.timing import as_clock
from nlgrpo.training.tracking import run_files

FOLLOWED = (
    *configurations.FILES,
    run_files.METRICS_FILE,
    run_files.SAMPLES_FILE,
    run_files.EVALUATIONS_FILE,
    evaluation_samples.EVALUATION_FILE,
    results.RESULTS_FILE,
    state.SWEEP_FILE,
    *recorded_tables.READERS,
)
REST = 5.0  # pause after building a report, in units of the time that it took


@dataclass
class LiveReport:
    """The report of ``folders``, rebuilt in a thread when a file in them changes.

    A folder may be absent or empty at first. ``folder``: for the report's own files.
    """

    folders: Sequence[Path]
    folder: Path
    version: int = 0
    """Number of reports so far."""
    html: str = field(default_factory=lambda: message("no run yet"))
    """The last report, or a message in its place."""
    stopped: threading.Event = field(default_factory=threading.Event)
    _seen: object = None
    _waiting: tuple[Path, ...] = ()

    def follow(self) -> None:
        """Rebuild the report whenever files change, until `stop`."""
        while not self.stopped.is_set():
            begin = time.monotonic()
            self.update()
            self.stopped.wait(max(1.0, REST * (time.monotonic() - begin)))

    def stop(self) -> None:
        """End `follow`, at the latest after the report that it is building."""
        self.stopped.set()

    def update(self) -> bool:
        """Rebuild the report if a file has changed. Returns whether it did."""
        seen = self._fingerprint()
        if seen == self._seen:
            return False
        there = [folder for folder in self.folders if _files(folder)]
        try:
            if there:
                self.html = report.write_report(there, self.folder / report.FILE).read_text("utf-8")
        except ValueError as error:
            self.html = message(str(error))
        self._seen = seen
        self._waiting = tuple(folder for folder in self.folders if folder not in there)
        self.version += 1
        return True

    def lines(self) -> list[str]:
        """One line for each run: the step and when it was logged, or that it is not there yet."""
        now = time.time()
        lines = [f"waiting for {folder}" for folder in self._waiting]
        for folder in self.folders:
            for path in _files(folder):
                if path.name == run_files.METRICS_FILE:
                    lines.append(f"{path.parent.relative_to(folder.parent)}: {_state(path, now)}")
        return lines

    def _fingerprint(self) -> list[tuple[str, int, int]]:
        found = []
        for folder in self.folders:
            for path in _files(folder):
                try:
                    status = path.stat()
                except OSError:  # replaced meanwhile
                    continue
                found.append((str(path), status.st_mtime_ns, status.st_size))
        return found


def message(text: str) -> str:
    """Return a page with one line."""
    return page.render("message.html", message=text)


def _files(folder: Path) -> list[Path]:
    """Files that the report reads: of a run, of the points of a sweep, or of the value models of a search."""
    if not folder.is_dir():
        return []
    points = sorted(path for path in folder.iterdir() if path.is_dir())
    places = [folder, *points, *(point / "value" for point in points)]
    return [place / name for place in places for name in FOLLOWED if (place / name).is_file()]


def _state(path: Path, now: float) -> str:
    step = run_files.last_step(path)
    try:
        total = json.loads((path.parent / "config.json").read_text("utf-8"))["train"]["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        total = None  # of epochs, or not to be read
    ago = as_clock(max(0.0, now - path.stat().st_mtime))
    done = f"{0 if step is None else step + 1}"
    return f"{done}/{total}, logged {ago} ago" if total is not None else f"step {done}, logged {ago} ago"


def server(live: LiveReport, host: str, port: int) -> ThreadingHTTPServer:
    """Return an HTTP server of the page, the report and its state; port 0 takes a free one.

    It answers requests for ``host`` and localhost only, so that no other website can read it through a browser.
    """
    shell = page.render("watch.html")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            path = urlsplit(self.path).path
            if name not in {host, "localhost", "127.0.0.1", "::1"} and host != "0.0.0.0":
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", "unknown host")
            elif path == "/":
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", shell)
            elif path == "/report":
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", live.html)
            elif path == "/state":
                state = {"version": live.version, "lines": live.lines()}
                self._answer(HTTPStatus.OK, "application/json", json.dumps(state))
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "not found")

        def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
            content = text.encode(errors="replace")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    served = ThreadingHTTPServer((host, port), Handler)
    served.daemon_threads = True
    return served
