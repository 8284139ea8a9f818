"""Chunks of documents to tokens, in this process or in several, always in the order of the chunks."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mars_dist.pretrain.readers import PrepareError
from mars_dist.pretrain.sources import Chunk

if TYPE_CHECKING:
    import tiktoken

SPLITS = ("train", "val")
# tiktoken's pattern needs stack for every blank of a run that ends in a word, and gives up at about a million. Such a
# run is one piece but for its last blank, so cutting there changes no token. These are the blanks that \s means there.
BLANK = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
LONG_RUN = re.compile(f"([{BLANK}]{{4096,}}(?=[{BLANK}][^{BLANK}]))")


class Part(NamedTuple):
    """Documents of one split: their tokens, end to end, each with its end-of-text token, and tokens per document."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]


class Encoder:
    """What turns the documents of a chunk into parts; `dtype` must hold the tokenizer's ids."""

    def __init__(self, tokenizer: tiktoken.Encoding, val_fraction: float, dtype: np.dtype[Any]) -> None:
        self.tokenizer, self.dtype = tokenizer, dtype
        self.threshold = int(val_fraction * 2**64)
        self.end = np.array([tokenizer.eot_token], dtype=np.uint32)

    def __call__(self, texts: list[str]) -> dict[str, Part]:
        found: dict[str, list[npt.NDArray[Any]]] = {split: [] for split in SPLITS}
        for text in texts:
            found["val" if self._is_val(text) else "train"] += [self._ids(text), self.end]
        parts = {}
        for split, arrays in found.items():
            lengths = np.array([len(ids) + 1 for ids in arrays[::2]], dtype=np.int64)
            tokens = np.concatenate(arrays, dtype=self.dtype, casting="unsafe") if arrays else np.empty(0, self.dtype)
            parts[split] = Part(tokens, lengths)
        return parts

    def _is_val(self, text: str) -> bool:
        """By the first 64 bits of the sha256 of its text, so equal documents are never on both sides."""
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8]) < self.threshold

    def _ids(self, text: str) -> npt.NDArray[np.uint32]:
        """What `encode_ordinary` gives, without a Python integer for every token."""
        try:
            return self.tokenizer.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half of a surrogate pair, as JSON may hold: replaced, as in encode_ordinary
            return self._ids(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except ValueError as error:
            pieces = LONG_RUN.split(text)
            if len(pieces) == 1:
                raise PrepareError(
                    f"the document of {len(text):,} characters that begins {text[:60]!r} cannot be encoded ({error})"
                ) from error
            return np.concatenate([self._ids(piece) for piece in pieces if piece])


def encode_in_order(
    chunks: Iterator[Chunk],
    workers: int,
    tokenizer: tiktoken.Encoding,
    val_fraction: float,
    dtype: np.dtype[Any],
    lock: int,
) -> Generator[tuple[Chunk, dict[str, Part]], None, None]:
    """Every chunk with its parts. Documents are read a few chunks ahead; `lock` is closed in the workers.

    The chunks come back without their texts. Raises PrepareError if a document cannot be encoded or a worker is killed.
    """
    encoder = Encoder(tokenizer, val_fraction, dtype)
    if workers == 1:
        for chunk in chunks:
            yield Chunk([], chunk.position, chunk.where), encoder(chunk.texts)
        return
    # Forked: the tokenizer need not be sent, and the workers share the memory of what is already loaded. All of them
    # start with the first task, before pyarrow or datasets start threads here.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker, (encoder, lock))
    waiting: deque[tuple[Chunk, Future[dict[str, Part]]]] = deque()
    try:
        pool.submit(_encode, []).result()
        for chunk in chunks:
            waiting.append((Chunk([], chunk.position, chunk.where), pool.submit(_encode, chunk.texts)))
            del chunk
            if len(waiting) >= 2 * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    except BrokenProcessPool as error:
        raise PrepareError(
            "a worker process was killed, perhaps for want of memory; run it again with fewer --workers, it goes on "
            "where it was"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder  # of a worker process


def _start_worker(encoder: Encoder, lock: int) -> None:
    global _encoder
    _encoder = encoder
    os.close(lock)  # or the folder would stay locked until this process has noticed that its parent was killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode(texts: list[str]) -> dict[str, Part]:
    return _encoder(texts)
