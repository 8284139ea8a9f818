"""Documents to shards of tokens: what `mars-dist prepare` does.

This process reads and writes, the workers encode, and the chunks are written in the order in which they were read: the
files are the same, byte for byte, for any number of workers. Which split a document goes to depends on its text alone.

The folder while the work goes on: finished shards, per split one unfinished `train-00003.bin.tmp`, and progress.json,
which says how far they count and where the source goes on. After a kill the unfinished files are cut back to
what progress.json says, and reading continues there: no document is lost, none is written twice. index.json comes last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mars_dist.pretrain.encoding import SPLITS, encode_in_order
from mars_dist.pretrain.readers import PrepareError
from mars_dist.pretrain.shards import DTYPES, FORMAT, INDEX, PROGRESS, open_split, read_index
from mars_dist.pretrain.sources import Source
from mars_dist.pretrain.tokenizer import gpt2_tokenizer
from mars_dist.pretrain.writer import SplitWriter, write_json

if TYPE_CHECKING:
    import tiktoken

__all__ = ["PrepareError", "Progress", "prepare", "tokenizer_sha256"]

OPTIONS = {  # what the command calls a part of the plan
    "val_fraction": "--val-fraction",
    "shard_tokens": "--shard-tokens",
    "source.errors": "--errors",
    "source.field": "--text-field",
    "source.separator": "--separator",
}


@dataclass(frozen=True)
class Progress:
    """How far `prepare` is: documents and tokens written since the folder was begun, and what is being read."""

    documents: int
    tokens: int
    where: str


def prepare(
    source: Source,
    out: str | Path,
    *,
    workers: int | None = None,
    val_fraction: float = 0.0005,
    shard_tokens: int = 100_000_000,
    tokenizer: tiktoken.Encoding | None = None,
    save_seconds: float = 30.0,
    report: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Writes the shards and index.json of `source` into the folder `out`; returns the content of index.json.

    workers: processes that encode (None: one per CPU core this process may use; 1: this process itself).
    val_fraction: share of the documents, in [0, 1), that goes to the split "val": those whose text hashes low.
    shard_tokens: a shard ends with the document that brings it to so many tokens.
    tokenizer: a tiktoken encoding with an end-of-text token (None: GPT-2's, from the package).
    save_seconds: how much work, in seconds, a kill may cost at most.
    report: called with a Progress after every chunk of about half a megabyte.

    A folder that is finished is left as it is; one that is not is gone on with. Memory is bounded by the workers, not
    by the source, but the longest document must fit several times. Raises PrepareError: a document that cannot be read
    or encoded, no documents, a folder with other data in it or in use, a full disk; DataError: a damaged folder.
    """
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if workers < 1:
        raise PrepareError(f"--workers is {workers}, must be at least 1")
    if not 0 <= val_fraction < 1:
        raise PrepareError(f"--val-fraction is {val_fraction}, must be at least 0 and below 1")
    if shard_tokens < 1:
        raise PrepareError(f"--shard-tokens is {shard_tokens}, must be at least 1")
    tokenizer = tokenizer or gpt2_tokenizer()
    plan: dict[str, Any] = {
        "format": FORMAT,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "vocabulary": tokenizer.n_vocab,
        "end_of_text": tokenizer.eot_token,
        "dtype": "uint16" if tokenizer.n_vocab <= 1 << 16 else "uint32",
        "val_fraction": val_fraction,
        "shard_tokens": shard_tokens,
        "source": source.describe(),
    }
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder) as lock:
            state = _state(folder, plan)
            if state is None:
                return read_index(folder)
            writers = {
                split: SplitWriter(folder, split, DTYPES[plan["dtype"]], shard_tokens, state["splits"].get(split))
                for split in SPLITS
            }
            _write(source, folder, plan, state["position"], writers, workers, tokenizer, lock, save_seconds, report)
            if not any(writer.total()["documents"] for writer in writers.values()):
                raise PrepareError(f"no documents in {plan['source'].get('path') or plan['source']}")
            index = plan | {"splits": {split: writer.total() for split, writer in writers.items()}}
            write_json(folder / INDEX, index)
            (folder / PROGRESS).unlink()
            return index
    except OSError as error:
        room = "; make room and run it again, it goes on where it was" if error.errno == errno.ENOSPC else ""
        raise PrepareError(f"{folder} cannot be written ({error}){room}") from error


def _write(
    source: Source,
    folder: Path,
    plan: dict[str, Any],
    position: dict[str, Any] | None,
    writers: dict[str, SplitWriter],
    workers: int,
    tokenizer: tiktoken.Encoding,
    lock: int,
    save_seconds: float,
    report: Callable[[Progress], None] | None,
) -> None:
    """Reads what is behind `position`, encodes and writes it, and closes the last shards."""

    def save() -> None:
        splits = {split: writer.state() for split, writer in writers.items()}
        write_json(folder / PROGRESS, plan | {"position": position, "splits": splits})

    try:
        save()
        saved = time.monotonic()
        chunks = source.chunks(position)
        with contextlib.closing(
            encode_in_order(chunks, workers, tokenizer, plan["val_fraction"], DTYPES[plan["dtype"]], lock)
        ) as encoded:
            for chunk, parts in encoded:
                for split, part in parts.items():
                    writers[split].append(part)
                position = chunk.position
                if time.monotonic() - saved >= save_seconds:
                    save()
                    saved = time.monotonic()
                if report:
                    totals = [writer.total() for writer in writers.values()]
                    report(Progress(sum(t["documents"] for t in totals), sum(t["tokens"] for t in totals), chunk.where))
        for writer in writers.values():
            writer.finish()
    finally:
        for writer in writers.values():
            writer.close()


def tokenizer_sha256(tokenizer: tiktoken.Encoding) -> str:
    """A hash of which bytes each token id stands for, of the end-of-text id and of how text is split into words."""
    digest = hashlib.sha256(f"{tokenizer.n_vocab} {tokenizer.eot_token} {tokenizer._pat_str}".encode())
    for token in range(tokenizer.n_vocab):
        try:
            content = tokenizer.decode_single_token_bytes(token)
        except KeyError:  # an id that is not used
            continue
        digest.update(b"%d %d " % (token, len(content)) + content)
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """The folder for this process alone, until it ends however it ends. Some network file systems have no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PrepareError(f"{folder} is being written by another mars-dist prepare; wait for it") from None
        except OSError:
            pass
        yield descriptor
    finally:
        os.close(descriptor)


def _state(folder: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Where to go on: None if all is done. Raises PrepareError if the folder holds something else."""
    fresh: dict[str, Any] = {"position": None, "splits": {}}
    if (folder / INDEX).exists():
        index = read_index(folder)
        _same(folder, index, plan)
        for split in SPLITS:
            if index["splits"].get(split, {}).get("shards"):
                open_split(folder, split)  # are all files there, and as long as they should be?
        (folder / PROGRESS).unlink(missing_ok=True)
        return None
    if not (folder / PROGRESS).exists():
        for file in sorted(folder.glob("*.bin")):
            raise PrepareError(
                f"{folder} holds {file.name}, which is not of a prepare; choose an empty folder as --out"
            )
        return fresh
    try:
        state = json.loads((folder / PROGRESS).read_text())
        begun = any(split["documents"] for split in state["splits"].values())
        state["position"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PrepareError(f"{folder / PROGRESS} is damaged ({error!r}); delete {folder} and start again") from error
    if not begun:
        return fresh
    _same(folder, state, plan)
    return state


def _same(folder: Path, there: dict[str, Any], plan: dict[str, Any]) -> None:
    """Raises PrepareError, naming what differs, unless the folder was begun with the same plan."""
    old, new = _flat({key: there.get(key) for key in plan}), _flat(plan)
    differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if differing := [key for key in differing if key != "source.path"]:
        told = ", ".join(f"{OPTIONS.get(key, key)} ({old.get(key)} there, {new.get(key)} now)" for key in differing)
        raise PrepareError(f"{folder} holds other data, differing in {told}; choose another --out or delete it")


def _flat(plan: dict[str, Any]) -> dict[str, Any]:
    source = plan["source"] if isinstance(plan["source"], dict) else {}
    return {k: v for k, v in plan.items() if k != "source"} | {f"source.{k}": v for k, v in source.items()}
