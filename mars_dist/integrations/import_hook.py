"""Run a function on a module as soon as somebody imports it, without importing it ourselves."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """Stands for ``loader`` until the module is executed, then calls back; the module itself keeps the real one.

    A loader is not changed in place: a zip archive, for example, uses one loader for all its modules.
    """

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = loader
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "name"):  # a copy or an unpickled object that is not filled yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        create = getattr(self.loader, "create_module", None)
        return create(spec) if create is not None else None

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        callback = _finder.callbacks.get(self.name)
        if callback is not None:
            callback(module)


class _Finder(importlib.abc.MetaPathFinder):
    """The one documented import hook of mars_dist: leaves finding to the finders after it, calls back after loading."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callback] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        finders = list(sys.meta_path)
        if fullname not in self.callbacks or self not in finders:
            return None
        for finder in finders[finders.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, fullname)
                return spec
        return None


_finder = _Finder()


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` now if ``name`` is imported already, else once it is, and again if it is reloaded.

    An exception of the callback reaches whoever imports the module.
    """
    _finder.callbacks[name] = callback
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if sys.modules.get(name) is not None:
        callback(importlib.import_module(name))  # waits for a thread that is in the middle of importing it


def forget(name: str) -> None:
    """Undo ``when_imported``; the hook itself is removed with its last name."""
    _finder.callbacks.pop(name, None)
    if not _finder.callbacks and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
