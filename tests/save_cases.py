"""What runs on the ranks in the tests of saving: a training that is saved and goes on, and another that takes over.

The one that takes over has a model with other values and an optimizer with wrong hyper-parameters. What it must come to
is what the first one came to, bit by bit.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import engine_nets
from tests.engine_builders import BUILDERS, Built
from tests.engine_cases import BASE, backward, clean, full, local, summoned

SAVED, END = 4, 9  # the steps before the save, and all
SECOND = ("head", "norm")  # the second group: matrices and vectors, with settings of its own
OF_SECOND = {"lr": 5e-3, "weight_decay": 0.0, "gamma": 0.05}
# What the optimizer that takes over is constructed with: each value would change the numbers.
WRONG: dict[str, Any] = {
    **{"lr": 0.5, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.9, "gamma": 0.9, "clip": 0.7},
    **{"lr_1d": 0.2, "betas_1d": (0.1, 0.2), "weight_decay_1d": 0.7},
}


@dataclass(frozen=True)
class SaveCase:
    """One training.

    Attributes:
        engine, options: a name in ``engine_builders.BUILDERS`` (or "one": the net itself), and its keywords.
        way: a name in ``WAYS``.
        params: what goes to MARS beside ``BASE``; ``is_approx=False`` is a loop through ``ExactMode``.
        net: a name in ``engine_nets.NETS``.
        skipped: the last step before the save is left out, as after an overflow.
        bf16: the parameters are bfloat16.
    """

    engine: str
    way: str
    options: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    net: str = "net"
    skipped: bool = False
    bf16: bool = False

    def __str__(self) -> str:
        words = [self.engine, *(f"{k}={v}" for k, v in self.options.items()), self.way]
        words += [v if isinstance(v, str) else f"{k}={v}" for k, v in self.params.items()]
        words += [self.net] * (self.net != "net") + ["skipped"] * self.skipped + ["bf16"] * self.bf16
        return "-".join(words).replace(" ", "").replace("is_approx=False", "exact")


class Training:
    """A model under an engine, MARS, and a loop that stops where it is told."""

    def __init__(self, case: SaveCase, first: bool) -> None:
        self.case, self.first = case, first
        net = engine_nets.build(case.net)
        self.start = {name: p.detach().clone() for name, p in net.named_parameters()}
        if not first:
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(-0.5).add_(0.1)
        if case.bf16:
            net.to(torch.bfloat16)
        self.built = built_as(case, net)
        self.mars = mars_for(case, self.built.wrapped, {} if first else WRONG)
        self.mars.attach(self.built.wrapped)
        self.done = 0
        self.loop: Iterator[Any] | None = None
        self.under_way: Any = None  # a save in the background

    def train(self, last: int, position: Any = None) -> None:
        """Up to step ``last``; ``position``: of ExactMode, where it was saved."""
        if not self.mars.settings.is_approx and self.loop is None:
            self.loop = self._exactly(position)
        while self.done < last:
            if self.loop is not None:
                next(self.loop)
            else:
                self.mars.zero_grad()
                backward(self.built, self.done)
                self._step()
            self.done += 1

    def _step(self) -> None:
        if not (self.case.skipped and self.done == SAVED - 1):
            self.mars.step()
        self.mars.zero_grad()

    def _exactly(self, position: Any) -> Iterator[None]:
        from mars_dist.exact import ExactMode

        begin = 0 if position is None else position["handed_out"]

        def gradient(step: int) -> None:
            backward(self.built, step)

        self.exact = ExactMode(self.mars, range(begin, END), gradient, model=self.built.wrapped)
        if position is not None:
            self.exact.load_state_dict(position)
        for batch in self.exact:
            for step in batch:
                assert step == self.done
                gradient(step)
            self._step()
            yield

    def position(self) -> Any:
        return None if self.loop is None else self.exact.state_dict()

    def pieces(self) -> dict[str, Tensor]:
        """This rank's part of all values and states, by name."""
        out = {}
        for name, p in self.built.wrapped.named_parameters():
            out[f"{clean(name)}/param"] = local(p).clone()
            out |= {f"{clean(name)}/{key}": local(t).clone() for key, t in self.mars.state.get(p, {}).items()}
        return out

    def whole(self) -> dict[str, Tensor]:
        """All values and states, whole, in float64, on every rank: through torch's own helper."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        with summoned(self.built, with_grads=False):
            out = {f"{clean(n)}/param": full(p) for n, p in self.built.wrapped.named_parameters()}
        out = {key: out[key] for key in (f"{name}/param" for name in self.start)}
        states = get_optimizer_state_dict(self.built.wrapped, self.mars, options=_options(full_state_dict=True))
        for name, state in states["state"].items():
            out |= {f"{clean(name)}/{key}": torch.as_tensor(t).double().clone() for key, t in state.items()}
        return out


def built_as(case: SaveCase, net: nn.Module) -> Built:
    if case.engine == "one":
        return Built(net, net, 0, 1, {"type": type(net).__name__})
    return BUILDERS[case.engine](net, **case.options)


def mars_for(case: SaveCase, model: nn.Module, wrong: dict[str, Any]) -> Any:
    import mars_dist

    named = list(model.named_parameters())
    settings = {**BASE, **case.params, **wrong}
    if case.options.get("original") is False:  # one flat tensor: there is no second group
        return mars_dist.MARS(named, **settings)
    groups: list[dict[str, Any]] = [{"params": [(n, p) for n, p in named if not clean(n).startswith(SECOND)]}]
    groups.append({"params": [(n, p) for n, p in named if clean(n).startswith(SECOND)], **({} if wrong else OF_SECOND)})
    return mars_dist.MARS(groups, **settings)


# ------------------------------------------------------------------------------------------------------------- ways


def _options(**given: Any) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(**given)


def save_plain(run: Training, folder: Path) -> None:
    """A file per rank, written and read as torch's documentation shows."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = run.built.wrapped
    if run.case.engine == "fsdp1":
        values: Any = get_model_state_dict(model, options=_options(full_state_dict=True))
    else:
        values = model.state_dict()
    torch.save({"model": values, "optimizer": run.mars.state_dict()}, folder / f"plain{rank()}.pt")


def load_plain(run: Training, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    saved = torch.load(folder / f"plain{rank()}.pt", weights_only=True)
    if run.case.engine == "fsdp1":
        set_model_state_dict(run.built.wrapped, saved["model"], options=_options(full_state_dict=True))
    else:
        run.built.wrapped.load_state_dict(saved["model"])
    run.mars.load_state_dict(saved["optimizer"])


def load_plain_of_the_first(run: Training, folder: Path) -> None:
    """What DDP saved on rank 0, on any number of ranks."""
    saved = torch.load(folder / "plain0.pt", weights_only=True)
    values = {clean(name): value for name, value in saved["model"].items()}
    getattr(run.built.wrapped, "module", run.built.wrapped).load_state_dict(values)
    run.mars.load_state_dict(saved["optimizer"])


def save_sharded(run: Training, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(run.built.wrapped, run.mars)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "dcp")


def save_sharded_later(run: Training, folder: Path) -> None:
    """In the background, while the training goes on: what counts is what was there at the call."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(run.built.wrapped, run.mars)
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None  # the training uses the other one
    saved = {"model": model, "optimizer": optimizer}
    run.under_way = dcp.async_save(saved, checkpoint_id=folder / "dcp", process_group=group)


def load_sharded(run: Training, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = get_state_dict(run.built.wrapped, run.mars)
    saved = {"model": model, "optimizer": optimizer}
    dcp.load(saved, checkpoint_id=folder / "dcp")
    set_state_dict(run.built.wrapped, run.mars, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


def save_full(run: Training, folder: Path) -> None:
    """Whole, on rank 0 alone. FSDP1 on CPUs keeps views of one buffer where it is told to offload (AdamW too)."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    options = _options(full_state_dict=True, cpu_offload=run.case.engine != "fsdp1")
    model = get_model_state_dict(run.built.wrapped, options=options)
    optimizer = get_optimizer_state_dict(run.built.wrapped, run.mars, options=options)
    if rank() == 0:
        torch.save({"model": model, "optimizer": optimizer}, folder / "full.pt")


def load_full(run: Training, folder: Path) -> None:
    """Read by rank 0 alone, which hands it on; FSDP1 wants it on every rank."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    broadcast = dist.is_initialized() and run.case.engine != "fsdp1"
    saved: dict[str, Any] = {"model": {}, "optimizer": {}}
    if rank() == 0 or not broadcast:
        saved = torch.load(folder / "full.pt", weights_only=True)
    options = _options(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(run.built.wrapped, saved["model"], options=options)
    set_optimizer_state_dict(run.built.wrapped, run.mars, saved["optimizer"], options=options)


def _of_fsdp1(run: Training, kind: str) -> Any:
    from torch.distributed import fsdp

    if kind == "full":
        configs: tuple[Any, ...] = (
            fsdp.FullStateDictConfig(offload_to_cpu=False),
            fsdp.FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
        )
        which = fsdp.StateDictType.FULL_STATE_DICT
    else:
        configs = (fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig())
        which = fsdp.StateDictType.SHARDED_STATE_DICT
    return fsdp.FullyShardedDataParallel.state_dict_type(run.built.wrapped, which, *configs)


def save_fsdp1(kind: str) -> Callable[[Training, Path], None]:
    def save(run: Training, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        with _of_fsdp1(run, kind):
            values = run.built.wrapped.state_dict()
            states = FSDP.optim_state_dict(run.built.wrapped, run.mars)
        if kind == "full":
            torch.save({"model": values, "optimizer": states}, folder / f"fsdp{rank()}.pt")
        else:
            dcp.save({"model": values, "optimizer": states}, checkpoint_id=folder / "fsdp")

    return save


def load_fsdp1(kind: str) -> Callable[[Training, Path], None]:
    def load(run: Training, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        model = run.built.wrapped
        if kind == "sharded":
            get_optimizer_state_dict(model, run.mars)  # creates the states, without which dcp.load reads none
        with _of_fsdp1(run, kind):
            if kind == "full":
                saved = torch.load(folder / f"fsdp{rank()}.pt", weights_only=True)
            else:
                saved = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, run.mars)}
                dcp.load(saved, checkpoint_id=folder / "fsdp")
            model.load_state_dict(saved["model"])
            run.mars.load_state_dict(FSDP.optim_state_dict_to_load(model, run.mars, saved["optimizer"]))

    return load


WAYS: dict[str, tuple[Callable[[Training, Path], None], Callable[[Training, Path], None]]] = {
    "plain": (save_plain, load_plain),
    "plain0": (save_plain, load_plain_of_the_first),
    "sharded": (save_sharded, load_sharded),
    "sharded-later": (save_sharded_later, load_sharded),
    "full": (save_full, load_full),
    "fsdp-full": (save_fsdp1("full"), load_fsdp1("full")),
    "fsdp-sharded": (save_fsdp1("sharded"), load_fsdp1("sharded")),
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def wait() -> None:
    if dist.is_initialized():
        dist.barrier()


# ------------------------------------------------------------------------------------------------------------- cases


def save_and_continue(case: SaveCase, folder: str) -> dict[str, Any]:
    """All of it with as many ranks as there are."""
    save, load = WAYS[case.way]
    first = Training(case, first=True)
    first.train(SAVED)
    held, position = first.pieces(), copy.deepcopy(first.position())
    save(first, Path(folder))
    wait()
    kept, saved = first.pieces(), as_saved(held)
    first.train(END)
    if first.under_way is not None:
        first.under_way.result(60)
        wait()
    second = Training(case, first=False)
    before = second.pieces()
    load(second, Path(folder))
    loaded = second.pieces()
    second.done = SAVED
    second.train(END, position)
    result = {
        "saving changed": differences(held, kept),
        "looked ahead": any(key.endswith("/next_prev_grad") for key in held),
        "loaded": differences(saved, without_fillers(case, saved, loaded)),
        "continued": differences(first.pieces(), without_fillers(case, saved, second.pieces())),
        "was other": different_values(saved, before),
        "went on": different_values(saved, second.pieces()),
        "keys": sorted({key.split("/")[1] for key in saved}),
        "steps": sorted({float(t) for key, t in saved.items() if key.endswith("/step")}),
        "elements": sum(t.numel() for key, t in saved.items() if key.endswith("/exp_avg")),
        **facts(second),
    }
    wait()
    return result


def facts(run: Training) -> dict[str, Any]:
    return {
        "type": type(run.built.wrapped).__name__,
        "facts": run.built.facts,
        "engines": run.mars.engines(),
        "rule_counts": run.mars.rule_counts(),
        "groups": [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in run.mars.param_groups],
    }


def as_saved(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a new optimizer is to find: after a step that was left out, h of the batch that comes is in its place."""
    out = {key: t for key, t in held.items() if not key.endswith("/next_prev_grad")}
    return out | {key.replace("/next_", "/"): t for key, t in held.items() if key.endswith("/next_prev_grad")}


def without_fillers(case: SaveCase, saved: dict[str, Tensor], loaded: dict[str, Tensor]) -> dict[str, Tensor]:
    """FSDP1 with original parameters loads the same states for all tensors of a unit, which no rule reads."""
    if case.engine != "fsdp1" or case.options.get("original") is False:
        return loaded
    return {key: t for key, t in loaded.items() if key in saved}


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """What is not equal bit by bit, or not in both."""
    out = [f"{key}: only in one" for key in sorted(a.keys() ^ b.keys())]
    for key in sorted(a.keys() & b.keys()):
        if a[key].dtype != b[key].dtype or a[key].shape != b[key].shape:
            out.append(f"{key}: {a[key].dtype} {tuple(a[key].shape)}, {b[key].dtype} {tuple(b[key].shape)}")
        elif not torch.equal(a[key], b[key]):
            out.append(f"{key}: {(a[key].double() - b[key].double()).abs().max().item():.3g}")
    return out


def different_values(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether every tensor of values has moved."""
    names = [key for key in a if re.search("/param$", key) and a[key].numel()]
    return all(not torch.equal(a[key], b[key]) for key in names)


# ------------------------------------------------------------------------------------------------- other world sizes


def save_only(case: SaveCase, folder: str) -> dict[str, Any]:
    """Train and save; what was saved, whole."""
    run = Training(case, first=True)
    run.train(SAVED)
    WAYS[case.way][0](run, Path(folder))
    wait()
    return {"whole": run.whole(), "position": run.position(), **facts(run)}


def load_and_go_on(case: SaveCase, folder: str, position: Any) -> dict[str, Any]:
    """What was loaded, whole, and what came of it."""
    run = Training(case, first=False)
    WAYS[case.way][1](run, Path(folder))
    loaded = run.whole()
    run.done = SAVED
    run.train(END, position)
    return {"whole": loaded, "end": run.whole(), **facts(run)}


def undisturbed(case: SaveCase) -> dict[str, Tensor]:
    run = Training(case, first=True)
    run.train(END)
    return run.whole()
