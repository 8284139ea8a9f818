"""Exact mode in any training loop: the gradient of the next batch at the present point, before each step.

.. code-block:: python

    def gradient(micro_batch):                      # forward and backward of ONE micro-batch, for both passes
        inputs, targets = micro_batch
        criterion(model(inputs), targets).backward()

    exact = ExactMode(optimizer, loader, gradient, model=model)
    for batch in exact:                             # here the gradient of the NEXT batch is taken and kept
        for micro_batch in batch:
            gradient(micro_batch)
        optimizer.step()
        optimizer.zero_grad()

Under DeepSpeed ``optimizer`` is the engine, and ``gradient`` calls ``engine.backward`` and ``engine.step`` as in any
loop; under Accelerate ``accelerator=`` is given and ``gradient`` calls ``accelerator.backward``.

The extra pass is an ordinary one in all but the update: the engine reduces, unscales, clips and accumulates as it
always does, and MARS keeps what reaches it. Counters, schedules and loss scales see one step.

Cost: two gradients per step (``gradient_evaluations`` counts them), the collectives of a second backward pass and,
under ZeRO, of a second gathering of unchanged weights, and one more buffer of the size of ``prev_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

import torch

from mars_dist.integrations.exact_loop import Engine, Loop, masks_of

MicroBatch = TypeVar("MicroBatch")


class ExactMode(Generic[MicroBatch]):
    """Iterates over batches; before one is handed out, the gradient of the one after it is taken and kept.

    Each batch is itself iterated over, once, for its micro-batches. Dropout draws the same masks for a micro-batch in
    both of its passes, from a seed of its own; the random streams outside are left as they were.

    Args:
        optimizer: MARS with ``is_approx=False``, what Accelerate made of it, or a DeepSpeed engine that trains with it.
        micro_batches: the data, one micro-batch after the other. Read one batch ahead.
        gradient: forward and backward of one micro-batch.
        accumulation: micro-batches in a batch. At the end of the data a batch may have fewer.
        model: what DDP, FSDP1, FSDP2 or Accelerate made of the model: gradients are exchanged once per batch. Not
            needed for DeepSpeed nor without accumulation.
        before_step: called before a look-ahead is kept, as the loop does before ``optimizer.step()``:
            ``scaler.unscale_(optimizer)`` and ``clip_grad_norm_``. Not for DeepSpeed, which does both by itself.
        scaler: the GradScaler of a loop in float16 that has one of its own.
        accelerator: of a loop under Accelerate. Leave out ``accelerator.accumulate()``: this object sets
            ``accelerator.sync_gradients``.
        seed: of the masks; by default the one that ``torch.manual_seed`` was given. As without this object ranks with
            the same seed drop the same (which tensor parallelism needs): give data-parallel ranks seeds of their own.

    Raises:
        TypeError, ValueError: when the optimizer is not MARS in exact mode.
        RuntimeError: for a feature of DeepSpeed by which the extra pass cannot be kept apart.
    """

    def __init__(
        self,
        optimizer: Any,
        micro_batches: Iterable[MicroBatch],
        gradient: Callable[[MicroBatch], Any],
        *,
        accumulation: int = 1,
        model: Any = None,
        before_step: Callable[[], Any] | None = None,
        scaler: Any = None,
        accelerator: Any = None,
        seed: int | None = None,
    ) -> None:
        if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
            raise ValueError(f"accumulation must be a whole number of at least 1, got {accumulation!r}")
        self._engine = _engine_for(optimizer, model, before_step, scaler, accelerator)
        if self._engine.mars.settings.is_approx:
            raise ValueError("ExactMode needs MARS in exact mode: construct it with is_approx=False.")
        self._micro_batches, self._gradient, self._accumulation = micro_batches, gradient, accumulation
        self._seed = torch.initial_seed() if seed is None else int(seed)
        self._goes_on = False  # h of the first batch is in the optimizer's state
        self.handed_out = 0  # micro-batches, since the training began
        self.gradient_evaluations = 0  # in both passes, by this object

    def __iter__(self) -> Iterator[Iterator[MicroBatch]]:
        if not self._goes_on:
            self._engine.mars.forget_previous()
        source = iter(self._micro_batches)
        present = list(islice(source, self._accumulation))
        try:
            while present:
                ahead = list(islice(source, self._accumulation))
                if ahead:
                    self._look_ahead(ahead, self.handed_out + len(present))
                first = self.handed_out
                self.handed_out += len(present)
                # A new loop over further data goes on only where load_state_dict() says so.
                self._goes_on = False
                yield self._passes(present, first)
                present = ahead
        finally:
            self._engine.close()

    def state_dict(self) -> dict[str, int]:
        """The position, saved after a step beside the states of the model and the optimizer.

        The batch that comes was read and looked at already, but not handed out: h for it is in the optimizer's state.
        To go on, give the data from micro-batch ``handed_out`` on (whatever a loader of its own says, which is one
        batch ahead), and load this. Each rank saves its own.
        """
        return {"handed_out": self.handed_out, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where ``state_dict()`` was saved, with the optimizer's state of that moment.

        Without it the first batch has no h, and its step is as a first one.
        """
        self.handed_out, self._seed, self._goes_on = state["handed_out"], state["seed"], True

    def _look_ahead(self, micro_batches: list[MicroBatch], first: int) -> None:
        self._engine.zero_grad()
        with self._engine.aside():
            for micro_batch in self._passes(micro_batches, first):
                self._gradient(micro_batch)
            self._engine.keep()
        self._engine.zero_grad()

    def _passes(self, micro_batches: list[MicroBatch], first: int) -> Iterator[MicroBatch]:
        for i, micro_batch in enumerate(micro_batches):
            with masks_of(self._seed, first + i), self._engine.micro_batch(i == len(micro_batches) - 1):
                self.gradient_evaluations += 1
                yield micro_batch


def _engine_for(
    optimizer: Any, model: Any, before_step: Callable[[], Any] | None, scaler: Any, accelerator: Any
) -> Engine:
    if accelerator is not None:
        from mars_dist.integrations.exact_accelerate import engine_for

        return engine_for(accelerator, optimizer, model, before_step)
    if hasattr(optimizer, "set_gradient_accumulation_boundary") and hasattr(optimizer, "basic_optimizer"):
        from mars_dist.integrations.deepspeed.look_ahead import DeepSpeed

        if before_step is not None or scaler is not None:
            raise TypeError("ExactMode: DeepSpeed clips and scales by itself: leave out before_step and scaler.")
        return DeepSpeed(optimizer)
    if hasattr(optimizer, "gradient_state"):
        raise TypeError("ExactMode: this optimizer was prepared by Accelerate: give accelerator= as well.")
    return Loop(optimizer, model, before_step, scaler)
