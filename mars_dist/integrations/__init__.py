"""Glue to other packages. The only files that know DeepSpeed, Accelerate or transformers by name."""
