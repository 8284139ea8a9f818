"""Exact mode in transformers' Trainer: ``ExactTrainer`` in the place of ``Trainer``, with ``is_approx=False``.

.. code-block:: python

    from mars_dist.integrations.exact_trainer import ExactTrainer

    args = TrainingArguments(optim="mars_adamw", optim_args="is_approx=False", ...)
    ExactTrainer(model=model, args=args, train_dataset=data).train()

One update costs two gradients. Steps, schedules, callbacks and the logged loss are those of an ordinary Trainer. The
first update of each epoch has no h, because its batch is not known before the epoch begins: it is as a first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from mars_dist.integrations import trainer as registered
from mars_dist.integrations.exact_accelerate import engine_for
from mars_dist.integrations.exact_loop import masks_of
from mars_dist.integrations.exact_model import statistics_kept

Update = tuple[list[Any], Any]  # its micro-batches, and the number of items in them


class ExactTrainer(Trainer):
    """A Trainer that takes the gradient of the next update's batches before each update.

    Works by what transformers documents for subclasses: ``get_batch_samples`` and ``training_step``.

    ``gradient_evaluations`` counts the passes, forward and backward, of both kinds.
    """

    _ahead: Update | None = None
    _source: Any = None
    _looking = False
    _number = 0  # of the micro-batch in its update
    gradient_evaluations = 0

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        with registered.exact_mode_is_driven():
            return super().create_optimizer(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Update:
        """The micro-batches of an update, after the gradient of those that follow them was taken."""
        size = self.args.gradient_accumulation_steps
        engine = engine_for(self.accelerator, self.optimizer, self.model_wrapped, self._clip)
        if engine.mars.settings.is_approx:
            raise ValueError(
                f"ExactTrainer needs exact mode: optim_args has {self.args.optim_args!r}, say is_approx=False"
            )
        if self._source is not epoch_iterator:
            goes_on = self._source is None and self.state.epoch and self.state.epoch % 1 and not self._skips_nothing()
            if not goes_on:
                engine.mars.forget_previous()
            self._source = epoch_iterator
            self._ahead = super().get_batch_samples(epoch_iterator, num_batches, device)
        assert self._ahead is not None
        present, self._ahead = self._ahead, super().get_batch_samples(epoch_iterator, size, device)
        if self._ahead[0]:
            self._look_ahead(engine, *self._ahead)
        self._number = 0
        return present

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One pass, with the masks of this micro-batch."""
        update = self.state.global_step + self._looking
        number = update * self.args.gradient_accumulation_steps + self._number
        self._number += 1
        self.gradient_evaluations += 1
        with masks_of(self.args.seed, number):
            return super().training_step(model, inputs, num_items_in_batch)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._ahead = self._source = None
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._ahead = self._source = None

    def _look_ahead(self, engine: Any, batches: list[Any], items: Any) -> None:
        self.current_gradient_accumulation_steps = len(batches)
        self._looking, self._number = True, 0
        engine.zero_grad()
        try:
            with engine.aside(), statistics_kept(engine.model):
                for i, inputs in enumerate(batches):
                    with engine.micro_batch(i == len(batches) - 1):
                        # Trainer may take tensors out of what it is given: a batch is used twice here.
                        self.training_step(self.model_wrapped, copied(inputs), items)
                engine.keep()
        finally:
            self._looking = False
        engine.zero_grad()

    def _clip(self) -> None:
        if self.args.max_grad_norm > 0:
            self._clip_grad_norm(self.model_wrapped)

    def _skips_nothing(self) -> bool:
        return bool(self.args.ignore_data_skip)


def copied(inputs: Any) -> Any:
    """The same tensors in a dictionary of its own."""
    with contextlib.suppress(AttributeError):
        return inputs.copy()
    return inputs
