"""The update rules: what each keeps per tensor, and the direction in which it moves.

All rules share the corrected gradient c~ and p <- p - lr * (weight_decay * p + d); they differ in d. Formulas follow
arXiv 2411.10438 (MARS) and arXiv 2510.21800 (MARS-M) as implemented by their authors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mars_dist.maths.orthogonalize import cans, newton_schulz, polar_express, polar_factor

Tensors = list[Tensor]
# One weight for all tensors, or one 0-dim tensor each (a step that may be skipped is a step of weight 0).
Weight = float | Tensors


def lerp_(xs: Tensors, ys: Tensors, weight: Weight) -> None:
    """x <- x + weight * (y - x), in place, tensor by tensor."""
    if isinstance(weight, float):
        torch._foreach_lerp_(xs, ys, weight)
    else:
        for x, y, w in zip(xs, ys, weight, strict=True):
            x.lerp_(y, w.to(x.dtype))


@dataclass(frozen=True)
class Moments:
    """The moments of a list of tensors and what an element-wise rule needs to turn them into a direction.

    ``weight1`` = 1 - beta1 and ``weight2`` = 1 - beta2 (zero for a tensor whose step is skipped); ``correction1`` =
    1 - beta1^t and ``correction2`` = 1 / sqrt(1 - beta2^t), one 0-dim tensor for each tensor.
    """

    exp_avg: Tensors
    exp_avg_sq: Tensors
    max_exp_avg_sq: Tensors
    weight1: Weight
    weight2: Weight
    correction1: Tensors
    correction2: Tensors
    eps: float
    scratch: Tensors  # float tensors of the same sizes to write into


# d = numerator / denominator, tensor by tensor; no denominator is 1. Kept apart so that the last division can be
# fused with the update of the value.
Direction = tuple[Tensors, Tensors | None]


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        label: the name shown to people and returned by ``MARS.rule_counts()``.
        corrected: uses c~, hence the previous gradient and the norm of the whole tensor; plain AdamW does not.
        second_moment: keeps ``exp_avg_sq``.
        direction: element-wise rules: ``direction(c, moments)`` updates the moments in place and returns d for each
            tensor (it may write into ``c`` and the scratch).
        matrix_direction: matrix rules: ``matrix_direction(x, 1 - beta1, eps, orthogonalize, form)`` is called with the
            momentum ``x`` (..., rows, cols) of a whole matrix, or of a batch of equal shapes of any size, after it was
            updated; it changes nothing and returns d.
    """

    label: str
    corrected: bool = True
    second_moment: bool = False
    direction: Callable[[Tensors, Moments], Direction] | None = None
    matrix_direction: Callable[[Tensor, float, float, Orthogonalizer, MatrixForm], Tensor] | None = None

    @property
    def whole_matrix(self) -> bool:
        return self.matrix_direction is not None

    @property
    def is_adamw(self) -> bool:
        """A kernel may use any implementation of AdamW, with c~ as the gradient."""
        return self.direction is adamw_direction


@dataclass(frozen=True)
class Orthogonalizer:
    """How a matrix is orthogonalised: method, iterations, precision (None = by device)."""

    method: str
    steps: int
    dtype: torch.dtype | None

    def __call__(self, x: Tensor, eps: float, variant: str) -> Tensor:
        if self.method == "newton-schulz":
            return newton_schulz(x, self.steps, eps, self.dtype, variant)
        if self.method == "svd":
            return polar_factor(x)
        return {"polar-express": polar_express, "cans": cans}[self.method](x, self.steps, eps, self.dtype)


@dataclass(frozen=True)
class MatrixForm:
    """How the tensors of a parameter group hold their matrices; only the matrix rules look at it.

    Attributes:
        fan_in_fan_out: kept as (in, out), as by transformers' Conv1D, not as (out, in) like ``nn.Linear``.
        parts: the output dimension holds that many matrices of equal size one after the other (fused query, key and
            value: 3), each of which is orthogonalised and scaled by itself.
    """

    fan_in_fan_out: bool = False
    parts: int = 1

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> MatrixForm:
        return cls(group["fan_in_fan_out"], group["matrix_parts"])

    def fault(self, shape: Sequence[int]) -> str:
        """What is wrong with a tensor of GLOBAL shape ``shape`` under a matrix rule, and what to do; or ""."""
        rows, cols = shape[-2:] if len(shape) <= 3 else (shape[0], math.prod(shape[1:]))
        outputs = cols if self.fan_in_fan_out else rows
        if outputs % self.parts == 0:
            return ""
        return (
            f"matrix_parts={self.parts} does not divide the {outputs} outputs of a matrix of shape {tuple(shape)} "
            f"(fan_in_fan_out={self.fan_in_fan_out}: the outputs are its {'columns' if self.fan_in_fan_out else 'rows'}"
            "): put tensors that hold several matrices into a parameter group of their own, and set "
            "fan_in_fan_out=True where they are kept as (in, out)"
        )

    def split(self, x: Tensor) -> Tensor:
        """The parts of the matrices (..., rows, cols) as a batch (..., parts, rows, cols); one part: ``x`` itself.

        Raises:
            ValueError: the output dimension is not a multiple of ``parts``.
        """
        if self.parts == 1:
            return x
        if fault := self.fault(x.shape[-2:]):
            raise ValueError(fault)
        dim = -1 if self.fan_in_fan_out else -2
        split = x.unflatten(dim, (self.parts, x.shape[dim] // self.parts))
        return split.movedim(-2, -3) if self.fan_in_fan_out else split

    def join(self, x: Tensor) -> Tensor:
        """The reverse of ``split``."""
        if self.parts == 1:
            return x
        return x.movedim(-3, -2).flatten(-2) if self.fan_in_fan_out else x.flatten(-3, -2)

    def outputs_and_inputs(self, part: Tensor) -> tuple[int, int]:
        """Of one part, as ``split`` gives it."""
        rows, cols = part.shape[-2:]
        return (cols, rows) if self.fan_in_fan_out else (rows, cols)


PLAIN = MatrixForm()


def adamw_direction(c: Tensors, s: Moments) -> Direction:
    """d = m / ((sqrt(v) / sqrt(1 - beta2^t) + eps) * (1 - beta1^t)), with m, v the moments of c and c^2.

    ``amsgrad`` takes the running maximum of v.
    """
    lerp_(s.exp_avg, c, s.weight1)
    torch._foreach_mul_(c, c)
    lerp_(s.exp_avg_sq, c, s.weight2)
    v = s.exp_avg_sq
    if s.max_exp_avg_sq:
        torch._foreach_maximum_(s.max_exp_avg_sq, v)
        v = s.max_exp_avg_sq
    denominator = s.scratch
    torch._foreach_copy_(denominator, v)
    torch._foreach_sqrt_(denominator)
    torch._foreach_mul_(denominator, s.correction2)
    torch._foreach_add_(denominator, s.eps)
    torch._foreach_mul_(denominator, s.correction1)
    return s.exp_avg, denominator


def lion_direction(c: Tensors, s: Moments) -> Direction:
    """d = sign(m), with m the moment of c. sign(0) = sign(NaN) = 0, as in the authors' code."""
    lerp_(s.exp_avg, c, s.weight1)
    torch._foreach_copy_(c, s.exp_avg)
    torch._foreach_sign_(c)
    return c, None


def shampoo_direction(
    x: Tensor, weight1: float, eps: float, orthogonalize: Orthogonalizer, form: MatrixForm = PLAIN
) -> Tensor:
    """d = orth(m / (1 - beta1)) * sqrt(max(1, out / in)), for each part of each matrix of (..., rows, cols)."""
    parts = form.split(x)
    outputs, inputs = form.outputs_and_inputs(parts)
    scale = math.sqrt(max(1.0, outputs / inputs)) if inputs else 1.0
    return form.join(orthogonalize(parts / weight1, eps, "mars-shampoo") * scale)


def mars_m_direction(
    x: Tensor, weight1: float, eps: float, orthogonalize: Orthogonalizer, form: MatrixForm = PLAIN
) -> Tensor:
    """d = orth(m) * 0.2 * sqrt(max(out, in)), for each part of each matrix of (..., rows, cols); the iteration adds
    1e-7, not ``eps``."""
    parts = form.split(x)
    return form.join(orthogonalize(parts, 1e-7, "mars-m") * (0.2 * math.sqrt(max(parts.shape[-2:]))))


ADAMW = Rule("AdamW", corrected=False, second_moment=True, direction=adamw_direction)

RULES = {
    "mars-adamw": Rule("MARS-AdamW", second_moment=True, direction=adamw_direction),
    "mars-lion": Rule("MARS-Lion", direction=lion_direction),
    "mars-shampoo": Rule("MARS-Shampoo", matrix_direction=shampoo_direction),
    "mars-m": Rule("MARS-M", matrix_direction=mars_m_direction),
}


def rule_for(
    shape: Sequence[int], mars_type: str, matrix_ndim: Sequence[int], use_mars: bool | None, optimize_1d: bool
) -> Rule:
    """The rule of a tensor of GLOBAL shape ``shape`` (never the shape of the piece that one rank holds).

    ``use_mars`` True or False decides for a whole parameter group; None goes by shape: tensors with a number of
    dimensions in ``matrix_ndim`` take MARS, all others plain AdamW unless ``optimize_1d``. A tensor that is not a
    matrix cannot take a matrix rule: it takes MARS-AdamW instead.
    """
    is_matrix = len(shape) in matrix_ndim
    if use_mars is None:
        use_mars = is_matrix or optimize_1d
    if not use_mars:
        return ADAMW
    rule = RULES[mars_type]
    return RULES["mars-adamw"] if rule.whole_matrix and not is_matrix else rule


def as_matrix(x: Tensor) -> Tensor:
    """View ``x`` as the matrix that the matrix rules see: rank 3 is a batch of matrices (experts), a higher rank a
    convolution, flattened to (d0, -1)."""
    return x if x.ndim <= 3 else x.reshape(x.shape[0], -1)
