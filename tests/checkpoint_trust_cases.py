"""Payloads for the files of a checkpoint, and what the ranks of test_checkpoint_trust.py do with planted folders."""

from __future__ import annotations

import copy
import copyreg
import io
import logging
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import nets
from tests.checkpoint_folders import LR


class Payload:
    """Unpickled, it runs a program."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def run_by_opcodes(marker: Path) -> bytes:
    """Opcodes for any place in a pickle: the program runs, and the stack is as it was."""
    return b"cposix\nsystem\n(Vtouch " + str(marker).encode() + b"\ntR0"


def by_memo(marker: Path) -> bytes:
    """Protocol 4: the name is put together from the memo, far from where it is used."""
    words = [b"system", b"posix", b"torch", b"Size"]
    text = b"".join(b"\x8c" + bytes([len(word)]) + word + b"\x94" for word in words)
    command = f"touch {marker}".encode()
    get = b"h\x01h\x00\x93"  # posix, system, STACK_GLOBAL
    return b"\x80\x04(" + text + b"1" + get + b"X" + len(command).to_bytes(4, "little") + command + b"\x85R."


def in_first_pickle(content: bytes, marker: Path) -> bytes:
    """The same pickle with a program in it, at its beginning: all of its values stay."""
    head = 2 if content[:1] == b"\x80" else 0
    head += 9 if content[head : head + 1] == b"\x95" else 0  # behind the frame's length, which no unpickler needs
    return content[:head] + run_by_opcodes(marker) + content[head:]


def rewrite_zip(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members:
            archive.writestr(name, change(name, content))


def hide(path: Path, marker: Path) -> None:
    """In the file as it is, so that it loads as before."""
    if zipfile.is_zipfile(path):
        rewrite_zip(path, lambda name, data: in_first_pickle(data, marker) if name.endswith("data.pkl") else data)
    else:
        path.write_bytes(in_first_pickle(path.read_bytes(), marker))


def replace(path: Path, marker: Path) -> None:
    if zipfile.is_zipfile(path):
        torch.save({"mine": Payload(marker)}, path)
    else:
        path.write_bytes(pickle.dumps({"mine": [Payload(marker)]}))


def replace_by_memo(path: Path, marker: Path) -> None:
    if zipfile.is_zipfile(path):
        rewrite_zip(path, lambda name, data: by_memo(marker) if name.endswith("data.pkl") else data)
    else:
        path.write_bytes(by_memo(marker))


def replace_legacy(path: Path, marker: Path) -> None:
    torch.save({"mine": [Payload(marker), torch.ones(3)]}, path, _use_new_zipfile_serialization=False)


PLANTED = {"hidden": hide, "replaced": replace, "by memo": replace_by_memo, "legacy": replace_legacy}


def pickled_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that its library unpickles, the pieces of DCP left out."""
    suffixes = {".pt", ".pth", ".bin", ".pkl"}
    return sorted(p for p in folder.rglob("*") if p.is_file() and (p.suffix in suffixes or p.name == ".metadata"))


def tar_of(marker: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            content = pickle.dumps(Payload(marker))
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------------- on the ranks


def load_with_deepspeed(folder: str, stage: int, tag: str | None, trust: bool = False) -> str:
    """A fresh engine with MARS loads ``tag``: the error, or "loaded"."""
    import deepspeed

    import mars_dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    engine = engine_of(stage)
    assert type(engine.basic_optimizer) is mars_dist.MARS
    if trust:
        os.environ["MARS_DIST_TRUST_CHECKPOINT"] = "1"
    try:
        found, _ = engine.load_checkpoint(folder, tag=tag)
        return "loaded" if found else "nothing"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.pop("MARS_DIST_TRUST_CHECKPOINT", None)
        engine.destroy()


def save_with_deepspeed(folder: str, tag: Any) -> str:
    engine = engine_of(1)
    try:
        engine.save_checkpoint(folder, tag=tag)
        return "saved"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.destroy()


def engine_of(stage: int) -> Any:
    import deepspeed

    net = nets.build()
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "optimizer": {"type": "MARS", "params": LR},
    }
    return deepspeed.initialize(model=net, config=config, model_parameters=list(net.parameters()))[0]


# ------------------------------------------------------------------------- .metadata of DCP that hides a piece's place


def _with_slots(metadata: Any, index: Any, place: dict[str, Any]) -> bytes:
    """The second part of a pair comes over the first."""
    info = metadata.storage_data[index]
    kind, true = type(info), dict(info.__dict__)

    class Writer(pickle._Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (copyreg.__newobj__, (kind,), (true, place)) if value is info else NotImplemented  # type: ignore[attr-defined]

    return _written(Writer, metadata)


def _of_another_class(metadata: Any, index: Any, place: dict[str, Any]) -> bytes:
    """Torch asks for the attributes alone."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    other = BytesStorageMetadata()
    other.__dict__.update(place, transform_descriptors=None)
    metadata.storage_data[index] = other
    return pickle.dumps(metadata)


def _twice(metadata: Any, index: Any, place: dict[str, Any]) -> bytes:
    """What the first state has set stays, where the second does not name it."""
    metadata.storage_data[index].__dict__.update(place)
    rest = dict(metadata.__dict__)
    first = {"storage_data": rest.pop("storage_data")}
    return _by_states(type(metadata), [first, rest])


def _changed_later(metadata: Any, index: Any, place: dict[str, Any]) -> bytes:
    """The dictionary that an object took its attributes from gets others after that."""
    true = dict(metadata.storage_data)
    true[index] = copy.copy(true[index])
    metadata.storage_data[index].__dict__.update(place)
    return _by_states(type(metadata), [dict(metadata.__dict__)], ("storage_data", true))


def _like_a_zip_file(metadata: Any, index: Any, place: dict[str, Any]) -> bytes:
    """The last record of an empty zip file, in a constant near the end."""
    metadata.storage_data[index].__dict__.update(place)
    metadata.storage_meta.modules = [b"PK\5\6" + bytes(18)]
    return pickle.dumps(metadata)


def _written(writer: Any, value: Any) -> bytes:
    stream = io.BytesIO()
    writer(stream, 4).dump(value)
    return stream.getvalue()


def _by_states(kind: type, states: list[dict[str, Any]], item: tuple[str, Any] | None = None) -> bytes:
    stream = io.BytesIO()
    writer = pickle._Pickler(stream, 4)  # type: ignore[attr-defined]
    writer.write(pickle.PROTO + b"\x04")
    writer.save(kind)
    writer.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
    for state in states:
        writer.save(state)
        writer.write(pickle.BUILD)
    if item is not None:
        writer.write(pickle.MARK)
        writer.save(states[-1])  # from the memo
        writer.save(item[0])
        writer.save(item[1])
        writer.write(pickle.SETITEM + pickle.POP_MARK)
    writer.write(pickle.STOP)
    return stream.getvalue()


HIDDEN_PLACES: dict[str, Callable[[Any, Any, dict[str, Any]], bytes]] = {
    "slots": _with_slots,
    "another class": _of_another_class,
    "twice": _twice,
    "changed later": _changed_later,
    "the end of a zip file": _like_a_zip_file,
}
