"""The values and states of an optimizer by parameter name: the same in every engine, for every cut over the ranks.

``transformer.wte.weight/param`` is the value that the optimizer updates (under ZeRO and BF16_Optimizer the float32
master), ``.../exp_avg``, ``.../prev_grad``, ... its states in the parameter's shape, ``.../step`` its counter, without
dimensions. A state is there if the rule of the parameter uses it, whatever else lies in the same flat tensor. What
belongs to the groups is JSON, keyed by parameter name, because engines split, merge and delete groups. Parameters that
do not train, parameters without elements, and buffers are not the optimizer's: they are in ``model.state_dict()``.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from mars_dist.checkpoint.names import NEXT, PREVIOUS, Held, few, groups_in, holders, inner, table
from mars_dist.checkpoint.shares import my_share
from mars_dist.checkpoint.tensors import Chunk
from mars_dist.checkpoint.together import together
from mars_dist.config import GROUP_DEFAULTS, SETTINGS_KEY, Settings
from mars_dist.maths.absent import absent_like
from mars_dist.optimizer import MARS
from mars_dist.sharding.dtensor import local
from mars_dist.states import STEP
from mars_dist.tables import GROUP_ID

logger = logging.getLogger("mars_dist")

VALUE = "param"
GRADIENTS = (PREVIOUS, NEXT)
MOMENTS = ("exp_avg", "exp_avg_sq")
FORMAT = 1
NOT_SAVED = {"params", "param_names", GROUP_ID, SETTINGS_KEY}  # of a group
OF_MARS = {*GROUP_DEFAULTS, "lr_1d_ratio", "one_state_gamma", SETTINGS_KEY}
NOT_COMPARED = {"name"}

# What an integration knows of engines whose models compute with other tensors than the optimizer updates: given the
# optimizer and the model as the caller gave them, a function that brings the model's weights up to date, or None.
# It may raise for what it cannot do: nothing was changed then.
FOLLOWERS: list[Callable[[Any, Any], Callable[[], None] | None]] = []


class Source(Protocol):
    """Whole tensors by name; ``Reader`` of tensors.py is one."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, start: int, stop: int) -> Tensor: ...


# ------------------------------------------------------------------------------------------------ what is there


def chunks_of(optimizer: Any, model: nn.Module, *, once: bool = True) -> Iterator[Chunk]:
    """This rank's pieces of all values and states; what is not copied to the CPU shares memory with the optimizer.

    Collective before the first step; each rank has to call it.

    Args:
        optimizer: MARS or an optimizer of torch's, what an engine made of it, or a DeepSpeed engine.
        model: the model, wrapped or not.
        once: of pieces that several ranks hold (DDP, HSDP, tensor parallelism), each gives an equal share, so that all
            ranks together have each element once. False: each rank gives all that it holds.

    Raises:
        RuntimeError: when the pieces cannot be known, or the states are not in memory (NVMe).
    """
    found = inner(optimizer)
    by_holders: dict[Any, tuple[int, int, list[Chunk]]] = {}
    held = table(optimizer, model)
    for one, (who, number, count) in zip(held, holders(held) if once else [((), 0, 1)] * len(held), strict=True):
        chunks = by_holders.setdefault((who, count), (number, count, []))[2]
        keys = one.keys(one.group, found.settings) if isinstance(found, MARS) else None
        chunks.extend(_chunks(one, found.state.get(one.tensor, {}), keys))
    for number, count, chunks in by_holders.values():
        yield from my_share(chunks, number, count)


def _chunks(one: Held, state: Mapping[str, Any], keys: list[str] | None) -> Iterator[Chunk]:
    s = one.segment
    if not s.numel:
        return
    yield Chunk(f"{one.name}/{VALUE}", s.shape, s.start, _piece(one, one.tensor, VALUE), s.region)
    for key, value in state.items():
        if key == STEP or not isinstance(value, Tensor) or keys is not None and key not in keys:
            continue
        if value.ndim or not one.tensor.ndim:
            yield Chunk(f"{one.name}/{key}", s.shape, s.start, _piece(one, value, key), s.region)
    is_first = s.start == 0 if s.region is None else not any(begin for begin, _ in s.region)
    if is_first and STEP in state:  # one rank says it
        step = torch.as_tensor(state[STEP], dtype=torch.float32).detach().cpu().reshape(())
        yield Chunk(f"{one.name}/{STEP}", (), 0, step)


def _piece(one: Held, value: Tensor, key: str) -> Tensor:
    """The elements of ``one`` in a tensor that is laid out as its parameter's."""
    s, mine = one.segment, local(value).detach()
    if mine.numel() < s.offset + s.numel:
        raise RuntimeError(
            f"{key} of {one.name} is not in memory ({mine.numel()} elements, {s.offset + s.numel} are needed): under "
            "offload to NVMe, or inside FSDP's summon_full_params, states cannot be taken by name. Offload to the CPU, "
            "or save through the engine itself."
        )
    return mine.flatten()[s.offset : s.offset + s.numel]


def settings_of(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """Settings and hyper-parameters as JSON values: for each group its numbers and the names of its parameters.

    The same on every rank. Collective as ``chunks_of``.
    """
    found = inner(optimizer)
    names: dict[int, list[str]] = {}
    values: dict[int, dict[str, Any]] = {}
    for one in table(optimizer, model):
        number = one.group[GROUP_ID]
        names.setdefault(number, []).append(one.name)
        own = _own_group(found, one)
        values[number] = {k: _plain(v) for k, v in own.items() if k not in NOT_SAVED and _is_plain(v)}
    out: dict[str, Any] = {"format": FORMAT, "optimizer": type(found).__name__}
    if isinstance(found, MARS):
        out[SETTINGS_KEY] = found.settings.to_text()
    out["groups"] = [{"names": names[number], "values": values[number]} for number in names]
    return out


def _own_group(optimizer: Optimizer, one: Held) -> Mapping[str, Any]:
    """The group as the optimizer has it."""
    if isinstance(optimizer, MARS):
        return one.group
    return optimizer.param_groups[one.group[GROUP_ID]]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(v) for v in value)
    is_number = isinstance(value, Tensor) and value.numel() == 1
    return is_number or value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


# ---------------------------------------------------------------------------------------------------- loading


@torch.no_grad()
def load_chunks(
    optimizer: Any,
    model: nn.Module,
    reader: Source,
    settings: Mapping[str, Any] | None = None,
    *,
    values: bool = True,
) -> None:
    """Load values and states by parameter name, whatever engine and number of ranks they were saved by.

    Each rank reads its own pieces. All is read and checked before anything is written. What MARS refuses and makes up
    of states (another variant, missing moments, a missing ``prev_grad``) is as in ``MARS.load_state_dict``: the states
    keep their precision, and the numbers of ``settings`` hold, for each parameter those that it was saved with.

    Args:
        optimizer, model: as for ``chunks_of``; under DeepSpeed one of them has to be the engine, where values are
            loaded: the weights that the model computes with follow.
        reader: of the whole tensors.
        settings: what ``settings_of`` gave; None leaves groups and settings as they are.
        values: load the values of the parameters too. False: the states alone.

    Raises:
        CheckpointError (ValueError on one rank): for names, shapes, states or groups that do not fit, with the name of
            what differs; for counters that differ within a flat tensor (ZeRO, FSDP1), which has one. Nothing was
            changed.
        RuntimeError: for an engine whose weights cannot follow.
    """
    found = inner(optimizer)
    held = table(optimizer, model)
    follow = _follower(optimizer, model) if values and any(one.is_copy for one in held) else None
    if getattr(reader, "is_collective", False):  # every rank fails at the same place
        plan = _Plan(found, held, reader, settings, values)
    else:
        with together("loading the states by parameter name (nothing was changed)"):
            plan = _Plan(found, held, reader, settings, values)
    with together("loading the states by parameter name"):
        with _handed(found, held):
            found.load_state_dict(plan.state_dict())
        for one, value in plan.values:
            _put(one, one.tensor, value)
    plan.say()
    if follow is not None:
        follow()


def _follower(optimizer: Any, model: Any) -> Callable[[], None]:
    for ask in FOLLOWERS:
        follow = ask(optimizer, model)
        if follow is not None:
            return follow
    raise RuntimeError(
        "the model computes with copies of the values that the optimizer updates (DeepSpeed), which have to follow "
        "when values are loaded: give the DeepSpeed engine as optimizer or model (with MARS_DIST_REGISTER=0 import "
        "mars_dist.integrations.deepspeed.weights first), or load with values=False."
    )


class _Plan:
    """All that is to be loaded, read and checked."""

    def __init__(
        self,
        optimizer: Optimizer,
        held: list[Held],
        reader: Source,
        settings: Mapping[str, Any] | None,
        with_values: bool,
    ) -> None:
        self._optimizer, self._held, self._reader = optimizer, held, reader
        self._settings = optimizer.settings if isinstance(optimizer, MARS) else None
        self._saved: dict[str, set[str]] = {}
        for name in reader.names():
            parameter, _, key = name.rpartition("/")
            self._saved.setdefault(parameter, set()).add(key)
        self._name = {one.name: _first(self._saved, one) or one.name for one in held}
        self._check_names(with_values)
        self._of_mars = settings is None or SETTINGS_KEY in settings
        self._groups = self._read_groups(settings)
        self.values = [(one, self._read(one, VALUE)) for one in held] if with_values else []
        self._partly: list[str] = []  # without h, in a flat tensor where others have one
        by_tensor: dict[int, list[Held]] = {}
        for one in held:
            by_tensor.setdefault(id(one.tensor), []).append(one)
        self._states = {key: self._state(members) for key, members in by_tensor.items()}

    def say(self) -> None:
        if self._partly and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning(
                "%d tensors come without the gradient of the step before (prev_grad): %s. They take the next step as a "
                "first one.",
                len(self._partly),
                few(self._partly),
            )

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer itself loads: this rank's tensors by number."""
        state, groups, number = {}, [], 0
        for i, group in enumerate(self._optimizer.param_groups):
            numbers = []
            for p in group["params"]:
                if self._states.get(id(p)):
                    state[number] = self._states[id(p)]
                numbers.append(number)
                number += 1
            kept = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            if (
                self._settings is not None and not self._of_mars
            ):  # MARS is told that it gets the state of another optimizer, and derives the rest
                kept = {k: v for k, v in kept.items() if k not in OF_MARS}
            groups.append({**kept, **self._groups.get(_number(self._optimizer, i), {}), "params": numbers})
        return {"state": state, "param_groups": groups}

    # ---- what is checked

    def _check_names(self, with_values: bool) -> None:
        expected = {self._name[one.name]: one for one in self._held}
        missing = [n for n in expected if n not in self._saved or with_values and VALUE not in self._saved[n]]
        strange = [n for n in self._saved if n not in expected and any(self._numel(n, k) for k in self._saved[n])]
        if missing or strange:
            parts = [f"only in this model: {few(missing)}"] * bool(missing)
            parts += [f"only in what is loaded: {few(strange)}"] * bool(strange)
            raise ValueError(f"the parameters that train are not the same: {'; '.join(parts)}")
        for name, one in expected.items():
            for key in sorted(self._saved[name]):
                shape, wanted = tuple(self._reader.shape(f"{name}/{key}")), () if key == STEP else one.segment.shape
                if shape != wanted:
                    raise ValueError(f"{name}/{key} has shape {shape}, and this model needs {wanted}")
                dtype = self._reader.dtype(f"{name}/{key}")
                if key != STEP and not (dtype.is_floating_point or (dtype.is_complex and one.tensor.is_complex())):
                    raise ValueError(f"{name}/{key} is of {dtype}, and {one.tensor.dtype} cannot be made of that")

    def _numel(self, name: str, key: str) -> int:
        return math.prod(self._reader.shape(f"{name}/{key}"))

    def _read_groups(self, settings: Mapping[str, Any] | None) -> dict[int, dict[str, Any]]:
        """The saved numbers of each group of the optimizer, by its number."""
        if settings is None:
            return {}
        groups = groups_in(settings)
        if settings.get("format") != FORMAT:
            raise ValueError(
                f"its settings have format {settings.get('format')!r}, and this mars_dist knows {FORMAT}: load it with "
                "the version that saved it, or a newer one"
            )
        kind = type(self._optimizer).__name__
        if self._settings is None and settings.get("optimizer") != kind:
            raise ValueError(
                f"it was saved by {settings.get('optimizer')}, and this optimizer is {kind}: states of another "
                "optimizer go into MARS only, and only those of the Adam family"
            )
        theirs = settings.get("mars_type")  # of the authors' code
        if self._settings is not None and theirs not in (None, self._settings.mars_type):
            raise ValueError(
                f"it was saved by mars_type={theirs!r}, and this optimizer is {self._settings.mars_type!r}: their "
                "states mean different things"
            )
        of: dict[str, dict[str, Any]] = {n: dict(g["values"]) for g in groups for n in g["names"]}
        out: dict[int, tuple[str, dict[str, Any]]] = {}
        for one in self._held:
            name = _first(of, one)
            if name is None:
                raise ValueError(f"its settings name no group of {one.name}")
            first, numbers = out.setdefault(one.group[GROUP_ID], (name, of[name]))
            keys = (numbers.keys() | of[name].keys()) - NOT_COMPARED
            different = [key for key in sorted(keys) if numbers.get(key) != of[name].get(key)]
            if different:
                key = different[0]
                raise ValueError(
                    f"{first} was saved with {key}={numbers.get(key)} and {name} with {key}={of[name].get(key)}, and "
                    "they are in one parameter group of this optimizer: make its groups as they were"
                )
        text = settings.get(SETTINGS_KEY)
        extra = {}
        if text is not None and self._settings is not None:
            self._settings, extra = Settings.from_text(text), {SETTINGS_KEY: text}
        return {
            number: {k: tuple(v) if isinstance(v, list) else v for k, v in numbers.items()} | extra
            for number, (_, numbers) in out.items()
        }

    # ---- what is read

    def _read(self, one: Held, key: str) -> Tensor:
        """This rank's piece of one tensor. Called for every parameter on every rank, for empty pieces as well."""
        name, s = f"{self._name[one.name]}/{key}", one.segment
        if s.region is None:
            return self._reader.read(name, s.start, s.stop)
        if hasattr(self._reader, "block"):
            return self._reader.block(name, s.region)
        whole = self._reader.read(name, 0, math.prod(s.shape)).view(s.shape)
        return whole[tuple(slice(begin, end) for begin, end in s.region)]

    def _state(self, members: list[Held]) -> dict[str, Any]:
        """The state of one tensor that an engine hands over, out of those of the parameters in it."""
        steps = {
            one.name: float(self._reader.read(f"{self._name[one.name]}/{STEP}", 0, 1))
            for one in members
            if STEP in self._saved[self._name[one.name]]
        }
        used = {one.name: self._used(one, steps.get(one.name, 0.0)) for one in members}
        keys = list(dict.fromkeys(key for one in members for key in used[one.name]))
        if not steps and not keys:
            return {}
        counts = {steps.get(one.name, 0.0) for one in members}
        if len(counts) > 1:
            by_count = [
                f"{count:g} of {few([o.name for o in members if steps.get(o.name, 0.0) == count])}"
                for count in sorted(counts)
            ]
            raise ValueError(
                f"the step counters differ ({'; '.join(by_count)}), and the engine ({members[0].layout.engine}) keeps "
                "these parameters in one flat tensor, which has one counter. Load them into an engine with a state for "
                "each parameter (DDP, FSDP2, FSDP1 with use_orig_params=True), or put them into parameter groups of "
                "their own"
            )
        p = members[0].tensor
        state: dict[str, Any] = {STEP: torch.tensor(counts.pop(), dtype=torch.float32)}
        for key in keys:
            pieces = [(one, self._read(one, key)) for one in members if key in used[one.name]]
            dtype = pieces[0][1].dtype
            for _, piece in pieces:
                dtype = torch.promote_types(dtype, piece.dtype)
            if self._settings is not None and key in GRADIENTS:  # nor lose what this engine's gradients have
                dtype = torch.promote_types(dtype, getattr(p, "grad_dtype", None) or p.dtype)
            empty = absent_like(p, dtype) if key in GRADIENTS else torch.zeros_like(p, dtype=dtype, requires_grad=False)
            for one, piece in pieces:
                _put(one, empty, piece)
            state[key] = empty
        if PREVIOUS in keys and self._settings is not None:
            lacking = [one for one in members if PREVIOUS not in used[one.name]]
            self._partly += [one.name for one in lacking if PREVIOUS in self._keys(one)]
        return state

    def _used(self, one: Held, step: float) -> list[str]:
        """The saved states of ``one`` that its rule uses, in an order that is the same on every rank."""
        saved = sorted(self._saved[self._name[one.name]] - {VALUE, STEP})
        if saved and STEP not in self._saved[self._name[one.name]]:
            raise ValueError(f"{one.name} has {', '.join(saved)} and no {STEP}: how often it was updated is not known")
        if self._settings is None:
            return saved
        keys = self._keys(one)
        missing = [key for key in keys if key in MOMENTS and key not in saved]
        if step and missing:
            raise ValueError(
                f"{one.name} has no {' and no '.join(missing)}, which its rule needs after {step:g} steps: it is the "
                "state of another optimizer, or of another variant"
            )
        return [key for key in saved if key in keys]

    def _keys(self, one: Held) -> list[str]:
        assert self._settings is not None
        return one.keys({**one.group, **self._groups.get(one.group[GROUP_ID], {})}, self._settings)


def _put(one: Held, target: Tensor, piece: Tensor) -> None:
    """Write the elements of ``one`` into a tensor that is laid out as its parameter's."""
    s, mine = one.segment, local(target).detach()
    if not s.numel:
        return
    if mine.numel() == s.numel:
        mine.copy_(piece.reshape(mine.shape))
    else:
        mine.view(-1)[s.offset : s.offset + s.numel].copy_(piece.reshape(-1))


@contextlib.contextmanager
def _handed(optimizer: Optimizer, held: list[Held]) -> Iterator[None]:
    """ZeRO-3 keeps the groups empty between steps; inside they have their flat tensors."""
    empty = {_number(optimizer, i): i for i, group in enumerate(optimizer.param_groups) if not group["params"]}
    for number, i in empty.items():
        theirs = (one.tensor for one in held if one.group[GROUP_ID] == number)
        optimizer.param_groups[i]["params"] = list({id(p): p for p in theirs}.values())
    try:
        yield
    finally:
        for i in empty.values():
            optimizer.param_groups[i]["params"] = []


def _number(optimizer: Optimizer, i: int) -> int:
    """What tables call the group at position ``i``: engines delete groups of MARS's."""
    return int(optimizer.param_groups[i].get(GROUP_ID, i))


def _first(saved: Mapping[str, Any], one: Held) -> str | None:
    """By which of its names a parameter was saved: one that is tied has several."""
    return next((name for name in (one.name, *one.aliases) if name in saved), None)
