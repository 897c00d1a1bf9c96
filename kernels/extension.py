"""Load the compiled CPU ops (``csrc/``) into ``torch.ops.nlgrpo``, if the install built them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from . import fakes


def _load() -> bool:
    """Load the compiled ops and return whether they are available.

    An install may lack them. A file that cannot be loaded (built for another machine, or for a later torch) causes a
    warning. The environment variable ``NLGRPO_EXT=0`` disables the compiled ops; a path in it is loaded instead.
    """
    path = os.environ.get("NLGRPO_EXT")
    files = [Path(path)] if path else sorted(Path(__file__).parent.glob("_ext*.so"))
    if not files or path == "0":
        return False
    try:
        torch.ops.load_library(files[0])
    except OSError as error:
        warnings.warn(f"nlgrpo: cannot load the compiled CPU ops, using plain PyTorch instead: {error}", stacklevel=2)
        return False
    fakes.register()
    return True


# Evaluated at import, as torch.compile cannot trace the search for a file.
_AVAILABLE = _load()


def available() -> bool:
    """Whether the compiled ops were found and loaded."""
    return _AVAILABLE
