"""``python -m mars_dist.bench``: time one optimizer step on the shapes of GPT-2, as ratios within one run.

The candidates take turns, so that a machine that slows down slows all of them; the median of the rounds is shown,
and every time is also given as a ratio to the straightforward loop over tensors. CPU time is that of this process.

``--orthogonalize`` shows what each orthogonalisation costs, as ratios to five steps of the authors' Newton-Schulz, and
how far from the exact factor U V^T it ends: ||Y - U V^T|| / ||U V^T|| in the Frobenius norm, on matrices whose singular
values are those of a random one, 1/i, log-uniform down to 1e-3, or zero but for the first quarter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mars_dist.maths import orthogonalize
from mars_dist.maths.rules import Orthogonalizer
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


def candidates(shapes: list[tuple[int, ...]], device: str) -> dict[str, Callable[[], object]]:
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


def measure(steps: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, dict[str, float]]:
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
    base = next(iter(medians.values()))
    return {n: {"wall_s": w, "cpu_s": c, "of_loop": w / base[0]} for n, (w, c) in medians.items()}


# Method and steps; the first is what all others are compared with.
ORTHOGONALIZATIONS = [("newton-schulz", 5), ("newton-schulz", 4), ("polar-express", 5), ("polar-express", 6)]
ORTHOGONALIZATIONS += [("cans", 3), ("cans", 4), ("cans", 5), ("svd", 0)]
SPECTRA = ("random", "1/i", "to 1e-3", "quarter rank")


def matrix_of(spectrum: str, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """A matrix with random singular vectors, and its exact orthogonal factor, in float64."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    if spectrum == "1/i":
        s = 1 / torch.arange(1, len(s) + 1, dtype=s.dtype)
    elif spectrum == "to 1e-3":
        s = torch.logspace(0, -3, len(s), dtype=s.dtype)
    elif spectrum == "quarter rank":
        s[len(s) // 4 :] = 0
    return (u * s) @ vh, (u * (s > 0)) @ vh


def orthogonalizations(
    rows: int, cols: int, rounds: int, device: str, dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    """Operations and wall time of each method as ratios to the first, and its errors on each spectrum."""
    methods = {f"{name}, {n} steps" if n else name: Orthogonalizer(name, n, dtype) for name, n in ORTHOGONALIZATIONS}
    pairs = {spectrum: matrix_of(spectrum, rows, cols) for spectrum in SPECTRA}
    x = pairs["random"][0].float().to(device)
    seconds = measure({name: partial(method, x, 1e-7, "mars-m") for name, method in methods.items()}, rounds, device)
    first = next(iter(methods))
    result = {}
    for name, method in methods.items():
        counted = [orthogonalize.flops(rows, cols, m.steps, m.method, dtype=dtype) for m in (method, methods[first])]
        errors = {}
        for spectrum, (matrix, exact) in pairs.items():
            y = method(matrix.float().to(device), 1e-7, "mars-m").double().cpu()
            errors[spectrum] = ((y - exact).norm() / exact.norm()).item()
        result[name] = {
            "flops": counted[0] / counted[1],
            "wall": seconds[name]["wall_s"] / seconds[first]["wall_s"],
            **errors,
        }
    return result


def print_orthogonalizations(rounds: int, device: str, as_json: bool) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = [(384, 384), (384, 1536)] if device == "cpu" else [(1024, 1024), (1024, 4096)]
    tables = {f"{r} x {c}": orthogonalizations(r, c, rounds, device, dtype) for r, c in shapes}
    if as_json:
        print(json.dumps({"device": device, "dtype": str(dtype), "matrices": tables}))
        return
    for shape, table in tables.items():
        print(f"{shape}, {dtype} on {device}, {torch.get_num_threads()} threads")
        print(f"{'':24} {'flops':>7} {'wall':>7}  " + " ".join(f"{spectrum:>12}" for spectrum in SPECTRA))
        for name, row in table.items():
            errors = " ".join(f"{row[spectrum]:12.3f}" for spectrum in SPECTRA)
            print(f"{name:24} {row['flops']:7.2f} {row['wall']:7.2f}  {errors}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mars_dist.bench", description=__doc__.split("\n")[0])
    size_help = "GPT-2 size (default: small, 124 M parameters, about 16 GB of memory: all candidates exist together)"
    parser.add_argument("--size", choices=SIZES, default="small", help=size_help)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds after one that warms up (default: 5)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--orthogonalize", action="store_true", help="the orthogonalisations of the matrix variants instead of steps"
    )
    args = parser.parse_args()
    if args.orthogonalize:
        print_orthogonalizations(args.rounds, args.device, args.json)
        return
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
