"""Row 15 of the users' list: whatever a run is made of, it goes on after a load as if it had not stopped.

Every pair of parallelism and variant runs once here, with the four changes of world size dealt out to them; all
combinations carry the marker `slow`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import load_keys
from dcp_ranks.testing.ranks import RankPool
from integration_tests.state.compare import differences
from integration_tests.state.jobs import STEPS, resume, train_and_save
from integration_tests.state.nets import KINDS, OTHERS, VARIANTS, kinds_for

# FSDP1's sharded tensors warn at every look at them.
pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
WORLDS = [(2, 2), (2, 1), (2, 4), (4, 2)]
ROW_15 = ["plain", "ddp", "fsdp1", "fsdp2", "tp", "fsdp2-tp", "pp"]
PAIRS = [(kind, variant) for variant in VARIANTS for kind in kinds_for(variant)]


def _dealt() -> list[tuple[str, str, tuple[int, int]]]:
    """The pairs of row 15, and each other kind once; with one change of world size each, all of them used equally."""
    taken = [(kind, variant) for kind, variant in PAIRS if kind in ROW_15 or variant == "adamw"]
    dealt = [
        (kind, variant, WORLDS[(KINDS.index(kind) + VARIANTS.index(variant)) % len(WORLDS)]) for kind, variant in taken
    ]
    return sorted(dealt, key=lambda case: WORLDS.index(case[2]))


def _check(
    ranks: RankPool,
    folder: Path,
    how: tuple[str, str],
    other: tuple[str, str],
    worlds: tuple[int, int],
    backend: str = "gloo",
) -> None:
    """Save a run of kind and variant `how`, resume it as `other`."""
    first, second = str(folder / "first"), str(folder / "second")
    went_on = ranks.run(worlds[0], train_and_save, *how, first, backend=backend)[0]
    resumed = ranks.run(worlds[1], resume, *other, first, second, torch.float32, backend=backend)
    for losses, initialised, step in resumed:
        assert step == STEPS
        assert set(initialised) <= {"optimizer"}, initialised
        if how == other and worlds[0] == worlds[1]:
            assert losses == went_on
        else:
            assert losses == pytest.approx(went_on, abs=1e-5)
    assert list(differences(*map(_without_random, (second, first)))) == []


def _without_random(folder: str) -> Any:
    values = load_keys(checkpoint_id=folder, no_dist=True)["app"]
    assert values.pop("random")
    return values


@pytest.mark.parametrize(("kind", "variant", "worlds"), _dealt())
def test_resumes(ranks: RankPool, tmp_path: Path, kind: str, variant: str, worlds: tuple[int, int]) -> None:
    _check(ranks, tmp_path, (kind, variant), (kind, variant), worlds)


@pytest.mark.slow
@pytest.mark.parametrize("worlds", WORLDS, ids=str)
@pytest.mark.parametrize(("kind", "variant"), PAIRS)
def test_resumes_in_every_combination(
    ranks: RankPool, tmp_path: Path, kind: str, variant: str, worlds: tuple[int, int]
) -> None:
    _check(ranks, tmp_path, (kind, variant), (kind, variant), worlds)


@pytest.mark.parametrize(
    ("kind", "other", "worlds"),
    [
        ("fsdp2-tp", "plain", (4, 1)),
        ("plain", "fsdp2-tp", (1, 4)),
        ("fsdp2-tp", "ddp", (4, 2)),
        ("ddp", "fsdp2-tp", (2, 4)),
        ("fsdp2-tp", "fsdp1", (4, 2)),
        ("fsdp1", "fsdp2-tp", (2, 4)),
        ("fsdp1-flat", "hsdp", (2, 4)),
        ("pp", "fsdp2", (2, 2)),
        ("fsdp2", "pp", (2, 4)),
    ],
)
def test_loads_across_parallelisms(
    ranks: RankPool, tmp_path: Path, kind: str, other: str, worlds: tuple[int, int]
) -> None:
    _check(ranks, tmp_path, (kind, "adamw"), (other, "adamw"), worlds)


@pytest.mark.parametrize("worlds", [(2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("optimizer", OTHERS)
def test_resumes_with_other_optimizers(
    ranks: RankPool, tmp_path: Path, optimizer: str, worlds: tuple[int, int]
) -> None:
    _check(ranks, tmp_path, ("fsdp2", optimizer), ("fsdp2", optimizer), worlds)


@pytest.mark.parametrize("worlds", [(2, 2), (2, 4)], ids=str)
def test_resumes_in_half_precision(ranks: RankPool, tmp_path: Path, worlds: tuple[int, int]) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    went_on = ranks.run(worlds[0], train_and_save, "fsdp2", "adamw", first, torch.bfloat16)[0]
    losses, _, _ = ranks.run(worlds[1], resume, "fsdp2", "adamw", first, second, torch.bfloat16)[0]
    assert losses == (went_on if worlds[0] == worlds[1] else pytest.approx(went_on, abs=1e-2))
    assert list(differences(*map(_without_random, (second, first)))) == []


GROUPS = ["{1}", "cpu:gloo,{0}:{1}"]  # of the accelerator's backend alone, and with gloo
ON_DEVICES = [(*pair, groups) for pair in PAIRS if pair[0] in ROW_15 for groups in GROUPS]
# Each kind, each variant and both groups.
QUICK = {(kind, VARIANTS[(2 * place) % len(VARIANTS)], GROUPS[place % 2]) for place, kind in enumerate(ROW_15)}


def _unless_quick(case: tuple[str, str, str]) -> Any:
    return pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)


@pytest.mark.device
@pytest.mark.parametrize(("kind", "variant", "groups"), [_unless_quick(case) for case in ON_DEVICES])
def test_resumes_on_devices(
    ranks: RankPool, tmp_path: Path, device: str, device_backend: str, kind: str, variant: str, groups: str
) -> None:
    """The same with tensors on accelerators, one to a rank; over as many ranks as there are, four at most."""
    count = min(torch.get_device_module(device).device_count(), 4)
    backend = groups.format(device, device_backend)
    _check(ranks, tmp_path, (kind, variant), (kind, variant), (count, count), backend)
    if count > 1:
        (tmp_path / "fewer").mkdir()
        _check(ranks, tmp_path / "fewer", (kind, variant), (kind, variant), (count, count // 2), backend)
