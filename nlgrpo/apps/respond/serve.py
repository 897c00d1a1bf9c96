"""The command ``nlgrpo serve``: an OpenAI-compatible server that responds through an inference-time procedure."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import tyro

from nlgrpo.apps.respond.options import ResponderOptions
from nlgrpo.errors import UserError
from nlgrpo.rewards import reward_functions

KEY = "NLGRPO_API_KEY"


@dataclass
class Serve(ResponderOptions):
    """Serve a model through an inference-time procedure over OpenAI's HTTP protocol.

    ``temperature``, ``top_k``, ``top_p`` and ``min_p`` are the defaults of requests that do not set them, and
    ``max-new-tokens`` is also the most that a request may ask for.
    """

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0: all interfaces; set an API key then."""
    port: int = 8000
    """Port. 0: any free port."""
    name: str | None = None
    """Name of the model in the protocol. None: as --model."""
    api_key: str | None = None
    """Key that requests have to send. None: the environment variable NLGRPO_API_KEY, which other users of the machine
    do not see; without one, no key is needed."""
    max_queue: int = 256
    """Maximum number of waiting requests; more get status 429."""
    max_choices: int = 16
    """Maximum number of responses per request: its prompts times n."""
    max_body: int = 1 << 20
    """Maximum size of the body of a request, in bytes."""
    grace: float = 30.0
    """Seconds for the requests that have arrived when the server is stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_queue", "max_choices", "max_body"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: expected at least 1")
        if not 0 <= self.grace < float("inf"):
            raise UserError(f"grace = {self.grace}: expected a number of seconds >= 0")
        if self.api_key == "":
            raise UserError("api_key is empty; omit it to need no key")


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT. Raises UserError for user errors."""
    options = tyro.cli(Serve, args=list(arguments), prog="nlgrpo serve")
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(f"nlgrpo serve needs {' and '.join(missing)}; install them: pip install 'nlgrpo[serve]'")
    from nlgrpo.apps.respond import app, server
    from nlgrpo.apps.respond.batching import Batcher

    key = options.api_key or os.environ.get(KEY) or None
    with server.listen(options.host, options.port) as listener:  # a port that is taken is known before the model loads
        responder, notes = options.load(isolated=True)
        if responder.chooser is not None and responder.chooser.reward is not None:
            reward_functions.check_columns([responder.chooser.reward], [])
        address, port = listener.getsockname()[:2]
        if key is None and not ipaddress.ip_address(address).is_loopback:
            notes.append(f"{address} is reachable from other machines, and no API key is set ({KEY} or --api-key)")
        for note in notes:
            print(note, file=sys.stderr)
        name = options.name or options.model
        how = responder.chooser.how if responder.chooser is not None else "nothing"
        shown = f"[{address}]" if ":" in address else address
        print(f"serving {name!r}: {responder.procedure}, chosen by {how}, on http://{shown}:{port}/v1", flush=True)
        limits = app.ServerLimits(options.max_choices, options.max_body, key)
        batcher = Batcher(responder, options.seed, options.max_queue)
        return server.run(app.build_app(batcher, name, limits), batcher, listener, grace=options.grace)
