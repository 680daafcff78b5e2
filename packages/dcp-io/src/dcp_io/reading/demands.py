"""`Demands`: the byte ranges of a checkpoint's objects that one rank wants to read, as columns.

What a load wants is expressed here before anything is read, so that ranks can compare their demands and share reads.
Nothing is read here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_manifest.index.box_columns import distinct

__all__ = ["Demands"]

Positions = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Demands:
    """Byte ranges that one rank wants, as columns with a row per range: ascending, without overlaps.

    The form is canonical: two ranks that want the same bytes in the same rows have equal columns. `Demands.of` makes it
    from rows in any order.

    Attributes:
        names: Names of the objects (files of the checkpoint's folder), ascending; each has at least one row.
        objects: int32[n], position of each row's object in `names`.
        starts: int64[n], first byte of each row in its object.
        stops: int64[n], end of each row, exclusive; no row is empty.
        grains: int64[n], distance of the positions at which a row may be cut: at `start + k * grain`. 0: the row is
            verified as a whole, and must not be cut.

    Raises:
        ValueError: The columns are not in canonical form; names the object and the row.
    """

    names: tuple[str, ...]
    objects: Numbers
    starts: Positions
    stops: Positions
    grains: Positions

    def __post_init__(self) -> None:
        for column, dtype in (("objects", np.int32), ("starts", np.int64), ("stops", np.int64), ("grains", np.int64)):
            values = getattr(self, column)
            if values.dtype != dtype or values.shape != self.objects.shape or values.ndim != 1:
                raise ValueError(
                    f"column {column!r} of demands must be {np.dtype(dtype)}[{len(self.objects)}], "
                    f"not {values.dtype}{[*values.shape]}"
                )
        self._check_names()
        self._check_rows()

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        objects: npt.ArrayLike,
        starts: npt.ArrayLike,
        stops: npt.ArrayLike,
        grains: npt.ArrayLike,
    ) -> Demands:
        """Return the canonical form of rows in any order, in which ranges may be empty or overlap.

        Rows that overlap become one row. It may be cut where all of them may be cut, if their grains and the positions
        of these are the same, and nowhere otherwise. Rows that only touch stay separate.

        Args:
            names: Names of objects, each at most once; those without a row are left out.
            objects: Position of each row's object in `names`.
            starts: First byte of each row.
            stops: End of each row, exclusive.
            grains: Distance of possible cuts; see `Demands`.

        Raises:
            ValueError: A name appears twice, an object's position is not in `names`, or a column has another length.
        """
        order = sorted(range(len(names)), key=names.__getitem__)
        places = np.empty(len(names), np.int64)
        places[order] = np.arange(len(names))
        rows = [np.asarray(column, np.int64).reshape(-1) for column in (objects, starts, stops, grains)]
        if len({len(column) for column in rows}) != 1:
            raise ValueError(f"columns of demands differ in length: {[len(column) for column in rows]}")
        if len(rows[0]) and not 0 <= rows[0].min() <= rows[0].max() < len(names):
            raise ValueError(f"a row of demands names object {rows[0].min()} or {rows[0].max()} of {len(names)}")
        wanted = rows[1] != rows[2]
        rows = [column[wanted] for column in (places[rows[0]], *rows[1:])]
        first = np.lexsort((rows[1], rows[0]))
        rows = _merge_overlaps(*(column[first] for column in rows))
        used, objects = np.unique(rows[0], return_inverse=True)
        found = tuple(names[order[place]] for place in used.tolist())
        return cls(found, objects.astype(np.int32), *rows[1:])

    @property
    def total_bytes(self) -> int:
        """Number of bytes of all rows."""
        return int((self.stops - self.starts).sum())

    def digest(self) -> bytes:
        """Return 16 bytes that are equal for equal demands and, for all practical purposes, for no others."""
        made = hashlib.blake2b(digest_size=16)
        for name in self.names:
            encoded = name.encode("utf-8", "surrogateescape")
            made.update(len(encoded).to_bytes(8, "little"))
            made.update(encoded)
        made.update(len(self.objects).to_bytes(8, "little"))
        for column, dtype in ((self.objects, "<i4"), (self.starts, "<i8"), (self.stops, "<i8"), (self.grains, "<i8")):
            made.update(column.astype(dtype).tobytes())
        return made.digest()

    def _check_names(self) -> None:
        for name, following in zip(self.names, self.names[1:], strict=False):
            if name >= following:
                raise ValueError(f"names of demanded objects must ascend: {name!r} stands before {following!r}")
        found = distinct(self.objects)
        if not np.array_equal(found, np.arange(len(self.names))):
            raise ValueError(
                f"rows of demands name the objects {found.tolist()[:8]}…, and must name each of {len(self.names)}"
            )

    def _check_rows(self) -> None:
        same = self.objects[1:] == self.objects[:-1]
        wrong = (self.starts < 0) | (self.stops <= self.starts) | (self.grains < 0)
        wrong[1:] |= (self.objects[1:] < self.objects[:-1]) | (same & (self.starts[1:] < self.stops[:-1]))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(
                f"demanded range [{self.starts[row]}, {self.stops[row]}) of {self.names[self.objects[row]]!r} "
                f"(row {row}, grain {self.grains[row]}) is empty or negative, or not behind the row before"
            )


def _merge_overlaps(objects: Positions, starts: Positions, stops: Positions, grains: Positions) -> list[Positions]:
    """Merge rows that overlap; they ascend by object and start."""
    if len(objects) == 0 or (starts > stops).any() or starts.min() < 0:  # the latter is refused by the constructor
        return [objects, starts, stops, grains]
    # Objects are laid one behind the other, so that one running maximum serves all of them.
    span = stops.max() + 1
    ends = np.maximum.accumulate(stops + objects * span)
    begins = starts + objects * span
    first = np.flatnonzero(np.concatenate(([True], begins[1:] >= ends[:-1])))
    last = np.append(first[1:], len(objects)) - 1
    group = np.repeat(np.arange(len(first)), last - first + 1)
    grain = grains[first][group]
    off_grid = (grains != grain) | ((starts - starts[first][group]) % np.maximum(grain, 1) != 0)
    off_grid[first] = False
    cut = grains[first].copy()
    cut[group[off_grid]] = 0
    return [objects[first], starts[first], (ends - objects * span)[last], cut]
