"""Columns of chunk boxes: conversion between flat columns in an index and one column per dimension in a manifest."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["BoxLayout", "distinct", "ranges", "starts"]

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Number = TypeVar("Number", bound=np.integer[Any])


def starts(counts: npt.NDArray[np.integer[Any]]) -> I64:
    """Return the starts of consecutive runs of the lengths `counts`, followed by the end of the last run."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def ranges(first: I64, last: I64) -> I64:
    """Return all integers in the half-open ranges [`first[i]`, `last[i]`), concatenated."""
    lengths = last - first
    sums = starts(lengths)
    numbers: I64 = np.arange(int(sums[-1])) + np.repeat(first - sums[:-1], lengths)
    return numbers


def distinct(numbers: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return the distinct numbers of a column, ascending."""
    # `np.unique` imports `numpy.ma` in every process, which takes longer than many an index does.
    ascending = np.sort(numbers)
    is_new = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_new[1:])
    return ascending[is_new]


class BoxLayout:
    """Positions of each dimension's numbers in a flat column of boxes, which may differ in their number of dimensions.

    Args:
        ndim: Number of dimensions of each box.
    """

    def __init__(self, ndim: npt.NDArray[np.integer[Any]]) -> None:
        self.boxes = len(ndim)
        self.dims = int(ndim.max()) if len(ndim) else 0
        self.numbers = int(ndim.sum(dtype=np.int64))
        self._uniform = self.numbers == self.dims * self.boxes
        self._ndim = ndim
        self._starts = None if self._uniform else starts(ndim)

    def rows(self, dim: int) -> Bool | slice:
        """Return the rows of the boxes that have a dimension `dim`, as a mask or a slice."""
        return slice(None) if self._uniform else self._ndim > dim

    def places(self, dim: int) -> I64 | slice:
        """Return the positions of the numbers for dimension `dim` in the flat column, in the order of the boxes."""
        if self._starts is None:
            return slice(dim, None, self.dims)
        return self._starts[:-1][self._ndim > dim] + dim

    def volumes(self, sizes: I64) -> I64:
        """Return the number of elements of each box.

        Args:
            sizes: Flat column of the boxes' sizes, in elements, not negative.

        Raises:
            ValueError: A box has 2⁶² elements or more.
        """
        products = np.ones(self.boxes, np.int64)
        estimates = np.ones(self.boxes)
        # An integer product that overflows is wrong, unless one of the sizes is 0: then the product is 0 all the same.
        with np.errstate(over="ignore", invalid="ignore"):
            for dim in range(self.dims):
                rows, numbers = self.rows(dim), sizes[self.places(dim)]
                products[rows] *= numbers
                estimates[rows] *= numbers
            if (estimates >= 2.0**62).any():
                raise ValueError("a chunk has more elements than any memory")
        return products

    def __repr__(self) -> str:
        return f"BoxLayout({self.boxes} boxes, {self.numbers} numbers)"
