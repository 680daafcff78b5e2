"""Figures of many trials: how many of each subject ended how."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from integration_tests.robustness.campaign.trials import BAD, HARMLESS, REFUSED, UNPROTECTED

__all__ = ["summary", "table"]


def summary(outcomes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Results by subject and by kind of damage, the memory that it took, and whatever must not have happened."""
    subjects: dict[str, Counter[str]] = defaultdict(Counter)
    hurts: dict[str, Counter[str]] = defaultdict(Counter)
    peak, failures, count = 0, [], 0
    for each in outcomes:
        count += 1
        subjects[each["subject"]][each["result"]] += 1
        hurts[each["hurt"]][each["result"]] += 1
        peak = max(peak, each.get("peak_bytes", 0))
        if each["result"] in BAD:
            failures.append(dict(each))
    return {
        "trials": count,
        "subjects": {name: dict(counts) for name, counts in subjects.items()},
        "hurts": {name: dict(counts) for name, counts in sorted(hurts.items())},
        "peak_mib": peak >> 20,
        "failures": failures,
    }


def table(figures: Mapping[str, Any]) -> str:
    """The results by subject, as Markdown."""
    heads = (REFUSED, HARMLESS, UNPROTECTED, *BAD)
    lines = ["| checkpoint | trials | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) + 1)]
    total: Counter[str] = Counter()
    for name, counts in figures["subjects"].items():
        lines.append(_row(name, counts, heads))
        total.update(counts)
    return "\n".join([*lines, _row("all", total, heads)])


def _row(name: str, counts: Mapping[str, int], heads: Iterable[str]) -> str:
    cells = [name, sum(counts.values()), *(counts.get(head, 0) for head in heads)]
    return "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells) + " |"
