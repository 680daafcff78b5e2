"""One trial: a copy of a checkpoint is damaged and loaded. What came of it is one word."""

from __future__ import annotations

import functools
import random
import re
import resource
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcp_core import LoadMismatchError
from dcp_core.errors import DcpError
from dcp_io import LocalStore, verify_checkpoint
from integration_tests.oracle.kinds import same_bits
from integration_tests.robustness.campaign.hurts import Hurt, draw
from integration_tests.robustness.campaign.subjects import Subject, open_subject
from integration_tests.robustness.damage import files

__all__ = ["BAD", "MEMORY_BYTES", "Outcome", "Trials"]

_RANK_INDEX = re.compile(r"__\d+(\.\w+)?\.metadata")
_NOTES = ".json"  # beside golden checkpoints: what is in them
REFUSED, HARMLESS, UNPROTECTED = "refused", "harmless", "unprotected"
BAD = ("wrong", "unclear", "unreported", "memory", "crash", "hang")
"""What must never happen: wrong values; an error that does not say what is wrong; damage that `dcp verify` does not
see; much memory; the end of the process; no end at all."""
MEMORY_BYTES = 64 << 20
"""So much more memory than ever before is too much for a trial: the checkpoints have a megabyte at most."""


@dataclass(frozen=True)
class Outcome:
    """What came of one trial."""

    number: int
    subject: str
    hurt: str
    files: tuple[str, ...]
    result: str
    detail: str = ""
    peak_bytes: int = 0


class Trials:
    """Runs trials by their numbers: the same number and seed do the same damage to the same bytes.

    Args:
        root: Where `make_all` saved.
        seed: Of all trials.
        names: Of the subjects, which take turns.
        scratch: A folder for copies.
    """

    def __init__(self, root: Path, seed: int, names: Sequence[str], scratch: Path) -> None:
        self._root, self._seed, self._names, self._scratch = root, seed, names, scratch

    @functools.cache  # noqa: B019 - lives as long as the process
    def _subject(self, name: str) -> tuple[Subject, object]:
        subject = open_subject(self._root, name)
        return subject, subject.load(subject.folder)

    def run(self, number: int) -> Outcome:
        """One trial."""
        name = self._names[number % len(self._names)]
        subject, wanted = self._subject(name)
        folder = self._scratch / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(subject.folder, folder, ignore=shutil.ignore_patterns(f"*{_NOTES}"))
        hurt = draw(random.Random(f"{self._seed}/{number}"), folder, subject.earlier)
        before = _peak_bytes()
        result, detail = _result(subject, folder, hurt, wanted)
        peak = _peak_bytes()
        if peak - before > MEMORY_BYTES:
            result, detail = "memory", f"{peak - before:,} bytes; {detail}"
        return Outcome(number, name, hurt.what, hurt.files, result, detail, peak)


def _result(subject: Subject, folder: Path, hurt: Hurt, wanted: object) -> tuple[str, str]:
    try:
        found = subject.load(folder)
    except DcpError as error:
        result, detail = (REFUSED if _says_where(error, folder) else "unclear"), f"{type(error).__name__}: {error}"
    except MemoryError as error:
        return "memory", repr(error)
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        return "unclear", f"{type(error).__name__}: {error}"
    else:
        if same_bits(found, wanted):
            result, detail = HARMLESS, ""
        elif any(subject.unprotected(hurt.what, file) for file in hurt.files):
            return UNPROTECTED, ""
        else:
            return "wrong", "other values were loaded"
    if result != "unclear" and subject.verified and _changed(subject, folder):
        report = verify_checkpoint(LocalStore(folder))
        if report.ok:
            return "unreported", f"verification finds nothing; the load: {result} {detail}"
    return result, detail


def _changed(subject: Subject, folder: Path) -> bool:
    """Whether a file of the checkpoint differs. Of a rank's index there are two copies, and others may lie around."""
    now = {path.name: path.read_bytes() for path in files(folder)}
    was = {path.name: path.read_bytes() for path in files(subject.folder) if path.suffix != _NOTES}
    known = {*was.values(), *(path.read_bytes() for path in (files(subject.earlier) if subject.earlier else ()))}
    return any(
        name in now and now[name] not in known if _RANK_INDEX.fullmatch(name) else now.get(name) != data
        for name, data in was.items()
    )


def _says_where(error: DcpError, folder: Path) -> bool:
    """Whether an error names the file, the folder, or the key of the value that is wrong."""
    if isinstance(error, LoadMismatchError) or getattr(error, "key", None) is not None:
        return True
    text = str(error)
    names = {path.name for path in folder.iterdir()}
    return str(folder) in text or any(name in text for name in names) or ".distcp" in text or ".metadata" in text


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
