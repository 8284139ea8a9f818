"""Parameter groups that can be printed: one line for each, with the rule that its tensors take."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mars_dist.groups.tensors import BIAS_NAME
from mars_dist.maths.rules import rule_for

MATRICES, EMBEDDINGS, OTHERS = "matrices", "embeddings and head", "others"
ROLES = {"matrices": MATRICES, "embeddings": EMBEDDINGS, "others": OTHERS}  # by the argument that claims them


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups as ``param_groups`` made them: a list of dicts; ``print(groups)`` shows them as a table."""

    def __init__(self, groups: Sequence[dict[str, Any]], variant: str, matrix_ndim: tuple[int, ...]) -> None:
        super().__init__(groups)
        self.variant, self.matrix_ndim = variant, matrix_ndim
        self.shapes: dict[str, tuple[int, ...]] = {}  # whole ones, by name
        self.also: dict[str, list[str]] = {}  # other names of a tied tensor
        self.frozen: list[int] = []  # elements of each tensor that was left out

    def __str__(self) -> str:
        return _table(self)


def _table(groups: ParamGroups) -> str:
    ndim = groups.matrix_ndim
    call = f"MARS(groups, mars_type={groups.variant!r}" + (f", matrix_ndim={ndim})" if ndim != (2,) else ")")
    rows = [("group", "rule", "tensors", "elements", "lr", "decay", "names")]
    larger = []
    for group in groups:
        names = [name for name, _ in group["params"]]
        rule = rule_for(groups.shapes[names[0]], groups.variant, ndim, group.get("use_mars"), optimize_1d=False)
        lr = group["lr"] if rule.corrected else group.get("lr_1d", group["lr"] * group.get("lr_1d_ratio", 1.0))
        form = " (in, out)" if group.get("fan_in_fan_out") else ""
        form += f" of {group['matrix_parts']} parts" if "matrix_parts" in group else ""
        elements = sum(math.prod(groups.shapes[name]) for name in names)
        decay = group["weight_decay" if rule.corrected else "weight_decay_1d"]
        shown = (f"{len(names)}", f"{elements:,}", f"{lr:g}", f"{decay:g}")
        rows.append((group["role"] + form, rule.label, *shown, _abbreviated(names, groups.also)))
        if group["role"].startswith(OTHERS):
            larger += [n for n in names if len(groups.shapes[n]) > 2 and not BIAS_NAME.search(n.rpartition(".")[2])]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = [f"parameter groups for {call}"]
    for row in rows:
        cells = [row[i].ljust(widths[i]) if i < 2 else row[i].rjust(widths[i]) for i in range(6)]
        lines.append("  ".join([*cells, row[6]]))
    if groups.frozen:
        lines.append(f"left out, frozen: {len(groups.frozen)} tensors of {sum(groups.frozen):,} elements")
    if larger:
        ranks = tuple(sorted({*ndim, *(len(groups.shapes[name]) for name in larger)}))
        lines.append(
            f"under AdamW with 3 and more dimensions (experts, convolutions): {_abbreviated(larger, {})}; "
            f"matrix_ndim={ranks} here and in MARS makes matrices of them"
        )
    return "\n".join(lines)


def _abbreviated(names: Sequence[str], also: Mapping[str, Sequence[str]], most: int = 3) -> str:
    """Numbers become *, and of the different names that are left the first few are shown."""
    alike: dict[str, None] = {}
    for name in names:
        alike[" = ".join(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", n) for n in (name, *also.get(name, ())))] = None
    rest = len(alike) - most
    return ", ".join(list(alike)[:most]) + (f", and {rest} more" if rest > 0 else "")
