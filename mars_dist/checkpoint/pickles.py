"""Reads a pickle without executing it: every name in it is held against ``allowed.py``, and nothing is imported.

A small machine that does what Python's unpickler does to its stack and its memo, with dead objects in the place of
real ones: ``Global`` for a name, ``Made`` for what a call would have made. So a name that was put together from the
memo is seen, and so is one that is only called. What it does not understand, or what ends too early, is damaged.
"""

from __future__ import annotations

import _compat_pickle
import io
import pickletools
from collections.abc import Iterator
from typing import Any, BinaryIO

from mars_dist.checkpoint.allowed import ALLOWED, Global, How


class Damaged(ValueError):
    """A pickle that cannot be read to its end."""


class NotAllowed(ValueError):
    """A pickle that does what no checkpoint needs."""


class Made:
    """In the place of an object: what would have been called, with which arguments, and what was put into it."""

    def __init__(self, of: Any, args: Any = ()) -> None:
        self.of, self.args = of, args
        self.state: Any = None
        self.is_built = False
        self.items: list[Any] = []

    def attributes(self) -> dict[str, Any]:
        """The attributes that its state gives it: of a pair, the second part (``__slots__``) comes over the first."""
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


class Window(io.RawIOBase):
    """Bytes ``start`` to ``stop`` of a file, as a file: no length that is written in it reads beyond."""

    def __init__(self, file: BinaryIO, start: int, stop: int) -> None:
        super().__init__()
        self.file, self.start, self.stop, self.at = file, start, max(start, stop), start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (self.start, self.at, self.stop)[whence]
        self.at = min(max(base + offset, self.start), self.stop)
        return self.at - self.start

    def tell(self) -> int:
        return self.at - self.start

    def read(self, size: int | None = -1) -> bytes:
        left = self.stop - self.at
        self.file.seek(self.at)
        got = self.file.read(left if size is None or size < 0 else min(size, left))
        self.at += len(got)
        return got

    def readinto(self, buffer: Any) -> int:
        got = self.read(len(buffer))
        buffer[: len(got)] = got
        return len(got)

    def readline(self, size: int | None = -1) -> bytes:
        left = self.stop - self.at
        self.file.seek(self.at)
        got = self.file.readline(left if size is None or size < 0 else min(size, left))
        self.at += len(got)
        return got


def read(file: Any, strict: bool = True) -> Any:
    """The value of the one pickle that begins where ``file`` is, with dead objects in it.

    Args:
        strict: hold it against the table; without it any name may be there (nothing is executed in any case).

    Raises:
        NotAllowed: for a name, or for a use of one, that ``allowed.py`` does not have.
        Damaged: when it is no pickle, or not a whole one.
    """
    machine = _Machine(strict)
    try:
        for opcode, argument, _ in pickletools.genops(file):
            machine.do(opcode.name, argument)
    except NotAllowed:
        raise
    except Exception as error:  # what a damaged file raises in pickletools and below is of many kinds
        raise Damaged(f"is no whole pickle ({type(error).__name__}: {str(error)[:120]})") from error
    return machine.result


def everywhere(value: Any) -> Iterator[Any]:
    """Every value inside of a value, at any depth, each once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            waiting += one
        elif isinstance(one, Made):
            waiting += [one.args, one.state, one.items]


_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "FLOAT", "BINFLOAT",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_REFUSED = {
    "EXT1": "a name by a number (the extension registry)",
    "EXT2": "a name by a number (the extension registry)",
    "EXT4": "a name by a number (the extension registry)",
    "NEXT_BUFFER": "data from outside of the file",
    "READONLY_BUFFER": "data from outside of the file",
}


class _Machine:
    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each mark
        self.memo: dict[int, Any] = {}
        self.protocol = 0
        self.result: Any = None

    def do(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self.stack.append(tuple(self._pop(_TUPLES[name])))
        elif name in _REFUSED:
            raise NotAllowed(f"uses {_REFUSED[name]}")
        else:
            getattr(self, f"_{name.lower()}")(argument)  # what is not below is unknown: damaged

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("the stack is empty")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def _to_mark(self) -> list[Any]:
        taken, self.stack = self.stack, self.below.pop()
        return taken

    # ---- stack and memo

    def _proto(self, argument: int) -> None:
        self.protocol = argument

    def _frame(self, argument: int) -> None:
        pass

    def _mark(self, argument: None) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _pop_mark(self, argument: None) -> None:
        self._to_mark()

    def _dup(self, argument: None) -> None:
        self.stack.append(self.stack[-1])

    def _get(self, argument: int) -> None:
        self.stack.append(self.memo[argument])

    _binget = _long_binget = _get

    def _put(self, argument: int) -> None:
        self.memo[argument] = self.stack[-1]

    _binput = _long_binput = _put

    def _memoize(self, argument: None) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _stop(self, argument: None) -> None:
        (self.result,) = self._pop(1)

    # ---- containers

    def _tuple(self, argument: None) -> None:
        taken = tuple(self._to_mark())
        self.stack.append(taken)

    def _list(self, argument: None) -> None:
        taken = self._to_mark()
        self.stack.append(taken)

    def _frozenset(self, argument: None) -> None:
        taken = self._to_mark()
        made = Made(Global("builtins", "frozenset"))
        made.items = taken
        self.stack.append(made)

    def _empty_set(self, argument: None) -> None:
        self.stack.append(Made(Global("builtins", "set")))

    def _dict(self, argument: None) -> None:
        taken = self._to_mark()
        self.stack.append({})
        self._put_items(taken)

    def _append(self, argument: None) -> None:
        self._extend(self._pop(1))

    def _appends(self, argument: None) -> None:
        self._extend(self._to_mark())

    _additems = _appends

    def _setitem(self, argument: None) -> None:
        self._put_items(self._pop(2))

    def _setitems(self, argument: None) -> None:
        self._put_items(self._to_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target += items
        elif isinstance(target, Made):
            target.items += items
        else:
            raise NotAllowed(f"adds to {_called(target)}")

    def _put_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if len(items) % 2:
            raise ValueError("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(target, dict):
                target[key if _is_plain(key) else Made(key)] = value
            elif isinstance(target, Made):
                target.items.append((key, value))
            else:
                raise NotAllowed(f"changes an item of {_called(target)}")

    # ---- names, and what is done with them

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._name(module, name)

    def _stack_global(self, argument: None) -> None:
        module, name = self._pop(2)
        if type(module) is not str or type(name) is not str:
            raise NotAllowed("uses a name that is made only while it is read")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        if self.protocol < 3:  # as the unpickler does: names of Python 2
            if (module, name) in _compat_pickle.NAME_MAPPING:
                module, name = _compat_pickle.NAME_MAPPING[module, name]
            elif module in _compat_pickle.IMPORT_MAPPING:
                module = _compat_pickle.IMPORT_MAPPING[module]
        found = Global(module, name)
        if self.strict and found not in ALLOWED:
            raise NotAllowed(f"uses {found}")
        self.stack.append(found)

    def _call(self, function: Any, args: Any, new: bool) -> None:
        if self.strict:
            _may_be_called(function, args, new)
        self.stack.append(Made(function, args))

    def _reduce(self, argument: None) -> None:
        function, args = self._pop(2)
        self._call(function, args, new=False)

    def _newobj(self, argument: None) -> None:
        kind, args = self._pop(2)
        self._call(kind, args, new=True)

    def _newobj_ex(self, argument: None) -> None:
        kind, args, keywords = self._pop(3)
        self._call(kind, (args, keywords), new=True)

    def _obj(self, argument: None) -> None:
        kind, *args = self._to_mark()
        self._call(kind, tuple(args), new=False)

    def _inst(self, argument: str) -> None:
        args = tuple(self._to_mark())
        self._global(argument)
        self._call(self.stack.pop(), args, new=False)

    def _build(self, argument: None) -> None:
        (state,) = self._pop(1)
        target = self.stack[-1]
        if not isinstance(target, Made):
            raise NotAllowed(f"sets attributes of {_called(target)}")
        if target.is_built:  # the first attributes would stay, and here only the last are seen
            raise NotAllowed(f"sets the attributes of an object of {_called(target.of)} twice")
        if (
            self.strict
            and target.of == Global("numpy", "dtype")
            and (
                not isinstance(state, tuple) or state[2:7] != (None, None, None, -1, -1) or state[7:] not in ((0,), ())
            )
        ):
            raise NotAllowed("makes a numpy.dtype that is no plain number")
        # The unpickler takes what is in it now: a dictionary may change later.
        parts = state if isinstance(state, tuple) else (state,)
        copies = tuple(dict(part) if isinstance(part, dict) else part for part in parts)
        target.state, target.is_built = copies if isinstance(state, tuple) else copies[0], True

    def _persid(self, argument: Any) -> None:
        raise NotAllowed("refers to something outside of the file")

    def _binpersid(self, argument: None) -> None:
        (where,) = self._pop(1)
        if not isinstance(where, tuple) or not where or where[0] not in ("storage", b"storage"):
            raise NotAllowed("refers to something outside of the file that is no storage of a tensor")
        self.stack.append(Made("storage", where))


def _may_be_called(function: Any, args: Any, new: bool) -> None:
    if not isinstance(function, Global):
        raise NotAllowed(f"calls {_called(function)}")
    how = ALLOWED[function]
    if how is How.VALUE or (how is How.NEW) != new:
        raise NotAllowed(f"calls {function} in a way that no checkpoint needs")
    if callable(how):
        wrong = how(args) if isinstance(args, tuple) else "with other arguments"
        if wrong:
            raise NotAllowed(f"calls {function} with arguments that no checkpoint needs ({wrong})")


def _is_plain(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(isinstance(part, (str, int, float, bool, bytes, type(None))) for part in key)
    return isinstance(key, (str, int, float, bool, bytes, type(None), Made, Global))


def _called(target: Any) -> str:
    return str(target) if isinstance(target, Global) else f"what is no object of the table ({type(target).__name__})"
