"""MARS without the clip in one state per tensor: no previous gradient is kept.

With the approximate h (the gradient of the step before), h = 0 at the first step, no clip and a constant gamma,

.. code-block:: text

    b  = beta1 * b + (1 - beta1) * (1 - gamma) * g
    m  = b + gamma * g

is the momentum of MARS: equal to the form with two states in real arithmetic, about 1e-16 apart in float64. ``exp_avg``
then holds b. The group key ``one_state`` says which form a group's states are in, and travels with checkpoints.
MARS-AdamW needs c itself for its second moment, and keeps two states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mars_dist.config import Settings
from mars_dist.maths.rules import RULES

# Group key: the gamma that the group's states of this form were made with; None where they are of the form with two.
GAMMA = "one_state_gamma"


def choose_form(group: dict[str, Any], settings: Settings) -> None:
    """Decide the form of a new group, where ``one_state`` is None: one state wherever that is the same.

    Raises:
        ValueError: for ``one_state=True`` where it is not.
    """
    possible = RULES[settings.mars_type].can_keep_one_state
    if group["one_state"] is None:
        group["one_state"] = possible and not _obstacle(group, settings)
    elif group["one_state"] and not possible:
        raise ValueError(
            f"one_state=True with mars_type={settings.mars_type!r}: its second moment is one of c, which needs the "
            "previous gradient. Leave one_state out."
        )
    group[GAMMA] = group["gamma"] if group["one_state"] else None
    check_form(group, settings, began=False)


def check_form(group: dict[str, Any], settings: Settings, began: bool) -> None:
    """Raise ``ValueError`` where the group's values do not fit the form of its states.

    Args:
        began: the group has states already.
    """
    made_with = group.get(GAMMA)
    if group["one_state"] is None:
        group["one_state"] = made_with is not None
    if not began:
        made_with = group[GAMMA] = group["gamma"] if group["one_state"] else None
    if group["one_state"] != (made_with is not None):
        raise ValueError(
            f"one_state={group['one_state']}, and the states of the group were made with one_state="
            f"{made_with is not None}: its exp_avg is another one. Set it back, or begin with a new optimizer."
        )
    if not group["one_state"]:
        return
    obstacle = _obstacle(group, settings)
    if not obstacle and group["gamma"] != made_with:
        obstacle = f"gamma={group['gamma']:g}, and the states were made with {made_with:g}"
    if obstacle:
        raise ValueError(
            f"one_state=True (no previous gradient is kept) with {obstacle}: that is not the same as MARS. Construct "
            "MARS with one_state=False, which keeps the previous gradient as a second state."
        )


def _obstacle(group: Mapping[str, Any], settings: Settings) -> str:
    if group["clip"] is not None:
        return f"clip={group['clip']:g}"
    if not settings.is_approx:
        return "is_approx=False (exact mode)"
    if settings.first_step != "reference":
        return f"first_step={settings.first_step!r}"
    return ""
