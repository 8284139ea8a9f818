"""Named tensors in pieces: what each rank writes of them, and how any interval is put together from all files.

A file is a safetensors file, so that any tool reads it; every chunk in it is one tensor, and the header says which part
of which whole tensor it is. Nothing in it can be executed. The ``safetensors`` library reads; writing is here because
a file is hashed while it is written, without a second copy of it in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mars_dist.checkpoint.manifest import Record
from mars_dist.checkpoint.system import start_writing

TABLE = "mars_dist"  # the key of the table of chunks in a header's __metadata__
FORMAT = 1
BLOCK = 1 << 23  # bytes that are written, and hashed, at a time
SUFFIX = ".safetensors"
PART = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.safetensors")

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
BY_CODE = {code: dtype for dtype, code in DTYPES.items()}

Region = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Chunk:
    """A part of one tensor.

    Attributes:
        name: of the whole tensor; any text.
        shape: the GLOBAL shape of it.
        start: the chunk is elements [start, start + numel) of the flattened tensor; not used with a region.
        value: the elements; of them only their order in ``value.flatten()`` counts.
        region: for a part that is a block and no interval (tensor parallelism): [begin, end) in every dimension.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    value: Tensor
    region: Region | None = None

    @property
    def numel(self) -> int:
        return self.value.numel()

    @property
    def nbytes(self) -> int:
        return self.value.numel() * self.value.element_size()


@dataclass(frozen=True)
class _Part:
    """A chunk as a header describes it."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    region: Region | None


def file_name(rank: int, world_size: int) -> str:
    """Of one rank's file, so that ``Reader`` sees when another one's is missing."""
    return f"mars-{rank:05d}-of-{world_size:05d}{SUFFIX}"


# ---- writing


def write(path: Path, chunks: Iterable[Chunk], metadata: Mapping[str, str] | None = None) -> Record:
    """Write ``chunks`` to a new file, and wait until they are on disk.

    Args:
        chunks: on any device; what is not contiguous CPU memory is copied a tensor at a time.
        metadata: more texts for the header.

    Returns: size and hash of the file, for the manifest; it is not read again.

    Raises:
        ValueError: for a chunk that does not fit its shape, two of the same name and place, a dtype without a code.
        OSError: a full or read-only disk; what was written so far stays.
    """
    chunks = sorted(chunks, key=lambda chunk: -chunk.value.element_size())  # every tensor at a multiple of its size
    header = _header(path, chunks, dict(metadata or {}))
    digest, size = hashlib.sha256(), len(header)
    # hashlib releases the interpreter's lock: the hash is computed while the system copies the next blocks, and what is
    # left of it while the disk is waited for.
    with ThreadPoolExecutor(1, thread_name_prefix="mars-dist-hash") as pool:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            pool.submit(digest.update, header)
            _write_all(descriptor, memoryview(header))
            for chunk in chunks:
                hashed: list[Future[None]] = []
                data = _bytes_of(chunk.value)
                for begin in range(0, len(data), BLOCK):
                    block = data[begin : begin + BLOCK]
                    hashed.append(pool.submit(digest.update, block))
                    _write_all(descriptor, block)
                    start_writing(descriptor, size, len(block))
                    size += len(block)
                if not _is_plain(chunk.value):  # a copy: let go of it before the next one is made
                    for future in hashed:
                        future.result()
            os.fsync(descriptor)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            os.close(descriptor)
    return Record(size, digest.hexdigest())


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _is_plain(value: Tensor) -> bool:
    return value.device.type == "cpu" and value.is_contiguous()


def _bytes_of(value: Tensor) -> memoryview:
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    data: np.ndarray = flat.view(torch.uint8).numpy()
    return memoryview(data.data)


def _header(path: Path, chunks: list[Chunk], metadata: dict[str, str]) -> bytes:
    entries: dict[str, dict[str, object]] = {}
    table: dict[str, dict[str, object]] = {}
    known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    end = 0
    for chunk in chunks:
        shape, dtype = tuple(chunk.shape), chunk.value.dtype
        fault = _fault(shape, chunk.start, chunk.numel, chunk.region)
        if dtype not in DTYPES:
            fault = f"its dtype {dtype} has no place in a safetensors file"
        if known.setdefault(chunk.name, (shape, dtype)) != (shape, dtype):
            fault = f"another chunk of it has shape and dtype {known[chunk.name]}, this one {(shape, dtype)}"
        place = _place(chunk.start, chunk.numel, chunk.region)
        key = f"{chunk.name}@{place}"
        if key in entries:
            if not chunk.numel:
                continue
            fault = "there are two of it"
        if fault:
            raise ValueError(f"{path}: the chunk {place} of {chunk.name!r}: {fault}")
        begin, end = end, end + chunk.nbytes
        stored = _stored_shape(shape, chunk.numel, chunk.region)
        entries[key] = {"dtype": DTYPES[dtype], "shape": stored, "data_offsets": [begin, end]}
        table[key] = {"name": chunk.name, "shape": shape, "start": chunk.start, "region": chunk.region}
    texts = {**metadata, TABLE: json.dumps({"format": FORMAT, "chunks": table})}
    header = json.dumps({"__metadata__": texts, **entries}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def _place(start: int, numel: int, region: Region | None) -> str:
    """``12:20`` for an interval, ``[0:4,8:16]`` for a block."""
    return f"{start}:{start + numel}" if region is None else f"[{','.join(f'{b}:{e}' for b, e in region)}]"


def _stored_shape(shape: tuple[int, ...], numel: int, region: Region | None) -> list[int]:
    """Whole tensors and blocks keep their form for whoever opens the file with another tool."""
    if region is not None:
        return [end - begin for begin, end in region]
    return list(shape) if numel == math.prod(shape) else [numel]


def _fault(shape: tuple[int, ...], start: int, numel: int, region: Region | None) -> str:
    """What is wrong with a chunk of ``numel`` elements at that place; else ""."""
    if region is None:
        inside = 0 <= start and start + numel <= math.prod(shape)
        return "" if inside else f"elements [{start}, {start + numel}) are not within the shape {shape}"
    if len(region) != len(shape) or not all(0 <= b <= e <= n for (b, e), n in zip(region, shape, strict=True)):
        return f"the region {region} is not within the shape {shape}"
    if math.prod(end - begin for begin, end in region) != numel:
        return f"{numel} elements do not fill the region {region}"
    return ""


# ---- reading


class _OtherFormat(ValueError):
    pass


class Reader:
    """All files of a folder as whole tensors by name; nothing but headers is read before it is asked for.

    Attributes:
        metadata: the texts that ``write`` was given, by file name.

    Raises:
        FileNotFoundError: no such file in the folder, or that of a rank is missing.
        ValueError: for a damaged file, or one that was not written here; for files that disagree on a tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.metadata: dict[str, dict[str, str]] = {}
        self._files: dict[str, safe_open] = {}
        self._parts: dict[str, list[tuple[_Part, str, str]]] = {}  # by tensor: the part, its file and key there
        self._dtypes: dict[str, torch.dtype] = {}
        self._whole: tuple[str, Tensor] | None = None
        names = sorted(path.name for path in self.folder.glob(f"*{SUFFIX}"))
        if not names:
            raise FileNotFoundError(f"{self.folder} holds no {SUFFIX} file")
        _refuse_missing(self.folder, names)
        for name in names:
            self._open(name)

    def names(self) -> list[str]:
        return sorted(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name)[0][0].shape

    def dtype(self, name: str) -> torch.dtype:
        self._of(name)
        return self._dtypes[name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of the flattened tensor, in memory of their own; ``stop=None``: to its end.

        Raises:
            ValueError: when there is no such tensor, or no file holds some of the elements.
        """
        parts, numel = self._of(name), math.prod(self.shape(name))
        stop = numel if stop is None else stop
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"{self.folder}: {name!r} has {numel} elements, and [{start}, {stop}) was asked for")
        if any(part.region is not None for part, _, _ in parts):
            return self.whole(name).reshape(-1)[start:stop].clone()
        plan = []
        at = start
        for part, file, key in sorted(parts, key=lambda entry: (entry[0].start, -entry[0].stop)):
            if part.start > at or at >= stop:
                break
            if part.stop > at:
                end = min(part.stop, stop)
                plan.append((at, end, part, file, key))
                at = end
        if at < stop:
            after = min(
                (part.start for part, _, _ in parts if part.start > at and part.stop > part.start), default=stop
            )
            raise ValueError(self._hole(name, at, min(after, stop)))
        out = torch.empty(stop - start, dtype=self._dtypes[name])
        for begin, end, part, file, key in plan:
            stored = self._files[file].get_tensor(key).reshape(-1)
            out[begin - start : end - start] = stored[begin - part.start : end - part.start]
        return out

    def whole(self, name: str) -> Tensor:
        """The tensor in its shape. That of the last call is kept where it is put together from blocks: do not write."""
        parts, shape = self._of(name), self.shape(name)
        if all(part.region is None for part, _, _ in parts):
            return self.read(name).reshape(shape)
        if self._whole is None or self._whole[0] != name:
            self._whole = name, self._from_blocks(name, parts, shape)
        return self._whole[1]

    def block(self, name: str, region: Region) -> Tensor:
        """The block [begin, end) in every dimension, in memory of its own."""
        fault = _fault(self.shape(name), 0, math.prod(end - begin for begin, end in region), region)
        if fault:
            raise ValueError(f"{self.folder}: {name!r}: {fault}")
        return self.whole(name)[tuple(slice(begin, end) for begin, end in region)].clone()

    def _from_blocks(self, name: str, parts: list[tuple[_Part, str, str]], shape: tuple[int, ...]) -> Tensor:
        numel = math.prod(shape)
        held = sum(part.stop - part.start for part, _, _ in parts)
        if held < numel:  # before memory is asked for by what a header says
            raise ValueError(f"{self.folder}: {name!r} has {numel} elements, and all files together hold {held} of it")
        out, seen = torch.empty(shape, dtype=self._dtypes[name]), torch.zeros(shape, dtype=torch.bool)
        for part, file, key in reversed(parts):
            stored = self._files[file].get_tensor(key)
            for target, source in ((out, stored), (seen, torch.ones((), dtype=torch.bool))):
                if part.region is None:
                    flat = target.reshape(-1)[part.start : part.stop]
                    flat.copy_(source.reshape(-1) if source is stored else source)
                else:
                    target[tuple(slice(begin, end) for begin, end in part.region)] = source
        holes = (~seen).reshape(-1)
        if holes.any():
            begin = int(holes.to(torch.uint8).argmax())
            present = holes[begin:].logical_not()
            length = int(present.to(torch.uint8).argmax()) if present.any() else numel - begin
            raise ValueError(self._hole(name, begin, begin + length))
        return out

    def _hole(self, name: str, begin: int, end: int) -> str:
        return (
            f"{self.folder}: no file holds elements [{begin}, {end}) of {name!r} (shape {self.shape(name)}): the "
            f"file of a rank is missing, or not all have written their part. There are {', '.join(self._files)}"
        )

    def _of(self, name: str) -> list[tuple[_Part, str, str]]:
        if name not in self._parts:
            raise ValueError(f"{self.folder} holds no tensor {name!r}")
        return self._parts[name]

    def _open(self, name: str) -> None:
        path = self.folder / name
        try:
            file = safe_open(path, "pt")
            metadata = dict(file.metadata() or {})
            keys = set(file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} is damaged, or no safetensors file ({error})") from error
        if TABLE not in metadata:
            raise ValueError(f"{path} was not written by mars_dist: its header has no {TABLE!r}")
        try:
            table = json.loads(metadata.pop(TABLE))
            version = table["format"]
            if version != FORMAT:  # which may have another table
                raise _OtherFormat(
                    f"{path} has format {version!r}, and this mars_dist reads {FORMAT}: update mars_dist"
                )
            chunks = table["chunks"]
            parts = {key: _part(chunks[key], file.get_slice(key).get_shape()) for key in keys & chunks.keys()}
            other = sorted(keys ^ chunks.keys())
        except _OtherFormat:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: its table of chunks ({type(error).__name__}: {error})") from error
        if other:
            raise ValueError(f"{path} is damaged: {other[0]!r} is only in one of its header and its table of chunks")
        self._files[name], self.metadata[name] = file, metadata
        for key, part in parts.items():
            self._add(path, part, name, key, file)

    def _add(self, path: Path, part: _Part, file: str, key: str, opened: safe_open) -> None:
        stored = opened.get_slice(key)
        shape, code = list(stored.get_shape()), stored.get_dtype()
        fault = _fault(part.shape, part.start, part.stop - part.start, part.region)
        if not fault and shape != _stored_shape(part.shape, part.stop - part.start, part.region):
            place = _place(part.start, part.stop - part.start, part.region)
            fault = f"it is stored as {shape}, which is not what its place {place} takes"
        if not fault and code not in BY_CODE:
            fault = f"its dtype {code} is not known"
        if fault:
            raise ValueError(f"{path} is damaged: the chunk of {part.name!r}: {fault}")
        dtype = BY_CODE[code]
        entries = self._parts.setdefault(part.name, [])
        if entries and (entries[0][0].shape, self._dtypes[part.name]) != (part.shape, dtype):
            raise ValueError(
                f"{path} holds {part.name!r} with shape {part.shape} and {dtype}, and {entries[0][1]} with shape "
                f"{entries[0][0].shape} and {self._dtypes[part.name]}: they are not of one checkpoint"
            )
        self._dtypes[part.name] = dtype
        entries.append((part, file, key))


def _part(of: dict[str, object], stored: list[int]) -> _Part:
    """An entry of a table of chunks; for one that says something impossible see ``_fault``."""
    name, shape, start, region = of["name"], of["shape"], of["start"], of["region"]
    numbers = [start, *shape, *(edge for pair in region or () for edge in pair)]  # type: ignore[misc, attr-defined]
    if not isinstance(name, str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{str(of)[:200]} is no chunk")
    blocks = None if region is None else tuple((begin, end) for begin, end in region)  # type: ignore[attr-defined]
    return _Part(name, tuple(shape), start, start + math.prod(stored), blocks)  # type: ignore[arg-type, operator]


def _refuse_missing(folder: Path, names: list[str]) -> None:
    """Of files named ``...-00000-of-00004.safetensors`` all four must be there."""
    there = set(names)
    for prefix, count in sorted({found.group(1, 3) for name in names if (found := PART.fullmatch(name))}):
        expected = (f"{prefix}-{rank:05d}-of-{count}{SUFFIX}" for rank in range(int(count)))
        if missing := next((name for name in expected if name not in there), None):
            raise FileNotFoundError(f"{folder} lacks {missing}: a rank's part is not there")
