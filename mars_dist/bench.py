"""``python -m mars_dist.bench``: time one optimizer step on the shapes of GPT-2, as ratios within one run.

The candidates take turns, so that a machine that slows down slows all of them; the median of the rounds is shown,
and every time is also given as a ratio to the straightforward loop over tensors. CPU time is that of this process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from mars_dist.optimizer import MARS

# layers, width; 12 heads and more do not change the shapes
SIZES = {"tiny": (2, 128), "small": (12, 768), "medium": (24, 1024), "large": (36, 1280), "xl": (48, 1600)}


def gpt2_shapes(size: str, vocabulary: int = 50304, positions: int = 1024) -> list[tuple[int, ...]]:
    """The shapes of GPT-2's parameters, biases included, head tied to the embedding."""
    layers, d = SIZES[size]
    block = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(vocabulary, d), (positions, d), *(block * layers), (d,), (d,)]


class LoopMARS:
    """MARS-AdamW as one writes it down first: a loop over tensors and a Python branch on every norm."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        self.params, self.lr, self.t = params, lr, 0
        self.states = [[torch.zeros_like(p) for _ in range(3)] for p in params]

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        for p, (m, v, h) in zip(self.params, self.states, strict=True):
            assert p.grad is not None
            g = p.grad
            b1, b2 = (0.95, 0.99) if p.ndim == 2 else (0.9, 0.95)
            c = g
            if p.ndim == 2:
                c = g + (g - h) * (0.025 * b1 / (1 - b1))
                norm = c.norm()
                if norm > 1.0:
                    c = c / norm
            m.mul_(b1).add_(c, alpha=1 - b1)
            v.mul_(b2).addcmul_(c, c, value=1 - b2)
            d = m / ((v.sqrt() / (1 - b2**self.t) ** 0.5 + 1e-8) * (1 - b1**self.t))
            p.add_(p * 0.01 + d, alpha=-self.lr)
            h.copy_(g)


def candidates(shapes: list[tuple[int, ...]], device: str) -> dict[str, Callable[[], None]]:
    """A step function for each optimizer, on parameters of its own: about 128 bytes per parameter in all."""

    def parameters() -> list[nn.Parameter]:
        params = [nn.Parameter(torch.randn(s, device=device) * 0.02) for s in shapes]
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        return params

    lr = 1e-3
    return {
        "loop over tensors": LoopMARS(parameters(), lr).step,
        "MARS-AdamW": MARS(parameters(), lr, weight_decay=0.01, lr_1d=lr).step,
        "MARS-AdamW, no clip": MARS(parameters(), lr, weight_decay=0.01, lr_1d=lr, clip=None).step,
        "MARS-AdamW, skip_nonfinite": MARS(parameters(), lr, weight_decay=0.01, lr_1d=lr, skip_nonfinite=True).step,
        "MARS-Lion": MARS(parameters(), lr, mars_type="mars-lion", lr_1d=lr).step,
        "torch AdamW, foreach": torch.optim.AdamW(parameters(), lr, foreach=True).step,
        "torch AdamW, fused": torch.optim.AdamW(parameters(), lr, fused=True).step,
    }


def measure(steps: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Median wall and process CPU seconds of one step, all candidates in turn in every round."""

    def clock() -> tuple[float, float]:
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter(), time.process_time()

    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            begin = clock()
            step()
            end = clock()
            if turn:  # the first round allocates states
                seconds[name].append((end[0] - begin[0], end[1] - begin[1]))
    medians = {n: [statistics.median(column) for column in zip(*s, strict=True)] for n, s in seconds.items()}
    base = medians["loop over tensors"]
    return {n: {"wall_s": w, "cpu_s": c, "of_loop": w / base[0]} for n, (w, c) in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mars_dist.bench", description=__doc__.split("\n")[0])
    size_help = "GPT-2 size (default: small, 124 M parameters, about 16 GB of memory: all candidates exist together)"
    parser.add_argument("--size", choices=SIZES, default="small", help=size_help)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds after one that warms up (default: 5)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    shapes = gpt2_shapes(args.size)
    numel = sum(torch.Size(s).numel() for s in shapes)
    result = measure(candidates(shapes, args.device), args.rounds, args.device)
    if args.json:
        print(json.dumps({"size": args.size, "parameters": numel, "device": args.device, "steps": result}))
        return
    print(f"GPT-2 {args.size}: {numel / 1e6:.0f} M parameters on {args.device}, {torch.get_num_threads()} threads")
    print(f"{'':28}  wall ms   cpu ms  of the loop")
    for name, row in result.items():
        print(f"{name:28} {1e3 * row['wall_s']:8.1f} {1e3 * row['cpu_s']:8.1f} {row['of_loop']:9.2f}")


if __name__ == "__main__":
    main()
