"""What runs on the ranks in the Accelerate tests: one short training under a real ``Accelerator``, fully recorded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import cpu_fsdp, nets, orthogonalised
from tests.ddp_cases import messages, same, snapshot
from tests.zero_cases import LR, Recorder, ZeroCase
from tests.zero_cases import parameters as zero_parameters

BATCH = 24  # divides by 2, 3 and 4 ranks, also with accumulation over 2


@dataclass(frozen=True)
class Case:
    """``engine``: ddp, fsdp1-flat, fsdp1-original, fsdp2, hsdp, zero2 or zero3; ``params`` goes to MARS.

    ``order``: "together" in one ``prepare``; "apart", model then optimizer; "direct" by ``prepare_model`` and
    ``prepare_optimizer``; "model-first": MARS is constructed with the prepared model's parameters. ``dummy``: the
    DeepSpeed configuration names MARS. ``schedule``: the learning rate changes at every update. ``overflow``: the step
    whose loss is infinite on the last rank, under a GradScaler.
    """

    engine: str
    params: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    clip: float = 0.0
    order: str = "together"
    offload: bool = False
    dummy: bool = False
    schedule: bool = False
    overflow: int | None = None
    mixed: str = "no"
    plugin: dict[str, Any] = field(default_factory=dict)
    steps: int = 10

    def __str__(self) -> str:
        words = [self.engine, str(self.params.get("mars_type", "mars-adamw"))]
        words += [f"accumulate{self.accumulation}"] * (self.accumulation > 1) + [f"clip{self.clip:g}"] * (self.clip > 0)
        words += [self.order] * (self.order != "together") + ["offload"] * self.offload + ["dummy"] * self.dummy
        words += ["schedule"] * self.schedule + ["overflow"] * (self.overflow is not None)
        words += [self.mixed] * (self.mixed != "no")
        words += [f"{key}={value}" for key, value in self.plugin.items()]
        return "-".join(words).replace(" ", "")


def rate(step: int) -> float:
    return 1.0 / (1 + 0.2 * step)


# ------------------------------------------------------------------------------------------------------- plug-ins


def accelerator_of(case: Case) -> Any:
    """The Accelerator as a script would make it, with the plug-in of the case."""
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from accelerate.utils import ParallelismConfig

    from mars_dist.integrations.accelerate import fsdp2_plugin

    cpu_fsdp.install()
    cpu_fsdp.reset()
    kind = case.engine.partition("-")[0]
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
    arguments: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": case.accumulation}
    arguments["mixed_precision"] = case.mixed
    if kind == "fsdp1":
        original = case.engine == "fsdp1-original"
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(use_orig_params=original, **wrap, **case.plugin)
    elif kind in ("fsdp2", "hsdp"):
        arguments["fsdp_plugin"] = fsdp2_plugin(transformer_cls_names_to_wrap=["Linear"], **case.plugin)
    if kind == "hsdp":
        shape = {"dp_replicate_size": 2, "dp_shard_size": dist.get_world_size() // 2}
        arguments["parallelism_config"] = ParallelismConfig(**shape)
    if kind in ("zero2", "zero3"):
        del arguments["cpu"]  # it would turn DeepSpeed off
        offload = "cpu" if case.offload else "none"
        plugin = DeepSpeedPlugin(
            zero_stage=int(kind[-1]), gradient_clipping=case.clip, offload_optimizer_device=offload
        )
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = micro_batch(case)
        plugin.deepspeed_config["gradient_clipping"] = case.clip  # the plug-in drops a 0, and DeepSpeed clips to 1 then
        plugin.deepspeed_config.update(case.plugin)
        if case.dummy:
            plugin.deepspeed_config["optimizer"] = {"type": "MARS", "params": {**LR, **case.params}}
        arguments["deepspeed_plugin"] = plugin
    return Accelerator(**arguments)


def micro_batch(case: Case) -> int:
    return BATCH // dist.get_world_size() // case.accumulation


def prepare(accelerator: Any, net: nn.Module, case: Case) -> tuple[Any, Any]:
    """Model and optimizer, prepared in the order of the case."""
    import mars_dist

    settings = {**LR, **case.params}
    if case.dummy:
        from accelerate.utils import DummyOptim

        return accelerator.prepare(net, DummyOptim(net.parameters(), lr=settings["lr"]))
    if case.order == "model-first":
        model = accelerator.prepare(net)
        return model, accelerator.prepare(mars_dist.MARS(model.named_parameters(), **settings))
    optimizer = mars_dist.MARS(net.named_parameters(), **settings)
    if case.order == "together":
        return accelerator.prepare(net, optimizer)
    if case.order == "apart":
        return accelerator.prepare(net), accelerator.prepare(optimizer)
    if case.order == "optimizer-first":
        prepared = accelerator.prepare_optimizer(optimizer)
        return accelerator.prepare_model(net), prepared
    assert case.order == "direct"
    return accelerator.prepare_model(net), accelerator.prepare_optimizer(optimizer)


# ------------------------------------------------------------------------- reading an engine by its own public means


def whole(model: Any, read: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """``read`` (the value or the gradient) of every parameter, whole, in float64, by the name in the original model."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    out: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        value = read(p)
        if value is not None and hasattr(value, "full_tensor"):
            value = value.full_tensor()
        if value is not None and not hasattr(p, "_fsdp_flattened"):
            out[plain(name)] = value.detach().double()
    for module in FSDP.fsdp_modules(model):  # one flat tensor per module: all pieces, end to end
        flat = module._handle.flat_param if module._handle is not None else None
        if flat is None:
            continue
        piece = read(flat).detach()
        pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size(module.process_group))]
        dist.all_gather(pieces, piece, group=module.process_group)
        values = torch.cat(pieces).split(
            list(flat._numels_with_padding) + [sum(map(len, pieces)) - sum(flat._numels_with_padding)]
        )
        real = [v for v, padding in zip(values, [*flat._is_padding_mask, True], strict=True) if not padding]
        prefix = next(n for n, m in model.named_modules() if m is module)
        for fqn, shape, value in zip(flat._fqns, flat._shapes, real, strict=True):
            out[plain(f"{prefix}.{fqn}")] = value.double().view(shape).clone()
    return out


def plain(name: str) -> str:
    words = [w for w in name.split(".") if w and w not in ("module", "_fsdp_wrapped_module", "_orig_mod")]
    return ".".join(words)


# ------------------------------------------------------------------------------------------------------------- run


def run(case: Case) -> dict[str, Any]:
    with orthogonalised.counted() as counts:
        return {**train(case), "orthogonalised": sum(counts)}


def train(case: Case) -> dict[str, Any]:
    """Train ``case.steps`` updates and return what reached MARS and what became of the parameters, by name."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from mars_dist.integrations.accelerate import mars_inside

    net = nets.build()
    start = {name: p.detach().double() for name, p in net.named_parameters()}
    with messages() as texts:
        accelerator = accelerator_of(case)
        scaler = None
        if case.overflow is not None:
            scaler = accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        model, optimizer = prepare(accelerator, net, case)
        if scaler is not None:  # as in fp16 on a GPU, but for autocast: clip_grad_norm_ divides by the scale first
            accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        mars = mars_inside(optimizer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(mars, rate) if case.schedule else None  # not prepared
        deepspeed = case.engine.startswith("zero")
        recorder = Recorder(mars, net) if deepspeed else None
        gradients: list[dict[str, Tensor]] = []
        if recorder is None:
            mars.register_step_pre_hook(lambda *_: gradients.append(whole(model, lambda p: p.grad)))
        rates: list[list[float]] = []
        skipped: list[int] = []
        untouched: list[int] = []
        for step in range(case.steps):
            tokens, targets = nets.batch(step, BATCH)
            rows = torch.arange(BATCH).view(case.accumulation, dist.get_world_size(), -1)[:, dist.get_rank()]
            before = snapshot(net, mars) if case.overflow is not None else []
            used = [group["lr"] for group in mars.param_groups]
            for part in rows:
                with accelerator.accumulate(model):
                    loss = model(tokens[part], targets[part])
                    if step == case.overflow and dist.get_rank() == dist.get_world_size() - 1:
                        loss = loss * float("inf")
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and case.clip:
                        accelerator.clip_grad_norm_(model.parameters(), case.clip)
                    optimizer.step()
                    if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped and scheduler:
                        scheduler.step()
                    optimizer.zero_grad()
            assert accelerator.sync_gradients
            if accelerator.optimizer_step_was_skipped:
                skipped.append(step)
            else:
                rates.append(used)
            if case.overflow is not None and same(before, snapshot(net, mars)):
                untouched.append(step)
            if recorder is not None:
                recorder.end_of_update()
    if recorder is not None:
        gradients = recorder.gathered()
        gradients = [{name: g.view(start[name].shape) for name, g in one.items()} for one in gradients]
        end = zero_parameters(net, model, ZeroCase(stage=model.zero_optimization_stage()))
    else:
        end = whole(model, lambda p: p)
    result = {
        "start": start,
        "end": end,
        "gradients": gradients,
        "rates": rates,
        "skipped": skipped,
        "untouched": untouched,
        "scales": None if scaler is None else scaler.get_scale(),
        "messages": texts,
        "rule_counts": mars.rule_counts(),
        "engines": mars.engines(),
        "steps": sorted({float(s["step"]) for s in mars.state.values()}),
        "lr": [group["lr"] for group in mars.param_groups],
        "class": f"{type(mars).__module__}.{type(mars).__qualname__}",
        **what_ran(accelerator, model, optimizer),
    }
    if deepspeed:
        model.destroy()
    accelerator.free_memory()
    cpu_fsdp.reset()
    return result


def what_ran(accelerator: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """What the objects themselves say about the engine, whatever was asked for."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    units = [m for m in model.modules() if isinstance(m, (FSDP, FSDPModule))]
    local = sum(p.numel() if not hasattr(p, "to_local") else p.to_local().numel() for p in model.parameters())
    out = {
        "type": str(accelerator.distributed_type.value),
        "is_fsdp2": accelerator.is_fsdp2,
        "model": type(model).__name__,
        "units": len(units),
        "local_numel": local,
        "wrapper": type(getattr(optimizer, "optimizer", None)).__name__,
        "meshes": sorted({str(p.device_mesh.mesh.tolist()) for p in model.parameters() if hasattr(p, "device_mesh")}),
    }
    if hasattr(model, "zero_optimization_stage"):
        out["stage"] = model.zero_optimization_stage()
        out["force"] = model._config._param_dict.get("zero_force_ds_cpu_optimizer")
    if units and isinstance(units[0], FSDPModule):
        groups = [u._get_fsdp_state()._fsdp_param_group for u in units]
        policies = {g.mp_policy for g in groups if g is not None}
        out["policies"] = sorted(f"{p.param_dtype} {p.reduce_dtype} {p.output_dtype}" for p in policies)
        out["reshards"] = [type(g.post_forward_mesh_info).__name__ for g in groups if g is not None]
    return out


def refused(case: Case) -> str:
    """What ``prepare`` says to the case."""
    try:
        prepare(accelerator_of(case), nets.build(), case)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        cpu_fsdp.reset()
    return ""


def trained_without_us(case: Case) -> dict[str, Any]:
    """The case without what mars_dist adds to Accelerate: whether it asks for DeepSpeedCPUAdam, or what is trained."""
    import accelerate.accelerator as module

    from mars_dist.integrations import accelerate as ours

    asked: list[str] = []

    def swap(optimizer: Any) -> Any:
        asked.append(type(optimizer).__name__)
        raise KeyboardInterrupt  # DeepSpeedCPUAdam would be compiled for minutes

    original, module.map_pytorch_optim_to_deepspeed = module.map_pytorch_optim_to_deepspeed, swap
    ours.unregister()
    try:
        net = nets.build()
        accelerator = accelerator_of(case)
        with contextlib.suppress(KeyboardInterrupt):
            model, optimizer = prepare(accelerator, net, case)
        gradients = None
        if not asked:
            accelerator.backward(model(*nets.batch(0, BATCH)))
            held = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = sum(p.grad is not None for p in held)
    finally:
        module.map_pytorch_optim_to_deepspeed = original
        ours.register()
        cpu_fsdp.reset()
    return {"asked": asked, "gradients": gradients}


def swapped_by_the_engine(case: Case) -> str:
    """What is said when DeepSpeed gets another optimizer than the one that was given to ``prepare``."""
    import deepspeed

    original = deepspeed.initialize

    def initialize(**kwargs: Any) -> Any:
        return original(**{**kwargs, "optimizer": torch.optim.AdamW(kwargs["model"].parameters())})

    deepspeed.initialize = initialize
    try:
        return refused(case)
    finally:
        deepspeed.initialize = original


def on_its_own(kind: str) -> dict[str, Any]:
    """Where Accelerate itself goes astray on CPUs: what is said, and what ran."""
    from accelerate import Accelerator, DeepSpeedPlugin

    import mars_dist
    from mars_dist.integrations.accelerate import fsdp2_plugin

    cpu_fsdp.remove()
    cpu_fsdp.reset()
    net = nets.build()
    said = ran = ""
    with messages() as texts:
        try:
            if kind == "alone":
                accelerator = Accelerator()
            elif kind == "deepspeed":
                accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0))
            else:
                accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp2_plugin())
            model, _ = accelerator.prepare(net, mars_dist.MARS(net.parameters()))
            ran = type(model).__name__
        except RuntimeError as error:
            said = str(error)
        finally:
            cpu_fsdp.reset()
    return {"said": said, "ran": ran, "messages": texts}


def lr_after_one_step(prepared: bool) -> float:
    """The learning rate after one update and one call of the scheduler."""
    import mars_dist

    accelerator, net = accelerator_of(Case("ddp")), nets.build()
    optimizer = mars_dist.MARS(net.named_parameters(), **LR)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model, wrapped = accelerator.prepare(net, optimizer)
    if prepared:
        scheduler = accelerator.prepare(scheduler)
    accelerator.backward(model(*nets.batch(0, BATCH)))
    wrapped.step()
    scheduler.step()
    cpu_fsdp.reset()
    return optimizer.param_groups[0]["lr"]
