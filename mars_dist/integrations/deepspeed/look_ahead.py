"""Exact mode under a DeepSpeed engine: a second gradient that goes through its wrapper as any other, and moves nothing.

The wrapper (ZeRO, BF16_Optimizer, the one of float16) reduces, unscales, clips and partitions, and calls
``MARS.step()`` for each group or sub-group, which keeps what it is given. The engine itself is not told: its counters,
its schedule and what ``guard.py`` counts see one step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mars_dist.integrations.deepspeed import nvme
from mars_dist.optimizer import MARS
from mars_dist.versions import missing_hook

# What is used of an engine; where the wrappers keep their loss scale.
USED = ("basic_optimizer", "optimizer", "_is_gradient_accumulation_boundary", "clip_fp32_gradients", "_config")
SCALES = ("loss_scaler", "loss_scale_config")
PARTIAL_SUMS = ("all_grad_tensors", "averaged_gradients")
NOTED = ("overflow", "_global_grad_norm")


class DeepSpeed:
    """See ``exact_loop.Engine``."""

    def __init__(self, engine: Any) -> None:
        missing = [f"DeepSpeedEngine.{name}" for name in USED if not hasattr(engine, name)]
        if missing:
            raise RuntimeError(f"MARS: {missing_hook('deepspeed', missing, 'exact mode cannot be trained')}")
        if not isinstance(engine.basic_optimizer, MARS):
            raise TypeError(
                f"ExactMode: the engine trains with {type(engine.basic_optimizer).__name__}, not with MARS."
            )
        reason = _refusal(engine)
        if reason:
            raise RuntimeError(f"MARS: exact mode does not work with {reason}")
        self.engine: Any = engine
        self.model = engine.module
        self.mars = engine.basic_optimizer

    def accumulation(self) -> int | None:
        return int(self.engine.gradient_accumulation_steps())

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(is_last)
        yield

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """``engine.step()`` does nothing: with DeepSpeed it is often called with each backward pass."""
        theirs = vars(self.engine).get("step")  # somebody may have put a function of his own there
        self.engine.step = lambda *args, **kwargs: None
        try:
            yield
        finally:
            if theirs is None:
                del self.engine.step
            else:
                self.engine.step = theirs

    def keep(self) -> None:
        engine, wrapper = self.engine, self.engine.optimizer
        if engine.gradient_clipping() > 0.0 and wrapper is self.mars:
            engine.clip_fp32_gradients()
        noted = {name: getattr(wrapper, name) for name in NOTED if hasattr(wrapper, name)}
        with _unmoved(wrapper), self.mars.looking_ahead():
            wrapper.step()
        for name, value in noted.items():
            setattr(wrapper, name, value)

    def zero_grad(self) -> None:
        """As the engine does after a step: the wrappers hold gradients of their own."""
        engine = self.engine
        if engine.optimizer is not self.mars:
            engine.optimizer.zero_grad()
            for name in PARTIAL_SUMS:  # of a batch that was left early
                sums = getattr(engine.optimizer, name, None)
                if isinstance(sums, dict):
                    sums |= dict.fromkeys(sums)
            if hasattr(engine.optimizer, PARTIAL_SUMS[0]):  # ZeRO-1/2
                engine.optimizer.micro_step_id = -1  # no micro-batch yet, as after a step
                if getattr(engine.optimizer, "cpu_offload", False):
                    engine.optimizer.reset_cpu_buffers()  # norms, and that there was an overflow
        else:
            engine.zero_grad()

    def close(self) -> None:
        """The engine counts by itself where the boundaries are, as before."""
        self.engine._is_gradient_accumulation_boundary = None
        if hasattr(self.engine.optimizer, "set_gradient_accumulation_boundary"):
            self.engine.optimizer.set_gradient_accumulation_boundary(self.engine.is_gradient_accumulation_boundary())


@contextlib.contextmanager
def _unmoved(wrapper: Any) -> Iterator[None]:
    """The loss scale and its counters stay as they are.

    Not only afterwards: ZeRO moves the scale BEFORE it divides by it, which would halve h where the scale grows, and
    an overflow at the smallest scale would end the training.
    """
    scales = [getattr(wrapper, name) for name in SCALES if getattr(wrapper, name, None) is not None]
    before = [(scale, dict(vars(scale))) for scale in scales]
    for scale in scales:
        if hasattr(scale, "update_scale"):
            scale.update_scale = lambda overflow: None
    try:
        yield
    finally:
        for scale, values in before:
            vars(scale).clear()
            vars(scale).update(values)


def _refusal(engine: Any) -> str:
    if hasattr(engine, "train_batch"):
        return "PipelineModule: engine.train_batch() makes the update by itself, also while looking ahead."
    if not engine.managed_gradient_accumulation():
        return "managed_gradient_accumulation = false, where only engine.step() exchanges gradients: leave it out."
    if getattr(engine, "torch_autocast_z0_gradscaler", None) is not None:
        return "torch_autocast in float16, whose loss scale is not the optimizer's: use bfloat16, or fp16.enabled."
    if nvme.is_on(engine._config._param_dict):
        return "optimizer states on NVMe: it needs a state between two passes. Use offload_optimizer.device = cpu."
    return ""
