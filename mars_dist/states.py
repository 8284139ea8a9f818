"""What is stored per tensor, in which shape and precision.

| key | when | precision |
|---|---|---|
| step | always | float32, 0-dim, on the parameter's device |
| exp_avg | always | the parameter's, float32 for half-precision parameters |
| exp_avg_sq | a rule with a second moment | as exp_avg |
| max_exp_avg_sq | the same, with amsgrad | as exp_avg |
| prev_grad | a rule with the gradient correction, but for one_state.py | the gradient's: the copy is exact |
| next_prev_grad | exact mode, between looking ahead and the step that follows (previous.py) | as prev_grad |

A state has the shape of the tensor that the engine hands to the optimizer (under ZeRO the flat partition: DeepSpeed
links and saves no other shape), and is left out where no piece of that tensor needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

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
    """Create what ``rules`` need for ``param`` and is not there yet, as zeros."""
    if STEP not in state:
        state[STEP] = torch.zeros((), dtype=torch.float32, device=param.device)
    for key in needed(rules, amsgrad, one_state):
        if key not in state:
            dtype = grad.dtype if key == "prev_grad" else torch.promote_types(param.dtype, torch.float32)
            state[key] = torch.zeros_like(param, dtype=dtype, requires_grad=False)


def restore(loaded: dict[str, Any], param: Tensor, copy_as: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """Own copies of the tensors of one loaded state, laid out as ``param`` is, in the precision they were saved in.

    ``copy_as(param, value)`` makes such a copy of a tensor of the same (global) shape.

    torch.optim casts to the parameter's dtype and may share memory with the dictionary that was loaded; h must not be
    shared with anyone. Every state gets a step counter of its own.
    """
    out: dict[str, Any] = {}
    for key, value in loaded.items():
        if key == STEP and not isinstance(value, Tensor):
            value = torch.tensor(float(value), dtype=torch.float32)
        if not isinstance(value, Tensor):
            if not isinstance(value, (int, float, bool)):
                raise ValueError(
                    f"the state {key!r} that is loaded is a {type(value).__name__} and no tensor: the saved optimizer "
                    "had none. Construct MARS as it was when the file was saved (mars_type, clip, one_state, is_approx)"
                )
            out[key] = value
        elif key != STEP and value.ndim and value.shape != param.shape:
            raise ValueError(
                f"the state {key!r} that is loaded has shape {tuple(value.shape)}, its parameter "
                f"{tuple(param.shape)}: it is the state of another model, or of another number of ranks"
            )
        elif value.shape == param.shape:
            out[key] = copy_as(param, value)
        else:
            out[key] = value.detach().to(device=param.device, copy=True)
    return out
