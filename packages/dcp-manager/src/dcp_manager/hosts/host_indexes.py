"""Indexes of saves over several hosts: what one host has, and a crash kept from the others, is repeated there.

Without its index, a host would take its part of such a checkpoint for the leftovers of a killed save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from dcp_core import DcpError
from dcp_core.toolkit import HostPlaces
from dcp_io import Catalogue, read_current
from dcp_manager.together import Ranks
from dcp_manifest import DATA_SUFFIX, METADATA_NAME, library_logger, read_index

__all__ = ["repeat_indexes"]

_log = library_logger(__name__)
_MARKER = ".dcp-save-"

_Asked = Mapping[int, frozenset[str]]
"""Step → data files that no index on a host names."""


def repeat_indexes(catalogue: Catalogue, ranks: Ranks, places: HostPlaces) -> None:
    """Publish on each host the indexes that other hosts have of saves whose files it holds without an index.

    Args:
        catalogue: Catalogue of this rank's place.
        ranks: The ranks.
        places: Which ranks share a place.

    Ranks: every rank; collective.
    """
    asked = ranks.combine("ask for indexes", lambda: _unnamed(catalogue) if places.leads else {}, _join)
    if not asked:
        return
    found = ranks.combine("find indexes", lambda: _find(catalogue, asked) if places.leads else {}, _newest)

    def publish() -> None:
        own = _unnamed(catalogue) if places.leads else {}
        for step, (_, data) in found.items():
            if own.get(step, frozenset()) & frozenset(read_index(data, file=METADATA_NAME).files):
                catalogue.store_of(step).publish(METADATA_NAME, data)
                _log.warning("step %d: the index that another host had is repeated in %s", step, catalogue.store.url)

    ranks.combine("repeat indexes", publish, lambda _: None)


def _unnamed(catalogue: Catalogue) -> dict[int, frozenset[str]]:
    """Return the data files of each step that the index beside them, if there is one, does not name."""
    found = {}
    for folder in catalogue.folders():
        names = {entry.name for entry in folder.entries}
        data = {name for name in names if name.endswith(DATA_SUFFIX)}
        if METADATA_NAME in names:
            if not any(name.startswith(_MARKER) for name in names):
                continue
            index = read_current(folder.store).index
            data -= set() if index is None else set(index.files)
        if data:
            found[folder.step] = frozenset(data)
    return found


def _join(asked: list[_Asked]) -> _Asked:
    steps = {step for one in asked for step in one}
    return {step: frozenset().union(*(one.get(step, frozenset()) for one in asked)) for step in steps}


def _find(catalogue: Catalogue, asked: _Asked) -> dict[int, tuple[int, bytes]]:
    """Return time and bytes of the indexes here that name one of the files that are asked for."""
    found = {}
    for step, names in asked.items():
        with contextlib.suppress(DcpError):  # no index, or an unreadable one
            data = catalogue.store_of(step).read(METADATA_NAME)
            index = read_index(data, file=METADATA_NAME)
            if index.info is not None and names & frozenset(index.files):
                found[step] = index.info.created_ns, data
    return found


def _newest(found: list[dict[int, tuple[int, bytes]]]) -> dict[int, tuple[int, bytes]]:
    steps = {step for one in found for step in one}
    return {step: max(one[step] for one in found if step in one) for step in steps}
