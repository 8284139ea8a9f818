"""Run a function on a module as soon as somebody imports it, without importing it ourselves."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """The one documented import hook of mars_dist: leaves finding to the others, calls back after loading."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callback] = {}
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.callbacks or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            callback = self.callbacks.get(fullname)
            if callback is not None:
                callback(module)

        loader: Any = spec.loader
        loader.exec_module = exec_module  # this spec's own loader object: nobody else sees the change
        return spec


_finder = _Finder()


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` now if ``name`` is imported already, else once it is."""
    _finder.callbacks[name] = callback
    if name in sys.modules:
        callback(sys.modules[name])
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget(name: str) -> None:
    """Undo ``when_imported``; the hook itself is removed with its last name."""
    _finder.callbacks.pop(name, None)
    if not _finder.callbacks and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
