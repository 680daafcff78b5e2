"""What a resumption must find: by what lies where, and, apart from that, by what ranks were told before the fault.

The first is exact: the newest save whose files are all in some place that the job sees. The second is a lower limit:
a save that a rank was told of is not lost with processes, nor one that was protected with a host.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from dcp_base import DcpError
from dcp_io import Store, open_store
from dcp_manifest import CheckpointNotFoundError, read_index
from dcp_manifest.folders.folder import DATA_SUFFIX, METADATA_NAME
from dcp_manifest.index.columns import needed_bytes
from integration_tests.memory.faults import Layout
from integration_tests.memory.hosts import Hosts

__all__ = ["Found", "Known", "Save", "look", "newest"]


@dataclass(frozen=True)
class Found:
    """What one place has of one step."""

    step: int
    created: int
    """Time of its index, in ns; 0 without one."""
    save_id: str
    needed: dict[str, int]
    sizes: dict[str, int]


def look(hosts: Hosts, names: Iterable[str]) -> dict[str, list[Found]]:
    """Return what hosts have, and, under an empty name, what the shared tier has."""
    found = {}
    for name in names:
        with hosts.on(name):
            found[name] = _look_in(open_store(hosts.near_url))
    found[""] = _look_in(open_store(hosts.far))
    return found


def _look_in(root: Store) -> list[Found]:
    return [
        _found(int(name.removeprefix("step-")), root.child(name)) for name in root.folders() if name.startswith("step-")
    ]


def _found(step: int, folder: Store) -> Found:
    sizes = {entry.name: entry.bytes for entry in folder.list() if entry.name.endswith(DATA_SUFFIX)}
    with contextlib.suppress(CheckpointNotFoundError, DcpError):
        index = read_index(folder.read(METADATA_NAME), file=METADATA_NAME)
        if index.info is not None:
            return Found(step, index.info.created_ns, index.info.save_id, needed_bytes(index), sizes)
    return Found(step, 0, "", {}, sizes)


def newest(found: Collection[Found]) -> Found | None:
    """Return the save that a job must resume from which sees these places: the highest step, of it the newest save."""
    sizes: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for one in found:
        for name, size in one.sizes.items():
            sizes[one.step][name] = max(size, sizes[one.step].get(name, -1))
    whole = [
        one
        for one in found
        if one.created and all(sizes[one.step].get(name, -1) >= size for name, size in one.needed.items())
    ]
    return max(whole, key=lambda one: (one.step, one.created), default=None)


@dataclass
class Save:
    """A save that some rank was told of."""

    step: int
    layout: Layout
    protected: bool
    gone: set[str] = field(default_factory=set)
    """Hosts of the layout whose memory is lost."""

    def is_held(self, layout: Layout) -> bool:
        """Whether the hosts of a job have all of it."""
        return not self.gone_from(layout) or (self.protected and self.is_covered(layout))

    def is_covered(self, layout: Layout) -> bool:
        """Whether the hosts of a job have all of it if partners have had their copies."""
        hosts, gone = self.layout.hosts, self.gone_from(layout)
        return not any(hosts[(hosts.index(host) + 1) % len(hosts)] in gone for host in gone)

    def gone_from(self, layout: Layout) -> set[str]:
        """Return the hosts that saved it and are not in a job, or have lost it."""
        hosts = {*self.layout.hosts}
        return (self.gone & hosts) | (hosts - {*layout.hosts})


@dataclass
class Known:
    """What ranks were told of, over the lives of a job."""

    saves: list[Save] = field(default_factory=list)

    def lived(self, layout: Layout, begun: int | None, saved: int, protected: int) -> None:
        """Note what was told in a life.

        Args:
            layout: Hosts of the life.
            begun: The step from which it resumed; None if it did not come as far as that.
            saved: The highest step that was saved; 0 if none was.
            protected: The highest step that was protected.
        """
        if begun is not None:  # those above were not complete, and may be saved again
            self.saves = [save for save in self.saves if save.step <= begun]
        if protected:
            self.saves.append(Save(protected, layout, protected=True))
        if saved:
            self.saves.append(Save(saved, layout, protected=False))

    def lost(self, host: str) -> None:
        """Note that the memory of a host is lost."""
        for save in self.saves:
            save.gone.add(host)

    def at_least(self, layout: Layout) -> int:
        """Return the step that a job on these hosts must resume from, or from a higher one."""
        return max((save.step for save in self.saves if save.is_held(layout)), default=0)

    @property
    def newest(self) -> Save | None:
        """The newest save that some rank was told of."""
        return max(self.saves, key=lambda save: save.step, default=None)
