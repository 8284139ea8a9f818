"""What may fail on one rank while a checkpoint is saved: tidied up, explained, and raised on all."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from mars_dist.checkpoint.together import CheckpointError, together

ADVICE = {
    errno.ENOSPC: "free space on that disk, keep fewer checkpoints, or save to another folder",
    errno.EDQUOT: "the quota is used up: remove files, keep fewer checkpoints, or save to another folder",
    errno.EFBIG: "a limit on the size of files (ulimit -f) was reached: raise it",
    errno.EROFS: "that disk is mounted read-only: save to another folder, or mount it anew",
    errno.EACCES: "this user may not write there: change the owner or the permissions, or save to another folder",
    errno.EPERM: "this user may not write there: change the owner or the permissions, or save to another folder",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
    errno.EIO: "the disk has failed: save to another one",
}

T = TypeVar("T")


def everyones(mine: T, process_group: dist.ProcessGroup | None) -> list[T]:
    """What each rank of the group has given, by rank."""
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return [mine]
    given: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(given, mine, group=process_group)
    return given


@contextmanager
def attempt(doing: str, abandon: Callable[[], str], process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """``together`` with what to do: on rank 0 ``abandon`` tidies up and says what is left, on all ranks that is raised.

    Raises:
        CheckpointError: the same text on every rank.
    """
    alone = not dist.is_initialized() or dist.get_world_size(process_group) == 1
    try:
        with together(doing, process_group), _advised():
            yield
    except Exception as error:
        if not (alone or isinstance(error, CheckpointError)):
            raise  # the exchange itself has failed: nobody can be asked
        left = ""
        if alone or dist.get_rank(process_group) == 0:
            try:
                left = abandon()
            except OSError as another:
                left = f"the folder cannot be looked at: {another}"
        text = f"{doing} failed: {_text(error)}" if alone else str(error)
        raise CheckpointError(f"{text}. Now {everyones(left, process_group)[0]}") from error


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


@contextmanager
def _advised() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in ADVICE:
            raise
        raise CheckpointError(f"{error}: {ADVICE[error.errno]}") from error
