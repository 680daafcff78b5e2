"""Pickling of objects under the class names of another library, so that this library unpickles its own classes.

A pickle names each class by module and name. `dumps_as` replaces the names of given classes, and the states of their
instances; all other objects are pickled as usual.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["dumps_as"]

ClassPath = tuple[str, str]


def dumps_as(
    value: object,
    *,
    paths: Mapping[type, ClassPath],
    states: Mapping[type, Callable[[Any], Any]],
    plain: Collection[type[str]] = (),
    protocol: int | None = None,
) -> bytes:
    """Pickle an object, with other class names for the classes in `paths`.

    Args:
        value: Object that can be pickled, with instances of these classes at any depth.
        paths: Class → (module, name) to write in place of the class.
        states: Class → function that turns an instance (of exactly this class) into the argument for `__setstate__` or
            `__dict__.update` of the other class; returns None for an instance without state.
        plain: Subclasses of `str` whose instances are written as ordinary strings.
        protocol: Pickle protocol as in `pickle.dumps`; at least 2 is used.

    Returns:
        Bytes of the pickle. The other classes are not imported.
    """
    buffer = io.BytesIO()
    number = pickle.DEFAULT_PROTOCOL if protocol is None else max(2, protocol)
    _RenamingPickler(buffer, paths, states, plain, number).dump(value)
    return buffer.getvalue()


_save_own_global: Callable[..., None] = vars(pickle._Pickler)["save_global"]  # noqa: SLF001


# The C pickler imports every class that it names, and insists on finding the same object there: only the Python one
# can write a name that is not the class's own.
class _RenamingPickler(pickle._Pickler):  # noqa: SLF001
    proto: int
    save: Callable[[object], None]
    write: Callable[[bytes], object]
    memoize: Callable[[object], None]

    def __init__(
        self,
        file: io.BytesIO,
        paths: Mapping[type, ClassPath],
        states: Mapping[type, Callable[[Any], Any]],
        plain: Collection[type[str]],
        protocol: int,
    ) -> None:
        super().__init__(file, protocol)
        self._paths = paths
        self._states = states
        own = vars(pickle._Pickler)["dispatch"]  # noqa: SLF001
        vars(self)["dispatch"] = {**own, **dict.fromkeys(plain, own[str])}

    def reducer_override(self, obj: Any) -> Any:
        state_of = self._states.get(type(obj))
        if state_of is None:
            return NotImplemented
        # copyreg.__newobj__ exists at run time only; typeshed does not know it.
        newobj = vars(copyreg)["__newobj__"]
        return newobj, (type(obj),), state_of(obj)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        path = self._paths.get(obj) if isinstance(obj, type) else None
        if path is None:
            _save_own_global(self, obj, name)
            return
        if self.proto >= 4:
            self.save(path[0])
            self.save(path[1])
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{path[0]}\n{path[1]}\n".encode())
        self.memoize(obj)
