"""Folders of ``DeepSpeedEngine.save_checkpoint``: tags stay inside, pickles are checked before they are loaded, a seal.

DeepSpeed unpickles whatever the files of a tag hold (43 of its ``torch.load`` say ``weights_only=False``), and takes
any path for a tag.
"""

from __future__ import annotations

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


def folder_to_save(engine: Any, folder: Any, tag: Any) -> Path | None:
    """The folder that ``save_checkpoint`` will write; None where it will raise by itself.

    Raises:
        CheckpointError: when the tag leads out of ``folder``: nothing is written then.
    """
    if not folder:
        return None
    tag = f"global_step{engine.global_steps}" if tag is None else tag
    return around.checked_tag(Path(folder), tag, f"saving {tag!r} in {folder}")


def seal(engine: Any, folder: Path | None) -> None:
    """After ``save_checkpoint``; not where each node has a folder of its own, or the files are still being written."""
    if folder is not None and not engine.use_node_local_storage() and not engine.checkpoint_engine.is_decoupled():
        around.seal_after_saving(folder, "DeepSpeed")


def check_whole(folder: Path, tag: str, trusted: bool = False) -> None:
    """Before DeepSpeed's ``zero_to_fp32`` reads a tag on one process.

    Raises:
        ValueError: see ``trust.check``.
    """
    trust.check(kinds.tag_folder(folder, tag), trusted)
