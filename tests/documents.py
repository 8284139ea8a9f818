"""Documents for the tests of `prepare` and of its sources."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

from mars_dist.pretrain.data import shakespeare
from mars_dist.pretrain.tokenizer import END_OF_TEXT

ODD = [
    "",
    "a",
    "naïve café 日本語 \U0001f600",
    f"{END_OF_TEXT} written out {END_OF_TEXT}",
    " \n\t\r\n ",
    "é" * 5000,
    "x",
]


@cache
def different_texts() -> list[str]:
    """400 documents of very different lengths, all different, the odd ones first."""
    text, draw = shakespeare()[6], random.Random(1)
    pieces = [text[i : i + int(draw.expovariate(1 / 300))] for i in range(0, 400 * 300, 300)]
    return ODD + [f"{i} {piece}" for i, piece in enumerate(pieces[len(ODD) :])]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path
