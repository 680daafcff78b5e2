"""Comparison of two moments: items, loss, samples and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dcp_prove.judging.report import Difference
from dcp_prove.observing.records import Item, Moment

STATE_KINDS = frozenset({"parameter", "buffer", "batchnorm", "optimizer", "scheduler", "scaler", "average", "random"})
"""Kinds of items that must be equal after every step, unlike gradients, which may differ until zeroed."""

ABSENT = Item("", "", "absent")
_SHOWN_IDS = 8


def differing_items(expected: Moment, found: Moment) -> dict[str, tuple[Item, Item]]:
    """Return name → both items, for items that differ or are absent from the resumed run."""
    pairs = {name: (item, found.items.get(name, ABSENT)) for name, item in expected.items.items()}
    return {name: (one, other) for name, (one, other) in pairs.items() if one.digest != other.digest}


def item_difference(
    name: str, pair: tuple[Item, Item], moment: Moment, rank: int, *, omission: str | None = None
) -> Difference:
    """Return the difference of one item."""
    expected, found = (item.shown for item in pair)
    if expected == found:  # the same shape and dtype, or nothing that says more
        expected = found = ""
    return Difference(name, moment.step, moment.at == "restored", rank, expected, found, omission)


def differing_reads(expected: Moment, found: Moment, rank: int) -> Iterator[Difference]:
    """Return the differences of samples, batches and loss, in this order."""
    make: Callable[[str, str, str], Difference] = lambda name, one, other: Difference(  # noqa: E731 - of one moment
        name, found.step, False, rank, one, other
    )
    if expected.samples != found.samples:
        yield make("samples", _shown_ids(expected.samples), _shown_ids(found.samples))
    if expected.batches != found.batches:
        yield make("batches", " ".join(expected.batches) or "none", " ".join(found.batches) or "none")
    if repr(expected.loss) != repr(found.loss):  # NaN is equal to itself here
        yield make("loss", repr(expected.loss), repr(found.loss))


def _shown_ids(ids: Sequence[object]) -> str:
    more = ", …" if len(ids) > _SHOWN_IDS else ""
    return f"[{', '.join(map(str, ids[:_SHOWN_IDS]))}{more}]"
