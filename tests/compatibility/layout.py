"""How the parameters are laid out in the flats."""

from tests.compatibility.row import BASE, Row
from tests.zero_cases import ZeroCase

ZERO = "zero_optimization"

LAYOUT = [
    Row(
        "Layout",
        "`round_robin_gradients`",
        (f"{ZERO}.round_robin_gradients",),
        tuple(ZeroCase(s, params=BASE, zero={"round_robin_gradients": True}, construct="groups") for s in (1, 2)),
        "round_robin",
    ),
]
