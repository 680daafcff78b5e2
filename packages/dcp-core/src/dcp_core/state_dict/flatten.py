"""Flattening of nested state dicts into FQNs, as in stock, and unflattening.

An FQN is a path's elements joined by dots. Mappings are always flattened; a list is flattened only if it contains, at
any depth of lists and mappings, a tensor or a mapping. All other objects are leaves: tensors, tuples, sets, lists of
plain objects. Empty mappings have no leaf, so they have no FQN (see `empty_mappings`).

There are two forms of a path: `paths` have the elements that stock records (str for dict keys, int for list indices, a
`LiteralKey` for a dict key that is another literal); `keys` have the original key objects of the flattened state dict,
with which loaded objects are assigned to it.

Source: torch 2.13 `torch.distributed.checkpoint.{_nested_dict,_traverse}` (naming rules).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_core.errors import CorruptCheckpointError, DuplicateKeyError, UnsupportedValueError
from dcp_core.tensors.tensor_like import TensorLike
from dcp_manifest.index.columns import PathElement
from dcp_manifest.index.literal_keys import LiteralKey

__all__ = [
    "CONTAINER_TYPE",
    "FLATTEN_MAPPING",
    "STATE_DICT_ITEM",
    "FlatState",
    "Path",
    "assign",
    "flatten",
    "flatten_state_dict",
    "get_element",
    "holds_entry",
    "set_element",
    "unflatten_state_dict",
]

Path = tuple[PathElement, ...]
FLATTEN_MAPPING = dict[str, Path]
"""Type of the mapping from FQN to path, under the name that stock uses in annotations."""
CONTAINER_TYPE = MutableMapping[PathElement, Any]
STATE_DICT_ITEM = object
_MAX_LIST_INDEX = 1 << 24


@dataclass(slots=True)
class FlatState:
    """A flattened state dict: leaves, paths and original keys, each as a dict in the order of traversal.

    Attributes:
        values: FQN → leaf.
        paths: FQN → path, with the elements that stock records.
        keys: FQN → path, with the original key objects.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    keys: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    empty: list[Path] = field(default_factory=list)
    """Paths of the empty mappings, which have no FQN."""
    text_keys: dict[type, str] = field(default_factory=dict)
    """Class of dict keys that are no literals → text of such a key, which is used in FQNs and paths."""


def flatten(state_dict: Mapping[Any, Any], *, descend_plain: bool = True) -> FlatState:
    """Flatten a nested state dict: give each leaf an FQN.

    Args:
        state_dict: State dict, which is not changed; leaves are not copied.
        descend_plain: Whether mappings without tensors are flattened. With False, as in torch 2.3 and older, a nested
            mapping without a tensor at any depth is one leaf.

    Returns:
        The leaves by FQN, with their paths.

    Raises:
        DuplicateKeyError: Two leaves have the same FQN.
        UnsupportedValueError: The state dict contains itself.
    """
    flat = FlatState()
    try:
        _fill(flat, state_dict, "", (), (), descend_plain=descend_plain)
    except RecursionError:
        raise UnsupportedValueError("the state dict contains itself, or is nested too deeply to be saved") from None
    return flat


def flatten_state_dict(state_dict: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Flatten a nested state dict; returns FQN → leaf and FQN → path. Raises like `flatten`."""
    flat = flatten(state_dict)
    return flat.values, flat.paths


def unflatten_state_dict(state_dict: Mapping[str, Any], mapping: Mapping[str, Path]) -> dict[Any, Any]:
    """Unflatten a state dict into new nested dicts and lists; leaves are not copied.

    Args:
        state_dict: FQN → leaf.
        mapping: FQN → path; a leaf without a path is put at the top level. Missing list elements become None.

    Raises:
        CorruptCheckpointError: Two paths contradict each other.
    """
    nested: dict[Any, Any] = {}
    for name, value in state_dict.items():
        set_element(nested, mapping.get(name, (name,)), value)
    return nested


def set_element(root_dict: dict[Any, Any], path: Path, value: object) -> None:
    """Set the leaf at a path of a nested state dict, and create missing containers.

    A missing container becomes a dict if the next path element is a str, or a list if it is an int.

    Raises:
        CorruptCheckpointError: A path element leads into a leaf instead of a container.
    """
    container: Any = root_dict
    for element, following in itertools.pairwise(path):
        below = _lookup(container, element, path)
        if below is None:
            below = [] if type(following) is int else {}
            _store(container, element, below, path)
        container = below
    _store(container, path[-1], value, path)


def get_element(root_dict: Mapping[Any, Any], path: Path, default_value: Any = None) -> Any:
    """Return the object at a path of a nested state dict, or `default_value` if the path does not exist."""
    container: Any = root_dict
    for element in path:
        if type(element) is int:
            if not isinstance(container, list) or not 0 <= element < len(container):
                return default_value
            container = container[element]
        else:
            if not isinstance(container, Mapping):
                return default_value
            key = _real_key(container, element)
            if key not in container:
                return default_value
            container = container[key]
    return container


def assign(template: Mapping[Any, Any], keys: tuple[Any, ...], value: object) -> None:
    """Assign a loaded object to its place in a nested template; the containers and their types do not change.

    Args:
        template: Nested state dict that was flattened.
        keys: Keys of the path, from `FlatState.keys`.
        value: Object to assign.

    Raises:
        UnsupportedValueError: The innermost container on the path cannot be changed.
    """
    container: Any = template
    for key in keys[:-1]:
        container = container[key]
    try:
        container[keys[-1]] = value
    except TypeError:
        raise UnsupportedValueError(
            f"cannot store the loaded value at {keys!r}: the {type(container).__qualname__} there cannot be changed; "
            "use a dict or list in the state dict that is loaded into"
        ) from None


def _fill(
    flat: FlatState,
    container: Mapping[Any, Any] | list[Any],
    prefix: str,
    path: Path,
    keys: tuple[Any, ...],
    *,
    descend_plain: bool,
) -> None:
    """Add the leaves of a container; `prefix` is the container's name with a dot at the end, empty at the top."""
    is_list = isinstance(container, list)
    entries: Iterable[tuple[Any, Any]] = enumerate(container) if isinstance(container, list) else container.items()
    for key, value in entries:
        element = key if is_list or type(key) is str else _element(key, flat)
        name, at, real = f"{prefix}{element}", (*path, element), (*keys, key)
        # Tensors first: checking each of them for a Mapping would take most of the time.
        if not isinstance(value, torch.Tensor) and _is_container(value, descend_plain=descend_plain):
            if value:
                _fill(flat, value, f"{name}.", at, real, descend_plain=descend_plain)
            else:
                flat.empty.append(at)
        elif name in flat.values:
            raise DuplicateKeyError(
                f"two values would be saved as {name!r}: the one at {flat.keys[name]!r} and the one at {real!r}; "
                "rename one of the keys"
            )
        else:
            flat.values[name], flat.paths[name], flat.keys[name] = value, at, real


def _is_container(value: object, *, descend_plain: bool) -> bool:
    if isinstance(value, Mapping):
        return descend_plain or _holds_tensor(value)
    return isinstance(value, list) and (holds_entry(value) if descend_plain else _holds_tensor(value))


def _element(key: object, flat: FlatState) -> PathElement:
    try:
        literal = LiteralKey.of(key)
    except ValueError:  # Python refuses to print it
        raise UnsupportedValueError("a key of the state dict is an integer with too many digits for a name") from None
    if literal is not None:
        return literal
    text = str(key)
    if not isinstance(key, str) or str.__ne__(key, text):
        flat.text_keys.setdefault(type(key), text)
    return text


def holds_entry(values: list[Any]) -> bool:
    """Return whether a list contains a tensor or a mapping, at any depth of lists; `flatten` flattens such lists."""
    return any(
        isinstance(value, Mapping | torch.Tensor | TensorLike) or (isinstance(value, list) and holds_entry(value))
        for value in values
    )


def _holds_tensor(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value
    return any(
        isinstance(item, torch.Tensor | TensorLike) or (isinstance(item, Mapping | list) and _holds_tensor(item))
        for item in items
    )


def _real_key(container: Mapping[Any, Any], element: PathElement) -> Any:
    """Return the key of `container` that a path element other than a list index stands for."""
    if isinstance(element, LiteralKey):
        key = element.value
        if key in container or element not in container:
            return key
    return str(element)


def _lookup(container: Any, element: PathElement, path: Path) -> Any:
    _check(container, element, path)
    if isinstance(container, list):
        return container[element] if element < len(container) else None  # type: ignore[index,operator]
    return container.get(_real_key(container, element))


def _store(container: Any, element: PathElement, value: object, path: Path) -> None:
    _check(container, element, path)
    if isinstance(container, list):
        index = int(element)
        container.extend([None] * (index + 1 - len(container)))
        container[index] = value
    else:
        container[_real_key(container, element)] = value


def _check(container: Any, element: PathElement, path: Path) -> None:
    wanted = list if type(element) is int else Mapping
    if not isinstance(container, wanted):
        raise CorruptCheckpointError(
            f"path {path!r} needs a {wanted.__name__.lower()} for its element {element!r}, but another value put "
            f"a {type(container).__qualname__} there"
        )
    if type(element) is int and not 0 <= element <= _MAX_LIST_INDEX:
        raise CorruptCheckpointError(f"path {path!r} has the list index {element}, which no checkpoint of ours has")
