"""Check an installed wheel, for cibuildwheel and test_packaging.py: the package, its compiled ops, and a command."""

import sys

import torch

import nlgrpo
from nlgrpo import cli, kernels

print(f"nlgrpo {nlgrpo.__version__} in {nlgrpo.__file__}, Python {sys.version.split()[0]}, torch {torch.__version__}")
assert kernels.swiglu(torch.zeros(1, 2), impl="cpp").tolist() == [[0.0]]  # raises without the compiled ops
assert kernels.linearize(torch.tensor([[1.0, 2.0]]), torch.ones(2)).tolist() == [[-1.0, 0.0]]
assert cli.main(["train", "length-bon", "--dry-run"]) == 0
assert cli.main(["generate", "Once upon a time", "--max-new-tokens", "3"]) == 0
