"""Where the numbers of a run go: a progress bar for people, JSON lines, TensorBoard and (when asked for) W&B."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_dist.pretrain.recipe import Recipe

FILE = "metrics.jsonl"
BOARD = "tensorboard"
NO_CURVE = ("step", "tokens", "seconds")


class Metrics:
    """Writes on rank 0 and does nothing on the others. A resumed run continues its files behind ``step``.

    The files are closed when the ``with`` block ends, however it does.
    """

    def __init__(self, recipe: Recipe, out: Path, step: int, facts: dict[str, Any], active: bool, bar: bool) -> None:
        self.active = active
        if not active:
            return
        from tqdm import tqdm

        path, total = out / FILE, recipe.training.steps
        board = import_or(f"torch.utils.{BOARD}", f"logging.{BOARD}=false") if recipe.logging.tensorboard else None
        wandb = import_or("wandb", "logging.wandb=null") if recipe.logging.wandb else None

        earlier = [record for record in records(path) if record.get("step", 0) <= step] if step else []
        self.complete = step >= total and bool(earlier) and "summary" in earlier[-1]  # a finished run, started again
        if not self.complete:
            # Ranks and versions may have changed, so a resumed run says them again.
            earlier = [record for record in earlier if "summary" not in record] + [{"run": facts}]
        self.seconds_before = seconds_of(earlier)
        if step == 0 and path.exists():  # a curve without checkpoints, or one that is started over
            os.replace(path, out / f"earlier-{FILE}")
        temporary = out / f".{FILE}.tmp"
        temporary.write_text("".join(json.dumps(record) + "\n" for record in earlier), encoding="utf-8")
        os.replace(temporary, path)
        self.file = path.open("a", encoding="utf-8")

        # In a log file every refresh is a line of its own.
        seconds = 0.1 if sys.stderr.isatty() else 30.0
        self.bar = tqdm(
            total=total,
            initial=min(step, total),
            unit="step",
            disable=not bar,
            dynamic_ncols=True,
            mininterval=seconds,
            maxinterval=2 * seconds,
        )
        self.board: Any = None
        if board is not None:
            if step == 0:  # of the same earlier run
                for events in (out / BOARD).glob("events.out.tfevents.*"):
                    (out / f"earlier-{BOARD}").mkdir(exist_ok=True)
                    os.replace(events, out / f"earlier-{BOARD}" / events.name)
            self.board = board.SummaryWriter(str(out / BOARD), purge_step=step + 1)
        self.wandb: Any = None
        if wandb is not None:
            config = recipe.model_dump(mode="json")
            self.wandb = wandb.init(project=recipe.logging.wandb, name=recipe.name, dir=str(out), config=config)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: Any) -> None:
        if not self.active:
            return
        self.file.close()
        self.bar.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()

    def write(self, record: dict[str, Any]) -> None:
        """One step: ``record`` has "step" and numbers."""
        if not self.active:
            return
        self._line(record)
        for name, value in record.items():
            if self.board is not None and name not in NO_CURVE:
                self.board.add_scalar(name, value, record["step"])
        if self.wandb is not None:
            self.wandb.log(record, step=record["step"])
        shown = {"loss": f"{record['loss']:.3f}", "lr": f"{record['lr']:.1e}"}
        shown["tokens/s"] = f"{record['tokens_per_s']:,.0f}"
        if "mfu" in record:
            shown["MFU"] = f"{record['mfu']:.1%}"
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(record["step"] - self.bar.n)
        if "val_loss" in record:
            self.say(f"step {record['step']}: loss {record['loss']:.3f}, validation {record['val_loss']:.3f}")

    def say(self, text: str) -> None:
        """A line for people, above the bar."""
        if self.active and not self.bar.disable:
            self.bar.write(text)

    def summary(self, facts: dict[str, Any], seconds: float) -> None:
        """The last line, once all steps are done. ``seconds``: of this process; the earlier parts' are added."""
        if self.active and not self.complete:
            self._line({"summary": facts | {"seconds": round(self.seconds_before + seconds, 2)}})

    def _line(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self.file, flush=True)


def records(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's file; a process that was killed may have left half of the last one."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            record = json.loads(line or "{}")
        except ValueError as error:
            record = error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is damaged: {line[:40]!r}. Remove that line, and the run goes on")
        found.append(record)
    return found


def seconds_of(earlier: list[dict[str, Any]]) -> float:
    """Of all parts of a run, without the steps that were lost. Each part begins with a "run" and counts from zero."""
    total = part = 0.0
    for record in [*earlier, {"run": {}}]:
        if "run" in record:
            total, part = total + part, 0.0
        part = record.get("seconds", part)
    return total


def import_or(module: str, setting: str) -> Any:
    """Only who asks for it needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{error}: install it (pip install {module.split('.')[-1]}) or give --set {setting}"
        ) from error
