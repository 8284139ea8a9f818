"""Model and optimizer of one process, or of ranks that all hold the same, as tensors by parameter name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mars_dist.checkpoint.tensors import Chunk, Reader

VALUE = "param"  # beside "exp_avg", "prev_grad", ...
COMPILED = "_orig_mod."


def chunks(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Chunk]:
    """All values and states, whole: ``transformer.wte.weight/param``, ``transformer.wte.weight/exp_avg``, ..."""
    names = names_of(model)
    for p, name in names.items():
        yield _whole(f"{name}/{VALUE}", p.detach())
    saved = optimizer.state_dict()
    for i, name in enumerate(_order(optimizer, names)):
        for key, value in saved["state"].get(i, {}).items():
            yield _whole(f"{name}/{key}", value.detach())


def settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The rest of the optimizer's state dict, with names in the place of numbers; JSON values."""
    rest = {key: value for key, value in optimizer.state_dict().items() if key != "state"}
    order = _order(optimizer, names_of(model))
    rest["param_groups"] = [group | {"params": [order[i] for i in group["params"]]} for group in rest["param_groups"]]
    return rest


@torch.no_grad()
def load(model: nn.Module, optimizer: torch.optim.Optimizer, reader: Reader, settings: dict[str, Any]) -> None:
    """Values and states as they were saved, by whatever number of ranks.

    Raises:
        ValueError: for a tensor that is missing or of another shape.
    """
    names = names_of(model)
    states: dict[str, dict[str, str]] = {name: {} for name in names.values()}
    for tensor in reader.names():
        name, _, key = tensor.rpartition("/")
        if name in states:
            states[name][key] = tensor
    for p, name in names.items():
        shape = reader.shape(f"{name}/{VALUE}")
        if shape != tuple(p.shape):
            raise ValueError(f"{name} has the shape {list(p.shape)} here and {list(shape)} in {reader.folder}")
    order = _order(optimizer, names)
    number = {name: i for i, name in enumerate(order)}
    groups = [group | {"params": [number[name] for name in group["params"]]} for group in settings["param_groups"]]
    devices = {name: p.device for p, name in names.items()}
    state = {
        number[name]: {key: _read(reader, tensor, key, devices[name]) for key, tensor in keys.items() if key != VALUE}
        for name, keys in states.items()
        if name in number and keys.keys() != {VALUE}
    }
    optimizer.load_state_dict({**settings, "state": state, "param_groups": groups})
    for p, name in names.items():
        p.copy_(reader.whole(f"{name}/{VALUE}"))


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    return {p: name.replace(COMPILED, "") for name, p in model.named_parameters()}


def _order(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> list[str]:
    """The names as a state dict numbers them."""
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


def _whole(name: str, value: torch.Tensor) -> Chunk:
    return Chunk(name, tuple(value.shape), 0, value)


def _read(reader: Reader, tensor: str, key: str, device: torch.device) -> torch.Tensor:
    """On the device at once, for the ranks of a machine share its memory; counters stay on the CPU."""
    value = reader.whole(tensor)
    return value if key == "step" else value.to(device)
