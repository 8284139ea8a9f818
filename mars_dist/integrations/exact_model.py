"""What a look-ahead leaves in a model as it was: running statistics, and training or evaluation mode.

Batch norm counts a batch once, in its ordinary pass. A look-ahead runs in the mode that the ordinary passes have, also
where an evaluation before it left the model in evaluation mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mars_dist.versions import missing_hook

OTHER_MODE = (
    "MARS, exact mode: a gradient at the point before was taken with model.training={ahead}, and the passes of the "
    "loop have model.training={present} (or differ in a layer of it): h would be that of another function. Set the "
    "mode of training (model.train(), and layers that stay in evaluation mode) before the loop over ExactMode begins, "
    "and after an evaluation before the next micro-batch is taken."
)


@contextlib.contextmanager
def statistics_kept(model: nn.Module | None) -> Iterator[None]:
    """Running means and variances, and the count of batches, are after it what they were before."""
    found = [] if model is None else list(model.modules())
    modules = [m for m in found if getattr(m, "track_running_stats", False)]
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


Flags = list[bool]  # of the modules of a model


class Modes:
    """Which modules train, as the ordinary passes of a loop have it."""

    def __init__(self, model: nn.Module | None) -> None:
        self.root = None if model is None else without_wrappers(model)
        self._ordinary: Flags | None = None
        self._first: Flags | None = None  # of the look-ahead before the first ordinary pass

    def now(self) -> Flags:
        return [] if self.root is None else [module.training for module in self.root.modules()]

    def handed_out(self) -> Flags:
        """The mode in which a micro-batch is handed out.

        Raises:
            RuntimeError: as ``passed()`` does.
        """
        now = self.now()
        if trains(now):
            if self._first is not None and not trains(self._first):
                raise RuntimeError(OTHER_MODE.format(ahead=False, present=True))
            if self._ordinary is None:
                self._ordinary = now
        return now

    def passed(self, handed_out: Flags) -> None:
        """An ordinary pass is over, whose micro-batch was handed out in the mode ``handed_out``.

        The loop may have called ``model.train()`` since then, or have evaluated already.

        Raises:
            RuntimeError: where a look-ahead had another mode than the passes.
        """
        now = self.now()
        mode = now if trains(now) else handed_out
        if self._first is not None and self._first != mode:
            raise RuntimeError(OTHER_MODE.format(ahead=trains(self._first), present=trains(mode)))
        if self._ordinary is not None and trains(self._ordinary) != trains(mode):
            raise RuntimeError(OTHER_MODE.format(ahead=trains(self._ordinary), present=trains(mode)))
        self._first, self._ordinary = None, mode

    @contextlib.contextmanager
    def of_passes(self) -> Iterator[None]:
        """Around a look-ahead."""
        before = self.now()
        if self._ordinary is None:
            self._first = before
        wanted = before if self._ordinary is None else self._ordinary
        self._set(before, wanted)
        try:
            yield
        finally:
            self._set(wanted, before)

    def _set(self, now: Flags, wanted: Flags) -> None:
        if self.root is None or now == wanted:
            return
        self.root.train(wanted[0])  # a module may do more than note it
        modules = list(self.root.modules())
        if len(modules) == len(wanted):
            for module, flag in zip(modules, wanted, strict=True):
                module.training = flag


def trains(modes: Flags) -> bool:
    return modes[:1] == [True]


def without_wrappers(model: Any) -> nn.Module:
    """The user's own module: DeepSpeed's engine and a compiled or wrapped model have flags of their own."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        inner = getattr(model, "module", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def drop_unsharded_gradients(model: Any) -> None:
    """FSDP2: forget the gradients of micro-batches that were not exchanged yet; ``zero_grad()`` does not reach them.

    Raises:
        RuntimeError: when FSDP2 does not look as in the tested releases of torch.
    """
    for module in model.modules():
        if not hasattr(module, "set_requires_gradient_sync"):
            continue
        try:
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            groups = [state._fsdp_param_group] if groups is None else groups
            for parameter in [p for group in groups if group is not None for p in group.fsdp_params]:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        except AttributeError as error:
            what = "a batch in exact mode cannot be left before its last micro-batch"
            raise RuntimeError(f"MARS: {missing_hook('torch', [f'FSDP2: {error}'], what)}") from None
