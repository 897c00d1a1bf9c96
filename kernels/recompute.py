"""Cheap ops that are computed again in the backward pass, so that their results or temporary tensors are not saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor


def without_temporaries(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``function(*inputs)``; autograd saves the inputs only, and runs the function again in the backward pass.

    PyTorch's own ops save more: a norm in half precision saves copies in float32, a product both of its factors.
    Differentiable any number of times. The function must be deterministic.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return function(*inputs)
    return cast(Tensor, _Again.apply(function, *inputs))


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        twice = torch.is_grad_enabled()  # with create_graph: the gradient itself has a graph, back to the inputs
        wanted = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            pairs = zip(ctx.saved_tensors, wanted, strict=True)
            inputs = [x.view_as(x) if twice else x.detach().requires_grad_(w) for x, w in pairs]
            out = ctx.function(*inputs)
        differentiated = [x for x, w in zip(inputs, wanted, strict=True) if w]
        grads = iter(torch.autograd.grad(out, differentiated, grad, create_graph=twice))
        return None, *(next(grads) if w else None for w in wanted)


@contextmanager
def recomputed(value: Tensor, function: Callable[[], Tensor]) -> Iterator[None]:
    """Context in which autograd saves, instead of ``value``, how to compute it: ``function()``, which returned it.

    For an input of a linear layer that is cheap to compute, such as that of a norm. In the backward pass the value is
    computed once, and freed after its last use. Other tensors are saved as usual. The context must not enclose
    `torch.utils.checkpoint`, nor be inside of it: both replace saved tensors.
    """
    recipe, storage = _Recipe(function), value.untyped_storage()._cdata
    place = (value.shape, value.stride(), value.storage_offset())

    def pack(x: Tensor) -> Tensor | _Recipe:
        if x.untyped_storage()._cdata != storage or (x.shape, x.stride(), x.storage_offset()) != place:
            return x
        recipe.waiting += 1
        return recipe

    def unpack(saved: Tensor | _Recipe) -> Tensor:
        return saved.compute() if isinstance(saved, _Recipe) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Recipe:
    """Computes a value again. ``waiting``: number of saved references whose backward pass has not run."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.function, self.waiting = function, 0
        self._value: Tensor | None = None

    def compute(self) -> Tensor:
        value = self._value
        if value is None:
            with torch.no_grad():
                value = self.function()
        self.waiting -= 1
        self._value = value if self.waiting > 0 else None
        return value
