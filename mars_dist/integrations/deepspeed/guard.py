"""What watches over a DeepSpeed engine that trains with MARS, so that it never trains with something else.

When the engine takes the optimizer, the configuration is held against ``features.py``: refused keys raise, others are
warned about. After every step that the engine says it has taken, MARS must have updated every tensor exactly once: a
feature that takes the update over raises at its first step, whatever its name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mars_dist.integrations.deepspeed import nvme
from mars_dist.integrations.deepspeed.features import OFFLOAD, lookup, refused, unknown, warned
from mars_dist.integrations.deepspeed.parallel import faults
from mars_dist.optimizer import MARS
from mars_dist.sharding.locate import trainable_only

logger = logging.getLogger("mars_dist")

ORIGINAL = "_mars_dist_original_"
EXPECTED = "_mars_dist_tensors"


def guard(module: ModuleType) -> None:
    """Watch over the engines of ``deepspeed.runtime.engine``. Idempotent."""
    for name, watch in WATCHED.items():
        if not hasattr(module.DeepSpeedEngine, ORIGINAL + name):
            original = getattr(module.DeepSpeedEngine, name)
            setattr(module.DeepSpeedEngine, ORIGINAL + name, original)
            setattr(module.DeepSpeedEngine, name, _watched(original, watch))


def unguard(module: ModuleType | None) -> None:
    """Undo ``guard``."""
    engine: Any = getattr(module, "DeepSpeedEngine", None)
    for name in WATCHED:
        if hasattr(engine, ORIGINAL + name):
            setattr(engine, name, getattr(engine, ORIGINAL + name))
            delattr(engine, ORIGINAL + name)


def _watched(original: Callable[..., Any], watch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(original, self, *args, **kwargs)

    return method


def _when_it_takes_the_optimizer(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Stands before ``DeepSpeedEngine._do_optimizer_sanity_check``, which sees the optimizer before it is wrapped."""
    if isinstance(optimizer, MARS):
        config = engine._config._param_dict
        for feature in refused(config):
            raise RuntimeError(f"MARS: {feature.key} = {lookup(config, feature.key)!r}: {feature.reason}")
        fault = nvme.too_few_buffers(config, optimizer.most_states())
        if fault:
            given = lookup(config, f"{OFFLOAD}.buffer_count", 4)
            raise RuntimeError(f"MARS: {OFFLOAD}.buffer_count = {given}: {fault}")
        for fault in faults(engine, optimizer):
            raise RuntimeError(f"MARS: {fault}")
        if engine.global_rank == 0:
            for feature in warned(config):
                logger.warning("%s = %r: %s", feature.key, lookup(config, feature.key), feature.reason)
            for key in unknown(config):
                logger.warning("%s = %r: mars_dist was not tested with this key", key, lookup(config, key))
        # DeepSpeed makes its flats of exactly these, right after this call.
        parameters = [("", p) for group in optimizer.param_groups for p in group["params"]]
        setattr(engine, EXPECTED, len(trainable_only(parameters)))
    return original(engine, optimizer)


def _when_zero_is_made(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Stands around ``DeepSpeedEngine._configure_zero_optimizer``."""
    made = original(engine, optimizer)
    if isinstance(optimizer, MARS):
        fault = nvme.misplaced_gradient(made, engine._config._param_dict)
        if fault:
            raise RuntimeError(f"MARS: {fault}")
    return made


def _when_it_loads(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands before ``DeepSpeedEngine.load_checkpoint``."""
    ours = isinstance(engine.basic_optimizer, MARS) and nvme.is_on(engine._config._param_dict)
    if ours and not kwargs.get("load_module_only", False):
        raise RuntimeError(f"MARS: {nvme.NO_LOADING}")
    return original(engine, *args, **kwargs)


def _when_it_steps(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands around ``DeepSpeedEngine._take_model_step``: one step, or one that is skipped for an overflow."""
    expected = getattr(engine, EXPECTED, None)
    if expected is None:
        return original(engine, *args, **kwargs)
    before = engine.basic_optimizer.tensor_updates
    result = original(engine, *args, **kwargs)
    updated = engine.basic_optimizer.tensor_updates - before
    # Without ZeRO a tensor without gradient is left out; a GradScaler leaves out a step without telling the engine.
    whole = engine.zero_optimization() and not _scales_gradients(engine)
    fewest, most = (expected, expected) if whole else (int(not _scales_gradients(engine)), expected)
    if not engine._step_applied:
        fewest = most = 0
    if not fewest <= updated <= most:
        raise RuntimeError(
            f"MARS updated {updated} tensors in step {engine.global_steps} of the DeepSpeed engine, which has "
            f"{expected} to train{'' if engine._step_applied else ' and skipped that step'}: something else updates "
            "the weights in place of MARS, or steps it twice. Check the configuration with `python -m "
            "mars_dist.integrations.deepspeed CONFIG.json`; ds_configs/README.md lists what works with MARS."
        )
    return result


def _scales_gradients(engine: Any) -> bool:
    """Whether a GradScaler of torch (``torch_autocast`` in float16) stands between the engine and MARS."""
    scalers = (
        getattr(engine, "torch_autocast_z0_gradscaler", None),
        getattr(engine.optimizer, "torch_autocast_gradscaler", None),
    )
    return any(scaler is not None for scaler in scalers)


WATCHED: dict[str, Callable[..., Any]] = {
    "_do_optimizer_sanity_check": _when_it_takes_the_optimizer,
    "_configure_zero_optimizer": _when_zero_is_made,
    "_take_model_step": _when_it_steps,
    "load_checkpoint": _when_it_loads,
}
