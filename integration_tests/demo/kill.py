"""Kills a rank while a save is being written: the moment that a checkpoint library must survive.

The observer is outside the job: it looks at the checkpoint's folder and strikes when the first new data file is there.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from integration_tests.demo.launch import Job

__all__ = ["MidSaveKiller"]

DATA_SUFFIX = ".distcp"
LOOK_EVERY_SECONDS = 0.0005


class MidSaveKiller:
    """Watches a folder and SIGKILLs one rank as soon as a data file appears that was not there before."""

    def __init__(self, job: Job, folder: Path, *, victim: int) -> None:
        self.job = job
        self.folder = folder
        self.victim = victim
        self.struck_at: float | None = None
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def arm(self) -> None:
        """Begin to watch. The save that is waited for must not have begun."""
        self._metadata_before = self._metadata()
        self._known = self._data_files()
        self._watcher.start()

    def hit_in_time(self) -> bool:
        """Whether the rank was killed before the save was published: `.metadata` is what it was, byte for byte."""
        return self.struck_at is not None and self._metadata() == self._metadata_before

    def debris(self) -> set[str]:
        """The data files that the killed save left behind."""
        return self._data_files() - self._known

    def _watch(self) -> None:
        while not self._data_files() - self._known:
            if not self.job.alive(self.victim):
                return
            time.sleep(LOOK_EVERY_SECONDS)
        self.job.kill(self.victim)
        self.struck_at = time.monotonic()

    def _metadata(self) -> bytes:
        return (self.folder / ".metadata").read_bytes()

    def _data_files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir() if path.name.endswith(DATA_SUFFIX)}
