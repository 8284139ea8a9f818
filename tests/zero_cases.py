"""What runs on the ranks in the ZeRO tests: one short training under a real DeepSpeed engine, fully recorded."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import nets


@dataclass(frozen=True)
class ZeroCase:
    """One configuration. ``params`` goes into the optimizer block; ``zero`` into ``zero_optimization``."""

    stage: int
    dtype: str = "fp32"
    offload: bool = False
    params: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    clip: float = 0.0
    accumulation: int = 1
    net: str = "net"
    construct: str = "json"  # or "instance", "callable", "partial", "groups"
    steps: int = 10
    record_public: bool = False  # also read the first gradients through DeepSpeed's public call

    def __str__(self) -> str:
        words = [f"zero{self.stage}", self.dtype]
        words += ["offload"] * self.offload + [f"clip{self.clip:g}"] * (self.clip > 0)
        words += [f"accumulate{self.accumulation}"] * (self.accumulation > 1)
        words += [v if isinstance(v, str) else f"{k}={v}" for k, v in self.params.items()]
        words += [f"{k}={v}" for k, v in {**self.zero, **self.extra}.items()]
        words += [self.net] * (self.net != "net") + [self.construct] * (self.construct != "json")
        return "-".join(words).replace(" ", "")


LR = {"lr": 1e-2, "lr_1d": 4e-3}


def config(case: ZeroCase) -> dict[str, Any]:
    """The DeepSpeed configuration of ``case``, as a person would write it."""
    zero: dict[str, Any] = {"stage": case.stage, **case.zero}
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 12 // dist.get_world_size() // case.accumulation,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
        **case.extra,
    }
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if case.construct not in ("json", "groups"):
            out["zero_force_ds_cpu_optimizer"] = False
    if case.dtype == "bf16":
        out["bf16"] = {"enabled": True, **case.extra.get("bf16", {})}
    if case.construct in ("json", "groups"):
        out["optimizer"] = {"type": "MARS", "params": {**LR, **case.params}}
    return out


def run(case: ZeroCase) -> dict[str, Any]:
    """Train ``case.steps`` steps and return what reached MARS and what became of the parameters, by name."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import mars_dist

    net = nets.build(case.net)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
    start = {name: p.detach().to(dtype).double() for name, p in net.named_parameters()}
    build = functools.partial(mars_dist.MARS, **{**LR, **case.params})
    arguments: dict[str, Any] = {
        "json": lambda: {"model_parameters": list(net.parameters())},
        "instance": lambda: {"optimizer": build(net.named_parameters())},
        "callable": lambda: {"optimizer": lambda params: build(params), "model_parameters": net.parameters()},
        "partial": lambda: {"optimizer": build, "model_parameters": net.parameters()},
        "groups": lambda: {"model_parameters": user_groups(net)},
    }[case.construct]()
    messages = Messages()
    logging.getLogger("mars_dist").addHandler(messages)
    engine, wrapper, *_ = deepspeed.initialize(model=net, config=config(case), **arguments)
    optimizer = wrapper if isinstance(wrapper, mars_dist.MARS) else wrapper.optimizer
    assert type(optimizer) is mars_dist.MARS, type(optimizer)
    recorder = Recorder(optimizer, net)
    losses = []
    for step in range(case.steps):
        tokens, targets = nets.batch(step)
        rows = torch.arange(12).view(case.accumulation, dist.get_world_size(), -1)[:, dist.get_rank()]
        for part in rows:
            loss = engine(tokens[part].to(engine.device), targets[part].to(engine.device))
            engine.backward(loss)
            if step == 0 and case.record_public:
                recorder.public = public_gradients(net)
            engine.step()
            losses.append(loss.item())
        recorder.end_of_update()
    logging.getLogger("mars_dist").removeHandler(messages)
    result = {
        "start": start,
        "end": parameters(net, engine, case),
        "gradients": recorder.gathered(),
        "public_gradients": recorder.public,
        "collectives": recorder.collectives,
        "rule_counts": optimizer.rule_counts(),
        "engines": optimizer.engines(),
        "wrapper": type(wrapper).__name__,
        "stage": engine.zero_optimization_stage(),
        "messages": messages.texts,
        "steps": sorted({float(s["step"]) for s in optimizer.state.values()}),
        "state_keys": sorted({k for s in optimizer.state.values() for k in s}),
        "devices": sorted({str(t.device) for s in optimizer.state.values() for t in s.values()}),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "losses": losses,
        "pieces": [
            (recorder.names[s.name], s.start, s.stop) for refs in optimizer._tables.seen() for s in refs.segments
        ],
    }
    engine.destroy()
    return result if dist.get_rank() == 0 else {k: result[k] for k in RANK_RESULTS}


RANK_RESULTS = ("rule_counts", "collectives", "messages", "end", "pieces")


@contextlib.contextmanager
def norm_of_the_local_piece() -> Iterator[None]:
    """The classic fault, planted: nothing is summed over the ranks."""
    from mars_dist import step

    whole, step.sum_over_ranks = step.sum_over_ranks, lambda vector, group: vector
    try:
        yield
    finally:
        step.sum_over_ranks = whole


def run_with_the_norm_of_the_local_piece(case: ZeroCase) -> dict[str, Any]:
    with norm_of_the_local_piece():
        return run(case)


# Two groups that mix matrices and vectors, the second with settings of its own.
SECOND_GROUP = ("head", "norm", "shift")
SECOND_SETTINGS = {"weight_decay": 0.0, "lr": 5e-3, "gamma": 0.05}


def group_names(net: torch.nn.Module) -> list[list[str]]:
    names = [name for name, _ in net.named_parameters()]
    second = [n for n in names if n.startswith(SECOND_GROUP)]
    return [[n for n in names if n not in second], second]


def user_groups(net: torch.nn.Module) -> list[dict[str, Any]]:
    named = dict(net.named_parameters())
    first, second = ([named[n] for n in names] for names in group_names(net))
    return [{"params": first}, {"params": second, **SECOND_SETTINGS}]


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_gather_object",
)


class Recorder:
    """Records the gradient pieces and the collectives of every ``MARS.step()`` call.

    The table of pieces is the optimizer's own: it is confirmed by comparing the RESULT by name with the model's
    parameters, and by ``public_gradients``.
    """

    def __init__(self, optimizer: Any, net: torch.nn.Module) -> None:
        self.optimizer = optimizer
        names = {id(p): name for name, p in net.named_parameters()}
        self.names = {name: names[id(ref())] for refs in optimizer._tables.originals.values() for name, ref in refs}
        self.updates: list[dict[str, list[tuple[int, Tensor]]]] = [{}]
        self.collectives: list[list[tuple[str, int]]] = []
        self.public: dict[str, Tensor] = {}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        calls: list[tuple[str, int]] = []
        self.collectives.append(calls)
        self._originals = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, function in self._originals.items():
            setattr(dist, name, self._counted(name, function, calls))

    @staticmethod
    def _counted(name: str, function: Any, calls: list[tuple[str, int]]) -> Any:
        @functools.wraps(function)
        def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, tensor.numel() if isinstance(tensor, Tensor) else -1))
            return function(tensor, *args, **kwargs)

        return counted

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for name, function in self._originals.items():
            setattr(dist, name, function)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                layout = optimizer._tables.layout(p)
                for s in layout.segments:
                    piece = p.grad.detach().flatten()[s.offset : s.offset + s.numel].double().cpu()
                    self.updates[-1].setdefault(self.names[s.name], []).append((s.start, piece))

    def end_of_update(self) -> None:
        self.updates.append({})

    def gathered(self) -> list[dict[str, Tensor]]:
        """Whole gradients of every update by the model's names, assembled from all ranks (on rank 0)."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.updates[:-1])
        out = []
        for updates in zip(*everyone, strict=True):
            whole: dict[str, dict[int, Tensor]] = {}
            for one in updates:
                for name, pieces in one.items():
                    for start, piece in pieces:
                        if piece.numel():
                            whole.setdefault(name, {})[start] = piece
            out.append({n: torch.cat([t for _, t in sorted(p.items())]) for n, p in whole.items()})
        return out


def public_gradients(net: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients of the last backward pass through DeepSpeed's public call."""
    from deepspeed.utils import safe_get_full_grad

    out = {}
    for name, p in net.named_parameters():
        grad = safe_get_full_grad(p)
        if grad is not None:
            out[name] = grad.double().flatten().cpu()
    return out


def parameters(net: torch.nn.Module, engine: Any, case: ZeroCase) -> dict[str, Tensor]:
    """The model's own parameters by name; the master copy in float32 where the model computes in 16 bits."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if case.stage == 0 and case.dtype != "fp32":
        masters = [t for group in engine.optimizer.fp32_groups for t in group]
        models = [t for group in engine.optimizer.fp16_groups for t in group]
        by_id = {id(m): master for m, master in zip(models, masters, strict=True)}
        return {name: by_id[id(p)].detach().double().cpu() for name, p in net.named_parameters()}
    out = {}
    for name, p in net.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=case.stage == 3):
            value = p.detach().double().clone()
        if case.dtype != "fp32":
            master = safe_get_full_fp32_param(p).double()
            same = torch.equal(master.to(p.dtype).double(), value)
            assert same, f"{name}: the model does not compute with the master"
            value = master
        out[name] = value.cpu()
    return out
