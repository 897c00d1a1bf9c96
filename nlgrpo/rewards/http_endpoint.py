"""A connection to an HTTP endpoint for rewards: repeated requests, a limit of concurrent ones, and its key."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from typing import Any
from urllib.parse import urlsplit

from nlgrpo.errors import UserError


class Endpoint:
    """Settings of a connection, which is opened once per event loop (by the package openai).

    A request is repeated up to ``retries`` times, with growing pauses, after a timeout (``timeout`` seconds), a lost
    connection, and status 408, 409, 429 and 5xx. ``key``: environment variable of the API key.

    Raises UserError for invalid arguments, and if the package openai is not installed.
    """

    def __init__(self, user: str, base_url: str, key: str, *, concurrency: int, retries: int, timeout: float) -> None:
        if importlib.util.find_spec("openai") is None:
            raise UserError(f"{user} needs the package openai: run pip install nlgrpo[judge]")
        check_counts(concurrency=(concurrency, 1), retries=(retries, 0))
        if not timeout > 0:
            raise UserError(f"timeout must be above 0 s, got {timeout!r}")
        self.options: dict[str, Any] = {"base_url": base_url or None, "max_retries": retries, "timeout": timeout}
        self.key = key
        self.concurrency = concurrency
        host = urlsplit(base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com").hostname or ""
        self.is_openai = host.endswith(("openai.com", "openai.azure.com"))
        self._client: tuple[asyncio.AbstractEventLoop, Any] | None = None

    def client(self) -> Any:
        """Return the client of the running event loop."""
        from openai import AsyncOpenAI

        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            # A server of one's own needs no key, and the client insists on one.
            key = os.environ.get(self.key) or ("none" if self.options["base_url"] else None)
            self._client = loop, AsyncOpenAI(api_key=key, **self.options)
        return self._client[1]


def check_counts(**values: tuple[Any, int]) -> None:
    """Raise UserError unless each value is a whole number of at least its minimum; pairs (value, minimum) by name."""
    for name, (value, least) in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} must be a whole number of at least {least}, got {value!r}")
