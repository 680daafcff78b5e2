"""Files of tiers that this program believes: which file of whom, for which folder, and what a false one can do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import dcp_all as dcp
from dcp_io import open_store
from dcp_io.roots.copy_notes import JobHosts
from dcp_manifest import CheckpointNotFoundError
from dcp_tiers import TiersError
from dcp_tiers.commands import promote_tiers, show_tiers
from dcp_tiers.promote import PromoterLock, main, promote
from dcp_tiers.promotion import Promotion
from dcp_tiers.tier import DESCRIPTION
from integration_tests.hosts.pretended import without_promoter


def invoke(command: object, *arguments: str) -> object:
    result = CliRunner().invoke(command, arguments, standalone_mode=False)  # type: ignore[arg-type]
    if result.exception is not None:
        raise result.exception
    return result.return_value


def _main(place: str, *options: str) -> None:
    code = main([place, *options])
    if code:
        raise TiersError(f"exit code {code}")


# What writes or removes where a description says: with the place, and options that confirm it.
_ACTS: dict[str, Callable[[str, bool], object]] = {
    "python -m dcp_tiers.promote": lambda place, trust: _main(place, *["--trust-description"] * trust),
    "dcp promote": lambda place, trust: invoke(promote_tiers, place, *["--trust-description"] * trust),
    "dcp tiers --clean": lambda place, trust: invoke(show_tiers, place, "--clean", *["--trust-description"] * trust),
    "promote": lambda place, trust: promote(dcp.Tiers.read(place, trust=trust)),
    "CheckpointManager": lambda place, trust: dcp.CheckpointManager(dcp.Tiers.read(place, trust=trust), no_dist=True),
    "Tiers.write": lambda place, trust: dcp.Tiers.read(place, trust=trust).write(),
    "Tiers.drain": lambda place, trust: dcp.Tiers.read(place, trust=trust).drain(0.0),
    "Tiers.read": lambda place, trust: dcp.Tiers.read(place, own=True, trust=trust),
}


def _stranger(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


@pytest.fixture(params=["of another user", "everybody's", "in a bucket", "in a bucket, by its name"])
def doubtful(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Place of a description that others could have written, in a tier that it names."""
    private, theirs, other = (tmp_path / name for name in ("private", "theirs", "other-run"))
    shared = f"memory://{tmp_path.name}/run" if "bucket" in request.param else str(tmp_path / "shared")
    for step in (1, 2):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=f"{private}/step-{step}")
    for step in (101, 102):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=f"{other}/step-{step}")
    tiers = [dcp.Tier(private), dcp.Tier(theirs), dcp.Tier(other, keep=dcp.KeepLast(1)), dcp.Tier(shared)]
    dcp.Tiers(tiers).write()
    dcp.Tiers(tiers).write_to(3)
    if "user" in request.param:
        _stranger(tmp_path / "shared" / DESCRIPTION, monkeypatch)
    elif "bucket" not in request.param:
        (tmp_path / "shared" / DESCRIPTION).chmod(0o666)
    return f"{shared}/{DESCRIPTION}" if "name" in request.param else shared


@pytest.mark.parametrize("act", _ACTS)
def test_a_description_that_others_could_have_written_is_confirmed_or_refused(
    act: str, doubtful: str, tmp_path: Path
) -> None:
    def found() -> set[str]:
        return {str(path) for path in tmp_path.rglob("*")}

    before = found()
    with pytest.raises(TiersError):
        _ACTS[act](doubtful, False)
    assert found() == before
    with without_promoter():
        _ACTS[act](doubtful, True)


def test_it_may_be_looked_at(doubtful: str) -> None:
    assert invoke(show_tiers, doubtful) == 0
    assert dcp.Tiers.read(doubtful).latest() == 102
    with pytest.raises(TiersError, match=r"run\.tiers\.toml .*private.*theirs.*confirm it with --trust-descr"):
        dcp.Tiers.read(doubtful, own=True)


@pytest.mark.parametrize("moved", ["near", "far"])
@pytest.mark.parametrize("per_host", [False, True])
@pytest.mark.parametrize("act", [*_ACTS, "dcp tiers"])
def test_a_folder_that_was_moved_is_not_taken_for_the_one_before(
    act: str, moved: str, tmp_path: Path, *, per_host: bool
) -> None:
    tiers = dcp.Tiers([dcp.Tier(tmp_path / "near", per_host=per_host), dcp.Tier(tmp_path / "far")])
    tiers.write()
    tiers.write_to(1)
    (tmp_path / "mounted").mkdir()
    place = tmp_path / "mounted" / moved
    (tmp_path / moved).rename(place)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=place / "step-1", no_dist=True)
    call = {**_ACTS, "dcp tiers": lambda place, _: invoke(show_tiers, place)}[act]
    for here in (place, place / DESCRIPTION):
        with without_promoter(), pytest.raises(TiersError):
            call(str(here), True)
    with pytest.raises(TiersError, match=rf"is a description for .*/near, .*/far, not for {place}: was "):
        dcp.Tiers.read(place)
    assert not (tmp_path / moved).exists()


@pytest.mark.parametrize("link", ["to the tier", "above the tier"])
def test_a_link_to_a_folder_is_that_folder(link: str, tmp_path: Path) -> None:
    tiers = dcp.Tiers([dcp.Tier(tmp_path / "run/near"), dcp.Tier(tmp_path / "far")])
    tiers.write()
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tiers.step(1))
    (tmp_path / "link").symlink_to(tmp_path / ("run/near" if link == "to the tier" else "run"))
    place = tmp_path / "link" if link == "to the tier" else tmp_path / "link/near"
    assert main([str(place)]) == 0
    assert tiers.steps()[0].complete_in == (0, 1)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://x"])
def test_nothing_has_arrived_where_the_first_tier_is_away(scheme: str, tmp_path: Path, capfd: object) -> None:
    """It was written elsewhere, or its host was replaced: from here nobody knows what waits."""
    tiers = dcp.Tiers([dcp.Tier(f"{scheme}{tmp_path}/near"), dcp.Tier(tmp_path / "far")])
    tiers.write_to(1)
    assert main([str(tmp_path / "far")]) == 2
    with pytest.raises(CheckpointNotFoundError, match=r"near, the first tier, has no run\.tiers\.toml on this"):
        invoke(promote_tiers, str(tmp_path / "far"))
    assert not (tmp_path / "near").exists()


def test_a_promoter_believes_its_trainer_and_not_the_file(tmp_path: Path) -> None:
    """A stranger replaces the file between the trainer's write and the promoter's look."""
    tiers = dcp.Tiers([dcp.Tier(tmp_path / "near"), dcp.Tier(tmp_path / "far")])
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tiers.step(1))
    theirs = dcp.Tiers([dcp.Tier(tmp_path / "near"), dcp.Tier(tmp_path / "theirs")])
    tiers.write = theirs.write  # type: ignore[method-assign]
    assert tiers.drain(60) == {}
    assert tiers.steps()[0].complete_in == (0, 1)
    assert not (tmp_path / "theirs").exists()


_DEEP = b"[" * 100_000


@pytest.mark.parametrize("text", [b"", b"[]", b'{"host": "../../x"}', b'{"host": 7}', b'{"host": "zz"}', _DEEP])
def test_a_host_has_an_id_whatever_its_file_says(text: bytes, tmp_path: Path) -> None:
    (tmp_path / ".dcp-host").write_bytes(text)
    found = JobHosts(open_store(tmp_path)).own_id()
    assert int(found, 16) >= 0
    assert len(found) == 16
    assert JobHosts(open_store(tmp_path)).own_id() == found


@pytest.mark.parametrize("name", [".dcp-promoting.json", ".dcp-note.json", ".dcp-copies.json", ".dcp-hosts.json"])
@pytest.mark.parametrize("text", [b"\xff", b"[]", b"{}", b"null", _DEEP, b'{"save_id": 1, "files": 3}'])
def test_a_note_that_is_none_stops_no_promotion(name: str, text: bytes, tmp_path: Path) -> None:
    tiers = dcp.Tiers([dcp.Tier(tmp_path / "near", per_host=True), dcp.Tier(tmp_path / "far")])
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tiers.step(1))
    for folder in (tmp_path / "near", tmp_path / "near/step-1", tmp_path / "far/step-1"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    assert Promotion(tiers, 1).run(lambda _: False)
    assert 1 in tiers.steps()[0].complete_in


def test_a_strangers_lock_holds_no_promoter_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a store of each host that is no folder lies where everybody may create files."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("DCP_KEEPER_DIR", str(tmp_path / "keepers"))
    place = open_store("keeper://run")
    with PromoterLock(place, lambda: "0" * 16) as theirs:
        assert theirs.take()
        (lock,) = tmp_path.glob("dcp-promoter-*.lock")
        with PromoterLock(place, lambda: "0" * 16) as ours:
            assert not ours.take()
        _stranger(lock, monkeypatch)
        with PromoterLock(place, lambda: "0" * 16) as ours:
            assert ours.take()


@pytest.mark.parametrize("name", [".dcp-quarantined.json", ".dcp-note.json", ".dcp-note-next.json"])
@pytest.mark.parametrize("what", ["file", "link"])
def test_a_false_note_hides_one_checkpoint_at_most(what: str, name: str, tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / f"near/step-{step}")
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"reason": "a secret"}))
    mark = tmp_path / "near/step-2" / name
    if what == "link":
        mark.symlink_to(secret)
    else:
        shutil.copy(secret, mark)
    tiers = dcp.Tiers([dcp.Tier(tmp_path / "near"), dcp.Tier(tmp_path / "far")])
    hidden = "quarantined" in name
    assert tiers.latest() == (1 if hidden else 2)
    refused = (what, name) == ("link", ".dcp-note.json")
    assert promote(tiers) == ({str(tmp_path / "far"): [2]} if refused else {})
    assert tiers.steps()[0].complete_in == (0, 1)
