"""Exact mode's bookkeeping: which tensors have h of the step that comes, and of the one after it.

h of a step is the gradient of ITS batch at the point before. It is taken one step early, as ``next_prev_grad``, and
copied into ``prev_grad`` when the step that moves the point is over (exchanging the two would leave DeepSpeed's
references to a state, by which it is read and saved, at the wrong one). A state has ``next_prev_grad`` only in between,
so that what is saved between two steps has the keys of the approximate mode.

A tensor without h (the extra pass overflowed, or did not reach it) is stepped as in a first step, h = 0 or h = g with
``first_step="paper"``: its ``prev_grad`` is marked as absent (maths/absent.py), which is saved with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from mars_dist.maths.absent import ABSENT
from mars_dist.sharding.dtensor import local

logger = logging.getLogger("mars_dist")

PREVIOUS, NEXT = "prev_grad", "next_prev_grad"

# Why a tensor has no h: a look-ahead did not reach it; nobody looked ahead; it is meant so (dry run, new beginning).
TRIED, UNTRIED, EXCUSED = "tried", "untried", "excused"

NOT_LOOKED = (
    "MARS in exact mode (is_approx=False): no gradient of this batch at the point before was taken since the last step "
    "(or step() was called twice with the same previous gradient). Each step needs one: iterate over "
    "mars_dist.ExactMode(optimizer, micro_batches, gradient), which takes it in any loop."
)


STEPPED_TWICE = (
    "MARS in exact mode: step() was called twice for one batch of ExactMode. The second call would take the gradient "
    "of the batch that comes for that of this one: call step() once for each batch."
)


class Previous:
    """Of one optimizer; tensors are known by their identity, and nothing here is saved."""

    def __init__(self) -> None:
        self.looking = False  # inside looking_ahead()
        self._looks = 0
        self._advanced: dict[int, int] = {}  # how often had been looked ahead when the tensor was stepped last
        self._lacks: dict[int, str] = {}
        self._spare: dict[int, Tensor] = {}
        self._told = 0
        self._batch = 0  # of those that ExactMode has handed out; 0: nobody counts them
        self._stepped: dict[int, int] = {}  # the batch in which a tensor was stepped last

    def next_batch(self) -> None:
        """ExactMode hands out a batch: one step belongs to it."""
        self._batch += 1

    @contextlib.contextmanager
    def look(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside it the hooks of ``optimizer.step`` are quiet: they are told of ordinary steps only."""
        for p, state in optimizer.state.items():
            # The last step was left out (an overflow), and the point has not moved. It may have been saved like that.
            if self._advanced.get(id(p), 0) != self._looks or NEXT in state:
                self.advance(p, state)
        self._looks += 1
        names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        hooks = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
        for name in hooks:
            setattr(optimizer, name, OrderedDict())
        self.looking = True
        try:
            yield
        finally:
            self.looking = False
            for name, value in hooks.items():
                setattr(optimizer, name, value)

    def keep(self, p: Tensor, state: dict[str, Any], grad: Tensor, finite: Tensor | None = None) -> None:
        """Copy this rank's ``grad`` as h of the step after the one that comes; zeros unless ``finite``."""
        if PREVIOUS not in state:
            return  # its rule has no correction
        if NEXT not in state:
            spare = self._spare.pop(id(p), None)
            fits = spare is not None and spare.dtype == grad.dtype and spare.shape == p.shape
            state[NEXT] = spare if fits else torch.empty_like(p, dtype=grad.dtype, requires_grad=False)
        # 0.0 for -0.0, which would say that there is none
        local(state[NEXT]).copy_(grad if finite is None else torch.where(finite.to(grad.device), grad, 0.0)).add_(0.0)

    def before_step(self, stepped: list[tuple[Tensor, Mapping[str, Tensor]]], first_step: str) -> None:
        """Check that the tensors of a step have their h, and say where some do not.

        Args:
            stepped: each tensor that is stepped, and its states.

        Raises:
            RuntimeError: when nobody has looked ahead, or for a second step in one batch of ExactMode.
        """
        if self._batch and any(self._stepped.get(id(p)) == self._batch for p, _ in stepped):
            raise RuntimeError(STEPPED_TWICE)
        self._stepped |= dict.fromkeys((id(p) for p, _ in stepped), self._batch)
        lacking = [p for p, s in stepped if id(p) in self._lacks and PREVIOUS in s]
        if any(self._lacks[id(p)] == UNTRIED and self._advanced[id(p)] == self._looks for p in lacking):
            raise RuntimeError(NOT_LOOKED)
        unexpected = sum(self._lacks[id(p)] != EXCUSED for p in lacking)
        if unexpected and self._told != self._looks:
            self._told = self._looks
            if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0:
                logger.warning(
                    "exact mode: %d of %d tensors have no gradient of this batch at the point before (the extra pass "
                    "overflowed or did not reach them): they take this step as a first one (first_step=%r).",
                    unexpected,
                    len(stepped),
                    first_step,
                )

    def advance_all(self, groups: list[dict[str, Any]], states: Mapping[Tensor, Any], may_be_dry_run: bool) -> None:
        """The step of the tensors in ``groups`` is over."""
        for group in groups:
            for p in group["params"]:
                if p in states:
                    self.advance(p, states[p], may_be_dry_run)

    def advance(self, p: Tensor, state: dict[str, Any], may_be_dry_run: bool = False) -> None:
        """The step of ``p`` is over: what was kept for the next becomes h of the step that comes."""
        tried = self._looks > self._advanced.get(id(p), 0)
        self._advanced[id(p)] = self._looks
        if NEXT in state:
            self.promote(p, state)
        elif PREVIOUS in state:
            self._lacks[id(p)] = TRIED if tried else EXCUSED if may_be_dry_run else UNTRIED
            local(state[PREVIOUS]).fill_(ABSENT)

    def promote(self, p: Tensor, state: dict[str, Any]) -> None:
        """``next_prev_grad`` becomes ``prev_grad``, where there is one."""
        if NEXT in state:
            self._spare[id(p)] = state.pop(NEXT)
            local(state[PREVIOUS]).copy_(local(self._spare[id(p)]))
            self._lacks.pop(id(p), None)

    def forget(self, optimizer: Optimizer) -> None:
        """No tensor has an h now, and that is meant so."""
        for p, state in optimizer.state.items():
            if state.pop(NEXT, None) is not None or PREVIOUS in state:
                self._lacks[id(p)] = EXCUSED
                self._advanced[id(p)] = self._looks
                local(state[PREVIOUS]).fill_(ABSENT)
