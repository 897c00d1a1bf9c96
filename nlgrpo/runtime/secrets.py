"""Secrets in texts that are saved: configurations, reports and logs are shared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# What is found, and what it looks like. Keys of other services are in environment variables, whose names are no secret.
PATTERNS = {
    "a password in an address": re.compile(r"://[^/\s:@'\"]*:[^/\s@'\"]+@"),
    "a key in an address": re.compile(
        r"[?&](?:api[-_]?key|(?:access[-_]?)?token|key|secret|password|sig(?:nature)?)=[^&\s'\"]+", re.IGNORECASE
    ),
    "a token of Hugging Face": re.compile(r"\bhf_[A-Za-z0-9]{20,}"),
    "a key of an API": re.compile(r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"),
    "a token of GitHub": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})"),
    "a key of AWS": re.compile(r"\bA(?:KIA|SIA)[A-Z0-9]{16}\b"),
}


def found(text: str) -> str:
    """Say what kind of secret a text seems to hold; empty if none."""
    return next((kind for kind, pattern in PATTERNS.items() if pattern.search(text)), "")


def faults(values: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Name the keys of a configuration whose texts seem to hold a secret; never the secret itself."""
    for key, value in values.items():
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            yield from faults(value, f"{name}.")
            continue
        texts = value if isinstance(value, list | tuple) else [value]
        if kind := next(filter(None, (found(text) for text in texts if isinstance(text, str))), ""):
            yield (
                f"{name} seems to hold {kind}. The configuration is saved and shown in reports and trackers: put "
                "secrets into environment variables, or into a file of your own"
            )


def hide(text: str) -> str:
    """Replace what seems to be a secret by ``***``, for messages of other programs."""
    for pattern in PATTERNS.values():
        text = pattern.sub("***", text)
    return text
