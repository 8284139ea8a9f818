"""Text to training sequences: the shipped text, its tokens, and which sequence is read where and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mars_dist.pretrain.tokenizer import ASSETS, END_OF_TEXT_ID, read_asset

if TYPE_CHECKING:
    import tiktoken

TEXT_FILE = ASSETS / "shakespeare.txt.xz"
TEXT_SHA256 = "2547dec46341a194b3009ef12559073ad3433e2432ddebeb289f7292a9d723f2"

Tokens = npt.NDArray[np.uint16]


def shakespeare() -> list[str]:
    """The shipped text: 42 works, each one document."""
    return read_asset(TEXT_FILE, TEXT_SHA256).decode("ascii").split("\f")


def split(documents: Sequence[str], held_out: int) -> tuple[list[str], list[str]]:
    """Training documents and the last `held_out` ones, whole: no sentence of them is ever trained on."""
    if not 0 < held_out < len(documents):
        raise ValueError(f"held_out is {held_out}, must be between 1 and {len(documents) - 1} of the documents")
    return list(documents[:-held_out]), list(documents[-held_out:])


def encode(documents: Sequence[str], tokenizer: tiktoken.Encoding) -> Tokens:
    """All documents as one array, each followed by the end-of-text token. Special tokens in the text are plain text."""
    tokens: list[int] = []
    for ids in tokenizer.encode_ordinary_batch(list(documents), num_threads=1):
        tokens += ids
        tokens.append(END_OF_TEXT_ID)
    return np.array(tokens, dtype=np.uint16)


def unigram_loss(train: Tokens, held_out: Tokens) -> float:
    """Cross entropy in nats of the best model that ignores context: what a trained model must get below.

    Frequencies of `train`, one count added to each of the tokens that occur in either array, measured on `held_out`.
    """
    both = np.unique(np.concatenate([train, held_out]))
    counts = np.bincount(train, minlength=int(both[-1]) + 1).astype(np.float64)
    counts[both] += 1
    return float(-np.log(counts[held_out] / counts.sum()).mean())


class Blocks:
    """Sequences of `length` tokens cut from one array, end to end, in an order that depends on the seed alone.

    Sequence i of the run (i = step * batch + position in the batch) is the same for every number of ranks: each
    epoch is one permutation of all blocks, drawn from (seed, epoch), and a step's batch is split over the ranks in
    contiguous pieces. So there is no state to save: a run continues at any step, on any world size.
    """

    def __init__(self, tokens: Tokens, length: int, seed: int) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
        self.count = len(tokens) // length
        if self.count == 0:
            raise ValueError(f"the text has {len(tokens)} tokens, fewer than one sequence of {length}: give more text")
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def index(self, i: int) -> int:
        """Which block is the run's i-th sequence."""
        epoch, position = divmod(i, self.count)
        if epoch != self._epoch:  # a cache: one permutation is kept
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return int(self._order[position])

    def batch(self, step: int, batch: int, rank: int = 0, world_size: int = 1) -> npt.NDArray[np.int64]:
        """This rank's share of the global batch of `batch` sequences at `step` (from 0): (batch/world_size, length)."""
        if batch % world_size:
            fitting = [n for n in range(1, batch + 1) if batch % n == 0]
            raise ValueError(
                f"a batch of {batch} sequences does not divide over {world_size} ranks; take one of {fitting}"
            )
        share = batch // world_size
        first = step * batch + rank * share
        starts = [self.index(i) * self.length for i in range(first, first + share)]
        return np.stack([self.tokens[s : s + self.length] for s in starts]).astype(np.int64)
