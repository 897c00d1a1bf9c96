"""Writing a configuration as a TOML file, which ``nlgrpo train FILE`` reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def text(config: Mapping[str, Any]) -> str:
    """Return a configuration (sections by name, keys by name) as TOML. Keys that are None are left out."""
    top = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    lines = _lines(top)
    for name, section in config.items():
        if isinstance(section, Mapping):
            tables = {key: value for key, value in section.items() if isinstance(value, Mapping)}
            if own := _lines({key: value for key, value in section.items() if key not in tables}):
                lines += ["", f"[{name}]", *own]
            for key, table in tables.items():
                lines += ["", f"[{name}.{_key(key)}]", *_lines(table)]
    return "\n".join(lines).strip() + "\n"


def _lines(keys: Mapping[str, Any]) -> list[str]:
    return [f"{_key(name)} = {_value(value)}" for name, value in keys.items() if value is not None]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(_lines(value)) + "}"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    return repr(value)
