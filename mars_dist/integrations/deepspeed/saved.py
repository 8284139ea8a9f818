"""Folders of ``DeepSpeedEngine.save_checkpoint``: tags stay inside, pickles are checked before they are loaded, a seal.

DeepSpeed unpickles whatever the files of a tag hold (43 of its ``torch.load`` say ``weights_only=False``), and takes
any path for a tag.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mars_dist.checkpoint import around, kinds, trust


def check_before_loading(engine: Any, folder: Path, tag: Any) -> None:
    """Before ``load_checkpoint`` opens a file: the same error on every rank.

    Raises:
        CheckpointError: when the tag leads out of ``folder``, or its pickles do more than checkpoints need (without a
            process group ``ValueError``).
    """

    def where() -> Path | None:
        if tag is not None:
            return kinds.tag_folder(folder, tag)
        pointer = folder / ("latest_universal" if engine.load_universal_checkpoint() else "latest")
        if not pointer.is_file():
            return None  # DeepSpeed says so
        return kinds.tag_folder(folder, pointer.read_text(encoding="utf-8").strip())

    around.check_before_loading(where, shared=not engine.use_node_local_storage())


def save(original: Callable[..., Any], engine: Any, given: inspect.BoundArguments) -> Any:
    """``save_checkpoint``: what fails on one rank is raised on all, and ``latest`` is written last, after the seal.

    DeepSpeed itself leaves the other ranks waiting when one cannot write, and points to what it has not written.

    Raises:
        CheckpointError: when the tag leads out of the folder (nothing is written then), or a rank could not write.
    """
    home, tag = given.arguments.get("save_dir"), given.arguments.get("tag")
    if not home or engine.checkpoint_engine.is_decoupled():  # DeepSpeed raises by itself; the files come later
        if home:
            _folder_of(engine, Path(home), tag)
        return original(*given.args, **given.kwargs)
    folder = _folder_of(engine, Path(home), tag)
    is_first = (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0
    with around.together(f"making {folder}"):
        if is_first:
            folder.mkdir(parents=True, exist_ok=True)
    points = given.arguments.get("save_latest", True)
    given.arguments["save_latest"] = False
    with around.saving_together(f"saving {folder}", (engine.checkpoint_engine, "save")):
        result = original(*given.args, **given.kwargs)
    if not engine.use_node_local_storage():  # else each node has a folder of its own
        around.seal_after_saving(folder, "DeepSpeed")
    if points:
        around.point_to(Path(home), "latest", folder.relative_to(home).as_posix(), engine.global_rank == 0)
    return result


def _folder_of(engine: Any, home: Path, tag: Any) -> Path:
    tag = f"global_step{engine.global_steps}" if tag is None else tag
    return around.checked_tag(home, tag, f"saving {tag!r} in {home}")


def check_whole(folder: Path, tag: str, trusted: bool = False) -> None:
    """Before DeepSpeed's ``zero_to_fp32`` reads a tag on one process.

    Raises:
        ValueError: see ``trust.check``.
    """
    trust.check(kinds.tag_folder(folder, tag), trusted)
