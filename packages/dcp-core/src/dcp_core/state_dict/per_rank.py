"""`PerRank`: values that differ between ranks, such as the state of a random generator.

The checkpoint stores a mapping with one key per rank (`rank_0`, `rank_1`, …).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import torch

from dcp_core.records.protocols import in_shared_order, is_stateful


class PerRank:
    """Wrapper for a value that differs between ranks. Each rank saves its own and loads the entry with its number.

    ```python
    import torch
    from dcp_core import PerRank, load, save

    save({"generator": PerRank(torch.get_rng_state())}, checkpoint_id="step-1")
    state = {"generator": PerRank(torch.get_rng_state(), otherwise="modulo")}
    load(state, checkpoint_id="step-1")
    torch.set_rng_state(state["generator"].value)
    ```

    Args:
        value: Tensor, object or container, loaded as without the wrapper. A `Stateful`'s state is saved as one object.
        otherwise: Rule if the number of ranks changed. For a rank without an entry, `keep` keeps the template's value
            and `modulo` loads the entry of (rank modulo saved ranks). `error` raises `LoadMismatchError` on every rank.
            None means `keep`, or `modulo` for a `Stateful` with `load_derived_state(state_dict, rank)`, such as
            `dcp_state.RandomState`.

    Unless `otherwise="error"`, `load` ignores entries of ranks beyond its world size; `load_keys` returns all. If the
    checkpoint has one ordinary value, every rank loads it. See `LoadReport.per_rank` and `derived`.
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
    """Replace each `PerRank` by this rank's entry."""
    if isinstance(value, torch.Tensor):  # the check for a Mapping is slow
        return value
    if isinstance(value, PerRank):
        return {_key(rank): _held(value)}
    if isinstance(value, Mapping):
        held = {
            key: old
            for key, old in value.items()
            if not isinstance(old, torch.Tensor) and isinstance(old, PerRank | Mapping | list)
        }
        if not held:
            return value
        changed = {key: new for key, old in in_shared_order(held) if (new := with_rank_values(old, rank)) is not old}
        return {**value, **changed} if changed else value
    if type(value) is list:
        items = [with_rank_values(old, rank) for old in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return value


@dataclass(slots=True)
class RankPlace:
    """A `PerRank` wrapper in its container."""

    container: Any
    key: Any
    value: PerRank
    path: tuple[str, ...] | None = None
    derives: bool = False


class RankValues:
    """Replaces `PerRank` wrappers by their contents, in place, until `restore`."""

    def __init__(
        self, places: Iterable[tuple[str, RankPlace]], names: Collection[str], rank: int, world_size: int
    ) -> None:
        self.taken: dict[str, int | None] = {}
        """FQN → rank of the loaded entry; None without one, or if all ranks share a value."""
        self.refused: dict[str, str] = {}
        self.derived: dict[str, int] = {}
        self._rank = rank
        self._places: list[RankPlace] = []
        self._states: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        for name, place in sorted(places, key=itemgetter(0)):
            saved = _saved_ranks(names, name)
            if place.value.otherwise == "error" and saved and len(saved) != world_size:
                ranks = f"{len(saved)} rank{'s' * (len(saved) != 1)}"
                self.refused[name] = (
                    f"{name!r} has a value per rank, saved by {ranks}, and this job has {world_size}: resume "
                    "with as many ranks as saved it, or leave this value out of the load"
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
        """Restore the wrappers and loaded values."""
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
        """Pass the loaded states to the wrapped `Stateful`s, after `restore`."""
        for method, arguments in self._states:
            method(*arguments)
        self._states.clear()


def _held(value: PerRank) -> Any:
    return (value.value.state_dict(),) if is_stateful(value.value) else value.value


def _held_by_all(value: PerRank, *, is_one: bool) -> Any:
    return value.value.state_dict() if is_stateful(value.value) and not is_one else _held(value)


def _derives(value: Any) -> bool:
    return is_stateful(value) and callable(getattr(value, "load_derived_state", None))


def _key(rank: int) -> str:
    return f"rank_{rank}"


def rank_places(container: Any, name: str = "") -> Iterator[tuple[str, RankPlace]]:
    """Yield the FQN and place of each `PerRank` wrapper."""
    entries = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in entries:
        if isinstance(value, PerRank | dict) or type(value) is list:
            inner = f"{name}.{key}" if name else str(key)
            if isinstance(value, PerRank):
                yield inner, RankPlace(container, key, value)
            else:
                yield from rank_places(value, inner)


def _saved_ranks(names: Collection[str], name: str) -> set[int]:
    prefix = f"{name}.rank_"
    heads = (known[len(prefix) :].partition(".")[0] for known in names if known.startswith(prefix))
    return {int(head) for head in heads if head.isdecimal()}
