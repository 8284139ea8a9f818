"""Where documents come from: files, a Hugging Face data set, the shipped text.

A source yields chunks: some documents and the position behind them. A position is plain JSON; given back to `chunks`,
reading goes on with the next document. That is how `prepare` continues after it was killed.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mars_dist.pretrain.data import TEXT_SHA256, shakespeare
from mars_dist.pretrain.readers import COMPRESSIONS, FORMATS, Options, PrepareError, documents, kind, text_of
from mars_dist.pretrain.shards import INDEX, PROGRESS

SHIPPED = "shipped"  # the name of the text that ships with the package
DATASET = "hf:"  # before the name of a Hugging Face data set
CHUNK = 1 << 19  # characters: what one worker gets at a time; a longer document is a chunk of its own
CHUNK_DOCUMENTS = 4096  # so that empty documents do not gather without end
HEAD = 1 << 16  # bytes at the start and the end of a file that its fingerprint covers
OURS = re.compile(r"(index|progress)\.json(\.tmp)?|(train|val)-\d{5,}\.bin(\.tmp)?")  # what `prepare` writes
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}

Position = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """Documents that follow one another, the position behind the last one, and where they are, for messages."""

    texts: list[str]
    position: Position
    where: str


class Source(Protocol):
    """Documents in an order that never changes.

    left_out: why files of the folders that were asked for are not read, and how many, for people.
    """

    left_out: dict[str, int]

    def describe(self) -> dict[str, Any]:
        """Plain JSON that two sources share only if they give the same documents; "path" is for people."""
        ...

    def chunks(self, start: Position | None = None) -> Iterator[Chunk]:
        """All documents behind `start` (None: from the first). Raises PrepareError naming file and place."""
        ...


def open_source(
    where: str | Path | Sequence[str | Path],
    *,
    field: str = "text",
    separator: str | None = None,
    errors: str = "strict",
    form: str | None = None,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
) -> Source:
    """A source of documents.

    where: "shipped" (the text in the package), "hf:NAME" (a Hugging Face data set, streamed; NAME may be a local
        folder), or a file, a folder (all files below it whose names are known, in their order) or a glob pattern, or
        a list of these three, read in the order given. In a list, and as a Path, "shipped" is a file or folder.
    field: JSON lines and Parquet: the key or column that holds the text.
    separator: .txt: the text that ends a document, \\n, \\t, \\r and \\\\ in it standing for what they do in Python, so
        that a shell can give them; None: each file is one document.
    errors: "strict" refuses what is not UTF-8, "replace" puts U+FFFD there.
    form: "txt", "jsonl" or "parquet" for files whose names do not say it.
    config, split, revision: of a Hugging Face data set, as in `datasets.load_dataset`.

    Raises PrepareError if nothing is there or an option makes no sense.
    """
    if separator is not None:
        separator = re.sub(r"\\([ntr\\])", lambda found: ESCAPES[found[1]], separator)
    options = Options(field=field, separator=separator, errors=errors)
    if form is not None and form not in set(FORMATS.values()):
        raise PrepareError(f"--format {form!r} is not known; there are {', '.join(sorted(set(FORMATS.values())))}")
    if where == SHIPPED:
        return ShippedText()
    if isinstance(where, str) and where.startswith(DATASET):
        return DatasetSource(where.removeprefix(DATASET), config, split, revision, field)
    wheres = [str(where)] if isinstance(where, str | Path) else [str(one) for one in where]
    return FilesSource(wheres, options, form)


class _Filling:
    """Documents gathered until they are enough for a chunk."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.characters = 0

    def add(self, text: str) -> bool:
        """Whether that is enough."""
        self.texts.append(text)
        self.characters += len(text)
        return self.characters >= CHUNK or len(self.texts) >= CHUNK_DOCUMENTS

    def take(self) -> list[str]:
        texts, self.texts, self.characters = self.texts, [], 0
        return texts


class ShippedText:
    """The 42 works that ship with the package."""

    def __init__(self) -> None:
        self.left_out: dict[str, int] = {}

    def describe(self) -> dict[str, Any]:
        return {"kind": "shipped text", "sha256": TEXT_SHA256}

    def chunks(self, start: Position | None = None) -> Iterator[Chunk]:
        first = start["documents"] if start else 0
        for number, text in enumerate(shakespeare()[first:], first + 1):
            yield Chunk([text], {"documents": number}, f"the shipped text, work {number}")


class FilesSource:
    """Files, of a folder or pattern in the order of their names; which ones is decided when the source is made."""

    def __init__(self, wheres: Sequence[str], options: Options, form: str | None = None) -> None:
        if not wheres:
            raise PrepareError("no source is given")
        self.wheres, self.options = wheres, options
        found: dict[Path, _File] = {}  # a file that was named twice is read once
        left_out: Counter[str] = Counter()
        for where in wheres:
            for file in _find(where, form, left_out):
                found.setdefault(file.path.absolute(), file)
        self.files, self.left_out = list(found.values()), dict(left_out)

    def describe(self) -> dict[str, Any]:
        """Names, sizes and the first and last 64 KiB of every file are in the hash; not all bytes, to stay quick."""
        digest, total = hashlib.sha256(), 0
        for path, name, form, _ in self.files:
            try:
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    head = file.read(HEAD)
                    file.seek(max(0, size - HEAD))
                    tail = file.read(HEAD)
            except OSError as error:
                raise PrepareError(f"{path} cannot be read ({error})") from error
            total += size
            digest.update(f"{name}\0{size}\0{form}\0".encode("utf-8", "surrogateescape"))
            digest.update(hashlib.sha256(head + tail).digest())
        facts = {"kind": "files", "files": len(self.files), "bytes": total, "sha256": digest.hexdigest()}
        return facts | asdict(self.options) | {"path": ", ".join(map(os.path.abspath, self.wheres))}

    def chunks(self, start: Position | None = None) -> Iterator[Chunk]:
        first, skip = (start["file"], start["documents"]) if start else (0, 0)
        filling, position, where = _Filling(), start, ""
        for number, (path, _, form, compression) in enumerate(self.files[first:], first):
            done = skip
            for text in documents(path, form, compression, self.options, skip):
                done += 1
                position, where = {"file": number, "documents": done}, str(path)
                if filling.add(text):
                    yield Chunk(filling.take(), position, where)
            skip = 0
        if filling.texts and position:
            yield Chunk(filling.take(), position, where)


class _File(NamedTuple):
    path: Path
    name: str  # below the folder that was asked for: the same wherever that lies
    form: str
    compression: str


def _find(where: str, form: str | None, left_out: Counter[str]) -> list[_File]:
    """The files of one file name, folder or pattern, sorted by name; counts those that are not read, by reason."""
    path = Path(where).expanduser()
    if path.is_dir():
        base, named, found = path, False, _below(path, left_out)
    elif path.exists():
        base, named, found = path.parent, True, [path]
    else:
        found, named = [Path(name) for name in glob.glob(str(path), recursive=True)], True
        found = [p for p in found if not p.is_dir()]
        base = Path(os.path.commonpath([p.parent for p in found])) if found else path.parent
    written = {p.parent: _holds_ours(p.parent) for p in found if p != path and OURS.fullmatch(p.name)}
    files, unknown = [], []
    for name, file in sorted((p.relative_to(base).as_posix(), p) for p in found):
        known = kind(file.name)
        if written.get(file.parent) and OURS.fullmatch(file.name):
            left_out["written by mars-dist prepare"] += 1
        elif not known and form is None:
            unknown.append(file)
        elif _is_text(file, left_out):
            suffix = file.suffix.lower().lstrip(".")
            how = (form, suffix if suffix in COMPRESSIONS else "") if form is not None else known
            assert how is not None
            files.append(_File(file, name, *how))
    names = f"names ending in .{', .'.join(FORMATS)}, perhaps with .{', .'.join(COMPRESSIONS)} behind"
    if named and unknown:
        raise PrepareError(
            f"{unknown[0]}: not known what is in it; {names} are known, or say with --format what all the files are"
        )
    if unknown:
        left_out["name not known"] += len(unknown)
    if not files:
        raise PrepareError(f"{where}: no file with text found; {names} are read")
    return files


def _below(folder: Path, left_out: Counter[str]) -> list[Path]:
    """What lies in a folder and in those below it, in any order; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise PrepareError(f"folder {error.filename} cannot be read ({error.strerror})") from error

    found = []
    for here, folders, names in os.walk(folder, onerror=refuse):
        hidden = {name for name in (*folders, *names) if name.startswith(".") or name == "lost+found"}
        linked = {name for name in folders if name not in hidden and os.path.islink(os.path.join(here, name))}
        for why, those in (("hidden", hidden), ("link to a folder", linked)):
            if those:
                left_out[why] += len(those)
        folders[:] = [name for name in folders if name not in hidden | linked]
        found += [Path(here, name) for name in names if name not in hidden]
    return found


def _is_text(file: Path, left_out: Counter[str]) -> bool:
    """Whether it can be read; by its name it should be. Raises PrepareError for a link that leads nowhere."""
    try:
        if stat.S_ISREG(file.stat().st_mode):
            return True
    except OSError as error:
        what = "is a link that leads nowhere" if file.is_symlink() else "cannot be read"
        raise PrepareError(f"{file} {what} ({error.strerror}); delete it or put it right") from error
    left_out["not a regular file"] += 1
    return False


def _holds_ours(folder: Path) -> bool:
    """Whether `prepare` writes here or has written here: its own output is no text."""
    for name in (INDEX, PROGRESS):
        try:
            with (folder / name).open("rb") as file:
                head = file.read(1 << 12)  # the whole may be somebody's large file of that name
        except OSError:
            continue
        if head.startswith(b"{") and all(b'"%s"' % key in head for key in (b"tokenizer_sha256", b"shard_tokens")):
            return True
    return False


class DatasetSource:
    """A Hugging Face data set, streamed: nothing of it is stored but what the library itself caches."""

    def __init__(self, name: str, config: str | None, split: str, revision: str | None, field: str) -> None:
        self.name, self.config, self.split, self.revision, self.field = name, config, split, revision, field
        self.left_out: dict[str, int] = {}

    def describe(self) -> dict[str, Any]:
        """By name: give a revision, and a data set that changes on the hub is not taken for the same one."""
        facts = {"kind": "data set", "name": self.name, "config": self.config, "split": self.split}
        return facts | {"revision": self.revision, "field": self.field}

    def chunks(self, start: Position | None = None) -> Iterator[Chunk]:
        if start and start.get("end"):
            return
        where = f"data set {self.name!r}"
        done = start["documents"] if start else 0
        filling = _Filling()
        try:
            stream = self._load()
            if start:
                stream.load_state_dict(start["state"])
            for row in stream:
                done += 1
                if filling.add(text_of(row, self.field, f"{where}, row {done}")):
                    yield Chunk(filling.take(), {"documents": done, "state": stream.state_dict()}, where)
        except PrepareError:
            raise
        except Exception as error:  # the library raises what its readers and the network raise
            first = next(iter(str(error).splitlines()), "")
            raise PrepareError(f"{where} cannot be read: {type(error).__name__}: {first}") from error
        if filling.texts:
            yield Chunk(filling.take(), {"documents": done, "end": True}, where)

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise PrepareError("a data set needs the package datasets: pip install 'mars-dist[train]'") from error
        torch_is_there = datasets.config.TORCH_AVAILABLE
        try:  # it would import torch, 190 MB, only to make the stream a class of torch's
            datasets.config.TORCH_AVAILABLE = torch_is_there and "torch" in sys.modules
            stream = datasets.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, streaming=True
            )
            if stream.column_names and self.field in stream.column_names:
                stream = stream.select_columns([self.field])  # the other columns are not even decoded
        finally:
            datasets.config.TORCH_AVAILABLE = torch_is_there
        return stream
