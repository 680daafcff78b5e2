"""Empty mappings of a state dict: they hold no value, so their paths are recorded under names that no value uses.

Stock drops them. The name is the joined path with one more dot, or several if that is the name of a value (`{"a": {}}`
beside `{"a": {"": 1}}`); so such a name is recognised because it is longer than its path.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from dcp_core.state_dict.flatten import FlatState, Path, get_element, set_element

__all__ = ["is_empty_mapping", "merge_paths", "name_empty_mappings", "restore_empty_mappings"]


def name_empty_mappings(flat: FlatState) -> dict[str, Path]:
    """Name the empty mappings of a flattened state dict, so that their paths can be kept with those of values."""
    named: dict[str, Path] = {}
    for path in flat.empty:
        named[_free_name(path, flat.values, named)] = path
    return named


def is_empty_mapping(name: str, path: Path) -> bool:
    """Whether a recorded name and path stand for an empty mapping."""
    if not name.endswith("."):
        return False
    joined = ".".join(map(str, path))
    return len(name) > len(joined) and name == joined.ljust(len(name), ".")


def merge_paths(parts: Iterable[Mapping[str, Path]]) -> dict[str, Path]:
    """Merge the recorded paths of several ranks; the first path of a value is kept.

    An empty mapping is renamed if another rank uses its name for a value or for an empty mapping at another path.
    """
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
    """Put an empty dict at each recorded path of an empty mapping, unless something is there already.

    Args:
        nested: Unflattened state dict, which is changed.
        paths: Name → path, of values and empty mappings; `is_empty_mapping` tells them apart.
        include: Function that says whether an empty mapping is wanted; None for all of them.
    """
    for name, path in paths.items():
        wanted = is_empty_mapping(name, path) and (include is None or include(name, path))
        if wanted and get_element(nested, path) is None:
            set_element(nested, path, {})


def _free_name(path: Path, *taken: Container[str]) -> str:
    name = ".".join(map(str, path)) + "."
    while any(name in names for names in taken):
        name += "."
    return name
