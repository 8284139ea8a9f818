"""What runs on the ranks for the rows about precision (wrappers.py) and about models (model.py), and their replay.

Beside what ``Run`` records: lr and betas of every step, the loss scale, the master copies after every step, and the
gradient that a plain float32 backward pass on the whole batch has at the same weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests import nets, zero_cases
from tests.reference import ReferenceMARS
from tests.zero_cases import LR, ZeroCase
from tests.zero_more_cases import Poison, Run, same

Result = dict[str, Any]
Named = dict[str, Tensor]
BAD = 3  # the update at which the loss of rank 1 is planted with inf
OVERFLOW = Poison(BAD, 1, float("inf"), "loss")


class PrecisionRun(Run):
    """A ``Run`` in any precision; ``extra`` of the case replaces what its dtype would put into the file."""

    def __init__(self, case: ZeroCase, poison: Poison | None = None, zero_init: bool = False) -> None:
        ordinary = zero_cases.config
        zero_cases.config = lambda case: {**ordinary(case), **case.extra}
        try:
            super().__init__(case, poison, zero_init)
        finally:
            zero_cases.config = ordinary
        if case.dtype == "fp16":
            self.start = {name: t.half().double() for name, t in self.start.items()}
        self.forwards = 0  # of the norm: twice a step where the forward pass is computed again
        self.activations: set[torch.dtype] = set()  # what the first linear layer gives
        self.seen: list[dict[str, tuple[float, tuple[float, float]]]] = []
        self.scales: list[tuple[float, float]] = []  # before and after every update
        self.truth: list[Named] = []
        self.after: list[Named] = []
        self.skipped: list[int] = []
        self.mars.register_step_pre_hook(self._remember_settings)

    def watch_modules(self) -> None:
        """Count forward passes and note their precision; not under torch.compile, which would trace this as well."""
        norm = next((m for m in self.net.modules() if isinstance(m, torch.nn.LayerNorm)), self.net)
        linear = next((m for m in self.net.modules() if isinstance(m, torch.nn.Linear)), self.net)
        norm.register_forward_pre_hook(self._count)  # before it: what is computed again may stop inside of it
        linear.register_forward_hook(lambda _m, _a, out: self.activations.add(out.dtype))

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def _remember_settings(self, *_: Any) -> None:
        for group in self.mars.param_groups:
            for name, _ref in self.mars._tables.originals[group["mars_group"]]:
                self.seen[-1][self.recorder.names[name]] = (float(group["lr"]), tuple(group["betas"]))

    def train_recorded(self, watch: tuple[str, ...] = ()) -> None:
        """All updates, one by one. ``watch``: "truth" and "after" cost time and are recorded where asked for."""
        for update in range(self.case.steps):
            self.seen.append({})
            if "truth" in watch:
                self.truth.append(self.true_gradients(update))
            before, scale = self._everything(), self.scale()
            self.train(update, update + 1)
            self.scales.append((scale, self.scale()))
            if same(before, self._everything()):
                self.skipped.append(update)
            if "after" in watch:
                self.after.append(self.masters())

    def scale(self) -> float:
        """The loss scale; 1 where there is none."""
        wrapper = self.engine.optimizer
        for scaler in (self.engine.torch_autocast_z0_gradscaler, getattr(wrapper, "torch_autocast_gradscaler", None)):
            if scaler is not None:
                return float(scaler.get_scale())
        return float(getattr(wrapper, "loss_scale", 1.0))

    def flats(self) -> list[Tensor]:
        """What MARS steps on this rank. Stage 3 puts its flats into the groups for the time of a step only."""
        stage3 = getattr(self.engine.optimizer, "fp32_partitioned_groups_flat", None)
        return stage3 or [p for group in self.mars.param_groups for p in group["params"]]

    def _everything(self) -> list[Tensor]:
        """Copies of what a step may change: values, states and counters of this rank, and the model's weights."""
        flats = self.flats()
        states = [t for p in flats for _, t in sorted(self.mars.state.get(p, {}).items())]
        return [t.detach().clone() for t in (*flats, *states, *self.weights().values())]

    def weights(self) -> Named:
        """The values that the model computes with."""
        import deepspeed

        out = {}
        for name, p in self.net.named_parameters():
            with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                out[name] = p.detach().double().clone()
        return out

    def true_gradients(self, update: int) -> Named:
        """The gradient of the whole batch at the model's present weights, in float32 and without an engine."""
        net, weights = nets.build(self.case.net), self.weights()
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(weights[name])
        net(*nets.batch(update)).backward()
        return {name: p.grad.double().flatten() for name, p in net.named_parameters() if p.grad is not None}

    def masters(self) -> Named:
        """What MARS steps, whole and by name; the model must compute with exactly its rounding."""
        from deepspeed.utils import safe_get_full_fp32_param

        out, wrapper = self.weights(), self.engine.optimizer
        copies: dict[int, Tensor] = {}
        if type(wrapper).__name__ == "FP16_UnfusedOptimizer":
            models = [t for group in wrapper.fp16_groups for t in group]
            copies = {id(m): t for m, t in zip(models, (t for g in wrapper.fp32_groups for t in g), strict=True)}
        for name, p in self.net.named_parameters():
            if p.dtype == torch.float32 or not p.requires_grad:
                continue
            master = copies[id(p)].detach() if copies else safe_get_full_fp32_param(p)
            assert torch.equal(master.to(p.dtype).double(), out[name]), f"{name}: the model computes with other weights"
            out[name] = master.double().clone()
        return out

    def finish(self, proof: str) -> Result:
        """What a row needs, and the proof that its feature acted. What is frozen must be where it was."""
        end = self.masters()
        trainable = {name for name, p in self.net.named_parameters() if p.requires_grad}
        for name in self.start.keys() - trainable:
            assert torch.equal(end[name], self.start[name]), f"{name} is frozen and moved"
        result: Result = {
            "start": {name: t for name, t in self.start.items() if name in trainable},
            "end": {name: t for name, t in end.items() if name in trainable},
            "gradients": self.recorder.gathered(),
            "rule_counts": self.mars.rule_counts(),
            "engines": self.mars.engines(),
            "messages": self.messages.texts,
            "seen": self.seen,
            "scales": self.scales,
            "after": self.after,
            "skipped": self.skipped,
        }
        result["ratios"] = [ratio(g, t) for g, t in zip(result["gradients"], self.truth, strict=False)]
        result["active"] = bool(ACTIVE[proof](self, result))
        logging.getLogger("mars_dist").removeHandler(self.messages)
        self.engine.destroy()
        return result


def ratio(found: Named, truth: Named) -> float:
    """The factor between the gradients that reached MARS and the true ones; nan where none reached it."""
    if not found:
        return float("nan")
    a, b = (torch.cat([t[name] for name in sorted(truth)]) for t in (found, truth))
    return (a @ b / (b @ b)).item()


@contextmanager
def every_precision() -> Iterator[None]:
    """Let DeepSpeed take fp16 on a CPU, and put back what it keeps for all engines of a process."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import torch_autocast

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported
        torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
        deepspeed.checkpointing.reset()
        if torch._dynamo.utils.counters:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()


def _train(
    case: ZeroCase,
    active: str,
    watch: tuple[str, ...] = (),
    poison: Poison | None = None,
    zero_init: bool = False,
    backend: str = "",
) -> Result:
    with every_precision():
        run = PrecisionRun(case, poison, zero_init)
        if "activation_checkpointing" in case.extra:
            import deepspeed

            deepspeed.checkpointing.configure(None, deepspeed_config=zero_cases.config(case))
        if backend:
            run.engine.compile(backend=backend)
        else:
            run.watch_modules()
        run.train_recorded(watch)
        return run.finish(active)


def train(case: ZeroCase, active: str) -> Result:
    return _train(case, active)


def train_with_an_overflow(case: ZeroCase, active: str) -> Result:
    return _train(case, active, ("truth",), OVERFLOW)


def train_step_by_step(case: ZeroCase, active: str) -> Result:
    return _train(case, active, ("after",))


def train_born_partitioned(case: ZeroCase, active: str) -> Result:
    return _train(case, active, zero_init=True)


def train_compiled(case: ZeroCase, active: str) -> Result:
    return _train(case, active, backend="eager")


def loss_scale_as_it_is(run: PrecisionRun, result: Result) -> bool:
    """By numbers: a gradient reaches MARS divided by the scale AFTER the update, whatever it was multiplied with."""
    grown = [i for i, (before, after) in enumerate(result["scales"]) if after > before]
    for i, ((before, after), found) in enumerate(zip(result["scales"], result["ratios"], strict=True)):
        if i not in result["skipped"]:
            assert abs(found / (before / after) - 1) < 2e-3, f"update {i}: scale {before} to {after}, ratio {found}"
    return bool(grown) == run.engine.optimizer.loss_scaler.dynamic and _model_in(torch.float16)(run, result)


def only_the_overflow_is_skipped(result: Result, factor: float) -> bool:
    """Parameters, states and counters of every rank are untouched in the planted update and in no other."""
    before, after = result["scales"][BAD]
    return result["skipped"] == [BAD] and after == before * factor and not result["gradients"][BAD]


def _model_in(dtype: torch.dtype) -> Callable[[PrecisionRun, Result], bool]:
    return lambda run, result: all(p.dtype == dtype for p in run.net.parameters())


def _wrapper(key: str, value: Any) -> Callable[[PrecisionRun, Result], bool]:
    return lambda run, result: getattr(run.engine.optimizer, key) == value


def _activations(dtype: torch.dtype) -> Callable[[PrecisionRun, Result], bool]:
    return lambda run, result: run.activations == {dtype} and all(p.dtype == torch.float32 for p in run.flats())


def _class(name: str) -> Callable[[PrecisionRun, Result], bool]:
    return lambda run, result: run.wrapper == name


# Read off the run after the training: does the engine really do what the case asks for?
ACTIVE: dict[str, Callable[[PrecisionRun, Result], Any]] = {
    "fp16, static": lambda run, result: (
        loss_scale_as_it_is(run, result) and only_the_overflow_is_skipped(result, factor=1.0)
    ),
    "fp16, dynamic": lambda run, result: (
        loss_scale_as_it_is(run, result) and only_the_overflow_is_skipped(result, factor=0.5)
    ),
    "fp16 from too high a scale": lambda run, result: (
        len(result["skipped"]) > 3 and result["skipped"] == list(range(len(result["skipped"])))
    ),
    "bf16 activations": _activations(torch.bfloat16),
    "fp16 activations": lambda run, result: (
        _activations(torch.float16)(run, result)
        and only_the_overflow_is_skipped(result, factor=0.5)
        and all(abs(r - 1) < 2e-3 for i, r in enumerate(result["ratios"]) if i != BAD)
    ),
    "chosen modules in bf16": lambda run, result: (
        [n for n, p in run.net.named_parameters() if getattr(p, "comm_dtype", None) is torch.bfloat16]
        == ["embedding.weight"]
    ),
    "bf16": _model_in(torch.bfloat16),
    "BF16_Optimizer": _class("BF16_Optimizer"),
    "gradients at once": _wrapper("immediate_grad_update", True),
    "FP16_UnfusedOptimizer": _class("FP16_UnfusedOptimizer"),
    "no overflow check": _wrapper("check_grad_overflow", False),
    "accumulation in fp32": _wrapper("gradient_accumulation_dtype", torch.float32),
    "accumulation in bf16": _wrapper("gradient_accumulation_dtype", torch.bfloat16),
    "bf16 masters": lambda run, result: all(p.dtype == torch.bfloat16 for p in run.flats()),
    "legacy fusion": lambda run, result: run.engine.optimizer_legacy_fusion(),
    "buffer in bf16": lambda run, result: {b.dtype for b in run.net.buffers()} == {torch.bfloat16},
    "buffer in fp32": lambda run, result: {b.dtype for b in run.net.buffers()} == {torch.float32},
    "compiled": lambda run, result: run.engine.is_compiled and torch._dynamo.utils.counters["stats"]["unique_graphs"],
    "recomputed": lambda run, result: run.forwards == 2 * run.case.steps,
    "recomputed by DeepSpeed": lambda run, result: _checkpoints_by_deepspeed() and run.forwards == 2 * run.case.steps,
    "frozen": lambda run, result: any(not p.requires_grad for p in run.net.parameters()),
    "tied": lambda run, result: run.net.get_submodule("head").weight is run.net.get_submodule("embedding").weight,
    "short": lambda run, result: run.net.calls == run.case.steps - 1,
    "high ranks": lambda run, result: {t.dim() for t in run.start.values()} >= {3, 4},
    "lr moves": lambda run, result: len({seen["linear.weight"][0] for seen in result["seen"]}) > 4,
    "only lr moves": lambda run, result: (
        len({seen["linear.weight"][0] for seen in result["seen"]}) > 4
        and {seen["linear.weight"][1] for seen in result["seen"]} == {(0.95, 0.99)}
    ),
    "lr and betas move": lambda run, result: all(
        len({seen["linear.weight"][i] for seen in result["seen"]}) > 4 for i in (0, 1)
    ),
}


def _checkpoints_by_deepspeed() -> bool:
    import deepspeed

    return bool(deepspeed.checkpointing.is_configured())


# ----------------------------------------------------------------------------------------------------------- replay


def reference(result: Result, case: ZeroCase) -> ReferenceMARS:
    """With a group for each tensor, so that every one can have its lr and betas at every step."""
    return ReferenceMARS(result["start"], [{"names": [name]} for name in result["start"]], **{**LR, **case.params})


def replay_with_the_settings_seen(result: Result, case: ZeroCase) -> Named:
    """lr and betas as the groups had them when MARS was called."""
    model = reference(result, case)
    for gradients, seen in zip(result["gradients"], result["seen"], strict=True):
        shaped = {name: g.view(result["start"][name].shape) for name, g in gradients.items()}
        for group in model.groups:
            group["betas"] = seen[group["names"][0]][1]
        model.step(shaped, lr=[seen[group["names"][0]][0] for group in model.groups])
    return model.params


def replay_from_each_point(result: Result, case: ZeroCase) -> Named:
    """Masters in bfloat16: every step starts from the recorded values and must give the float64 step, rounded once.

    A difference would add up over the steps otherwise: rounding a value of 1 moves it by up to 4e-3.
    """
    model = reference(result, case)
    rounded: Named = {}
    for i, gradients in enumerate(result["gradients"]):
        if i:
            model.params = {name: t.clone() for name, t in result["after"][i - 1].items()}
        model.step({name: g.view(result["start"][name].shape) for name, g in gradients.items()})
        rounded = {name: t.bfloat16().double() for name, t in model.params.items()}
        for name, value in rounded.items():
            off = (value - result["after"][i][name]).abs().max().item()
            assert off == 0.0, f"update {i}, {name}: {off} from the float64 step rounded to bfloat16"
    return rounded
