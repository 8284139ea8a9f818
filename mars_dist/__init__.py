"""MARS for distributed training: the same optimizer on one process, DDP and DeepSpeed ZeRO.

Importing the package registers the name "MARS" with DeepSpeed's JSON configuration as soon as torch is imported (it
imports and patches nothing else, torch included), and has the guard watch over DeepSpeed's engines.
``MARS_DIST_REGISTER=0`` in the environment turns both off.
"""

import os
from typing import TYPE_CHECKING, Any

from mars_dist import log
from mars_dist.integrations.deepspeed import register, register_with_torch, unregister

if TYPE_CHECKING:
    from mars_dist.optimizer import MARS

__version__ = "0.1.0"
__all__ = ["MARS", "__version__", "register", "unregister"]


def __getattr__(name: str) -> Any:
    """``mars_dist.MARS``, imported when it is first asked for: the command line answers without torch."""
    if name != "MARS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mars_dist.optimizer import MARS

    return MARS


log.show()
if os.environ.get("MARS_DIST_REGISTER", "1") != "0":
    register_with_torch()
