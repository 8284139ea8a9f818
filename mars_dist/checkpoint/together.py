"""One error for all ranks: what fails on one of them is raised on every one, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

SHOWN = 3  # ranks whose errors are written out


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded: the same text on every rank."""


@contextmanager
def together(doing: str, process_group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the block on every rank of the group; when it raises on one, every rank raises the same error afterwards.

    The block must hold no collective that a rank which has failed would leave out: put one ``together`` around each
    part between two collectives. Without a process group an error is raised as it is.

    Args:
        doing: begins the message, for example "saving step-00000020".

    Raises:
        CheckpointError: with rank, kind and text of the first errors; from the own error on the ranks that have one.
    """
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        yield
        return
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    everyone: list[str | None] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, mine and f"{type(mine).__name__}: {mine}", group=process_group)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None]
    if failed:
        more = f" (and {len(failed) - SHOWN} more ranks)" if len(failed) > SHOWN else ""
        raise CheckpointError(
            f"{doing} failed on {len(failed)} of {len(everyone)} ranks: {'; '.join(failed[:SHOWN])}{more}"
        ) from mine
