"""Checkpoints: complete or not there, checked before they are read, and the same for any cut over the ranks."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_dist.checkpoint.asynchronous import Saver
    from mars_dist.checkpoint.folder import complete, latest, part, save, step_of, tidy
    from mars_dist.checkpoint.shares import my_share
    from mars_dist.checkpoint.tensors import Chunk, Reader
    from mars_dist.checkpoint.together import CheckpointError

__all__ = ["CheckpointError", "Chunk", "Reader", "Saver", "complete", "latest", "my_share", "part", "save", "step_of"]
__all__ += ["tidy"]

_LATER = {
    "CheckpointError": "together",
    "Chunk": "tensors",
    "Reader": "tensors",
    "Saver": "asynchronous",
    "complete": "folder",
    "latest": "folder",
    "my_share": "shares",
    "part": "folder",
    "save": "folder",
    "step_of": "folder",
    "tidy": "folder",
}


def __getattr__(name: str) -> Any:
    """``mars_dist.checkpoint.save`` and the like, imported when first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
