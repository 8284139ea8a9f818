"""What runs on the ranks in the tests of exact mode: a training through ``ExactMode`` under a real engine, recorded.

Both gradients are recorded as MARS receives them, by its own table of pieces, which the comparison of the RESULT by
name with the model's parameters confirms.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import types
import unittest.mock
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import accelerate_cases, engine_cases, engine_nets, nets, zero_cases
from tests.ddp_cases import messages
from tests.engine_builders import BUILDERS
from tests.zero_cases import Recorder, ZeroCase

SETTINGS: dict[str, Any] = {
    **{"lr": 1e-2, "lr_1d": 4e-3, "weight_decay": 0.05, "clip": 0.1, "gamma": 0.3},
    "is_approx": False,
}
BATCH = accelerate_cases.BATCH
MicroBatch = tuple[int, int, Tensor, Tensor]  # step, number in the step, tokens, targets
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "hsdp": ("fsdp2", {"mesh": "square"}),
    "fsdp1-hybrid": ("fsdp1", {"strategy": "HYBRID_SHARD"}),
    "tensor": ("tensor_parallel", {}),
    "tensor-fsdp2": ("tensor_parallel", {"data": True}),
}


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        engine: "plain", "ddp", "fsdp1-original", "fsdp1-flat", "fsdp2", a name in ``MESHES``, "zero0" to "zero3", or
            "accelerate-" and a name in ``accelerate_cases``.
        params: goes to MARS beside ``SETTINGS``.
        accumulation: micro-batches in a batch.
        clip: bound of the global norm, by the engine's own means.
        dtype: "fp32", "bf16" or "fp16": DeepSpeed's blocks of these names.
        offload: of the optimizer states, under DeepSpeed.
        config: further keys of a DeepSpeed configuration.
        broken: steps whose loss is infinite in the look-ahead ("ahead"), or in the ordinary pass ("present").
        scaler: a GradScaler is used (not with DeepSpeed, which has its own).
        net: "net", "dropout" (also records its masks), or "layers" (of ``engine_nets``).
        steps: of the data.
    """

    engine: str
    params: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    clip: float = 0.0
    dtype: str = "fp32"
    offload: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    broken: tuple[tuple[str, int], ...] = ()
    scaler: bool = False
    net: str = "net"
    steps: int = 10

    def __str__(self) -> str:
        words = [self.engine, *([self.dtype] if self.dtype != "fp32" else [])]
        words += [v if isinstance(v, str) else f"{k}={v}" for k, v in self.params.items()]
        words += [f"accumulate{self.accumulation}"] * (self.accumulation > 1) + [f"clip{self.clip:g}"] * (self.clip > 0)
        words += ["offload"] * self.offload + [f"{k}={v}" for k, v in self.config.items()]
        words += [f"broken-{which}{step}" for which, step in self.broken] + ["scaler"] * self.scaler
        words += [self.net] * (self.net != "net")
        return "-".join(words).replace(" ", "")


class Dropped(nets.Net):
    """Half of one layer is dropped; the masks are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.linear(self.embedding(tokens))))
        mask = nn.functional.dropout(torch.ones_like(x), 0.5)
        self.masks.append(mask.detach().clone())
        x = x * mask
        x = x + torch.tanh(self.narrow(x)) @ self.gain + self.shift
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def build(name: str) -> nn.Module:
    torch.manual_seed(1234)
    return {"net": nets.Net, "dropout": Dropped, "layers": engine_nets.Layers}[name]()


def ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def micro_batches(steps: range, accumulation: int, share: tuple[int, int] | None = None) -> Iterator[MicroBatch]:
    """``share``: this rank's part of the data and the number of parts; by default each rank has its own."""
    rank, world = share or ranks()
    for step in steps:
        tokens, targets = nets.batch(step, BATCH)
        for j, rows in enumerate(torch.arange(BATCH).view(accumulation, world, -1)[:, rank]):
            yield step, j, tokens[rows], targets[rows]


@dataclass
class Trained:
    """An engine ready to train: what the loop of a user would hold."""

    optimizer: Any  # what goes to ExactMode
    model: Any
    mars: Any
    backward: Callable[[Tensor], Any]
    step: Callable[[], Any]
    keywords: dict[str, Any]
    end: Callable[[], dict[str, Tensor]]
    facts: dict[str, Any]
    engine: Any = None  # DeepSpeed's
    share: tuple[int, int] | None = None


def mars_for(net: nn.Module, case: Case) -> Any:
    import mars_dist

    return mars_dist.MARS(net.named_parameters(), **{**SETTINGS, **case.params})


def plain(case: Case, net: nn.Module) -> Trained:
    """One process, DDP, FSDP1 and FSDP2: a loop by hand."""
    kind, _, form = case.engine.partition("-")
    rank, world = ranks()
    if kind == "plain":
        built = engine_cases.Built(net, net, 0, 1, {"type": type(net).__name__})
    elif case.engine in MESHES:
        builder, options = MESHES[case.engine]
        built = BUILDERS[builder](net, **options)
    else:
        built = BUILDERS[kind](net, **({"original": form == "original"} if kind == "fsdp1" else {}))
    mars = mars_for(built.wrapped, case)
    mars.attach(built.wrapped)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if case.scaler else None

    def before_step() -> None:
        if scaler is not None:
            scaler.unscale_(mars)
        if case.clip:
            clip = getattr(built.wrapped, "clip_grad_norm_", None)
            if clip is not None:
                clip(case.clip)
            else:
                torch.nn.utils.clip_grad_norm_(built.wrapped.parameters(), case.clip)

    def step() -> None:
        before_step()
        if scaler is None:
            mars.step()
        else:
            scaler.step(mars)
            scaler.update()
        mars.zero_grad()

    def end() -> dict[str, Tensor]:
        found = engine_cases.whole_parameters(built)
        return {name: found[name] for name, _ in build(case.net).named_parameters()}

    keywords = {"accumulation": case.accumulation, "model": built.wrapped, "scaler": scaler}
    keywords |= {"before_step": before_step} if scaler is not None or case.clip else {}

    def backward(loss: Tensor) -> None:
        loss = loss / case.accumulation
        (scaler.scale(loss) if scaler is not None else loss).backward()

    facts = {**built.facts, "scale": scaler.get_scale if scaler is not None else None}
    share = (built.share, built.shares)
    return Trained(mars, built.model, mars, backward, step, keywords, end, facts, share=share)


def zero_case(case: Case) -> ZeroCase:
    stage = int(case.engine[-1])
    extra = {"train_micro_batch_size_per_gpu": BATCH // ranks()[1] // case.accumulation, **case.config}
    if case.dtype == "fp16":
        scale = {"initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 1}
        extra["fp16"] = {"enabled": True, **scale, **case.config.get("fp16", {})}
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_min_lr": 5e-3}}
    return ZeroCase(
        stage,
        case.dtype,
        case.offload,
        extra={"scheduler": schedule, **extra},
        clip=case.clip,
        accumulation=case.accumulation,
        construct="instance",
    )


@contextlib.contextmanager
def float16_on_any_cpu() -> Iterator[None]:
    """DeepSpeed takes float16 only on CPUs that are fast with it; torch computes the same on the others."""
    from deepspeed.accelerator import get_accelerator

    with unittest.mock.patch.object(get_accelerator(), "is_fp16_supported", lambda: True):
        yield


def deepspeed(case: Case, net: nn.Module) -> Trained:
    """A DeepSpeed engine, stepped with each micro-batch as its documentation shows."""
    import deepspeed as ds

    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    zero = zero_case(case)
    with float16_on_any_cpu():
        engine, wrapper, *_ = ds.initialize(model=net, config=zero_cases.config(zero), optimizer=mars_for(net, case))
    mars = engine.basic_optimizer

    def backward(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    facts = {"type": type(wrapper).__name__, "stage": engine.zero_optimization_stage(), "scale": None}
    if case.dtype == "fp16":
        facts |= {"scale": lambda: float(wrapper.cur_scale if zero.stage == 0 else wrapper.loss_scale)}
    keywords = {"accumulation": case.accumulation}
    end = lambda: zero_cases.parameters(net, engine, zero)  # noqa: E731
    if case.dtype == "fp16":
        end = lambda: {  # noqa: E731
            name: ds.utils.safe_get_full_fp32_param(p).double().view(getattr(p, "ds_shape", p.shape))
            for name, p in net.named_parameters()
        }
    return Trained(engine, engine, mars, backward, lambda: None, keywords, end, facts, engine)


def accelerate(case: Case, net: nn.Module) -> Trained:
    kind = case.engine.removeprefix("accelerate-")
    theirs = accelerate_cases.Case(kind, {**SETTINGS, **case.params}, case.accumulation, case.clip)
    accelerator = accelerate_cases.accelerator_of(theirs)
    model, optimizer = accelerate_cases.prepare(accelerator, net, theirs)
    engine = model if kind.startswith("zero") else None

    def before_step() -> None:
        if case.clip:
            accelerator.clip_grad_norm_(model.parameters(), case.clip)

    def step() -> None:
        before_step()
        optimizer.step()
        optimizer.zero_grad()

    def end() -> dict[str, Tensor]:
        if engine is not None:
            return zero_cases.parameters(net, model, ZeroCase(stage=model.zero_optimization_stage()))
        return accelerate_cases.whole(model, lambda p: p)

    facts = accelerate_cases.what_ran(accelerator, model, optimizer)
    facts["finish"] = accelerator.free_memory
    keywords = {"accumulation": case.accumulation, "model": model, "accelerator": accelerator}
    keywords |= {"before_step": before_step} if case.clip and engine is None else {}
    from mars_dist.integrations.exact_loop import mars_of

    mars = mars_of(optimizer)
    return Trained(optimizer, model, mars, accelerator.backward, step, keywords, end, facts, engine)


def setup(case: Case, net: nn.Module) -> Trained:
    if case.engine.startswith("zero"):
        return deepspeed(case, net)
    return (accelerate if case.engine.startswith("accelerate") else plain)(case, net)


class Watcher:
    """Keeps what reaches MARS in both passes, the calls of ``step()`` that hooks are told of, and its collectives."""

    def __init__(self, mars: Any) -> None:
        self.mars, self.step = mars, 0
        self.pieces: dict[tuple[bool, int], list[tuple[str, Any, Tensor]]] = defaultdict(list)
        self.hooks = 0
        self.collectives: list[tuple[bool, int]] = []  # of each call: whether it looked ahead, and how many
        read, take = mars._shards, mars.step

        def watched() -> Any:
            joined = read()
            for p, shard in joined:
                values = shard.grad.detach().double().flatten().cpu()
                layout = mars._tables.layout(p)
                for s in layout.segments:
                    where = s.region if s.region is not None else (s.start, s.stop)
                    piece = values[s.offset : s.offset + s.numel].clone()
                    self.pieces[mars._previous.looking, self.step].append((engine_cases.clean(s.name), where, piece))
            return joined

        def counted(mars: Any, *args: Any) -> Any:
            calls: list[tuple[str, int]] = []
            with contextlib.ExitStack() as stack:
                for name in zero_cases.COLLECTIVES:
                    function = Recorder._counted(name, getattr(dist, name), calls)
                    stack.enter_context(unittest.mock.patch.object(dist, name, function))
                out = take(*args)
            self.collectives.append((mars._previous.looking, len(calls)))
            return out

        mars.step = types.MethodType(counted, mars)  # some schedulers want a method
        mars._shards = watched
        mars.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.hooks += 1

    def gathered(self, start: dict[str, Tensor]) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """The gradients of the ordinary passes and of the look-aheads, whole, by step and name."""
        everyone: list[Any] = [dict(self.pieces)]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, dict(self.pieces))
        steps = 1 + max(step for one in everyone for _, step in one)
        out: tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]] = ([], [])
        for step in range(steps):
            for looking in (False, True):
                whole: dict[str, Tensor] = {}
                for name, where, piece in (entry for one in everyone for entry in one.get((looking, step), [])):
                    tensor = whole.setdefault(name, torch.zeros_like(start[name]))
                    if piece.numel() and isinstance(where[0], tuple):
                        block = tensor[tuple(slice(*interval) for interval in where)]
                        block.copy_(piece.view(block.shape))
                    elif piece.numel():
                        tensor.view(-1)[where[0] : where[1]] = piece
                out[looking].append(whole)
        return out


def broken(loss: Tensor, case: Case, which: str, step: int) -> Tensor:
    """One rank sees the overflow; the others must hear of it."""
    rank, world = ranks()
    return loss * float("inf") if (which, step) in case.broken and rank == world - 1 else loss


def counters(engine: Any) -> tuple[int, ...] | None:
    """What DeepSpeed's engine counts."""
    if engine is None:
        return None
    return engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps


def run_approximate(case: Case) -> dict[str, Any]:
    """The same loop without a look-ahead: what an engine counts then."""
    net = build(case.net)
    ready = setup(replace(case, params={**case.params, "is_approx": True}), net)
    watcher = Watcher(ready.mars)
    rates, scales = [], []
    for step, j, tokens, targets in micro_batches(range(case.steps), case.accumulation):
        if j == 0:
            rates.append([group["lr"] for group in ready.mars.param_groups])
        ready.backward(broken(ready.model(tokens, targets), case, "present", step))
        if j == case.accumulation - 1:
            ready.step()
            scale = ready.facts.get("scale")
            scales.append(scale() if scale is not None else None)
    result = {"rates": rates, "scales": scales, "hooks": watcher.hooks, "collectives": watcher.collectives}
    result["counters"] = counters(ready.engine)
    if ready.engine is not None:
        ready.engine.destroy()
    ready.facts.get("finish", lambda: None)()
    return result


def run(case: Case) -> dict[str, Any]:
    """Train ``case.steps`` steps, and what came of it."""
    from mars_dist.exact import ExactMode

    net = build(case.net)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    start = {name: p.detach().to(dtype).double() for name, p in net.named_parameters()}
    with messages() as texts:
        ready = setup(case, net)
        watcher = Watcher(ready.mars)
        torch.manual_seed(1000 + ranks()[0])  # each rank drops what it likes
        masks: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        ordinary: list[int] = []
        passes: list[tuple[int, int]] = []

        def gradient(micro_batch: MicroBatch) -> None:
            step, j, tokens, targets = micro_batch
            watcher.step = step
            loss = ready.model(tokens, targets)
            if isinstance(net, Dropped):
                masks[step, j].append(net.masks[-1])
            passes.append((step, j))
            which = "present" if ordinary and ordinary[-1] == step else "ahead"
            ready.backward(broken(loss, case, which, step))

        data = micro_batches(range(case.steps), case.accumulation, ready.share)
        exact = ExactMode(ready.optimizer, data, gradient, **ready.keywords)
        rates, streams, scales = [], [], []
        for batch in exact:
            ordinary.append(len(ordinary))
            streams.append(torch.get_rng_state())
            rates.append([group["lr"] for group in ready.mars.param_groups])
            for micro_batch in batch:
                gradient(micro_batch)
            ready.step()
            scale = ready.facts.get("scale")
            scales.append(scale() if scale is not None else None)
            assert case.broken or all(k != "next_prev_grad" for s in ready.mars.state.values() for k in s)
    gradients, ahead = watcher.gathered(start)
    engine = ready.engine
    result = {
        "start": start,
        "end": ready.end(),
        "gradients": gradients,
        "ahead": ahead,
        "passes": passes,
        "evaluations": exact.gradient_evaluations,
        "handed_out": exact.handed_out,
        "masks": {key: [m.numpy() for m in found] for key, found in masks.items()},
        "stream_moved": any(not torch.equal(streams[0], s) for s in streams),
        "rates": rates,
        "scales": scales,
        "hooks": watcher.hooks,
        "collectives": watcher.collectives,
        "messages": texts,
        "rule_counts": ready.mars.rule_counts(),
        "engines": ready.mars.engines(),
        "counts": sorted({float(s["step"]) for s in ready.mars.state.values() if s}),
        "state_keys": sorted({k for s in ready.mars.state.values() for k in s}),
        "devices": sorted({str(t.device) for s in ready.mars.state.values() for t in s.values()}),
        "bytes": [
            sum(t.numel() * t.element_size() for t in held)
            for held in (
                [s["prev_grad"] for s in ready.mars.state.values() if "prev_grad" in s],
                ready.mars._previous._spare.values(),
            )
        ],
        "facts": {k: v for k, v in ready.facts.items() if not callable(v)},
        "counters": counters(engine),
    }
    if engine is not None:
        engine.destroy()
    ready.facts.get("finish", lambda: None)()
    return result


def pipeline(case: ZeroCase) -> str:
    """What ``ExactMode`` says of a pipeline, whose ``train_batch`` makes the update."""
    from deepspeed.pipe import PipelineModule

    from mars_dist.exact import ExactMode
    from tests.compatibility.parallel_training import Engine, groups_of_its_own, layers, token_loss

    with groups_of_its_own():
        net = PipelineModule(layers(False), num_stages=2, loss_fn=token_loss, partition_method="uniform")
        sizes = {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 2}
        engine = Engine(case, net, lambda name, p: name, sizes).engine
        try:
            ExactMode(engine, [], lambda _: None)
        except RuntimeError as error:
            return str(error)
        finally:
            engine.destroy()
    return ""


FROZEN = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.0, "warmup_num_steps": 4, "warmup_min_lr": 0.0}}


def left_early(case: Case) -> dict[str, Any]:
    """With lr 0, a batch of which only the first micro-batch is passed and no step taken; then a loop that ends so.

    Returns: the gradients of the look-aheads, those of a batch passed by hand after the loop, and the random number
        that each rank would draw next, before and after.
    """
    from mars_dist.exact import ExactMode

    net = build(case.net)
    start = {name: p.detach().double() for name, p in net.named_parameters()}
    ready = setup(case, net)
    watcher = Watcher(ready.mars)
    before = torch.get_rng_state().clone()

    def gradient(micro_batch: MicroBatch) -> None:
        step, _, tokens, targets = micro_batch
        watcher.step = step
        ready.backward(ready.model(tokens, targets))

    data = micro_batches(range(5), case.accumulation, ready.share)
    for step, batch in enumerate(ExactMode(ready.optimizer, data, gradient, **ready.keywords)):
        for micro_batch in batch:
            gradient(micro_batch)
            if step in (1, 3):
                break
        if step == 3:
            break
        if step != 1:
            ready.step()
        elif ready.engine is None:
            ready.mars.zero_grad()
    synchronised = getattr(ready.model, "sync_gradients", True)
    result = {
        "ahead": watcher.gathered(start)[1],
        "moved": not torch.equal(before, torch.get_rng_state()),
        "synchronised": synchronised,
        "type": ready.facts["type"],
    }
    if ready.engine is None:
        ready.mars.zero_grad()
        for _, _, tokens, targets in micro_batches(range(4, 5), 1, ready.share):
            ready.model(tokens, targets).backward()
        result["reduced"] = [p.grad is not None for p in ready.model.parameters()]
    else:
        ready.engine.destroy()
    return result


def saved_after_a_skipped_step(case: Case) -> dict[str, Any]:
    """A training whose third step is left out, and the same one that goes on from what torch's helper saved then."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    from mars_dist.exact import ExactMode

    ends, keys, engines = [], [], []
    for saves in (False, True):
        net = build(case.net).to(torch.bfloat16 if case.dtype == "bf16" else torch.float32)
        ready = plain(case, net)

        def gradient(micro_batch: MicroBatch, ready: Trained = ready) -> None:
            ready.backward(ready.model(*micro_batch[2:]))

        data = list(micro_batches(range(case.steps), case.accumulation))
        exact = ExactMode(ready.mars, data, gradient, **ready.keywords)
        for number, batch in enumerate(exact):
            for micro_batch in batch:
                gradient(micro_batch)
            if number != 2:
                ready.step()
                continue
            ready.mars.zero_grad()
            if saves:
                break
        if saves:
            saved = copy.deepcopy(get_optimizer_state_dict(ready.model, ready.mars))
            keys = sorted({",".join(sorted(state)) for state in saved["state"].values()})
            position = exact.state_dict()
            mars = mars_for(ready.model, case)
            mars.attach(ready.model)
            set_optimizer_state_dict(ready.model, mars, saved)
            ready.mars = mars
            exact = ExactMode(mars, data[position["handed_out"] :], gradient, **ready.keywords)
            exact.load_state_dict(position)
            for batch in exact:
                for micro_batch in batch:
                    gradient(micro_batch)
                mars.step()
                mars.zero_grad()
        ends.append([p.detach().clone() for p in ready.model.parameters()])
        engines.append((type(ready.model).__name__, ready.mars.engines()))
    pairs = zip(*ends, strict=True)
    return {"equal": all(torch.equal(a, b) for a, b in pairs), "keys": keys, "engines": engines}
