"""What a conversion from TRL writes: keys of nlgrpo, and comments about the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from nlgrpo.config import toml_file
from nlgrpo.runtime import secrets

SECRET = re.compile(r"(?:^|_)(?:token|key|password|secret)$")  # the end of an option's name


@dataclass
class Converted:
    """The keys of nlgrpo that differ from its defaults, by section, and what could not be converted."""

    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """To check by hand."""
    missing: list[str] = field(default_factory=list)
    """Options that are not carried over, with the reason."""

    def set(self, key: str, value: Any) -> None:
        section, _, name = key.rpartition(".")
        self.keys.setdefault(section, {})[name] = value

    def drop(self, name: str, value: Any, reason: str) -> None:
        """List an option that is not carried over."""
        shown = "***" if SECRET.search(name) else repr(value)
        self.missing.append(f"{name} = {shown}: {reason}")

    def toml(self) -> str:
        """Return the TOML file, with the rest as comments, without secrets."""
        lines = []
        for title, texts in (("Check", self.notes), ("Not carried over", self.missing)):
            lines += [f"# {title}: {' '.join(secrets.hide(text).split())}" for text in texts]
        return "\n".join([*lines, "", toml_file.text(self.sections())]).strip() + "\n"

    def sections(self) -> dict[str, Any]:
        """Return the keys by section, those of a reward below the section rewards."""
        found: dict[str, Any] = {}
        for section, keys in self.keys.items():
            name, _, part = section.partition(".")
            target = found.setdefault(name, {})
            target.update({part: keys} if part else keys)
        return found
