"""``{"optimizer": {"type": "MARS", "params": {...}}}`` in a DeepSpeed configuration.

DeepSpeed looks up any optimizer that is not built in as ``getattr(torch.optim, type)`` and calls it with the model's
parameters (engine.py, ``_configure_basic_optimizer``); there is no public registry. ZeRO accepts optimizers by exact
class from ``deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS``. Both are filled here without importing
DeepSpeed: the name when torch is imported, the list when DeepSpeed is. Until then this module imports neither, nor
anything of ours that needs torch: it runs whenever ``mars_dist`` is imported, for ``mars-dist --help`` as well.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mars_dist.integrations.import_hook import forget, when_imported
from mars_dist.versions import missing_hook

if TYPE_CHECKING:
    from mars_dist.optimizer import MARS

logger = logging.getLogger("mars_dist")

NAMES = ("MARS", "Mars", "mars")
TORCH = "torch"
ZERO_UTILS = "deepspeed.runtime.zero.utils"
ENGINE = "deepspeed.runtime.engine"


def mars_from_config(params: Iterable[Any], **kwargs: Any) -> MARS:
    """What DeepSpeed calls for ``"type": "MARS"``.

    ZeRO makes one flat tensor of each parameter group, and a state exists for a whole flat tensor or not at all. A
    bare list of parameters is therefore split into matrices and others, so that neither carries states that only the
    other needs (``prev_grad`` for vectors, ``exp_avg_sq`` for matrices under MARS-Lion). Groups that the caller made
    are kept as they are.
    """
    from mars_dist.config import Settings
    from mars_dist.optimizer import MARS

    params = list(params)
    if any(isinstance(p, dict) for p in params):
        return MARS(params, **kwargs)
    ranks = Settings(matrix_ndim=kwargs.get("matrix_ndim", 2)).matrix_ndim
    matrices: list[Any] = []
    others: list[Any] = []
    frozen: list[Any] = []
    for named in params:
        p = named[1] if isinstance(named, tuple) else named
        is_matrix = len(getattr(p, "ds_shape", p.shape)) in ranks
        (frozen if not p.requires_grad else matrices if is_matrix else others).append(named)
    if matrices and others:  # ZeRO cannot make a flat tensor of a group in which everything is frozen
        params = [{"params": matrices + frozen}, {"params": others}]
    return MARS(params, **kwargs)


def register_with_torch() -> None:
    """``register()`` now if torch is imported already, else as soon as it is."""
    when_imported(TORCH, lambda _: register())


def register() -> None:
    """Make the name known to DeepSpeed. Idempotent.

    Raises:
        RuntimeError: when ``torch.optim`` already has another class under that name, which a configuration that asks
            for MARS would silently train with.
    """
    import torch.optim

    for name in NAMES:
        present = getattr(torch.optim, name, None)
        if present is not None and not _is_ours(present):
            raise RuntimeError(
                f"torch.optim.{name} is already {present!r}: mars_dist does not overwrite it, and a DeepSpeed "
                f'configuration with "type": "{name}" would train with that one. Remove it, or set '
                "MARS_DIST_REGISTER=0 and pass mars_dist.MARS to deepspeed.initialize yourself (nothing then refuses "
                "what does not work with MARS)."
            )
    for name in NAMES:
        setattr(torch.optim, name, mars_from_config)
    when_imported(ZERO_UTILS, _allow_in_zero)
    when_imported(ENGINE, _guard)


def unregister() -> None:
    """Undo ``register()``: ``torch.optim``, the import hook and DeepSpeed are as before."""
    for name in (TORCH, ZERO_UTILS, ENGINE):
        forget(name)
    optim = sys.modules.get("torch.optim")
    for name in NAMES:
        if _is_ours(getattr(optim, name, None)):
            delattr(optim, name)
    supported = getattr(sys.modules.get(ZERO_UTILS), "ZERO_SUPPORTED_OPTIMIZERS", [])
    engine = sys.modules.get(ENGINE)
    if supported or engine:
        from mars_dist.integrations.deepspeed.guard import unguard
        from mars_dist.optimizer import MARS

        if MARS in supported:
            supported.remove(MARS)
        unguard(engine)


def _is_ours(found: Any) -> bool:
    """Whether it is ``mars_from_config``, of this load of the module or of an earlier one."""
    return getattr(found, "__module__", None) == __name__ and getattr(found, "__name__", None) == "mars_from_config"


def _allow_in_zero(zero_utils: ModuleType) -> None:
    """Let ZeRO take MARS without ``zero_allow_untested_optimizer``."""
    supported = getattr(zero_utils, "ZERO_SUPPORTED_OPTIMIZERS", None)
    if supported is None:  # no reason to fail at the import of a script that may not use MARS
        refusal = "ZeRO will refuse MARS as an untested optimizer"
        remedy = 'set "zero_allow_untested_optimizer": true in the configuration'
        logger.warning("%s", missing_hook("deepspeed", f"{ZERO_UTILS}.ZERO_SUPPORTED_OPTIMIZERS", refusal, remedy))
        return
    from mars_dist.optimizer import MARS

    if MARS not in supported:
        supported.append(MARS)


def _guard(engine: ModuleType) -> None:
    from mars_dist.integrations.deepspeed import weights  # noqa: F401 - mars_dist.checkpoint asks it
    from mars_dist.integrations.deepspeed.guard import guard

    guard(engine)
