"""Order of the samples, as a hint at the data position of a resumed run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from dcp_prove.observing.records import Moment


def read_of(moment: Moment) -> tuple[Hashable, ...]:
    """Return what was read before a moment: sample ids, or else fingerprints of batches."""
    return tuple(map(repr, moment.samples)) or tuple(moment.batches)


def explain_order(expected: Mapping[int, Moment], found: Moment) -> tuple[list[str], str]:
    """Return the likely omissions (`epoch`, `position`) for a step with wrong samples, and a sentence."""
    reads = {step: read_of(moment) for step, moment in expected.items()}
    own, step = read_of(found), found.step
    what = "samples" if found.samples else "batches"
    length = _epoch_steps(reads)
    same = [other for other, read in reads.items() if read == own and own]
    in_epoch = [other for other in same if (other - 1) // length == (step - 1) // length]
    if in_epoch:
        word = "again" if in_epoch[0] < step else "too early"
        return ["position"], f"step {step} of the resumed run reads the {what} of step {in_epoch[0]} {word}"
    if any((other - 1) % length == (step - 1) % length for other in same):
        return [
            "epoch"
        ], f"step {step} of the resumed run reads the {what} of step {same[0]}, which is in another epoch"
    if same:
        text = f"step {step} of the resumed run reads the {what} of step {same[0]}, at another place of another epoch"
        return ["epoch", "position"], text
    flat = [each for other in sorted(reads) for each in reads[other]]
    if _is_part(own, flat):
        return ["position"], f"step {step} of the resumed run begins elsewhere in the order of the {what}"
    return [
        "epoch"
    ], f"step {step} of the resumed run reads {what} in an order that the uninterrupted run does not have"


def _epoch_steps(reads: Mapping[int, Sequence[Hashable]]) -> int:
    seen: set[Hashable] = set()
    for step in sorted(reads):
        if not seen.isdisjoint(reads[step]):
            return step - min(reads)
        seen.update(reads[step])
    return max(len(reads), 1)


def _is_part(own: Sequence[Hashable], whole: Sequence[Hashable]) -> bool:
    size = len(own)
    return bool(own) and any(tuple(whole[at : at + size]) == tuple(own) for at in range(len(whole) - size + 1))
