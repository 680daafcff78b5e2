"""Stored objects, read without torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dcp_io.archives.archive_checks import refuse_bomb, zip_records
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.index.dtypes import TYPED_STORAGES
from dcp_manifest.pickles.pickle_table import ForbiddenGlobalError, Function, PickleTable
from dcp_manifest.pickles.safe_pickle import read_pickle, refuse_unfolding


def read_plain_object(data: bytes) -> Any:
    """Return the value of a stored object of plain values; nothing in it is called.

    The CRCs of `data` have been checked. Raises ValueError for bytes that are not such an archive, or contain other
    values; see `dcp_manifest.pickles.pickle_table.ForbiddenGlobalError`.
    """
    value, _ = read_pickle(_pickled(data), _TABLE)
    refuse_unfolding(value, len(data))
    return value


def _pickled(data: bytes) -> bytes:
    records = zip_records(data)
    refuse_bomb(records, len(data))
    found = [record for record in records if record.name.endswith("/data.pkl") and not record.deflated]
    if len(found) != 1:
        raise CorruptCheckpointError("the stored object is no archive of torch.save")
    return data[found[0].start : found[0].start + found[0].stored_bytes]


def _find(path: str) -> NoReturn:
    raise ForbiddenGlobalError(path)


_TABLE = PickleTable(find=_find)

# A pickle may nest one value in itself by reference a million times, so few levels and parts are printed.
_MAX_DEPTH = 4
_MAX_PARTS = 16
_MAX_LETTERS = 1000
_DTYPES = {cls: dtype for dtype, cls in TYPED_STORAGES.items()}


@dataclass(slots=True)
class _Made:
    name: str
    arguments: tuple[Any, ...]
    state: Any = None


class _Names(dict[int, Callable[..., Any]]):
    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Function] = []  # an id that is freed may be given to another one

    def find(self, path: str) -> Function:
        made = Function(path, lambda _, arguments: _made(path, arguments))
        self._kept.append(made)
        self[id(made)] = lambda _, arguments, named: _Made(path, (*arguments, *named.values()))
        return made


def outline_of_tensor(data: bytes) -> str | None:
    """Return class, inner tensors and attributes of an archived tensor; None for a plain tensor.

    Raises ValueError for other bytes.
    """
    names = _Names()
    table = PickleTable(find=names.find, news=names, states={_Made: _with_state})
    value, _ = read_pickle(_pickled(data), table, persistent=_storage_class)
    text = _text(value)
    return None if not isinstance(value, _Made) or _is_plain(value) else text[:_MAX_LETTERS]


def _made(path: str, arguments: tuple[Any, ...]) -> Any:
    if path == "builtins.getattr" and len(arguments) == 2:  # a class method
        return Function(_name(arguments[0]), lambda _, given: _Made(_name(arguments[0]), given))
    return _Made(path, arguments)


def _storage_class(pid: Any) -> Any:
    return pid[1] if type(pid) is tuple and len(pid) > 1 else ""


def _with_state(_: Any, made: _Made, state: Any) -> _Made:
    made.state = state
    return made


def _is_plain(value: Any) -> bool:
    return isinstance(value, _Made) and value.name.startswith("torch._utils._rebuild_")


def _name(value: Any) -> str:
    return value.name if isinstance(value, Function) else ""


def _text(value: Any, depth: int = 0) -> str:
    if depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, Function):
        return value.name.removeprefix("torch.")
    if not isinstance(value, _Made):
        return _container(value, depth)
    if value.name.endswith("._rebuild_from_type_v2") and len(value.arguments) == 4:
        return f"{_name(value.arguments[1])}({_attributes(value.arguments[3], depth)})"
    if value.name.startswith("torch._utils._rebuild_tensor") and len(value.arguments) > 2:
        storage, _, sizes, *_ = value.arguments
        dtype = value.arguments[6] if value.name.endswith("_v3") and len(value.arguments) > 6 else storage
        word = _name(dtype).rpartition(".")[2]
        return f"{_DTYPES.get(word, word)} {_sizes(sizes)}"
    inner = ", ".join(_text(each, depth + 1) for each in value.arguments[:_MAX_PARTS])
    more = _attributes(value.state, depth) if value.state else ""
    return f"{value.name.removeprefix('torch.')}({', '.join(part for part in (inner, more) if part)})"


def _sizes(sizes: Any) -> str:
    if type(sizes) is not tuple or len(sizes) > _MAX_PARTS or any(type(size) is not int for size in sizes):
        return "?"
    return " × ".join(map(str, sizes)) or "scalar"


def _attributes(state: Any, depth: int) -> str:
    if isinstance(state, tuple):
        state = state[0] if state else None
    if not isinstance(state, Mapping):
        return ""
    named = itertools.islice(((name, each) for name, each in state.items() if type(name) is str), _MAX_PARTS)
    return ", ".join(f"{name}={_text(each, depth + 1)}" for name, each in named)


def _container(value: Any, depth: int) -> str:
    if isinstance(value, Mapping):
        return "{" + _attributes(value, depth) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(_text(each, depth + 1) for each in value[:_MAX_PARTS])
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return repr(value) if type(value) in (str, bytes, int, float, bool, type(None)) else type(value).__name__
