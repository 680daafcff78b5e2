"""Objects (whatever is no tensor) ↔ bytes, without ever running what the bytes say.

Bytes are a `torch.save` archive, which stock reads. Reading goes through an allow-list, and writing looks ahead: what
a later load would refuse is reported when it is saved.
"""

from __future__ import annotations

import io
import pickle
import types
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_core.archive_crcs import refuse_bomb
from dcp_core.errors import (
    CorruptCheckpointError,
    DcpError,
    UnloadableObjectError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from dcp_core.object_globals import AllowList, allowed_globals, may_never_be_allowed
from dcp_core.restricted_pickle import ForbiddenGlobalError, RestrictedUnpickler, python3_name

__all__ = ["DumpedObject", "UnloadableObjectWarning", "dump_object", "load_object", "report_unloadable", "scan"]


class UnloadableObjectWarning(UserWarning):
    """An object was saved in a form that a load refuses unless the loader allows it."""


@dataclass(frozen=True, slots=True)
class DumpedObject:
    """An object that was turned into bytes earlier, or in another process; stands for it in a state dict."""

    data: bytes
    """What `dump_object` gave."""


def dump_object(value: object, *, key: str) -> bytes:
    """The bytes that stand for `value` in a checkpoint: what `torch.save` writes.

    Args:
        value: Any object that can be pickled, or one that was dumped before. Tensors in it are stored on the CPU side
            of the archive.
        key: Its FQN, for messages.

    Raises:
        UnsupportedValueError: It cannot be pickled.
    """
    if isinstance(value, DumpedObject):
        return value.data
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except DcpError:
        raise
    except Exception as error:
        raise UnsupportedValueError(
            f"{key!r} of type {type(value).__qualname__} cannot be saved: {error}; store plain data instead "
            "(numbers, strings, containers, tensors), or keep it out of the state dict"
        ) from error
    return buffer.getvalue()


def scan(data: bytes, *, allow_globals: Sequence[Any] = ()) -> list[str]:
    """The globals of a dumped object that `load_object` would refuse, sorted. Nothing of them is imported or called.

    Raises:
        CorruptCheckpointError: These are not the bytes of a dumped object.
    """
    try:
        named = _Census(_pickle_of(data)).taken()
    except Exception as error:
        raise CorruptCheckpointError(f"the bytes of an object are damaged: {error}") from error
    return sorted(named - allowed_globals(allow_globals).by_name.keys())


def report_unloadable(data: bytes, *, key: str, strict: bool = False, allow_globals: Sequence[Any] = ()) -> None:
    """Warn, or raise if `strict`, when a dumped object would not load back.

    Args:
        data: What `dump_object` gave.
        key: The object's FQN.
        strict: Raise instead of warning.
        allow_globals: What the loader will allow in addition.

    Raises:
        UnloadableObjectError: `strict`, and it would not load back.
    """
    refused = scan(data, allow_globals=allow_globals)
    if not refused:
        return
    message = f"{key!r} would not load back: it is made of {', '.join(refused)}. {_remedy(refused[0])}"
    if strict:
        raise UnloadableObjectError(message)
    warnings.warn(message, UnloadableObjectWarning, stacklevel=2)


def load_object(data: bytes, *, key: str, allow_globals: Sequence[Any] = (), trust_objects: bool = False) -> Any:
    """The object that `dump_object`, or stock, has stored. Nothing but the allow-list is called.

    Args:
        data: The stored bytes.
        key: Its FQN, for messages.
        allow_globals: Classes and functions that it may use beside the default ones and those of
            `torch.serialization.add_safe_globals`; pairs (object, full name) give them another name.
        trust_objects: Unpickle without restriction, which lets the checkpoint run any code.

    Returns:
        The object; tensors in it are on the CPU.

    Raises:
        UnsafeCheckpointError: It names something that is not allowed; says what, and how to allow it.
        CorruptCheckpointError: These are not the bytes of a stored object.
        ValueError: `allow_globals` holds something that could run any code.
    """
    allowed = allowed_globals(allow_globals)
    try:
        if trust_objects:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return _load_restricted(data, allowed)
    except ForbiddenGlobalError as error:
        raise UnsafeCheckpointError(
            f"the object {key!r} names {error.path}, which is not allowed. {_remedy(error.path)}"
        ) from None
    except DcpError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(f"the stored object cannot be read: {error}", key=key) from error


def _remedy(path: str) -> str:
    if may_never_be_allowed(path):
        return (
            "It can run any code, and no checkpoint of plain data names it: do not load it unless you know why it does"
        )
    name = path.rpartition(".")[2]
    return (
        f"If you trust it, load with DefaultLoadPlanner(allow_globals=[{name}]) or call "
        f"torch.serialization.add_safe_globals([{name}]) first; trust_objects=True lifts every restriction "
        "and lets the checkpoint run code"
    )


class _NotPlainError(Exception):
    """A pickle holds more than plain data."""


class _PlainUnpickler(RestrictedUnpickler):
    """Reads pickles without globals: nothing can be called when no name is ever looked up."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, allowed={}, callables=frozenset())

    def find_class(self, module: str, name: str) -> Any:
        raise _NotPlainError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _NotPlainError(pid)


def _load_restricted(data: bytes, allowed: AllowList) -> Any:
    try:
        return _PlainUnpickler(_pickle_of(data)).load()
    except _NotPlainError:
        pass

    class _Unpickler(RestrictedUnpickler):
        def __init__(self, file: Any, **kwargs: Any) -> None:
            super().__init__(file, allowed=allowed.by_name, callables=allowed.callables, **kwargs)

    refuse_bomb(data)
    # torch.load would also take TorchScript archives and the old tar format: the zip reader below it does not.
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))  # noqa: SLF001
    module = types.SimpleNamespace(Unpickler=_Unpickler, UnpicklingError=pickle.UnpicklingError)
    load: Callable[..., Any] = torch.serialization._load  # noqa: SLF001
    return load(reader, "cpu", module, encoding="utf-8")


def _pickle_of(data: bytes) -> io.BytesIO:
    """A stream at `data.pkl` of the archive; bytes may follow it, a pickle's end marks it off. Copies nothing large."""
    # torch.save puts it first; reading the archive's directory takes longer than the rest.
    if data[:4] == b"PK\3\4" and data[8:10] == b"\0\0":
        names, extra = (int.from_bytes(data[at : at + 2], "little") for at in (26, 28))
        if data[30 : 30 + names].endswith(b"/data.pkl"):
            stream = io.BytesIO(data)
            stream.seek(30 + names + extra)
            return stream
    refuse_bomb(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return io.BytesIO(archive.read(name))


class _Census(pickle.Unpickler):
    """Notes the globals of a pickle; in place of each there is a stand-in that swallows whatever is done to it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._named: set[str] = set()

    def taken(self) -> set[str]:
        """All globals that occur, under the names of Python 3."""
        self.load()
        return self._named

    def find_class(self, module: str, name: str) -> Any:
        # Whether the pickle is old enough for Python 2 names is not known here; nothing of Python 3 has such a name.
        self._named.add(python3_name(module, name))
        return _StandIn

    def persistent_load(self, pid: Any) -> Any:
        del pid
        return _StandIn()


class _StandIn:
    def __new__(cls, *args: Any, **kwargs: Any) -> _StandIn:
        del args, kwargs
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take any arguments."""

    def swallow(self, *args: Any) -> None:
        """Do nothing."""

    __setstate__ = __setitem__ = append = extend = add = update = __call__ = swallow
