"""Reading prepared tokens: one flat, read-only sequence over the .bin files of `mars-dist prepare` or of nanoGPT.

A slice is read with `os.pread`: nothing stays mapped, so the memory of the process does not grow with what was read
(a memory map's does, page by page, until it is opened again), and a file that is cut short meanwhile is an error
and not a SIGBUS. What the kernel caches of the files is shared by all processes and given up when memory is short.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

INDEX = "index.json"
PROGRESS = "progress.json"  # what an unfinished `prepare` keeps
FORMAT = 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OPEN_FILES = 64  # at most so many are held open: a set may have more shards than a process may open
EDGE = 1 << 16  # bytes at both ends of a file without an index that its fingerprint covers


class DataError(ValueError):
    """What is wrong with prepared tokens, said in one line."""


def read_index(folder: Path) -> dict[str, Any]:
    """The content of index.json. Raises DataError if it is not one of ours."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text())
        if index["format"] != FORMAT:
            raise DataError(f"{path} has format {index['format']!r}, known is {FORMAT}: prepared by another version")
        if index["dtype"] not in DTYPES:
            raise DataError(f"{path}: dtype {index['dtype']!r} is not one of {', '.join(DTYPES)}")
        for facts in index["splits"].values():
            int(facts["tokens"]), [(str(s["file"]), int(s["tokens"]), str(s["sha256"])) for s in facts["shards"]]
        int(index["vocabulary"])
    except DataError:
        raise
    except (OSError, UnicodeDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} cannot be used ({reason}); prepare the data again") from error
    return index


def open_split(path: str | os.PathLike[str], split: str = "train", *, dtype: str | None = None) -> Shards:
    """The tokens of one split ("train" or "val").

    path: a folder that `mars-dist prepare` wrote, a folder with nanoGPT's {split}.bin, or one such .bin file.
    dtype: "uint16" or "uint32", of files without an index (None: uint16, as nanoGPT writes, unless the tokens look
        like uint32, which is refused); with one, it must agree.

    Raises DataError: nothing there, unfinished, a shard missing or of another size than the index says, no tokens.
    """
    path = Path(path).expanduser()
    if dtype is not None and dtype not in DTYPES:
        raise DataError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if (path / INDEX).exists():
        index = read_index(path)
        if dtype not in (None, index["dtype"]):
            raise DataError(f"{path / INDEX} says {index['dtype']}, asked for is {dtype}")
        if split not in index["splits"]:
            raise DataError(f"{path} has no split {split!r}; there are {', '.join(index['splits'])}{_remedy(split)}")
        shards = index["splits"][split]["shards"]
        if not shards:
            raise DataError(f"{path}: no document went to {split!r}{_remedy(split)}")
        files = [(path / shard["file"], shard["tokens"]) for shard in shards]
        known = {key: index.get(key) for key in ("dtype", "vocabulary", "tokenizer_sha256", "end_of_text")}
        known["shards"] = [(s["file"], s["tokens"], s["sha256"]) for s in shards]
        hashes = {s["file"]: s["sha256"] for s in shards}
        return Shards(files, index["dtype"], index["vocabulary"], _digest(known), hashes, f"{path}, {split!r},")
    if (path / PROGRESS).exists():
        raise DataError(f"{path} is not finished; run mars-dist prepare with the same arguments again to go on")
    file = path / f"{split}.bin" if path.is_dir() else path
    if not file.is_file():
        if split == "val" and (path / "train.bin").is_file():
            raise DataError(f"{file}: no such file{_remedy(split)}")
        raise DataError(f"{file if path.is_dir() else path}: no such file, and no {INDEX}: prepare the data first")
    guessed, dtype = dtype is None, dtype or "uint16"
    size = file.stat().st_size
    if size % DTYPES[dtype].itemsize:
        raise DataError(f"{file} has {size:,} bytes, not a whole number of {dtype} tokens: damaged, or another dtype")
    if size == 0:
        raise DataError(f"{file} is empty{_remedy(split)}")
    with file.open("rb") as stream:
        head = stream.read(EDGE)
        stream.seek(max(0, size - EDGE))
        edges = head + stream.read(EDGE)
    if guessed and size % 4 == 0 and _looks_like_uint32(edges):
        raise DataError(f"{file} looks like uint32 tokens; prepare the data with `mars-dist prepare`")
    known = {"dtype": dtype, "bytes": size, "edges": hashlib.sha256(edges).hexdigest()}
    return Shards([(file, size // DTYPES[dtype].itemsize)], dtype, None, _digest(known), {}, str(file))


def _remedy(split: str) -> str:
    """What to do when there are no tokens of this split."""
    if split == "val":
        return (
            "; prepare again into another --out with a larger --val-fraction (0.5 for a handful of documents; "
            "--separator splits a txt file into documents), or train with --set validation.every=0"
        )
    return "; prepare again into another --out, with more text or a smaller --val-fraction"


def _looks_like_uint32(content: bytes) -> bool:
    """Whether every second 16-bit word is an upper half: 0 to 3, as ids below 262,144 have it; the others are not."""
    words = np.frombuffer(content, dtype="<u2").reshape(-1, 2)
    lower, upper = words[:, 0], words[:, 1]
    return bool(upper.max() <= 3 < lower.max() and lower.min() < lower.max())


def _digest(known: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


class Shards:
    """Tokens over many files as one sequence: `len()`, `[i]` and `[a:b]`, the latter a new array of `dtype`.

    Made by `open_split`. May be pickled and used in forked processes, but not by several threads at once.

    vocabulary: number of token ids that the index promises, None without an index.
    name: what messages call the whole of it.
    """

    def __init__(
        self,
        files: list[tuple[Path, int]],
        dtype: str,
        vocabulary: int | None,
        digest: str,
        hashes: dict[str, str],
        name: str = "the text",
    ) -> None:
        self.dtype, self.vocabulary, self.name = DTYPES[dtype], vocabulary, name
        self.files = [path for path, _ in files]
        self.starts = [0]  # in tokens, Python integers: no overflow, whatever the size
        for path, tokens in files:
            try:
                size = path.stat().st_size
            except OSError as error:
                raise DataError(f"{path} is missing ({error.strerror}); prepare the data again") from error
            if size != tokens * self.dtype.itemsize:
                raise DataError(
                    f"{path} has {size:,} bytes, by the index {tokens * self.dtype.itemsize:,}; prepare the data again"
                )
            self.starts.append(self.starts[-1] + tokens)
        self._digest, self._hashes = digest, hashes
        self._open: OrderedDict[int, int] = OrderedDict()  # number of the file -> descriptor, the last used last

    def __len__(self) -> int:
        """In tokens."""
        return self.starts[-1]

    def __getitem__(self, where: slice | int) -> Any:
        """`[a:b]` as an array of `dtype` (bounds as in any sequence, no step), `[i]` as one token. Raises DataError."""
        if not isinstance(where, slice):
            i = range(len(self))[where]
            return self[i : i + 1][0]
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise DataError(f"tokens are read in order, the step of the slice is {step}")
        out = np.empty(max(0, stop - start), dtype=self.dtype)
        done = 0
        while done < len(out):
            number = bisect.bisect_right(self.starts, start + done) - 1
            count = min(len(out) - done, self.starts[number + 1] - start - done)
            self._read(number, start + done - self.starts[number], out[done : done + count])
            done += count
        return out

    def locate(self, i: int) -> str:
        """File and place of token i of the sequence, for messages."""
        i = range(len(self))[i]
        number = bisect.bisect_right(self.starts, i) - 1
        return f"{self.files[number]}, token {i - self.starts[number]:,}"

    def fingerprint(self) -> str:
        """A sha256 that changes when the tokens do; a run keeps it and compares. The same wherever the folder is.

        With an index: of the hashes of all shards of this split. Without: of the size and both ends of the file.
        """
        return self._digest

    def verify(self) -> None:
        """Reads every byte and compares with the hashes of the index, about a second per GB. Raises DataError."""
        for path in self.files:
            with path.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if self._hashes and found != self._hashes[path.name]:
                raise DataError(f"{path} is not what was prepared (another sha256 than in the index)")

    def close(self) -> None:
        """Closes the files; reading opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _read(self, number: int, first: int, out: npt.NDArray[Any]) -> None:
        view, done = out.view(np.uint8).data, 0
        offset = first * self.dtype.itemsize
        try:
            descriptor = self._descriptor(number)
            while done < len(view):
                got = os.preadv(descriptor, [view[done:]], offset + done)
                if got == 0:
                    raise DataError(f"{self.files[number]} has become shorter since it was opened")
                done += got
        except OSError as error:
            raise DataError(f"{self.files[number]} cannot be read ({error})") from error

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[number] = os.open(self.files[number], os.O_RDONLY | os.O_CLOEXEC)
        self._open.move_to_end(number)
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}

    def __del__(self) -> None:
        if "_open" in self.__dict__:
            self.close()
