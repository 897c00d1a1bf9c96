"""The report of runs that are still training: rebuilt when files change, and served with a page that follows it."""

from __future__ import annotations

import html
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
from nlgrpo.apps.report import html_page, report, run_loader
from nlgrpo.apps.sweep import state
from nlgrpo.engine.rollouts import evaluation_samples
from nlgrpo.runtime.timing import as_clock
from nlgrpo.training.tracking import run_files

FOLLOWED = (
    *run_loader.CONFIGS,
    run_files.METRICS_FILE,
    run_files.SAMPLES_FILE,
    evaluation_samples.EVALUATION_FILE,
    results.RESULTS_FILE,
    state.SWEEP_FILE,
)
REST = 5.0  # pause after building a report, in units of the time that it took

# The page around the report. It asks for the state every two seconds and reloads the report when it has changed.
SCRIPT = """
"use strict";
const frame = document.querySelector("iframe"), line = document.querySelector("p");
let shown = -1, place = 0, loading = false;
async function follow() {
  try {
    const state = await (await fetch("state", {cache: "no-store"})).json();
    line.textContent = state.lines.join("   ");
    if (state.version !== shown) {
      if (!loading) place = frame.contentWindow.scrollY;
      loading = true;
      frame.src = "report?" + state.version;
      shown = state.version;
    }
  } catch (error) { line.textContent = "nlgrpo watch has ended"; }
  setTimeout(follow, 2000);
}
frame.onload = () => {  // a reader who has scrolled while the report loaded stays there
  if (loading && !frame.contentWindow.scrollY) frame.contentWindow.scrollTo(0, place);
  loading = false;
};
follow();
"""
STYLE = """
:root { color-scheme: light dark } body { margin: 0; display: flex; flex-direction: column; height: 100vh }
p { margin: 0; padding: .4rem 1rem; font: .9rem/1.4 system-ui, sans-serif; white-space: pre-wrap }
iframe { flex: 1; border: 0 }
"""


@dataclass
class LiveReport:
    """The report of ``folders``, rebuilt in a thread when a file in them changes.

    A folder may be absent or empty at first. ``folder``: for the report's own files.
    """

    folders: Sequence[Path]
    folder: Path
    version: int = 0
    """Number of reports so far."""
    page: bytes = b"<p>no run yet</p>"
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
        fault = ""
        try:
            path = report.write_report(there, self.folder / report.FILE) if there else None
            self.page = self.page if path is None else path.read_bytes()
        except ValueError as error:
            fault = str(error)
        if fault:
            self.page = f"<p>{html.escape(fault)}</p>".encode()
        self._seen = seen
        self._waiting = tuple(folder for folder in self.folders if folder not in there)
        self.version += 1
        return True

    def lines(self) -> list[str]:
        """One line for each run: the step and when it was logged, or that it is not there yet."""
        now = time.time()
        lines = [f"waiting for {folder}" for folder in self._waiting]
        for folder in self.folders:
            for path in sorted({folder / run_files.METRICS_FILE, *folder.glob(f"*/{run_files.METRICS_FILE}")}):
                if path.is_file():
                    lines.append(f"{path.parent.name}: {_state(path, now)}")
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


def _files(folder: Path) -> list[Path]:
    """Files that the report reads, of a run or of the points of a sweep."""
    places = [folder, *(sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else [])]
    return [place / name for place in places for name in FOLLOWED if (place / name).is_file()]


def _state(path: Path, now: float) -> str:
    step = run_files.last_step(path)
    try:
        total = json.loads((path.parent / "config.json").read_text("utf-8"))["train"]["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        total = "?"
    ago = as_clock(max(0.0, now - path.stat().st_mtime))
    return f"{0 if step is None else step + 1}/{total}, logged {ago} ago"


def server(live: LiveReport, host: str, port: int) -> ThreadingHTTPServer:
    """Return an HTTP server of the page, the report and its state; port 0 takes a free one.

    It answers requests for ``host`` and localhost only, so that no other website can read it through a browser.
    """
    policy = f"default-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src {html_page.allowed(SCRIPT)}"
    shell = (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>nlgrpo watch</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style>'
        f'</head><body><p>...</p><iframe title="report"></iframe><script>{SCRIPT}</script></body></html>'
    ).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            path = urlsplit(self.path).path
            if name not in {host, "localhost", "127.0.0.1", "::1"} and host != "0.0.0.0":
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"unknown host")
            elif path == "/":
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", shell, policy)
            elif path == "/report":
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", live.page)
            elif path == "/state":
                state = {"version": live.version, "lines": live.lines()}
                self._answer(HTTPStatus.OK, "application/json", json.dumps(state).encode())
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found")

        def _answer(self, status: HTTPStatus, kind: str, content: bytes, policy: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            if policy:
                self.send_header("Content-Security-Policy", policy)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    served = ThreadingHTTPServer((host, port), Handler)
    served.daemon_threads = True
    return served
