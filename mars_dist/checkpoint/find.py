"""Is a checkpoint complete and unchanged, and which is the newest one that is? For the folders of every engine.

``seal`` notes size and hash of every file of a finished folder; ``verify`` compares, or, where there is no such note,
checks what the files say of themselves and of each other; ``latest_valid`` takes the newest that passes, and names
every newer one that does not. Nothing is executed (``trust.py``).
"""

from __future__ import annotations

import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mars_dist.checkpoint import kinds, manifest, pickles, trust
from mars_dist.checkpoint.pickles import Window
from mars_dist.checkpoint.together import together
from mars_dist.versions import TESTED, installed

logger = logging.getLogger("mars_dist")

SEVERAL, UNKNOWN = "folder of checkpoints", "no checkpoint that is known"
ADDED_FREELY = {".md", ".txt", ".log", ".png", ".html"}  # what may be put beside a sealed checkpoint
NEVER_EMPTY = trust.PICKLED | {".safetensors", ".json"}


@dataclass
class Report:
    """What ``verify`` found. ``foreign``: pickles that do what no checkpoint needs. ``several``: of each one inside."""

    folder: Path
    kind: str
    sealed: bool = False
    compared: str = "structure"
    faults: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    several: list[Report] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        return not self.faults and not self.foreign

    def as_json(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``."""
        inner = {"several": [one.as_json() for one in self.several]} if self.several else {}
        return {
            "folder": str(self.folder),
            "kind": self.kind,
            "valid": self.valid,
            "sealed": self.sealed,
            "compared": self.compared,
            "faults": self.faults,
            "foreign": self.foreign,
            **inner,
        }

    def __str__(self) -> str:
        if self.kind == SEVERAL:
            head = f"{self.folder}: {len(self.several)} checkpoints"
        else:
            sealed = "sealed" if self.sealed else "not sealed"
            head = f"{self.folder}: {'valid' if self.valid else 'NOT VALID'} ({self.kind}; {sealed}; {self.compared})"
        return "\n".join([head, *(f"  {line}" for line in [*self.faults, *self.foreign])])


# ------------------------------------------------------------------------------------------------------------ seal


def seal(folder: Path, facts: Mapping[str, Any] | None = None, group: dist.ProcessGroup | None = None) -> int:
    """Write the manifest of a finished folder: size and SHA-256 of every file in it, at any depth.

    Where a process group runs, every rank calls it; rank r reads every W-th file, and rank 0 writes.

    Args:
        folder: one that every rank sees.
        facts: what else is known; versions of the libraries and the world size are noted in any case.

    Returns: the number of files.

    Raises:
        CheckpointError: on every rank when it fails on one (without a process group the error itself).
    """
    several = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if several else (0, 1)
    mine: dict[str, manifest.Record] = {}
    with together(f"sealing {folder}", group):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder, so there is nothing to seal")
    # From here on every rank has written what it had to write.
    with together(f"sealing {folder}", group):
        mine = {name: manifest.record(folder / name) for name in list(manifest.files_in(folder))[rank::ranks]}
        for name in mine:
            manifest.to_disk(folder / name)
    parts: list[dict[str, manifest.Record]] = [mine] * ranks
    if ranks > 1:
        dist.all_gather_object(parts, mine, group=group)
    files = {name: one for part in parts for name, one in part.items()}
    with together(f"sealing {folder}", group):
        if rank == 0:
            versions = {name: installed(name) for name in TESTED}
            manifest.write(folder, files, {"world_size": ranks, "versions": versions, **(facts or {})})
    return len(files)


# ---------------------------------------------------------------------------------------------------------- verify


def verify(folder: str | os.PathLike[str], trusted: bool = False, sealed: bool = True) -> Report:
    """What is wrong with a checkpoint, or with each checkpoint in a folder of them.

    A sealed folder is compared with its manifest. The structure is checked in any case: files that this kind needs by
    its own records, checksums in zip files, headers of safetensors, JSON, files without content.

    Args:
        trusted: say nothing about what pickles do (``MARS_DIST_TRUST_CHECKPOINT=1`` says the same).
        sealed: compare with the manifest where there is one.

    Raises:
        FileNotFoundError: when ``folder`` does not exist or is no folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist, or is no folder: give the folder of a checkpoint")
    kind = kinds.kind_of(folder)
    if kind is None:
        home = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
        inside = kinds.checkpoints_in(home)
        if inside:
            report = Report(folder, SEVERAL, faults=kinds.pointer_faults(home))
            report.several = [_verify_one(path, trusted, sealed) for path in inside]
            return report
    return _verify_one(folder, trusted, sealed)


def _verify_one(folder: Path, trusted: bool, sealed: bool) -> Report:
    kind = kinds.kind_of(folder)
    report = Report(folder, kind or UNKNOWN, sealed=(folder / manifest.NAME).is_file())
    files = trust.walk(folder)
    if kind is None:
        empty = "is empty" if not files else "holds nothing of a checkpoint that is known"
        report.faults.append(f"{folder} {empty}")
        return report
    if report.sealed and sealed:
        report.compared = "contents compared with the manifest"
        report.faults += manifest.faults(folder)
        report.faults += _added(folder, files) if not report.faults else []
    for finding in trust.findings(folder, files):
        if finding.damaged:
            report.faults.append(str(finding))
        elif not (trusted or trust.is_trusted()):
            report.foreign.append(str(finding))
    report.faults += [fault for file in files for fault in _file_faults(file)]
    report.faults += kinds.faults(kind, folder)
    report.faults = list(dict.fromkeys(report.faults))
    return report


def _added(folder: Path, files: list[Path]) -> Iterator[str]:
    known = set(manifest.read(folder)["files"]) | {manifest.NAME}
    for path in files:
        if path.relative_to(folder).as_posix() not in known and path.suffix.lower() not in ADDED_FREELY:
            yield f"{path} was added after the folder was sealed"


def _file_faults(path: Path) -> list[str]:
    """What a file says of itself: checksums in a zip file, the header of safetensors, JSON; a file without content."""
    try:
        if not path.is_file():
            return []
        suffix, size = path.suffix.lower(), path.stat().st_size
        if size == 0:
            return [f"{path} is empty"] if suffix in NEVER_EMPTY or path.name in kinds.POINTERS else []
        if suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif suffix == ".safetensors":
            _safetensors(path, size)
        elif path.name.endswith(trust.METADATA):
            _pieces(path)
        elif suffix in trust.PICKLED and suffix != trust.PIECES and trust.is_zip(path):
            with path.open("rb") as file:
                _zip(file)
    except pickles.NotAllowed:  # said by trust.findings
        return []
    except (OSError, MemoryError) as error:
        return [f"{path} cannot be read ({error})"]
    except Exception as error:  # json, zipfile and zlib have many kinds for a damaged file
        return [f"{path} is damaged ({type(error).__name__}: {str(error)[:120]})"]
    return []


def _zip(file: Any) -> None:
    with zipfile.ZipFile(file) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"the checksum of {bad} in it differs")


def _safetensors(path: Path, size: int) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError(f"its header should have {length} bytes, and the file has {size}")
        header = json.loads(file.read(length))
    spans = sorted(tuple(of["data_offsets"]) for name, of in header.items() if name != "__metadata__")
    end = 0
    for first, last in spans:
        if first != end or last < first:
            raise ValueError(f"byte {end} of its data belongs to no tensor, or to two")
        end = last
    if 8 + length + end != size:
        raise ValueError(f"its header speaks of {8 + length + end} bytes, and it has {size}")


def _pieces(path: Path) -> None:
    """The checksums in each piece of the files that a ``.metadata`` of DCP names."""
    with path.open("rb") as file:
        metadata = pickles.read(file, strict=False)
    if not isinstance(metadata, pickles.Made):  # said by trust.findings
        return
    for name, offset, length in sorted(set(trust.pieces(metadata))):
        if (path.parent / name).is_file():  # else said before
            with (path.parent / name).open("rb") as file:
                window = Window(file, offset, offset + length)
                if trust.is_zip(window):
                    try:
                        _zip(window)
                    except Exception as error:
                        raise ValueError(f"a piece of {name}, at byte {offset}: {error}") from error


# ---------------------------------------------------------------------------------------------------------- newest


def latest_valid(
    folder: str | os.PathLike[str], say: Callable[[str], Any] = logger.warning, trusted: bool = False
) -> Path | None:
    """The newest checkpoint in ``folder`` (by the number in its name) that ``verify`` finds no fault with, or None.

    Every newer one is named with its reason by ``say``. ``folder`` may be one checkpoint, or a run of ``mars-dist
    train``. What files like DeepSpeed's ``latest`` say does not count; one that leads out of the folder is named.

    Raises:
        FileNotFoundError: when ``folder`` does not exist or is no folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist, or is no folder: give the folder of the checkpoints")
    one = kinds.kind_of(folder) is not None
    home = folder / "checkpoints" if not one and (folder / "checkpoints").is_dir() else folder
    for fault in [] if one else kinds.pointer_faults(home):
        say(fault)
    for path in [folder] if one else kinds.checkpoints_in(home):
        report = _verify_one(path, trusted, sealed=True)
        if report.valid:
            return path
        wrong = [*report.faults, *report.foreign]
        more = f" (and {len(wrong) - 1} more faults)" if len(wrong) > 1 else ""
        say(f"{path} is passed over: {wrong[0]}{more}")
    return None
