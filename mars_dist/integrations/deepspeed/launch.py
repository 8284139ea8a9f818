"""What DeepSpeed needs to be told before it starts: the device, the ranks, and on a CPU which op not to build.

python -m mars_dist.integrations.deepspeed.launch --batch 16

prints the device (for DS_ACCELERATOR), the number of ranks and the `deepspeed` launcher's arguments.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

CPU_RANKS = 2  # two local ranks even on one core: the point is to run sharded


def use_gpu() -> bool:
    """GPUs are used when torch can, unless DS_ACCELERATOR asks for another device."""
    return os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and torch.cuda.is_available()


def prepare_deepspeed(run_dir: Path) -> None:
    """Call before `import deepspeed` in every rank. Does nothing where there is a GPU, except the build folder."""
    # Extensions are built for this run alone: a build killed half-way leaves a lock in the shared folder on which
    # every later start waits without a word.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(run_dir.resolve() / "torch_extensions"))
    if use_gpu():
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    # One machine, so gloo can talk over loopback; it need not resolve the machine's name, which may not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", CPU_RANKS)))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))

    import deepspeed.ops

    # `init_distributed` would compile this op on a CPU (minutes); gloo does its work without it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def destroy_groups() -> None:
    """``destroy_process_group``, by DeepSpeed where it runs: it keeps a copy of the world, which it then lets go."""
    comm = sys.modules.get("deepspeed.comm")
    if comm is not None and comm.is_initialized():
        comm.destroy_process_group()
    else:
        torch.distributed.destroy_process_group()


def initialize(**arguments: Any) -> Any:
    """``deepspeed.initialize``, imported when it is called."""
    import deepspeed

    return deepspeed.initialize(**arguments)


def whole_weights(folder: Path, tag: str, trusted: bool = False) -> dict[str, torch.Tensor]:
    """The parameters by name, in float32, of a ZeRO checkpoint. DeepSpeed unpickles its files: they are checked first.

    Raises:
        UntrustedCheckpoint: when they do more than checkpoints need; with ``trusted`` nothing is checked.
    """
    from mars_dist.integrations.deepspeed.saved import check_whole

    check_whole(folder, tag, trusted)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag))


def launcher_arguments(batch: int) -> list[str]:
    """Arguments of the `deepspeed` launcher: as many local ranks as there are GPUs (2 on a CPU), and a free port.

    The number of ranks must divide the global batch, so that every machine trains on the same batches.
    """
    found = torch.cuda.device_count() if use_gpu() else CPU_RANKS
    ranks = max(n for n in range(1, found + 1) if batch % n == 0)
    if ranks < found:
        print(f"{found} ranks possible, {ranks} used: the batch of {batch} must divide evenly", file=sys.stderr)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if use_gpu() and visible:  # --num_gpus would take the first GPUs of the machine instead of these
        where = ["--include", "localhost:" + ",".join(visible.split(",")[:ranks])]
    else:
        where = ["--num_gpus", str(ranks)]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return [*where, "--master_port", str(port)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="print device, number of ranks and deepspeed arguments to use here")
    parser.add_argument("--batch", type=int, required=True, help="sequences of the global batch: ranks divide it")
    arguments = launcher_arguments(parser.parse_args().batch)
    where = arguments[1]  # "localhost:0,1" or a number
    ranks = where.count(",") + 1 if ":" in where else int(where)
    print("cuda" if use_gpu() else "cpu", ranks, *arguments)
