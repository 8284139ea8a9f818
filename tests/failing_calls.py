"""The n-th call to the system on a folder fails, or is the last thing that a process does."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

NAMES = ["open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir"]


def changes(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call, or what is opened by it, changes anything."""
    if name == "open":
        return bool(args[0] & (os.O_WRONLY | os.O_RDWR))
    return name != "io.open" or "w" in args[0]


class Killed(BaseException):
    """In the place of a signal: nothing is tidied up after it but what ``finally`` does."""


class Failing:
    """While entered, call number ``at`` (from 0) on files in ``folder`` raises, and with ``for_ever`` all later ones
    that would change something: a full or read-only disk can be read.

    Attributes:
        calls: the names of the calls that were made, the failing ones included.
        paths: on what, from the folder.
    """

    def __init__(self, folder: Path, at: int, error: BaseException, for_ever: bool) -> None:
        self.folder, self.at, self.error, self.for_ever = str(folder), at, error, for_ever
        self.calls: list[str] = []
        self.paths: list[str] = []
        self.readlink = os.readlink

    def here(self, path: Any, directory: int | None) -> str | None:
        """The path of a file in the folder; None of another one."""
        try:
            if isinstance(path, int):
                path, directory = self.readlink(f"/proc/self/fd/{path}"), None
            if directory is not None:
                path = os.path.join(self.readlink(f"/proc/self/fd/{directory}"), os.fspath(path))
        except OSError:
            return None
        path = os.path.abspath(path)
        return os.path.relpath(path, self.folder) if path.startswith(self.folder) else None

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Any, *args: Any, **kwargs: Any) -> Any:
            if (relative := self.here(path, kwargs.get("dir_fd"))) is not None:
                self.paths.append(relative)
                number = len(self.calls)
                self.calls.append(name)
                if number == self.at or (self.for_ever and number > self.at and changes(name, args)):
                    raise self.error
            return call(path, *args, **kwargs)

        return checked

    def __enter__(self) -> Failing:
        self.patches = [mock.patch.object(os, name, self.wrapped(name, getattr(os, name))) for name in NAMES]
        self.patches.append(mock.patch.object(io, "open", self.wrapped("io.open", io.open)))
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()

    @property
    def hit(self) -> bool:
        return len(self.calls) > self.at
