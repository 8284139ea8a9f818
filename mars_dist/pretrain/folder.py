"""The folder of a run: whose it is, and that only one training writes into it."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mars_dist.pretrain.metrics import FILE as METRICS
from mars_dist.pretrain.world import World

LOCK = ".lock"
RECIPE = "recipe.yaml"
WRITTEN = (METRICS, RECIPE, "tensorboard", "checkpoints")


@contextmanager
def claimed(out: Path, world: World) -> Iterator[None]:
    """Make ``out`` and hold it to the end of the block, for all ranks; rank 0 keeps the lock.

    Raises:
        ValueError: on every rank, when somebody else's files are in it, or another training writes into it.
    """
    lock, fault = None, ""
    if world.rank == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
            fault = foreign(out)
        except OSError as error:
            fault = f"--out {out} cannot be used: {error.strerror}"
        if not fault:
            lock = (out / LOCK).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                fault = f"another mars-dist train writes into {out}: wait for it, or choose another --out"
    refused = world.gather([float(bool(fault))])[0][0]
    try:
        if refused:
            raise ValueError(fault or f"rank 0 cannot use {out}: see its message")
        yield
    finally:
        if lock is not None:
            lock.close()


def foreign(out: Path) -> str:
    """What is wrong when ``out`` holds files of the names that a run writes, but not of a run; else ""."""
    present = [name for name in WRITTEN if (out / name).exists()]
    if not present or _is_a_runs(out):
        return ""
    return f"{out} holds {present[0]}, which is not of mars-dist train: choose another --out"


def _is_a_runs(out: Path) -> bool:
    try:
        with (out / METRICS).open(encoding="utf-8") as lines:
            return "run" in json.loads(lines.readline())
    except FileNotFoundError:  # killed before its first line, or somebody has moved the curve away
        return (out / LOCK).exists()
    except (ValueError, TypeError):
        return False


def keep_recipe(out: Path, text: str, step: int) -> None:
    """Write the resolved recipe; the one of an earlier part of the run stays beside it under another name."""
    path = out / RECIPE
    if step and path.exists() and path.read_text(encoding="utf-8") != text:
        path.rename(out / f"recipe-before-step-{step}.yaml")
    path.write_text(text, encoding="utf-8")
