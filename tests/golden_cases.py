"""The golden trajectories as objects: one loader for every test that is measured against them."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "golden"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class GoldenCase:
    """One recorded trajectory. ``kwargs`` and ``groups`` suit the reference and ``mars_dist.MARS`` alike.

    ``previous[t]`` is None except in exact mode at t >= 1. ``rule_of`` gives each tensor's rule.
    """

    name: str
    meta: dict[str, Any]
    p0: Tensors
    grads: list[Tensors]
    previous: list[Tensors | None]
    params: list[Tensors]
    states: dict[str, Tensors]
    kwargs: dict[str, Any]
    groups: list[dict[str, Any]]
    rule_of: dict[str, str]

    @property
    def rules(self) -> dict[str, int]:
        """How many tensors take each rule."""
        return dict(Counter(self.rule_of.values()))

    @property
    def elementwise(self) -> bool:
        return self.kwargs["mars_type"] in ("mars-adamw", "mars-lion")

    @property
    def bfloat16(self) -> bool:
        """True when the recorded matrix iteration ran in bfloat16."""
        return not self.elementwise and self.meta["newton_schulz"] == "bfloat16"

    def tolerance(self, step: int, dtype: torch.dtype) -> float:
        """Largest |dp| allowed after ``step`` (from 0) in an optimizer of this dtype; see golden/README.md."""
        if self.bfloat16:
            return 0.05 * sum(self.meta["lrs"][: step + 1])
        return 1e-12 if self.elementwise and dtype == torch.float64 else 2e-6

    def param_groups(self, params: Tensors) -> list[dict[str, Any]]:
        """The groups with tensors in place of names, as a torch optimizer takes them."""
        groups = [dict(group) for group in self.groups]
        for group in groups:
            group["params"] = [params[name] for name in group.pop("names")]
        return groups


def _translate(meta: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, str]]:
    """Our keywords, our groups and the rule of each tensor for the authors' constructor call."""
    kwargs = dict(meta["kwargs"])
    names = meta["names"]
    if meta["kind"] == "MARS_M":
        adamw = [name for name in names if name not in meta["matrices"]]
        ours = {
            "mars_type": "mars-m",
            "lr": kwargs["lr"],
            "betas": (kwargs["momentum"], 0.99),
            "weight_decay": kwargs["wd"],
            "gamma": kwargs["gamma"],
            "eps": kwargs["adamw_eps"],
            "lr_1d": kwargs["lr"],  # one learning rate and one decay for both kinds of tensor
            "betas_1d": tuple(kwargs["adamw_betas"]),
            "weight_decay_1d": kwargs["wd"],
            "ns_steps": kwargs["ns_steps"],
            "ns_dtype": meta["newton_schulz"],
        }
        groups = [{"names": meta["matrices"], "use_mars": True}, {"names": adamw, "use_mars": False}]
        return ours, groups, {name: "AdamW" if name in adamw else "MARS-M" for name in names}

    kwargs["betas"], kwargs["betas_1d"] = tuple(kwargs["betas"]), tuple(kwargs["betas_1d"])
    rule_names = {"mars-adamw": "MARS-AdamW", "mars-lion": "MARS-Lion", "mars-shampoo": "MARS-Shampoo"}
    matrix_rule = rule_names[kwargs["mars_type"]]
    if kwargs["mars_type"] == "mars-shampoo":
        kwargs["ns_dtype"] = meta["newton_schulz"]
    other_rule = "AdamW"
    if kwargs.get("optimize_1d"):
        other_rule = "MARS-AdamW" if matrix_rule == "MARS-Shampoo" else matrix_rule
    two_dimensional = ("wte", "tall", "wide", "square")  # and not bias, norm and conv
    rule_of = {name: matrix_rule if name in two_dimensional else other_rule for name in names}
    return kwargs, meta["groups"] or [{"names": names}], rule_of


def load(path: Path) -> GoldenCase:
    with np.load(path) as data:
        arrays = {key: data[key] for key in data.files}
    meta = json.loads(str(arrays.pop("meta")))
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}

    def under(prefix: str) -> Tensors:
        return {name: tensors[prefix + name] for name in meta["names"] if prefix + name in tensors}

    steps = range(meta["steps"])
    kwargs, groups, rule_of = _translate(meta)
    return GoldenCase(
        name=path.stem,
        meta=meta,
        p0=under("p0/"),
        grads=[under(f"g/{t}/") for t in steps],
        previous=[under(f"h/{t}/") or None for t in steps],
        params=[under(f"p/{t}/") for t in steps],
        states={key: under(f"s/{key}/") for key in ("exp_avg", "exp_avg_sq")},
        kwargs=kwargs,
        groups=groups,
        rule_of=rule_of,
    )


def names() -> list[str]:
    """The names of all cases, for parametrize; an empty folder is an error, not a test run without tests."""
    found = sorted(path.stem for path in FOLDER.glob("*.npz"))
    if not found:
        raise FileNotFoundError(f"no golden files in {FOLDER}")
    return found


def case(name: str) -> GoldenCase:
    return load(FOLDER / f"{name}.npz")
