"""Exact mode in a training loop by hand, and what it asks of any engine."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from mars_dist.integrations.exact_model import drop_unsharded_gradients
from mars_dist.optimizer import MARS

Context = contextlib.AbstractContextManager[Any]


class Engine(Protocol):
    """What differs between engines; one per way of training."""

    mars: MARS
    model: Any  # or None, where it is not known

    def accumulation(self) -> int | None:
        """How many micro-batches the engine itself accumulates, dividing by their number; None: it does not."""

    def micro_batch(self, is_last: bool) -> Context:
        """Around the passes of one micro-batch: gradients are exchanged over the ranks after the last one."""

    def aside(self) -> Context:
        """Around a look-ahead: what ``gradient`` calls beside the passes has no effect."""

    def keep(self) -> None:
        """What an ordinary step does, with MARS looking ahead."""

    def zero_grad(self) -> None:
        """Forget all gradients, also those of a batch that was left before its last micro-batch."""

    def close(self) -> None:
        """The loop is over."""


class Loop:
    """One process, DDP, FSDP1, FSDP2, tensor parallelism: a loop of the user's own."""

    def __init__(self, optimizer: Any, model: Any, before_step: Callable[[], Any] | None, scaler: Any) -> None:
        self.mars = mars_of(optimizer)
        self.optimizer, self.model, self.before_step = optimizer, model, before_step
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._in_batch = False  # a batch has begun, and its gradients were not exchanged yet

    def accumulation(self) -> int | None:
        return None

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        if hasattr(self.model, "set_requires_gradient_sync"):  # FSDP2
            self.model.set_requires_gradient_sync(is_last)
        without = not is_last and hasattr(self.model, "no_sync")
        self._in_batch = True
        with self.model.no_sync() if without else contextlib.nullcontext():
            yield
        self._in_batch = not is_last

    def aside(self) -> Context:
        return contextlib.nullcontext()

    def keep(self) -> None:
        if self.before_step is not None:
            self.before_step()
        with unmoved(self.scaler), self.mars.looking_ahead():
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self._drop()

    def close(self) -> None:
        if hasattr(self.model, "set_requires_gradient_sync"):  # FSDP2: a batch may have been left early
            self.model.set_requires_gradient_sync(True)
        self._drop()

    def _drop(self) -> None:
        """What a batch that was left has in FSDP2, which would add it to the next one."""
        if self._in_batch and self.model is not None:
            drop_unsharded_gradients(self.model)
        self._in_batch = False


@contextlib.contextmanager
def unmoved(scaler: Any) -> Iterator[None]:
    """The scale and its counter stay as they were: a schedule of the loss scale counts steps."""
    saved = None if scaler is None else scaler.state_dict()
    yield
    if scaler is not None and saved:
        scaler.load_state_dict(saved)


def mars_of(optimizer: Any) -> MARS:
    """MARS itself, out of the wrappers that frameworks put around an optimizer."""
    inner = optimizer
    while not isinstance(inner, MARS):
        if not hasattr(inner, "optimizer"):
            raise TypeError(f"ExactMode needs MARS, or what an engine made of it, got {type(optimizer).__name__}.")
        inner = inner.optimizer
    return inner


@contextlib.contextmanager
def masks_of(seed: int, number: int) -> Iterator[Callable[[], bool]]:
    """Random numbers of their own for micro-batch ``number``, the same each time; the streams outside go on after it.

    The streams of Python, of torch on the CPU, and of the accelerator in use. Gives a function that says whether any
    random number was drawn since.
    """
    devices = [module for module in map(_random_device, ("cuda", "xpu", "npu", "hpu", "mps")) if module is not None]
    python, cpu, others = random.getstate(), torch.get_rng_state(), [module.get_rng_state() for module in devices]
    own = int.from_bytes(hashlib.sha256(f"{seed}, {number}".encode()).digest()[:8], "big") >> 1
    torch.manual_seed(own)
    random.seed(own)
    begin = random.getstate(), [torch.get_rng_state(), *(module.get_rng_state() for module in devices)]

    def has_drawn() -> bool:
        now = [torch.get_rng_state(), *(module.get_rng_state() for module in devices)]
        return random.getstate() != begin[0] or any(not torch.equal(a, b) for a, b in zip(now, begin[1], strict=True))

    try:
        yield has_drawn
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        for module, state in zip(devices, others, strict=True):
            module.set_rng_state(state)


def _random_device(name: str) -> Any:
    module = getattr(torch, name, None)
    return module if module is not None and hasattr(module, "get_rng_state") and module.is_available() else None
