"""Which implementation of an op runs: the one place where that is decided."""

from __future__ import annotations


def choose(impl: str, op: str) -> str:
    """Name of the implementation of ``op`` to run for the caller's ``impl``: so far always "torch".

    Raises ValueError for an ``impl`` that does not exist, or that this op does not have.
    """
    if impl in ("auto", "torch"):
        return "torch"
    if impl == "triton":
        raise ValueError(f"impl='triton': this build has no Triton version of {op}; use impl='auto' or 'torch'.")
    raise ValueError(f"impl={impl!r} is not known to {op}; expected 'auto', 'triton' or 'torch'.")
