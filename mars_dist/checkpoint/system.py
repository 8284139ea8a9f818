"""Two calls of Linux that Python has no name for. Where a system or a disk lacks one, everything works without it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

HERE = -100  # AT_FDCWD: paths from the working directory
EXCHANGE = 2  # RENAME_EXCHANGE
START = 2  # SYNC_FILE_RANGE_WRITE: begin to write, do not wait


def change_places(a: Path, b: Path) -> bool:
    """Exchange two names at once, so that at no time there is nothing under either; False where that cannot be done."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    return renameat2 is not None and renameat2(HERE, os.fsencode(a), HERE, os.fsencode(b), EXCHANGE) == 0


def start_writing(descriptor: int, begin: int, size: int) -> None:
    """Have the disk begin with these bytes of a file: the fsync at its end then has little left to wait for."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(descriptor, ctypes.c_int64(begin), ctypes.c_int64(size), START)
