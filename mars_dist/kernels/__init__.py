"""The arithmetic of one step on lists of local tensors. ``eager`` is the specification that other kernels must equal."""

from mars_dist.kernels.eager import Block, Hyper, move, squared_norms, update

__all__ = ["Block", "Hyper", "move", "squared_norms", "update"]
