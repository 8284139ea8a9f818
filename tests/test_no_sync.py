"""``step()`` never asks a tensor for its value: on an accelerator each such question stops the host."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small import VARIANTS, Parameters, gradients, parameters, set_gradients
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import mars_dist
from mars_dist import MARS
from mars_dist.config import ORTHOGONALIZERS

# Operations whose result, or the size of whose result, depends on values: the host has to wait for them.
WAITING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_static", "argwhere"),
    *("masked_select", "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
}  # fmt: skip
READING = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__", "__array__")


class HostSync(AssertionError):
    """The host waited for a value."""


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith(("index", "_index")) and any(
            isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in flatten(args[1:])
        )
        if name in WAITING or by_mask:
            raise HostSync(f"aten::{name}")
        return func(*args, **(kwargs or {}))


def flatten(args: Any) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from flatten(arg)
        else:
            yield arg


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise ``HostSync`` wherever Python or an operation reads a value from a tensor."""
    with pytest.MonkeyPatch.context() as patch, NoWaiting():
        for name in READING:

            def refuse(self: Tensor, *args: Any, name: str = name, **kwargs: Any) -> Any:
                raise HostSync(f"Tensor.{name}")

            patch.setattr(torch.Tensor, name, refuse)
        yield


KWARGS: list[dict[str, Any]] = [
    {},
    {"first_step": "paper", "optimize_1d": True, "amsgrad": True, "clip": None},
    {"maximize": True, "weight_decay": 0.1, "gamma": 0.0, "matrix_ndim": (2, 3)},
    {"is_approx": False},
    {"orthogonalizer": "svd"},
]
EVERY_SETTING = pytest.mark.parametrize("kwargs", KWARGS, ids=str)
EVERY_VARIANT = pytest.mark.parametrize("mars_type", VARIANTS)
EVERY_SKIP = pytest.mark.parametrize("skip_nonfinite", [False, True], ids=["", "skip_nonfinite"])


def run(optimizer: MARS, params: Parameters, steps: int = 3) -> None:
    """Steps from the first one on, with a gradient missing at the second."""
    for step in range(steps):
        grads = gradients(step, params)
        if step == 1:
            del grads["bias"]
        set_gradients(params, grads)
        with no_host_sync():
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
            optimizer.step()


@pytest.mark.parametrize(
    "lr", [3e-3, 0.0, torch.tensor(3e-3), torch.tensor(0.0)], ids=["lr", "lr0", "tensor", "tensor0"]
)
@EVERY_SETTING
@EVERY_SKIP
@EVERY_VARIANT
def test_a_step_waits_for_no_value(
    mars_type: str, skip_nonfinite: bool, kwargs: dict[str, Any], lr: float | Tensor
) -> None:
    params = parameters()
    optimizer = MARS(params.values(), lr=lr, mars_type=mars_type, skip_nonfinite=skip_nonfinite, **kwargs)
    run(optimizer, params)
    assert all("exp_avg" in optimizer.state[p] for p in params.values())


@pytest.mark.parametrize("mars_type", ["mars-shampoo", "mars-m"])
@pytest.mark.parametrize("orthogonalizer", ORTHOGONALIZERS)
def test_no_orthogonalisation_waits_for_a_value(orthogonalizer: str, mars_type: str) -> None:
    params = {
        name: Parameter(torch.ones(shape)) for name, shape in {"m": (4, 6), "long": (4, 40), "bias": (3,)}.items()
    }
    optimizer = MARS(
        params.values(), mars_type=mars_type, orthogonalizer=orthogonalizer, matrix_parts=2, fan_in_fan_out=True
    )
    run(optimizer, params)
    assert optimizer.rule_counts() == {"MARS-M" if mars_type == "mars-m" else "MARS-Shampoo": 2, "AdamW": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@EVERY_VARIANT
def test_a_step_waits_for_no_value_in_other_precisions(mars_type: str, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    run(MARS(params.values(), mars_type=mars_type, skip_nonfinite=True), params)


def test_a_bad_step_waits_for_no_value_either() -> None:
    params = parameters()
    optimizer = MARS(params.values(), skip_nonfinite=True)
    set_gradients(params, {name: torch.full_like(p, torch.nan) for name, p in params.items()})
    with no_host_sync():
        optimizer.step()


def test_a_dry_run_waits_for_no_value_either() -> None:
    params = parameters()
    optimizer = MARS(params.values(), lr=0.0)
    set_gradients(params, {name: torch.zeros_like(p) for name, p in params.items()})
    with no_host_sync():
        optimizer.step()


@EVERY_SETTING
@EVERY_SKIP
@EVERY_VARIANT
@pytest.mark.parametrize("lr_is_a_tensor", [False, True], ids=["", "lr_tensor"])
def test_a_step_works_on_tensors_that_have_no_values(
    mars_type: str, skip_nonfinite: bool, kwargs: dict[str, Any], lr_is_a_tensor: bool
) -> None:
    """On the meta device there is nothing to read: what hides below the dispatcher would show here."""
    params = {name: Parameter(p.detach().to("meta")) for name, p in parameters().items()}
    optimizer = MARS(params.values(), mars_type=mars_type, skip_nonfinite=skip_nonfinite, **kwargs)
    if lr_is_a_tensor:
        optimizer.param_groups[0]["lr"] = torch.tensor(3e-3, device="meta")
    for step in range(3):
        for name, p in params.items():
            p.grad = None if step == 1 and name == "bias" else torch.empty_like(p)
        optimizer.update_previous_grad()
        optimizer.update_last_grad()
        optimizer.step()
    assert all(t.is_meta for state in optimizer.state.values() for t in state.values()), "a state has moved to the host"


# ---- the detector finds what it looks for

X = torch.arange(4.0)
SYNCS: dict[str, Callable[[], Any]] = {
    "item": lambda: X.sum().item(),
    "tolist": lambda: X.tolist(),
    "bool": lambda: bool(X.sum()),
    "if": lambda: 1 if X.sum() > 1 else 0,
    "float": lambda: float(X.sum()),
    "int": lambda: int(X.sum()),
    "numpy": lambda: X.numpy(),
    "in": lambda: 1.0 in X,
    "max": lambda: max(X[0], X[1]),
    "alpha": lambda: torch.add(X, X, alpha=X.sum()),  # type: ignore[call-overload]
    "range": lambda: range(X.int().sum()),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 1),
    "mask": lambda: X[X > 1],
    "masked_select": lambda: X.masked_select(X > 1),
    "mask_assignment": lambda: X.clone().index_put_((X > 1,), torch.zeros(())),
    "equal": lambda: torch.equal(X, X),
    "unique": lambda: X.unique(),
    "foreach_scalar": lambda: torch._foreach_mul([X], X.sum().item()),
}


@pytest.mark.parametrize("sync", SYNCS)
def test_the_detector_finds_every_kind_of_question(sync: str) -> None:
    with no_host_sync(), pytest.raises(HostSync):
        SYNCS[sync]()


def test_the_detector_lets_everything_else_pass() -> None:
    with no_host_sync():
        torch.where(X > 1, X, X / X.sum())
        X[1:].view(-1)[0].mul_(X.sum())


def test_a_question_planted_into_a_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = MARS(params.values())
    monkeypatch.setattr("mars_dist.step._hyper", lambda *_: X.sum().item())
    with pytest.raises(HostSync):
        run(optimizer, params)


# ---- and none is written down

SOURCE = Path(mars_dist.__file__).parent
ON_THE_WAY = [
    *(SOURCE / "kernels").rglob("*.py"),
    *(SOURCE / "maths").rglob("*.py"),
    SOURCE / "step.py",
    SOURCE / "states.py",
]


@pytest.mark.parametrize("path", ON_THE_WAY, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_source_of_a_step_reads_a_value(path: Path) -> None:
    attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    found = [(node.lineno, node.attr) for node in attributes if node.attr in ("item", "tolist", "numpy", "nonzero")]
    assert not found


def test_the_sources_of_a_step_are_all_there() -> None:
    assert {path.name for path in ON_THE_WAY} >= {"eager.py", "rules.py", "orthogonalize.py", "step.py", "states.py"}
