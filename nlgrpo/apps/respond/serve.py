"""The command ``nlgrpo serve``: an OpenAI-compatible server that responds through an inference-time procedure."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from nlgrpo.apps.respond.options import read_serve
from nlgrpo.errors import UserError
from nlgrpo.rewards import reward_functions

KEY = "NLGRPO_API_KEY"


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT. Raises UserError for user errors."""
    options = read_serve(arguments)
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(f"nlgrpo serve needs {' and '.join(missing)}; install them: pip install 'nlgrpo[serve]'")
    from nlgrpo.apps.respond import app, loading, server
    from nlgrpo.apps.respond.batching import Batcher

    key = options.api_key or os.environ.get(KEY) or None
    with server.listen(options.host, options.port) as listener:  # a port that is taken is known before the model loads
        responder, notes = loading.load(options, isolated=True)
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
