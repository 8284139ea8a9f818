"""The shipped tokenizer and text, and which rank reads which sequence."""

import lzma
import socket
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from tiktoken_ext import openai_public

from mars_dist.pretrain import tokenizer as tokenizer_module
from mars_dist.pretrain.data import Blocks, encode, shakespeare, split, unigram_loss


@pytest.fixture(scope="module")
def tokenizer() -> tiktoken.Encoding:
    return tokenizer_module.gpt2_tokenizer()


def test_known_ids(tokenizer: tiktoken.Encoding) -> None:
    assert tokenizer.encode("hello world") == [31373, 995]
    assert tokenizer.eot_token == tokenizer_module.END_OF_TEXT_ID == 50256
    assert tokenizer.n_vocab == tokenizer_module.VOCABULARY == 50257
    text = "  It's 12 o'clock;\n\n\tnaïve café, 日本語 \U0001f600 \r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_split_pattern_is_tiktokens() -> None:
    assert tokenizer_module.SPLIT_PATTERN == openai_public.r50k_pat_str


def test_offline_and_the_users_cache_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: object) -> None:
        raise AssertionError("the tokenizer opened a connection")

    # The names under which tiktoken keeps vocab.bpe and r50k_base.tiktoken; it deletes them when their hash is wrong.
    names = ["6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"]
    for name in names:
        (tmp_path / name).write_text("the user's own file")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", no_network)
    assert tokenizer_module.gpt2_tokenizer().encode("hello world") == [31373, 995]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)
    assert all((tmp_path / name).read_text() == "the user's own file" for name in names)


def test_a_damaged_ranks_file_is_refused(tmp_path: Path) -> None:
    content = bytearray(lzma.decompress(tokenizer_module.RANKS_FILE.read_bytes()))
    content[100] ^= 1
    changed = tmp_path / "changed.xz"
    changed.write_bytes(lzma.compress(content, preset=0))
    with pytest.raises(
        RuntimeError, match="changed.xz is damaged: sha256 .* expected 306cd27f.* install mars_dist again"
    ):
        tokenizer_module.gpt2_tokenizer(changed)

    cut = tmp_path / "cut.xz"
    cut.write_bytes(tokenizer_module.RANKS_FILE.read_bytes()[:1000])
    with pytest.raises(RuntimeError, match="cut.xz cannot be read"):
        tokenizer_module.gpt2_tokenizer(cut)
    with pytest.raises(RuntimeError, match="cannot be read .*No such file"):
        tokenizer_module.gpt2_tokenizer(tmp_path / "missing.xz")


def test_shipped_text(tokenizer: tiktoken.Encoding) -> None:
    works = shakespeare()
    assert len(works) == 42
    assert works[6].startswith("HAMLET, PRINCE OF DENMARK")
    tokens = encode(works, tokenizer)
    assert tokens.dtype == np.uint16
    assert len(tokens) == 1_566_042
    assert (tokens == 50256).sum() == 42 and tokens[-1] == 50256


def test_end_of_text_written_in_a_document_is_text(tokenizer: tiktoken.Encoding) -> None:
    tokens = encode(["a<|endoftext|>b", ""], tokenizer)
    assert (tokens == 50256).sum() == 2
    assert tokenizer.decode(tokens[:-2].tolist()) == "a<|endoftext|>b"


def test_held_out_works_are_not_trained_on() -> None:
    works = shakespeare()
    train, held_out = split(works, 3)
    assert train + held_out == works and len(held_out) == 3
    assert not set(train) & set(held_out)
    for wrong in (0, 42, -1):
        with pytest.raises(ValueError, match=f"held_out is {wrong}, must be between 1 and 41"):
            split(works, wrong)


TOKENS = np.arange(1000, dtype=np.uint16)  # so a sequence tells where it was cut


def test_ranks_read_disjoint_parts_of_the_same_global_batch() -> None:
    blocks = Blocks(TOKENS, length=10, seed=1)
    for step in (0, 3, 7, 12, 40):  # 8 sequences a step, 100 blocks: also a step across two epochs
        whole = blocks.batch(step, 8)
        assert whole.shape == (8, 10) and whole.dtype == np.int64
        for world_size in (2, 4, 8):
            parts = [Blocks(TOKENS, 10, seed=1).batch(step, 8, rank, world_size) for rank in range(world_size)]
            assert np.array_equal(np.concatenate(parts), whole)


def test_an_epoch_reads_every_block_once_in_an_order_of_its_own() -> None:
    blocks = Blocks(TOKENS, length=10, seed=1)
    first, second = ([blocks.index(i) for i in range(e * 100, (e + 1) * 100)] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second != list(range(100))
    assert [Blocks(TOKENS, 10, seed=2).index(i) for i in range(100)] != first
    assert [Blocks(TOKENS, 10, seed=1).index(i) for i in range(100, 200)] == second  # started in the middle


def test_blocks_refusals() -> None:
    with pytest.raises(ValueError, match="999 tokens, fewer than one sequence of 1000"):
        Blocks(TOKENS[:999], length=1000, seed=1)
    with pytest.raises(
        ValueError, match=r"batch of 12 sequences does not divide over 5 ranks; take one of \[1, 2, 3, 4"
    ):
        Blocks(TOKENS, length=10, seed=1).batch(0, 12, rank=0, world_size=5)


def test_unigram_loss() -> None:
    even = np.repeat(np.arange(4, dtype=np.uint16), 10_000)
    assert unigram_loss(even, even) == pytest.approx(np.log(4), abs=1e-6)
    rare = np.concatenate([even, np.array([9], dtype=np.uint16)])  # unseen in training: finite
    assert np.log(4) < unigram_loss(even, rare) < 1.5
