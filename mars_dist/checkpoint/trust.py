"""Before a library unpickles a checkpoint: are its pickles made of what checkpoints are made of, and nothing else?

``dcp.load``, DeepSpeed and its ``zero_to_fp32`` execute pickles, which may run any program. Here they are read
without executing anything (``pickles.py``) and held against a table of names (``allowed.py``):

- files of torch.save, as torch itself opens them (its own reader of zip files), and as Python's zipfile sees them
- the older format of torch.save: several pickles one after the other; the oldest, a tar file, is refused
- plain pickles; DCP's ``.metadata``, and each piece of a file where it says that one is

What a library reads with ``weights_only=True`` needs a torch in which that is safe: ``require_safe_torch``.
"""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from mars_dist.checkpoint import pickles
from mars_dist.checkpoint.allowed import Global
from mars_dist.checkpoint.pickles import Damaged, Made, NotAllowed, Window

VARIABLE = "MARS_DIST_TRUST_CHECKPOINT"
REMEDY = f"If you trust who wrote it, say --trust-checkpoint, or {VARIABLE}=1 in the environment"
SAFE_TORCH = (2, 10)
# Files that are unpickled whatever they begin with; others are looked at when they begin like a pickle or a zip file.
PICKLED = {".pkl", ".pickle", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".metadata", ".th", ".tar"}
METADATA, PIECES = ".metadata", ".distcp"
ZIP = b"PK\x03\x04"
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PICKLES = 5  # magic number, version, system, the value, the names of the storages; then their bytes
METADATA_CLASS = Global("torch.distributed.checkpoint.metadata", "Metadata")
PIECE_CLASS = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
SHOWN = 3


class UntrustedCheckpoint(ValueError):
    """A checkpoint whose pickles do more than checkpoints need, or cannot be looked into."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a file: ``damaged`` when it is no whole pickle, else it does what no checkpoint needs."""

    path: Path
    text: str
    damaged: bool = False

    def __str__(self) -> str:
        return f"{self.path} {self.text}"


def is_trusted() -> bool:
    """Whether the environment says that checkpoints are not checked."""
    return os.environ.get(VARIABLE, "").lower() in ("1", "true", "yes", "on")


def require_safe_torch(version: str | None = None) -> None:
    """Refuse to load with a torch whose restricted unpickler is not safe.

    Raises:
        UntrustedCheckpoint: before 2.10; the message has the reason.
    """
    import torch

    version = version or str(torch.__version__)
    numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split("+")[0].split(".")[:2])
    if numbers < SAFE_TORCH:
        hole = "CVE-2025-32434" if numbers < (2, 6) else "GHSA-63cw-57p8-fm3p"
        raise UntrustedCheckpoint(
            f"torch {version} executes code from checkpoints even with weights_only=True ({hole}; fixed in 2.10): "
            f'pip install "torch>=2.10". {REMEDY}.'
        )


def check(path: str | os.PathLike[str], trusted: bool = False, files: Iterable[Path] | None = None) -> None:
    """Refuse a folder (or one file) whose pickles are not made of what checkpoints are made of. Executes nothing.

    A file that is changed after it was checked is not seen: check on the machine that loads, right before it does.

    Args:
        path: folder or file.
        trusted: check nothing; ``MARS_DIST_TRUST_CHECKPOINT=1`` says the same.
        files: only these files of the folder, for a rank that does its part.

    Raises:
        UntrustedCheckpoint: with the files, what they do, and the remedy; also for a torch before 2.10.
        FileNotFoundError: when there is nothing at ``path``.
    """
    if trusted or is_trusted():
        return
    require_safe_torch()
    found = findings(Path(path), files)
    if found:
        more = f"; and {len(found) - SHOWN} more files" if len(found) > SHOWN else ""
        if all(finding.damaged for finding in found):  # what cannot be read cannot be checked
            consequence = "It is damaged or incomplete: take another checkpoint"
        else:
            consequence = "To load it could run any program"
        raise UntrustedCheckpoint(f"{'; '.join(map(str, found[:SHOWN]))}{more}. {consequence}. {REMEDY}.")


def findings(path: Path, files: Iterable[Path] | None = None) -> list[Finding]:
    """What ``check`` refuses, a finding for each file."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: there is no checkpoint to check")
    found = []
    for file in [path] if path.is_file() else walk(path) if files is None else files:
        try:
            finding = _links_outside(path, file) or _of_file(file)
        except (OSError, MemoryError, RuntimeError, ValueError) as error:  # links in a circle, numbers without end
            finding = Finding(file, f"cannot be read ({type(error).__name__}: {error})", damaged=True)
        found += [finding] if finding else []
    return found


def walk(folder: Path) -> list[Path]:
    """Every file and every link in ``folder``, at any depth; links are not followed."""
    found = []
    for place, folders, names in os.walk(folder):
        found += [Path(place, name) for name in names]
        found += [Path(place, name) for name in folders if Path(place, name).is_symlink()]
    return sorted(found)


def _links_outside(folder: Path, file: Path) -> Finding | None:
    if file == folder:
        return None
    target = file.resolve()
    if not target.is_relative_to(folder.resolve()):
        return Finding(file, f"is a link to {target}, outside of the folder")
    return None


def _of_file(path: Path) -> Finding | None:
    if path.is_dir():  # a link to a folder of this checkpoint: its files are checked where they are
        return None
    if not path.is_file():
        return Finding(path, "is no regular file")
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(4)
            zipped = is_zip(file)
            suffix = METADATA if path.name.endswith(METADATA) else path.suffix.lower()
            if not (suffix in PICKLED or zipped or start == ZIP or _like_a_pickle(start)):
                return None
            if suffix == METADATA and start != ZIP:  # else no pickle, whatever DCP does; it may end like a zip file
                _dcp(path.parent, Window(file, 0, size))
            elif suffix == PIECES and any(path.parent.glob(f"*{METADATA}")):
                pass  # its pieces are checked where .metadata says that they are
            else:
                _torch_file(Window(file, 0, size))
    except NotAllowed as error:
        return Finding(path, str(error))
    except Damaged as error:
        said = "has no .metadata beside it, which says what is where in it" if path.suffix == PIECES else str(error)
        return None if _is_safetensors(path) else Finding(path, said, damaged=True)
    return None


def _is_safetensors(path: Path) -> bool:
    """A file that begins with the length of its header may begin like a pickle: with 640 or 896 bytes, for example.

    It was read as one up to where it is none, so nothing that a pickle does before that is overlooked.
    """
    with path.open("rb") as file:
        length, brace = int.from_bytes(file.read(8), "little"), file.read(1)
    return path.suffix.lower() == ".safetensors" and brace == b"{" and 8 + length <= path.stat().st_size


def _like_a_pickle(start: bytes) -> bool:
    return len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5


# ------------------------------------------------------------------------------------------------ kinds of files


def values(path: Path) -> list[Any]:
    """The values in a file of torch.save or in a plain pickle, with dead objects in them, whatever names it uses.

    Nothing is executed.

    Raises:
        NotAllowed, Damaged: see ``pickles.read``.
    """
    with path.open("rb") as file:
        return _torch_file(Window(file, 0, path.stat().st_size), strict=False)


def _torch_file(file: Window, strict: bool = True) -> list[Any]:
    """Check what ``torch.load`` or ``pickle.load`` would read of ``file``."""
    start = file.read(len(ZIP))
    file.seek(0)
    found = []
    zipped = is_zip(file)
    if zipped:  # also one that begins in the middle
        found += _as_zipfile(file, strict)
    file.seek(0)
    if start == ZIP:
        if not zipped:  # its sizes were not looked at
            raise Damaged("is no whole zip file of torch.save (its end is not that of one)")
        return _as_torch_opens_it(file, strict)
    file.seek(0)
    if _is_tar(file):
        raise NotAllowed("is a tar file: an old format of torch.save, which is not checked")
    file.seek(0)
    return [*found, *_one_after_the_other(file, strict)]


def is_zip(file: Any) -> bool:
    """Whether a file ends as zip files end, or does so with a fault that Python's reader stops at."""
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:
        return True


def _is_tar(file: Window) -> bool:
    try:
        with tarfile.open(fileobj=file, mode="r:"):
            return True
    except (tarfile.TarError, OSError, ValueError, EOFError):
        return False


def _as_torch_opens_it(file: Window, strict: bool) -> list[Any]:
    """The pickles in a zip file, found by torch's own reader: there is no second opinion on what torch would load."""
    import torch

    try:
        reader = torch._C.PyTorchFileReader(cast(IO[bytes], file))
        names = reader.get_all_records()
        read = {name: reader.get_record(name) for name in names if _is_pickle(name)}
    except Exception as error:  # a damaged file raises RuntimeError, or UnicodeDecodeError for that one's text
        text = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise Damaged(f"is no whole zip file of torch.save ({text})") from error
    if "constants.pkl" in names:
        raise NotAllowed("is a TorchScript archive, which holds programs")
    if "data.pkl" not in read:
        raise Damaged("is a zip file without the data.pkl of torch.save")
    return [_whole(name, content, strict) for name, content in read.items()]


def _as_zipfile(file: Window, strict: bool) -> list[Any]:
    try:
        with zipfile.ZipFile(file) as archive:
            names = [info.filename for info in archive.infolist()]
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            if twice:
                raise NotAllowed(f"holds {twice[0]} more than once: which one is read depends on the reader")
            packed = [i.filename for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED]
            if any(map(_is_pickle, packed)):  # a few bytes may become more than there is memory
                raise NotAllowed(f"holds {next(filter(_is_pickle, packed))} compressed, which torch.save does not do")
            return [
                _whole(info.filename, archive.read(info), strict)
                for info in archive.infolist()
                if _is_pickle(info.filename)
            ]
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, ValueError, OSError) as error:
        if isinstance(error, (NotAllowed, Damaged)):
            raise
        raise Damaged(f"is no whole zip file ({error})") from error
    except Exception as error:  # zlib.error, lzma's
        raise Damaged(f"is no whole zip file ({type(error).__name__}: {error})") from error


def _is_pickle(member: str) -> bool:
    return member.lower().endswith((".pkl", ".pickle"))


def _whole(name: str, content: bytes, strict: bool) -> Any:
    """The value of a member that has to be one pickle."""
    file = io.BytesIO(content)
    try:
        value = pickles.read(file, strict)
        if file.tell() != len(content):
            pickles.read(file, strict)  # a second one, for whatever it does
            raise NotAllowed("has another pickle behind the first")
    except (NotAllowed, Damaged) as error:
        raise type(error)(f"({name} in it) {error}") from error
    return value


def _one_after_the_other(file: Window, strict: bool) -> list[Any]:
    """The older format of torch.save, or a plain pickle with nothing behind it."""
    first = pickles.read(file, strict)
    found = [first]
    if first == LEGACY_MAGIC:
        found += [pickles.read(file, strict) for _ in range(LEGACY_PICKLES - 1)]
        return found  # behind them are the bytes of the storages
    while file.tell() < file.stop - file.start:
        try:
            found.append(pickles.read(file, strict))
        except Damaged as error:
            raise NotAllowed(f"has bytes behind its pickle that are none ({error})") from error
    return found


# ----------------------------------------------------------------------------------------------------------- DCP


def pieces(metadata: Any) -> Iterator[tuple[str, int, int]]:
    """File, first byte and length of every piece that the value of a ``.metadata`` names.

    What ``dcp.load`` reads by is exactly what is seen here: any object with these attributes would do for it, and they
    could be given in other ways than as a dictionary.
    """
    table = metadata.state.get("storage_data") if type(metadata.state) is dict else None
    if type(table) is not dict or not all(isinstance(v, Made) and v.of == PIECE_CLASS for v in table.values()):
        raise NotAllowed("has a table of pieces (storage_data) that torch would not write")
    for value in pickles.everywhere(metadata):
        if isinstance(value, Made) and value.of == PIECE_CLASS:
            if type(value.state) is not dict:
                raise NotAllowed("describes a piece in a way that torch would not")
            of = value.state
            name, offset, length = of.get("relative_path"), of.get("offset"), of.get("length")
            if of.get("transform_descriptors"):
                raise NotAllowed("says that pieces are compressed: they cannot be looked into")
            if not isinstance(name, str) or type(offset) is not int or type(length) is not int:
                raise Damaged("has an entry without file, offset and length")
            if os.path.isabs(name) or ".." in Path(name).parts:
                raise NotAllowed(f"names {name!r}, outside of the folder")
            yield name, offset, length


def _dcp(folder: Path, file: Window) -> None:
    """Check ``.metadata``, and of each file the pieces that ``dcp.load`` would read by it."""
    metadata = _one_after_the_other(file, strict=True)[0]
    if not isinstance(metadata, Made) or metadata.of != METADATA_CLASS:
        raise Damaged("is no metadata of torch's distributed checkpoints")
    by_file: dict[str, set[tuple[int, int]]] = {}
    for name, offset, length in pieces(metadata):
        by_file.setdefault(name, set()).add((offset, length))
    for name, places in by_file.items():
        if not (folder / name).is_file():
            raise Damaged(f"names {name}, which is not there")
        size = (folder / name).stat().st_size
        with (folder / name).open("rb") as opened:
            for offset, length in sorted(places):
                if offset < 0 or length < 0 or offset + length > size:
                    raise Damaged(f"names bytes {offset} to {offset + length} of {name}, which has {size}")
                try:
                    _torch_file(Window(opened, offset, offset + length))
                except (NotAllowed, Damaged) as error:
                    raise type(error)(f"leads to a piece of {name} (at byte {offset}) that {error}") from error
