"""The checkpoints of a run: a folder for each, complete or not there.

All ranks write into a folder with a temporary name. When every part is on disk, rank 0 writes the manifest, renames the
folder and, last, points ``latest`` to it. Whatever fails or is killed in between, what was complete before stays so.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mars_dist import versions
from mars_dist.checkpoint import manifest, tensors
from mars_dist.checkpoint.attempt import attempt, everyones
from mars_dist.checkpoint.manifest import Record
from mars_dist.checkpoint.system import change_places
from mars_dist.checkpoint.tensors import Chunk

logger = logging.getLogger("mars_dist")

LATEST = "latest"  # for people and other programs: what counts here is the newest folder that is complete
NAME = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(rf"\.({NAME.pattern}|{LATEST})\.(tmp|aside)")
GIVEN = {"format", "files", "step", "world_size", "versions"}  # what the manifest says by itself

Write = Callable[[Path], Mapping[str, Record] | None]


def save(
    folder: Path,
    step: int,
    facts: Mapping[str, Any],
    write: Write,
    keep_last: int,
    *,
    keep_every: int | None = None,
    size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save the checkpoint of ``step``; every rank of the group calls it. Then remove the ones that are not kept.

    Args:
        folder: where the run keeps its checkpoints; one and the same folder for all ranks.
        facts: JSON values for the manifest, such as what a resumed run must agree with.
        write: called on every rank with the temporary folder. It returns the records of the files that were hashed
            while they were written (``tensors.write``), by path from there; all other files are read once for theirs,
            shared out over the ranks. It may hold collectives (an engine's own saving), but a rank that fails before
            one leaves the others waiting to the end of the process group's timeout.
        keep_last: how many stay, of this one and those of earlier steps; later ones, which a run has gone back behind,
            stay until their steps are saved again.
        keep_every: checkpoints of steps divisible by it stay for ever.
        size: the bytes that this rank will write, if known: whether they fit is then asked before anything is touched.

    Returns: the checkpoint's folder.

    Raises:
        CheckpointError: on every rank with the same text, which says what to do.
    """
    saving = Saving(folder, step, facts, keep_last, keep_every, process_group)
    saving.begin(size)
    records: Mapping[str, Record] | None = None
    with saving.attempt():
        records = write(saving.temporary)
    return saving.commit(records)


def part(
    chunks: Iterable[Chunk],
    metadata: Mapping[str, str] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Write:
    """A ``write`` for ``save``: this rank's chunks as its one file."""
    rank, world_size = _rank_and_size(process_group)
    name = tensors.file_name(rank, world_size)
    return lambda folder: {name: tensors.write(folder / name, chunks, metadata)}


class Saving:
    """One checkpoint on its way: ``begin``, the writing of every rank, ``commit``. Both are collectives.

    Attributes:
        temporary: where to write.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        facts: Mapping[str, Any],
        keep_last: int,
        keep_every: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not _counts(step, 0):
            raise ValueError(f"step is {step!r}: the number of a step is needed, 0 or more, as an int")
        if not _counts(keep_last, 1) or not (keep_every is None or _counts(keep_every, 1)):
            raise ValueError(f"keep_last is {keep_last!r} and keep_every {keep_every!r}: both count from 1, as an int")
        if taken := sorted(GIVEN & facts.keys()):
            raise ValueError(f"facts has {taken}, which the manifest says by itself: choose other names")
        self.folder, self.step, self.keep_last, self.keep_every = Path(folder).absolute(), step, keep_last, keep_every
        self.group = process_group
        self.rank, self.world_size = _rank_and_size(process_group)
        libraries = {name: versions.installed(name) for name in ("mars_dist", "torch")}
        self.facts = {"step": step, "world_size": self.world_size, "versions": libraries, **facts}
        self.name = f"step-{step:08d}"
        self.temporary, self.final = self.folder / f".{self.name}.tmp", self.folder / self.name

    def attempt(self) -> Any:
        """Around what one rank may fail at: all ranks raise, nothing half written stays."""
        return attempt(f"saving {self.name}", self._abandon, self.group)

    def begin(self, size: int | None = None) -> None:
        """Make the temporary folder; see ``save``."""
        sizes = everyones(size, self.group)
        with self.attempt():
            if self.rank == 0:
                known = [one for one in sizes if one is not None]
                if len(known) == len(sizes):
                    _refuse_full(self.folder, sum(known))
                _remove(self.temporary)  # of a save that failed and could not tidy up
                new = not self.folder.is_dir()
                self.temporary.mkdir(parents=True)
                if new:
                    manifest.to_disk(self.folder.parent)
        if self.world_size > 1:
            with self.attempt():  # before somebody's collectives
                if not self.temporary.is_dir():
                    raise FileNotFoundError(f"{self.folder} is not the folder of rank 0: give one that all ranks see")
                probe = self.temporary / f".probe-{self.rank}"
                probe.touch()
                probe.unlink()

    def commit(self, records: Mapping[str, Record] | None) -> Path:
        """Make the checkpoint that all ranks have written complete and visible; see ``save``."""
        written = everyones(dict(records or {}), self.group)
        sizes: dict[str, int] = {}
        with self.attempt():
            if self.rank == 0:
                sizes = {name: (self.temporary / name).stat().st_size for name in manifest.files_in(self.temporary)}
                _refuse_wrong(written, sizes)
        sizes = everyones(sizes, self.group)[0]
        files = {name: of for given in written for name, of in given.items()}
        mine = _share({name: size for name, size in sizes.items() if name not in files}, self.rank, self.world_size)
        read: dict[str, Record] = {}
        with self.attempt():
            for name in (*mine, *written[self.rank]):
                manifest.to_disk(self.temporary / name)
            read = {name: manifest.record(self.temporary / name) for name in mine}
        for more in everyones(read, self.group):
            files |= more
        with self.attempt():
            if self.rank == 0:
                self._complete(files)
        return self.final

    def _complete(self, files: Mapping[str, Record]) -> None:
        for path in sorted(self.temporary.rglob("*")):
            if path.is_dir():
                manifest.to_disk(path)
        manifest.write(self.temporary, files, self.facts)
        _put_in_place(self.temporary, self.final)
        manifest.to_disk(self.folder)
        manifest.put_text(self.folder / LATEST, self.name)
        try:
            _rotate(self.folder, self.step, self.keep_last, self.keep_every)
        except OSError as error:
            logger.warning("%s is saved; an older checkpoint could not be removed: %s", self.final, error)

    def _abandon(self) -> str:
        """On rank 0, after an error: what is said of the other checkpoints."""
        _try_to_remove(self.temporary)
        _try_to_remove(self.folder / f".{LATEST}.tmp")
        newest = latest(self.folder)
        return f"the newest checkpoint is {newest}" if newest else f"there is no checkpoint in {self.folder}"


def complete(folder: Path) -> list[Path]:
    """The finished checkpoints, oldest first: every file of the manifest is there with its size; none is read."""
    found = folder.iterdir() if folder.is_dir() else ()
    named = (path for path in found if NAME.fullmatch(path.name))
    return sorted((path for path in named if not manifest.faults(path, contents=False)), key=step_of)


def latest(folder: Path) -> Path | None:
    """The newest finished checkpoint, or None. Hashes are not compared: that is what ``latest_valid`` does."""
    found = complete(folder)
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(checkpoint.name.split("-")[1])


def tidy(folder: Path, everything: bool) -> None:
    """Remove what was half written when a process was killed; with ``everything`` all checkpoints of a run, too.

    Only while nobody saves. A folder without a manifest is somebody else's and stays. Where two folders could not
    change places at once, a checkpoint that was to be replaced by one of the same step comes back: so call it before
    ``latest``.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if TEMPORARY.fullmatch(path.name):
            final = folder / path.name.split(".")[1]
            if path.suffix == ".aside" and not final.exists():  # killed between two renames
                path.rename(final)
            else:
                _remove(path)
    for path in list(folder.iterdir()) if everything and folder.is_dir() else ():
        if path.name == LATEST or (NAME.fullmatch(path.name) and (path / manifest.NAME).is_file()):
            _remove(path)


# ---- parts of a save


def _rank_and_size(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def _refuse_full(folder: Path, needed: int) -> None:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free; nothing was written", str(existing)
        )


def _refuse_wrong(written: list[dict[str, Record]], sizes: Mapping[str, int]) -> None:
    """Records of files that are not there, or that two ranks have written."""
    seen: dict[str, int] = {}
    for rank, records in enumerate(written):
        for name, of in records.items():
            if name in seen:
                raise ValueError(f"ranks {seen[name]} and {rank} have both written {name}")
            if sizes.get(name) != of.size:
                raise ValueError(f"rank {rank} has written {name} with {of.size} bytes, and it has {sizes.get(name)}")
            seen[name] = rank


def _share(sizes: Mapping[str, int], rank: int, world_size: int) -> list[str]:
    """Which of these files this rank reads: the largest first, each to who has the least."""
    loads, mine = [0] * world_size, []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        loads[least] += sizes[name] + 1
        if least == rank:
            mine.append(name)
    return mine


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename; a checkpoint of the same step changes places with the new one, at once where the system can do that."""
    if not os.path.lexists(final):
        os.rename(temporary, final)
        return
    if change_places(temporary, final):
        _try_to_remove(temporary)
        return
    aside = final.with_name(f".{final.name}.aside")
    _remove(aside)
    os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except OSError:
        os.rename(aside, final)
        raise
    _try_to_remove(aside)


def _counts(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _rotate(folder: Path, step: int, keep_last: int, keep_every: int | None) -> None:
    """``step`` was saved just now. Later ones are no reason to remove it, or those before: a run that has gone back
    behind damaged checkpoints would lose the only whole ones."""
    for old in [path for path in complete(folder) if step_of(path) <= step][:-keep_last]:
        if keep_every is None or step_of(old) % keep_every:
            hidden = old.with_name(f".{old.name}.tmp")  # never half removed under its own name
            _remove(hidden)
            os.rename(old, hidden)
            _remove(hidden)


def _remove(path: Path) -> None:
    """A folder or a file, there or not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _try_to_remove(path: Path) -> None:
    try:
        _remove(path)
    except OSError as error:
        logger.warning("%s could not be removed (%s): `tidy` does it later", path, error)
