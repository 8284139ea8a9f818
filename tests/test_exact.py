"""``mars_dist.exact`` on one process: the authors' numbers, the loop, dropout, overflows, the end, going on."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mars_dist import MARS
from mars_dist.exact import ExactMode
from mars_dist.integrations.exact_loop import masks_of
from tests import exact_cases, golden_cases, nets
from tests.exact_cases import Case
from tests.reference import ReferenceMARS
from tests.test_engines import furthest
from tests.test_exact_engines import replayed

EXACT_GOLDEN = [name for name in golden_cases.names() if golden_cases.case(name).meta["exact"]]


def test_there_are_golden_files_of_exact_mode() -> None:
    assert {golden_cases.case(name).kwargs["mars_type"] for name in EXACT_GOLDEN} >= {"mars-adamw", "mars-lion"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", EXACT_GOLDEN)
def test_golden(name: str, dtype: torch.dtype) -> None:
    """The authors' trajectory through the helper: it asks for h of step t before step t - 1, and for g in step t."""
    case = golden_cases.case(name)
    params = {n: p.to(dtype).requires_grad_() for n, p in case.p0.items()}
    optimizer = MARS(case.param_groups(params), **case.kwargs)
    asked: list[int] = []

    def gradient(t: int) -> None:
        is_ahead = t > 0 and t not in asked
        asked.append(t)
        for n, p in params.items():
            p.grad = (case.previous[t] if is_ahead else case.grads[t])[n].to(dtype).clone()

    ratios = [group["lr_1d_ratio"] for group in optimizer.param_groups]
    for t, batch in enumerate(ExactMode(optimizer, range(case.meta["steps"]), gradient)):
        for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
            group["lr"] = case.meta["lrs"][t]
            assert group["lr_1d_ratio"] == ratio
        for micro_batch in batch:
            gradient(micro_batch)
        optimizer.step()
        optimizer.zero_grad()
        error = furthest({n: p.detach().double() for n, p in params.items()}, case.params[t])
        assert error <= case.tolerance(t, dtype), f"step {t}: {error}"
    assert asked.count(0) == 1 and all(asked.count(t) == 2 for t in range(1, case.meta["steps"]))
    assert {rule: count for rule, count in optimizer.rule_counts().items() if count} == case.rules


def by_hand(steps: int, **settings: Any) -> dict[str, Tensor]:
    """Exact mode written out in float64: h is the gradient of the batch at the point before its step."""
    net = nets.build().double()
    model = ReferenceMARS({n: p.detach().clone() for n, p in net.named_parameters()}, **settings)
    previous = None
    for step in range(steps):
        grads = gradient_of(net, step)
        ahead = gradient_of(net, step + 1)
        model.step(grads, previous=previous)
        previous = ahead
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(model.params[name])
    return model.params


def gradient_of(net: nn.Module, step: int) -> dict[str, Tensor]:
    net.zero_grad()
    tokens, targets = nets.batch(step, exact_cases.BATCH)
    logits_loss(net, tokens, targets).backward()
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def logits_loss(net: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    x = net.norm(torch.tanh(net.linear(net.embedding(tokens))))
    x = x + torch.tanh(net.narrow(x)) @ net.gain + net.shift
    return nn.functional.cross_entropy(net.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("variant", ["mars-adamw", "mars-lion"])
def test_h_is_the_gradient_of_the_batch_at_the_point_before(variant: str) -> None:
    case = Case("plain", {"mars_type": variant})
    result = exact_cases.run(case)
    expected = by_hand(case.steps, **{**exact_cases.SETTINGS, **case.params})
    # The sign of MARS-Lion turns a rounding of a number that is nearly 0 into 2 lr.
    assert furthest(result["end"], expected) < {"mars-adamw": 5e-6, "mars-lion": 2e-5}[variant]
    assert result["engines"] == {"whole tensors"}


def test_accumulation_over_two_is_one_batch_twice_as_large() -> None:
    one, two = (exact_cases.run(Case("plain", accumulation=n)) for n in (1, 2))
    assert two["evaluations"] == 2 * one["evaluations"]
    assert furthest(one["end"], two["end"]) < 2e-5


@pytest.mark.parametrize("accumulation", [1, 2])
def test_dropout_draws_the_same_masks_in_both_passes_and_leaves_the_stream_outside_alone(accumulation: int) -> None:
    case = Case("plain", accumulation=accumulation, net="dropout")
    result = exact_cases.run(case)
    masks = result["masks"]
    assert len(masks) == case.steps * accumulation
    for (step, _), found in masks.items():
        assert len(found) == (2 if step else 1)
        assert (found[0] == found[-1]).all()
    first = [found[0].tobytes() for found in masks.values()]
    assert len(set(first)) == len(first), "two micro-batches have the same mask"
    assert not result["stream_moved"]
    assert furthest(replayed(result, case).params, result["end"]) < 2e-6


def test_masks_of_repeats_every_stream_and_puts_it_back() -> None:
    def draw() -> tuple[float, float]:
        return torch.rand(()).item(), random.random()

    torch.manual_seed(5)
    random.seed(5)
    expected = [draw(), draw()]
    torch.manual_seed(5)
    random.seed(5)
    found = [draw()]
    drawn = []
    for number in (0, 1, 0):
        with masks_of(7, number):
            drawn.append(draw())
    found.append(draw())
    assert found == expected
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("which", ["ahead", "present"])
def test_an_overflow_under_a_grad_scaler(which: str) -> None:
    case = Case("plain", scaler=True, broken=((which, 4),))
    result = exact_cases.run(case)
    said = [m for m in result["messages"] if "exact mode" in m]
    if which == "ahead":
        # h of step 4 is missing: as a first step, said once; the loss scale counts ordinary steps only.
        assert result["ahead"][4] == {} and result["counts"] == [case.steps]
        assert len(said) == 1 and "5 of 9 tensors" in said[0]
        assert result["scales"] == [1024, 1024, 2048, 2048, 2048, 4096, 4096, 4096, 8192, 8192]
        assert furthest(replayed(result, case).params, result["end"]) < 2e-6
        return
    assert result["gradients"][4] == {} and result["counts"] == [case.steps - 1] and not said
    assert result["scales"] == [1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048, 2048, 2048]
    # The point has not moved, and h of step 5 is the gradient that was kept during step 4.
    assert furthest(result["ahead"][5], result["gradients"][5]) == 0.0
    assert furthest(replayed(result, case).params, result["end"]) < 2e-6


def test_two_overflows_in_a_row_leave_no_older_h_behind() -> None:
    """The look-ahead for step 5 and the ordinary pass of step 4 overflow: step 5 must not take h of step 4."""
    case = Case("plain", scaler=True, broken=(("present", 4), ("ahead", 5)))
    result = exact_cases.run(case)
    assert result["gradients"][4] == {} and result["ahead"][5] == {}
    assert furthest(replayed(result, case).params, result["end"]) < 2e-6


@pytest.mark.parametrize("first_step", ["reference", "paper"])
def test_an_h_that_is_not_finite_counts_as_none_with_skip_nonfinite(first_step: str) -> None:
    case = Case("plain", {"skip_nonfinite": True, "first_step": first_step}, broken=(("ahead", 4),))
    result = exact_cases.run(case)
    assert any(not h.isfinite().all() for h in result["ahead"][4].values())
    result["ahead"][4] = {name: torch.zeros_like(h) for name, h in result["ahead"][4].items()}
    assert result["counts"] == [case.steps]
    assert furthest(replayed(result, case).params, result["end"]) < 2e-6


def test_a_tensor_without_a_gradient_in_the_look_ahead_is_stepped_as_a_first_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for first_step in ("reference", "paper"):
        p = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
        optimizer = MARS([p], is_approx=False, clip=None, gamma=0.3, first_step=first_step)
        reference = ReferenceMARS({"p": p.detach().clone()}, is_approx=False, clip=None, gamma=0.3)
        passes: list[int] = []

        def gradient(t: int, p: nn.Parameter = p, passes: list[int] = passes) -> None:
            passes.append(t)
            p.grad = None if t == 2 and passes.count(2) == 1 else torch.full_like(p, t + 0.5 * passes.count(t))

        for t, batch in enumerate(ExactMode(optimizer, range(4), gradient)):
            for micro_batch in batch:
                gradient(micro_batch)
            g = p.grad.clone()
            optimizer.step()
            none = {"reference": torch.zeros_like(g), "paper": g}[first_step]
            h = none if t in (0, 2) else torch.full_like(g, t + 0.5)
            reference.step({"p": g}, previous={"p": h})
            optimizer.zero_grad()
        assert (p - reference.params["p"]).abs().max() < 1e-12
    assert sum("no gradient of this batch at the point before" in r.message for r in caplog.records) == 2


def test_without_looking_ahead_the_second_step_is_an_error() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = MARS([p], is_approx=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"twice with the same previous gradient.*mars_dist\.ExactMode"):
        optimizer.step()
    optimizer.forget_previous()
    optimizer.step()


def test_looking_ahead_changes_nothing_but_what_is_kept() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = MARS(net.parameters(), is_approx=False)
    told: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    for look in (False, True, False):
        net(torch.ones(2, 3)).square().sum().backward()
        before = copy.deepcopy([p.detach() for p in net.parameters()])
        kept = {k: v.clone() for s in optimizer.state.values() for k, v in s.items()}
        if look:
            with optimizer.looking_ahead():
                optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
            now = {k: v for s in optimizer.state.values() for k, v in s.items()}
            assert all(torch.equal(now[k], v) for k, v in kept.items()) and now.keys() - kept == {"next_prev_grad"}
        else:
            optimizer.step()
    assert told == ["before", "after"] * 2, "hooks are told of ordinary steps"
    assert optimizer.tensor_updates == 8
    with pytest.raises(RuntimeError, match="is for exact mode"), MARS(net.parameters()).looking_ahead():
        pass


def test_the_kept_gradient_shares_memory_with_nothing() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = MARS([p], is_approx=False)
    p.grad = torch.ones_like(p)
    with optimizer.looking_ahead():
        optimizer.step()
    assert optimizer.state[p]["next_prev_grad"].data_ptr() != p.grad.data_ptr()
    p.grad.zero_()
    assert torch.equal(optimizer.state[p]["next_prev_grad"], torch.ones(2, 2))


@pytest.mark.parametrize(
    ("make", "keywords", "error", "message"),
    [
        (lambda p: MARS([p]), {}, ValueError, "is_approx=False"),
        (lambda p: torch.optim.AdamW([p]), {}, TypeError, "needs MARS.*AdamW"),
        (lambda p: MARS([p], is_approx=False), {"accumulation": 0}, ValueError, "accumulation.*0"),
        (lambda p: MARS([p], is_approx=False), {"accumulation": 1.5}, ValueError, "accumulation.*1.5"),
    ],
)
def test_wrong_arguments(
    make: Callable[[nn.Parameter], Any], keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ExactMode(make(nn.Parameter(torch.ones(2, 2))), [], lambda _: None, **keywords)


def test_data_that_ends_in_the_middle_of_a_batch_and_no_data() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = MARS([p], is_approx=False)

    def gradient(x: int) -> None:
        (p * x).sum().backward()

    seen = []
    exact = ExactMode(optimizer, range(5), gradient, accumulation=2)
    for batch in exact:
        seen.append(list(batch))
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert seen == [[0, 1], [2, 3], [4]] and exact.handed_out == 5 and exact.gradient_evaluations == 8
    assert list(ExactMode(optimizer, [], gradient)) == []


# ------------------------------------------------------------------------------------------------------- going on


class Script:
    """A training script that can be interrupted: everything that a restart makes anew."""

    def __init__(self) -> None:
        self.net = exact_cases.build("dropout")
        self.optimizer = MARS(self.net.named_parameters(), **exact_cases.SETTINGS)

    def train(self, exact: ExactMode[Any], steps: int, save: Path | None = None) -> None:
        for number, batch in enumerate(exact, 1):
            for micro_batch in batch:
                self.gradient(micro_batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if save is not None and number == steps:
                states = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save({**states, "exact": exact.state_dict()}, save)
                return

    def exact(self, first: int, steps: int) -> ExactMode[Any]:
        data = list(exact_cases.micro_batches(range(steps), 2))[first:]
        return ExactMode(self.optimizer, data, self.gradient, accumulation=2)

    def gradient(self, micro_batch: Any) -> None:
        (self.net(*micro_batch[2:]) / 2).backward()


def test_interrupted_is_uninterrupted_bit_by_bit(tmp_path: Path) -> None:
    through = Script()
    through.train(through.exact(0, 8), 8)
    before = Script()
    before.train(before.exact(0, 8), 3, save=tmp_path / "saved")
    saved = torch.load(tmp_path / "saved", weights_only=True)
    assert saved["exact"]["handed_out"] == 6
    results = []
    for goes_on in (True, False):
        after = Script()
        after.net.load_state_dict(saved["net"])
        after.optimizer.load_state_dict(saved["optimizer"])
        exact = after.exact(saved["exact"]["handed_out"], 8)
        if goes_on:
            exact.load_state_dict(saved["exact"])
        after.train(exact, 8)
        assert exact.handed_out == (16 if goes_on else 10)
        same = [torch.equal(a, b) for a, b in zip(through.net.parameters(), after.net.parameters(), strict=True)]
        results.append(all(same))
    assert results == [True, False], "without the position the first batch has no h"


def test_a_second_loop_begins_without_h() -> None:
    """Other data follows: h of the batch that was read ahead of a loop that was left would belong to nothing."""
    script = Script()
    script.train(script.exact(0, 3), 3)
    steps: Iterator[Any] = iter(script.exact(0, 2))
    next(steps)
    assert all(not s["prev_grad"].any() for s in script.optimizer.state.values() if "prev_grad" in s)


def trained_with(net: nn.Module, body: Callable[[Callable[[], None]], None], **keywords: Any) -> dict[str, Tensor]:
    """Six steps in a loop whose body is ``body``, which is given what an ordinary body does."""
    optimizer = MARS(net.parameters(), lr=1e-2, lr_1d=1e-2, is_approx=False)
    generator = torch.Generator().manual_seed(4)
    data = [torch.randn(8, 5, generator=generator) for _ in range(6)]

    def gradient(x: Tensor) -> None:
        net(x).square().sum().backward()

    for batch in ExactMode(optimizer, data, gradient, seed=3, **keywords):

        def ordinary(batch: Iterator[Tensor] = batch) -> None:
            for x in batch:
                gradient(x)
            optimizer.step()
            optimizer.zero_grad()

        body(ordinary)
    return {name: p.detach().clone() for name, p in net.state_dict().items()}


def test_running_statistics_see_each_batch_once() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    assert trained_with(net, lambda ordinary: ordinary(), model=net)["1.num_batches_tracked"] == 6


def test_a_look_ahead_runs_in_the_mode_of_the_ordinary_passes() -> None:
    """``model.train()`` at the top of the body and an evaluation at its end: the look-ahead comes after that."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 2))

    always, between = net(), net()

    def body(ordinary: Callable[[], None]) -> None:
        between.train()
        ordinary()
        between.eval()

    plain = trained_with(always, lambda ordinary: ordinary(), model=always)
    assert furthest(trained_with(between, body, model=between), plain) == 0.0 and not between.training
    unseen = net()

    def unknown(ordinary: Callable[[], None]) -> None:
        unseen.train()
        ordinary()
        unseen.eval()

    assert furthest(trained_with(unseen, unknown), plain) > 1e-4, "the mode makes no difference here"


def test_an_exception_in_a_pass_leaves_the_random_streams_as_they_were() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = MARS([p], lr=1e-2, is_approx=False)
    for failing in (1, 2):  # the second call is the look-ahead of the third batch
        calls: list[int] = []

        def gradient(x: int, calls: list[int] = calls, failing: int = failing) -> None:
            calls.append(x)
            (p * torch.rand(2, 2)).sum().backward()
            if len(calls) == failing:
                raise ArithmeticError

        before, kept = torch.get_rng_state(), None
        try:
            for batch in ExactMode(optimizer, range(4), gradient):
                for x in batch:
                    gradient(x)
                optimizer.step()
                optimizer.zero_grad()
        except ArithmeticError as error:
            kept = error  # with the frames it came through
        assert kept is not None and torch.equal(before, torch.get_rng_state())


def test_an_accumulation_that_is_not_the_engines_is_refused() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(net, MARS(net.parameters(), lr=1e-2, lr_1d=1e-2, is_approx=False))
    keywords: dict[str, Any] = {"model": model, "accelerator": accelerator}
    with pytest.raises(ValueError, match=r"accumulation=1, and the engine was told to accumulate 2 .* accumulation=2"):
        ExactMode(optimizer, [], lambda x: None, **keywords)
    ExactMode(optimizer, [], lambda x: None, accumulation=2, **keywords)
    accelerator.free_memory()


def test_a_second_step_in_one_batch_is_an_error() -> None:
    """It would take the gradient of the batch that comes for h of this one."""
    net = nn.Linear(3, 3)
    optimizer = MARS(net.parameters(), lr=1e-2, lr_1d=1e-2, is_approx=False)

    def gradient(x: Tensor) -> None:
        net(x).sum().backward()

    with pytest.raises(RuntimeError, match="step\\(\\) was called twice for one batch"):
        for batch in ExactMode(optimizer, [torch.ones(2, 3)] * 4, gradient):
            for x in batch:
                gradient(x)
            optimizer.step()
            optimizer.step()
