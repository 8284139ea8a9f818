"""Test-only: Accelerate's FSDP1, FSDP2 and DeepSpeed paths on CPUs over gloo.

On a CPU Accelerate 1.15 runs DDP where FSDP was asked for (``AcceleratorState`` turns only accelerators into FSDP),
and leaves DeepSpeed's processes to themselves (it finds no backend). ``install()`` changes both in this process;
everything after that decision is Accelerate's own code. As a script it installs itself and runs another one::

    accelerate launch --config_file launch/accelerate/fsdp2_8.yaml --num_processes 2 \
        tests/cpu_fsdp.py examples/gpt2_accelerate.py --steps 3
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from typing import Any

MARK = "_tests_cpu_fsdp"


def install() -> None:
    """Idempotent.

    FSDP needs ACCELERATE_USE_CPU=true or ``Accelerator(cpu=True)``; DeepSpeed must have neither: either turns it off.
    """
    import torch
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    if hasattr(AcceleratorState, MARK):
        return
    state_init, partial_init = AcceleratorState.__init__, PartialState.__init__

    @functools.wraps(state_init)
    def new_state(self: Any, *args: Any, **kwargs: Any) -> None:
        state_init(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        # The lines that accelerators get (state.py, the branch of MULTI_GPU).
        self.distributed_type = DistributedType.FSDP
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = plugin
        self.device = torch.device("cpu")  # not "cpu:0", which FSDP1 takes for another device
        PartialState._shared_state |= {"distributed_type": DistributedType.FSDP, "device": self.device}

    @functools.wraps(partial_init)
    def new_partial(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not cpu and not torch.cuda.is_available():
            import deepspeed

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
            kwargs.setdefault("backend", "gloo")
        partial_init(self, cpu, **kwargs)

    AcceleratorState.__init__ = new_state
    PartialState.__init__ = new_partial
    setattr(AcceleratorState, MARK, (state_init, partial_init))


def remove() -> None:
    """Undo ``install()``."""
    from accelerate.state import AcceleratorState, PartialState

    if hasattr(AcceleratorState, MARK):
        AcceleratorState.__init__, PartialState.__init__ = getattr(AcceleratorState, MARK)
        delattr(AcceleratorState, MARK)


def reset() -> None:
    """Forget the last Accelerator and what it and its launcher left in the environment: the next one starts anew."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            del os.environ[name]


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
