"""What runs on the ranks where batches and loops of exact mode are left: every gradient at one and the same point.

No step is taken, so that each gradient that reaches MARS has to be that of the whole batch at the first point.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from tests import nets
from tests.exact_cases import BATCH, Case, MicroBatch, Trained, Watcher, build, micro_batches, setup

STEPS = 4


class Boom(Exception):
    pass


def by_hand(step: int) -> dict[str, Tensor]:
    """The gradient of the whole batch of ``step`` at the first point, on one process."""
    net = build("net").double()
    tokens, targets = nets.batch(step, BATCH)
    x = net.norm(torch.tanh(net.linear(net.embedding(tokens))))
    x = x + torch.tanh(net.narrow(x)) @ net.gain + net.shift
    torch.nn.functional.cross_entropy(net.head(x).flatten(0, 1), targets.flatten()).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def backward_of(ready: Trained, case: Case) -> Any:
    """Without ``engine.step()``, which Accelerate calls at the end of a batch."""
    return ready.engine.backward if case.engine.startswith("zero") else ready.backward


class Script:
    def __init__(self, case: Case) -> None:
        self.case, net = case, build(case.net)
        self.start = {name: p.detach().double() for name, p in net.named_parameters()}
        self.ready = setup(case, net)
        self.watcher = Watcher(self.ready.mars)
        self.raises_at: list[tuple[int, int]] = []

    def exact(self) -> Any:
        from mars_dist.exact import ExactMode

        data = micro_batches(range(STEPS), self.case.accumulation)
        return ExactMode(self.ready.optimizer, data, self.gradient, **self.ready.keywords)

    def gradient(self, micro_batch: MicroBatch) -> None:
        step, j, tokens, targets = micro_batch
        if (step, j) in self.raises_at:
            raise Boom
        self.watcher.step = step
        backward_of(self.ready, self.case)(self.ready.model(tokens, targets))

    def errors(self) -> dict[str, float]:
        """How far what reached MARS since the last call is from the gradients by hand, by step."""
        gathered = self.watcher.gathered(self.start)
        self.watcher.pieces.clear()
        return {
            f"{kind} {step}": max(float((g - by_hand(step)[name]).abs().max()) for name, g in found.items())
            for kind, by_step in zip(("own", "ahead"), gathered, strict=True)
            for step, found in enumerate(by_step)
            if found
        }


def left(case: Case) -> dict[str, Any]:
    """A loop that ends by exceptions in both passes, one that is left within a batch, and batches that are left."""
    script = Script(case)
    ready = script.ready
    out: dict[str, Any] = {"type": ready.facts["type"]}
    stream = torch.get_rng_state()
    for where in [(0, 1), (1, 1)]:  # (0, 1) in the ordinary pass, (1, 1) in the look-ahead before it
        script.raises_at = [where]
        with contextlib.suppress(Boom):
            for batch in script.exact():
                for micro_batch in batch:
                    script.gradient(micro_batch)
            raise AssertionError("no exception")
    script.raises_at = []
    out["after an exception"] = look(script, 1)
    loop = script.exact()
    for held in loop:
        for micro_batch in held:
            script.gradient(micro_batch)
            break
        break
    out["stream"] = torch.equal(stream, torch.get_rng_state())
    script.watcher.pieces.clear()
    if ready.engine is None:
        out["a loop of one's own"] = own_loop(script)
    accelerator = ready.keywords.get("accelerator")
    if accelerator is not None:
        out["sync_gradients"] = accelerator.sync_gradients
    out["batches left"] = look(script, STEPS)
    out["engines"] = ready.mars.engines()
    out["updates"] = ready.mars.tensor_updates
    if ready.engine is not None:
        ready.engine.destroy()
    ready.facts.get("finish", lambda: None)()
    return out


def look(script: Script, batches: int) -> dict[str, float]:
    """Take the first micro-batch of each batch, and the last batch whole: what reached MARS in both kinds of pass."""
    ahead: dict[str, float] = {}
    for number, batch in enumerate(script.exact(), 1):
        if number == STEPS:
            ahead = script.errors()
        for micro_batch in batch:
            if number == STEPS and script.ready.engine is not None and script.case.engine.startswith("accelerate"):
                break  # the last micro-batch would be a step
            script.gradient(micro_batch)
            if number < STEPS:
                break
        if number == batches:
            break
    seen_last = batches == STEPS and not (script.ready.engine and script.case.engine.startswith("accelerate"))
    if seen_last and script.ready.engine is None:
        seen(script)
    elif seen_last:
        wrapper = script.ready.engine.optimizer
        with script.ready.mars.looking_ahead():
            wrapper.step()
    if not ahead:
        return script.errors()
    return {**ahead, **{f"last batch, {key}": error for key, error in script.errors().items()}} if seen_last else ahead


def seen(script: Script) -> None:
    """Let MARS see the gradients that are there."""
    with script.ready.mars.looking_ahead():
        script.ready.mars.step()


def own_loop(script: Script) -> dict[str, float]:
    """One ordinary pass of a whole batch, after the loop over ExactMode."""
    script.ready.mars.zero_grad()
    ((_, _, tokens, targets),) = micro_batches(range(2, 3), 1)
    script.watcher.step = 2
    script.ready.backward(script.ready.model(tokens, targets) * script.case.accumulation)
    seen(script)
    return script.errors()


def wrapped_step(case: Case) -> dict[str, Any]:
    """Somebody else's wrapper around ``engine.step``, and an accumulation that is not the engine's."""
    from mars_dist.exact import ExactMode

    script = Script(case)
    engine = script.ready.engine
    real, calls = engine.step, []
    engine.step = mine = lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1]

    def gradient(micro_batch: MicroBatch) -> None:
        script.ready.backward(script.ready.model(*micro_batch[2:]))

    for batch in ExactMode(engine, micro_batches(range(STEPS), case.accumulation), gradient, **script.ready.keywords):
        for micro_batch in batch:
            gradient(micro_batch)
    out = {"calls": len(calls), "is_there": vars(engine).get("step") is mine, "steps": engine.global_steps}
    try:
        ExactMode(engine, [], gradient)
    except ValueError as error:
        out["said"] = str(error)
    engine.destroy()
    return out


def cases() -> list[Case]:
    engines = ["ddp", "fsdp1-original", "fsdp1-flat", "fsdp2", "zero0", "zero1", "zero2", "zero3", "accelerate-ddp"]
    engines += ["accelerate-fsdp2", "accelerate-zero2"]
    offload = [Case(engine, accumulation=2, offload=True) for engine in ("zero1", "zero2", "zero3")]
    return [*(Case(engine, accumulation=2) for engine in engines), *offload]
