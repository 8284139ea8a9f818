"""Checkpoints of transformers' Trainer when it trains with MARS: sealed when saved, checked before it resumes.

Around ``Trainer.train`` (public): what it resumes from is checked first (``checkpoint/trust.py``), and
``resume_from_checkpoint=True`` takes the newest checkpoint that is valid, where transformers would take the newest
folder, be it empty. A callback seals each checkpoint. ``MARS_DIST_SEAL=0`` turns the sealing off. Around
``Trainer._save_checkpoint``: what cannot be written on one rank is raised on all of them.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mars_dist.integrations.accelerate import mars_inside
from mars_dist.integrations.deepspeed import NAMES
from mars_dist.integrations.import_hook import forget, when_imported
from mars_dist.versions import missing_hook

logger = logging.getLogger("mars_dist")

MODULE = "transformers.trainer"
ORIGINAL = "_mars_dist_original_train"
SAVE, ORIGINAL_SAVE = "_save_checkpoint", "_mars_dist_original_save_checkpoint"


def register() -> None:
    """Watch over ``Trainer.train`` from the moment that somebody imports it. Idempotent."""
    when_imported(MODULE, _watch)


def unregister() -> None:
    """Undo ``register()``."""
    forget(MODULE)
    trainer: Any = getattr(sys.modules.get(MODULE), "Trainer", None)
    for name, original in (("train", ORIGINAL), (SAVE, ORIGINAL_SAVE)):
        if hasattr(trainer, original):
            setattr(trainer, name, getattr(trainer, original))
            delattr(trainer, original)


def _watch(module: ModuleType) -> None:
    trainer: Any = getattr(module, "Trainer", None)
    if not hasattr(trainer, "train") or hasattr(trainer, ORIGINAL):
        return
    original: Callable[..., Any] = trainer.train
    setattr(trainer, ORIGINAL, original)

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if trains_with_mars(self):
            resume_from_checkpoint = _before_training(self, resume_from_checkpoint)
        return original(self, resume_from_checkpoint, *args, **kwargs)

    trainer.train = train
    _watch_saving(trainer)


def _watch_saving(trainer: Any) -> None:
    original_save: Callable[..., Any] | None = getattr(trainer, SAVE, None)
    if original_save is None:
        consequence = "a rank that cannot save leaves the others waiting"
        logger.warning("%s", missing_hook("transformers", f"Trainer.{SAVE}", consequence))
        return
    setattr(trainer, ORIGINAL_SAVE, original_save)

    @functools.wraps(original_save)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not trains_with_mars(self):
            return original_save(self, *args, **kwargs)
        from mars_dist.checkpoint import around

        with around.saving_together(f"saving step {self.state.global_step} of the Trainer", (self, "save_model")):
            return original_save(self, *args, **kwargs)

    setattr(trainer, SAVE, save)


def trains_with_mars(trainer: Any) -> bool:
    """Whether a Trainer has MARS, or will make it."""
    from mars_dist.integrations.trainer import _asks_for_mars
    from mars_dist.optimizer import MARS

    if trainer.optimizer is not None:
        return mars_inside(trainer.optimizer) is not None
    given = getattr(trainer, "optimizer_cls_and_kwargs", None)
    if given is not None:
        return isinstance(given[0], type) and issubclass(given[0], MARS)
    config = getattr(getattr(trainer.args, "hf_deepspeed_config", None), "config", None) or {}
    block = config.get("optimizer")
    named = isinstance(block, dict) and block.get("type") in NAMES
    return named or _asks_for_mars(trainer.args.optim)


def _before_training(trainer: Any, resume: Any) -> Any:
    """Add the callback; check what is resumed from, and return it."""
    from mars_dist.checkpoint import around

    if not any(isinstance(callback, seal_callback()) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(seal_callback())
    if resume is True:
        found = around.newest(Path(trainer.args.output_dir))
        if found is None:
            raise ValueError(
                f"resume_from_checkpoint=True: {trainer.args.output_dir} holds no valid checkpoint (`mars-dist "
                "checkpoint verify` says what is wrong with each). Leave it out to start anew."
            )
        logger.info("resuming from %s", found)
        resume = str(found)
    if resume:
        around.check_before_loading(lambda: Path(resume), shared=not trainer.args.save_on_each_node)
    return resume


@functools.cache
def seal_callback() -> Any:
    """The class of the callback that seals each checkpoint of a Trainer; it may be given to any Trainer."""
    from transformers import TrainerCallback

    class SealCallback(TrainerCallback):
        """Notes size and SHA-256 of every file of a checkpoint as soon as it is saved."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            from mars_dist.checkpoint import around

            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            # A search over hyper-parameters saves elsewhere; without one file system there is no common folder.
            if not args.save_on_each_node and not state.is_hyper_param_search:
                around.seal_after_saving(folder, "Trainer")

    return SealCallback
