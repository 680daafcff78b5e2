"""`Assignment`: which rank reads which piece of a checkpoint, and which ranks want the piece, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Assignment"]

Positions = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Pieces of objects that are read once for several ranks, as columns with a row per piece: ascending, no overlaps.

    A byte that one rank alone wants, and can read, is in no piece: that rank reads it directly. Many pieces are wanted
    by the same ranks; such a set of ranks is a class.

    Attributes:
        names: Names of the objects, ascending.
        objects: int32[n], position of each piece's object in `names`.
        starts: int64[n], first byte of each piece in its object.
        stops: int64[n], end of each piece, exclusive.
        owners: int32[n], rank that reads each piece and passes it on.
        classes: int32[n], class of each piece: the position of its set of ranks.
        borders: int64[number of classes + 1]: the ranks of class c are `readers[borders[c] : borders[c + 1]]`.
        readers: int32, ranks that want the pieces of each class, ascending within a class.
    """

    names: tuple[str, ...]
    objects: Numbers
    starts: Positions
    stops: Positions
    owners: Numbers
    classes: Numbers
    borders: Positions
    readers: Numbers

    @property
    def total_bytes(self) -> int:
        """Number of bytes of all pieces."""
        return int((self.stops - self.starts).sum())

    def readers_of(self, piece: int) -> Numbers:
        """Return the ranks that want a piece, ascending."""
        of = self.classes[piece]
        return self.readers[self.borders[of] : self.borders[of + 1]]
