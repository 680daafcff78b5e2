"""The harness from end to end, with what needs no environment of its own; and that it notices a load that lies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.benchmarks import cold
from integration_tests.benchmarks.__main__ import main
from integration_tests.benchmarks.cases import CASES, select
from integration_tests.benchmarks.contenders import CONTENDERS
from integration_tests.benchmarks.results import Results
from integration_tests.benchmarks.runner import takes_part
from integration_tests.benchmarks.team import Team, WorkerError

TENSORS = [
    {"name": "weight", "dtype": "bfloat16", "shape": [3, 5]},
    {"name": "step", "dtype": "float32", "shape": []},
    {"name": "table", "dtype": "float32", "shape": [3_000_000]},
]


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with Team(sys.executable, 1, tmp_path_factory.mktemp("logs"), timeout_seconds=600) as one:
        one.call("make", library="floor", tensors=TENSORS, seed=1)
        yield one


def test_small_run_with_ours_and_stock(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    who = ["ours", "stock, 1 thread"]
    chosen = [argument for name in who for argument in ("--contender", name)]
    place = ["--place", "tmpfs", "--tmpfs", str(tmp_path)]
    assert main(["--scale", "0.002", "--rounds", "1", "--case", "gib", "--json", str(file), *chosen, *place]) == 0
    rows = Results.read(file).rows
    assert [(row.place, row.fsync) for row in rows] == [("tmpfs", False)]
    for row in rows:
        assert {name: entry.failure for name, entry in row.entries.items()} == dict.fromkeys(who)
        for entry in row.entries.values():
            assert entry.sizes["bytes"] >= row.bytes
            assert all(len(costs) == 1 for costs in entry.operations.values())
            assert entry.operations["save"][0]["wchar"] >= row.bytes
            assert entry.operations["load"][0]["rchar"] >= row.bytes


def test_load_of_other_values_is_noticed(team: Team, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    place = {"library": "floor", "folder": str(folder), "options": {}}
    team.call("save", **place, fsync=False)
    for check in ("all", "ends"):
        team.call("load", **place, check=check)
    for path in folder.iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    for check in ("all", "ends"):
        with pytest.raises(WorkerError, match="differ"):
            team.call("load", **place, check=check)


def test_worker_that_fails_or_dies_is_reported(team: Team, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="FileNotFoundError"):
        team.call("load", library="floor", folder=str(tmp_path / "none"), options={}, check="ends")
    team._processes[0].kill()
    team._processes[0].wait()
    with pytest.raises(WorkerError, match="rank 0 has ended"):
        team.call("versions", libraries=["floor"])


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_has_tensors_and_somebody_to_beat(case: object) -> None:
    (known,) = select([case.name])  # type: ignore[attr-defined]
    names = [each.name for each in CONTENDERS if takes_part(each, known)]
    assert "ours" in names
    assert "stock, 1 thread" in names
    if known.name != "minilm":  # its weights come from a package that tests do not install
        assert sum(spec.nbytes for spec in known.specs(0.01)) < sum(spec.nbytes for spec in known.specs(1.0))


def test_cold_loads_are_of_the_same_files(tmp_path: Path) -> None:
    taken = cold.measure(tmp_path, mib=32, rounds=2)
    assert {name: len(seconds) for name, seconds in taken.items()} == dict.fromkeys(
        ("preadv", "ours", "ours, unverified"), 2
    )
    assert len(list((tmp_path / "checkpoint").glob("*.distcp"))) == 2
