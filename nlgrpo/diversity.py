"""Diversity of samples from a kernel: Rao's quadratic entropy and determinantal point processes.

The public names of `nlgrpo.objectives.diversity`.
"""

from nlgrpo.objectives.diversity import (
    Diversity,
    DPPDiversity,
    RaoDiversity,
    check_kernel,
)

__all__ = ["DPPDiversity", "Diversity", "RaoDiversity", "check_kernel"]
