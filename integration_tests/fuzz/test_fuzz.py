"""The targets of the fuzzer take every committed input, what once broke them, and a thousand changes of these.

What the fuzzer itself finds (`nox -s fuzz`) is put into `findings/<target>/`, and tried here from then on.
"""

from __future__ import annotations

import pickletools
import random
from pathlib import Path

import pytest

from integration_tests.fuzz.calls import pickle_of
from integration_tests.fuzz.make_corpus import inputs
from integration_tests.fuzz.targets import TARGETS
from integration_tests.robustness.crafted import little_memory

pytestmark = pytest.mark.filterwarnings("ignore")
HERE = Path(__file__).parent
KNOWN = sorted(path for kind in ("corpus", "findings") for path in HERE.glob(f"{kind}/*/*"))
CHANGES = 150


def test_every_target_has_inputs() -> None:
    assert {path.parent.name for path in HERE.glob("corpus/*/*")} == {*TARGETS}
    assert {path.parent.name for path in HERE.glob("findings/*/*")} <= {*TARGETS}


@pytest.mark.parametrize("path", KNOWN, ids=lambda path: "/".join(path.parts[-3:]))
def test_known_inputs(path: Path) -> None:
    with little_memory():
        TARGETS[path.parent.name](path.read_bytes())


def change(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            changed[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            del changed[at : at + rng.randint(1, 8)]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            changed[at : at + 8] = rng.choice([0, 1, (1 << 31), (1 << 63), (1 << 64) - 1]).to_bytes(8, "little")
    return bytes(changed)


@pytest.mark.parametrize("target", TARGETS)
def test_changed_inputs(target: str) -> None:
    seeds = [path.read_bytes() for path in sorted(HERE.glob(f"corpus/{target}/*"))]
    rng = random.Random(target)
    with little_memory():
        for number in range(CHANGES):
            TARGETS[target](change(rng, seeds[number % len(seeds)]))


def test_made_pickles_are_well_formed() -> None:
    rng = random.Random(1)
    names = set()
    for _ in range(200):
        for opcode, argument, _ in pickletools.genops(pickle_of(rng.randbytes(60))):
            if opcode.name == "SHORT_BINUNICODE":
                names.add(argument)
    assert len(names) > 100


def test_the_corpus_is_what_its_maker_makes() -> None:
    made = {(target, name) for target, name, _ in inputs()}
    assert made == {path.parts[-2:] for path in HERE.glob("corpus/*/*")}
