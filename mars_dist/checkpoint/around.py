"""What the integrations put around a library's own saving and loading: pickles are checked before, a seal comes after.

Each is called by every rank. Where the ranks do not see one and the same folder (node-local storage), each checks all
that it has, and nothing is sealed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mars_dist.checkpoint import find, kinds, manifest, trust
from mars_dist.checkpoint.together import CheckpointError, together

SEAL = "MARS_DIST_SEAL"
_inside = 0


def seals() -> bool:
    """Whether folders are sealed: not with MARS_DIST_SEAL=0, nor inside of a save that is sealed as a whole."""
    return _inside == 0 and os.environ.get(SEAL, "1").lower() not in ("0", "false", "no", "off")


@contextlib.contextmanager
def sealed_as_a_whole() -> Iterator[None]:
    """Around a save whose parts seal themselves when they are saved alone (DeepSpeed's in Accelerate's)."""
    global _inside
    _inside += 1
    try:
        yield
    finally:
        _inside -= 1


def check_before_loading(where: Callable[[], Path | None], shared: bool = True) -> None:
    """``trust.check`` of a folder that a library is about to unpickle; each rank reads its part of the files.

    Args:
        where: returns the folder, or None where the library will find nothing; what it raises is raised on every rank.
        shared: whether all ranks see the same folder.

    Raises:
        CheckpointError: on every rank (without a process group ``UntrustedCheckpoint``); before anything is opened.
    """
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    with together("checking a checkpoint before it is loaded"):  # no exchange inside, whatever this rank finds
        folder = where()
        if folder is not None and folder.exists() and not trust.is_trusted():
            names = trust.walk(folder)
            if shared:  # by name, not by number: two ranks may not see the same list
                names = [path for path in names if zlib.crc32(os.fsencode(path.relative_to(folder))) % ranks == rank]
            trust.check(folder, files=names)


@contextlib.contextmanager
def saving_together(doing: str, *also: tuple[Any, str]) -> Iterator[None]:
    """Around a library's saving: what cannot be written on one rank is raised on every rank, at the end.

    The libraries write and wait for each other by turns: a rank that raises at a write leaves the others waiting. Here
    the error of ``torch.save`` into a file is kept until the library is through.

    Args:
        also: objects and names of their methods that write, and whose errors are kept as well.

    Raises:
        CheckpointError: on every rank (without a process group the error itself).
    """
    kept: list[Exception] = []
    mine = threading.get_ident()

    def keeping(function: Callable[..., Any], only_files: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def save(*args: Any, **kwargs: Any) -> Any:
            into = args[1] if len(args) > 1 else kwargs.get("f")
            if threading.get_ident() != mine or (only_files and not isinstance(into, str | os.PathLike)):
                return function(*args, **kwargs)  # torch's DCP writes into streams, and exchanges errors by itself
            try:
                return function(*args, **kwargs)
            except CheckpointError:
                raise  # every rank has it
            except Exception as error:
                kept.append(error)

        return save

    everyones: CheckpointError | None = None
    with together(doing), contextlib.ExitStack() as replaced:
        for where, name in ((torch, "save"), *also):
            replaced.enter_context(_replaced(where, name, keeping(getattr(where, name), where is torch)))
        try:
            yield
        except CheckpointError as error:
            everyones = error
        if kept:
            raise kept[0]
    if everyones is not None:
        raise everyones


@contextlib.contextmanager
def _replaced(where: Any, name: str, by: Any) -> Iterator[None]:
    own = vars(where).get(name)
    setattr(where, name, by)
    try:
        yield
    finally:
        if own is None:
            delattr(where, name)
        else:
            setattr(where, name, own)


def point_to(folder: Path, pointer: str, name: str, writes: bool) -> None:
    """Let the file ``pointer`` in ``folder`` name a checkpoint that is complete: on disk, and whole or not at all.

    Args:
        writes: whether this rank is the one that does it.
    """
    with together(f"pointing {folder / pointer} to {name}"):
        if writes:
            manifest.put_text(folder / pointer, name)


def checked_tag(folder: Path, tag: Any, doing: str) -> Path:
    """The folder of a DeepSpeed tag; on every rank the same error when it leads out of ``folder``."""
    with together(doing):
        return kinds.tag_folder(folder, tag)


def seal_after_saving(folder: Path, kind: str) -> None:
    """``find.seal``, unless it is turned off.

    Raises:
        CheckpointError: on every rank.
    """
    if seals():
        find.seal(folder, {"saved_by": kind})


def newest(folder: Path) -> Path | None:
    """``find.latest_valid``: looked for on rank 0, the same answer on every rank."""
    chosen: list[str | None] = [None]
    with together(f"looking for the newest checkpoint in {folder}"):
        if not dist.is_initialized() or dist.get_rank() == 0:
            found = find.latest_valid(folder)
            chosen = [None if found is None else str(found)]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen, src=0)
    return None if chosen[0] is None else Path(chosen[0])
