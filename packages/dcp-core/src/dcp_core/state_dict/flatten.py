"""Flatten nested state dicts to FQNs as stock does, unflatten them, and rename keys in a load.

An FQN joins a path's elements with dots. Mappings are flattened, and lists that contain a tensor or mapping at any
depth. Other pytree containers are flattened only if they contain a sharded tensor. Everything else is a leaf. Empty
mappings have no FQN.

`paths` contain stock's elements: str for dict keys, int for list indices, `LiteralKey` for other literal keys; `keys`
contain the original keys.

Source: torch 2.13 `torch.distributed.checkpoint.{_nested_dict,_traverse}` (naming rules).
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_core.errors import CorruptCheckpointError, UnsupportedValueError
from dcp_core.shards.shards import holds_shard
from dcp_core.tensors.kinds import SCALARS, TensorLike, children_of, rebuilt
from dcp_manifest.index.columns import PathElement
from dcp_manifest.index.literal_keys import LiteralKey

Path = tuple[PathElement, ...]
FLATTEN_MAPPING = dict[str, Path]
CONTAINER_TYPE = MutableMapping[PathElement, Any]
STATE_DICT_ITEM = object
_MAX_LIST_INDEX = 1 << 24
_REMEDY = "load the checkpoint into a template, which has the structure"


@dataclass(slots=True)
class FlatState:
    """A flattened state dict, in order."""

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    keys: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    empty: list[Path] = field(default_factory=list)
    text_keys: dict[type, str] = field(default_factory=dict)
    """Class of non-literal keys → example of a key's text."""


def flatten(
    state_dict: Mapping[Any, Any], *, descend_plain: bool = True, opens: Callable[[str], bool] | None = None
) -> FlatState:
    """Flatten without copying leaves; UnsupportedValueError if the state dict contains itself or an FQN twice.

    Unless `descend_plain`, a nested mapping without tensors is a leaf, as in torch 2.3. `opens` returns whether the
    checkpoint has values below a container's name.
    """
    flat = FlatState()
    try:
        _fill(flat, [*state_dict.items()], "", (), (), _Rules(descend_plain, opens))
    except RecursionError:
        raise UnsupportedValueError("the state dict contains itself, or is nested too deeply to be saved") from None
    return flat


def flatten_state_dict(state_dict: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return FQN → leaf and FQN → path; raises like `flatten`."""
    flat = flatten(state_dict)
    return flat.values, flat.paths


def unflatten_state_dict(state_dict: Mapping[str, Any], mapping: Mapping[str, Path]) -> dict[Any, Any]:
    """Build nested dicts and lists; CorruptCheckpointError if the paths are inconsistent.

    Leaves without a path go to the top level; missing list elements become None.
    """
    nested: dict[Any, Any] = {}
    for name, value in state_dict.items():
        set_element(nested, mapping.get(name, (name,)), value)
    return nested


def set_element(root_dict: dict[Any, Any], path: Path, value: object) -> None:
    """Set a leaf, creating missing dicts, and lists before int elements."""
    if not path:
        raise CorruptCheckpointError(f"the index has an empty path; {_REMEDY}")
    container: Any = root_dict
    for element, following in itertools.pairwise(path):
        below = _lookup(container, element, path)
        if below is None:
            below = [] if type(following) is int else {}
            _store(container, element, below, path)
        container = below
    _store(container, path[-1], value, path)


def get_element(root_dict: Mapping[Any, Any], path: Path, default_value: Any = None) -> Any:
    """Return the object at a path, or `default_value`."""
    container: Any = root_dict
    for element in path:
        if type(element) is int:
            if not isinstance(container, list) or not 0 <= element < len(container):
                return default_value
            container = container[element]
        else:
            if not isinstance(container, Mapping):
                return default_value
            key = real_key(container, element)
            if key not in container:
                return default_value
            container = container[key]
    return container


def assign(template: Mapping[Any, Any], keys: tuple[Any, ...], value: object) -> None:
    """Assign an object at a path of `FlatState.keys`, replacing immutable containers."""
    containers: list[Any] = [template]
    for key in keys[:-1]:
        containers.append(child_at(containers[-1], key))
    for container, key in zip(reversed(containers), reversed(keys), strict=True):
        if isinstance(container, MutableMapping | list | deque):
            container[key] = value
            return
        if isinstance(container, Mapping):
            break
        children = children_of(container) or ()
        value = rebuilt(container, [value if name == key else child for name, child in children])
    raise UnsupportedValueError(
        f"cannot store the loaded value at {keys!r}: the {type(containers[-1]).__qualname__} there cannot be changed; "
        "use a dict or list in the state dict that is loaded into"
    )


def child_at(container: Any, key: Any) -> Any:
    """Return a child by a key of `FlatState.keys`."""
    if isinstance(container, Mapping | list | tuple | deque):
        return container[key]
    return dict(children_of(container) or ())[key]


@dataclass(frozen=True, slots=True)
class _Rules:
    descend_plain: bool
    opens: Callable[[str], bool] | None

    def entries(self, value: Any, name: str) -> tuple[Iterable[tuple[Any, Any]], bool] | None:
        if isinstance(value, Mapping):
            return (value.items(), False) if self.descend_plain or _holds_tensor(value) else None
        if isinstance(value, list) and (holds_entry(value) if self.descend_plain else _holds_tensor(value)):
            return enumerate(value), True
        children = children_of(value)
        if children is None or not (holds_shard(value) or (self.opens is not None and self.opens(name))):
            return None
        return children, all(type(key) is int for key, _ in children)


def _fill(
    flat: FlatState,
    entries: Iterable[tuple[Any, Any]],
    prefix: str,
    path: Path,
    keys: tuple[Any, ...],
    rules: _Rules,
    *,
    positions: bool = False,
) -> None:
    """Add a container's leaves; `prefix` is empty or ends with a dot."""
    for key, value in entries:
        element = key if positions or type(key) is str else _element(key, flat)
        name, at, real = f"{prefix}{element}", (*path, element), (*keys, key)
        # Checking every tensor for a Mapping would take most of the time.
        leaf = type(value) in SCALARS or isinstance(value, torch.Tensor)
        below = None if leaf else rules.entries(value, name)
        if below is not None:
            if value:
                _fill(flat, below[0], f"{name}.", at, real, rules, positions=below[1])
            else:
                flat.empty.append(at)
        elif name in flat.values:
            raise UnsupportedValueError(
                f"two values would be saved as {name!r}: the one at {flat.keys[name]!r} and the one at {real!r}; "
                "rename one of the keys"
            )
        else:
            flat.values[name], flat.paths[name], flat.keys[name] = value, at, real


def _element(key: object, flat: FlatState) -> PathElement:
    try:
        literal = LiteralKey.of(key)
    except ValueError:  # Python refuses to convert it to str
        raise UnsupportedValueError("a key of the state dict is an integer with too many digits for a name") from None
    if literal is not None:
        return literal
    if isinstance(key, torch.Tensor):
        raise UnsupportedValueError(
            "a key of the state dict is a tensor, as in the attribute `state` of an optimizer, and no load would find "
            "its value again: save app_state(model, optimizer), or optimizer.state_dict()"
        )
    text = str(key)
    if not isinstance(key, str) or str.__ne__(key, text):
        flat.text_keys.setdefault(type(key), text)
    return text


def holds_entry(values: list[Any]) -> bool:
    """Return whether `flatten` flattens a list."""
    return any(
        isinstance(value, Mapping | torch.Tensor | TensorLike)
        or (holds_entry(value) if isinstance(value, list) else holds_shard(value))
        for value in values
    )


def _holds_tensor(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value
    return any(
        isinstance(item, torch.Tensor | TensorLike) or (isinstance(item, Mapping | list) and _holds_tensor(item))
        for item in items
    )


def real_key(container: Mapping[Any, Any], element: PathElement) -> Any:
    """Return the mapping's key of a path element."""
    if isinstance(element, LiteralKey):
        key = element.value
        if key in container or element not in container:
            return key
    return str(element)


def _lookup(container: Any, element: PathElement, path: Path) -> Any:
    _check(container, element, path)
    if isinstance(container, list):
        return container[element] if element < len(container) else None  # type: ignore[index,operator]
    return container.get(real_key(container, element))


def _store(container: Any, element: PathElement, value: object, path: Path) -> None:
    _check(container, element, path)
    if isinstance(container, list):
        index = int(element)
        container.extend([None] * (index + 1 - len(container)))
        container[index] = value
    else:
        container[real_key(container, element)] = value


def _check(container: Any, element: PathElement, path: Path) -> None:
    wanted = list if type(element) is int else Mapping
    if not isinstance(container, wanted):
        raise CorruptCheckpointError(
            f"the index has the path {path!r}, which needs a {wanted.__name__.lower()} for its element {element!r}, "
            f"but another value put a {type(container).__qualname__} there; {_REMEDY}"
        )
    if type(element) is int and not 0 <= element <= _MAX_LIST_INDEX:
        raise CorruptCheckpointError(
            f"the index has the path {path!r}, whose list index {element} is not in 0 to {_MAX_LIST_INDEX:,}; {_REMEDY}"
        )


def name_empty_mappings(flat: FlatState) -> dict[str, Path]:
    """Return name → path of empty mappings."""
    named: dict[str, Path] = {}
    for path in flat.empty:
        named[_free_name(path, flat.values, named)] = path
    return named


def is_empty_mapping(name: str, path: Path) -> bool:
    """Return whether this is an empty mapping's entry."""
    if not name.endswith("."):
        return False
    joined = ".".join(map(str, path))
    return len(name) > len(joined) and name == joined.ljust(len(name), ".")


def merge_paths(parts: Iterable[Mapping[str, Path]]) -> dict[str, Path]:
    """Merge ranks' paths; rename empty mappings if another rank uses the name."""
    merged: dict[str, Path] = {}
    displaced: dict[Path, None] = {}
    for part in parts:
        for name, path in part.items():
            kept = merged.setdefault(name, path)
            if kept is path or kept == path:
                continue
            if is_empty_mapping(name, path):
                displaced[path] = None
            elif is_empty_mapping(name, kept):
                displaced[kept] = None
                merged[name] = path
    for path in displaced:
        merged[_free_name(path, merged)] = path
    return merged


def restore_empty_mappings(
    nested: dict[Any, Any], paths: Mapping[str, Path], *, include: Callable[[str, Path], bool] | None = None
) -> None:
    """Add missing empty mappings in place, if `include` agrees."""
    for name, path in paths.items():
        wanted = is_empty_mapping(name, path) and (include is None or include(name, path))
        if wanted and get_element(nested, path) is None:
            set_element(nested, path, {})


def _free_name(path: Path, *taken: Container[str]) -> str:
    name = ".".join(map(str, path)) + "."
    while any(name in names for names in taken):
        name += "."
    return name


def traverse_state_dict(
    state_dict: Mapping[str, Any],
    visitor: Callable[[Path, Any], None],
    keep_traversing: Callable[[object], bool] | None = None,
) -> None:
    """Call `visitor(path, leaf)` for each leaf, with the paths of `flatten`.

    A list is traversed if it contains a mapping or traversed list, or `keep_traversing` is true for an element.
    """
    if keep_traversing is None:
        flat = flatten(state_dict)
        for name, value in flat.values.items():
            visitor(flat.paths[name], value)
        return
    for key, value in state_dict.items():
        _visit((str(key),), value, visitor, keep_traversing)


def _visit(
    path: tuple[PathElement, ...],
    value: Any,
    visitor: Callable[[Path, Any], None],
    keep_traversing: Callable[[object], bool],
) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _visit((*path, str(key)), item, visitor, keep_traversing)
    elif isinstance(value, list) and _is_traversed(value, keep_traversing):
        for position, item in enumerate(value):
            _visit((*path, position), item, visitor, keep_traversing)
    else:
        visitor(path, value)


def _is_traversed(items: list[Any], keep_traversing: Callable[[object], bool]) -> bool:
    return any(
        isinstance(item, Mapping)
        or (isinstance(item, list) and _is_traversed(item, keep_traversing))
        or keep_traversing(item)
        for item in items
    )


def print_tensor(path: Path, value: object, print_fun: Callable[[str], None] = print) -> None:
    """Print a leaf's path, shape and dtype."""
    if isinstance(value, torch.Tensor):
        print_fun(f"{path}: {type(value).__name__} {tuple(value.shape)} {value.dtype}")
    else:
        print_fun(f"{path}: {type(value).__name__} {value!r}")


class KeyMap:
    """Maps template keys to checkpoint keys; for the arguments see `DefaultLoadPlanner`.

    The longest matching prefix applies. `{"model": ""}` drops a prefix; `{"": "model"}` adds one to all other keys.
    Patterns apply in order. ValueError: one is invalid.
    """

    def __init__(
        self, rename: Mapping[str, str] | None = None, patterns: Sequence[tuple[str | re.Pattern[str], str]] = ()
    ) -> None:
        self._rename = dict(rename or {})
        self._patterns = []
        for pattern, replacement in patterns:
            try:
                compiled = re.compile(pattern)
                compiled.sub(replacement, "")
            except (re.error, IndexError) as error:
                raise ValueError(f"rename_regex: {pattern!r} → {replacement!r}: {error}") from error
            self._patterns.append((compiled, replacement))

    def __bool__(self) -> bool:
        return bool(self._rename or self._patterns)

    def stored(self, name: str) -> str:
        """Return a template key's checkpoint key."""
        path = name
        while path:
            new = self._rename.get(path)
            if new:
                return new + name[len(path) :]
            if new == "" and path != name:
                return name[len(path) + 1 :]
            path = path.rpartition(".")[0]
        if self._rename.get(""):
            return f"{self._rename['']}.{name}"
        for pattern, replacement in self._patterns:
            name = pattern.sub(replacement, name)
        return name

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the entries of `rename` that match no template key."""
        paths = set()
        for name in names:
            while name:
                paths.add(name)
                name = name.rpartition(".")[0]
        return [path for path in self._rename if path and path not in paths]
