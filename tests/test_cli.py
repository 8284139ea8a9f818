"""``mars-dist`` as a person uses it: help, refusals in one line, and from text to curve and exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mars_dist
from mars_dist import cli
from mars_dist.checkpoint import Reader
from mars_dist.pretrain import recipe as recipes
from tests.processes import run_python

SMALL = ["model.layers=1", "model.heads=1", "model.width=8", "model.sequence_length=16"]
SMALL += ["training.steps=4", "training.batch=4", "training.micro_batch=2", "schedule.warmup_steps=1"]
SMALL += ["validation.every=2", "validation.batches=1", "checkpoint.every_steps=2"]
SETTINGS = [word for setting in SMALL for word in ("--set", setting)]


def test_help_teaches_without_importing_torch(tmp_path: Path) -> None:
    code = """
import sys
from mars_dist.cli import main
for words in (["--help"], ["train", "--help"], ["--version"]):
    try:
        main(words)
    except SystemExit as end:
        print("exit", end.code)
print("heavy", sorted({"torch", "numpy", "pydantic", "yaml", "transformers", "deepspeed"} & set(sys.modules)))
"""
    done = run_python("-c", code, folder=tmp_path)
    assert done.stdout.count("exit 0") == 3 and "heavy []" in done.stdout
    assert f"mars-dist {mars_dist.__version__}" in done.stdout
    for word in ("prepare", "report", "export", "exit codes: 0 done", "gpt2-large", "-mars-adamw (the default)"):
        assert word in done.stdout


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "gpt2-smal"], "gpt2-small"),
        (["train", "tiny", "--set", "training.step=4"], "training.steps"),
        (["train", "tiny", "--set", "optimizer.lr=fast"], "optimizer.lr"),
        (["train", "tiny", "--set", "data.path=/nowhere"], "/nowhere"),
        (["prepare", "--out", "x"], "give files, or --dataset ID, or --shipped"),
        (["prepare", "/nowhere.txt", "--out", "x"], "/nowhere.txt"),
        (["report", "/nowhere"], "/nowhere"),
        (["export", "/nowhere", "x"], "/nowhere holds no complete checkpoint"),
    ],
)
def test_an_error_is_one_line_with_the_remedy(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert code == 1 and out == "" and err.startswith("mars-dist: error: ")
    assert message in err and err.count("\n") == 1
    with pytest.raises((ValueError, OSError)):
        cli.main([*words, "--debug"])


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["fly"], ["train"], ["train", "tiny", "--sett", "a=1"]):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert end.value.code == 2
    assert "usage: mars-dist" in capsys.readouterr().err


def test_show_prints_a_recipe_that_says_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "train", "gpt2-medium-muon", "--set", "training.micro_batch=3", "--show")
    file = tmp_path / "mine.yaml"
    file.write_text(out)
    expected = recipes.load("gpt2-medium-muon", ["training.micro_batch=3"])
    assert code == 0 and recipes.load(file).model_dump(exclude={"name"}) == expected.model_dump(exclude={"name"})


def test_the_deepspeed_launchers_argument_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """It comes before the command, whatever the command is."""
    code, out, _ = run(capsys, "--local_rank=0", "train", "tiny", "--show")
    assert code == 0 and "layers: 4" in out


def test_check_is_the_checker_of_configurations(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"optimizer": {"type": "MARS", "params": {"gama": 1}}, "gradient_clipping": 1.0}))
    code, out, _ = run(capsys, "check", file)
    assert code == 1 and "optimizer.params.gama" in out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text, prepared; and two small runs on it, MARS-AdamW and AdamW."""
    folder = tmp_path_factory.mktemp("application")
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"Document {i} speaks of MARS and of little else. " * 20)
    prepare = ["prepare", *map(str, sorted(folder.glob("*.txt"))), "--out", str(folder / "data")]
    assert cli.main([*prepare, "--val-fraction", "0.3", "--workers", "1", "--quiet"]) == 0
    for optimizer in ("mars-adamw", "adamw"):
        words = ["train", f"tiny-{optimizer}", *SETTINGS, "--set", f"data.path={folder / 'data'}"]
        assert cli.main([*words, "--out", str(folder / optimizer), "--quiet"]) == 0
    return folder


def test_the_prepared_text_was_what_was_read(runs: Path) -> None:
    index = json.loads((runs / "data/index.json").read_text())
    assert sum(split["documents"] for split in index["splits"].values()) == 40
    resolved = recipes.load(runs / "mars-adamw/recipe.yaml")
    assert resolved.data.path == str(runs / "data") and resolved.training.steps == 4
    lines = [json.loads(line) for line in (runs / "mars-adamw/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 4]
    assert lines[-1]["summary"]["rules"] == {"MARS-AdamW": 6, "AdamW": 10}


def test_prepare_says_what_it_leaves_out_and_that_nothing_is_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/one.txt").write_text("One document.")
    (tmp_path / "texts/notes.md").write_text("not read")
    words = ["prepare", tmp_path / "texts", "--out", tmp_path / "data", "--workers", "1", "--val-fraction", "0"]
    code, out, err = run(capsys, *words)
    assert code == 0 and "train: 1 documents, 4 tokens" in out and "tokenizer: GPT-2's, from " in out
    assert "name not known: 1" in err and "the text is one document, so nothing is held out" in err
    assert "--set validation.every=0" in out
    code, out, err = run(capsys, *words[:3], tmp_path / "other", "--val-fraction", "0.99", "--workers", "1")
    assert code == 0 and "no document went to train" in err and "train on it" not in out


def test_a_finished_run_is_not_run_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "tiny-adamw", *SETTINGS, "--set", f"data.path={runs / 'data'}", "--out", runs / "adamw", "--json"]
    code, out, _ = run(capsys, *words)
    assert code == 0 and json.loads(out)["summary"]["steps"] == 4


def test_under_accelerate_launch(tmp_path: Path) -> None:
    """On a CPU it starts one process and sets the same variables as torchrun does for several GPUs."""
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "mars_dist.cli", "train", "tiny", *SETTINGS]
    done = run_python(*launch, "--out", tmp_path / "run", "--quiet", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["summary"]["steps"] == 4 and lines[-1]["summary"]["rules"] == {"MARS-AdamW": 6, "AdamW": 10}


def test_report(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png, html = runs / "curves.png", runs / "report.html"
    code, out, _ = run(capsys, "report", runs / "mars-adamw", runs / "adamw", "--png", png, "--html", html)
    assert code == 0 and "tiny-mars-adamw" in out and "speed-up in tokens" in out
    assert png.read_bytes().startswith(b"\x89PNG") and "<html" in html.read_text()


def test_the_exported_model_is_the_trained_one(runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "export", runs / "mars-adamw", tmp_path / "model")
    assert code == 0 and f"wrote {tmp_path / 'model'}" in out
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    saved = Reader(runs / "mars-adamw/checkpoints/step-00000004")
    for name, p in model.named_parameters():
        assert torch.equal(p, saved.whole(f"{name}/param")), name
    assert tokenizer("hello world")["input_ids"] == [31373, 995] and tokenizer.eos_token_id == 50256
    text = "  It's 12 o'clock;\n\n\tnaïve café, 日本語 \U0001f600 \r\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    code, _, err = run(capsys, "export", runs / "mars-adamw", tmp_path / "model")
    assert code == 1 and "exists and is not empty" in err
