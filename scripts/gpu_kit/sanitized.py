"""What compute-sanitizer watches: ``python -m gpu_kit.sanitized linearize|decode cuda|cpu``."""

from __future__ import annotations

import sys

import torch

from nlgrpo import kernels
from nlgrpo.kernels import linearize_triton, reference


def linearize(device: str) -> None:
    """Groups that one program sorts in chunks, in both dtypes, compared with plain PyTorch."""
    sizes = (1500, 300)
    if device == "cpu":  # the same kernels with chunks of 8, because the interpreter takes minutes for 1,024
        linearize_triton.ELEMENTS = 8
        linearize_triton.GATHERED = 8
        sizes = (20, 20)
    for dtype, size in zip((torch.float32, torch.float64), sizes, strict=True):
        rewards = torch.randn(3, size, dtype=dtype).to(device)
        weights = torch.rand(size, dtype=dtype).to(device)
        ours = kernels.linearize(rewards, weights, impl="triton")
        error = (ours.double() - reference.linearize(rewards.double(), weights.double())).abs().max()
        if not float(error) < 1e-3:
            raise SystemExit(f"linearize of {size} in {dtype}: error {float(error)}")


def decode(device: str) -> None:
    """Prefill, several growths of the cache, and rows that finish early."""
    from gpu_kit.models import decoder_of, qwen2  # imports transformers: seconds, and more under the sanitizer
    from nlgrpo.engine.generation import generate
    from nlgrpo.engine.sampling import Sampling

    torch.manual_seed(0)
    model = decoder_of(qwen2(layers=2, width=64, heads=4, kv_heads=2, ffn=128, vocab=512), device)
    sampling = Sampling(max_new_tokens=40, stop_ids=(1, 2, 3))
    lengths = generate(model, [[5, 6, 7], [8], [9, 10]], 4, sampling).lengths
    if not bool((lengths > 0).all()):
        raise SystemExit("a completion is empty")


if __name__ == "__main__":
    {"linearize": linearize, "decode": decode}[sys.argv[1]](sys.argv[2])
