"""The arithmetic of one step on lists of local tensors; ``eager`` is what other kernels must equal."""

from mars_dist.kernels.eager import Block, Hyper, Scratch, move, squared_norms, update

__all__ = ["Block", "Hyper", "Scratch", "move", "squared_norms", "update"]
