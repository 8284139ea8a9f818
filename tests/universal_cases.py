"""What runs on the ranks in test_universal.py: save, convert, load on another number of ranks, and train on.

One pool serves all world sizes: ``as_world`` lets its first ranks be a world of their own. States are gathered whole,
by name, through MARS's own table of pieces, which the trained parameters confirm against one process.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import nets, zero_cases
from tests.zero_cases import LR, ZeroCase
from tests.zero_more_cases import Run

SAVED, END = 4, 9  # steps: when it is saved, and when the training ends
TAG = "at4"
UNIVERSAL = {"checkpoint": {"load_universal": True}}
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 7}}}

# Groups that differ in more than the tests of ZeRO need.
SECOND = {"lr": 5e-3, "lr_1d": 1e-3, "weight_decay": 0.2, "betas": (0.8, 0.9), "gamma": 0.1, "clip": 0.3}


class Statistics(nets.Net):
    """Frozen: a matrix and a vector, which are not as they are built; and buffers that move, one of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(11))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        for p in (self.narrow.weight, self.linear.bias):
            p.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.add_(0.25)  # the same on every rank
                self.seen.add_(1)
        x = self.norm(torch.tanh(self.linear(self.embedding(tokens)))) + self.mean * 0.01
        x = x + torch.tanh(self.narrow(x)) @ self.gain + self.shift
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


nets.NETS |= {"statistics": Statistics}  # type: ignore[dict-item]


def as_world(size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function`` on the first ``size`` ranks of the pool, which are the whole world to it. None on the others."""
    import deepspeed
    from deepspeed.comm import comm

    rank, whole = dist.get_rank(), dist.get_world_size()
    path = [""]
    if rank == 0:
        path = [os.path.join(os.path.dirname(os.environ["HF_HOME"]), f"world-{os.urandom(8).hex()}")]
    dist.broadcast_object_list(path)
    dist.barrier()
    _leave(deepspeed, comm)
    try:
        if rank < size:
            _enter(path[0], rank, size)
            return function(*args)
        return None
    except BaseException:
        traceback.print_exc()  # seen even where another rank waits until its time is over
        raise
    finally:
        if dist.is_initialized():
            _leave(deepspeed, comm)
        _enter(path[0] + "-whole", rank, whole)


def _leave(deepspeed: Any, comm: Any) -> None:
    if comm.cdb is not None:
        with contextlib.suppress(Exception):
            deepspeed.comm.destroy_process_group()
        comm.cdb = None
    if dist.is_initialized():
        dist.destroy_process_group()


def _enter(path: str, rank: int, size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    limit = datetime.timedelta(seconds=60.0)
    dist.init_process_group("gloo", f"file://{path}", limit, rank=rank, world_size=size)
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    # ZeRO-3 numbers a process's parameters and modules, and compares the numbers over the ranks, which differ by now.
    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0


# -------------------------------------------------------------------------------------------------------- trainings


def groups(net: nn.Module, construct: str) -> Any:
    """What MARS is given: all parameters, or two groups that differ and mix matrices and vectors."""
    if construct != "two":
        return list(net.parameters())
    named = {name: p for name, p in net.named_parameters()}
    first, second = zero_cases.group_names(net)
    return [{"params": [named[n] for n in first]}, {"params": [named[n] for n in second], **SECOND}]


class Training(Run):
    """An engine under ZeRO and its loop, in exact mode through ExactMode."""

    def __init__(self, case: ZeroCase) -> None:
        self.two = case.construct == "two"
        ordinary, zero_cases.user_groups = zero_cases.user_groups, lambda net: groups(net, "two")
        json = {**case.__dict__, "construct": "groups" if self.two else case.construct}
        try:
            super().__init__(ZeroCase(**json))
        finally:
            zero_cases.user_groups = ordinary
        self.exact_position: dict[str, Any] | None = None

    def loop(self, first: int, last: int) -> None:
        if self.mars.settings.is_approx:
            self.train(first, last)
            return
        from mars_dist.exact import ExactMode

        def mine(step: int) -> tuple[Tensor, Tensor]:
            tokens, targets = nets.batch(step)
            rows = torch.arange(len(tokens)).view(dist.get_world_size(), -1)[dist.get_rank()]
            return tokens[rows], targets[rows]

        def gradient(micro_batch: tuple[Tensor, Tensor]) -> None:
            self.engine.backward(self.engine(*micro_batch))
            self.engine.step()

        start = self.exact_position["handed_out"] if self.exact_position else 0
        exact = ExactMode(self.engine, [mine(step) for step in range(start, END)], gradient)
        if self.exact_position:
            exact.load_state_dict(self.exact_position)
        self.seen_lr.append([])
        self.update = first
        for batch in exact:
            for micro_batch in batch:
                gradient(micro_batch)
            first += 1
            if first == last:
                self.exact_position = exact.state_dict()
                break

    def whole_states(self) -> dict[str, dict[str, Tensor]]:
        """Every state by the model's name of the parameter, in its own precision; those its own rule uses."""
        from mars_dist.integrations.deepspeed.universal_load import _flats
        from mars_dist.states import needed
        from mars_dist.step import rule_of

        names = {id(p): n for n, p in self.net.named_parameters()}
        tables = self.mars._tables
        pieces: list[tuple[str, str, int, tuple[int, ...], Tensor]] = []
        wrapper = self.engine.optimizer
        with _flats(wrapper):
            for group in self.mars.param_groups:
                by = {name: names[id(ref())] for name, ref in tables.originals[group["mars_group"]]}
                for flat in group["params"]:
                    state = self.mars.state[flat]
                    layout = tables.layout(flat) if tables.is_seen(flat) else tables.attached(flat)
                    for s in layout.segments:
                        rule = rule_of(s, group, self.mars.settings)
                        keys = ["step", *needed([rule], group["amsgrad"], bool(group["one_state"]))]
                        keys += ["next_prev_grad"] * ("next_prev_grad" in state and "prev_grad" in keys)
                        for key in keys:
                            value = state[key]
                            if key != "step":
                                value = value.flatten()[s.offset : s.offset + s.numel]
                            pieces.append((by[s.name], key, s.start, s.shape, value.clone().cpu()))
                        master = flat.detach().flatten()[s.offset : s.offset + s.numel].clone().cpu()
                        pieces.append((by[s.name], "master", s.start, s.shape, master))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, pieces)
        found: dict[tuple[str, str], dict[int, Tensor]] = {}
        shapes = {}
        for name, key, start, shape, value in (piece for rank in everyone for piece in rank):
            shapes[name] = shape
            if key == "step":
                before = found.setdefault((name, key), {}).setdefault(0, value)
                assert torch.equal(before, value), (name, before, value)
            elif value.numel():
                found.setdefault((name, key), {})[start] = value
        out: dict[str, dict[str, Tensor]] = {}
        for (name, key), parts in found.items():
            whole = torch.cat([t.reshape(-1) for _, t in sorted(parts.items())])
            out.setdefault(name, {})[key] = whole if key == "step" else whole.view(shapes[name])
        return out

    def facts(self) -> dict[str, Any]:
        """What must be as it was saved, beside the states."""
        plain = ("lr", "lr_1d_ratio", "weight_decay", "weight_decay_1d", "betas", "betas_1d", "gamma", "clip", "eps")
        by_group = [
            (sorted(n for n, p in self.net.named_parameters() if any(p is q for q in originals)), values)
            for originals, values in (
                (
                    self.mars._tables.constructed_with(g["mars_group"]),
                    {**{k: g[k] for k in plain}, "one_state": g["one_state"], "initial_lr": g.get("initial_lr")},
                )
                for g in self.mars.param_groups
            )
        ]
        schedule = self.engine.lr_scheduler
        return {
            "groups": sorted(by_group, key=lambda pair: pair[0]),
            "global_steps": self.engine.global_steps,
            "global_samples": self.engine.global_samples,
            "schedule": None if schedule is None else schedule.state_dict(),
            "settings": self.mars.settings.to_dict(),
            "buffers": {name: b.tolist() for name, b in self.net.named_buffers()},
        }

    def end(self) -> dict[str, Any]:
        steps = sorted({float(state["step"]) for state in self.mars.state.values()})
        # The states' own memory: one counter for each
        counters = len({state["step"].data_ptr() for state in self.mars.state.values()})
        states, facts = self.whole_states(), self.facts()
        result = self.close()
        kept = ("end", "rule_counts", "engines", "wrapper", "messages")
        return {
            **{key: result[key] for key in kept},
            "states": states,
            "facts": facts,
            "steps": steps,
            "own_counters": counters == len(states and steps and self.mars.state),
            "flats": len(self.mars.state),
            "stage": self.case.stage,
        }


def save(case: ZeroCase, folder: str, goes_on: bool) -> dict[str, Any]:
    """Train, save in ``folder``; then, where ``goes_on``, train to the end. The states are those of the save."""
    training = Training(case)
    if case.net == "statistics":
        for name, p in training.net.named_parameters():
            if not p.requires_grad:
                _fill(p, 0.5 if name.startswith("narrow") else -0.25)
    training.loop(0, SAVED)
    training.engine.save_checkpoint(folder, tag=TAG, client_state={"exact_position": training.exact_position})
    out = {"saved": training.whole_states(), "saved_facts": training.facts()}
    if goes_on:
        training.loop(SAVED, END)
    return {**training.end(), **out}


def _fill(p: Tensor, value: float) -> None:
    import deepspeed

    if not hasattr(p, "ds_numel"):
        p.data.fill_(value)
        return
    with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
        p.fill_(value)


def load(case: ZeroCase, folder: str, tag: str | None = None, last: int = END) -> dict[str, Any]:
    """Load the universal checkpoint in an engine of ``case``, and train on to ``last``."""
    training = Training(ZeroCase(**{**case.__dict__, "extra": {**case.extra, **UNIVERSAL}}))
    path, client = training.engine.load_checkpoint(folder, tag=tag)
    assert path is not None
    training.exact_position = client["exact_position"]
    out = {"loaded": training.whole_states(), "loaded_facts": training.facts()}
    keys = {",".join(sorted(state)) for state in training.mars.state.values()}
    training.loop(SAVED, last)
    return {**training.end(), **out, "keys": sorted(keys)}


def load_fails(case: ZeroCase, folder: str, extra: dict[str, Any], tag: str | None = None) -> tuple[str, bool]:
    """The error of ``load_checkpoint`` on this rank, and whether everything is as it was before."""
    training = Training(ZeroCase(**{**case.__dict__, "extra": {**case.extra, **extra}}))
    training.loop(0, 2)
    before, facts = training.whole_states(), training.facts()
    try:
        training.engine.load_checkpoint(folder, tag=tag)
        return "", False
    except (RuntimeError, ValueError, OSError) as error:
        after = training.whole_states()
        same = all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n])
        return f"{type(error).__name__}: {error}", same and before.keys() == after.keys() and facts == training.facts()
    finally:
        training.close()


def on_one_process(case: ZeroCase) -> dict[str, Tensor]:
    """The same training without a break, without DeepSpeed, on the whole batches: parameters by name."""
    import mars_dist
    from mars_dist.exact import ExactMode

    net = nets.build(case.net)
    if case.net == "statistics":
        net.narrow.weight.data.fill_(0.5)  # type: ignore[union-attr,operator]
        net.linear.bias.data.fill_(-0.25)  # type: ignore[union-attr,operator]
    mars = mars_dist.MARS(groups(net, case.construct), **{**LR, **case.params})
    schedule = None
    if "scheduler" in case.extra:
        from deepspeed.runtime.lr_schedules import WarmupLR

        schedule = WarmupLR(mars, **case.extra["scheduler"]["params"])

    def gradient(data: tuple[Tensor, Tensor]) -> None:
        net(*data).backward()

    data = [nets.batch(step) for step in range(END)]
    batches: Any = [[one] for one in data]
    if not mars.settings.is_approx:
        batches = ExactMode(mars, data, gradient)
    for batch in batches:
        for micro_batch in batch:
            gradient(micro_batch)
        if case.clip:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        mars.step()
        mars.zero_grad()
        if schedule is not None:
            schedule.step()
    return {name: p.detach().double() for name, p in net.named_parameters()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def convert(source: str, out: str, **keywords: Any) -> dict[str, Any]:
    """On rank 0 of the pool; the others do nothing."""
    if dist.get_rank() != 0:
        return {}
    from mars_dist.integrations.deepspeed import universal

    return universal.convert(Path(source), Path(out), **keywords)


def convert_in_a_wrong_order(source: str, out: str) -> None:
    """The fault, planted: the pieces of the ranks are swapped, in what MARS itself puts together."""
    if dist.get_rank() != 0:
        return
    from mars_dist.integrations.deepspeed import universal_source

    right = universal_source.Source.states
    universal_source.Source.states = lambda self, rank, flat: right(self, len(self.files) - 1 - rank, flat)
    try:
        convert(source, out)
    finally:
        universal_source.Source.states = right


def convert_with_stock_tools(source: str, out: str) -> None:
    if dist.get_rank() == 0:
        from mars_dist.integrations.deepspeed import universal

        universal._run_deepspeed(Path(source), Path(out))
