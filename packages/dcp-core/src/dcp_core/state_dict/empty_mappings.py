"""Empty mappings in state dicts: their paths are recorded in the metadata, so a load without template restores them.

Stock loses empty mappings. The recorded name of an empty mapping is its path joined by dots, with one more dot at the
end, or several dots if that is the FQN of a tensor or object (`{"a": {}}` beside `{"a": {"": 1}}`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from dcp_core.state_dict.flatten import FlatState, Path, get_element, set_element

__all__ = ["is_empty_mapping", "merge_paths", "name_empty_mappings", "restore_empty_mappings"]


def name_empty_mappings(flat: FlatState) -> dict[str, Path]:
    """Return a name for each empty mapping of a flattened state dict: name → path."""
    named: dict[str, Path] = {}
    for path in flat.empty:
        named[_free_name(path, flat.values, named)] = path
    return named


def is_empty_mapping(name: str, path: Path) -> bool:
    """Return whether a recorded name and path belong to an empty mapping, not to a tensor or object."""
    if not name.endswith("."):
        return False
    joined = ".".join(map(str, path))
    return len(name) > len(joined) and name == joined.ljust(len(name), ".")


def merge_paths(parts: Iterable[Mapping[str, Path]]) -> dict[str, Path]:
    """Merge the recorded paths (name → path) of several ranks; the first path for each name is kept.

    An empty mapping is renamed if another rank uses its name for a tensor, an object, or another empty mapping.
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
    """Add an empty dict to a nested state dict at each recorded path of an empty mapping, unless the path exists.

    Args:
        nested: Nested state dict, which is changed in place.
        paths: Name → path, of tensors, objects and empty mappings.
        include: Function of name and path that returns whether to add an empty mapping; None to add all.
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
