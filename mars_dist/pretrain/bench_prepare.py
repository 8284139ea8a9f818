"""``python -m mars_dist.pretrain.bench_prepare``: tokens per CPU second of `prepare`, beside what one could do instead.

- tiktoken: `encode_ordinary` on one document after the other, all in memory, the tokens thrown away: the ceiling;
- prepare: from a JSON lines file to shards and index, on one process and on several;
- datasets.map: batched, with a Hugging Face GPT2TokenizerFast made from the same ranks, into datasets' own files.

CPU time is user and system time of the process and its children (tokenizers' threads, prepare's workers), without the
imports and the making of the tokenizers. Each runs in a fresh process, in turns, so that a machine that slows down
slows all of them; the median of the rounds is shown. Memory is measured in a run of its own: the sum over the process
and its workers, where memory that they share counts once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mars_dist.pretrain.data import shakespeare
from mars_dist.pretrain.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, gpt2_tokenizer, load_ranks

DOCUMENT = 5000  # characters, about the mean of OpenWebText
BARE, HF = "tiktoken", "datasets.map"


def documents(megabytes: float) -> list[str]:
    """The shipped text in pieces as long as web pages, again and again, up to so many MB (at most 5 MB are new)."""
    text = "\n\n".join(shakespeare())
    count = max(1, round(megabytes * 1e6 / DOCUMENT))
    pieces = [text[i : i + DOCUMENT] for i in range(0, len(text), DOCUMENT)]
    return [pieces[i % len(pieces)] for i in range(count)]


def hugging_face_tokenizer() -> Any:
    """A GPT2TokenizerFast with the ranks of the package; nothing is downloaded.

    A merge table is read off the ranks: a token longer than a byte was made from the two parts into which the
    tokens of lower rank merge it. The bytes are spelled with the printable characters that GPT-2 uses for them.
    """
    from transformers import GPT2TokenizerFast

    ranks = load_ranks()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in printable}
    spelled |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in spelled)}

    def spell(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    def halves(token: bytes, rank: int) -> tuple[bytes, bytes]:
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return parts[0], parts[1]

    vocabulary = {spell(token): rank for token, rank in ranks.items()} | {END_OF_TEXT: END_OF_TEXT_ID}
    pairs = [halves(token, rank) for token, rank in sorted(ranks.items(), key=lambda item: item[1]) if len(token) > 1]
    return GPT2TokenizerFast(vocab=vocabulary, merges=[(spell(a), spell(b)) for a, b in pairs])


def measure(what: str, corpus: Path, workers: int, memory: bool) -> dict[str, Any]:
    """Runs one of them in this process: tokens, CPU seconds, wall seconds, and in bytes the peak of the memory."""
    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        work = _prepared(what, corpus, workers, Path(folder))
        watch = _Watch() if memory else None
        wall, cpu = time.perf_counter(), _cpu_seconds()
        tokens = work()
        found = {"tokens": tokens, "cpu": _cpu_seconds() - cpu, "wall": time.perf_counter() - wall}
        return found | {"memory": watch.stop() if watch else 0}


def _prepared(what: str, corpus: Path, workers: int, folder: Path) -> Callable[[], int]:
    """What is to be timed, with all imports done."""
    if what == BARE:
        texts = [json.loads(line)["text"] for line in corpus.open()]
        encoding = gpt2_tokenizer()
        return lambda: sum(len(encoding.encode_ordinary(text)) for text in texts) + len(texts)
    if what == HF:
        import datasets

        tokenizer = hugging_face_tokenizer()
        datasets.disable_progress_bars()
        rows = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(folder))

        def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
            ids = tokenizer(batch["text"], return_attention_mask=False)["input_ids"]
            ids = [[*one, END_OF_TEXT_ID] for one in ids]
            return {"ids": ids, "length": [len(one) for one in ids]}

        return lambda: sum(rows.map(tokenize, batched=True, remove_columns=rows.column_names)["length"])
    from mars_dist.pretrain.prepare import prepare
    from mars_dist.pretrain.sources import open_source

    encoding = gpt2_tokenizer()

    def run() -> int:
        index = prepare(open_source(corpus), folder / "out", workers=workers, tokenizer=encoding)
        return sum(split["tokens"] for split in index["splits"].values())

    return run


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


class _Watch:
    """The most memory that this process and its children have held, looked at every 20 ms."""

    def __init__(self) -> None:
        self.peak, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def stop(self) -> int:
        self.ended.set()
        self.thread.join()
        return self.peak

    def _look(self) -> None:
        me = os.getpid()
        while not self.ended.wait(0.02):
            tasks = Path(f"/proc/{me}/task").glob("*/children")
            processes = [me, *(int(pid) for task in tasks for pid in _read(task).split())]
            rollups = [_read(Path(f"/proc/{pid}/smaps_rollup")) for pid in processes]
            lines = [line for rollup in rollups for line in rollup.splitlines() if line.startswith("Pss:")]
            self.peak = max(self.peak, sum(int(line.split()[1]) * 1024 for line in lines))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended meanwhile
        return ""


def same_ids(texts: list[str]) -> bool:
    """Whether the Hugging Face tokenizer gives the ids of tiktoken: otherwise the comparison means nothing."""
    encoding, other = gpt2_tokenizer(), hugging_face_tokenizer()
    return other(texts)["input_ids"] == [encoding.encode_ordinary(text) for text in texts]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mars_dist.pretrain.bench_prepare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--megabytes", type=float, default=20, help="size of the text (default 20)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is run (default 3)")
    parser.add_argument("--workers", type=int, default=2, help="of the prepare with several processes (default 2)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # what, corpus, workers, memory: in a fresh process
    args = parser.parse_args(argv)
    if args.one:
        what, corpus, workers, memory = args.one
        print(json.dumps(measure(what, Path(corpus), int(workers), memory == "1")))
        return 0

    texts = documents(args.megabytes)
    if not same_ids(texts[:200]):
        print("the Hugging Face tokenizer gives other ids than tiktoken: nothing is compared", file=sys.stderr)
        return 1
    single, several = "prepare, 1 process", f"prepare, {args.workers} workers"
    workers = {BARE: 1, single: 1, several: args.workers, HF: 1}
    rounds: dict[str, list[dict[str, Any]]] = {what: [] for what in workers}
    memory = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for number in range(args.rounds + 1):
            for what in workers:
                command = [sys.executable, "-m", "mars_dist.pretrain.bench_prepare", "--one", what, str(corpus)]
                command += [str(workers[what]), "1" if number == 0 else "0"]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                found = json.loads(done.stdout.splitlines()[-1])
                if number == 0:
                    memory[what] = found["memory"] / 1e6
                else:
                    rounds[what].append(found)
    if len({found["tokens"] for runs in rounds.values() for found in runs}) != 1:
        print("they made different numbers of tokens", file=sys.stderr)
        return 1
    rates = {what: statistics.median(run["tokens"] / run["cpu"] for run in runs) for what, runs in rounds.items()}
    walls = {what: statistics.median(run["tokens"] / run["wall"] for run in runs) for what, runs in rounds.items()}
    if args.json:
        table = {w: {"per_cpu_second": rates[w], "per_second": walls[w], "memory_mb": memory[w]} for w in workers}
        print(json.dumps(table))
        return 0
    print(f"{rounds[BARE][0]['tokens']:,} tokens, {len(texts):,} documents; median of {args.rounds} rounds\n")
    print(f"{'':22}{'tokens/CPU s':>14}{'/ tiktoken':>12}{'/ map':>8}{'tokens/s':>12}{'memory, MB':>12}")
    for what in workers:
        ratios = f"{rates[what] / rates[BARE]:>12.2f}{rates[what] / rates[HF]:>8.2f}"
        print(f"{what:22}{rates[what]:>14,.0f}{ratios}{walls[what]:>12,.0f}{memory[what]:>12,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
