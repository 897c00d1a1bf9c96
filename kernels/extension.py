"""Load the compiled CPU ops (``csrc/``) into ``torch.ops.nlgrpo``, if the install built them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def _register_shapes() -> None:
    """Tell PyTorch the shapes of the results, for torch.compile. Called once, after the ops are loaded."""
    results: dict[str, Callable[..., Any]] = {
        "rms_norm": _as_first,
        "rms_norm_backward": _rms_norm_backward,
        "swiglu": _swiglu,
        "swiglu_backward": _as_second,
        "linear": _linear,
        "packed_attention": _packed_attention,
        "packed_attention_backward": _as_second,
    }
    for op, like in results.items():
        torch.library.register_fake(f"nlgrpo::{op}", like)


def _as_first(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _as_second(_: Tensor, x: Tensor, *__: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _as_first(x), torch.empty_like(weight)


def _swiglu(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _packed_attention(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, segments: Tensor, window: int, scale: float, heads: int
) -> tuple[Tensor, Tensor]:
    tokens, _, d = qkv.shape
    return qkv.new_empty(tokens, heads, d), qkv.new_empty(tokens, heads)


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
    _register_shapes()
    return True


# Evaluated at import, as torch.compile cannot trace the search for a file.
_AVAILABLE = _load()


def available() -> bool:
    """Whether the compiled ops were found and loaded."""
    return _AVAILABLE
