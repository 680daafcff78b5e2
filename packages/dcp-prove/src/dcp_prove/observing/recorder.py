"""Recorder of one rank's run: writes moments of the training to a file."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcp_prove.observing.batches import BatchWatch
from dcp_prove.observing.crawl import Crawl
from dcp_prove.observing.fingerprint import fingerprint, shorten
from dcp_prove.observing.random_states import global_random_states
from dcp_prove.observing.records import Item, Moment, write_moment, write_note


class Recorder:
    """Recorder that appends to a file."""

    def __init__(self, path: Path, watch: BatchWatch) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._watch = watch
        self._noted: set[str] = set()
        self._lock = threading.Lock()  # a save in the background ends in a thread of its own

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def record(
        self,
        at: str,
        step: int,
        roots: Sequence[Mapping[str, Any]],
        *,
        full: bool,
        loss: float | None = None,
        samples: list[Any] | None = None,
        reads: bool = True,
    ) -> None:
        """Record a moment; with `reads`, what was read belongs to this moment, not the next.

        Without `samples`, those of data loaders count.
        """
        batches, seen, iterators, workers = self._watch.take() if reads else ([], [], 0, 0)
        moment = Moment(at, step, full, loss=loss, batches=batches, iterators=iterators, workers=workers)
        moment.samples = seen if samples is None else samples
        for name, state in global_random_states().items():
            moment.items[name] = Item("random", fingerprint(state), "")
        crawl = Crawl(*roots, full=full)
        for name, (kind, value) in crawl.found.items():
            try:
                shown = "" if kind == "generator" else shorten(value)
                moment.items[name] = Item(kind, fingerprint(value), shown)
            except Exception as error:  # noqa: BLE001 - values of any kind, which may refuse to be read
                crawl.notes.append(f"{name} cannot be read ({type(error).__name__}: {error})")
        with self._lock:
            for note in crawl.notes:
                if note not in self._noted:
                    self._noted.add(note)
                    write_note(self._file, note)
            write_moment(self._file, moment)
