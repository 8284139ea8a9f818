"""`mars-dist report`: every number against one computed by hand from a few written-out metrics."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from mars_dist.cli import main
from mars_dist.pretrain import published
from mars_dist.pretrain.report import report
from mars_dist.pretrain.runs import Point, reached, read
from tests.processes import ROOT

PNG = b"\x89PNG\r\n\x1a\n"


def write(
    folder: Path,
    optimizer: str,
    losses: list[float | None],
    *,
    seconds: list[float] | float = 10.0,
    per_step: int = 1000,
    finished: bool = True,
    **facts: Any,
) -> Path:
    """A run with one validation (None: without) a step; ``seconds`` of each record, or for each step."""
    about: dict[str, Any] = {
        "name": f"tiny-{optimizer}",
        "optimizer": {"name": optimizer, "lr": 0.002},
        "parameters": 3_400_000,
        "batch": 10,
        "sequence_length": 100,
        "engine": "ddp",
        "world_size": 2,
        "device": "cpu",
        **facts,
    }
    records: list[dict[str, Any]] = [{"run": about}]
    for i, loss in enumerate(losses):
        clock = seconds[i] if isinstance(seconds, list) else seconds * (i + 1)
        step = {"step": i + 1, "tokens": (i + 1) * per_step, "loss": 6.5 - i, "lr": 0.001, "tokens_per_s": 100.0 + i**2}
        records.append(step | {"seconds": clock} | ({} if loss is None else {"val_loss": loss}))
    if finished:
        rules = {"AdamW": 51, "MARS-AdamW": 25} if optimizer.startswith("mars") else {}
        records.append({"summary": {**about, "steps": len(losses), "seconds": 1.0, "rules": rules}})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def mars(tmp_path: Path) -> Path:
    return write(tmp_path / "mars", "mars-adamw", [5.5, 4.5, 3.5, 3.25], seconds=12.0)


@pytest.fixture
def adamw(tmp_path: Path) -> Path:
    return write(tmp_path / "adamw", "adamw", [6.0, 5.0, 4.5, 4.0], seconds=10.0)


def as_data(capsys: pytest.CaptureFixture[str], *runs: Path, **options: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert report(runs, as_json=True, **options) == 0
    return json.loads(capsys.readouterr().out)


# ---- numbers


@pytest.mark.parametrize("order", [1, -1])
def test_speed_up_at_equal_loss(mars: Path, adamw: Path, order: int, capsys: pytest.CaptureFixture[str]) -> None:
    """AdamW ends at 4.0 after 4,000 tokens and 40 s; MARS passes it half-way from (2,000; 24 s) to (3,000; 36 s)."""
    data = as_data(capsys, *[mars, adamw][::order])
    assert data["baseline"] == "tiny-adamw"
    first, second = data["runs"][::order]
    assert (first["tokens_to_equal_loss"], first["tokens_speed_up"]) == (2500, 1.6)
    assert (first["seconds_to_equal_loss"], first["seconds_speed_up"]) == (30, pytest.approx(4 / 3))
    assert (second["tokens_to_equal_loss"], second["tokens_speed_up"]) == (4000, 1)
    assert second["seconds_speed_up"] == 1


def test_the_last_run_is_the_baseline_without_exactly_one_adamw(
    mars: Path, adamw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "other", "adamw", [6.0, 5.5, 5.0, 4.75], name="slow")
    data = as_data(capsys, adamw, mars, other)
    assert data["baseline"] == "slow"
    assert [run["tokens_to_equal_loss"] for run in data["runs"]] == [2500, 1750, 4000]
    data = as_data(capsys, mars, write(tmp_path / "lion", "mars-lion", [5.0, 4.5]))
    assert (data["baseline"], data["runs"][0]["tokens_speed_up"]) == ("tiny-mars-lion", 1)
    assert as_data(capsys, adamw)["baseline"] is None


def test_a_loss_that_was_not_reached_is_no_number(
    adamw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = write(tmp_path / "worse", "muon", [6.5, 5.5, 5.0, 4.5])
    run = as_data(capsys, worse, adamw)["runs"][0]
    assert run["tokens_to_equal_loss"] is run["tokens_speed_up"] is run["seconds_speed_up"] is None
    report([worse, adamw])
    assert re.search(r"speed-up in tokens +not reached +1\.00 x\n", capsys.readouterr().out)


def test_where_a_curve_reaches_a_loss() -> None:
    points = [Point(1, 100, 1, 5.0), Point(2, 200, 3, 4.0), Point(3, 300, 5, 4.5), Point(4, 400, 7, 3.0)]
    assert reached(points, 4.25) == (175, 2.5)  # the first time, not the second
    assert reached(points, 4.0) == (200, 3)
    assert reached(points, 3.75) == (350, 6)
    assert reached(points, 5.5) == (100, 1)  # an upper bound
    assert reached(points, 2.9) is None
    assert reached([], 5.0) is None


def test_a_speed_up_from_the_first_validation_is_a_lower_bound(
    adamw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = as_data(capsys, write(tmp_path / "fast", "mars-m", [3.9, 3.8]), adamw)
    assert data["runs"][0]["tokens_speed_up"] == 4
    assert "note: tiny-mars-m had it at its first validation: its speed-up is at least this" in data["notes"]


def test_both_sides_count_to_where_the_loss_was_reached_first(tmp_path: Path, mars: Path) -> None:
    """A baseline that ends where it was before gains nothing for the others by training on."""
    up = read(write(tmp_path / "up", "adamw", [6.0, 4.0, 3.5, 4.0])).validation
    assert reached(up, up[-1].loss) == (2000, 20)


def test_time_is_the_sum_of_the_parts_of_a_resumed_run(tmp_path: Path) -> None:
    run = read(write(tmp_path / "falls", "adamw", [6, 5, 4, 3, 2], seconds=[10, 20, 5, 15, 1]))
    assert [point.seconds for point in run.training] == [10, 20, 25, 35, 36]
    assert [point.seconds for point in run.validation] == [10, 20, 25, 35, 36]
    assert run.notes == ["resumed 2 x; its time is the sum of its parts, without lost steps"]

    folder = write(
        tmp_path / "said", "adamw", [6, 5, 4, 3], seconds=[10, 20, 30, 40]
    )  # a second part that began slowly
    head, *steps = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([head, *steps[:2], head, *steps[2:]]))
    run = read(folder)
    assert [point.seconds for point in run.training] == [10, 20, 50, 60]
    assert run.finished


def test_medians_ends_and_shared_validations(mars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write(tmp_path / "other", "adamw", [None, 5.0, None, 4.0, 4.2])
    first, second = as_data(capsys, mars, other)["runs"]
    assert (first["tokens_per_s"], second["tokens_per_s"]) == (102.5, 104)
    assert (first["last_val_loss"], first["best_val_loss"], first["steps"], first["tokens"]) == (3.25, 3.25, 4, 4000)
    assert (second["last_val_loss"], second["best_val_loss"]) == (4.2, 4.0)
    shared = {key: (first[key], second[key]) for key in first if key.startswith("val_loss_at_")}
    assert shared == {"val_loss_at_2000": (4.5, 5.0), "val_loss_at_4000": (3.25, 4.0)}
    assert first["rules"] == {"AdamW": 51, "MARS-AdamW": 25}
    assert first["facts"]["sequence_length"] == 100
    assert second["validation"][0] == {"step": 2, "tokens": 2000, "seconds": 20, "loss": 5.0}


def test_of_many_shared_validations_a_few_are_shown_and_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write(tmp_path / name, name, [9 - i / 10 for i in range(40)]) for name in ("adamw", "muon")]
    first = as_data(capsys, *runs)["runs"][0]
    assert [key for key in first if key.startswith("val_loss_at_")] == [
        f"val_loss_at_{tokens}000" for tokens in (5, 12, 19, 26, 33, 40)
    ]
    assert len(first["validation"]) == 40


# ---- what is shown


def test_the_table(mars: Path, adamw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([mars / "metrics.jsonl", adamw]) == 0
    assert capsys.readouterr().out == TABLE


TABLE = """
                                          tiny-mars-adamw      tiny-adamw
-------------------------------------------------------------------------
optimizer                                      mars-adamw           adamw
learning rate                                       0.002           0.002
tensors under each rule           MARS-AdamW 25, AdamW 51               -
parameters                                         3.40 M          3.40 M
engine x ranks (device)                     ddp x 2 (cpu)   ddp x 2 (cpu)
tokens/s (median)                                     102             102
finished                                              yes             yes
steps                                                   4               4
tokens read                                         4,000           4,000
time                                               48.0 s          40.0 s
last validation loss                                3.250           4.000
best validation loss                                3.250           4.000
validation loss at 1,000 tokens                     5.500           6.000
validation loss at 2,000 tokens                     4.500           5.000
validation loss at 3,000 tokens                     3.500           4.500
validation loss at 4,000 tokens                     3.250           4.000
tokens to 4.000                                     2,500           4,000
speed-up in tokens                                 1.60 x          1.00 x
time to 4.000                                      30.0 s          40.0 s
speed-up in time                                   1.33 x          1.00 x

speed-up: what tiny-adamw needed for its last validation loss, over what the run needed
"""


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.images: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.images += [dict(attrs)["src"] or ""] if tag == "img" else []

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_picture_and_page(mars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = write(tmp_path / "odd", "adamw", [6.0, 5.0], name='<b>$x_"\x1b[31m')
    png, html = tmp_path / "new/curves.png", tmp_path / "report.html"
    assert report([mars, odd], png=png, html=html) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"written: {png}\nwritten: {html}\n")
    assert '<b>$x_"?[31m' in out and "\x1b" not in out
    assert png.read_bytes().startswith(PNG) and len(png.read_bytes()) > 10_000

    page = Page(html.read_text())
    assert '<b>$x_"?[31m' in page.cells and "tiny-mars-adamw" in page.cells and "1,500" in page.cells
    assert "speed-up in tokens" in page.cells and "b" not in page.tags
    (source,) = page.images
    kind, _, content = source.partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(content) == png.read_bytes()
    assert "http" not in html.read_text()  # nothing is fetched


def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *runs: Path, **options: Any) -> Any:
    """The figure that a report saved."""
    figures: list[Any] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    assert report(runs, png=tmp_path / "p.png", **options) == 0
    return figures[0]


def test_what_the_two_panels_show(
    mars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = write(tmp_path / "r", "adamw", [6.0, 5.0, 4.5], seconds=[100, 200, 50], name="_resumed")
    by_tokens, by_time = drawn(monkeypatch, tmp_path, mars, resumed).axes
    lines = [[line.get_xydata().tolist() for line in axes.lines] for axes in (by_tokens, by_time)]
    assert lines[0][1] == [[1000, 5.5], [2000, 4.5], [3000, 3.5], [4000, 3.25]]
    assert lines[0][2] == [[1000, 6.5], [2000, 5.5], [3000, 4.5]]  # training, too few steps to smooth
    assert by_time.get_xlabel() == "time (min)"
    assert lines[1][3] == [
        [pytest.approx(100 / 60), 6.0],
        [pytest.approx(200 / 60), 5.0],
        [pytest.approx(250 / 60), 4.5],
    ]
    assert [text.get_text() for text in by_tokens.get_legend().get_texts()] == [" tiny-mars-adamw", " _resumed"]
    assert by_tokens.get_xscale() == "linear"


def test_training_loss_is_smoothed_over_a_fiftieth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """150 steps: means of three, each at the middle one; the losses fall by 1 a step, so a mean is the middle's."""
    figure = drawn(monkeypatch, tmp_path, write(tmp_path / "long", "adamw", [None] * 150))
    points = figure.axes[0].lines[0].get_xydata()
    assert points.shape == (148, 2)
    assert points[0].tolist() == pytest.approx([2000, 5.5])
    assert points[-1].tolist() == pytest.approx([149_000, 6.5 - 148])


# ---- published points

RECIPES = """
AdamW | 3.193 / 3.024 / 2.885 | 3.084 / 2.821 / 2.691 | 3.013 / 2.741 / 2.561
Muon | 3.165 / 3.006 / 2.901 | 3.009 / 2.813 / 2.688 | 2.915 / 2.691 / 2.573
MARS | 3.108 / 2.981 / 2.849 | 2.969 / 2.763 / 2.636 | 2.876 / 2.647 / 2.518
MARS exact | 3.107 / 2.980 / 2.847
"""


def test_the_published_losses() -> None:
    expected: dict[str, dict[str, tuple[float, ...]]] = {"gpt2-small": {}, "gpt2-medium": {}, "gpt2-large": {}}
    for line in RECIPES.strip().splitlines():
        name, *sizes = line.split(" | ")
        for size, losses in zip(expected, sizes, strict=False):
            expected[size][name] = tuple(float(loss) for loss in losses.split(" / "))
    assert expected == published.LOSSES
    assert published.TOKENS == (5e9, 20e9, 50e9)


def test_published_points_in_table_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of 49.15 B tokens is compared at 50 B; at 5 B between its validations at 4 and 6 B; small runs: nothing."""
    losses = [3.4, 3.3, 3.2, 3.1] + [None] * 19 + [2.75]  # at 2.048, 4.096, 6.144, 8.192 and 49.152 B tokens
    large = write(tmp_path / "large", "adamw", losses, per_step=2_048_000_000)
    small = write(tmp_path / "small", "muon", [5.0, 4.0])
    data = as_data(capsys, large, small, published="gpt2-large")
    first, second = data["runs"]
    assert first["val_loss_at_5000000000"] == pytest.approx(3.3 - 0.1 * 904 / 2048)
    assert first["val_loss_at_20000000000"] == pytest.approx(3.1 - 0.35 * 11.808 / 40.96)
    assert first["val_loss_at_50000000000"] == 2.75
    assert second["val_loss_at_5000000000"] is None
    assert data["published"]["losses"]["MARS"] == [2.876, 2.647, 2.518]

    by_tokens, by_time = drawn(monkeypatch, tmp_path, large, small, published="gpt2-large").axes
    out = capsys.readouterr().out
    assert re.search(r"tiny-muon +AdamW, published +Muon, published +MARS, published\n", out)
    assert re.search(r"validation loss at 50.00 B tokens +2.750 +- +2.561 +2.573 +2.518\n", out)
    assert re.search(r"tokens read +49.15 B +2,000\n", out)
    assert published.NOTE in out
    points = {line.get_label(): line.get_xydata().tolist() for line in by_tokens.lines}
    assert points["MARS, published"] == [[5e9, 2.876], [20e9, 2.647], [50e9, 2.518]]
    assert {"AdamW, published", "Muon, published"} < points.keys() and "MARS exact, published" not in points
    assert not any("published" in line.get_label() for line in by_time.lines)
    assert by_tokens.get_xscale() == "log"


# ---- runs that are not as they should be


def test_half_a_last_line_is_left_out(mars: Path) -> None:
    file = mars / "metrics.jsonl"
    whole = file.read_text().splitlines()
    file.write_text("\n".join(whole[:4]) + '\n{"step": 4, "tokens": 40')
    run = read(mars)
    assert [point.step for point in run.training] == [1, 2, 3]
    assert not run.finished
    assert run.notes == ["its last line is half-written and left out"]
    file.write_text("\n".join(whole[:4]))  # whole, but for the end of the line
    assert (len(read(file).training), read(file).notes) == (3, [])


def test_an_unfinished_run_is_shown_as_one(mars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinished = write(tmp_path / "u", "adamw", [6.0, 5.0], finished=False)
    report([mars, unfinished])
    out = capsys.readouterr().out
    assert re.search(r"finished +yes +no\n", out) and re.search(r"tensors under each rule +MARS.* 51 +-\n", out)
    assert "note: tiny-adamw is unfinished: that loss is not its final one" in out


def test_runs_without_validation_are_shown_without_it(
    mars: Path, adamw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = write(tmp_path / "none", "muon", [None, None])
    report([mars, none, adamw], png=tmp_path / "p.png")
    out = capsys.readouterr().out
    assert "note: tiny-muon: no validation loss (validation.every)" in out
    assert re.search(r"validation loss at 4,000 tokens +3.250 +- +4.000\n", out)
    assert re.search(r"speed-up in tokens +1.60 x +- +1.00 x\n", out)
    data = as_data(capsys, mars, none)  # the baseline has none
    assert data["baseline"] is None and "tokens_speed_up" not in data["runs"][0]


def test_a_validation_loss_that_is_not_finite_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "nan", "adamw", [6.0, float("nan"), float("inf")])
    assert [point.loss for point in read(run).validation] == [6.0]
    assert "note: tiny-adamw: 2 validation losses are not finite and left out" in as_data(capsys, run)["notes"]


@pytest.mark.parametrize(
    ("facts", "warning"),
    [
        ({"sequence_length": 200}, "warning: the runs have different sequence lengths"),
        ({"data": "other"}, "warning: the runs have different data"),
        ({"parameters": 1}, "warning: the runs have models of different sizes"),
        ({"world_size": 3}, "warning: the runs have different engines, ranks or devices"),
    ],
)
def test_runs_that_differ_are_compared_with_a_warning(
    facts: dict[str, Any], warning: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = write(tmp_path / "a", "mars-m", [6.0, 5.0], data="one")
    assert not any("warning" in note for note in as_data(capsys, same, same)["notes"])
    (note,) = [
        n for n in as_data(capsys, same, write(tmp_path / "b", "adamw", [6.0], **facts))["notes"] if "warning" in n
    ]
    assert note.startswith(warning)


def test_runs_never_validated_together(mars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write(tmp_path / "other", "adamw", [6.0, 4.0], per_step=1100)
    data = as_data(capsys, mars, other)
    assert "note: the runs were never validated at one number of tokens" in data["notes"]
    assert data["runs"][1]["tokens_speed_up"] == 1


def test_runs_of_one_recipe_are_told_apart_by_their_folders(
    adamw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = as_data(capsys, adamw, write(tmp_path / "again", "adamw", [6.0, 5.0]))
    assert [run["name"] for run in data["runs"]] == [f"tiny-adamw ({tmp_path / name})" for name in ("adamw", "again")]


RUN = '{"run": {"name": "x", "optimizer": {"name": "adamw", "lr": 0.1}}}\n'
STEP = '{"step": 1, "tokens": 9, "loss": 5.0, "lr": 0.1, "tokens_per_s": 9.0, "seconds": 1.0}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"metrics\.jsonl does not exist; give the folder of a run"),
        ("", r"metrics\.jsonl has no step \(yet\)"),
        (RUN, r"metrics\.jsonl has no step \(yet\)"),
        (RUN + STEP[:20], r"metrics\.jsonl has no step \(yet\)"),
        ("a picture?", r"line 1: not what `mars-dist train` writes"),
        (STEP, r"line 1: not what `mars-dist train` writes \(no 'run'\)"),
        ('{"run": {"name": "x"}}\n' + STEP, r"line 1: .*\(no 'optimizer'\)"),
        (RUN + STEP[:20] + "\n" + STEP, r"line 2: not what"),
        (RUN + "[1]\n" + STEP, r"line 2: not what"),
        (RUN + STEP.replace("9.0", '"9"'), r"line 2: not what"),
        (RUN + STEP.replace("loss", "los"), r"line 2: .*\(no 'loss'\)"),
        (RUN + STEP + STEP, r"line 3: step 1 again; are there two runs in one file\?"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        report([tmp_path])
    assert "\n" not in str(error.value)


def test_no_run_and_unknown_sizes(mars: Path) -> None:
    with pytest.raises(ValueError, match="no run to report"):
        report([])
    with pytest.raises(ValueError, match="of 'gpt2-xl'; there are some of gpt2-small, gpt2-medium, gpt2-large"):
        report([mars], published="gpt2-xl")


def test_without_matplotlib_only_the_picture_is_missing(
    mars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report([mars]) == 0
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report([mars], html=tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


# ---- the command


def test_the_command(mars: Path, adamw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(mars), str(adamw)]) == 0
    assert capsys.readouterr().out == TABLE
    assert main(["report", str(mars), "--published", "gpt3"]) == 1
    assert capsys.readouterr().err.startswith("mars-dist: error: no published losses of 'gpt3'")


def test_neither_torch_nor_a_screen_is_needed(mars: Path, tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from mars_dist.pretrain.report import report
report([Path(sys.argv[1])])
assert not {"torch", "matplotlib", "numpy"} & set(sys.modules)
report([Path(sys.argv[1])], png=Path(sys.argv[2]))
assert not {"torch", "matplotlib.pyplot"} & set(sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"} | {"MPLBACKEND": "TkAgg"}
    png = tmp_path / "p.png"
    done = subprocess.run(
        [sys.executable, "-c", code, mars, png], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert png.read_bytes().startswith(PNG)
