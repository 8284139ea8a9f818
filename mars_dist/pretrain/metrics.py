"""Where the numbers of a run go: a progress bar for people, JSON lines, TensorBoard and (when asked for) W&B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_dist.pretrain.recipe import Recipe

FILE = "metrics.jsonl"


class Metrics:
    """Writes on rank 0 and does nothing on the others. A resumed run continues its files behind ``step``."""

    def __init__(self, recipe: Recipe, out: Path, step: int, facts: dict[str, Any], active: bool, bar: bool) -> None:
        self.active = active
        if not active:
            return
        from tqdm import tqdm

        path = out / FILE
        earlier = [json.loads(line) for line in _lines(path)] if step else []
        self.file = path.open("w", encoding="utf-8")
        for record in earlier:
            if record.get("step", 0) <= step and "summary" not in record:
                self._line(record)
        self._line({"run": facts})  # also behind the earlier part of a resumed run: ranks may have changed
        total = recipe.training.steps
        self.bar = tqdm(total=total, initial=step, unit="step", disable=not bar, dynamic_ncols=True)
        self.board: Any = None
        if recipe.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)
        self.wandb: Any = None
        if recipe.logging.wandb:
            import wandb  # type: ignore[import-not-found, unused-ignore]  # only who asks for it needs it

            self.wandb = wandb.init(project=recipe.logging.wandb, dir=str(out), config=recipe.model_dump())

    def write(self, record: dict[str, Any]) -> None:
        """One step: ``record`` has "step" and numbers."""
        if not self.active:
            return
        self._line(record)
        for name, value in record.items():
            if self.board is not None and name not in ("step", "seconds", "tokens"):
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

    def finish(self, summary: dict[str, Any] | None) -> None:
        if not self.active:
            return
        if summary is not None:
            self._line({"summary": summary})
        self.file.close()
        self.bar.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()

    def _line(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self.file, flush=True)


def _lines(path: Path) -> list[str]:
    """The complete lines of an earlier part of the run; a process that was killed may have left half of the last."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]
