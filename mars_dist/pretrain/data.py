"""Text to training sequences: the shipped text, its tokens, and which sequence is read where and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from mars_dist.pretrain.shards import DataError
from mars_dist.pretrain.tokenizer import ASSETS, END_OF_TEXT_ID, read_asset

if TYPE_CHECKING:
    import tiktoken

TEXT_FILE = ASSETS / "shakespeare.txt.xz"
TEXT_SHA256 = "2547dec46341a194b3009ef12559073ad3433e2432ddebeb289f7292a9d723f2"

Tokens = npt.NDArray[np.uint16]


class TokenSequence(Protocol):
    """What training reads: an array of tokens, or `shards.Shards`, which holds none of them in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> Any: ...


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

    The permutation of the current epoch is kept, 4 bytes per block: 35 MB per rank for 9 B tokens in sequences of
    1,024. That buys an order that is really uniform and a look-up that costs nothing.

    overlap: tokens of the next block that a sequence also has, at its end. With 1, the model reads the first `length`
    and predicts the last `length`, so that no token but the first of the text goes without being predicted.

    vocabulary: number of ids that the model knows. A token that is not below it is a DataError when it is read,
    rather than an assertion on the GPU; None: not looked at.
    """

    def __init__(
        self, tokens: TokenSequence, length: int, seed: int, vocabulary: int | None = None, overlap: int = 0
    ) -> None:
        self.tokens, self.length, self.seed, self.vocabulary, self.overlap = tokens, length, seed, vocabulary, overlap
        self.count = max(0, len(tokens) - overlap) // length
        if self.count == 0:
            name = getattr(tokens, "name", "the text")
            raise DataError(
                f"{name} has {len(tokens)} tokens, fewer than one sequence of {length + overlap}: give more text (for "
                "'val', prepare again into another --out with a larger --val-fraction) or shorter sequences "
                "(--set model.sequence_length=N)"
            )
        self._epoch, self._order = -1, np.empty(0, dtype=np.uint32)

    def index(self, i: int) -> int:
        """Which block is the run's i-th sequence."""
        epoch, position = divmod(i, self.count)
        if epoch != self._epoch:  # a cache: one permutation is kept
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return int(self._order[position])

    def _shuffled(self, epoch: int) -> npt.NDArray[np.uint32]:
        """The same order as `Generator.permutation(count)` gives, in half the memory."""
        if self.count >= 2**32:
            raise DataError(f"{self.count:,} sequences of {self.length} are more than 2**32; take longer sequences")
        order = np.arange(self.count, dtype=np.uint32)
        np.random.default_rng((self.seed, epoch)).shuffle(order)
        return order

    def batch(self, step: int, batch: int, rank: int = 0, world_size: int = 1) -> npt.NDArray[np.int64]:
        """This rank's share of the global batch of `batch` sequences at `step` (from 0).

        Its shape is (batch / world_size, length + overlap).

        Raises DataError if the batch does not divide over the ranks or a token is outside the vocabulary.
        """
        if batch % world_size:
            fitting = [n for n in range(1, batch + 1) if batch % n == 0]
            raise DataError(
                f"a batch of {batch} sequences does not divide over {world_size} ranks; take one of {fitting}"
            )
        share = batch // world_size
        first = step * batch + rank * share
        starts = [self.index(i) * self.length for i in range(first, first + share)]
        out = np.empty((share, self.length + self.overlap), dtype=np.int64)
        for sequence, start in zip(out, starts, strict=True):
            sequence[:] = self.tokens[start : start + len(sequence)]
        if self.vocabulary is not None and share and int(out.max()) >= self.vocabulary:
            row, column = (int(k) for k in np.unravel_index(int(out.argmax()), out.shape))
            place = starts[row] + column
            where = getattr(self.tokens, "locate", lambda i: f"token {i:,} of the text")(place)
            raise DataError(
                f"{where} is {out[row, column]}, outside the vocabulary of {self.vocabulary}: the data was made with "
                "another tokenizer or dtype, or is damaged"
            )
        return out
