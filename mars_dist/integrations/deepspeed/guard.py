"""What watches over a DeepSpeed engine that trains with MARS, so that it never trains with something else.

When the engine takes the optimizer, the configuration is held against ``features.py``: refused keys raise, untested
ones are warned about. After every step that the engine has taken, MARS must have updated every tensor once: a feature
that takes the update over (there have been three) raises at its first step, whatever its name.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

logger = logging.getLogger("mars_dist")

ENGINE = "deepspeed.runtime.engine"
WATCHED = ("_do_optimizer_sanity_check", "_take_model_step")
ORIGINAL = "_mars_dist_original_"


def guard(module: ModuleType) -> None:
    """Watch over the engines of ``deepspeed.runtime.engine``. Idempotent."""
    engine = module.DeepSpeedEngine
    for name, watched in zip(WATCHED, (_when_it_takes_the_optimizer, _when_it_steps), strict=True):
        if not hasattr(engine, ORIGINAL + name):
            original = getattr(engine, name)
            setattr(engine, ORIGINAL + name, original)
            setattr(engine, name, functools.wraps(original)(functools.partialmethod(watched, original)))


def unguard(module: ModuleType | None) -> None:
    """Undo ``guard``."""
    engine: Any = getattr(module, "DeepSpeedEngine", None)
    for name in WATCHED:
        if hasattr(engine, ORIGINAL + name):
            setattr(engine, name, getattr(engine, ORIGINAL + name))
            delattr(engine, ORIGINAL + name)
