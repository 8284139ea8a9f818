"""A run's checkpoints: which one it goes on from, and what is the application's in them.

How a folder is written so that it is complete or not there is in ``mars_dist.checkpoint``; what an engine saves is in
``engine.py``. The data position is the step: a sequence is found by its number, on any number of ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mars_dist.checkpoint import manifest, tensors
from mars_dist.checkpoint.asynchronous import Saver
from mars_dist.checkpoint.attempt import everyones
from mars_dist.checkpoint.folder import NAME, complete, latest, save, step_of, tidy
from mars_dist.checkpoint.tensors import Chunk, Reader
from mars_dist.checkpoint.together import together

if TYPE_CHECKING:
    from mars_dist.pretrain.engine import Plain, ZeRO
    from mars_dist.pretrain.recipe import Checkpoint

__all__ = ["Checkpoints", "complete", "facts_of", "latest", "newest_valid", "restore", "step_of", "tidy"]

logger = logging.getLogger("mars_dist")

FACTS, SETTINGS = "run", "settings"
RANDOM = "random"  # a folder


class Checkpoints:
    """Saves as the recipe says; every rank calls every method, in the same order.

    Args:
        facts: what a resumed run must agree with.
    """

    def __init__(self, folder: Path, how: Checkpoint, facts: Mapping[str, Any]) -> None:
        self.folder, self.how, self.facts = folder, how, {FACTS: dict(facts)}
        self._saver = Saver(folder, how.keep_last, how.keep_every) if how.asynchronous else None

    def save(self, step: int, engine: Plain | ZeRO) -> None:
        """With ``asynchronous`` this returns when the tensors are copied: see ``finish``."""
        chunks = engine.chunks()
        metadata = {SETTINGS: json.dumps(engine.settings_to_save())}
        if self._saver is not None:
            self._saver.save(step, self.facts, chunks, metadata, also=_write_random_states)
            return
        rank, size = _rank_and_size()
        name = tensors.file_name(rank, size)

        def write(folder: Path) -> dict[str, manifest.Record]:
            engine.save_by_itself(folder)
            return {name: tensors.write(folder / name, chunks, metadata), **_write_random_states(folder)}

        bytes_of_all = sum(chunk.nbytes for chunk in chunks)
        how = self.how
        save(self.folder, step, self.facts, write, how.keep_last, keep_every=how.keep_every, size=bytes_of_all)

    @property
    def is_written(self) -> bool:
        """Whether this rank has written in the background what ``finish`` would make visible."""
        return self._saver is not None and self._saver.under_way is not None and self._saver.written

    def finish(self) -> None:
        """Wait for what is written in the background, and make it visible."""
        if self._saver is not None:
            self._saver.wait()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._saver is not None:
            self._saver.__exit__(kind, error, at)


def newest_valid(folder: Path) -> Path | None:
    """The newest checkpoint that is as it was written, or None when there is none. Damaged ones are named.

    The ranks share the reading: every file's hash is compared once.

    Raises:
        ValueError: when the ranks do not see the same folder, or all checkpoints in it are damaged.
    """
    rank, size = _rank_and_size()
    names: list[str] = []
    with together(f"looking for checkpoints in {folder}"):
        found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
        names = [path.name for path in sorted(found, key=step_of) if (path / manifest.NAME).is_file()]
        for path in found if rank == 0 else ():
            if path.name not in names:
                logger.warning("%s has no %s: half written, or not of a run; passed over", path, manifest.NAME)
    seen = everyones(names, None)
    if any(theirs != seen[0] for theirs in seen):
        steps = sorted({step_of(Path(theirs[-1])) if theirs else 0 for theirs in seen})
        raise ValueError(f"ranks see different checkpoints, of steps {steps}: --out must be one folder for all of them")
    faults: list[str] = []
    for name in reversed(names):
        mine: list[str] = []
        with together(f"reading {folder / name}"):
            mine = _faults(folder / name, rank, size)
        here = [fault for theirs in everyones(mine, None) for fault in theirs]
        if not here:
            return folder / name
        faults.append(f"{name} is damaged and passed over: {here[0]}")
        if rank == 0:
            logger.warning("%s", faults[-1])
    if faults:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {'; '.join(faults)}. Put one back from a copy, choose another --out, "
            "or --fresh to start over"
        )
    return None


def _faults(checkpoint: Path, rank: int, size: int) -> list[str]:
    """Of the sizes on rank 0, and of the contents of this rank's share of the files."""
    if (rank == 0 or size == 1) and (found := manifest.faults(checkpoint, contents=False)):
        return found
    try:
        files = manifest.read(checkpoint)["files"]
    except ValueError:
        return []  # rank 0 has said so
    mine = sorted(files)[rank::size]
    return [
        f"{checkpoint / name} has another content than was written (its SHA-256 differs)"
        for name in mine
        if (checkpoint / name).is_file() and manifest.record(checkpoint / name).sha256 != files[name].sha256
    ]


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """What the run of this checkpoint was."""
    facts = manifest.read(checkpoint).get(FACTS)
    if not isinstance(facts, dict):
        raise ValueError(f"{checkpoint} was not written by mars-dist train: choose another --out")
    return facts


def restore(checkpoint: Path, engine: Plain | ZeRO) -> None:
    """Model, optimizer and random states as they were.

    Raises:
        CheckpointError: on every rank, when one cannot read its part.
    """
    with together(f"loading {checkpoint}"):
        reader = Reader(checkpoint)
        settings = json.loads(next(iter(reader.metadata.values()))[SETTINGS])
    engine.load(checkpoint, reader, settings)
    with together(f"loading {checkpoint}"):
        _restore_random_states(checkpoint)


def _write_random_states(folder: Path) -> dict[str, manifest.Record]:
    """Those of this rank, apart from what the optimizer is to load."""
    rank, size = _rank_and_size()
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    chunks = [Chunk(f"{rank}/{device}", tuple(state.shape), 0, state) for device, state in states.items()]
    name = f"{RANDOM}/{tensors.file_name(rank, size)}"
    (folder / RANDOM).mkdir(exist_ok=True)
    return {name: tensors.write(folder / name, chunks)}


def _restore_random_states(checkpoint: Path) -> None:
    """The generators as they were; a rank that the saved run did not have keeps its own."""
    reader, (rank, _) = Reader(checkpoint / RANDOM), _rank_and_size()
    names = reader.names()
    if f"{rank}/cpu" in names:
        torch.set_rng_state(reader.whole(f"{rank}/cpu"))
    if f"{rank}/cuda" in names and torch.cuda.is_available():
        torch.cuda.set_rng_state(reader.whole(f"{rank}/cuda"))


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
