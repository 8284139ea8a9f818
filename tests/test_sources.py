"""Documents from files, data sets and the shipped text: the same in every format, from any place on; refusals."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mars_dist.pretrain import readers, sources
from mars_dist.pretrain.data import shakespeare
from mars_dist.pretrain.readers import PrepareError
from mars_dist.pretrain.sources import open_source
from tests.documents import different_texts, write_jsonl


def pack(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content[:50]) + gzip.compress(content[50:]))  # two members, as pigz writes
    elif path.suffix == ".bz2":
        path.write_bytes(bz2.compress(content))
    elif path.suffix == ".xz":
        path.write_bytes(lzma.compress(content))
    elif path.suffix == ".zst":
        with pa.output_stream(str(path), compression="zstd") as file:
            file.write(content)
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("compression", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("form", ["txt", "jsonl", "parquet"])
def test_every_format_gives_the_same_documents(form: str, compression: str, tmp_path: Path) -> None:
    plain, texts = tmp_path / f"plain.{form}", different_texts()
    if form == "txt":
        plain.write_bytes("~~".join(texts).encode())
    elif form == "jsonl":
        write_jsonl(plain, texts)
    else:
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), plain, row_group_size=90)
    path = pack(tmp_path / f"packed.{form}{compression}", plain.read_bytes())
    source = open_source(path, separator="~~")
    assert [text for chunk in source.chunks() for text in chunk.texts] == texts


@pytest.mark.parametrize("form", ["txt", "jsonl", "parquet"])
def test_reading_goes_on_behind_any_document(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK", 1)  # a position behind every document
    texts = [f"document {i}" for i in range(25)]
    for number, part in enumerate((texts[:11], [], texts[11:])):
        path = tmp_path / f"{number}.{form}"
        if form == "txt":
            path.write_text("".join(text + "\n\n" for text in part))
        elif form == "jsonl":
            path.write_text("\n \n".join(json.dumps({"text": text}) for text in part))  # blank lines are nothing
        else:
            pq.write_table(pa.table({"text": pa.array(part, pa.large_string())}), path, row_group_size=4)
    source = open_source(tmp_path, separator="\n\n")
    chunks = list(source.chunks())
    assert [chunk.texts for chunk in chunks] == [[text] for text in texts]
    for done, chunk in enumerate(chunks, 1):
        position = json.loads(json.dumps(chunk.position))
        assert [text for rest in source.chunks(position) for text in rest.texts] == texts[done:]


def test_a_hugging_face_data_set_is_streamed_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {i}" for i in range(23)]
    for number, part in enumerate((texts[:9], texts[9:])):
        table = pa.table({"id": range(len(part)), "body": part})
        pq.write_table(table, tmp_path / f"train-{number}.parquet", row_group_size=5)
    source = open_source(f"hf:{tmp_path}", field="body")
    for size in (1, 100, 10_000):
        monkeypatch.setattr(sources, "CHUNK", size)
        chunks = list(source.chunks())
        assert [text for chunk in chunks for text in chunk.texts] == texts
        done = 0
        for chunk in chunks:
            done += len(chunk.texts)
            position = json.loads(json.dumps(chunk.position))
            assert [text for rest in source.chunks(position) for text in rest.texts] == texts[done:]
    with pytest.raises(PrepareError, match=r"data set .*, row 1: no field 'text'; there are 'id', 'body'"):
        list(open_source(f"hf:{tmp_path}").chunks())
    with pytest.raises(PrepareError, match=r"data set .* cannot be read: ValueError: Bad split: other"):
        list(open_source(f"hf:{tmp_path}", split="other").chunks())


def test_a_text_file_is_one_document_and_its_bytes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"second\r\n")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\n")  # a byte-order mark is not text
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "README").write_text("no")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/d.text").write_text("é")

    def read(where: Any) -> list[str]:
        return [text for chunk in open_source(where).chunks() for text in chunk.texts]

    assert read(tmp_path) == ["first\n", "second\r\n", "", "é"]
    assert read(str(tmp_path / "[ab].txt")) == ["first\n", "second\r\n"]
    assert read([tmp_path / "b.txt", tmp_path]) == ["second\r\n", "first\n", "", "é"]
    assert read("shipped") == shakespeare()


@pytest.mark.parametrize("size", [2, 3, 4, 7, 1000])
def test_a_separator_is_found_across_the_blocks_that_are_read(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BLOCK", size)
    path = tmp_path / "a.txt"
    for content in ("<|><|>", "a<|>", "a", "", "<|a|>b<|>", "ab<<|>é<|>cde<|>f|>", "<|>a"):
        path.write_text(content)
        expected = content.split("<|>")
        expected = expected if expected[-1] else expected[:-1]  # nothing behind the last separator
        found = open_source(path, separator="<|>").chunks()
        assert [text for chunk in found for text in chunk.texts] == expected, content


@pytest.mark.parametrize(
    ("given", "meant"), [(r"\n\n", "\n\n"), (r"\t\r", "\t\r"), (r"a\\n", r"a\n"), (r"\d", r"\d"), ("\n", "\n")]
)
def test_a_separator_as_a_shell_gives_it(given: str, meant: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(f"one{meant}two".encode())
    assert next(open_source(tmp_path, separator=given).chunks()).texts == ["one", "two"]


def test_in_a_list_a_name_is_that_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command gives what stands on its line; "shipped" and "hf:NAME" by themselves are its options."""
    monkeypatch.chdir(tmp_path)
    for name in ("shipped", "hf:name"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"in {name}")
        for where in ([name], Path(name)):
            assert next(open_source(where).chunks()).texts == [f"in {name}"]
    both = open_source(["shipped", "hf:name"])
    assert next(both.chunks()).texts == ["in shipped", "in hf:name"]
    assert next(open_source("shipped").chunks()).texts == shakespeare()[:1]


def test_what_a_folder_holds_besides_is_counted(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git/b.txt").write_text("hidden")
    elsewhere.mkdir()
    (elsewhere / "c.txt").write_text("linked")
    (folder / "link").symlink_to(elsewhere)
    (folder / "c.txt").symlink_to(elsewhere / "c.txt")
    (folder / "loop").symlink_to(folder)
    (folder / "a.txt").write_text("a")
    (folder / "a.pdf").write_text("a")
    (folder / "notes").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "b.txt")
    source = open_source(folder)
    assert next(source.chunks()).texts == ["a", "linked"]
    assert source.left_out == {"hidden": 1, "link to a folder": 2, "not a regular file": 1, "name not known": 2}
    assert open_source(folder / "a.txt").left_out == {} == open_source("shipped").left_out
    (folder / "d.txt").symlink_to(tmp_path / "nowhere")
    for where in (folder, folder / "d.txt", folder / "*.txt"):
        with pytest.raises(PrepareError, match="d.txt is a link that leads nowhere"):
            open_source(where)


def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refusing(path: Any) -> Any:  # root, as whom tests may run, is refused nothing
        if os.path.basename(path) == "closed":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PrepareError, match=r"folder .*/closed cannot be read \(Permission denied\)"):
        open_source(tmp_path)


# ---- what is refused in a source


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl, line 2: not one JSON object"),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', r"a.jsonl, line 3: list, not a JSON object"),
        (
            "a.jsonl",
            b'{"body": "a", "id": 1}\n',
            r"line 1: no field 'text'; there are 'body', 'id': name one with --text",
        ),
        ("a.jsonl", b"{}\n", r"a.jsonl, line 1: no field 'text', and no other"),
        ("a.jsonl", b'{"text": null}\n', r"a.jsonl, line 1: field 'text' is null, not text"),
        ("a.jsonl", b'{"text": 5}\n', r"a.jsonl, line 1: field 'text' is int, not text"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a.jsonl, line 1, byte 10: 0xff is not UTF-8; save .* --errors replace"),
        ("a.jsonl", b'{"a":' * 100_000, r"a.jsonl, line 1: not one JSON object"),
        ("a.jsonl", b'{"a": %s}' % (b"9" * 5000), r"a.jsonl, line 1: not one JSON object \(Exceeds the limit"),
        ("a.json", b'\n [\n{"text": "a"}]', r"a.json, line 2: a JSON array; one object per line is needed"),
        ("a.json", b"[" * 100_000, r"a.json, line 1: a JSON array"),
        ("a.txt", b"\xef\xbb\xbfabc\xe9", r"a.txt, byte 6: 0xe9 is not UTF-8"),
        ("a{0}.txt", b"ab##c\xe9##", r"a\{0\}.txt, byte 5: 0xe9 is not UTF-8"),
        ("a.txt.gz", gzip.compress(os.urandom(5000))[:2000], r"a.txt.gz is cut short or damaged"),
        ("a.txt.gz", b"no gzip", r"a.txt.gz is cut short or damaged"),
        ("a.txt.bz2", bz2.compress(b"abc" * 99)[:30], r"a.txt.bz2 is cut short or damaged"),
        ("a.txt.xz", lzma.compress(b"abc" * 99)[:30], r"a.txt.xz is cut short or damaged"),
        ("a.txt.zst", b"no zstd", r"a.txt.zst is cut short or damaged"),
        ("a.txt.gz", b"", r"a.txt.gz is cut short or damaged .it has 0 bytes"),
        ("a.jsonl.bz2", b"", r"a.jsonl.bz2 is cut short or damaged"),
        ("a.txt.xz", b"", r"a.txt.xz is cut short or damaged"),
        ("a.txt.zst", b"", r"a.txt.zst is cut short or damaged"),
        ("a.parquet.gz", b"", r"a.parquet.gz is cut short or damaged"),
        ("a.parquet", b"PAR1 no", r"a.parquet is not a whole Parquet file"),
        ("a.parquet", b"", r"a.parquet is not a whole Parquet file"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PrepareError, match=message) as raised:
        list(open_source(path, separator="##" if "{" in name else None).chunks())
    assert "\n" not in str(raised.value)


def test_bytes_that_are_not_utf8_are_replaced_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\xe9b")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a\xe9b"}\n')
    pq.write_table(pa.table({"text": pa.array([b"a\xe9b"], pa.binary()).view(pa.string())}), tmp_path / "c.parquet")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(PrepareError, match="0xe9 is not UTF-8"):
            list(open_source(path).chunks())
        assert next(open_source(path, errors="replace").chunks()).texts == ["a\ufffdb"]


def test_parquet_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", None], "d": pa.array(["u", "v"]).dictionary_encode()}), path)
    assert next(open_source(path, field="d").chunks()).texts == ["u", "v"]
    for field, message in [
        ("text", r"a.parquet, row 2: 'text' is null, not text"),
        ("id", r"a.parquet: column 'id' is int64, not text"),
        ("body", r"a.parquet: no column 'body'; there are 'id', 'text', 'd'"),
    ]:
        with pytest.raises(PrepareError, match=message):
            list(open_source(path, field=field).chunks())


def test_options_and_names_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"where": tmp_path / "none"}, r"none: no file with text found; names ending in .txt, .* are read"),
        ({"where": tmp_path / "a.pdf"}, r"a.pdf: not known what is in it"),
        ({"where": []}, "no source is given"),
        ({"where": ["shipped", tmp_path]}, "shipped: no file with text found"),
        ({"where": ["hf:name"]}, "hf:name: no file with text found"),
        ({"where": tmp_path, "errors": "ignore"}, "--errors is 'ignore', must be 'strict' or 'replace'"),
        ({"where": tmp_path, "separator": ""}, "--separator is empty"),
        ({"where": tmp_path, "form": "csv"}, "--format 'csv' is not known; there are jsonl, parquet, txt"),
    ]
    for arguments, message in cases:
        with pytest.raises(PrepareError, match=message):
            open_source(**arguments)
    assert next(open_source(tmp_path / "a.pdf", form="txt").chunks()).texts == ["a"]
