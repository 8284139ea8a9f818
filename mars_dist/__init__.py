"""MARS for distributed training: the same optimizer on one process, under DDP, FSDP and DeepSpeed ZeRO.

Importing the package registers MARS with DeepSpeed's JSON configuration (and has the guard watch over its engines),
with Accelerate's ``prepare`` and with the Trainer's ``optim``, each as soon as somebody imports it; it imports and
patches nothing else, torch included. ``MARS_DIST_REGISTER=0`` in the environment turns all of it off.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from mars_dist import log
from mars_dist.integrations import register, register_when_imported, unregister

if TYPE_CHECKING:
    from mars_dist.exact import ExactMode
    from mars_dist.groups import param_groups
    from mars_dist.optimizer import MARS

__version__ = "0.1.0"
__all__ = ["MARS", "ExactMode", "__version__", "param_groups", "register", "unregister"]

_LATER = {"MARS": "mars_dist.optimizer", "ExactMode": "mars_dist.exact", "param_groups": "mars_dist.groups"}


def __getattr__(name: str) -> Any:
    """``mars_dist.MARS`` and the like, imported when first asked for: the command line answers without torch."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


log.show()
if os.environ.get("MARS_DIST_REGISTER", "1") != "0":
    register_when_imported()
