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

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

import torch

from mars_dist.integrations.exact_loop import Engine, Loop, masks_of
from mars_dist.integrations.exact_model import Modes, statistics_kept

MicroBatch = TypeVar("MicroBatch")

NOT_DRAWN = (
    "ExactMode: the gradient of a micro-batch at the point before drew random numbers, and its own pass had drawn none "
    "when the next micro-batch was asked for: the masks of dropout would not be the same in both. Take the pass of "
    "each micro-batch before the next one, without list(batch) and the like, and in the same mode (model.train())."
)


class ExactMode(Generic[MicroBatch]):
    """Iterates over batches; before one is handed out, the gradient of the one after it is taken and kept.

    Each batch is itself iterated over, once, for its micro-batches: take one, pass it, take the next. ``list(batch)``
    would take them all before the first pass, and give the passes neither their masks nor their place in the batch:
    it is an error where the passes draw random numbers, and is not noticed where they draw none.

    A look-ahead leaves running statistics (batch norm) as they were, and runs with the modules in the mode, training
    or evaluation, that the ordinary passes have, where the model is known: under DeepSpeed, or from ``model``. The
    first one runs in the mode of the moment; that the passes have another one then is an error.

    Dropout draws the same masks for a micro-batch in both of its passes, from a seed of its own; the random streams
    outside are left as they were.

    A batch may be left before its last micro-batch: what it has set is undone, and its gradients are forgotten when the
    next batch comes.

    Args:
        optimizer: MARS with ``is_approx=False``, what Accelerate made of it, or a DeepSpeed engine that trains with it.
        micro_batches: the data, one micro-batch after the other. Read one batch ahead.
        gradient: forward and backward of one micro-batch.
        accumulation: micro-batches in a batch. At the end of the data a batch may have fewer. It is DeepSpeed's and
            Accelerate's ``gradient_accumulation_steps``; with 1 for Accelerate ``gradient`` divides the loss by itself.
        model: what DDP, FSDP1, FSDP2 or Accelerate made of the model: gradients are exchanged once per batch. Not
            needed for DeepSpeed; without it and without accumulation, running statistics and modes are not seen to.
        before_step: called before a look-ahead is kept, as the loop does before ``optimizer.step()``:
            ``scaler.unscale_(optimizer)`` and ``clip_grad_norm_``. Not for DeepSpeed, which does both by itself.
        scaler: the GradScaler of a loop in float16 that has one of its own.
        accelerator: of a loop under Accelerate. Leave out ``accelerator.accumulate()``: this object sets
            ``accelerator.sync_gradients``.
        seed: of the masks; by default the one that ``torch.manual_seed`` was given. As without this object ranks with
            the same seed drop the same (which tensor parallelism needs): give data-parallel ranks seeds of their own.

    Raises:
        TypeError, ValueError: when the optimizer is not MARS in exact mode, or another ``accumulation`` was configured.
        RuntimeError: for a feature of DeepSpeed by which the extra pass cannot be kept apart. While iterating: when
            the two passes of a micro-batch differ in the mode of the model, or one draws no random numbers.
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
            raise ValueError(
                f"ExactMode needs MARS in exact mode, and this one is in approximate mode: "
                f"{self._engine.mars.how_to_be_exact()}"
            )
        theirs = self._engine.accumulation()
        if theirs not in (None, accumulation):
            raise ValueError(
                f"accumulation={accumulation}, and the engine was told to accumulate {theirs} micro-batches "
                f"(gradient_accumulation_steps), by which it divides the loss: give ExactMode accumulation={theirs}."
            )
        self._micro_batches, self._gradient, self._accumulation = micro_batches, gradient, accumulation
        self._seed = torch.initial_seed() if seed is None else int(seed)
        self._modes = Modes(None)
        self._drawing: set[int] = set()  # the micro-batches that drew random numbers in a look-ahead
        self._goes_on = False  # h of the first batch is in the optimizer's state
        self.handed_out = 0  # micro-batches, since the training began
        self.gradient_evaluations = 0  # in both passes, by this object

    def __iter__(self) -> Iterator[Iterator[MicroBatch]]:
        if not self._goes_on:
            self._engine.mars.forget_previous()
        self._modes, self._drawing = Modes(self._engine.model), set()
        source = iter(self._micro_batches)
        present = list(islice(source, self._accumulation))
        passes: Generator[MicroBatch] | None = None
        try:
            while present:
                ahead = list(islice(source, self._accumulation))
                if ahead:
                    self._look_ahead(ahead, self.handed_out + len(present))
                elif passes is not None:
                    self._engine.zero_grad()  # the batch before may have been left
                first = self.handed_out
                self.handed_out += len(present)
                # A new loop over further data goes on only where load_state_dict() says so.
                self._goes_on = False
                passes = self._ordinary(present, first)
                self._engine.mars.next_batch()
                yield passes
                passes.close()  # left early, it would keep what it has set around a pass
                present = ahead
        finally:
            if passes is not None:
                passes.close()
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
        with self._engine.aside(), statistics_kept(self._engine.model), self._modes.of_passes():
            for i, micro_batch in enumerate(micro_batches):
                with self._pass(first + i, i == len(micro_batches) - 1) as has_drawn:
                    self._gradient(micro_batch)
                    if has_drawn():
                        self._drawing.add(first + i)
            self._engine.keep()
        self._engine.zero_grad()

    def _ordinary(self, micro_batches: list[MicroBatch], first: int) -> Generator[MicroBatch]:
        for i, micro_batch in enumerate(micro_batches):
            mode = self._modes.handed_out()
            with self._pass(first + i, i == len(micro_batches) - 1) as has_drawn:
                yield micro_batch
                self._modes.passed(mode)
                if first + i in self._drawing and not has_drawn():
                    raise RuntimeError(NOT_DRAWN)
            self._drawing.discard(first + i)

    @contextlib.contextmanager
    def _pass(self, number: int, is_last: bool) -> Iterator[Callable[[], bool]]:
        with masks_of(self._seed, number) as has_drawn, self._engine.micro_batch(is_last):
            self.gradient_evaluations += 1
            yield has_drawn


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
