"""Compare runs: a table, the curves as PNG or HTML, and the speed-up at equal loss."""

from __future__ import annotations

import base64
import io
import json
import math
import statistics
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mars_dist.pretrain import published as authors
from mars_dist.pretrain.metrics import FILE
from mars_dist.pretrain.runs import Run, reached, read

SHARED_ROWS = 6  # at most so many shared validations are rows of the table, evenly spaced, the last one among them
DIFFERENCES = {
    ("sequence_length",): "different sequence lengths: a longer context lowers the loss by itself",
    ("data",): "different data: their losses are not those of one task",
    ("parameters",): "models of different sizes",
    ("batch",): "different batches: they may have been validated on different held-out sequences",
    ("engine", "world_size", "device"): "different engines, ranks or devices: their times differ for that as well",
}
STYLE = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}img{max-width:100%}"


class Row(NamedTuple):
    """A line of the table: key in the JSON, label, the value of each run (None: it has none), how they are shown."""

    key: str
    label: str
    values: Sequence[Any]
    show: Callable[[Any], str] = "{:.3f}".format
    missing: str = "-"

    def text(self, value: Any, curve: Sequence[tuple[float, float]]) -> str:
        """What the table shows; a run without validation (``curve``) did not fail to reach anything."""
        return self.show(value) if value is not None else self.missing if curve else "-"


def report(
    runs: Sequence[Path],
    png: Path | None = None,
    html: Path | None = None,
    published: str | None = None,
    as_json: bool = False,
) -> int:
    """Print the table of ``runs`` (or its data as JSON); write the curves to ``png``, table and curves to ``html``.

    A run is a folder with a metrics.jsonl, or that file; it may be unfinished. ``published``: see `published.losses`.
    Returns 0. Raises ValueError for a run that cannot be read (see `read`), no run, an unknown ``published``, and
    ImportError when a picture is asked for and matplotlib is missing.
    """
    losses = authors.losses(published) if published else {}
    known = [read(Path(path)) for path in runs]
    data, cells = compare(known, losses)
    notes = list(data["notes"])
    picture = draw(known, losses) if png or html else b""
    for path, content in ((png, picture), (html, page(cells, notes, picture))):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    notes += [f"written: {path}" for path in (png, html) if path]
    print(json.dumps(data, indent=1) if as_json else "\n".join(["", table(cells), "", *notes]))
    return 0


def compare(runs: Sequence[Run], losses: authors.Losses) -> tuple[dict[str, Any], list[list[str]]]:
    """The data as ``--json`` prints it (losses in nats a token, times in seconds), and the cells of the table.

    Speed-up at equal loss: with L the last validation loss of the baseline (the only AdamW run if there is exactly
    one, else the last run given), speed-up = x_baseline(L) / x_run(L), x(L) from `reached`, for x = tokens and seconds.
    Raises ValueError without a run.
    """
    if not runs:
        raise ValueError("no run to report; give the folder of one")
    names = [run.name for run in runs]
    for run in runs:
        run.name += f" ({run.path.parent if run.path.name == FILE else run.path})" if names.count(run.name) > 1 else ""
    notes = [f"note: {run.name}: {note}" for run in runs for note in run.notes]
    for keys, text in DIFFERENCES.items():
        known = {json.dumps([run.facts.get(key) for key in keys]) for run in runs if keys[0] in run.facts}
        notes += [f"warning: the runs have {text}"] if len(known) > 1 else []

    curves = [[(point.tokens, point.loss) for point in run.validation] for run in runs]
    shared = shared_rows(curves)
    rows = [*fact_rows(runs), *shared]
    notes += [] if shared or not any(curves) else ["note: the runs were never validated at one number of tokens"]
    adamw = [run for run in runs if run.facts["optimizer"]["name"] == "adamw"]
    baseline = adamw[0] if len(adamw) == 1 else runs[-1]
    if measured := len(runs) > 1 and bool(baseline.validation):
        rows += speed_up_rows(runs, baseline)
        goal = baseline.validation[-1].loss
        notes.append(f"speed-up: what {baseline.name} needed for its last validation loss, over what the run needed")
        notes += [] if baseline.finished else [f"note: {baseline.name} is unfinished: that loss is not its final one"]
        early = [run.name for run in runs if run is not baseline and run.validation and run.validation[0].loss <= goal]
        notes += [f"note: {name} had it at its first validation: its speed-up is at least this" for name in early]
    if losses:
        notes.append(authors.NOTE)
        for tokens in authors.TOKENS:
            at = [authors.at(curve, tokens) for curve in curves]
            rows.append(Row(f"val_loss_at_{tokens}", f"validation loss at {scaled(tokens)} tokens", at))

    header = ["", *(run.name for run in runs), *(f"{name}, published" for name in losses)]
    cells = [[row.label, *map(row.text, row.values, curves), *("" for _ in losses)] for row in rows]
    for i, line in enumerate(cells[len(cells) - len(authors.TOKENS) :] if losses else []):
        line[len(runs) + 1 :] = [f"{values[i]:.3f}" for values in losses.values()]
    columns = [
        {"name": run.name, "path": str(run.path), **{row.key: row.values[i] for row in rows}}
        | {"facts": run.facts, "validation": [point._asdict() for point in run.validation]}
        for i, run in enumerate(runs)
    ]
    published = {"tokens": authors.TOKENS, "losses": losses} if losses else None
    data = {"runs": columns, "baseline": baseline.name if measured else None, "published": published, "notes": notes}
    return data, [header, *cells]


def fact_rows(runs: Sequence[Run]) -> list[Row]:
    """What each run is and where it is."""
    engines = [[run.facts.get(key, "?") for key in ("engine", "world_size", "device")] for run in runs]
    last = [run.training[-1] for run in runs]
    exact = [bool(run.facts["optimizer"].get("exact")) for run in runs]
    gradients = Row("gradients_per_step", "gradients per step", [1 + of_run for of_run in exact], str)
    losses: list[list[Any]] = [[point.loss for point in run.validation] or [None] for run in runs]
    return [
        Row("optimizer", "optimizer", [run.facts["optimizer"]["name"] for run in runs], str),
        Row("lr", "learning rate", [run.facts["optimizer"].get("lr") for run in runs], "{:g}".format),
        Row("rules", "tensors under each rule", [run.facts.get("rules") or None for run in runs], tensors),
        Row("parameters", "parameters", [run.facts.get("parameters") for run in runs], scaled),
        Row("engine", "engine x ranks (device)", ["{} x {} ({})".format(*engine) for engine in engines], str),
        Row("tokens_per_s", "tokens/s (median)", [statistics.median(run.speeds) for run in runs], "{:,.0f}".format),
        *([gradients] if any(exact) else []),
        Row("finished", "finished", [run.finished for run in runs], lambda yes: "yes" if yes else "no"),
        Row("steps", "steps", [point.step for point in last], "{:,}".format),
        Row("tokens", "tokens read", [point.tokens for point in last], scaled),
        Row("seconds", "time", [point.seconds for point in last], duration),
        Row("last_val_loss", "last validation loss", [values[-1] for values in losses]),
        Row("best_val_loss", "best validation loss", [min(values) for values in losses]),
    ]


def speed_up_rows(runs: Sequence[Run], baseline: Run) -> list[Row]:
    """Tokens and time to the baseline's last validation loss, each with the speed-up (see `compare`)."""
    goal = baseline.validation[-1].loss
    crossings = [reached(run.validation, goal) for run in runs]
    theirs = reached(baseline.validation, goal) or (math.nan, math.nan)
    rows = []
    for i, (key, text, show) in enumerate((("tokens", "tokens", scaled), ("seconds", "time", duration))):
        ours = [crossing and crossing[i] for crossing in crossings]
        ratios = [theirs[i] / taken if taken else None for taken in ours]
        rows.append(Row(f"{key}_to_equal_loss", f"{text} to {goal:.3f}", ours, show, "not reached"))
        rows.append(Row(f"{key}_speed_up", f"speed-up in {text}", ratios, "{:.2f} x".format, "not reached"))
    return rows


def shared_rows(curves: Sequence[Sequence[tuple[float, float]]]) -> list[Row]:
    """The validation losses at the numbers of tokens that every curve with validations has."""
    counts = [{tokens for tokens, _ in curve} for curve in curves if curve]
    shared = sorted(set.intersection(*counts)) if counts else []
    chosen = shared[:: -math.ceil(len(shared) / SHARED_ROWS)][::-1] if shared else []
    label = "validation loss at {:,} tokens".format
    return [Row(f"val_loss_at_{n}", label(n), [dict(curve).get(n) for curve in curves]) for n in chosen]


def scaled(number: float) -> str:
    """51,200 or 4.10 M or 49.15 B."""
    size, unit = next(((size, unit) for size, unit in ((1e9, " B"), (1e6, " M")) if number >= size), (1, ""))
    return f"{number / size:,.{2 if unit else 0}f}{unit}"


def duration(seconds: float) -> str:
    size, unit = next(((size, unit) for size, unit in ((3600, "h"), (60, "min")) if seconds >= 2 * size), (1, "s"))
    return f"{seconds / size:,.1f} {unit}"


def tensors(rules: dict[str, int]) -> str:
    """The rule of MARS first."""
    return ", ".join(f"{name} {rules[name]}" for name in sorted(rules, key=lambda name: name == "AdamW"))


def table(cells: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    lines = [
        "   ".join([label.ljust(widths[0]), *line[1:]]).rstrip()
        for (label, *_), line in zip(cells, padded, strict=True)
    ]
    return "\n".join([lines[0], "-" * (sum(widths) + 3 * len(widths) - 3), *lines[1:]])


def page(cells: list[list[str]], notes: list[str], picture: bytes) -> bytes:
    """One self-contained HTML page; everything that comes from a run is escaped."""
    tags = ["th", *["td"] * (len(cells) - 1)]
    lines = [
        f"<tr><th>{escape(label)}</th>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in line)}</tr>"
        for tag, (label, *line) in zip(tags, cells, strict=True)
    ]
    text = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>mars-dist report</title>',
        f"<style>{STYLE}</style></head><body>\n<table>\n{chr(10).join(lines)}\n</table>",
        *(f"<p>{escape(note)}</p>" for note in notes),
        f'<img alt="loss against tokens and time" src="data:image/png;base64,{base64.b64encode(picture).decode()}">',
        "</body></html>\n",
    ]
    return "\n".join(text).encode()


def draw(runs: Sequence[Run], losses: authors.Losses) -> bytes:
    """The curves as PNG: loss against tokens and against time; training thin and smoothed over 1/50 of the run.

    Raises ImportError without matplotlib.
    """
    try:
        import numpy as np
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"--png and --html need matplotlib ({error}): pip install matplotlib") from error
    figure = Figure(figsize=(13, 5), dpi=120, layout="tight")
    FigureCanvasAgg(figure)  # no pyplot: nothing looks for a screen, and the settings of the caller stay as they are
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    longest = max(run.training[-1].seconds for run in runs)
    size, unit = next(((size, unit) for size, unit in ((3600, "h"), (60, "min")) if longest >= 2 * size), (1, "s"))
    heights = [loss for values in losses.values() for loss in values]
    for i, run in enumerate(runs):
        train = np.array(run.training)
        held_out = np.array(run.validation).reshape(-1, 4)
        window = max(1, len(train) // 50)
        smooth = np.convolve(train[:, 3], np.full(window, 1 / window), "valid")
        middle = train[(window - 1) // 2 :][: len(smooth)]
        for axes, column, per in ((by_tokens, 1, 1), (by_time, 2, size)):
            axes.plot(middle[:, column] / per, smooth, lw=0.7, alpha=0.5, color=f"C{i}")
            # The space: matplotlib leaves names that begin with "_" out of the legend.
            axes.plot(held_out[:, column] / per, held_out[:, 3], "o-", ms=3, color=f"C{i}", label=f" {run.name}")
        for tokens, values in ((middle[:, 1], smooth), (held_out[:, 1], held_out[:, 3])):
            late = tokens >= 0.1 * run.training[-1].tokens  # the first fall is cut off
            heights += values[late & np.isfinite(values)].tolist()
    authors.draw(by_tokens, losses)
    low, high = min(heights, default=0.0), max(heights, default=1.0)
    ends = [run.training[-1].tokens for run in runs] + [authors.TOKENS[-1]] * bool(losses)
    scale = "log" if max(ends) > 20 * min(ends) else "linear"
    by_tokens.set(xlabel="tokens", ylabel="loss (nats per token)", xscale=scale)
    by_tokens.set_ylim(low - 0.05 * (high - low) - 0.01, high + 0.05 * (high - low) + 0.01)
    by_time.set(xlabel=f"time ({unit})", title="points: validation; thin: training")
    for text in by_tokens.legend().get_texts():
        text.set_parse_math(False)  # a "$" in a name is a "$"
    figure.savefig(buffer := io.BytesIO(), format="png")
    return buffer.getvalue()
