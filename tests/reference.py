"""A plain float64 model of MARS: one tensor at a time, every line a line of the formula.

It is what every faster path is compared with, so it is written for reading and shares no code with the package. One
step for a tensor p with gradient g and previous gradient h, at this tensor's step t = 1, 2, ...::

    k  = gamma * beta1 / (1 - beta1)
    c  = g + k * (g - h)
    c~ = c * clip / ||c||  if ||c|| > clip else c   (clip = 1; the norm is that of the WHOLE tensor)
    m  = beta1 * m + (1 - beta1) * c~
    p  = p - lr * (weight_decay * p + d)            with the direction d of the variant

Sources: MARS (arXiv 2411.10438), MARS-M (arXiv 2510.21800) and the behaviour of the authors' code where the two differ.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

RULE_NAMES = {"mars-adamw": "MARS-AdamW", "mars-lion": "MARS-Lion", "mars-shampoo": "MARS-Shampoo", "mars-m": "MARS-M"}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def newton_schulz(matrix: Tensor, *, variant: str, eps: float, steps: int = 5, dtype: str = "float64") -> Tensor:
    """Push the singular values of one matrix towards 1: X = a X + (b A + c A A) X with A = X X^T.

    The two variants are the same in real arithmetic. They differ in where the norm is taken (MARS-Shampoo: before the
    cast to ``dtype``, MARS-M: after it) and in the order of the products; in bfloat16 either costs several per cent.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(DTYPES[dtype])
    x = x / ((matrix if variant == "mars-shampoo" else x).norm() + eps)
    tall = x.shape[0] > x.shape[1]
    if tall:  # the iteration commutes with the transpose; the Gram matrix is the small one this way
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        if variant == "mars-shampoo":
            gram_x = gram @ x
            x = a * x + b * gram_x + (c * gram) @ gram_x
        else:
            x = a * x + (b * gram + (c * gram) @ gram) @ x
    return (x.T if tall else x).to(torch.float64)


def polar_factor(matrix: Tensor) -> Tensor:
    """The exact U V^T of a matrix U S V^T, without the directions of singular value 0: a zero matrix gives zero."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    kept = s > s.max() * max(matrix.shape) * torch.finfo(torch.float64).eps
    return (u * kept) @ vt


def as_matrices(tensor: Tensor) -> Tensor:
    """View a tensor as a batch (n, rows, cols): rank 3 is a batch already, rank >= 4 is one matrix (d0, the rest)."""
    if tensor.ndim == 3:
        return tensor
    return tensor.reshape(1, tensor.shape[0], -1)


def parts_of(matrix: Tensor, group: Mapping[str, Any]) -> list[Tensor]:
    """The matrices that one tensor holds side by side along its outputs (rows, or columns under fan_in_fan_out)."""
    dim = 1 if group["fan_in_fan_out"] else 0
    assert matrix.shape[dim] % group["matrix_parts"] == 0
    return list(matrix.chunk(group["matrix_parts"], dim=dim))


class ReferenceMARS:
    """MARS on named tensors in float64.

    Args:
        params: Name to tensor. They are copied, never written.
        groups: Parameter groups as ``{"names": [...], **overrides}``; None is one group with all names. A group may
            override ``lr``, ``betas``, ``gamma``, ``weight_decay``, ``eps``, ``lr_1d``, ``betas_1d``,
            ``weight_decay_1d``, ``fan_in_fan_out``, ``matrix_parts``,
            and set ``use_mars`` (True: the MARS rule for every tensor; False: AdamW for all; None: by shape).
        matrices: If given, the names in it take the MARS rule and all others AdamW, whatever groups and shapes say.
        amsgrad: Keeps the running maximum of v, under AdamW as under MARS-AdamW.
        weight_decay_1d: None means "not given": then a group's own ``weight_decay`` comes before the default 0.1.
        matrix_ndim: The rank, or ranks, that count as matrices.

    All other keywords are those of ``mars_dist.MARS``.

    Attributes:
        params: The current values by name.
        state: By name: ``step``, ``exp_avg``, and where the rule has them ``exp_avg_sq``, ``max_exp_avg_sq``,
            ``prev_grad``.
        rules: By name: the rule it is under, "MARS-AdamW", "MARS-Lion", "MARS-Shampoo", "MARS-M" or "AdamW".
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        groups: list[dict[str, Any]] | None = None,
        *,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        gamma: float = 0.025,
        is_approx: bool = True,
        mars_type: str = "mars-adamw",
        optimize_1d: bool = False,
        lr_1d: float = 3e-3,
        betas_1d: tuple[float, float] = (0.9, 0.95),
        weight_decay_1d: float | None = None,
        clip: float | None = 1.0,
        first_step: str = "reference",
        ns_steps: int = 5,
        ns_dtype: str = "float64",
        orthogonalizer: str = "newton-schulz",
        matrix_ndim: int | Sequence[int] = 2,
        maximize: bool = False,
        matrices: set[str] | None = None,
        fan_in_fan_out: bool = False,
        matrix_parts: int = 1,
    ) -> None:
        self.params = {name: p.detach().to(torch.float64, copy=True) for name, p in params.items()}
        self.state: dict[str, dict[str, Any]] = {name: {} for name in params}
        self.rules: dict[str, str] = {}
        self.mars_type, self.is_approx, self.first_step = mars_type, is_approx, first_step
        self.amsgrad, self.clip, self.maximize = amsgrad, clip, maximize
        self.ns_steps, self.ns_dtype, self.orthogonalizer = ns_steps, ns_dtype, orthogonalizer
        self.groups = []
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "gamma": gamma}
        defaults |= {"betas_1d": betas_1d, "fan_in_fan_out": fan_in_fan_out, "matrix_parts": matrix_parts}
        for overrides in groups or [{"names": list(params)}]:
            group = {**defaults, "use_mars": None, **overrides}
            # A group's own lr moves both learning rates; only its own lr_1d changes their ratio.
            vector_lr, matrix_lr = (overrides["lr_1d"], group["lr"]) if "lr_1d" in overrides else (lr_1d, lr)
            group["ratio_1d"] = vector_lr / matrix_lr if matrix_lr else 1.0  # built with lr 0 there is no ratio to keep
            if "weight_decay_1d" not in overrides:
                if weight_decay_1d is not None:
                    group["weight_decay_1d"] = weight_decay_1d
                else:
                    group["weight_decay_1d"] = overrides.get("weight_decay", 0.1)
            self.groups.append(group)
            for name in group["names"]:
                use_mars = group["use_mars"] if matrices is None else name in matrices
                is_matrix = self.params[name].ndim in ((matrix_ndim,) if isinstance(matrix_ndim, int) else matrix_ndim)
                if use_mars is None:
                    use_mars = is_matrix or optimize_1d
                if not use_mars:
                    self.rules[name] = "AdamW"
                elif mars_type in ("mars-shampoo", "mars-m") and not is_matrix:
                    self.rules[name] = "MARS-AdamW"
                else:
                    self.rules[name] = RULE_NAMES[mars_type]

    def step(
        self,
        grads: Mapping[str, Tensor | None],
        *,
        lr: float | Sequence[float] | None = None,
        previous: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take one step.

        A call with lr 0 and nothing but zero gradients is the dry run by which checkpoint libraries create states: it
        is no step for a tensor that has taken none yet.

        Args:
            grads: Gradient by name. A name that is missing or None is left alone, with its counter and states.
            lr: The groups' lr at this step (one for all, or one per group); None keeps what each group was built with.
            previous: Exact mode: the gradient at the previous point on this step's batch, by name.
        """
        if previous and self.is_approx:
            raise ValueError("previous gradients are handed over in exact mode (is_approx=False) only")
        if isinstance(lr, Sequence):
            lrs = list(lr)
        else:
            lrs = [group["lr"] if lr is None else lr for group in self.groups]
        dry_run = self._is_dry_run(grads, lrs)
        for group, group_lr in zip(self.groups, lrs, strict=True):
            for name in group["names"]:
                g = grads.get(name)
                if g is None or (dry_run and not self.state[name]):
                    continue
                g = g.detach().to(torch.float64, copy=True)
                h = previous.get(name) if previous else None
                h = None if h is None else h.detach().to(torch.float64, copy=True)
                state = self.state[name]
                state["step"] = state.get("step", 0) + 1
                p = self.params[name]
                if self.rules[name] == "AdamW":
                    d = self._adam_direction(state, self._sign(g), group["betas_1d"], group["eps"])
                    update = group["ratio_1d"] * (group["weight_decay_1d"] * p + d)
                else:
                    update = group["weight_decay"] * p + self._mars_direction(name, g, h, group)
                self.params[name] = p - group_lr * update

    def _is_dry_run(self, grads: Mapping[str, Tensor | None], lrs: Sequence[float]) -> bool:
        return not any(lrs) and all(g is None or g.count_nonzero() == 0 for g in grads.values())

    def _sign(self, gradient: Tensor) -> Tensor:
        return -gradient if self.maximize else gradient

    def _mars_direction(self, name: str, g: Tensor, given: Tensor | None, group: dict[str, Any]) -> Tensor:
        rule, state = self.rules[name], self.state[name]
        beta1, beta2 = group["betas"]
        if given is not None:
            h = given
        elif state["step"] == 1:
            h = g if self.first_step == "paper" else torch.zeros_like(g)
        else:
            h = state["prev_grad"]
        state["prev_grad"] = g if self.is_approx else h

        k = group["gamma"] * beta1 / (1 - beta1)
        c = self._sign(g + k * (g - h))
        norm = c.norm()
        if self.clip is not None and norm > self.clip:
            c = c * (self.clip / norm)
        if rule == "MARS-AdamW":
            return self._adam_direction(state, c, (beta1, beta2), group["eps"])
        m = state["exp_avg"] = beta1 * state.get("exp_avg", torch.zeros_like(c)) + (1 - beta1) * c
        if rule == "MARS-Lion":
            return m.sign()
        if m.numel() == 0:
            return m
        batch = [self._matrix_direction(rule, x, group) for x in as_matrices(m)]
        return torch.stack(batch).reshape(m.shape)

    def _matrix_direction(self, rule: str, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        out = []
        for x in parts_of(matrix, group):
            outputs, inputs = reversed(x.shape) if group["fan_in_fan_out"] else x.shape
            if rule == "MARS-Shampoo":
                scale = max(1.0, outputs / inputs) ** 0.5
                out.append(scale * self._orthogonalize(x / (1 - group["betas"][0]), group["eps"]))
            else:
                scale = 0.2 * math.sqrt(max(outputs, inputs))
                out.append(scale * self._orthogonalize(x, 1e-7))
        return torch.cat(out, dim=1 if group["fan_in_fan_out"] else 0)

    def _adam_direction(self, state: dict[str, Any], u: Tensor, betas: tuple[float, float], eps: float) -> Tensor:
        beta1, beta2 = betas
        t = state["step"]
        m = state["exp_avg"] = beta1 * state.get("exp_avg", torch.zeros_like(u)) + (1 - beta1) * u
        v = state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", torch.zeros_like(u)) + (1 - beta2) * u * u
        if self.amsgrad:
            v = state["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", torch.zeros_like(v)), v)
        return m / ((v.sqrt() / math.sqrt(1 - beta2**t) + eps) * (1 - beta1**t))

    def _orthogonalize(self, matrix: Tensor, eps: float) -> Tensor:
        if self.orthogonalizer == "svd":
            return polar_factor(matrix)
        assert self.orthogonalizer == "newton-schulz", (
            "the reference has no other iteration (test_orthogonalize.py does)"
        )
        return newton_schulz(matrix, variant=self.mars_type, eps=eps, steps=self.ns_steps, dtype=self.ns_dtype)
