"""One step of MARS on a block of local pieces, with PyTorch's foreach operations.

A block is a list of pieces that share rule, hyper-parameters, dtype and device, cut small enough that its temporaries
stay in the cache on a CPU (and bounded in memory on an accelerator). Nothing here reads a value back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mars_dist.maths.rules import Moments, Rule, Tensors, Weight, lerp_


@dataclass(frozen=True)
class Hyper:
    """The numbers of one parameter group under one rule. ``lr`` may be a 0-dim tensor."""

    beta1: float
    beta2: float
    eps: float
    lr: float | Tensor
    weight_decay: float
    k: float = 0.0  # gamma * beta1 / (1 - beta1)
    clip: float | None = None
    maximize: bool = False
    first_step_is_paper: bool = False  # h = g at the first step of a tensor, instead of 0
    keep_gradient: bool = True  # h := g after the step (approximate mode)


@dataclass
class Block:
    """Local views of the same elements; ``owner[i]`` numbers the tensor that view i is a piece of."""

    value: Tensors = field(default_factory=list)
    grad: Tensors = field(default_factory=list)
    prev_grad: Tensors = field(default_factory=list)
    exp_avg: Tensors = field(default_factory=list)
    exp_avg_sq: Tensors = field(default_factory=list)
    max_exp_avg_sq: Tensors = field(default_factory=list)
    owner: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.value)


def widen(tensors: Tensors) -> Tensors:
    """Half-precision tensors as float32, the others as they are."""
    return [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]


def corrected_gradient(grad: Tensors, prev_grad: Tensors, hyper: Hyper) -> Tensors:
    """c = g + k (g - h) in new float32 (or float64) tensors; c = g for a rule without correction."""
    grad = widen(grad)
    if prev_grad:
        c = list(torch._foreach_sub(grad, widen(prev_grad)))
        torch._foreach_mul_(c, hyper.k)
        torch._foreach_add_(c, grad)
    else:
        c = list(torch._foreach_add(grad, 0.0))
    if hyper.maximize:
        torch._foreach_neg_(c)
    return c


def squared_norms(block: Block, hyper: Hyper, is_first: Tensors) -> Tensors:
    """||c||^2 of every view of the block, as float64 0-dim tensors; the elements are summed in float32 or better.

    ``is_first[i]``: 0-dim bool, whether tensor i has not taken a step yet (read only with ``first_step="paper"``).
    """
    prev_grad = _previous(block, hyper, is_first)
    c = corrected_gradient(block.grad, prev_grad, hyper)
    return [n.double().square() for n in torch._foreach_norm(c, 2)]


def update(
    block: Block,
    rule: Rule,
    hyper: Hyper,
    scale: Tensors,
    is_first: Tensors,
    taken: Tensors,
    correction1: Tensors,
    correction2: Tensors,
) -> None:
    """One step of ``rule`` on every view, in place: moments, value, and h := g in approximate mode.

    ``scale[i]`` multiplies c of tensor i (empty: no clip). ``taken[i]``: 0-dim bool, false leaves tensor i as it was
    (empty: all are taken). ``correction1``/``correction2``: 1 - beta1^t and sqrt(1 - beta2^t),
    empty for a rule that does not use them. Under a matrix rule
    only the momentum moves here; the value follows once the matrix is whole.
    """
    own = block.owner
    if taken:
        # A tensor that is not stepped sees its own h as the gradient: finite, and "h := g" then keeps h.
        held = block.prev_grad or [torch.zeros_like(g) for g in block.grad]
        block.grad = [torch.where(taken[i], g, h.to(g.dtype)) for g, h, i in zip(block.grad, held, own, strict=True)]

    prev_grad = _previous(block, hyper, is_first)
    c = corrected_gradient(block.grad, prev_grad, hyper)
    if scale:
        torch._foreach_mul_(c, [scale[i] for i in own])

    weight1: Weight = 1.0 - hyper.beta1
    weight2: Weight = 1.0 - hyper.beta2
    lr: Weight | Tensor = hyper.lr
    if taken:
        counts = [taken[i].double() for i in own]
        weight1 = [n * (1.0 - hyper.beta1) for n in counts]
        weight2 = [n * (1.0 - hyper.beta2) for n in counts]
        lr = [n * hyper.lr for n in counts]

    if rule.direction is None:
        lerp_(block.exp_avg, c, weight1)
    else:
        moments = Moments(
            exp_avg=block.exp_avg,
            exp_avg_sq=block.exp_avg_sq,
            max_exp_avg_sq=block.max_exp_avg_sq,
            weight1=weight1,
            weight2=weight2,
            correction1=[correction1[i] for i in own] if correction1 else [],
            correction2=[correction2[i] for i in own] if correction2 else [],
            eps=hyper.eps,
        )
        move(block.value, rule.direction(c, moments), lr, hyper.weight_decay)

    if block.prev_grad and hyper.keep_gradient:
        torch._foreach_copy_(block.prev_grad, block.grad)


def move(value: Tensors, direction: Tensors, lr: Weight | Tensor, weight_decay: float) -> None:
    """p <- p - lr * (weight_decay * p + d), in place; half-precision values are rounded once, at the end."""
    wide = widen(value)
    if isinstance(lr, (int, float)):
        if weight_decay:
            torch._foreach_mul_(wide, 1.0 - lr * weight_decay)
        torch._foreach_add_(wide, direction, alpha=-lr)
    else:
        rates = lr if isinstance(lr, list) else [lr] * len(wide)
        if weight_decay:
            torch._foreach_mul_(wide, [1.0 - rate * weight_decay for rate in rates])
        torch._foreach_mul_(direction, rates)
        torch._foreach_sub_(wide, direction)
    if wide[0] is not value[0]:
        torch._foreach_copy_(value, wide)


def _previous(block: Block, hyper: Hyper, is_first: Tensors) -> Tensors:
    if hyper.first_step_is_paper and block.prev_grad:
        return [
            torch.where(is_first[i], g.to(h.dtype), h)
            for g, h, i in zip(block.grad, block.prev_grad, block.owner, strict=True)
        ]
    return block.prev_grad
