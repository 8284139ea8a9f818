"""The step's cost: what the benchmark prints, and how many operations a step takes (counted; no test measures time)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from mars_dist import MARS
from mars_dist.bench import SIZES, SPECTRA, candidates, gpt2_shapes, orthogonalizations

CANDIDATES = {
    "loop over tensors",
    "MARS-AdamW",
    "MARS-AdamW, no clip",
    "MARS-AdamW, skip_nonfinite",
    "MARS-Lion",
    "torch AdamW, foreach",
    "torch AdamW, fused",
}


def test_benchmark_prints_times_and_ratios(tmp_path: Path) -> None:
    arguments = ["-m", "mars_dist.bench", "--size", "tiny", "--rounds", "1", "--json"]
    result = run_python(*arguments, folder=tmp_path)
    assert result.returncode == 0, result.stdout
    report = json.loads(result.stdout.splitlines()[-1])
    assert set(report) == {"size", "parameters", "device", "steps"}
    assert (report["size"], report["device"], report["parameters"]) == ("tiny", "cpu", 6_966_784)
    assert set(report["steps"]) == CANDIDATES
    for row in report["steps"].values():
        assert set(row) == {"wall_s", "cpu_s", "of_loop"} and row["wall_s"] > 0
    assert report["steps"]["loop over tensors"]["of_loop"] == 1.0


def test_benchmark_says_what_it_needs(tmp_path: Path) -> None:
    result = run_python("-m", "mars_dist.bench", "--help", folder=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "default: small, 124 M parameters, about 16 GB of memory" in " ".join(result.stdout.split())


def test_what_the_benchmark_needs_is_what_it_says() -> None:
    """All values, gradients and states, per parameter: on a small model, as the default size would take 16 GB."""
    shapes = gpt2_shapes("tiny", vocabulary=64, positions=16)
    total = 0
    for step in candidates(shapes, "cpu").values():
        step()
        owner: Any = step.__self__  # type: ignore[attr-defined]
        params = owner.params if hasattr(owner, "params") else owner.param_groups[0]["params"]
        states = owner.states if hasattr(owner, "states") else [list(s.values()) for s in owner.state.values()]
        total += sum(t.nbytes for p in params for t in (p, p.grad))
        total += sum(t.nbytes for state in states for t in state)
    numel = sum(torch.Size(s).numel() for s in shapes)
    assert total / numel == pytest.approx(128, rel=0.02)
    default = sum(torch.Size(s).numel() for s in gpt2_shapes(list(SIZES)[1]))
    assert default * 128 == pytest.approx(16e9, rel=0.02)


# ---- operations of one step

# No arithmetic and no memory: they cost the same few microseconds for a tensor of any size.
BOOKKEEPING = ("view", "split", "split_with_sizes", "slice", "select", "unbind", "reshape", "detach", "promote_types")


class Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher: a foreach operation on a hundred tensors is one."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count[func._schema.name.removeprefix("aten::").split(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    def split(self) -> tuple[int, int]:
        """Arithmetic, and everything."""
        return sum(n for name, n in self.count.items() if name not in BOOKKEEPING), self.count.total()


def operations(tensors: int, shape: tuple[int, ...], **kwargs: Any) -> tuple[int, int]:
    """Of the third step of ``tensors`` equal parameters."""
    params = [Parameter(torch.ones(shape)) for _ in range(tensors)]
    optimizer = MARS(params, **kwargs)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.step()
    with Operations() as counter:
        optimizer.step()
    return counter.split()


VECTOR, MATRIX = (8,), (4, 4)


@pytest.mark.parametrize(
    ("shape", "kwargs", "arithmetic", "everything"),
    [
        (VECTOR, {}, 0, 6),
        (VECTOR, {"mars_type": "mars-lion"}, 0, 6),
        (VECTOR, {"amsgrad": True}, 0, 7),
        (MATRIX, {"clip": None}, 0, 7),
        (MATRIX, {}, 2, 9),  # each matrix has its own sum on a CPU, where foreach_norm is not accurate enough
        (MATRIX, {"mars_type": "mars-lion"}, 2, 8),
        (MATRIX, {"first_step": "paper"}, 6, 15),  # in each pass: where h is absent, and g in its place
        (MATRIX, {"skip_nonfinite": True}, 20, 26),
        (VECTOR, {"skip_nonfinite": True}, 22, 28),
    ],
    ids=str,
)
def test_operations_per_tensor(
    shape: tuple[int, ...], kwargs: dict[str, Any], arithmetic: int, everything: int
) -> None:
    """What each further tensor adds to a step. A loop over tensors adds a dozen of arithmetic to each."""
    few, many = operations(10, shape, **kwargs), operations(100, shape, **kwargs)
    assert (many[0] - few[0]) / 90 <= arithmetic
    assert (many[1] - few[1]) / 90 <= everything
    assert operations(1, shape, **kwargs)[0] <= 80  # and what a step costs with hardly a tensor


# ---- the orthogonalisations


def test_benchmark_of_the_orthogonalisations() -> None:
    """What is printed holds for small matrices as well, except the times."""
    table = orthogonalizations(24, 96, 1, "cpu", torch.float32)
    first = next(iter(table))
    assert first == "newton-schulz, 5 steps" and "svd" in table
    for name, row in table.items():
        assert set(row) == {"flops", "wall", *SPECTRA} and row["wall"] > 0, name
    assert (table[first]["flops"], table[first]["wall"]) == (1.0, 1.0)
    assert max(table["svd"][spectrum] for spectrum in SPECTRA) < 1e-4
    for spectrum in SPECTRA:
        assert table["cans, 5 steps"][spectrum] < table[first][spectrum], spectrum
        if spectrum != "quarter rank":  # six values, and by chance Newton-Schulz ends some of them near 1
            assert table["polar-express, 5 steps"][spectrum] < table[first][spectrum], spectrum
    assert table["cans, 3 steps"]["flops"] < table["cans, 4 steps"]["flops"] < table["cans, 5 steps"]["flops"] == 1.0
