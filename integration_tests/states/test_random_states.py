"""Random states through every saver with every option of the writer: what is loaded is what was saved, bit by bit.

In one rank's process, so that there are DTensors, too. A tenth of the states, with some of the options; all of them,
with every value of every option each, are slow.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import dcp_all as dcp
from dcp_async.saver import shared_saver
from dcp_transforms import ZStandard
from integration_tests.oracle.kinds import same_bits
from integration_tests.states.random_states import loaded, random_state

STATES = 200
SAVERS = ("sync", "thread", "process")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "compression": (None, "auto", "zstd", "planes", "stream"),
    "layout": ("torch", "raw"),
    "thread_count": (1, 3),
    "single_file_per_rank": (True, False),
    "sync_files": (False, True),
    "interop": (True, False),
    "max_inflight_bytes": (None, 4096),
    "cache_staged_state_dict": (False, True),
    "overwrite": (True, False),
}


def choices(seed: int) -> Iterator[dict[str, Any]]:
    """Options for the saves of one state: every value of every option, each time beside others."""
    draw = random.Random(seed)
    count = max(map(len, OPTIONS.values()))
    columns = {}
    for name, values in OPTIONS.items():
        column = [*itertools.islice(itertools.cycle(values), count)]
        draw.shuffle(column)
        columns[name] = column
    for row in range(count):
        yield {name: column[row] for name, column in columns.items()}


def writer_of(folder: Path, options: dict[str, Any]) -> Any:
    """The file writer with these options."""
    if options["compression"] == "stream":
        options = {**options, "compression": None, "_extensions": [ZStandard()]}
    return dcp.FileSystemWriter(folder, **options)


def save(kind: str, state: dict[str, Any], writer: Any) -> None:
    """Save by one of `SAVERS`."""
    if kind == "sync":
        dcp.save(state, storage_writer=writer)
    else:
        shared_saver(kind).save(state, storage_writer=writer).result()  # type: ignore[union-attr]


def differences(folder: str, seeds: range, rows: int | None = None) -> list[str]:
    """What came back otherwise than it was saved, with so many choices of options, or all; on one rank."""
    found = []
    mesh = init_device_mesh("cpu", (1,))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support", category=UserWarning)
        for seed in seeds:
            wanted = loaded(random_state(seed, mesh))
            for row, (options, kind) in enumerate(itertools.product([*choices(seed)][:rows], SAVERS)):
                place = Path(folder) / f"{seed}-{row}"
                state = random_state(seed, mesh)
                try:
                    save(kind, state, writer_of(place, options))
                    actual = dcp.load_keys(checkpoint_id=place)
                except Exception as error:  # noqa: BLE001 - all of them are of interest
                    found.append(f"state {seed}, {kind}, {options}: {type(error).__name__}: {str(error)[-500:]}")
                    continue
                found.extend(f"state {seed}, {kind}, {options}: {each}" for each in unlike(actual, wanted, ""))
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(place)
    return found


def unlike(actual: Any, wanted: Any, name: str) -> Iterator[str]:
    """The names of the values that differ."""
    if type(wanted) is type(actual) is dict and set(map(repr, actual)) == set(map(repr, wanted)):
        for key in wanted:
            yield from unlike(actual[key], wanted[key], f"{name}/{key!r}")
    elif type(wanted) is type(actual) is list and len(actual) == len(wanted):
        for number, (one, other) in enumerate(zip(actual, wanted, strict=True)):
            yield from unlike(one, other, f"{name}/{number}")
    elif not same_bits(actual, wanted):
        yield f"{name} is {_short(actual)}, was {_short(wanted)}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r:.200}"


def test_a_tenth_of_the_states(ranks: Any, tmp_path: Path) -> None:
    (found,) = ranks.run(1, differences, str(tmp_path), range(0, STATES, 10), 2, timeout_seconds=280)
    assert found == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_states(ranks: Any, tmp_path: Path) -> None:
    (found,) = ranks.run(1, differences, str(tmp_path), range(STATES), timeout_seconds=3500)
    assert found == []


def test_the_choices_cover_every_value_of_every_option() -> None:
    for seed in range(STATES):
        rows = [*choices(seed)]
        assert all({row[name] for row in rows} == set(values) for name, values in OPTIONS.items())
    assert len({tuple(row.values()) for seed in range(STATES) for row in choices(seed)}) > STATES
