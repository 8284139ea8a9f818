"""Checkpoints: complete or not there, checked before they are read, and the same for any cut over the ranks."""
