"""Comparison bit by bit of a resumed run with the uninterrupted one, on the same world size."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dcp_prove.judging.moments import (
    ABSENT,
    STATE_KINDS,
    differing_items,
    differing_reads,
    item_difference,
)
from dcp_prove.judging.omissions import OMISSIONS, omission_of
from dcp_prove.judging.report import Difference, SizeResult
from dcp_prove.judging.sample_order import explain_order
from dcp_prove.observing.random_states import CPU_RANDOM
from dcp_prove.observing.records import Item, Moment, RunRecord

_RANDOM = frozenset({"one-rank-rng", "torch-rng", "numpy-rng", "python-rng"})
_READS = frozenset({"samples", "batches", "loss"})


@dataclass(frozen=True, slots=True)
class Runs:
    """Records of an uninterrupted and a resumed run, by rank.

    Items in `unsteady` differ between equal runs, so they prove nothing.
    """

    expected: Sequence[RunRecord]
    found: Sequence[RunRecord]
    kill_at: int
    steps: int
    unsteady: Collection[str] = field(default=frozenset())

    def pairs(self, step: int) -> Iterator[tuple[int, Moment, Moment]]:
        """Return rank and both moments after a step; after `kill_at`, of the save and the restore."""
        for rank, (one, other) in enumerate(zip(self.expected, self.found, strict=True)):
            names = ("saved", "restored") if step == self.kill_at else ("step", "step")
            moments = (one.at(names[0], step), other.at(names[1], step))
            if moments[0] is not None and moments[1] is not None:
                yield rank, moments[0], moments[1]

    def items(self, expected: Moment, found: Moment) -> dict[str, tuple[Item, Item]]:
        """Return the steady items that differ."""
        return {name: pair for name, pair in differing_items(expected, found).items() if name not in self.unsteady}


def find_unsteady(
    expected: Sequence[RunRecord], other: Sequence[RunRecord], until: int
) -> tuple[list[Difference], set[str]]:
    """Return differences of equal runs that show that the training is not deterministic, and other differing items."""
    differences: list[Difference] = []
    names: set[str] = set()
    for rank, (one, two) in enumerate(zip(expected, other, strict=True)):
        known = {(moment.at, moment.step): moment for moment in one.moments}
        for moment in two.moments:
            same = known.get((moment.at, moment.step))
            if same is None or moment.step > until:
                continue
            differences += differing_reads(same, moment, rank)
            for name, pair in differing_items(same, moment).items():
                if ABSENT in pair and same.full != moment.full:
                    continue  # tensors were not recorded in one of the runs
                kinds = {item.kind for item in pair}
                if kinds & STATE_KINDS and "random" not in kinds:
                    differences.append(item_difference(name, pair, moment, rank))
                else:
                    names.add(name)
    return sorted(differences, key=lambda each: each.step), names


def compare_same_size(runs: Runs) -> SizeResult:
    """Compare a resumed run with the uninterrupted one, and look for the omission."""
    result = SizeResult(len(runs.expected), runs.kill_at, exact=True)
    effects = [*_effects(runs)]
    lasting = [*_lasting(runs)]
    if not effects:
        harmless = [each.name for each in lasting if each.omission != "accumulation"]
        if harmless:
            result.not_compared.append(f"numbers and texts that differ without any effect so far: {_joined(harmless)}")
        return result
    causes = _causes(runs, lasting, effects, result)
    shown = sorted(
        (each for each in lasting if each.omission in causes), key=lambda each: causes.index(str(each.omission))
    )
    result.omissions = causes
    result.differences = [*shown, *_first_of_each_name(effects, known={each.name for each in shown})]
    return result


def _effects(runs: Runs) -> Iterator[Difference]:
    for step in range(runs.kill_at + 1, runs.steps + 1):
        for rank, expected, found in runs.pairs(step):
            yield from differing_reads(expected, found, rank)
            both_full = expected.full and found.full
            for name, pair in runs.items(expected, found).items():
                kinds = {item.kind for item in pair} - {""}
                counts = kinds & STATE_KINDS or ("tensor" in kinds and step == runs.steps)
                if counts and (both_full or ABSENT not in pair):
                    yield item_difference(name, pair, found, rank)


def _lasting(runs: Runs) -> Iterator[Difference]:
    """Return the differences after the restore that remain after the next step, or are in gradients."""
    following = {rank: runs.items(*moments) for rank, *moments in runs.pairs(runs.kill_at + 1)}
    of_first: dict[str, Item] = {}
    for rank, expected, found in runs.pairs(runs.kill_at):
        if rank == 0:
            of_first = expected.items
        for name, pair in runs.items(expected, found).items():
            kind = pair[0].kind or pair[1].kind
            if kind != "gradient" and name not in following.get(rank, {}):
                continue
            key = omission_of(kind, name)
            copied = rank > 0 and name in of_first and pair[1].digest == of_first[name].digest
            if kind == "random" and copied:
                key = "one-rank-rng"
            yield item_difference(name, pair, found, rank, omission=key)


def _causes(runs: Runs, lasting: Sequence[Difference], effects: Sequence[Difference], result: SizeResult) -> list[str]:
    items = {name: item for record in runs.expected for moment in record.moments for name, item in moment.items.items()}
    items |= {name: item for record in runs.found for moment in record.moments for name, item in moment.items.items()}
    state = {str(each.omission) for each in lasting if items[each.name].kind in STATE_KINDS}
    weak = {each.omission for each in lasting if items[each.name].kind not in STATE_KINDS}
    own = {str(each.omission) for each in lasting if items[each.name].kind in ("epoch", "sampler")}
    causes = state | _causes_of_reads(runs, weak, own, effects, result, random_lost=bool(state & _RANDOM))
    first = effects[0]
    early = first.name in _READS and first.step == runs.kill_at + 1
    if "accumulation" in weak and not causes and not early:
        causes.add("accumulation")
    if not causes:
        causes = _draws_of_resume(runs, effects, result)
    causes = causes or {str(key) for key in weak if key != "accumulation"}
    return [key for key in OMISSIONS if key in causes]


def _causes_of_reads(
    runs: Runs,
    weak: Collection[str | None],
    own: Collection[str],
    effects: Sequence[Difference],
    result: SizeResult,
    *,
    random_lost: bool,
) -> set[str]:
    """Return the omissions that other samples or batches suggest.

    Numbers in `weak` but not `own` count only if the samples agree with their name: frameworks have many that differ.
    """
    order = next((each for each in effects if each.name == "samples"), None)
    content = next((each for each in effects if each.name == "batches"), None)
    if content is None and order is None:
        return set()
    first = order or content
    found = runs.found[first.rank].at("step", first.step) if first is not None else None
    if first is None or found is None:
        return set()
    if order is None and found.samples:
        if found.workers and not random_lost:
            result.evidence.append(
                f"the samples are the right ones, but their content differs, which {found.workers} worker(s) made"
            )
            return {"worker-seeds"}
        return set()
    keys, sentence = explain_order(runs.expected[first.rank].steps(), found)
    by_item = [key for key in ("epoch", "position") if key in weak]
    if random_lost and not by_item:
        return set()  # whoever shuffles with the random state gets another order without it
    result.evidence.append(sentence)
    return {key for key in by_item if key in own or key in keys} or {*by_item} or {keys[0]}


def _draws_of_resume(runs: Runs, effects: Sequence[Difference], result: SizeResult) -> set[str]:
    drawn = [each for each in effects if each.name == CPU_RANDOM]
    for each in drawn[:1]:
        expected = runs.expected[each.rank].at("step", each.step)
        found = runs.found[each.rank].at("step", each.step)
        if expected is not None and found is not None and found.iterators > expected.iterators:
            result.evidence.append(
                f"a data loader made a new iterator in step {each.step}, and {CPU_RANDOM} is another one behind it"
            )
            return {"drawn-at-resume"}
    return set()


def _first_of_each_name(differences: Iterable[Difference], *, known: Collection[str]) -> list[Difference]:
    first: dict[str, Difference] = {}
    for each in differences:
        if each.name not in known:
            first.setdefault(each.name, each)
    return [*first.values()]


def _joined(names: Sequence[str], limit: int = 6) -> str:
    unique = [*dict.fromkeys(names)]
    return ", ".join(unique[:limit]) + (", …" if len(unique) > limit else "")
