"""The compiled CPU ops (``csrc/``), where the install built them."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

import torch


@functools.cache
def available() -> bool:
    """Whether ``torch.ops.nlgrpo`` has the compiled ops; the first call loads them.

    An install without them is fine. A file that does not load (made for another machine, or for a later torch) gives
    one warning. ``NLGRPO_EXT=0`` in the environment leaves them alone.
    """
    files = sorted(Path(__file__).parent.glob("_ext*.so"))
    if not files or os.environ.get("NLGRPO_EXT") == "0":
        return False
    try:
        torch.ops.load_library(files[0])
    except OSError as error:
        warnings.warn(f"nlgrpo: the compiled CPU ops cannot be used, plain PyTorch is: {error}", stacklevel=2)
        return False
    return True
