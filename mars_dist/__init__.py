"""MARS for distributed training: the same optimizer on one process, DDP and DeepSpeed ZeRO.

Importing the package registers the name "MARS" with DeepSpeed's JSON configuration (it imports and patches nothing
else); ``MARS_DIST_REGISTER=0`` in the environment turns that off.
"""

import os

from mars_dist import log
from mars_dist.integrations.deepspeed import register, unregister
from mars_dist.optimizer import MARS

__version__ = "0.1.0"
__all__ = ["MARS", "__version__", "register", "unregister"]

log.show()
if os.environ.get("MARS_DIST_REGISTER", "1") != "0":
    register()
