"""What is stored per tensor, in which shape and precision.

| key | when | precision |
|---|---|---|
| step | always | float32, 0-dim, on the parameter's device |
| exp_avg | always | the parameter's, float32 for half-precision parameters |
| exp_avg_sq | a rule with a second moment | as exp_avg |
| max_exp_avg_sq | the same, with amsgrad | as exp_avg |
| prev_grad | a rule with the gradient correction, but for one_state.py | the gradient's: the copy is exact |
| next_prev_grad | exact mode, between looking ahead and the step that follows (previous.py) | as prev_grad |

``prev_grad`` is -0.0 where there is none (maths/absent.py). A state has the shape of the tensor that the engine hands
to the optimizer (under ZeRO the flat partition: DeepSpeed links and saves no other shape), and is left out where no
piece of that tensor needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mars_dist.maths.absent import absent_like
from mars_dist.maths.rules import Rule

STEP = "step"


def needed(rules: Iterable[Rule], amsgrad: bool, one_state: bool = False) -> list[str]:
    """The states, beside ``step``, of a tensor whose pieces take ``rules``."""
    rules = list(rules)
    second = any(r.second_moment for r in rules)
    keys = ["exp_avg"] + ["exp_avg_sq"] * second + ["max_exp_avg_sq"] * (second and amsgrad)
    return keys + ["prev_grad"] * any(r.corrected and not (one_state and r.can_keep_one_state) for r in rules)


def ensure(
    state: dict[str, Any], param: Tensor, grad: Tensor, rules: Iterable[Rule], amsgrad: bool, one_state: bool = False
) -> None:
    """Create what ``rules`` need for ``param`` and is not there yet, as zeros; h as one that is absent."""
    if STEP not in state:
        state[STEP] = torch.zeros((), dtype=torch.float32, device=param.device)
    for key in needed(rules, amsgrad, one_state):
        if key not in state:
            if key == "prev_grad":
                state[key] = absent_like(param, grad.dtype)
            else:
                dtype = torch.promote_types(param.dtype, torch.float32)
                state[key] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
