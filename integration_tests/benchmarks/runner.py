"""Runs rows: contenders in turns within a round, each save followed by the loads of what it wrote."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from integration_tests.benchmarks import folders
from integration_tests.benchmarks.cases import Case, Row
from integration_tests.benchmarks.contenders import Contender
from integration_tests.benchmarks.environments import python_of
from integration_tests.benchmarks.results import Cost, Entry, RowResult
from integration_tests.benchmarks.team import Reply, Team, WorkerError

__all__ = ["CaseRun", "takes_part"]

SEED = 3
Say = Callable[[str], None]


def takes_part(contender: Contender, case: Case) -> bool:
    """Whether a contender can and shall run a case."""
    if case.contenders is not None and contender.name not in case.contenders:
        return False
    if contender.only is not None and case.name not in contender.only:
        return False
    return contender.multi_rank or max(case.save_ranks, case.load_ranks) == 1


@dataclass(slots=True)
class CaseRun:
    """One case: its processes live as long as it does, over all its rows.

    Args:
        case: What to run.
        contenders: Who takes part.
        scale: Of the case's sizes.
        rounds: How many count; one more comes first and warms up.
        logs: A folder for the output of processes.
        say: Told what is going on, before each visit.
        versions: Filled with library → version.
    """

    case: Case
    contenders: Sequence[Contender]
    scale: float
    rounds: int
    logs: Path
    say: Say
    versions: dict[str, str]
    _teams: dict[tuple[str, str], Team] = field(default_factory=dict)

    def __enter__(self) -> CaseRun:
        return self

    def __exit__(self, *_: object) -> None:
        for team in self._teams.values():
            team.close()
        self._teams.clear()

    def run(self, row: Row, place: Path) -> RowResult:
        """Measure one row in a folder."""
        tensors = self.case.specs(self.scale)
        total = sum(spec.nbytes for spec in tensors)
        now = dt.datetime.now(dt.timezone.utc).date().isoformat()
        result = RowResult(
            self.case.name, self.case.title, row.place, row.fsync, self.scale, self.rounds,
            len(tensors), total, now, self.case.notes,
            {contender.name: Entry() for contender in self.contenders},
        )  # fmt: skip
        order = random.Random(SEED)
        for turn in range(1 + self.rounds):
            alive = [each for each in self.contenders if result.entries[each.name].failure is None]
            for contender in order.sample(alive, len(alive)):
                self.say(f"{self.case.name}, {row.place}: {contender.name}")
                self._visit(contender, row, place / "checkpoint", result.entries[contender.name], warm_up=turn == 0)
        return result

    def _visit(self, contender: Contender, row: Row, folder: Path, entry: Entry, *, warm_up: bool) -> None:
        """One contender's operations of one round. What fails is noted, and the contender is out of the row."""
        try:
            for operation, cost in self._operations(contender, row, folder, entry, check_all=warm_up):
                costs = entry.operations.setdefault(operation, [])
                if not warm_up:
                    costs.append(cost)
        except (WorkerError, CalledProcessError) as error:
            entry.failure = _reason(error).replace(str(folder.parent), "…")
            self._close(contender)
        finally:
            folders.remove(folder)

    def _operations(
        self, contender: Contender, row: Row, folder: Path, entry: Entry, *, check_all: bool
    ) -> Iterator[tuple[str, Cost]]:
        savers, loaders = self._team(contender, "save"), self._team(contender, "load")
        common = {"library": contender.worker, "folder": str(folder)}
        check = "all" if check_all else "ends"
        settle = folders.settle if row.place == "disk" else _nothing
        settle()
        yield "save", _together(savers.call("save", **common, fsync=row.fsync, options=dict(contender.save)))
        entry.sizes = folders.file_sizes(folder)
        settle()
        for operation, options in contender.loads.items():
            yield operation, _together(loaders.call("load", **common, options=dict(options), check=check))
        for operation, options in contender.loads.items() if row.cold else ():
            folders.drop_cache(folder)
            cold = loaders.call("load", **common, options=dict(options), check=check)
            yield f"{operation}, cold", _together(cold)

    def _team(self, contender: Contender, role: str) -> Team:
        """The processes that save, or those that load, where others do; with the state made."""
        role = role if self.case.reshards else "both"
        host = contender.environment if self.case.one_process else contender.worker
        if (host, role) not in self._teams:
            case = self.case
            ranks, shard = (case.load_ranks, case.load_shard) if role == "load" else (case.save_ranks, case.save_shard)
            team = Team(python_of(contender.environment), ranks, self.logs / f"{case.name}-{host}-{role}")
            self._teams[host, role] = team
            team.call("make", library=contender.worker, tensors=case.tensors(self.scale, shard), seed=SEED)
        team = self._teams[host, role]
        if contender.worker not in self.versions:
            self.versions |= team.call("versions", libraries=[contender.worker])[0]
        return team

    def _close(self, contender: Contender) -> None:
        """End the processes of a contender that failed: their state may be spoiled."""
        hosts = (contender.environment, contender.worker)
        for key in [key for key in self._teams if key[0] in hosts]:
            self._teams.pop(key).close()


def _nothing() -> None:
    """What is in memory has nothing to write back."""


def _reason(error: WorkerError | CalledProcessError) -> str:
    """What a table can say about a failure."""
    if isinstance(error, WorkerError):
        return str(error)
    lines = str(error.stderr).strip().splitlines()
    return f"its environment could not be made: {lines[-1] if lines else error.returncode}"


def _together(replies: Sequence[Reply]) -> Cost:
    """The cost of ranks that worked together: the slowest one's time, the largest peak, all bytes."""
    figures: dict[str, Any] = {
        name: sum(reply[name] for reply in replies) for name in ("rchar", "wchar", "read_bytes", "write_bytes")
    }
    return {name: max(reply[name] for reply in replies) for name in ("seconds", "peak_bytes")} | figures
