"""Operations of a policy-gradient step, usable without the rest of nlgrpo: they need PyTorch and nothing else.

    linear_logprob       hidden states, output matrix -> log-probability and entropy of each token
    token_logprob        the same from logits
    policy_loss          clipped policy-gradient loss with a KL penalty, per token
    linear_policy_loss   both: hidden states -> loss, with the gradient computed in the forward
    linearize            rewards of a group -> first variation of a rank-based objective
    ecdf                 empirical CDFs of many samples: ranks, cdf, argsort, sort, merge
    branch_attention   decode_attention for rows that share prompts, which `Branches` tells apart
    decode_attention, rms_norm, swiglu   the ops between the matrix products of a decoding step

``reference.py`` is what each of them equals. ``impl`` chooses the implementation: "auto", "torch", and
"triton" for the ops of a training step or "cpp" for those of a decoding step.

The folder is imported as ``nlgrpo.kernels``. A Python that was started in the root of this repository also finds it as
``kernels``, which is the name of a package of Hugging Face's that transformers looks for and imports; then it defines
nothing and leaves the name to that package, or to nobody.
"""

import sys


def _leave_the_name() -> None:
    """Put the real ``kernels`` in ``sys.modules``; without one, make this module look like an empty namespace package.

    A module with neither ``__file__`` nor ``__version__`` is what transformers takes for "not installed".
    """
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    others = [p for p in sys.path if not Path(p, "kernels", "linear_policy_loss.py").exists()]  # clones of this
    spec = PathFinder.find_spec("kernels", others)
    if spec is None or spec.loader is None or spec.origin is None:  # nothing, or a folder without __init__.py
        this = sys.modules["kernels"]
        this.__path__ = []
        del this.__file__
        return
    real = module_from_spec(spec)
    sys.modules["kernels"] = real  # the import system returns what it finds here after this module has run
    spec.loader.exec_module(real)


if __name__ == "kernels":
    _leave_the_name()
else:
    from . import ecdf
    from .branches import Branches, branch_attention
    from .decode import decode_attention, rms_norm, swiglu
    from .linear_policy_loss import linear_policy_loss
    from .linearize import linearize
    from .logprob import linear_logprob, token_logprob
    from .policy_loss import policy_loss, policy_loss_with_statistics
    from .reference import split_and_rotate

    __all__ = [
        "Branches",
        "branch_attention",
        "decode_attention",
        "ecdf",
        "linear_logprob",
        "linear_policy_loss",
        "linearize",
        "policy_loss",
        "policy_loss_with_statistics",
        "rms_norm",
        "split_and_rotate",
        "swiglu",
        "token_logprob",
    ]
