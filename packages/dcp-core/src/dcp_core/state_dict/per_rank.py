"""`PerRank`: objects in a state dict that differ between ranks, such as the state of a random generator.

In the checkpoint, a `PerRank` is a mapping with one key for each rank (`rank_0`, `rank_1`, …), which every reader can
load; each rank writes its own entry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dcp_core.records.protocols import in_shared_order, is_stateful

__all__ = ["PerRank", "RankValues", "with_rank_values"]


class PerRank:
    """Wrapper for an object or tensor in a state dict that differs between ranks, such as a random generator's state.

    Each rank saves its own object, and loads the object that the rank with the same number saved.

    Args:
        value: Tensor, object or container to save; in the template of a load, it is filled or replaced as without the
            wrapper. The state of a `Stateful` is saved as one object.
        otherwise: Rule for another number of ranks than that of the job that saved. A rank without an entry, because
            that job had fewer ranks: `keep` keeps the object in the template, `modulo` loads the entry of the rank
            (own rank modulo the number of ranks that saved). `error`: `load` raises a `LoadMismatchError` on every rank
            if there were fewer ranks or more. None is `keep`, but `modulo` for a `Stateful` that also has a method
            `load_derived_state(state_dict, rank)`: it is given the other rank's entry to derive a state of its own from
            it, as `dcp_state.RandomState` does.

    Except with `error`, `load` ignores entries of ranks beyond its own world size; `load_keys` returns all entries. If
    the checkpoint has one ordinary object under the key of the `PerRank`, every rank loads this object.
    `LoadReport.per_rank` names the rank whose entry was loaded, and `LoadReport.derived` the keys with a derived state.

    Example:
        ```python
        import torch
        from dcp_core import PerRank, load, save

        save({"generator": PerRank(torch.get_rng_state())}, checkpoint_id="step-1")
        state = {"generator": PerRank(torch.get_rng_state(), otherwise="modulo")}
        load(state, checkpoint_id="step-1")
        torch.set_rng_state(state["generator"].value)
        ```
    """

    __slots__ = ("otherwise", "value")

    def __init__(self, value: Any, *, otherwise: Literal["keep", "modulo", "error"] | None = None) -> None:
        if otherwise is None:
            otherwise = "modulo" if _derives(value) else "keep"
        if otherwise not in ("keep", "modulo", "error"):
            raise ValueError(f"otherwise={otherwise!r} is not known; choose 'keep', 'modulo' or 'error'")
        self.value = value
        self.otherwise = otherwise

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, otherwise={self.otherwise!r})"


def with_rank_values(value: Any, rank: int) -> Any:
    """Return a state dict for saving in which each `PerRank` is replaced by a mapping with this rank's entry.

    Containers that contain a `PerRank` are copied; all other objects are those of `value`.
    """
    if isinstance(value, torch.Tensor):  # thousands of them, and the check for a Mapping is slow
        return value
    if isinstance(value, PerRank):
        return {_key(rank): _held(value)}
    if isinstance(value, Mapping):
        held = {key: old for key, old in value.items() if not isinstance(old, torch.Tensor)}
        changed = {key: new for key, old in in_shared_order(held) if (new := with_rank_values(old, rank)) is not old}
        return {**value, **changed} if changed else value
    if type(value) is list:
        items = [with_rank_values(old, rank) for old in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return value


@dataclass(slots=True)
class _Place:
    """The place of a `PerRank` in a template."""

    container: Any
    key: Any
    value: PerRank
    path: tuple[str, ...] | None = None
    """Path of the loaded values below the place; None if nothing is loaded."""
    derives: bool = False
    """Whether the loaded state is another rank's, from which this rank derives its own."""


class RankValues:
    """The `PerRank` wrappers of a template, which are replaced by their contents during a load.

    Args:
        template: Template of the load, which is changed in place until `restore`.
        names: FQNs of all tensors and objects in the checkpoint.
        rank: Rank of this process within the group.
        world_size: Number of ranks in the group.
    """

    def __init__(self, template: dict[str, Any], names: Collection[str], rank: int, world_size: int) -> None:
        self.taken: dict[str, int | None] = {}
        """FQN of a `PerRank` → rank whose entry is loaded; None if the template's is kept, or all ranks share one."""
        self.refused: dict[str, str] = {}
        """FQN of a `PerRank` that refuses another number of ranks than saved it → message."""
        self.derived: dict[str, int] = {}
        """FQN of a `PerRank` whose state is derived from another rank's entry → that rank."""
        self._rank = rank
        self._places: list[_Place] = []
        self._states: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        for name, place in sorted(_find(template, ""), key=lambda found: found[0]):
            saved = _saved_ranks(names, name)
            if place.value.otherwise == "error" and saved and len(saved) != world_size:
                self.refused[name] = (
                    f"{name!r} was saved by {len(saved)} ranks for each of them, and there are {world_size} ranks now: "
                    "resume with as many ranks as saved it, or leave this value out of the load"
                )
            source: int | None = rank
            if saved and rank not in saved:
                source = rank % (max(saved) + 1) if place.value.otherwise == "modulo" else None
            shared = not saved and any(known == name or known.startswith(f"{name}.") for known in names)
            self.taken[name] = None if shared else source
            if shared:
                place.path, stand_in = (), _held_by_all(place.value, is_one=name in names)
            elif source is None:
                stand_in = {}
            else:
                place.path, stand_in = (_key(source),), {_key(source): _held(place.value)}
                if source != rank and _derives(place.value.value):
                    self.derived[name] = source
                    place.derives = True
            place.container[place.key] = stand_in
            self._places.append(place)

    def restore(self) -> None:
        """Put each `PerRank` back into the template, with the loaded object in it."""
        for place in self._places:
            if place.path is not None:
                held = place.container[place.key]
                loaded = held[place.path[0]] if place.path else held
                if not is_stateful(place.value.value):
                    place.value.value = loaded
                elif place.derives:
                    derive = getattr(place.value.value, "load_derived_state")  # noqa: B009 - optional in a Stateful
                    self._states.append((derive, (loaded[0], self._rank)))
                else:
                    state = loaded[0] if isinstance(loaded, tuple) else loaded
                    self._states.append((place.value.value.load_state_dict, (state,)))
            place.container[place.key] = place.value
        self._places.clear()

    def apply(self) -> None:
        """Call `load_state_dict` of each `Stateful` in a `PerRank` with its loaded state. Call it after `restore`."""
        for method, arguments in self._states:
            method(*arguments)
        self._states.clear()


def _held(value: PerRank) -> Any:
    """Return the value to save; the state of a stateful value as one object, because its form may change."""
    return (value.value.state_dict(),) if is_stateful(value.value) else value.value


def _held_by_all(value: PerRank, *, is_one: bool) -> Any:
    """Return the template of an object that was saved without a `PerRank`; its state may have been saved in parts."""
    return value.value.state_dict() if is_stateful(value.value) and not is_one else _held(value)


def _derives(value: Any) -> bool:
    return is_stateful(value) and callable(getattr(value, "load_derived_state", None))


def _key(rank: int) -> str:
    return f"rank_{rank}"


def _find(container: Any, name: str) -> Iterator[tuple[str, _Place]]:
    entries = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in entries:
        inner = f"{name}.{key}" if name else str(key)
        if isinstance(value, PerRank):
            yield inner, _Place(container, key, value)
        elif isinstance(value, dict) or type(value) is list:
            yield from _find(value, inner)


def _saved_ranks(names: Collection[str], name: str) -> set[int]:
    prefix = f"{name}.rank_"
    heads = (known[len(prefix) :].partition(".")[0] for known in names if known.startswith(prefix))
    return {int(head) for head in heads if head.isdecimal()}
