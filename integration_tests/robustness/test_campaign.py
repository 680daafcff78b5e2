"""Random damage to every kind of checkpoint: refused, harmless, or such that its format cannot tell; nothing else.

A sample runs here in this process; `python -m integration_tests.robustness.campaign` runs any number of trials in one
that may end or hang, and the slow test ten thousand of them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from integration_tests.robustness.campaign import subjects
from integration_tests.robustness.campaign.report import summary, table
from integration_tests.robustness.campaign.subjects import NAMES, make_all, open_subject
from integration_tests.robustness.campaign.trials import BAD, Trials
from integration_tests.robustness.crafted import little_memory

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"),
]
SAMPLE = 110


@pytest.fixture(scope="module")
def made(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("campaign")
    make_all(root, ranks)
    return root


def test_a_sample(made: Path, tmp_path: Path) -> None:
    trials = Trials(made, 0, NAMES, tmp_path)
    with little_memory():
        outcomes = [trials.run(number) for number in range(SAMPLE)]
    assert [each for each in outcomes if each.result in BAD] == []
    assert {each.subject for each in outcomes} == {*NAMES}
    results = Counter(each.result for each in outcomes)
    assert results["refused"] > results["harmless"] > results["unprotected"] > 0


def test_wrong_values_would_be_seen(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks of a load most flips in values go through."""
    monkeypatch.setattr(subjects.dcp, "FileSystemReader", _unchecked(subjects.dcp.FileSystemReader))
    trials = Trials(made, 0, ("a file per item",), tmp_path)
    assert Counter(trials.run(number).result for number in range(100))["wrong"] > 2


def _unchecked(reader: Any) -> Any:
    return lambda folder, **options: reader(folder, verify=False, **options)


def test_the_same_number_does_the_same(made: Path, tmp_path: Path) -> None:
    def outcome(seed: int, number: int) -> Any:
        return Trials(made, seed, NAMES, tmp_path).run(number)

    for number in (0, 5, 9):
        one, other = outcome(3, number), outcome(3, number)
        assert (one.hurt, one.files, one.result, one.detail) == (other.hurt, other.files, other.result, other.detail)
    assert len({(outcome(seed, 0).hurt, outcome(seed, 0).files) for seed in range(8)}) > 2


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_damaged_loads(made: Path, name: str) -> None:
    subject = open_subject(made, name)
    assert subject.load(subject.folder)


def test_figures() -> None:
    outcomes = [
        {"number": 0, "subject": "torch", "hurt": "flip a bit", "result": "refused", "peak_bytes": 5 << 20},
        {"number": 1, "subject": "torch", "hurt": "flip a bit", "result": "wrong", "peak_bytes": 9 << 20},
    ]
    figures = summary(outcomes)
    assert figures["subjects"] == {"torch": {"refused": 1, "wrong": 1}}
    assert (figures["trials"], figures["peak_mib"], figures["failures"]) == (2, 9, [outcomes[1]])
    assert table(figures).splitlines()[2] == "| torch | 2 | 1 | 0 | 0 | 1 | 0 | 0 | 0 | 0 | 0 |"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_thousand() -> None:
    """In a process of their own: one that ends or hangs would be seen."""
    from integration_tests.robustness.campaign.__main__ import run

    figures = summary(run(range(10_000), 1, NAMES))
    assert figures["failures"] == []
    assert figures["trials"] == 10_000
