"""One step of MARS on a block of local pieces, with PyTorch's foreach operations.

A block is a list of pieces that share rule, hyper-parameters, dtype and device, cut small enough that its temporaries
stay in the cache on a CPU (and bounded in memory on an accelerator). Nothing here reads a value back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mars_dist.maths.absent import is_absent, kept
from mars_dist.maths.rules import Moments, Rule, Tensors, Weight, lerp_

HALF = (torch.float16, torch.bfloat16)


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
    first_step_is_paper: bool = False  # h = g where there is none, instead of 0
    keep_gradient: bool = True  # h := g after the step (approximate mode)
    one_state: bool = False  # no h: exp_avg lacks gamma * g of the momentum (one_state.py)
    gamma: float = 0.0


@dataclass
class Block:
    """Local views of the same elements; ``owner[i]`` numbers the tensor that view i is a piece of."""

    value: Tensors = field(default_factory=list)
    grad: Tensors = field(default_factory=list)
    prev_grad: Tensors = field(default_factory=list)
    exp_avg: Tensors = field(default_factory=list)
    exp_avg_sq: Tensors = field(default_factory=list)
    max_exp_avg_sq: Tensors = field(default_factory=list)
    step: Tensors = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    flat: bool = True  # all views are one-dimensional and contiguous

    def of(self, per_tensor: Tensors) -> Tensors:
        """What belongs to the tensor of each view; empty stays empty."""
        return [per_tensor[i] for i in self.owner] if per_tensor else []


class Scratch:
    """Two buffers of the size of a block, used again by every block of a step: fresh memory is slow on a CPU."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def like(self, tensors: Tensors, number: int) -> Tensors:
        """Uninitialised float32 (or float64) tensors of the shapes of ``tensors``; valid until the next call."""
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        key = (number, dtype, tensors[0].device)
        sizes = [t.numel() for t in tensors]
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < sum(sizes):
            buffer = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
            self._buffers[key] = buffer
        pieces = buffer[: sum(sizes)].split(sizes) if len(sizes) > 1 else [buffer[: sizes[0]]]
        return [piece if t.ndim == 1 else piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def widen(tensors: Tensors) -> Tensors:
    """Half-precision tensors as float32, the others as they are."""
    return [t.float() for t in tensors] if tensors and tensors[0].dtype in HALF else tensors


def corrected_gradient(block: Block, hyper: Hyper, scratch: Scratch) -> Tensors:
    """c = g + k (g - h) in scratch of the moments' precision; c = g for a rule without correction."""
    grad, prev_grad = block.grad, _previous(block, hyper)
    c = scratch.like(block.exp_avg, 0)
    if prev_grad:
        torch._foreach_copy_(c, prev_grad)
        # h + (1 + k)(g - h), which lerp evaluates as g + k (g - h)
        wide = grad if grad[0].dtype == c[0].dtype else [g.to(c[0].dtype) for g in grad]
        torch._foreach_lerp_(c, wide, 1.0 + hyper.k)
    else:
        torch._foreach_copy_(c, grad)
    if hyper.maximize:
        torch._foreach_neg_(c)
    return c


def squared_norms(block: Block, hyper: Hyper, scratch: Scratch) -> Tensors:
    """||c||^2 of every view of the block, as float64 0-dim tensors; the elements are summed in float32 or better
    (elements above 1e19 overflow there: c is then scaled to 0, and the step counts as not finite).
    """
    c = corrected_gradient(block, hyper, scratch)
    if c[0].device.type == "cpu":  # sum() adds pairwise there, the norm one after the other (errors of 4e-5)
        torch._foreach_mul_(c, c)
        return [x.sum().double() for x in c]
    return [n.double().square() for n in torch._foreach_norm(c, 2)]


def update(
    block: Block,
    rule: Rule,
    hyper: Hyper,
    scratch: Scratch,
    scale: Tensors,
    taken: Tensors,
) -> None:
    """One step of ``rule`` on every view, in place: moments, value, and h := g in approximate mode.

    Numbers for each tensor, as 0-dim tensors: ``scale`` multiplies c (empty: no clip); ``taken`` is false where the
    tensor is left as it was (empty: all are taken). Under a matrix rule only the momentum moves here; the value follows
    once the matrix is whole.
    """
    taken = block.of(taken)
    if hyper.first_step_is_paper and block.prev_grad:
        block.grad = kept(block.grad)
    if taken:
        # A tensor that is not stepped sees its own h as the gradient: finite, and "h := g" then keeps h.
        held = block.prev_grad or [torch.zeros_like(g) for g in block.grad]
        block.grad = [torch.where(ok, g, h.to(g.dtype)) for ok, g, h in zip(taken, block.grad, held, strict=True)]

    c = corrected_gradient(block, hyper, scratch)
    if scale:
        torch._foreach_mul_(c, block.of(scale))
    if rule.is_adamw and block.flat and not taken and isinstance(hyper.lr, float):
        _fused_adamw(block, c, hyper)
    else:
        _foreach_update(block, c, rule, hyper, scratch, taken)
    if block.prev_grad and hyper.keep_gradient:
        new = block.grad
        if taken and any(g.dtype != h.dtype for g, h in zip(new, block.prev_grad, strict=True)):
            new = [torch.where(ok, g.to(h.dtype), h) for ok, g, h in zip(taken, new, block.prev_grad, strict=True)]
        torch._foreach_copy_(block.prev_grad, new)


def _foreach_update(block: Block, c: Tensors, rule: Rule, hyper: Hyper, scratch: Scratch, taken: Tensors) -> None:
    """Moments and value for any rule, any strides, and steps that may not be taken."""
    weight1: Weight = 1.0 - hyper.beta1
    weight2: Weight = 1.0 - hyper.beta2
    lr: Weight | Tensor = hyper.lr
    if taken:
        counts = [ok.double() for ok in taken]
        weight1 = [n * (1.0 - hyper.beta1) for n in counts]
        weight2 = [n * (1.0 - hyper.beta2) for n in counts]
        lr = [n * hyper.lr for n in counts]

    ahead: Tensors = []
    if hyper.one_state:
        if rule.direction is not None:
            ahead = scratch.like(block.value, 1)
            torch._foreach_copy_(ahead, c)
            torch._foreach_mul_(ahead, hyper.gamma)
        torch._foreach_mul_(c, 1.0 - hyper.gamma)
    if rule.direction is None:
        lerp_(block.exp_avg, c, weight1)
    else:
        correction1, correction2 = _bias_corrections(block, hyper) if rule.second_moment else ([], [])
        moments = Moments(
            exp_avg=block.exp_avg,
            exp_avg_sq=block.exp_avg_sq,
            max_exp_avg_sq=block.max_exp_avg_sq,
            weight1=weight1,
            weight2=weight2,
            correction1=correction1,
            correction2=correction2,
            eps=hyper.eps,
            scratch=scratch.like(block.value, 1),
            ahead=ahead,
        )
        move(block.value, *rule.direction(c, moments), lr, hyper.weight_decay)


def _bias_corrections(block: Block, hyper: Hyper) -> tuple[Tensors, Tensors]:
    """1 - beta1^t and 1 / sqrt(1 - beta2^t) for every view, in float64 on the device."""
    # A tensor that has taken no step has t = 0 and moves by zero: any t avoids 0 / 0.
    t = torch.stack(block.step).double().clamp(min=1.0)
    correction1 = 1.0 - torch.pow(hyper.beta1, t)
    correction2 = (1.0 - torch.pow(hyper.beta2, t)).rsqrt()
    return list(correction1.unbind()), list(correction2.unbind())


def _fused_adamw(block: Block, c: Tensors, hyper: Hyper) -> None:
    """The same with PyTorch's own fused AdamW, for which c~ is the gradient: one pass over the memory."""
    value = widen(block.value)
    torch._fused_adamw_(
        value,
        c,
        block.exp_avg,
        block.exp_avg_sq,
        block.max_exp_avg_sq,
        block.step,
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=bool(block.max_exp_avg_sq),
        maximize=False,  # c has its sign already
    )
    if value is not block.value:
        torch._foreach_copy_(block.value, value)


def move(
    value: Tensors, numerator: Tensors, denominator: Tensors | None, lr: Weight | Tensor, weight_decay: float
) -> None:
    """p <- p - lr * (weight_decay * p + numerator / denominator), in place.

    Half-precision values are rounded once, at the end.
    """
    wide = widen(value)
    if isinstance(lr, (int, float)):
        if weight_decay:
            torch._foreach_mul_(wide, 1.0 - lr * weight_decay)
        if denominator is None:
            torch._foreach_add_(wide, numerator, alpha=-lr)
        else:
            torch._foreach_addcdiv_(wide, numerator, denominator, value=-lr)
    else:
        rates = lr if isinstance(lr, list) else [lr] * len(wide)
        if weight_decay:
            torch._foreach_mul_(wide, [1.0 - rate * weight_decay for rate in rates])
        direction = numerator if denominator is None else torch._foreach_div(numerator, denominator)
        # where(): a tensor without a first step may have 0 / 0 here
        moves = [torch.where(rate != 0.0, d * rate, 0.0) for d, rate in zip(direction, rates, strict=True)]
        torch._foreach_sub_(wide, moves)
    if wide is not value:
        torch._foreach_copy_(value, wide)


def _previous(block: Block, hyper: Hyper) -> Tensors:
    if hyper.first_step_is_paper and block.prev_grad:
        return [torch.where(is_absent(h), g, h) for g, h in zip(block.grad, block.prev_grad, strict=True)]
    return block.prev_grad
