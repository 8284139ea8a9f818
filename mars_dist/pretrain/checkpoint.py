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

LATEST = "latest"
RUN_FILE = "run.json"
NAME = re.compile(r"step-(\d{8})")


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def save(folder: Path, step: int, facts: dict[str, Any], write: Callable[[Path], None], keep_last: int) -> Path:
    """Write the checkpoint of ``step`` with ``write(folder)`` on every rank; then remove all but the last ones.

    Args:
        folder: where the run keeps its checkpoints.
        facts: goes to ``run.json`` in it: what a resumed run must agree with.
    """
    name = f"step-{step:08d}"
    temporary, final = folder / f".{name}.tmp", folder / name
    if is_first():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier()
    write(temporary)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.save(rng_states(), temporary / f"rng-{rank}.pt")
    barrier()
    if is_first():
        (temporary / RUN_FILE).write_text(json.dumps({"step": step, **facts}, indent=2))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        pointer = folder / f".{LATEST}.tmp"
        pointer.write_text(name)
        os.replace(pointer, folder / LATEST)
        for old in complete(folder)[:-keep_last] if keep_last else []:
            shutil.rmtree(old, ignore_errors=True)
    barrier()
    return final


def complete(folder: Path) -> list[Path]:
    """The finished checkpoints, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if NAME.fullmatch(path.name) and (path / RUN_FILE).is_file())


def latest(folder: Path) -> Path | None:
    """The newest finished checkpoint, or None."""
    found = complete(folder)
    return found[-1] if found else None


def facts_of(checkpoint: Path) -> dict[str, Any]:
    return dict(json.loads((checkpoint / RUN_FILE).read_text()))


def rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_rng(checkpoint: Path) -> None:
    """The generators as they were; a rank that the saved run did not have keeps its own."""
    file = checkpoint / f"rng-{dist.get_rank() if dist.is_initialized() else 0}.pt"
    if file.exists():
        states = torch.load(file, weights_only=True)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
