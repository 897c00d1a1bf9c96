"""Operations of a policy-gradient step. They depend on PyTorch only and can be used without the rest of nlgrpo.

    linear_logprob       hidden states, output matrix -> log-probability and entropy of each token
    token_logprob        the same from logits
    policy_loss          clipped policy-gradient loss with a KL penalty, per token
    linear_policy_loss   both: hidden states -> loss, with the gradient computed in the forward
    linearize            rewards of a group -> first variation of a rank-based objective
    ecdf                 empirical CDFs of many samples: ranks, cdf, argsort, sort, merge
    packed_attention     causal attention over packed sequences; with `Segments`, they share prefixes
    rms_norm, swiglu     ops between the matrix products of a transformer block
    linear               the linear layer, compiled where PyTorch's is slow
    branch_attention     attention of a decoding step over a KV cache; `Branches` maps rows to the prompts they share
    decode_block         a transformer block of a decoding step
    sample_tokens        logits -> tokens and their log-probs

``reference.py`` defines each op in plain PyTorch. ``impl`` selects the implementation: "auto" or "torch" for all ops,
"triton" for ops of a training step, "cpp" for ops that have a compiled CPU version.

The folder is imported as ``nlgrpo.kernels``. Python started in the root of this repository also finds it as
``kernels``, the name of a Hugging Face package that transformers tries to import. In that case this module defines
nothing and hands the name over to that package, if it is installed.
"""

import sys


def _leave_the_name() -> None:
    """Put the Hugging Face ``kernels`` in ``sys.modules``; without it, make this module an empty namespace package.

    transformers takes a module with neither ``__file__`` nor ``__version__`` as "not installed".
    """
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    others = [p for p in sys.path if not Path(p, "kernels", "linear_policy_loss.py").exists()]  # not this repository
    spec = PathFinder.find_spec("kernels", others)
    if spec is None or spec.loader is None or spec.origin is None:  # not found, or a folder without __init__.py
        this = sys.modules["kernels"]
        this.__path__ = []
        del this.__file__
        return
    real = module_from_spec(spec)
    sys.modules["kernels"] = real  # the import system returns this entry after this module has run
    spec.loader.exec_module(real)


if __name__ == "kernels":
    _leave_the_name()
else:
    from .blocks import rms_norm, rotate_queries_and_keys, swiglu
    from .branches import Branches, branch_attention
    from .decode import BlockWeights, decode_block, sample_tokens
    from .linear import linear
    from .linear_policy_loss import linear_policy_loss
    from .linearize import linearize
    from .logprob import linear_logprob, token_logprob
    from .packed_attention import packed_attention
    from .policy_loss import policy_loss, policy_loss_with_statistics
    from .recompute import recomputed
    from .reference import split_and_rotate
    from .segments import Segments, keys_of_segments

    __all__ = [
        "BlockWeights",
        "Branches",
        "Segments",
        "branch_attention",
        "decode_block",
        "ecdf",
        "keys_of_segments",
        "linear",
        "linear_logprob",
        "linear_policy_loss",
        "linearize",
        "packed_attention",
        "policy_loss",
        "policy_loss_with_statistics",
        "recomputed",
        "rms_norm",
        "rotate_queries_and_keys",
        "sample_tokens",
        "split_and_rotate",
        "swiglu",
        "token_logprob",
    ]
