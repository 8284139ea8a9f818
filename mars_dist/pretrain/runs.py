"""What the metrics.jsonl of a run says, read back."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mars_dist.pretrain.metrics import FILE


class Point(NamedTuple):
    """A loss (nats a token) after so many updates, tokens and seconds, all since the very start of the run."""

    step: int
    tokens: float
    seconds: float
    loss: float


@dataclass
class Run:
    """What a metrics.jsonl says. ``facts``: its "run" line and, behind it, its "summary"."""

    path: Path
    name: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    training: list[Point] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)  # tokens/s
    notes: list[str] = field(default_factory=list)


def read(path: Path) -> Run:
    """One run from its folder or file. A half-written last line is left out, with a note.

    Time: "seconds" counts from the start of the process, so where it falls, or a further "run" line comes, the run
    was resumed, and the last value before is added to all that follow. Steps that were lost are in no record.
    Raises ValueError: no such file, not of `mars-dist train`, damaged before its last line, no step in it.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist; give the folder of a run (its --out), or its {FILE}")
    lines = file.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    run, before, now, parts, lost = Run(file), 0.0, 0.0, 1, 0
    for i, line in enumerate(lines):
        where = f"{file}, line {i + 1}"
        try:
            record = json.loads(line)
            kind = next((kind for kind in ("run", "summary") if kind in record), "step")
            if i == 0 and kind != "run":
                raise KeyError("run")
            if kind == "step":
                step, tokens, seconds, loss = (record[key] + 0 for key in Point._fields)
                held_out = record.get("val_loss", math.nan) + 0
                run.speeds.append(record["tokens_per_s"] + 0)
            else:
                run.facts |= {"name": file.parent.name} | record[kind]
                run.name = "".join(c if c.isprintable() else "?" for c in f"{run.facts['name']}")
                str(run.facts["optimizer"]["name"])
        except (ValueError, TypeError, KeyError) as error:
            if 0 < i == len(lines) - 1 and isinstance(error, ValueError):
                run.notes.append("its last line is half-written and left out")
                break
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{where}: not what `mars-dist train` writes ({reason})") from error
        if (kind == "run" and run.training) or (kind == "step" and seconds < now):
            before, now, parts = before + now, 0.0, parts + 1
        run.finished = kind == "summary"
        if kind == "step":
            if run.training and step <= run.training[-1].step:
                raise ValueError(f"{where}: step {step} again; are there two runs in one file?")
            now, lost = seconds, lost + ("val_loss" in record and not math.isfinite(held_out))
            run.training.append(Point(step, tokens, round(before + seconds, 3), loss))
            run.validation += [run.training[-1]._replace(loss=held_out)] if math.isfinite(held_out) else []
    if not run.training:
        raise ValueError(f"{file} has no step (yet)")
    run.notes += [f"resumed {parts - 1} x; its time is the sum of its parts, without lost steps"] if parts > 1 else []
    run.notes += [f"{lost} validation losses are not finite and left out"] if lost else []
    run.notes += [] if run.validation else ["no validation loss (validation.every): it has no part in the comparison"]
    return run


def reached(points: Sequence[Point], loss: float) -> tuple[float, float] | None:
    """Tokens and seconds at which the validation loss first was at most ``loss``; None if it never was.

    Between two validations a, b with loss_a > loss >= loss_b the curve is taken as a straight line:
    x = x_a + (x_b - x_a) * (loss_a - loss) / (loss_a - loss_b), for x = tokens and x = seconds.
    Where the very first validation was there already, its own numbers, which are upper bounds.
    """
    if points and points[0].loss <= loss:
        return points[0].tokens, points[0].seconds
    for a, b in itertools.pairwise(points):
        if b.loss <= loss:
            share = (a.loss - loss) / (a.loss - b.loss)
            return a.tokens + (b.tokens - a.tokens) * share, a.seconds + (b.seconds - a.seconds) * share
    return None
