"""Wrong arguments of ``mars_dist.MARS``: each error names the argument, the value and the range."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from mars_dist import MARS

SCALARS = ("lr", "eps", "weight_decay", "gamma", "lr_1d", "weight_decay_1d")
PAIRS = ("betas", "betas_1d")
NAN, INF = math.nan, math.inf
RATE = r"in \[0, inf\)"
NUMBER = "must be a number"
TRUTH = "True or False"

WRONG: list[tuple[str, Any, str]] = [
    # Numbers that are never negative, NaN or infinite.
    *((name, value, RATE) for name in SCALARS if name != "gamma" for value in (-1e-9, NAN, INF)),
    *(("gamma", value, "finite") for value in (NAN, INF, -INF)),
    *(("clip", value, r"in \(0, inf\).*None turns the clip off") for value in (0.0, -1.0, NAN, INF)),
    # What is no number: "auto" left over in a configuration, a number in quotes, a flag, None.
    *(
        (name, value, NUMBER)
        for name in (*SCALARS, "clip")
        for value in ("auto", "1e-3", True, [0.1])
    ),
    *((name, None, NUMBER) for name in SCALARS),
    # A tensor is as good as a number for lr if it has one element and its value is in range.
    *(("lr", value, RATE) for value in (torch.tensor(-1.0), torch.tensor(NAN))),
    *(("lr", value, "one element") for value in (torch.tensor([0.1, 0.2]), torch.tensor([]))),
    # Pairs.
    *(
        (name, value, r"two numbers in \[0, 1\)")
        for name in PAIRS
        for value in (0.9, (0.9,), (0.9, 0.95, 0.99), "0.9,0.95", None, "auto")
    ),
    *((name, value, r"in \[0, 1\)") for name in PAIRS for value in ((1.0, 0.9), (0.9, -0.1), (NAN, 0.9))),
    *((name, value, NUMBER) for name in PAIRS for value in (("0.9", 0.95), (0.9, True), (0.9, None))),
    # Flags.
    *(
        (name, value, TRUTH)
        for name in ("amsgrad", "is_approx", "optimize_1d", "skip_nonfinite", "maximize", "fan_in_fan_out")
        for value in (1, "true", "auto", None)
    ),
    *(("use_mars", value, "True, False or None") for value in (1, "true", "auto")),
    # Choices.
    *(("mars_type", value, "'mars-adamw', 'mars-lion', 'mars-shampoo', 'mars-m'") for value in ("adamw", None, 3)),
    *(("first_step", value, "'reference', 'paper'") for value in ("zero", None, True)),
    *(("orthogonalizer", value, "'newton-schulz', 'svd'") for value in ("polar", None)),
    *(("ns_dtype", value, "'bfloat16', 'float32', 'float64'") for value in ("float16", torch.float16, "fp32", 32)),
    *(
        (name, value, "whole number of at least 1")
        for name in ("ns_steps", "matrix_parts")
        for value in (0, -1, 5.0, "5", True, None, NAN)
    ),
    *(("matrix_ndim", value, "at least 2") for value in (1, 0, (), (2, 1), "2", 2.0, True, None, (2, "3"))),
]  # fmt: skip


def identify(value: Any) -> str:
    return re.sub(r"[^\w.,-]+", "_", str(value))


@pytest.mark.parametrize(("name", "value", "wanted"), WRONG, ids=identify)
def test_a_wrong_value_is_refused_with_its_name_and_the_range(name: str, value: Any, wanted: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        MARS([Parameter(torch.ones(2, 2))], **{name: value})
    message = str(error.value)
    assert re.search(rf"\b{name}\b", message), message
    assert re.search(wanted, message), message
    assert shows(message, value), message


def shows(message: str, value: Any) -> bool:
    """Whether ``message`` shows ``value``, or of a pair at least one half."""
    if isinstance(value, Tensor):
        value = tuple(value.shape) if value.numel() != 1 else value.item()
    candidates = [value, *value] if isinstance(value, tuple) else [value]
    return any(str(candidate).removeprefix("torch.") in message for candidate in candidates)


GROUP_KEYS = (*SCALARS, *PAIRS, "clip", "amsgrad", "optimize_1d", "use_mars", "maximize", "fan_in_fan_out")
GROUP_KEYS += ("matrix_parts",)


@pytest.mark.parametrize(("name", "value", "wanted"), [row for row in WRONG if row[0] in GROUP_KEYS], ids=identify)
def test_a_wrong_value_in_a_group_is_refused_too(name: str, value: Any, wanted: str) -> None:
    p, q = Parameter(torch.ones(2, 2)), Parameter(torch.ones(3))
    with pytest.raises((ValueError, TypeError), match=wanted) as error:
        MARS([{"params": [p], name: value}])
    assert re.search(rf"\b{name}\b", str(error.value))
    optimizer = MARS([p])
    with pytest.raises((ValueError, TypeError), match=wanted):
        optimizer.add_param_group({"params": [q], name: value})
    assert len(optimizer.param_groups) == 1, "a refused group is not half added"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"lr": 0},
        {"lr": 1},
        {"lr": torch.tensor([0.1])},
        {"lr": torch.tensor(0.1, dtype=torch.float64)},
        {"betas": [0.0, 0.0]},
        {"betas": (0, 0.5)},
        {"gamma": -0.1},
        {"gamma": 2},
        {"eps": 0.0},
        {"clip": None},
        {"clip": 5},
        {"ns_dtype": torch.bfloat16},
        {"ns_dtype": "float64"},
        {"matrix_ndim": [2, 3]},
        {"matrix_ndim": (4, 2, 2)},
        {"use_mars": False},
    ],
    ids=str,
)
def test_values_at_the_edge_of_the_range_are_accepted_and_train(kwargs: dict[str, Any]) -> None:
    p = Parameter(torch.ones(3, 2))
    optimizer = MARS([p], **kwargs)
    p.grad = torch.ones(3, 2)
    optimizer.step()
    assert p.isfinite().all()
    assert bool((p != 1.0).any()) == (kwargs.get("lr") != 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_precision_of_the_iteration_is_the_same_by_name_and_by_torch_dtype(dtype: torch.dtype) -> None:
    results = []
    for given in (dtype, str(dtype), str(dtype).removeprefix("torch.")):
        p = Parameter(torch.ones(3, 2))
        optimizer = MARS([p], mars_type="mars-m", ns_dtype=given)
        p.grad = torch.arange(6.0).view(3, 2)
        optimizer.step()
        results.append(p.detach())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("weigth_decay", "weight_decay"),
        ("weight_decay1d", "weight_decay_1d"),
        ("beta", "betas"),
        ("Gamma", "gamma"),
        ("clipping", "clip"),
        ("mars_typ", "mars_type"),
        ("isapprox", "is_approx"),
        ("firststep", "first_step"),
        ("ns_step", "ns_steps"),
        ("skip_non_finite", "skip_nonfinite"),
        ("maximise", "maximize"),
    ],
)
def test_an_unknown_keyword_names_the_nearest_known_one(unknown: str, nearest: str) -> None:
    kwargs: dict[str, Any] = {unknown: 1.0}
    with pytest.raises(TypeError, match=f"{unknown!r}.*did you mean {nearest!r}"):
        MARS([Parameter(torch.ones(2))], **kwargs)


def test_an_unknown_keyword_that_is_near_to_none_lists_the_known_ones() -> None:
    with pytest.raises(TypeError) as error:
        MARS([Parameter(torch.ones(2))], xyzzy=1.0)
    message = str(error.value)
    assert "'xyzzy'" in message and "did you mean" not in message
    assert "weight_decay_1d" in message and "skip_nonfinite" in message


@pytest.mark.parametrize(
    ("variant", "nearest"), [("mars-adam", "mars-adamw"), ("lion", "mars-lion"), ("mars_m", "mars-m")]
)
def test_an_unknown_variant_names_the_nearest_known_one(variant: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {nearest!r}"):
        MARS([Parameter(torch.ones(2))], mars_type=variant)


@pytest.mark.parametrize(
    ("key", "nearest"), [("weight_decy", "weight_decay"), ("lr1d", "lr_1d"), ("beta", "betas"), ("usemars", "use_mars")]
)
def test_a_misspelt_group_key_warns(key: str, nearest: str, caplog: pytest.LogCaptureFixture) -> None:
    MARS([{"params": [Parameter(torch.ones(2))], key: 0.0}])
    assert len(caplog.messages) == 1
    assert repr(key) in caplog.messages[0] and f"did you mean {nearest!r}" in caplog.messages[0]


def test_group_keys_of_other_libraries_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    """Schedulers and frameworks keep things of their own in the groups."""
    own = {"initial_lr": 0.1, "max_lr": 0.1, "name": "decay", "block": 3, "lr_scale": 0.5}
    optimizer = MARS([{"params": [Parameter(torch.ones(2))], **own}])
    assert not caplog.messages
    assert own.items() <= optimizer.param_groups[0].items()


@pytest.mark.parametrize(
    ("name", "value"), [("mars_type", "mars-lion"), ("is_approx", False), ("skip_nonfinite", True), ("ns_steps", 3)]
)
def test_what_is_one_for_the_optimizer_is_not_ignored_silently_in_a_group(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A group with a ``mars_type`` of its own would train under the optimizer's: an error, or at least a warning."""
    said = []
    try:
        MARS([{"params": [Parameter(torch.ones(2, 2))], name: value}])
    except (TypeError, ValueError) as error:
        said = [str(error)]
    assert any(name in message for message in said + caplog.messages)
