"""The formulas of MARS on whole or element-wise tensors: torch only, nothing distributed."""
