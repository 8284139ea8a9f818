"""Checkpoints: complete or not there, checked before they are read, and the same for any cut over the ranks."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_dist.checkpoint.across import full_states, load_full_states
    from mars_dist.checkpoint.asynchronous import Saver
    from mars_dist.checkpoint.authors import from_authors, to_authors
    from mars_dist.checkpoint.find import Report, latest_valid, seal, verify
    from mars_dist.checkpoint.folder import complete, latest, part, save, step_of, tidy
    from mars_dist.checkpoint.named import chunks_of, load_chunks, settings_of
    from mars_dist.checkpoint.names import remember
    from mars_dist.checkpoint.shares import my_share
    from mars_dist.checkpoint.tensors import Chunk, Reader
    from mars_dist.checkpoint.together import CheckpointError
    from mars_dist.checkpoint.trust import UntrustedCheckpoint, check

__all__ = ["CheckpointError", "Chunk", "Reader", "Saver", "complete", "latest", "my_share", "part", "save", "step_of"]
__all__ += ["tidy"]
__all__ += ["Report", "UntrustedCheckpoint", "check", "latest_valid", "seal", "verify"]
__all__ += ["chunks_of", "from_authors", "full_states", "load_chunks", "load_full_states", "remember", "settings_of"]
__all__ += ["to_authors"]

_LATER = {
    "CheckpointError": "together",
    "Chunk": "tensors",
    "Reader": "tensors",
    "Report": "find",
    "Saver": "asynchronous",
    "UntrustedCheckpoint": "trust",
    "check": "trust",
    "chunks_of": "named",
    "complete": "folder",
    "from_authors": "authors",
    "full_states": "across",
    "latest": "folder",
    "latest_valid": "find",
    "load_chunks": "named",
    "load_full_states": "across",
    "my_share": "shares",
    "part": "folder",
    "remember": "names",
    "save": "folder",
    "seal": "find",
    "settings_of": "named",
    "step_of": "folder",
    "tidy": "folder",
    "to_authors": "authors",
    "verify": "find",
}


def __getattr__(name: str) -> Any:
    """``mars_dist.checkpoint.save`` and the like, imported when first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
