"""``mars_dist.MARS`` against the float64 reference over random shapes, hyper-parameters and gradients.

Hypothesis draws the discrete part (shapes, options, which gradients are missing) and a seed; the numbers come from the
seed. Numbers drawn one by one would soon meet the places where the rules are not continuous: sign(m) where m cancels to
rounding error, or the polar factor of a singular matrix. For the same reason the gradients of one tensor keep their
order of magnitude under the rules that forget it (Lion, Shampoo, M); under MARS-AdamW they may jump by ten orders.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from reference import ReferenceMARS
from torch import Tensor
from torch.nn import Parameter

from mars_dist import MARS

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_1d.*")  # the default lr_1d is large for some of the lr drawn

Tensors = dict[str, Tensor]
QUIET = settings(
    derandomize=True,
    database=None,
    max_examples=300,
    phases=[Phase.explicit, Phase.generate],  # every number hangs on the seed: there is nothing to shrink
    deadline=None,
    suppress_health_check=list(HealthCheck),  # they measure time, and a slow machine is no fault
)

# Error allowed per unit of (sum of lr): both sides are float64, and an update is of the order of lr.
# Element-wise: a few roundings of 1e-16, times (1 + k) <= 20, times 1 / sqrt(1 - beta2) <= 32 in the AdamW direction.
# Matrix: one Newton-Schulz step stretches a small singular value by up to 3.4445, five of them by 485.
UPDATE_TOLERANCE = 1e-11
ROUNDING = 1e-15  # of the parameter itself, per step
MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


@dataclass
class Step:
    grads: Tensors
    previous: Tensors
    factor: float  # of the schedule


@dataclass
class Scenario:
    p0: Tensors
    groups: list[dict[str, Any]]
    kwargs: dict[str, Any]
    steps: list[Step]


@dataclass
class Outcome:
    params: Tensors
    states: dict[str, dict[str, Any]]
    rules: dict[str, int]  # number of tensors under each, of those that ever had a gradient
    lrs: dict[str, float]  # of each tensor before the schedule; the reference's only
    peaks: dict[tuple[str, str], float]  # largest value ever held by (tensor, moment); the reference's only


# ---- what is drawn

RANKS = st.sampled_from([2, 1, 3, 4, 0, 2])
SIZES = st.sampled_from([3, 5, 2, 8, 1, 4, 0, 3])
BETAS = tuple((beta1, beta2) for beta1 in (0.95, 0.9, 0.5, 0.0) for beta2 in (0.99, 0.9, 0.999))
GAMMAS = (0.025, 0.0, 0.3, 1.0)
DECAYS = (0.01, 0.0, 0.3)
LRS = (0.03, 1e-3, 1.0)
NOT_GIVEN = object()  # one more choice for every keyword: its default

KEYWORDS: dict[str, tuple] = {
    "betas": BETAS,
    "eps": (1e-8, 1e-6, 1e-3),
    "weight_decay": DECAYS,
    "amsgrad": (False, True),
    "gamma": GAMMAS,
    "is_approx": (True, False),
    "optimize_1d": (False, True),
    "lr_1d": LRS,
    "betas_1d": BETAS,
    "weight_decay_1d": (*[NOT_GIVEN] * 4, *DECAYS),  # seldom given: only then does a group's own weight_decay count
    "clip": (1.0, None, 0.1, 30.0),
    "first_step": ("reference", "paper"),
    "matrix_ndim": (2, (2, 3), (2, 4), (2, 3, 4)),
    "maximize": (False, True),
}
MATRIX_KEYWORDS: dict[str, tuple] = {
    "orthogonalizer": ("newton-schulz", "svd"),
    "ns_steps": (5, 1),
    "fan_in_fan_out": (False, True),
}
OVERRIDES: dict[str, tuple] = {
    "lr": LRS,
    "betas": BETAS,
    "gamma": GAMMAS,
    "weight_decay": DECAYS,
    "lr_1d": LRS,
    "weight_decay_1d": (*[NOT_GIVEN] * 2, *DECAYS),
    "use_mars": (None, True, False),
}


def options(draw: st.DrawFn, table: dict[str, tuple]) -> dict[str, Any]:
    drawn = {key: draw(st.sampled_from((NOT_GIVEN, *values))) for key, values in table.items()}
    return {key: value for key, value in drawn.items() if value is not NOT_GIVEN}


@st.composite
def scenarios(draw: st.DrawFn, mars_type: str) -> Scenario:
    shapes = [tuple(draw(SIZES) for _ in range(draw(RANKS))) for _ in range(draw(st.sampled_from([3, 1, 2, 4, 5])))]
    names = [f"p{i}" for i in range(len(shapes))]
    kwargs = {"mars_type": mars_type, "lr": draw(st.sampled_from(LRS)), **options(draw, KEYWORDS)}
    if mars_type in ("mars-shampoo", "mars-m"):
        kwargs.update(options(draw, MATRIX_KEYWORDS), ns_dtype="float64")
    groups: list[dict[str, Any]] = [{"names": names}]
    if draw(st.sampled_from([False, True, True])):
        cut = draw(st.sampled_from(range(1, len(names) + 1)))  # at the end: one group with options of its own
        groups = [{"names": part, **options(draw, OVERRIDES)} for part in (names[:cut], names[cut:]) if part]
    seed = draw(st.integers(0, 2**32 - 1))
    factors = [draw(st.sampled_from([1.0, 0.1, 2.0, 0.0])) for _ in range(draw(st.sampled_from([1, 2, 4, 6])))]
    exponents = [draw(st.one_of(st.none(), st.integers(-6, 4))) for _ in names]
    wild = mars_type == "mars-adamw" and draw(st.booleans())
    missing = draw(st.sets(st.tuples(st.integers(0, 5), st.sampled_from(names)), max_size=4))

    generator = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        # An optimizer must not depend on the layout in memory: matrices alternate between row- and column-major.
        return x.mT.contiguous().mT if x.ndim >= 2 and len(shape) % 2 == seed % 2 else x

    def gradients(alike: float) -> Tensors:
        out = {}
        for name, shape, exponent in zip(names, shapes, exponents, strict=True):
            scale = 0.0 if exponent is None else 10.0**exponent * alike
            if wild:
                scale = 10.0 ** (10 * torch.rand((), generator=generator).item() - 6)
            out[name] = scale * normal(shape)
        return out

    p0 = {name: normal(shape) for name, shape in zip(names, shapes, strict=True)}
    steps: list[Step] = []
    started: set[str] = set()
    for t, factor in enumerate(factors):
        present = {name for name in names if (t, name) not in missing}
        alike = 0.5 + 1.5 * torch.rand((), generator=generator).item()
        g, h = gradients(alike), gradients(alike)
        exact = not kwargs.get("is_approx", True)  # a tensor has no previous point before its own first step
        previous = {name: h[name] for name in names if exact and name in present & started}
        steps.append(Step({name: g[name] for name in names if name in present}, previous, factor))
        started |= present
    return Scenario(p0, groups, kwargs, steps)


# ---- the two sides, and how they are compared


def play_reference(scenario: Scenario, cls: type[ReferenceMARS] = ReferenceMARS, **changes: Any) -> Outcome:
    reference = cls(scenario.p0, scenario.groups, **{**scenario.kwargs, **changes})
    peaks: dict[tuple[str, str], float] = {}
    for step in scenario.steps:
        scheduled = [step.factor * group["lr"] for group in reference.groups]
        reference.step(step.grads, lr=scheduled, previous=step.previous)
        for name, state in reference.state.items():
            for key in MOMENTS & state.keys():
                if state[key].numel():
                    peaks[name, key] = max(peaks.get((name, key), 0.0), state[key].abs().max().item())
    lrs = {
        name: group["lr"] * (group["ratio_1d"] if reference.rules[name] == "AdamW" else 1.0)
        for group in reference.groups
        for name in group["names"]
    }
    seen = {name for step in scenario.steps for name in step.grads}
    rules = Counter(rule for name, rule in reference.rules.items() if name in seen)
    return Outcome(reference.params, reference.state, dict(rules), lrs, peaks)


def play_package(scenario: Scenario) -> Outcome:
    params = {name: Parameter(p.clone()) for name, p in scenario.p0.items()}
    groups = [dict(group) for group in scenario.groups]
    for group in groups:
        group["params"] = [params[name] for name in group.pop("names")]
    # The states are compared as well: with two of them (tests/test_one_state.py has the other form).
    optimizer = MARS(groups, one_state=False, **scenario.kwargs)
    built_with = [group["lr"] for group in optimizer.param_groups]

    # The same buffers at every step, as under DDP and ZeRO: an optimizer that keeps one of them as h goes wrong here.
    buffers = {name: torch.empty_like(p) for name, p in scenario.p0.items()}

    def set_grads(grads: Tensors) -> None:
        for name, p in params.items():
            p.grad = buffers[name].copy_(grads[name]) if name in grads else None

    for step, following in zip(scenario.steps, [*scenario.steps[1:], None], strict=True):
        if following is not None and not scenario.kwargs.get("is_approx", True):
            set_grads(following.previous)  # the next batch at the present point, while h of this step is still needed
            optimizer.update_previous_grad()
        for group, lr in zip(optimizer.param_groups, built_with, strict=True):
            group["lr"] = step.factor * lr
        set_grads(step.grads)
        optimizer.step()
        optimizer.update_last_grad()
    states = {name: dict(optimizer.state[p]) if p in optimizer.state else {} for name, p in params.items()}
    rules = {rule: count for rule, count in optimizer.rule_counts().items() if count}
    return Outcome({name: p.detach() for name, p in params.items()}, states, rules, {}, {})


def excess(scenario: Scenario, ours: Outcome, reference: Outcome) -> float:
    """The largest error of a parameter in units of what is allowed: right when <= 1."""
    worst, steps = 0.0, len(scenario.steps)
    schedule = sum(step.factor for step in scenario.steps)
    for name, expected in reference.params.items():
        if expected.numel():
            size = max(expected.abs().max().item(), scenario.p0[name].abs().max().item())
            allowed = UPDATE_TOLERANCE * reference.lrs[name] * schedule + ROUNDING * steps * size
            error = (ours.params[name] - expected).abs().max().item()
            worst = max(worst, math.inf if math.isnan(error) else error / allowed)
    return worst


def assert_same(scenario: Scenario, ours: Outcome, reference: Outcome) -> None:
    assert ours.rules == reference.rules
    assert excess(scenario, ours, reference) <= 1
    for name, expected in reference.states.items():
        state = ours.states[name]
        assert int(state.get("step", 0)) == expected.get("step", 0), name
        for key in sorted(MOMENTS):
            assert (key in state) == (key in expected) or not expected, (name, key)
            if key in state and expected:
                # An average of values that cancelled keeps the rounding of the largest one.
                atol = 1e-12 * reference.peaks.get((name, key), 0.0)
                torch.testing.assert_close(state[key], expected[key], rtol=0, atol=atol, msg=f"{name} {key}")
        # A copy, so bit-equal; its sign under maximize and which of two buffers it is in exact mode are free.
        if expected and scenario.kwargs.get("is_approx", True) and not scenario.kwargs.get("maximize"):
            assert ("prev_grad" in state) == ("prev_grad" in expected), name
            if "prev_grad" in state:
                assert torch.equal(state["prev_grad"], expected["prev_grad"]), name


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m"])
def test_package_agrees_with_the_reference(mars_type: str) -> None:
    @QUIET
    @given(scenarios(mars_type))
    def check(scenario: Scenario) -> None:
        assert_same(scenario, play_package(scenario), play_reference(scenario))

    check()


# ---- the test above would find the classic faults: each is planted into the reference


class SwappedGammaAndBeta1(ReferenceMARS):
    def _mars_direction(self, name: str, g: Tensor, given: Tensor | None, group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        swapped = {**group, "gamma": beta1, "betas": (min(group["gamma"], 0.999), beta2)}
        return super()._mars_direction(name, g, given, swapped)


class AliasedPreviousGradient(ReferenceMARS):
    """h is the buffer that holds g, so g - h = 0 for ever."""

    def _mars_direction(self, name: str, g: Tensor, given: Tensor | None, group: dict[str, Any]) -> Tensor:
        self.state[name]["prev_grad"] = g
        return super()._mars_direction(name, g, given, group)


class ClipByPiece(ReferenceMARS):
    """Each half of a tensor is scaled by its own norm, as if two ranks held it."""

    def _mars_direction(self, name: str, g: Tensor, given: Tensor | None, group: dict[str, Any]) -> Tensor:
        state, halves = self.state[name], []
        for i, part in enumerate(g.reshape(-1).chunk(2)):
            self.state[name] = state.setdefault(f"half{i}", {})
            self.state[name]["step"] = state["step"]
            halves.append(super()._mars_direction(name, part, None, group))
        self.state[name] = state
        return torch.cat(halves).reshape(g.shape)


class SecondMomentOfTheGradient(ReferenceMARS):
    """v from g where it should come from c~."""

    def _mars_direction(self, name: str, g: Tensor, given: Tensor | None, group: dict[str, Any]) -> Tensor:
        v = self.state[name].get("exp_avg_sq", torch.zeros_like(g))
        super()._mars_direction(name, g, given, group)
        state, (beta1, beta2), t = self.state[name], group["betas"], self.state[name]["step"]
        v = state["exp_avg_sq"] = beta2 * v + (1 - beta2) * g * g
        return state["exp_avg"] / ((v.sqrt() / math.sqrt(1 - beta2**t) + group["eps"]) * (1 - beta1**t))


class DryRunFirst(ReferenceMARS):
    """The dry run of a checkpoint library counts as the first step."""

    def step(self, grads: Any, **kwargs: Any) -> None:
        if not any(self.state.values()):
            super().step({name: torch.zeros_like(p) for name, p in self.params.items()}, lr=0.0)
        super().step(grads, **kwargs)

    def _is_dry_run(self, grads: Any, lrs: Any) -> bool:
        return False


class UnscheduledVectors(ReferenceMARS):
    """The schedule moves lr only: lr_1d keeps its first value."""

    def step(self, grads: Any, *, lr: Any = None, previous: Any = None) -> None:
        first = [group["ratio_1d"] for group in self.groups]
        for group, now in zip(self.groups, lr, strict=True):
            group["ratio_1d"] *= group["lr"] / now if now else 0.0
        super().step(grads, lr=lr, previous=previous)
        for group, ratio in zip(self.groups, first, strict=True):
            group["ratio_1d"] = ratio


class DecayOfNoDecayGroup(ReferenceMARS):
    """Vectors decay by 0.1 even in a group that names its own decay."""

    def __init__(self, params: Any, groups: Any, **kwargs: Any) -> None:
        super().__init__(params, groups, **{"weight_decay_1d": 0.1, **kwargs})


class SamePolarEpsilon(ReferenceMARS):
    """Shampoo's iteration with the fixed 1e-7 of MARS-M, and the reverse."""

    def _orthogonalize(self, matrix: Tensor, eps: float) -> Tensor:
        return super()._orthogonalize(matrix, 1e-7 if self.mars_type == "mars-shampoo" else self.groups[0]["eps"])


class DecayAfterTheUpdate(ReferenceMARS):
    """The decay acts on the value after the update."""

    def step(self, grads: Any, *, lr: Any = None, previous: Any = None) -> None:
        decays = [(group["weight_decay"], group["weight_decay_1d"]) for group in self.groups]
        for group in self.groups:
            group["weight_decay"] = group["weight_decay_1d"] = 0.0
        super().step(grads, lr=lr, previous=previous)
        for group, now, (decay, decay_1d) in zip(self.groups, lr, decays, strict=True):
            group["weight_decay"], group["weight_decay_1d"] = decay, decay_1d
            for name in grads.keys() & set(group["names"]):
                rate = group["ratio_1d"] * decay_1d if self.rules[name] == "AdamW" else decay
                self.params[name] = self.params[name] * (1 - now * rate)


@pytest.mark.parametrize(
    ("mars_type", "fault"),
    [
        ("mars-adamw", SwappedGammaAndBeta1),
        ("mars-lion", SwappedGammaAndBeta1),
        ("mars-m", SwappedGammaAndBeta1),
        ("mars-adamw", AliasedPreviousGradient),
        ("mars-lion", AliasedPreviousGradient),
        ("mars-shampoo", AliasedPreviousGradient),
        ("mars-adamw", ClipByPiece),
        ("mars-lion", ClipByPiece),
        ("mars-adamw", SecondMomentOfTheGradient),
        ("mars-adamw", DryRunFirst),
        ("mars-adamw", UnscheduledVectors),
        ("mars-adamw", DecayOfNoDecayGroup),
        ("mars-shampoo", SamePolarEpsilon),
        ("mars-m", SamePolarEpsilon),
        ("mars-lion", DecayAfterTheUpdate),
    ],
)
def test_a_planted_fault_is_found(mars_type: str, fault: type[ReferenceMARS]) -> None:
    assert_found(mars_type, lambda scenario: play_reference(scenario, fault))


@pytest.mark.parametrize(
    ("mars_type", "change"),
    [
        ("mars-adamw", {"matrices": set()}),  # the rank taken from a flat partition: everything looks 1-D
        ("mars-adamw", {"clip": None}),
        ("mars-lion", {"clip": None}),
        ("mars-adamw", {"first_step": "paper"}),
        ("mars-adamw", {"amsgrad": True}),
        ("mars-adamw", {"maximize": True}),
        ("mars-shampoo", {"orthogonalizer": "svd"}),
        ("mars-shampoo", {"fan_in_fan_out": True}),
        ("mars-m", {"matrix_ndim": 2}),
        ("mars-m", {"mars_type": "mars-shampoo"}),
    ],
)
def test_an_ignored_option_is_found(mars_type: str, change: dict[str, Any]) -> None:
    assert_found(mars_type, lambda scenario: play_reference(scenario, **change))


def assert_found(mars_type: str, play: Callable[[Scenario], Outcome]) -> None:
    """Some scenario among those that the real test runs shows the fault in a parameter, and far above the tolerance."""

    def shows(scenario: Scenario) -> bool:
        faultless = play_reference(scenario)
        return excess(scenario, play(scenario), faultless) > 1000

    find(scenarios(mars_type), shows, settings=QUIET)


def test_the_comparison_accepts_the_reference_itself() -> None:
    @settings(QUIET, max_examples=20)
    @given(scenarios("mars-adamw"))
    def check(scenario: Scenario) -> None:
        assert_same(scenario, play_reference(scenario), play_reference(scenario))

    check()
