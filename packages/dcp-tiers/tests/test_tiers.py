"""Which step is where: names for saves and loads, states of copies, the newest complete step."""

from __future__ import annotations

import os
import shutil

import pytest

from dcp_io import KeepEvery, KeepLast, LocalStore, find_checkpoints
from dcp_io.stores.root import Root
from dcp_manifest import CheckpointNotFoundError
from dcp_tiers import Tier, Tiers, TiersError
from dcp_tiers.promote import promote


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


@pytest.mark.parametrize("step", [None, -1, 1.5, "4", True])
def test_a_step_that_nobody_would_find_is_refused(near, step):
    with pytest.raises(TiersError, match=r"must be a whole number of at least 0"):
        Tiers([Tier(near)]).step(step)


def test_a_scheme_alone_does_not_become_a_folder(near):
    assert Tier("memory://").url == "memory://"
    assert Tier("s3://bucket/run/").url == "s3://bucket/run"


def test_the_description_is_read_by_its_name_alone(near, monkeypatch):
    Tiers([Tier(near)]).write()
    monkeypatch.chdir(near)
    assert Tiers.read("run.tiers.toml").tiers == (Tier(near),)


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
        ("version = 1\ntiers = [{root = '/a', keep = 'print(1)'}]\nfolder_prefix = 'step-'", "not a policy to keep"),
        (
            "version = 1\ntiers = [{root = '/a', keep = 'KeepAll()', kep = 1}]\nfolder_prefix = 'step-'",
            "unknown key 'kep'",
        ),
        ("version = 1\ntiers = 3\nfolder_prefix = 'step-'", "does not describe tiers"),
        ("version = 1\ntiers = []\nfolder_prefixes = 'step-'", "unknown key 'folder_prefixes'"),
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
    with pytest.raises(TiersError, match="twice"):
        Tiers([Tier(near, per_host=True), Tier(near)])
    near.mkdir()
    (near.parent / "link").symlink_to(near)
    with pytest.raises(TiersError, match="twice"):
        Tiers([Tier(near), Tier(near.parent / "link")])
    with pytest.raises(TiersError, match="give the root as text"):
        Tier(os.fsencode(near))
    with pytest.raises(TiersError, match="must be a number of at least 1"):
        Tier(near, rate_bytes_per_second=0)


@pytest.mark.parametrize("tiers", [None, 3, "near", ["near", "far"], Tier("near")])
def test_what_is_no_list_of_tiers_is_refused(tiers):
    with pytest.raises(TiersError, match="give a list such as"):
        Tiers(tiers)


@pytest.mark.parametrize("name", ["stale_after_seconds", "progress_timeout_seconds"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "60", None, True])
def test_times_are_above_zero(near, name, seconds):
    with pytest.raises(TiersError, match=f"{name} is {seconds!r}"):
        Tiers([Tier(near)], **{name: seconds})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 2}, "keep is 2; give a policy"),
        ({"rate_bytes_per_second": float("inf")}, "rate_bytes_per_second is inf"),
        ({"rate_bytes_per_second": 1e-300}, "rate_bytes_per_second is 1e-300"),
        ({"rate_bytes_per_second": "fast"}, "rate_bytes_per_second is 'fast'"),
        ({"max_bytes": 1.5}, "max_bytes is 1.5"),
        ({"max_bytes": True}, "max_bytes is True"),
        ({"per_host": "false"}, "per_host is 'false'"),
        ({"rate_bytes_per_second": 10**400}, "rate_bytes_per_second is 1000"),
        ({"per_host": True, "copies": "partner"}, "copies is 'partner'; give one such as"),
    ],
)
def test_wrong_options_are_refused(near, options, said):
    with pytest.raises(TiersError, match=said):
        Tier(near, **options)


def test_a_whole_number_may_be_written_as_a_float(near):
    assert Tier(near, max_bytes=5e11).max_bytes == 500_000_000_000


@pytest.mark.parametrize(
    "line",
    [
        "keep = \"__import__('os').system('true')\"",
        'keep = "KeepLast(1e999)"',
        'keep = "KeepLast(True)"',
        f'keep = "{"(" * 500}KeepLast(1){")" * 500}"',
        f"keep = {'[' * 5000}",
        "keep = 3",
        'keep = "KeepAll()"\nrate_bytes_per_second = nan',
        'keep = "KeepAll()"\nmax_bytes = inf',
        'keep = "KeepAll()"\nper_host = 1',
    ],
)
def test_a_hostile_description_is_refused(tmp_path, line):
    text = f"version = 1\nfolder_prefix = 'step-'\n[[tiers]]\nroot = '/elsewhere'\n{line}\n"
    (tmp_path / "run.tiers.toml").write_text(text)
    with pytest.raises(TiersError, match=r"run\.tiers\.toml"):
        Tiers.read(tmp_path)


@pytest.mark.parametrize("prefix", ["a/b-", "..", "7"])
def test_a_hostile_prefix_is_refused(tmp_path, prefix):
    text = f"version = 1\nfolder_prefix = '{prefix}'\n[[tiers]]\nroot = '/elsewhere'\nkeep = 'KeepAll()'\n"
    (tmp_path / "run.tiers.toml").write_text(text)
    with pytest.raises(TiersError, match=r"run\.tiers\.toml"):
        Tiers.read(tmp_path)


def test_the_file_of_another_user_is_shown_but_not_obeyed(helpers, near, monkeypatch):
    helpers.tiers().write()
    if os.getuid() == 0:
        os.chown(near / "run.tiers.toml", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert len(Tiers.read(near).tiers) == 2
    with pytest.raises(TiersError, match=r"run\.tiers\.toml belongs to another user"):
        Tiers.read(near, own=True)


@pytest.mark.parametrize("root", [".", "../run", "run", "file://run"])
def test_paths_that_depend_on_the_reader_are_refused(tmp_path, monkeypatch, root):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    text = f"version = 1\nfolder_prefix = 'step-'\n[[tiers]]\nroot = '{root}'\nkeep = 'KeepAll()'\n"
    (tmp_path / "run" / "run.tiers.toml").write_text(text)
    with pytest.raises(TiersError, match=r"run\.tiers\.toml .*relative"):
        Tiers.read(tmp_path / "run")


def test_a_file_that_is_replaced_while_it_is_read_is_not_obeyed(helpers, near, monkeypatch):
    helpers.tiers().write()
    own = (near / "run.tiers.toml").read_bytes()
    (near / "run.tiers.toml").write_bytes(own.replace(b"/far", b"/elsewhere"))
    read = LocalStore.read

    def replaced(store, name):
        data = read(store, name)
        (near / "run.tiers.toml").write_bytes(own)
        return data

    monkeypatch.setattr(LocalStore, "read", replaced)
    with pytest.raises(TiersError, match="was replaced while it was read"):
        Tiers.read(near, own=True)


def test_nothing_is_done_by_the_file_of_another_user(helpers, near, monkeypatch):
    helpers.tiers().write()
    monkeypatch.setattr("dcp_tiers.tiers.doubt_of", lambda *_: "it belongs to another user")
    tiers = Tiers.read(near)
    for act in (
        tiers.write,
        tiers.start_promoter,
        tiers.wake_promoter,
        tiers.drain,
        lambda: tiers.keep_policy,
        lambda: tiers.kept_by(KeepLast(1)),
        lambda: tiers.make_room(1, hurry=True),
        lambda: promote(tiers),
    ):
        helpers.save(near, 1)
        with pytest.raises(TiersError, match="it belongs to another user"):
            act()


def test_other_processes_know_when_a_marker_is_stale(near):
    Tiers([Tier(near)], stale_after_seconds=7.5).write()
    assert Tiers.read(near).stale_after_seconds == 7.5


@pytest.mark.parametrize(
    "name",
    ["run.toml", "a b", "a\nb", "a'\"b", "é\x1b[31m", "%41?x=1#y", "-v", "*", "\x7f", "…" * 70],
    ids=lambda name: ascii(name)[:12],
)
@pytest.mark.parametrize("is_uri", [False, True])
def test_odd_names_of_tiers(tmp_path, helpers, name, is_uri):
    near, far = (tmp_path / tier / name for tier in ("near", "far"))
    roots = [f"file://{root}" if is_uri else root for root in (near, far)]
    tiers = Tiers([Tier(root) for root in roots])
    helpers.save(near, 10)
    assert (promote(tiers) if is_uri else tiers.drain(60)) == {}
    assert helpers.loaded(far) == {10: helpers.contents(10)}
    assert [one.url for one in Tiers.read(far).tiers] == [str(near), str(far)]


def test_a_name_that_the_description_cannot_hold_is_refused_at_once(tmp_path):
    with pytest.raises(TiersError, match="not UTF-8"):
        Tier(os.fsencode(tmp_path).decode() + "/\udcff")
