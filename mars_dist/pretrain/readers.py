"""One file of text, JSON lines or Parquet, perhaps compressed, as a series of documents.

Every reader yields strings, starts after the first `skip` documents, and holds about one document (Parquet: a batch of
a megabyte) at a time. What is wrong in a file is a PrepareError that says where: the byte, the line or the row.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import itertools
import json
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

FORMATS = {
    "txt": "txt",
    "text": "txt",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",  # as C4 and others name files of JSON lines
    "parquet": "parquet",
}
COMPRESSIONS = ("gz", "bz2", "xz", "zst")
BLOCK = 1 << 20  # bytes read at a time
BOM = b"\xef\xbb\xbf"


class PrepareError(ValueError):
    """What stops `prepare`, said in one line, with the remedy."""


@dataclass(frozen=True)
class Options:
    """How documents are found in a file.

    field: the key (JSON lines) or column (Parquet) that holds the text.
    separator: text that ends a document in a .txt file; None: a .txt file is one document.
    errors: "strict" refuses bytes that are not UTF-8, "replace" puts U+FFFD there.
    """

    field: str = "text"
    separator: str | None = None
    errors: str = "strict"

    def __post_init__(self) -> None:
        if self.errors not in ("strict", "replace"):
            raise PrepareError(f"--errors is {self.errors!r}, must be 'strict' or 'replace'")
        if self.separator == "":
            raise PrepareError("--separator is empty; leave it out to read a .txt file as one document")


def kind(name: str) -> tuple[str, str] | None:
    """("jsonl", "gz") for a.jsonl.gz, ("txt", "") for a.txt, None for a name that says nothing known."""
    suffixes = name.lower().split(".")[1:]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    form = FORMATS.get(suffixes[-1]) if suffixes else None
    return (form, compression) if form else None


def documents(path: Path, form: str, compression: str, options: Options, skip: int = 0) -> Iterator[str]:
    """The documents of one file after the first `skip`. Raises PrepareError with the file and the place in it."""
    name = str(path)
    try:
        if compression and path.stat().st_size == 0:  # gzip, for one, takes it for the end of a file
            raise PrepareError(f"{name} is cut short or damaged (it has 0 bytes, which no compressed file has)")
        with _opened(path, compression) as stream:
            if form == "parquet":
                yield from _parquet(stream, name, options, skip, bool(compression))
            elif form == "jsonl":
                yield from _json_lines(stream, name, options, skip)
            else:
                yield from _text(stream, name, options, skip)
    except ImportError as error:
        raise PrepareError(f"reading {name} needs the package pyarrow: pip install 'mars-dist[train]'") from error
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        what = "is cut short or damaged" if compression else "cannot be read"
        raise PrepareError(f"{name} {what} ({error})") from error


@contextlib.contextmanager
def _opened(path: Path, compression: str) -> Iterator[IO[bytes]]:
    with contextlib.ExitStack() as stack:
        if compression == "gz":
            stream = cast("IO[bytes]", stack.enter_context(gzip.open(path)))
        elif compression == "bz2":
            stream = cast("IO[bytes]", stack.enter_context(bz2.open(path)))
        elif compression == "xz":
            stream = cast("IO[bytes]", stack.enter_context(lzma.open(path)))
        elif compression == "zst":
            import pyarrow

            raw = stack.enter_context(pyarrow.input_stream(str(path), compression="zstd"))
            stream = cast("IO[bytes]", stack.enter_context(io.BufferedReader(raw, BLOCK)))
        else:
            stream = stack.enter_context(path.open("rb", buffering=BLOCK))
        yield stream


def _decode(data: bytes | bytearray, errors: str, where: str, offset: int = 0) -> str:
    """The text of `data`, whose first byte is byte `offset` of what `where` names."""
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise PrepareError(
            f"{where}, byte {offset + error.start}: 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8, "
            "or replace what is wrong with --errors replace"
        ) from None


def _text(stream: IO[bytes], name: str, options: Options, skip: int) -> Iterator[str]:
    """The whole file as one document, or documents that end with the separator (or with the file)."""
    first = stream.read(len(BOM))
    offset = len(first) if first == BOM else 0
    blocks = itertools.chain([first[offset:]], iter(lambda: stream.read(BLOCK), b""))
    if options.separator is None:
        if skip == 0:
            yield _decode(b"".join(blocks), options.errors, name, offset)
        return
    separator = options.separator.encode()
    buffer, searched, number = bytearray(), 0, 0
    for block in blocks:
        buffer += block
        start = 0
        while (end := buffer.find(separator, max(start, searched))) >= 0:
            number += 1
            if number > skip:
                yield _decode(buffer[start:end], options.errors, name, offset + start)
            start = end + len(separator)
        del buffer[:start]
        offset += start
        searched = max(0, len(buffer) - len(separator) + 1)
    if buffer and number >= skip:  # what no separator follows
        yield _decode(buffer, options.errors, name, offset)


def _json_lines(stream: IO[bytes], name: str, options: Options, skip: int) -> Iterator[str]:
    found = 0
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            continue
        found += 1
        if found <= skip:
            continue
        where = f"{name}, line {number}"
        if found == 1 and line.lstrip().startswith(b"["):
            raise PrepareError(f"{where}: a JSON array; one object per line is needed, as `jq -c '.[]'` writes it")
        content = _decode(line, options.errors, where)
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits, too
            raise PrepareError(f"{where}: not one JSON object ({str(error).partition(';')[0]})") from None
        if not isinstance(row, dict):
            raise PrepareError(f"{where}: {type(row).__name__}, not a JSON object with the text in it")
        yield text_of(row, options.field, where)


def text_of(row: dict[str, Any], field: str, where: str) -> str:
    """The text in a row. Raises PrepareError if it is missing or no text, naming the fields that there are."""
    if field not in row:
        there = ", ".join(map(repr, row))
        raise PrepareError(
            f"{where}: no field {field!r}; there are {there}: name one with --text-field"
            if row
            else f"{where}: no field {field!r}, and no other"
        )
    text = row[field]
    if not isinstance(text, str):
        kind_of = "null" if text is None else type(text).__name__
        raise PrepareError(f"{where}: field {field!r} is {kind_of}, not text")
    return text


def _parquet(stream: IO[bytes], name: str, options: Options, skip: int, compressed: bool) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet as parquet

    with contextlib.ExitStack() as stack:
        if compressed:  # Parquet is read from its end, so it is unpacked first, into a file that has no name
            unpacked = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(stream, unpacked, BLOCK)
            stream = cast("IO[bytes]", unpacked)
        try:
            file = parquet.ParquetFile(stream, pre_buffer=False, buffer_size=BLOCK)
            columns = file.schema_arrow.names
            if options.field not in columns:
                there = ", ".join(map(repr, columns))
                raise PrepareError(
                    f"{name}: no column {options.field!r}; there are {there}: name one with --text-field"
                )
            before = 0  # rows of the file before this batch
            for group in range(file.metadata.num_row_groups):
                facts = file.metadata.row_group(group)
                if before + facts.num_rows <= skip:
                    before += facts.num_rows
                    continue
                bytes_per_row = max(1, facts.total_byte_size // max(1, facts.num_rows))
                rows = min(1024, max(1, BLOCK // bytes_per_row))
                for batch in file.iter_batches(rows, row_groups=[group], columns=[options.field]):
                    values = _as_bytes(batch.column(0), f"{name}: column {options.field!r}")
                    first = max(0, skip - before)
                    for number, data in enumerate(values[first:].to_pylist(), before + first + 1):
                        if data is None:
                            raise PrepareError(f"{name}, row {number}: {options.field!r} is null, not text")
                        yield _decode(data, options.errors, f"{name}, row {number}")
                    before += len(values)
        except pyarrow.ArrowException as error:
            raise PrepareError(f"{name} is not a whole Parquet file ({str(error).splitlines()[0]})") from error


def _as_bytes(column: Any, where: str) -> Any:
    """A text column as bytes: what is not UTF-8 is then found by us, with its place."""
    import pyarrow

    kind_of = column.type
    if pyarrow.types.is_dictionary(kind_of):
        column, kind_of = column.dictionary_decode(), kind_of.value_type
    types = pyarrow.types
    if not (types.is_string(kind_of) or types.is_large_string(kind_of) or types.is_string_view(kind_of)):
        raise PrepareError(f"{where} is {kind_of}, not text")
    return column.cast(pyarrow.large_binary())
