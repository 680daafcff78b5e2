"""A tier of each host: each host promotes its part, and the last one publishes. Hosts are pretended; no ranks."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dcp_io import KeepLast, LocalStore, open_store, verify_checkpoint
from dcp_io.roots.catalogue import Catalogue
from dcp_io.roots.copy_notes import CopyNote, HostCopies, JobHosts
from dcp_tiers import KeepWaiting, Tier, Tiers, TiersError
from dcp_tiers.promote import only_one
from dcp_tiers.promotion import Promotion


def test_the_last_host_publishes(tmp_path: Path, far: Path, helpers: SimpleNamespace, hosts: SimpleNamespace) -> None:
    hosts.save_apart(tmp_path, 1)
    assert hosts.bring(tmp_path, far, "b") == {str(far): [1]}
    assert len([*far.glob("step-1/*.distcp")]) == 1
    assert hosts.bring(tmp_path, far, "b", "c") == {str(far): [1]}
    assert not (far / "step-1/.metadata").exists()
    assert hosts.bring(tmp_path, far, "a") == {}
    with hosts.on_host(tmp_path, "a"):
        (step,) = Tiers([Tier(hosts.near, per_host=True), Tier(far)]).steps()
        assert step.complete_in == (0, 1)
    assert helpers.loaded(far) == {1: helpers.contents(1)}
    assert verify_checkpoint(far / "step-1").ok
    assert hosts.bring(tmp_path, far, "b", "c") == {}
    assert {file.suffix for file in (far / "step-1").iterdir()} <= {".distcp", "", ".json"}
    assert not [*far.glob("step-1/.dcp-promoting*"), *far.glob("step-1/.dcp-save*")]


def test_what_a_host_has_brought_is_not_sent_again(
    tmp_path: Path, far: Path, helpers: SimpleNamespace, hosts: SimpleNamespace
) -> None:
    hosts.save_apart(tmp_path, 1)
    hosts.bring(tmp_path, far, "a")
    (brought,) = far.glob("step-1/*.distcp")
    number = brought.stat().st_ino
    hosts.bring(tmp_path, far, "a", "b")
    assert brought.stat().st_ino == number


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_publisher_that_is_killed_leaves_no_journal_behind(
    tmp_path: Path, far: Path, hosts: SimpleNamespace, comes_back: bool
) -> None:
    hosts.save_apart(tmp_path, 1)
    hosts.bring(tmp_path, far, "a", "b")
    (far / "step-1" / ".dcp-promoting-0123456789abcdef.json").write_text('{"save_id": "cut o')
    killed = mock.patch("dcp_tiers.copying._end", side_effect=OSError(5, "killed"))
    with killed, hosts.on_host(tmp_path, "c"):
        tiers = Tiers([Tier(hosts.near, per_host=True), Tier(far)])
        Promotion(tiers, 1).run(lambda seconds: False)
    assert [*far.glob("step-1/.metadata")]
    left = far.glob("step-1/.dcp-promoting-*")
    assert len([*left]) == 4
    if comes_back:
        assert hosts.bring(tmp_path, far, "c") == {}
    else:
        os.utime(far / "step-1" / ".dcp-promoting-0123456789abcdef.json", (time.time() - 7200,) * 2)
        Catalogue(LocalStore(far), stale_after_seconds=3600).sweep()
    assert not [*far.glob("step-1/.dcp-promoting-*")]


@pytest.mark.parametrize("age_seconds", [0, 3700])
def test_the_journal_of_a_later_save_is_kept_while_its_hosts_may_come(
    tmp_path: Path, far: Path, helpers: SimpleNamespace, age_seconds: int
) -> None:
    helpers.save(far, 1)
    journal = far / "step-1" / ".dcp-promoting-0123456789abcdef.json"
    journal.write_text('{"save_id": "later", "files": {}}')
    os.utime(journal, (time.time() - age_seconds,) * 2)
    Catalogue(LocalStore(far), stale_after_seconds=3600).sweep()
    assert journal.exists() == (age_seconds == 0)


def test_a_damaged_part_is_not_brought(
    tmp_path: Path, far: Path, helpers: SimpleNamespace, hosts: SimpleNamespace
) -> None:
    hosts.save_apart(tmp_path, 1)
    with hosts.on_host(tmp_path, "b") as near:
        (data,) = near.glob("step-1/*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    hosts.bring(tmp_path, far, "a", "b", "c")
    assert not (far / "step-1/.metadata").exists()
    assert not (far / "step-1" / data.name).exists()


def test_a_host_that_is_gone_holds_up_its_steps_alone(
    tmp_path: Path, far: Path, helpers: SimpleNamespace, hosts: SimpleNamespace
) -> None:
    hosts.save_apart(tmp_path, 1)
    assert hosts.bring(tmp_path, far, "a", "c") == {str(far): [1]}
    hosts.save_apart(tmp_path, 2)
    shutil.rmtree(tmp_path / f"b{hosts.folder}/step-1")
    hosts.bring(tmp_path, far, "a", "b", "c")
    assert helpers.loaded(far) == {2: helpers.contents(2)}
    assert hosts.bring(tmp_path, far, "a", "b", "c") == {}
    with hosts.on_host(tmp_path, "a"):
        tiers = Tiers([Tier(hosts.near, per_host=True), Tier(far)])
        assert tiers.keep_waiting.keep([], 0.0) == set()


def test_a_higher_step_of_an_earlier_run_gives_up_no_part(
    tmp_path: Path, far: Path, helpers: SimpleNamespace, hosts: SimpleNamespace
) -> None:
    helpers.save(far, 30)
    hosts.save_apart(tmp_path, 1)
    assert hosts.bring(tmp_path, far, "a", "b") == {str(far): [1]}
    assert not [*tmp_path.glob(f"*{hosts.folder}/step-1/.dcp-forgone-*")]
    assert hosts.bring(tmp_path, far, "c") == {}
    assert helpers.loaded(far) == {1: helpers.contents(1), 30: helpers.contents(30)}


def test_steps_that_are_saved_again_after_going_back_all_arrive(
    tmp_path: Path, far: Path, helpers: SimpleNamespace, hosts: SimpleNamespace
) -> None:
    helpers.save(far, 20)
    for step in (10, 20):
        hosts.save_apart(tmp_path, step)
    assert hosts.bring(tmp_path, far, "a", "b") == {str(far): [10, 20]}
    assert hosts.bring(tmp_path, far, "c") == {}
    assert helpers.loaded(far) == {10: helpers.contents(10), 20: helpers.contents(20)}


def test_what_others_have_completed_is_not_given_up(
    tmp_path: Path, far: Path, helpers: SimpleNamespace, hosts: SimpleNamespace
) -> None:
    for step in (1, 2, 3):
        hosts.save_apart(tmp_path, step)
    with hosts.on_host(tmp_path, "a"):
        first = Promotion(Tiers([Tier(hosts.near, per_host=True), Tier(far)]), 1)
        assert [first.promote_next() for _ in range(2)] == [True, True]
    for host in "bc":
        with hosts.on_host(tmp_path, host):
            other = Promotion(Tiers([Tier(hosts.near, per_host=True), Tier(far)]), 1)
            assert [other.promote_next() for _ in range(2)] == [True, True]
    with hosts.on_host(tmp_path, "a"):
        assert first.promote_next()
        assert not first.refused
    hosts.bring(tmp_path, far, "b", "c", "a")
    assert not [*tmp_path.glob(f"*{hosts.folder}/step-*/.dcp-forgone-*")]
    assert sorted(helpers.loaded(far)) == [1, 2, 3]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_host_need_not_keep_its_part_of_an_earlier_save(
    tmp_path: Path, far: Path, helpers: SimpleNamespace, hosts: SimpleNamespace, events: list[Any], damaged: bool
) -> None:
    """A host that was away has a part of a step that the others have saved again since."""
    hosts.save_apart(tmp_path, 1)
    helpers.save(far, 1, {"later": b"5678"})
    if damaged:
        Catalogue(LocalStore(far), stale_after_seconds=60).quarantine(1, "a file is lost")
    hosts.bring(tmp_path, far, "b")
    assert helpers.loaded(far) == ({} if damaged else {1: {"later": b"5678"}})
    with hosts.on_host(tmp_path, "b"):
        tiers = Tiers([Tier(hosts.near, keep=KeepLast(1), per_host=True), Tier(far)])
        assert KeepWaiting(tiers).keep([], 0.0) == ({1} if damaged else set())
    skipped = [event.checkpoint_id for event in events if event.phase == "skip"]
    assert skipped == ([] if damaged else [f"{far}/step-1"])


def test_the_description_keeps_that_a_tier_is_of_each_host(tmp_path: Path, far: Path, hosts: SimpleNamespace) -> None:
    with hosts.on_host(tmp_path, "a"):
        tiers = Tiers([Tier(hosts.near, keep=KeepLast(2), per_host=True), Tier(far)])
        tiers.write()
        assert (tmp_path / f"a{hosts.folder}/run.tiers.toml").exists()
        again = Tiers.read(hosts.url)
        assert again.tiers == tiers.tiers
        assert again.step(3) == f"{hosts.url}/step-3"
        assert again.find(3) == f"{hosts.url}/step-3?also={str(far).replace('/', '%2F')}%2Fstep-3"


def test_only_the_first_tier_may_be_of_each_host(tmp_path: Path, far: Path, hosts: SimpleNamespace) -> None:
    with hosts.on_host(tmp_path, "a"), pytest.raises(TiersError, match="only the first tier"):
        Tiers([Tier(far), Tier(hosts.near, per_host=True)])


@pytest.mark.parametrize("uri", ["host:///near/run", "shelf://run"])
def test_a_store_of_each_host_makes_a_tier_of_each_host(tmp_path: Path, hosts: SimpleNamespace, uri: str) -> None:
    with hosts.on_host(tmp_path, "a"):
        assert Tiers([Tier(uri)]).tiers == (Tier(uri, per_host=True),)


def test_a_shared_store_is_no_tier_of_each_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_tiers.tiers.open_store", lambda _: LocalStore(tmp_path))
    with pytest.raises(TiersError, match="all hosts share the store"):
        Tiers([Tier("s3://bucket/run", per_host=True)])


def test_there_is_one_promoter_of_a_host(tmp_path: Path, far: Path, hosts: SimpleNamespace) -> None:
    def tiers() -> Tiers:
        return Tiers([Tier(hosts.near, per_host=True), Tier(far)])

    with hosts.on_host(tmp_path, "a"), only_one(tiers()) as first:
        with only_one(tiers()) as second:
            assert (first, second) == (True, False)
        with hosts.on_host(tmp_path, "b"), only_one(tiers()) as elsewhere:
            assert elsewhere


def copy_to(tmp_path: Path, hosts: SimpleNamespace, owner: str, receiver: str) -> list[str]:
    """Put copies of one host's part of step 1 on another host, as partners do; returns their names."""
    with hosts.on_host(tmp_path, owner) as near:
        files = [*near.glob("step-1/*.distcp")]
        ids = JobHosts(open_store(hosts.url)).own_id()
    with hosts.on_host(tmp_path, receiver) as near:
        CopyNote(files[0].name.split(".")[1], {ids: tuple(file.name for file in files)}, protected=True).write(
            open_store(hosts.url).child("step-1")
        )
        for file in files:
            shutil.copy(file, near / "step-1")
    return [file.name for file in files]


def note_job(tmp_path: Path, hosts: SimpleNamespace, *present: str) -> None:
    """Note on each host of a job which hosts the job has."""
    ids = set()
    for host in present:
        with hosts.on_host(tmp_path, host):
            ids.add(JobHosts(open_store(hosts.url)).own_id())
    for host in present:
        with hosts.on_host(tmp_path, host):
            JobHosts(open_store(hosts.url)).note(ids)


def test_a_copy_is_brought_only_when_its_host_is_gone(
    tmp_path: Path, far: Path, helpers: SimpleNamespace, hosts: SimpleNamespace
) -> None:
    hosts.save_apart(tmp_path, 1)
    names = copy_to(tmp_path, hosts, "a", "b")
    hosts.bring(tmp_path, far, "b", "c")
    assert not any((far / "step-1" / name).exists() for name in names)  # nobody has said that a is gone
    note_job(tmp_path, hosts, "a", "b", "c")
    hosts.bring(tmp_path, far, "b", "c")
    assert not any((far / "step-1" / name).exists() for name in names)
    with hosts.on_host(tmp_path, "b"):
        (step,) = Tiers([Tier(hosts.near, per_host=True), Tier(far)]).steps()
    copy = step.copies[0]
    assert copy is not None
    with hosts.on_host(tmp_path, "b") as near:
        own = [file for file in near.glob("step-1/*.distcp") if file.name not in names]
    assert (copy.protected, copy.bytes) == (True, own[0].stat().st_size)
    shutil.rmtree(tmp_path / f"a{hosts.folder}/step-1")
    note_job(tmp_path, hosts, "b", "c")
    assert hosts.bring(tmp_path, far, "b") == {}
    assert helpers.loaded(far) == {1: helpers.contents(1)}


def test_a_copy_is_brought_when_its_host_has_long_been_silent(
    tmp_path: Path, far: Path, helpers: SimpleNamespace, hosts: SimpleNamespace
) -> None:
    hosts.save_apart(tmp_path, 1)
    copy_to(tmp_path, hosts, "a", "b")
    note_job(tmp_path, hosts, "a", "b", "c")
    hosts.bring(tmp_path, far, "b", "c")
    for journal in far.glob("step-1/.dcp-promoting-*"):
        os.utime(journal, (time.time() - 7200,) * 2)
    assert hosts.bring(tmp_path, far, "b") == {}
    assert helpers.loaded(far) == {1: helpers.contents(1)}


def test_only_a_tier_of_each_host_has_copies_on_other_hosts(far: Path) -> None:
    copies = mock.Mock(spec=HostCopies)
    assert Tiers([Tier("/near/run", per_host=True, copies=copies), Tier(far)]).copies is copies
    with pytest.raises(TiersError, match="only a tier of each host"):
        Tiers([Tier(far, copies=copies)])
