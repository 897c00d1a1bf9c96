"""A local HTTP server for tests of clients, whose answers a function gives."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonServer:
    """Answers POST requests with ``answer(path, body)``: (status, object), or None to close the connection.

    ``port`` 0 is a free one.
    """

    def __init__(self, answer: Callable[[str, Any], tuple[int, Any] | None], port: int = 0) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                found = answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if found is None:
                    self.close_connection = True
                    self.connection.close()
                    return
                content = json.dumps(found[1]).encode()
                self.send_response(found[0])
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, *address: Any) -> None:
                if not isinstance(sys.exception(), ConnectionError):  # a client that does not wait is no error
                    super().handle_error(*address)

        self.server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> JsonServer:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
