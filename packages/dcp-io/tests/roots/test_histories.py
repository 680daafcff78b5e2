"""Random histories of saves, policies with parts, removals by hand, and kills, against a model of what must be there.

After each operation, the root holds the checkpoints of the model with exactly their bytes, and nothing else. A killed
operation may have done any part of its work, but each checkpoint is as before or as after it.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path

import pytest

from dcp_crash import Fault, run_traced
from dcp_io import KeepAll, KeepEvery, KeepLast, LocalStore, verify_checkpoint
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint
from dcp_io.roots.catalogue import Catalogue
from dcp_manifest import index_of
from dcp_manifest.index.columns import needed_bytes

pytestmark = pytest.mark.traced

NAMES = ["m.a", "m.b.c", "o.a", "o", "s"]
PARTS = [["m"], ["m.a"], ["m", "s"], ["o"], ["x"]]
WAYS = [{}, {}, {"single_file": False}, {"layout": "raw"}]
MOST_CALLS = 90


def below(name, parts):
    """As in the documentation, not as in the code."""
    return any((name + ".").find(part + ".") == 0 for part in parts)


class History:
    """A root and its model: step → name → bytes, in the order of the saves."""

    def __init__(self, seed, root, helpers):
        self.random = random.Random(seed)
        self.root, self.helpers = root, helpers
        self.model = {}
        self.had = {}  # step → the names that were saved
        self.kills = self.smaller = 0
        self.restart()

    def restart(self):
        """Begin a new process, which cleans up first."""
        long_ago = (time.time() - 7200,) * 2
        for path in self.root.rglob("*.tmp"):
            os.utime(path, long_ago)
        self.catalogue = Catalogue(LocalStore(self.root), stale_after_seconds=3600)
        self.catalogue.sweep()

    def values(self):
        chosen = self.random.sample(NAMES, self.random.randint(1, len(NAMES)))
        values = {name: self.random.randbytes(self.random.choice([0, 1, 63, 900, 70_000])) for name in chosen}
        half = len(values) // 2
        return [dict([*values.items()][:half]), dict([*values.items()][half:])] if half else [values]

    def policy(self):
        """Policies, each as an object and as what the model needs of it."""
        found = []
        for _ in range(self.random.randint(1, 3)):
            number, parts = self.random.randint(1, 3), self.random.choice([None, *PARTS])
            kind = self.random.choice([KeepLast, KeepLast, KeepEvery, KeepAll])
            policy = kind(parts=parts) if kind is KeepAll else kind(number, parts=parts)
            found.append((policy, kind, number, parts))
        return found

    @staticmethod
    def is_known(part, had, there):
        """Whether a checkpoint has or had a part, or all of what the part would be in was removed."""
        top = part.split(".")[:1]
        return any(below(name, [part]) for name in had) or (
            any(below(name, top) for name in had) and not any(below(name, top) for name in there)
        )

    def kept(self, model, policy, had):
        """What a policy leaves of a model."""
        stay = dict.fromkeys([*model][-1:])
        for _, kind, number, parts in policy:
            steps = [*model]
            if kind is KeepLast:
                steps = steps[-number:]
            if kind is KeepEvery:
                steps = [step for step in steps if step % number == 0]
            for step in steps:
                known = stay.get(step, [])
                stay[step] = None if None in (known, parts) else [*known, *parts]
        left = {}
        for step, values in model.items():
            if step in stay:
                parts = stay[step]
                if parts is None or not all(self.is_known(part, had[step], values) for part in parts):
                    parts = [*values]
                left[step] = {name: data for name, data in values.items() if below(name, parts)} or values
        return left

    def retain(self, policy):
        joined = policy[0][0]
        for other, *_ in policy[1:]:
            joined = joined | other
        self.catalogue.retain(joined, protected=lambda _: ())

    def save(self, step, values, way, policy):
        self.catalogue.prepare(step, {}, after=self.catalogue.highest())
        self.helpers.save_all(self.catalogue.store_of(step), values, sync=False, **way)
        self.catalogue.published(step)
        self.retain(policy)

    def run(self):
        for _ in range(self.random.randint(4, 9)):
            self.random.choice([self.save_next, self.save_next, self.save_next, self.remove_part, self.restart])()
            assert self.found() == self.model

    def save_next(self):
        again = self.model and self.random.random() < 0.15
        step = self.random.choice([*self.model]) if again else max(self.model, default=0) + self.random.randint(1, 2)
        values, policy, way = self.values(), self.policy(), dict(self.random.choice(WAYS))
        others = {other: values for other, values in self.model.items() if other != step}
        saved = {**others, step: self.helpers.merged(values)}
        had = {**self.had, step: [*saved[step]]}
        after = self.kept(saved, policy, had)
        self.do(lambda: self.save(step, values, way, policy), [self.model, saved, after])
        if self.found().get(step) == saved[step]:
            self.retain(policy)
            self.smaller += any(values != saved[step] for step, values in after.items())
            self.model, self.had = after, had  # now in the order of the saves

    def remove_part(self):
        step, part = self.random.choice([*self.model] or [0]), self.random.choice([["o"], ["m"], ["s", "m.a"]])
        if step:
            left = {name: data for name, data in self.model[step].items() if not below(name, part)}
            after = {**self.model, step: left or self.model[step]}

            def remove():
                SmallerCheckpoint(self.catalogue.store_of(step), drop=part).publish(by="a test")

            self.do(remove, [self.model, after])
            remove()
            self.model = after

    def do(self, action, models):
        """Run an operation, perhaps killed at one of its calls; then each checkpoint is that of one of the models."""
        if self.random.random() < 0.4:
            action()
            return
        fault = Fault(self.random.choice(["kill", "torn"]), self.random.randint(1, MOST_CALLS))
        run = run_traced(lambda _: action(), self.root, fault=fault)
        assert run.ranks[0].error is None, run.ranks[0].error
        self.kills += run.struck
        self.restart()
        found = self.found()
        for step in {*found}.union(*models):
            assert found.get(step) in [model.get(step) for model in models]

    def found(self):
        """What is there: checks that it is sound, and that there is nothing else."""
        found = {}
        for folder in self.catalogue.folders():
            index = index_of(folder.store)
            sizes = {entry.name: entry.bytes for entry in folder.entries}
            assert {name: sizes.pop(name) for name in index.files} == needed_bytes(index)
            assert sizes.keys() == {".metadata", ".dcp-note.json"}
            assert not verify_checkpoint(folder.store).problems
            found[folder.step] = self.helpers.load_all(folder.store)
        assert {path.name for path in self.root.iterdir()} <= {"latest", *(f"step-{step}" for step in found)}
        return found


@pytest.mark.parametrize(
    "histories",
    [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])],
)
def test_histories(helpers, histories, record_property):
    kills = smaller = 0
    for seed in range(histories):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as root:
            history = History(seed, Path(root), helpers)
            history.run()
            kills, smaller = kills + history.kills, smaller + history.smaller
    assert kills > histories / 2
    assert smaller > histories / 3
    record_property("kills", kills)
