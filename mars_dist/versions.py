"""Which releases mars_dist was tested with, and what to say when another one does not fit.

DeepSpeed, transformers and Accelerate have no public way to add an optimizer, and torch none to ask where a piece of a
tensor belongs: each is reached through names that it does not promise to keep. This table is the one place that says
which releases have them. The ranges of setup.py, launch/constraints-oldest.txt, launch/constraints-cpu.txt and the
README's Status say the same (tests/test_versions.py); tests/test_oldest.py runs the oldest. Nothing is imported here
but the standard library.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

# The oldest and the newest release that the tests were run with; between them nothing was run.
TESTED: dict[str, tuple[str, str]] = {
    "torch": ("2.13.0", "2.13.0"),
    # Before 0.19.8 ZeRO-3 over gloo waits for the last of its all-gathers only: now and then weights are wrong.
    "deepspeed": ("0.19.8", "0.19.8"),
    "transformers": ("5.22.0", "5.24.0"),
    "accelerate": ("1.13.0", "1.15.0"),
}
SPELLED = {"deepspeed": "DeepSpeed", "accelerate": "Accelerate"}
NO_UPPER_BOUND = ("torch",)  # pip must find the build for the GPU at hand


def tested(*libraries: str) -> str:
    """``tested with transformers 5.22.0 and 5.24.0``; several libraries with commas between them."""
    releases = (
        f"{spelled(name)} {' and '.join(dict.fromkeys(TESTED[name]))}"  # once where oldest and newest are the same
        for name in libraries
    )
    return f"tested with {', '.join(releases)}"


def installed(library: str) -> str:
    """The release of the installed ``library``; of what is imported where pip does not know it, else ``(unknown)``."""
    from importlib import metadata  # only for a message: it is slow to import

    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(library), "__version__", "(unknown)"))


def requirement(library: str) -> str:
    """The range that setup.py asks for: from the oldest tested release to before the next minor one."""
    oldest, newest = TESTED[library]
    if library in NO_UPPER_BOUND:
        return f"{library}>={oldest}"
    major, minor = newest.split(".")[:2]
    return f"{library}>={oldest},<{major}.{int(minor) + 1}"


def missing_hook(library: str, names: str | Sequence[str] | AttributeError, consequence: str, instead: str = "") -> str:
    """The message for a release that lacks what mars_dist reaches it through.

    Args:
        library: as pip calls it.
        names: what is missing, as one writes it in Python, or the error that reading it raised.
        consequence: what does not work now; a clause.
        instead: what one can do without another release; a clause.

    Returns: for example ``Accelerate 1.16.0 has no Accelerator.prepare: FSDP1 needs optimizer.attach(model). mars_dist
        was tested with Accelerate 1.13.0 and 1.15.0: pip install "accelerate>=1.13.0,<1.16", or ...``
    """
    if isinstance(names, AttributeError):
        names = f"{type(names.obj).__name__}.{names.name}" if names.name else str(names)
    names = [names] if isinstance(names, str) else names
    return (
        f"{spelled(library)} {installed(library)} has no {' and no '.join(names)}: {consequence}. mars_dist was "
        f'{tested(library)}: pip install "{requirement(library)}"{f", or {instead}" if instead else ""}.'
    )


def spelled(library: str) -> str:
    """The name of the library as its own pages write it."""
    return SPELLED.get(library, library)
