"""A handful of small tensors with gradients by step: what the tests of the optimizer on one process run on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mars_dist import MARS

VARIANTS = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
SHAPES: dict[str, tuple[int, ...]] = {"wide": (3, 5), "bias": (5,), "tall": (6, 2), "kernel": (2, 3, 2), "scalar": ()}
MATRICES = {"wide", "tall"}

Tensors = dict[str, Tensor]
Parameters = dict[str, Parameter]


def parameters(dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Parameters:
    generator = torch.Generator().manual_seed(0)
    return {n: Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for n, s in shapes.items()}


def gradients(step: int, like: Mapping[str, Tensor], scale: float = 1.0) -> Tensors:
    """The gradients of ``step``; at scale 1 the norm of a matrix is above the clip, at 0.1 below it."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: (scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.dtype)
        for name, p in like.items()
    }


def set_gradients(params: Parameters, grads: Mapping[str, Tensor]) -> None:
    for name, p in params.items():
        p.grad = grads[name].clone() if name in grads else None


def train(optimizer: MARS, params: Parameters, steps: Iterable[int]) -> None:
    for step in steps:
        set_gradients(params, gradients(step, params))
        optimizer.step()


def copies(params: Parameters) -> Parameters:
    return {name: Parameter(p.detach().clone(), requires_grad=p.requires_grad) for name, p in params.items()}


def snapshot(optimizer: MARS, params: Parameters) -> dict[str, Any]:
    """Copies of all parameters, and by name of all states that are not empty."""
    values, states = {}, {}
    for name, p in params.items():
        values[name] = p.detach().clone()
        if optimizer.state.get(p):
            states[name] = {key: value.clone() for key, value in optimizer.state[p].items()}
    return {"params": values, "states": states}


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float = 1e-13) -> None:
    """Equal by name to ``atol``: by default that of float64 on both sides."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = (actual[name].detach().double() - value).abs()
        assert not (error > atol).any() and error.isfinite().all(), f"{name}: off by up to {error.max().item():.1e}"


def assert_identical(a: Any, b: Any, where: str = "") -> None:
    """Nested dicts of tensors with the same keys, dtypes and, bit for bit, values."""
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert torch.equal(a, b), f"{where} differs by {(a - b).abs().max().item():.1e}"
        return
    assert a.keys() == b.keys(), f"{where}: {sorted(a)} and {sorted(b)}"
    for key in a:
        assert_identical(a[key], b[key], f"{where}/{key}")
