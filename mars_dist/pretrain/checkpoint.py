"""A run's checkpoints: a folder for each, written under a temporary name and renamed, and a pointer written last."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LATEST = "latest"  # for people and other programs: what counts here is the newest folder that is complete
RUN_FILE = "run.json"
NAME = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(rf"\.({NAME.pattern}|{LATEST})\.tmp")


def save(folder: Path, step: int, facts: dict[str, Any], write: Callable[[Path], None], keep_last: int) -> Path:
    """Write the checkpoint of ``step`` with ``write(folder)`` on every rank; then remove all but the last ones.

    What an earlier process left half written must be gone: see ``tidy``.

    Args:
        folder: where the run keeps its checkpoints; one and the same folder for all ranks.
        facts: goes to ``run.json`` in it: what a resumed run must agree with.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    name = f"step-{step:08d}"
    temporary, final = folder / f".{name}.tmp", folder / name
    if rank == 0:
        temporary.mkdir(parents=True)
    _barrier()
    write(temporary)
    torch.save(_rng_states(), temporary / f"rng-{rank}.pt")
    _barrier()
    if rank == 0:
        (temporary / RUN_FILE).write_text(json.dumps({"step": step, **facts}, indent=2))
        for path in sorted(temporary.rglob("*")) + [temporary]:
            _to_disk(path)
        _remove(final)
        temporary.rename(final)
        pointer = folder / f".{LATEST}.tmp"
        pointer.write_text(name)
        os.replace(pointer, folder / LATEST)
        _to_disk(folder)
        for old in complete(folder)[:-keep_last]:
            _remove(old)
    _barrier()
    return final


def complete(folder: Path) -> list[Path]:
    """The finished checkpoints, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(filter(_is_checkpoint, found), key=step_of)


def _is_checkpoint(path: Path) -> bool:
    return NAME.fullmatch(path.name) is not None and (path / RUN_FILE).is_file()


def latest(folder: Path) -> Path | None:
    """The newest finished checkpoint, or None."""
    found = complete(folder)
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def facts_of(checkpoint: Path) -> dict[str, Any]:
    try:
        facts = json.loads((checkpoint / RUN_FILE).read_text())
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise ValueError(
            f"{checkpoint / RUN_FILE} is damaged: remove {checkpoint}, and the run goes on from the one before"
        )
    return facts


def tidy(folder: Path, everything: bool) -> None:
    """Remove what was half written when a process was killed; with ``everything`` the finished checkpoints, too."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if TEMPORARY.fullmatch(path.name) or (everything and (path.name == LATEST or _is_checkpoint(path))):
            _remove(path)


def restore_rng(checkpoint: Path) -> None:
    """The generators as they were; a rank that the saved run did not have keeps its own."""
    file = checkpoint / f"rng-{dist.get_rank() if dist.is_initialized() else 0}.pt"
    if file.exists():
        states = torch.load(file, weights_only=True)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _remove(path: Path) -> None:
    """A folder or a file, there or not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    """A name that survives a power cut must not do so without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
