"""Every hyper-parameter of MARS, with its default and its range, checked once.

Two kinds. What may differ between parameter groups lives in ``optimizer.param_groups``, so that schedulers and
checkpoints see it (``GROUP_DEFAULTS``). What is one for the whole optimizer lives in ``Settings``. It travels as one
text in every group (``SETTINGS_KEY``): groups are all that torch's checkpoint helpers, FSDP1 and DeepSpeed keep of a
state dict beside the states.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

logger = logging.getLogger("mars_dist")

VARIANTS = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
ORTHOGONALIZERS = ("newton-schulz", "svd", "polar-express", "cans")
NS_DTYPES = ("bfloat16", "float32", "float64")
FIRST_STEPS = ("reference", "paper")

SETTINGS_KEY = "mars_settings"  # of a parameter group
STATE_DICT_FORMAT = 1


class Default(float):
    """A default value that can be told from the same number given by the caller."""


LR_1D = Default(3e-3)
WEIGHT_DECAY_1D = Default(0.1)

GROUP_DEFAULTS: dict[str, Any] = {
    "lr": 3e-3,
    "betas": (0.95, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "gamma": 0.025,
    "optimize_1d": False,
    "lr_1d": LR_1D,
    "betas_1d": (0.9, 0.95),
    "weight_decay_1d": WEIGHT_DECAY_1D,
    "clip": 1.0,
    "use_mars": None,
    "maximize": False,
    "one_state": None,
    "fan_in_fan_out": False,
    "matrix_parts": 1,
}


@dataclass(frozen=True)
class Settings:
    """What is one for the whole optimizer. Plain values only: it is stored in checkpoints."""

    mars_type: str = "mars-adamw"
    is_approx: bool = True
    first_step: str = "reference"
    ns_steps: int = 5
    ns_dtype: str | None = None
    orthogonalizer: str = "newton-schulz"
    matrix_ndim: tuple[int, ...] = (2,)
    skip_nonfinite: bool = False
    matrix_buffer_mb: float = 256.0

    def __post_init__(self) -> None:
        _one_of("mars_type", self.mars_type, VARIANTS)
        _one_of("first_step", self.first_step, FIRST_STEPS)
        _one_of("orthogonalizer", self.orthogonalizer, ORTHOGONALIZERS)
        for name in ("is_approx", "skip_nonfinite"):
            _boolean(name, getattr(self, name))
        if self.ns_dtype is not None:
            object.__setattr__(self, "ns_dtype", str(self.ns_dtype).removeprefix("torch."))
            _one_of("ns_dtype", self.ns_dtype, NS_DTYPES)
        _whole_number("ns_steps", self.ns_steps)
        _number("matrix_buffer_mb", self.matrix_buffer_mb, low=0.0, open_low=True)
        ranks = self.matrix_ndim if isinstance(self.matrix_ndim, (tuple, list)) else (self.matrix_ndim,)
        if not ranks or any(isinstance(r, bool) or not isinstance(r, int) or r < 2 for r in ranks):
            raise ValueError(
                "matrix_ndim must be a number of dimensions of at least 2, or a tuple of them "
                f"(2 = matrices only, (2, 3, 4) = also experts and convolutions), got {self.matrix_ndim!r}"
            )
        object.__setattr__(self, "matrix_ndim", tuple(sorted(set(ranks))))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Settings:
        """The settings among the values ``given``."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in known})

    def to_text(self) -> str:
        """As it stands in the groups of a state dict: JSON."""
        return json.dumps({"format": STATE_DICT_FORMAT, **self.to_dict()})

    @classmethod
    def from_text(cls, text: Any) -> Settings:
        """The settings of a state dict, from what ``to_text`` made.

        Raises:
            ValueError: for a newer format, or settings that this version does not know.
        """
        try:
            saved = json.loads(text)
            number = saved.pop("format")
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"its {SETTINGS_KEY} cannot be read: {str(text)[:200]!r}") from error
        if number != STATE_DICT_FORMAT:
            raise ValueError(
                f"it has format {number!r}, and this version of mars_dist knows format {STATE_DICT_FORMAT}: load it "
                "with the version that saved it, or a newer one"
            )
        unknown = sorted(saved.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(
                f"it has settings that this version of mars_dist does not know: {', '.join(unknown)}. Load it with the "
                "version that saved it, or a newer one"
            )
        try:
            return cls(**saved)
        except (TypeError, ValueError) as error:
            raise ValueError(f"one of its settings is not valid: {error}") from error


def check_keywords(unknown: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ``TypeError`` for keywords that MARS does not have, naming the nearest one it has."""
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise TypeError(f"MARS got an unknown keyword {name!r}{hint} It knows: {', '.join(known)}.")


def resolve_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's defaults for its groups, checked, from the keywords of its constructor.

    ``lr_1d`` is replaced by ``lr_1d_ratio`` = lr_1d / lr, so that a schedule acts on both learning rates and a
    checkpoint library that sets ``lr`` to 0 stops both.
    """
    defaults = dict(given)
    lr_1d = defaults.pop("lr_1d")
    ratio = _ratio(lr_1d, defaults["lr"])
    if isinstance(lr_1d, Default) and ratio > 4.0:
        logger.warning(
            "lr_1d was not given: tensors under plain AdamW (biases, norms) take the published %g, which is %.3g times "
            "lr = %g. Give lr_1d (for example lr_1d=lr) to choose it.",
            lr_1d,
            ratio,
            float(defaults["lr"]),
        )
    defaults["lr_1d_ratio"] = ratio
    for name in ("betas", "betas_1d"):
        defaults[name] = pair_of_betas(name, defaults[name])
    check_group(defaults)
    return defaults


def resolve_group(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter group with everything filled in and checked, as a new dict.

    A group that gives ``lr`` but no ``lr_1d`` keeps the optimizer's ratio of the two.

    ``weight_decay_1d``, first that applies: the group's own; the optimizer's, if the caller gave it; the group's own
    ``weight_decay``, if it names one (so that a no-decay group stays undecayed); 0.1.
    """
    for name in group:
        if name in Settings.__dataclass_fields__:
            logger.warning("parameter group: %r is one for the whole optimizer and has no effect in a group", name)
        near = difflib.get_close_matches(name, GROUP_DEFAULTS, n=1, cutoff=0.85)
        if near and name not in GROUP_DEFAULTS and name not in defaults:
            logger.warning("parameter group: unknown key %r has no effect; did you mean %r?", name, near[0])
    out = dict(group)
    if "lr_1d" in out:
        out["lr_1d_ratio"] = _ratio(out.pop("lr_1d"), out.get("lr", defaults["lr"]))
    if "weight_decay_1d" not in out and isinstance(defaults["weight_decay_1d"], Default):
        out["weight_decay_1d"] = out.get("weight_decay", defaults["weight_decay_1d"])
    for name, value in defaults.items():
        out.setdefault(name, value)
    for name in ("betas", "betas_1d"):
        out[name] = pair_of_betas(name, out[name])
    check_group(out)
    out["weight_decay_1d"] = float(out["weight_decay_1d"])
    return out


def check_group(group: Mapping[str, Any]) -> None:
    """Check the values of one resolved group; the message names the argument, the value and the range."""
    _lr(group["lr"])
    for name in ("eps", "weight_decay", "weight_decay_1d", "lr_1d_ratio"):
        _number(name, group[name], low=0.0)
    _number("gamma", group["gamma"])
    if group["clip"] is not None:
        _number("clip", group["clip"], low=0.0, open_low=True, hint=" (None turns the clip off)")
    for name in ("amsgrad", "optimize_1d", "maximize", "fan_in_fan_out"):
        _boolean(name, group[name])
    _whole_number("matrix_parts", group["matrix_parts"])
    if group["one_state"] is not None and not isinstance(group["one_state"], bool):
        raise ValueError(f"one_state must be True, False or None (= where it is the same), got {group['one_state']!r}")
    if group["use_mars"] is not None and not isinstance(group["use_mars"], bool):
        raise ValueError(f"use_mars must be True, False or None (= by the tensor's shape), got {group['use_mars']!r}")


def _lr(lr: Any) -> float:
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must be a number or a tensor of one element, got a tensor of shape {tuple(lr.shape)}")
        lr = float(lr)
    _number("lr", lr, low=0.0)
    return lr


def _ratio(lr_1d: Any, lr: Any) -> float:
    lr = _lr(lr)
    _number("lr_1d", lr_1d, low=0.0)
    if lr_1d == 0.0:
        return 0.0
    if lr == 0.0:
        if not isinstance(lr_1d, Default):
            logger.warning(
                "lr_1d = %g was given with lr = 0: their ratio is unknown, so tensors under plain AdamW will follow lr "
                "itself (ratio 1). Construct MARS with the peak lr and let the schedule lower it to keep the ratio.",
                lr_1d,
            )
        return 1.0
    return float(lr_1d) / float(lr)


def pair_of_betas(name: str, value: Any) -> tuple[float, float]:
    """``value`` as two decays, checked."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} must be two numbers in [0, 1), got {value!r}")
    for i, beta in enumerate(value):
        _number(f"{name}[{i}]", beta, low=0.0, high=1.0)
    return float(value[0]), float(value[1])


def _number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    hint: str = "",
) -> None:
    """Check that ``value`` is a finite number in [low, high), or in (low, high) with ``open_low``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    inside = math.isfinite(value) and value < high and (value > low if open_low else value >= low)
    if not inside:
        if math.isinf(low) and math.isinf(high):
            wanted = "finite"
        else:
            wanted = f"in {'(' if open_low else '['}{low:g}, {'inf' if math.isinf(high) else format(high, 'g')})"
        raise ValueError(f"{name} must be {wanted}{hint}, got {value!r}")


def _whole_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}{hint}")
