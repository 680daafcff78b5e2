"""Which step is where: names for saves and loads, states of copies, the newest complete step."""

from __future__ import annotations

import shutil

import pytest

from dcp_io import KeepEvery, KeepLast, LocalStore, Root, find_checkpoints
from dcp_manifest import CheckpointNotFoundError
from dcp_tiers import Tier, Tiers, TiersError


def test_tiers_are_a_root(helpers, near, far):
    tiers = helpers.tiers()
    assert isinstance(tiers, Root)
    helpers.save(near, 10)
    shutil.copytree(near, far)
    shutil.rmtree(near / "step-10")
    assert [one.store.url for one in find_checkpoints(tiers)] == [str(far / "step-10")]


def test_saves_go_to_the_first_and_loads_come_from_the_nearest(helpers, near, far):
    tiers = helpers.tiers()
    assert tiers.latest() is None
    helpers.save(near, 10)
    shutil.copytree(near, far)
    helpers.save(near, 20)
    assert tiers.step(30) == str(near / "step-30")
    assert (tiers.latest(), tiers.find(20), tiers.find(10)) == (20, str(near / "step-20"), str(near / "step-10"))
    shutil.rmtree(near)  # the host was replaced
    assert (tiers.latest(), tiers.find(10)) == (10, str(far / "step-10"))
    with pytest.raises(
        CheckpointNotFoundError, match=r"step 20 is complete in no tier: .*near does not have it; .*far"
    ):
        tiers.find(20)
    with pytest.raises(CheckpointNotFoundError, match="there is no complete checkpoint"):
        tiers.find(None)


def test_a_copy_that_lacks_a_file_is_not_the_latest(helpers, near, far):
    helpers.save(near, 10)
    helpers.save(near, 20)
    shutil.copytree(near, far)
    tiers = helpers.tiers()
    next((near / "step-20").glob("*.distcp")).unlink()
    assert (tiers.latest(), tiers.find(20)) == (20, str(far / "step-20"))
    next((far / "step-20").glob("*.distcp")).unlink()
    assert tiers.latest() == 10


def test_states_of_copies(helpers, near, far):
    save_id = helpers.save(near, 10)
    shutil.copytree(near, far)
    helpers.save(near, 20)
    shutil.copytree(near / "step-20", far / "step-20", ignore=shutil.ignore_patterns(".metadata"))
    next((near / "step-10").glob("*.distcp")).unlink()
    first, second = helpers.tiers().steps()
    assert (first.step, first.complete_in, second.step, second.complete_in) == (10, (1,), 20, (0,))
    assert [copy.state for copy in first.copies + second.copies] == ["damaged", "complete", "complete", "incomplete"]
    assert first.copies[1].save_id == save_id
    assert "is missing" in first.copies[0].problem
    shutil.rmtree(far / "step-20")
    assert helpers.tiers().steps()[1].copies[1] is None


def test_the_description_is_read_back(near, far, tmp_path):
    tiers = Tiers(
        [Tier(near, KeepLast(2)), Tier(f"file://{far}", KeepLast(10) | KeepEvery(1000), 5e6)],
        folder_prefix="checkpoint-",
    )
    tiers.write()
    assert not far.exists()
    for place in (near, near / "run.tiers.toml", str(near)):
        found = Tiers.read(place)
        assert (found.tiers, found.folder_prefix) == (tiers.tiers, "checkpoint-")
    tiers.write_to(1)
    assert LocalStore(far).read("run.tiers.toml") == LocalStore(near).read("run.tiers.toml")
    with pytest.raises(CheckpointNotFoundError, match="is not a tier"):
        Tiers.read(tmp_path / "other")
    with pytest.raises(CheckpointNotFoundError, match="there is no file"):
        Tiers.read(tmp_path / "other" / "run.tiers.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the key 'version' is missing"),
        ("version = 2", "version 2 is not 1"),
        ("version = [", "does not describe tiers"),
        ("version = 1\ntiers = [{root = 'a', keep = 'print(1)'}]\nfolder_prefix = 'step-'", "not a policy to keep"),
        (
            "version = 1\ntiers = [{root = 'a', keep = 'KeepAll()', kep = 1}]\nfolder_prefix = 'step-'",
            "unknown key 'kep'",
        ),
        ("version = 1\ntiers = 3\nfolder_prefix = 'step-'", "does not describe tiers"),
    ],
)
def test_a_damaged_description_is_refused(tmp_path, text, message):
    (tmp_path / "run.tiers.toml").write_text(text)
    with pytest.raises(TiersError, match=message) as raised:
        Tiers.read(tmp_path)
    assert "run.tiers.toml" in str(raised.value)


def test_wrong_tiers_are_refused(near):
    with pytest.raises(TiersError, match="no tiers"):
        Tiers([])
    with pytest.raises(TiersError, match="twice"):
        Tiers([Tier(near), Tier(f"{near}/")])
    with pytest.raises(TiersError, match="must be positive"):
        Tier(near, rate_bytes_per_second=0)
