"""What is done to the files of a checkpoint: drawn from a random generator, so that a number says it all."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from integration_tests.robustness.damage import files, swap

__all__ = ["HURTS", "Hurt", "draw"]

_PAGE = 4096


@dataclass(frozen=True)
class Hurt:
    """One damage, done: which kind, to which files."""

    what: str
    files: tuple[str, ...]


def draw(rng: random.Random, folder: Path, earlier: Path | None) -> Hurt:
    """Damage one file of a checkpoint, or exchange two.

    Args:
        rng: Says what, where and how.
        folder: The checkpoint.
        earlier: Another checkpoint with the same names, shapes and kinds of values; None if there is none.
    """
    paths = files(folder)
    while True:
        what = rng.choices([*HURTS, *_OF_FILES], [4] * 2 + [1] * (len(HURTS) - 2 + len(_OF_FILES)))[0]
        if what in HURTS:
            path = rng.choice(paths)
            data = path.read_bytes()
            if not data:
                continue
            path.write_bytes(HURTS[what](rng, bytearray(data)))
            return Hurt(what, (path.name,))
        hit = _OF_FILES[what](rng, paths, earlier)
        if hit is not None:
            return Hurt(what, hit)


def _flip_a_bit(rng: random.Random, data: bytearray) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def _flip_bits(rng: random.Random, data: bytearray) -> bytearray:
    for _ in range(rng.randint(2, 16)):
        _flip_a_bit(rng, data)
    return data


def _range(rng: random.Random, data: bytearray) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.choice([1, 2, 8, 64, 512, _PAGE]))


def _random_bytes(rng: random.Random, data: bytearray) -> bytearray:
    start, stop = _range(rng, data)
    data[start:stop] = rng.randbytes(stop - start)
    return data


def _same_bytes(rng: random.Random, data: bytearray) -> bytearray:
    start, stop = _range(rng, data)
    data[start:stop] = bytes([rng.choice([0, 0xFF, rng.randrange(256)])]) * (stop - start)
    return data


def _lost_page(rng: random.Random, data: bytearray) -> bytearray:
    """What a crash of a machine leaves: a page of zeros."""
    start = rng.randrange(len(data)) // _PAGE * _PAGE
    stop = min(len(data), start + _PAGE)
    data[start:stop] = bytes(stop - start)
    return data


def _truncate(rng: random.Random, data: bytearray) -> bytearray:
    return data[: rng.randrange(len(data))]


def _grow(rng: random.Random, data: bytearray) -> bytearray:
    return data + rng.choice([bytes, rng.randbytes])(rng.choice([1, 7, 64, _PAGE]))


def _insert(rng: random.Random, data: bytearray) -> bytearray:
    start = rng.randrange(len(data))
    data[start:start] = rng.randbytes(rng.choice([1, 8, 64]))
    return data


def _leave_out(rng: random.Random, data: bytearray) -> bytearray:
    start, stop = _range(rng, data)
    del data[start:stop]
    return data


def _copy_a_range(rng: random.Random, data: bytearray) -> bytearray:
    start, stop = _range(rng, data)
    other = rng.randrange(len(data))
    part = data[start:stop]
    data[other : other + len(part)] = part[: len(data) - other]
    return data


def _huge_number(rng: random.Random, data: bytearray) -> bytearray:
    """A length or a position that is far too large, wherever it falls."""
    number = rng.choice([1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1])
    part = number.to_bytes(8, "little")[: rng.choice([4, 8])]
    start = rng.randrange(len(data))
    data[start : start + len(part)] = part[: len(data) - start]
    return data


def _swap_files(rng: random.Random, paths: list[Path], _: Path | None) -> tuple[str, ...] | None:
    if len(paths) < 2:
        return None
    one, other = rng.sample(paths, 2)
    swap(one, other)
    return one.name, other.name


def _remove_a_file(rng: random.Random, paths: list[Path], _: Path | None) -> tuple[str, ...]:
    path = rng.choice(paths)
    path.unlink()
    return (path.name,)


def _empty_a_file(rng: random.Random, paths: list[Path], _: Path | None) -> tuple[str, ...]:
    path = rng.choice(paths)
    path.write_bytes(b"")
    return (path.name,)


def _stale_file(rng: random.Random, paths: list[Path], earlier: Path | None) -> tuple[str, ...] | None:
    """A file of the earlier checkpoint in the place of its fellow."""
    if earlier is None:
        return None
    others = files(earlier)
    place = rng.randrange(len(paths))
    paths[place].write_bytes(others[min(place, len(others) - 1)].read_bytes())
    return (paths[place].name,)


HURTS: dict[str, Callable[[random.Random, bytearray], bytearray]] = {
    "flip a bit": _flip_a_bit,
    "flip bits": _flip_bits,
    "random bytes": _random_bytes,
    "equal bytes": _same_bytes,
    "lost page": _lost_page,
    "truncate": _truncate,
    "grow": _grow,
    "insert": _insert,
    "leave out": _leave_out,
    "copy a range": _copy_a_range,
    "huge number": _huge_number,
}
_OF_FILES: dict[str, Callable[[random.Random, list[Path], Path | None], tuple[str, ...] | None]] = {
    "swap files": _swap_files,
    "remove": _remove_a_file,
    "empty": _empty_a_file,
    "stale file": _stale_file,
}
