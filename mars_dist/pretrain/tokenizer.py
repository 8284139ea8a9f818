"""GPT-2's byte-pair encoding: tiktoken's encoder with the ranks that ship in `assets/`.

`tiktoken.get_encoding("gpt2")` would download the ranks, or take them from TIKTOKEN_CACHE_DIR and delete a file there
whose hash is not the expected one. Here nothing is downloaded and no folder of the user's is read or written.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import lzma
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tiktoken

ASSETS = Path(__file__).parent / "assets"
RANKS_FILE = ASSETS / "r50k_base.tiktoken.xz"
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"  # as pinned by tiktoken

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 50256
VOCABULARY = 50257
PADDED_VOCABULARY = 50304  # the next multiple of 64: the model's rows 50257.. are never an input nor a target

# GPT-2's pattern as tiktoken writes it (possessive, the same splits as the original).
SPLIT_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def read_asset(path: Path, sha256: str) -> bytes:
    """The decompressed content of an .xz file, refused unless its sha256 is the given one."""
    try:
        content = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise RuntimeError(f"{path} cannot be read ({error}): install mars_dist again") from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise RuntimeError(
            f"{path} is damaged: sha256 of its content is {found}, expected {sha256}: install mars_dist again"
        )
    return content


def load_ranks(path: Path = RANKS_FILE) -> dict[bytes, int]:
    """Token bytes -> rank, from an .xz of tiktoken's own format (`base64(token) rank` per line)."""
    lines = read_asset(path, RANKS_SHA256).splitlines()
    try:
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    except (ValueError, binascii.Error) as error:
        raise RuntimeError(f"{path}: not a list of `base64(token) rank` lines ({error})") from error


def gpt2_tokenizer(ranks_file: Path = RANKS_FILE) -> tiktoken.Encoding:
    """GPT-2's encoding (50,257 tokens, `<|endoftext|>` is 50256); offline; the ranks come from `ranks_file`."""
    import tiktoken

    return tiktoken.Encoding(
        name="gpt2",
        pat_str=SPLIT_PATTERN,
        mergeable_ranks=load_ranks(ranks_file),
        special_tokens={END_OF_TEXT: END_OF_TEXT_ID},
        explicit_n_vocab=VOCABULARY,
    )
