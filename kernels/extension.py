"""The compiled CPU ops (``csrc/``), where the install built them: ``torch.ops.nlgrpo`` has them after this import."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch


def _load() -> bool:
    """Whether the compiled ops are there now.

    An install without them is fine. A file that does not load (made for another machine, or for a later torch) gives
    one warning. ``NLGRPO_EXT=0`` in the environment leaves them alone, and a path in it is loaded in their place.
    """
    named = os.environ.get("NLGRPO_EXT")
    files = [Path(named)] if named else sorted(Path(__file__).parent.glob("_ext*.so"))
    if not files or named == "0":
        return False
    try:
        torch.ops.load_library(files[0])
    except OSError as error:
        warnings.warn(f"nlgrpo: the compiled CPU ops cannot be used, plain PyTorch is: {error}", stacklevel=2)
        return False
    return True


# Known at import, as torch.compile cannot follow the search for a file.
_AVAILABLE = _load()


def available() -> bool:
    """Whether this install has the compiled ops and could load them."""
    return _AVAILABLE
