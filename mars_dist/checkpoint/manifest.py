"""What is in a checkpoint's folder: a JSON file with the size and the hash of every other file, written last."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

NAME = "mars_dist_manifest.json"
FORMAT = 1
BLOCK = 1 << 22  # bytes


@dataclass(frozen=True)
class Record:
    """Of one file: its size in bytes, and the SHA-256 of its content in hexadecimal."""

    size: int
    sha256: str


def record(path: Path) -> Record:
    """Read ``path`` for its record."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return Record(size, digest.hexdigest())


def files_in(folder: Path) -> Iterator[str]:
    """The files in ``folder``, at any depth, by their paths from there; the manifest itself is left out."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (name := path.relative_to(folder).as_posix()) != NAME:
            yield name


def write(folder: Path, files: Mapping[str, Record], facts: Mapping[str, Any]) -> None:
    """Write the manifest of ``folder`` so that it is on disk whole or not at all.

    Args:
        files: every file that belongs to the checkpoint, by its path from ``folder``.
        facts: what else is known of it (world size, variant, versions, ...); JSON values by names that are no field.
    """
    text = json.dumps(
        {"format": FORMAT, **facts, "files": {name: asdict(files[name]) for name in sorted(files)}}, indent=1
    )
    put_text(folder / NAME, text)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of ``folder``: its facts, ``"format"``, and under ``"files"`` a ``Record`` for each file.

    Raises:
        FileNotFoundError: when there is none: the folder is half written, or was never sealed.
        ValueError: when it is damaged, of a newer format, or names a file outside of ``folder``.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format"]
        known = content["files"] if version == FORMAT else {}  # another format may list them in another way
        files = {str(name): Record(int(of["size"]), str(of["sha256"])) for name, of in known.items()}
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} has no {NAME}: it is half written, or was never sealed") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if version != FORMAT:
        raise ValueError(
            f"{path} has format {version!r}, and this version of mars_dist reads {FORMAT}: update mars_dist"
        )
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or name == NAME:
            raise ValueError(f"{path} is damaged: it names {name!r}, which is no file in that folder")
    return {**content, "files": files}


def faults(folder: Path, contents: bool = True) -> list[str]:
    """What is wrong with ``folder``, a sentence for each file that is missing, of another size or of other content.

    Args:
        contents: read every file and compare its hash; without it only sizes are compared.
    """
    try:
        files: dict[str, Record] = read(folder)["files"]
    except (OSError, ValueError) as error:
        return [str(error)]
    found = []
    for name, expected in files.items():
        path = folder / name
        try:
            if not path.is_file():
                found.append(f"{path} is missing")
            elif (size := path.stat().st_size) != expected.size:
                found.append(f"{path} has {size} bytes, and {expected.size} were written")
            elif contents and record(path).sha256 != expected.sha256:
                found.append(f"{path} has another content than was written (its SHA-256 differs)")
        except OSError as error:  # no permission, a bad disk, a name that is too long
            found.append(f"{path} cannot be read ({error})")
    return found


def put_text(path: Path, text: str) -> None:
    """Write a small file, or another one in its place, so that it is on disk whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    to_disk(path.parent)


def to_disk(path: Path) -> None:
    """fsync of a file or a folder: a name that survives a power cut must not do so without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
