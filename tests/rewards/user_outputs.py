"""A reward function of a user that returns many types, for tests of those with a process of their own."""

import itertools
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

OUTPUTS = {
    "generator": lambda: (x for x in [1, 0.5, True, None]),
    "map": lambda: map(float, [1, 0.5, 1, float("nan")]),
    "array": lambda: np.array([[1], [0.5], [1], [np.nan]], dtype=np.float16),
    "tensor": lambda: torch.tensor([1, 0.5, 1, torch.nan], dtype=torch.bfloat16, requires_grad=True),
    "nested": lambda: [[1], [Fraction(1, 2)], [Decimal(1)], [None]],
    "scalars": lambda: [np.float32(1), torch.tensor(0.5), np.bool_(True), None],
    "dict": lambda: dict.fromkeys(range(4), 1.0),
    "text": lambda: "1111",
    "short": lambda: [1.0, 1.0, 1.0],
    "endless": itertools.count,
    "infinite": lambda: [1.0, 1.0, float("inf"), 1.0],
    "text inside": lambda: [1.0, "1.0", 1.0, 1.0],
}


def returns(answer):
    return OUTPUTS[answer[0]]()
