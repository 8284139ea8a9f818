"""``python -m mars_dist script.py ...``: run a script that nobody edited, with MARS registered.

Also as ``deepspeed --module mars_dist script.py ...``, ``accelerate launch -m mars_dist script.py ...`` and ``torchrun
-m mars_dist script.py ...``. The script sees the command line, the module path and the ``__main__`` that it would see
if it were run directly.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
from types import ModuleType

import mars_dist

USAGE = """usage: python -m mars_dist [-m] SCRIPT [ARGUMENTS ...]

Registers MARS, so that "type": "MARS" works in a DeepSpeed configuration and `--optim mars_adamw` in a script that
uses transformers' Trainer, then runs SCRIPT (with -m: a module) with its ARGUMENTS as if it had been started directly.
Under a launcher:

  deepspeed --module mars_dist SCRIPT ...
  accelerate launch -m mars_dist SCRIPT ...
  torchrun -m mars_dist SCRIPT ...

Processes that SCRIPT starts itself (torch.multiprocessing.spawn) do not inherit this: they need `import mars_dist`.
"""


def main(argv: list[str]) -> None:
    """Run what the command line ``argv`` (without the program's name) asks for."""
    # The deepspeed launcher puts --local_rank before the arguments; it belongs to the script.
    leading = [a for a in argv[:1] if a.startswith(("--local_rank=", "--local-rank="))]
    argv = argv[len(leading) :]
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    if not argv:
        _refuse("the script to run is missing\n\n" + USAGE)
    as_module = argv[0] == "-m"
    argv = argv[as_module:]
    if not argv:
        _refuse("-m needs the name of a module to run")
    target = argv[0]
    if not as_module and not os.path.exists(target):
        _refuse(f"there is no script {target!r} (in {os.getcwd()})")

    mars_dist.register()
    sys.argv = [target, *leading, *argv[1:]]
    # A __main__ of its own, which stays after the last line of the script: for pickle, multiprocessing and threads.
    main_module = ModuleType("__main__")
    main_module.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main_module
    # What the interpreter itself calls for -m, and for a folder or zip archive with a __main__.py.
    run_as_main = runpy._run_module_as_main  # type: ignore[attr-defined]
    if as_module:
        run_as_main(target)
    elif pkgutil.get_importer(target) is not None:
        _set_first_path(os.path.abspath(target))
        run_as_main("__main__", alter_argv=False)
    else:
        _set_first_path(os.path.dirname(os.path.realpath(target)))
        _run_file(os.path.abspath(target), main_module)


def _set_first_path(folder: str) -> None:
    """In place of the working directory, which -m puts there."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _run_file(path: str, main_module: ModuleType) -> None:
    """runpy.run_path would hand over another argv[0], and take the module away after the last line."""
    main_module.__file__ = path
    if path.endswith(".pyc"):
        main_module.__loader__ = compiled = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = compiled.get_code("__main__")
        assert code is not None
    else:
        main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)


def _refuse(message: str) -> None:
    """The exit code is that of ``python`` when it cannot open the script."""
    print(f"mars_dist: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
