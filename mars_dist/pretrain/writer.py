"""Writing one split of a prepared data set: shards that end with a document, renamed when they are complete."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mars_dist.pretrain.encoding import Part
from mars_dist.pretrain.readers import PrepareError


def write_json(path: Path, content: dict[str, Any]) -> None:
    """The whole file or, whatever happens, the one that was there before."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    _rename(temporary, path)


def _rename(old: Path, new: Path) -> None:
    os.replace(old, new)
    descriptor = os.open(new.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # a name lives in the folder
    finally:
        os.close(descriptor)


class SplitWriter:
    """Appends encoded documents to the shards of one split.

    state: what `state()` returned when the work was last saved; the files are taken back to that. None: from the start.
    Raises OSError when the disk fails, PrepareError when a file lacks what was saved.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int, state: dict[str, Any] | None
    ) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        state = state or {"shards": [], "open_tokens": 0, "open_documents": 0}
        self.shards: list[dict[str, Any]] = list(state["shards"])
        self.tokens, self.documents = int(state["open_tokens"]), int(state["open_documents"])
        self.sha256 = hashlib.sha256()
        self.file: IO[bytes] | None = None
        self._take_back()

    def append(self, part: Part) -> None:
        """Documents, each with its end-of-text token, in their order."""
        ends = np.cumsum(part.lengths)
        start = first = 0  # in tokens and documents of the part
        while first < len(ends):
            missing = self.shard_tokens - self.tokens
            last = min(int(np.searchsorted(ends, start + missing)), len(ends) - 1)  # the document that fills the shard
            stop = int(ends[last])
            self._append(part.tokens[start:stop], last + 1 - first)
            if self.tokens >= self.shard_tokens:
                self.finish()
            start, first = stop, last + 1

    def finish(self) -> None:
        """Completes the shard that is being written, if there is one."""
        if self.tokens == 0:
            return
        file = self._file()
        os.fsync(file.fileno())
        self.close()
        name = self._name(len(self.shards))
        _rename(self._temporary(), self.folder / name)
        self.shards.append(
            {"file": name, "tokens": self.tokens, "documents": self.documents, "sha256": self.sha256.hexdigest()}
        )
        self.tokens, self.documents, self.sha256 = 0, 0, hashlib.sha256()

    def close(self) -> None:
        """Lets go of the file, without completing it."""
        file, self.file = self.file, None
        if file:
            file.close()

    def state(self) -> dict[str, Any]:
        """Plain JSON from which another SplitWriter goes on here, once it is stored: all that it counts is on disk."""
        if self.file:
            os.fsync(self.file.fileno())
        return self.total() | {"open_tokens": self.tokens, "open_documents": self.documents}

    def total(self) -> dict[str, Any]:
        """Tokens and documents so far, and the complete shards."""
        return {
            "tokens": sum(shard["tokens"] for shard in self.shards) + self.tokens,
            "documents": sum(shard["documents"] for shard in self.shards) + self.documents,
            "shards": list(self.shards),
        }

    def _append(self, tokens: npt.NDArray[Any], documents: int) -> None:
        data = np.ascontiguousarray(tokens).view(np.uint8).data
        self.sha256.update(data)
        file, done = self._file(), 0
        while done < len(data):  # without a buffer a write may take only a part
            done += file.write(data[done:])
        self.tokens += len(tokens)
        self.documents += documents

    def _name(self, number: int) -> str:
        return f"{self.split}-{number:05d}.bin"

    def _temporary(self) -> Path:
        return self.folder / (self._name(len(self.shards)) + ".tmp")

    def _file(self) -> IO[bytes]:
        if self.file is None:
            self.file = self._temporary().open("ab", buffering=0)
        return self.file

    def _take_back(self) -> None:
        """Removes what was written after the state was stored."""
        current, temporary = self.folder / self._name(len(self.shards)), self._temporary()
        if self.tokens and current.exists():  # it was completed after that
            os.replace(current, temporary)
        keep = {shard["file"] for shard in self.shards} | ({temporary.name} if self.tokens else set())
        for path in self.folder.glob(f"{self.split}-[0-9][0-9][0-9][0-9][0-9]*.bin*"):
            if path.name not in keep:
                path.unlink()
        if not self.tokens:
            return
        size = self.tokens * self.dtype.itemsize
        found = temporary.stat().st_size if temporary.exists() else 0
        if found < size:
            raise PrepareError(f"{temporary} has {found:,} bytes, {size:,} were saved; delete it and start again")
        with temporary.open("r+b") as file:
            file.truncate(size)
            self.sha256 = hashlib.file_digest(file, "sha256")
