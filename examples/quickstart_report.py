"""Compare two runs of gpt2_deepspeed.py: a table on the screen and a picture of the curves.

python examples/quickstart_report.py runs/quickstart/mars.jsonl runs/quickstart/adamw.jsonl --png curves.png
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend is chosen first: there may be no screen


@dataclass
class Run:
    name: str
    steps: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def held_out(self) -> dict[int, float]:
        return {r["step"]: r["held_out_loss"] for r in self.steps if "held_out_loss" in r}


def read(path: Path) -> Run:
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        sys.exit(f"{path}: {error}; run the training again")
    if not records or "summary" not in records[-1]:
        sys.exit(f"{path}: no summary at its end: the run did not finish; run the training again")
    return Run(records[-1]["summary"], records[:-1], records[-1])


def table(runs: list[Run]) -> str:
    def rules(counts: dict[str, int]) -> str:
        names = sorted(counts, key=lambda name: name == "AdamW")  # the MARS rule first
        return ", ".join(f"{name} {counts[name]}" for name in names)

    shared = sorted(set.intersection(*(set(run.held_out) for run in runs)))
    rows = [["", *(run.name for run in runs)]]
    rows += [[f"held-out loss at step {s}", *(f"{run.held_out[s]:.3f}" for run in runs)] for s in shared]
    facts: dict[str, Callable[[dict[str, Any]], str]] = {
        "learning rate": lambda s: f"{s['optimizer']['params']['lr']:g}",
        "tokens/s (median step)": lambda s: f"{s['tokens_per_s']:,.0f}",
        "optimizer bytes per parameter": lambda s: f"{sum(s['state_bytes_per_rank']) / s['parameters']:.2f}",
        "optimizer MB on each rank": lambda s: " + ".join(f"{b / 1e6:.1f}" for b in s["state_bytes_per_rank"]),
        "tensors under each rule": lambda s: rules(s["rules"]),
        "ZeRO stage, ranks, device": lambda s: f"{s['zero_stage']}, {s['ranks']}, {s['device']}",
    }
    rows += [[label, *(fact(run.summary) for run in runs)] for label, fact in facts.items()]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for label, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("   ".join([label.ljust(widths[0]), *right]))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def verdict(first: Run, second: Run) -> str:
    """One sentence from the numbers: who ends lower, and when it had reached the other's final loss."""
    if not first.held_out or not second.held_out:
        return "No held-out loss was recorded."
    (step_1, loss_1), (step_2, loss_2) = max(first.held_out.items()), max(second.held_out.items())
    if step_1 != step_2:
        return f"The runs end at different steps ({step_1} and {step_2}): the last losses are not compared."
    better, worse, target = (first, second, loss_2) if loss_1 < loss_2 else (second, first, loss_1)
    reached = min(step for step, loss in better.held_out.items() if loss <= target)
    return (
        f"After {step_1} steps {better.name} is {abs(loss_1 - loss_2):.3f} below {worse.name}; "
        f"it had reached {worse.name}'s final {target:.3f} by step {reached}."
    )


def draw(runs: list[Run], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5), dpi=120)
    for run, color in zip(runs, ["tab:red", "tab:blue", "tab:green", "tab:orange"], strict=False):
        axes.plot([r["step"] for r in run.steps], [r["loss"] for r in run.steps], color=color, alpha=0.25, lw=0.8)
        axes.plot(list(run.held_out), list(run.held_out.values()), "o-", color=color, label=f"{run.name}, held out")
    unigram = runs[0].summary["unigram_loss"]
    axes.axhline(unigram, color="gray", ls="--", lw=1, label=f"best without context ({unigram:.2f})")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="Shakespeare, GPT-2 BPE (thin: training loss)")
    axes.set_ylim(top=min(axes.get_ylim()[1], unigram + 2))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="metrics of the first run (JSON lines)")
    parser.add_argument("second", type=Path, help="metrics of the run to compare with")
    parser.add_argument("--png", type=Path, required=True, help="where to draw the curves")
    args = parser.parse_args()
    runs = [read(args.first), read(args.second)]
    print(f"\n{table(runs)}\n\n{verdict(*runs)}")
    print(f"The best loss without context (unigram) is {runs[0].summary['unigram_loss']:.3f}.")
    draw(runs, args.png)
    print(f"written: {args.first}, {args.second}, {args.png}")
