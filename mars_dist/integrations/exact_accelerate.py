"""Exact mode under Accelerate: its own no_sync, sync flag and scaler, or the DeepSpeed engine that it drives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mars_dist.integrations.deepspeed.look_ahead import DeepSpeed
from mars_dist.integrations.exact_loop import Loop, unmoved


def engine_for(accelerator: Any, optimizer: Any, model: Any, before_step: Callable[[], Any] | None) -> Any:
    """How exact mode trains under ``accelerator``; see ``exact_loop.Engine``.

    Raises:
        TypeError: when something is missing.
    """
    if accelerator.distributed_type.name == "DEEPSPEED":
        wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
        if wrapped is None:
            raise TypeError("ExactMode: call accelerator.prepare(model, optimizer, ...) first.")
        return PreparedDeepSpeed(accelerator, wrapped.engine)
    if not hasattr(optimizer, "gradient_state"):
        raise TypeError(
            f"ExactMode: with accelerator= the optimizer is what accelerator.prepare made of it, got "
            f"{type(optimizer).__name__}."
        )
    return Prepared(accelerator, optimizer, model, before_step)


class SyncFlag:
    """``accelerator.sync_gradients`` follows the place in the batch; what it stands before does the rest."""

    accelerator: Any

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        self.accelerator.sync_gradients = is_last
        with super().micro_batch(is_last):  # type: ignore[misc]
            yield

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        self.accelerator.sync_gradients = True


class Prepared(SyncFlag, Loop):
    """DDP and FSDP, and one process, behind Accelerate."""

    def __init__(self, accelerator: Any, optimizer: Any, model: Any, before_step: Callable[[], Any] | None) -> None:
        prepared = getattr(accelerator, "_models", [])
        super().__init__(optimizer, prepared[0] if model is None and len(prepared) == 1 else model, before_step, None)
        self.accelerator = accelerator

    def keep(self) -> None:
        if self.before_step is not None:
            self.before_step()
        skipped = self.optimizer._is_overflow
        with unmoved(self.accelerator.scaler), self.mars.looking_ahead():
            self.optimizer.step()
        self.optimizer._is_overflow = skipped

    def accumulation(self) -> int | None:
        count = self.accelerator.gradient_accumulation_steps  # accelerator.backward divides by it
        return None if count == 1 else int(count)

    def zero_grad(self) -> None:
        self.mars.zero_grad()
        self._drop()


class PreparedDeepSpeed(SyncFlag, DeepSpeed):
    """``accelerator.backward`` calls the engine's ``backward`` and ``step``."""

    def __init__(self, accelerator: Any, engine: Any) -> None:
        super().__init__(engine)
        self.accelerator = accelerator
