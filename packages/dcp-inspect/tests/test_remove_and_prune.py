"""`dcp rm` and `dcp prune`: which files go, which stay, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dcp_io import KeepBest, LocalStore
from dcp_io.checkpoints.remove_checkpoint import ReadingSign
from dcp_io.roots.catalogue import Catalogue
from dcp_io.saves.save_files import ProcessIdentity, this_process
from dcp_manifest import index_of
from dcp_manifest.file.manifest_write import encode
from integration_tests.kits.damage import flip

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
DataFile = Callable[[Path], Path]


def test_rm(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    path = write(tmp_path / "c")
    (path / "mine.txt").write_text("stays")
    code, out, _ = dcp("rm", path, "--dry-run")
    assert (code, data_file(path).exists()) == (0, True)
    assert out.startswith("would remove")
    code, out, _ = dcp("rm", path, "--yes")
    assert code == 0
    assert [each.name for each in path.iterdir()] == ["mine.txt"]
    code, _, err = dcp("rm", path, "--yes")
    assert (code, err) == (3, f"dcp: there is no checkpoint in {path}: it has no .metadata\n")


def test_rm_of_a_part(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    path = write(tmp_path / "c")
    code, out, _ = dcp("rm", path, "--part", "step", "--part", "note", "--dry-run")
    assert (code, out) == (0, f"would remove note, step of {path}: 466 B\n")
    removed = out.replace("would remove", "removed")
    assert dcp("rm", path, "--part", "step", "--part", "note", "--yes") == (0, removed, "")
    code, out, _ = dcp("rm", path, "--part", "note", "--yes", "--json")
    facts = json.loads(out)
    assert (code, facts["removed"], facts["parts"], facts["files"], facts["bytes"]) == (0, True, [], [], 0)
    code, out, _ = dcp("show", path)
    assert "removed since the save: note (the command dcp, 20" in out
    assert list(json.loads(dcp("show", path, "--json")[1])["dropped"]) == ["note", "step"]
    assert dcp("verify", path)[0] == 0


def test_prune_of_parts(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    for step in (100, 200, 300):
        write(tmp_path / f"step-{step}")
    arguments = ("prune", tmp_path, "--keep", 1, "--keep-part", "model")
    policy = "KeepLast(1) | KeepAll(parts=['model'])"
    policies = json.loads(dcp("du", tmp_path, "--keep", policy, "--json")[1])["policies"]
    assert policies == {policy: {"removes": [], "frees_bytes": 2 * 466}}
    code, out, _ = dcp(*arguments, "--dry-run")
    assert (code, f"would remove note, step of {tmp_path / 'step-100'}  466 B" in out) == (0, True)
    code, out, _ = dcp(*arguments, "--yes", "--json")
    facts = json.loads(out)
    assert (code, facts["bytes"], len(facts["kept"])) == (0, 2 * 466, 1)
    assert facts["parts"] == {f"{tmp_path}/step-{step}": ["note", "step"] for step in (200, 100)}
    names = {step: index_of(tmp_path / f"step-{step}").names() for step in (100, 200, 300)}
    assert names[100] == names[200] == ["model.weight", "model.tied"]
    assert len(names[300]) == 4
    code, out, _ = dcp(*arguments, "--yes")
    assert (code, out.startswith("0 of 3 complete checkpoints")) == (0, True)
    code, _, err = dcp(*arguments, "--keep-part", "optimizer")
    assert (code, "is in the part 'optimizer'" in err) == (3, True)


def test_prune_skips_checkpoints_without_the_part(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    for step in (100, 200, 300):
        write(tmp_path / f"step-{step}")
    other = tmp_path / "step-100"
    assert dcp("rm", other, "--part", "model", "--yes")[0] == 0
    arguments = ("prune", tmp_path, "--keep", 1, "--keep-part", "model", "--yes")
    code, out, _ = dcp(*arguments, "--dry-run", "--json")
    assert (code, [*json.loads(out)["without_part"]]) == (0, [str(other)])
    code, out, _ = dcp(*arguments)
    assert (code, f"removed note, step of {tmp_path / 'step-200'}" in out) == (0, True)
    assert f"stays {other}: nothing would stay of {other}" in out
    assert "1 of 3 complete checkpoints" in out
    assert {*index_of(other).names()} == {"note", "step"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--part", "model.wait"], 3, "nothing in {} is in the part 'model.wait'; near it: model.weight"),
        (["--part", "model", "--part", "step", "--part", "note"], 3, "nothing would stay of {}: `dcp rm {}` removes"),
        (["--part", "model", "--force"], 2, "--force and --part exclude each other"),
    ],
)
def test_rm_of_a_part_is_refused(
    tmp_path: Path, dcp: Dcp, write: Write, arguments: list[str], code: int, message: str
) -> None:
    path = write(tmp_path / "c")
    before = (path / ".metadata").read_bytes()
    found, _, err = dcp("rm", path, *arguments, "--yes")
    assert (found, message.format(path, path) in err) == (code, True), err
    assert (path / ".metadata").read_bytes() == before


def test_rm_of_a_part_in_use_does_not_advise_force(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    """With --force, the whole checkpoint would be removed."""
    path = tmp_path / "step-100"
    write(path)
    with ReadingSign(LocalStore(path), stale_after_seconds=60):
        code, _, err = dcp("rm", path, "--part", "note", "--yes")
    assert (code != 0, "is reading" in err, "force" in err) == (True, True, False)


def test_rm_of_a_part_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dcp: Dcp, write: Write) -> None:
    import io

    paths = [write(tmp_path / name) for name in "ab"]
    for answer, code in (("n\n", 130), ("y\n", 0)):
        assert all("note" in index_of(path).names() for path in paths)
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert dcp("rm", *paths, "--part", "note")[0] == code
    assert not any("note" in index_of(path).names() for path in paths)


def test_rm_of_an_unfinished_save(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    path = write(tmp_path / "c")
    (path / ".metadata").unlink()
    (path / "mine.txt").write_text("keep")
    code, _, err = dcp("rm", path, "--yes")  # PyTorch's saves leave no marker while they run
    assert (code, "a save may still be running" in err) == (4, True)
    data = data_file(path)
    os.utime(data, (1, 1))
    code, out, _ = dcp("rm", path, "--yes")
    assert (code, out.startswith(f"removed {path}: 1 file, ")) == (0, True)
    assert [each.name for each in path.iterdir()] == ["mine.txt"]
    code, _, err = dcp("rm", path, "--yes", "--force")
    assert (code, err) == (3, f"dcp: there is no checkpoint in {path}: it has no .metadata\n")


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_rm_of_a_dead_save(tmp_path: Path, force: tuple[str, ...], dcp: Dcp, write: Write) -> None:
    path = write(tmp_path / "c")
    (path / ".metadata").unlink()
    marker = {"save_id": "0123456789abcdef", "rank": None, "phase": "saving", "started_ns": 1, "replaced": []}
    (path / ".dcp-save-0123456789abcdef").write_text(json.dumps({**marker, "process": gone().to_dict()}))
    assert dcp("rm", path, "--yes", *force)[0] == 0
    assert not path.exists()


def test_rm_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    import io

    path = write(tmp_path / "c")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert dcp("rm", path)[0] == 130
    assert data_file(path).exists()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert dcp("rm", path)[0] == 0
    assert not path.exists()


def test_rm_leaves_a_running_save_alone(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    path = write(tmp_path / "c")
    (path / ".dcp-save-0123456789abcdef").write_bytes(b"{}")
    code, _, err = dcp("rm", path, "--yes")
    assert code != 0
    assert "a save is writing" in err
    assert dcp("rm", path, "--yes", "--force")[0] == 0
    assert not path.exists()


def sign(process: ProcessIdentity) -> str:
    return json.dumps(process.to_dict())


def gone() -> ProcessIdentity:
    return replace(this_process(), pid=2**22 + 1, start_ticks=1)


@pytest.mark.parametrize("name", [".dcp-reading-1", ".dcp-save-0123456789abcdef"])
def test_rm_and_prune_leave_what_is_used_alone(
    tmp_path: Path, name: str, dcp: Dcp, write: Write, data_file: DataFile
) -> None:
    path, newer = write(tmp_path / "step-1"), write(tmp_path / "step-2")
    marker = {"save_id": "0123456789abcdef", "rank": None, "phase": "saving", "started_ns": 1, "replaced": []}

    def used_by(process: ProcessIdentity) -> None:
        (path / name).write_text(json.dumps({**process.to_dict(), **marker, "process": process.to_dict()}))

    used_by(this_process())
    for command in (("rm", path, "--yes"), ("prune", tmp_path, "--keep", 1, "--yes")):
        code, _, err = dcp(*command)
        assert (code != 0, name.removeprefix(".dcp-save-") in err) == (True, True)
        assert data_file(path).exists()
    used_by(gone())  # however young it is
    assert dcp("prune", tmp_path, "--keep", 1, "--yes")[0] == 0
    assert (path.exists(), newer.exists()) == (False, True)
    assert newer.exists()


def test_rm_and_prune_work_on_a_full_disk(
    tmp_path: Path, fill_disk: Callable[[], None], dcp: Dcp, write: Write
) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"step-{step}")
    fill_disk()
    assert dcp("prune", tmp_path, "--keep", 2, "--yes")[0] == 0
    assert dcp("rm", tmp_path / "step-2", "--yes")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_rm_of_a_link_to_a_checkpoint_removes_the_checkpoint_alone(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    path = write(tmp_path / "step-1")
    (tmp_path / "last").symlink_to(path)
    code, _, err = dcp("rm", tmp_path / "last", "--yes")
    assert (code, f"a symbolic link points to {tmp_path / 'last'}: last" in err) == (4, True)
    code, out, _ = dcp("rm", tmp_path / "last", "--yes", "--force")
    assert (code, "removed" in out, [*path.iterdir()]) == (0, True, [])
    assert (tmp_path / "last").is_symlink()


# Name of a link in the run → target from there, and whether it names step 1.
LINKS = {
    "best": ("step-1", True),
    "by way of another": ("step-1/../step-1/.", True),
    "into it": ("step-1/.metadata", True),
    "to a missing file in it": ("step-1/config.json", True),
    "to another step": ("step-2", False),
    "to a longer name": ("step-10", False),
    "to the run": (".", False),
    "to itself": ("to itself", False),
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("inside", ["", "model"])
def test_a_link_in_the_run_keeps_its_step(tmp_path: Path, link: str, inside: str, dcp: Dcp, write: Write) -> None:
    run, (target, counts) = tmp_path / "run", LINKS[link]
    old, _ = (write(run / f"step-{step}" / inside) for step in (1, 2))
    os.symlink(target, run / link)
    code, out, _ = dcp("prune", run, "--keep", 1, "--dry-run", "--json")
    assert (code, json.loads(out)["linked"]) == (0, {str(old): [link]} if counts else {})
    policies = json.loads(dcp("du", run, "--keep", "KeepLast(1)", "--json")[1])["policies"]
    assert next(iter(policies.values()))["removes"] == ([] if counts else [str(old)])
    code, out, _ = dcp("prune", run, "--keep", 1, "--yes", "--force")
    assert (code, old.exists(), f"stays {old}: a symbolic link points to it: {link}\n" in out) == (0, counts, counts)
    (run / link).unlink()
    assert dcp("prune", run, "--keep", 1, "--yes")[0] == 0
    assert not old.exists()


def test_a_link_in_the_run_keeps_all_parts_of_its_step(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"step-{step}")
    os.symlink("step-1", tmp_path / "best")
    code, out, _ = dcp("prune", tmp_path, "--keep", 1, "--keep-part", "model", "--yes")
    assert (code, "points to it: best\n" in out) == (0, True)
    dropped = [bool(json.loads(dcp("show", tmp_path / f"step-{n}", "--json")[1])["dropped"]) for n in (1, 2, 3)]
    assert dropped == [False, True, False]


def test_rm_refuses_what_a_link_points_to(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    path = write(tmp_path / "step-1")
    os.symlink("step-1", tmp_path / "best")
    refusal = f"a symbolic link points to {path}: best; remove the link, or use rm --force"
    assert dcp("rm", path, "--yes") == (4, "", f"dcp: {refusal}\n")
    code, out, _ = dcp("rm", path, "--dry-run")
    assert (code, out.endswith(f"with --force only: {refusal}\n")) == (0, True)
    assert dcp("rm", path, "--yes", "--force")[0] == 0
    assert not path.exists()


def test_rm_looks_again_after_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dcp: Dcp, write: Write, data_file: DataFile
) -> None:
    path = write(tmp_path / "c")
    meanwhile: list[Callable[[], object]] = [
        lambda: (path / ".dcp-reading-1").write_text(sign(this_process())),
        lambda: write(path),
    ]
    for happens in meanwhile:
        monkeypatch.setattr("click.confirm", lambda *_, happens=happens, **__: happens())
        code, _, err = dcp("rm", path)
        assert code == 4
        assert str(path) in err
        assert data_file(path).exists()
        assert not (path / ".dcp-removing").exists()
        (path / ".dcp-reading-1").unlink(missing_ok=True)


def test_rm_takes_what_the_manager_left(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    path = write(tmp_path / "c")
    (path / ".dcp-note.json").write_text("{}")
    (path / ".dcp-reading-1").write_text(sign(gone()))
    assert dcp("rm", path, "--yes")[0] == 0
    assert not path.exists()


def test_prune(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    for step in range(1, 6):
        path = write(tmp_path / f"step-{step}")
        os.utime(path / ".metadata", (step, step))
    data_file(tmp_path / "step-5").unlink()
    assert dcp("prune", tmp_path, "--keep", 2, "--dry-run")[0] == 0
    assert len(list(tmp_path.iterdir())) == 5
    code, out, _ = dcp("prune", tmp_path, "--keep", 2, "--yes", "--json")
    assert code == 0
    assert [Path(each).name for each in json.loads(out)["kept"]] == ["step-4", "step-3"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-3", "step-4", "step-5"]


def test_prune_of_a_checkpoint_says_what_to_pass(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    path = write(tmp_path / "step-1")
    code, _, err = dcp("prune", path, "--keep", 1, "--yes")
    assert code == 2
    assert "is a checkpoint: pass the directory of its run" in " ".join(err.split())


def begun_at(path: Path, created_ns: int) -> Path:
    """Let the save of a checkpoint have begun then, whatever the times of its files."""
    index = index_of(path)
    assert index.info is not None
    index.info = replace(index.info, created_ns=created_ns)
    (path / ".metadata").write_bytes(encode(index))
    return path


PRUNED: dict[str, tuple[dict[str, int], int, set[str], set[str]]] = {
    # what there is and when it was made; how many to keep; what goes; what goes with --force besides
    "by step": ({"step-1": 1, "step-2": 2, "step-10": 3}, 1, {"step-1", "step-2"}, set()),
    "leading zeros": ({"step-1": 1, "step-002": 2}, 1, {"step-1"}, set()),
    "two runs in a folder": ({"a-step-9": 1, "a-step-10": 2, "b-step-1": 3, "step-5": 9}, 1, {"a-step-9"}, set()),
    "two folders": ({"a/step-9": 1, "a/step-10": 2, "b/step-1": 3}, 1, {"a/step-9"}, set()),
    "without a step": ({"step-1": 1, "step-2": 2, "odd": 9, "older": 0}, 1, {"step-1"}, set()),
    "only without a step": ({"a": 1, "b": 2, "seed-1": 3, "seed-2": 4}, 1, set(), set()),
    "other numbers": ({"2024-01-30": 1, "2024-01-31": 2, "rank_0": 3, "rank_1": 4}, 1, set(), set()),
    "went back": ({"step-1": 1, "step-9": 2, "step-2": 3, "step-3": 4}, 1, {"step-1"}, {"step-2", "step-3"}),
    "stock notes no time": ({"step-1": 0, "step-9": 0, "step-2": 0}, 1, {"step-1", "step-2"}, set()),
    "the same step twice": ({"step-7": 2, "step-07": 1}, 1, {"step-07"}, set()),
    "parts of a step": (
        {"checkpoint-1/model": 1, "checkpoint-1/optim": 1, "checkpoint-2/model": 2, "checkpoint-2/optim": 2},
        1,
        {"checkpoint-1/model", "checkpoint-1/optim"},
        set(),
    ),
    "a part of the newest is missing": (
        {"checkpoint-1/model": 1, "checkpoint-1/optim": 1, "checkpoint-2/model": 2},
        1,
        set(),
        set(),
    ),
}


@pytest.mark.parametrize("case", PRUNED)
def test_prune_goes_by_steps_within_a_run(tmp_path: Path, case: str, dcp: Dcp, write: Write) -> None:
    there, keep, removed, forced = PRUNED[case]
    for number, (name, created_ns) in enumerate(there.items()):
        path = begun_at(write(tmp_path / name), created_ns)
        os.utime(path / ".metadata", (9000 - number, 9000 - number))  # the first is the youngest file
    for options, gone in (((), removed), (("--force",), removed | forced)):
        _, out, _ = dcp("prune", tmp_path, "--keep", keep, *options, "--dry-run", "--json")
        said = json.loads(out)
        assert {os.path.relpath(each, tmp_path) for each in said["checkpoints"]} == gone
        assert set(said["doubtful"]) == (set() if options else {str(tmp_path / name) for name in forced})
    assert dcp("prune", tmp_path, "--keep", keep, "--yes")[0] == 0
    left = {os.path.relpath(each.parent, tmp_path) for each in tmp_path.rglob(".metadata")}
    assert left == set(there) - removed


def test_prune_leaves_what_its_note_calls_newer(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    for step in (1, 2):
        write(tmp_path / f"step-{step}")
    (tmp_path / "step-1" / ".dcp-note.json").write_text('{"step": 700}')
    code, out, _ = dcp("prune", tmp_path, "--keep", 1, "--yes")
    assert code == 0
    assert "its directory says step 1 and the note in it step 700; --force removes it" in out
    assert (tmp_path / "step-1").exists()
    dcp("prune", tmp_path, "--keep", 1, "--yes", "--force")
    assert not (tmp_path / "step-1").exists()


def test_what_was_put_aside_as_damaged_is_not_kept_for_a_good_one(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    for step in (1, 2):
        write(tmp_path / f"step-{step}")
    (tmp_path / "step-2" / ".dcp-quarantined.json").write_text('{"reason": "a bit flipped"}')
    _, out, _ = dcp("ls", tmp_path)
    assert "quarantined: a bit flipped" in out
    assert dcp("prune", tmp_path, "--keep", 1, "--yes")[0] == 0
    assert {each.name for each in tmp_path.iterdir()} == {"step-1", "step-2"}


def steps_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_prune_reads_what_stays_before_it_removes_anything(
    tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile
) -> None:
    for step in (1, 2, 3, 4, 5):
        write(tmp_path / f"step-{step}")
    for step in (5, 4):
        flip(data_file(tmp_path / f"step-{step}"), 100_000)
    for options in (("--dry-run",), ("--yes",)):
        code, out, _ = dcp("prune", tmp_path, "--keep", 1, *options, "--json")
        said = json.loads(out)
        assert (code, {Path(each).name for each in said["kept"]}) == (0, {"step-3"})
        assert {Path(each).name for each in said["damaged"]} == {"step-4", "step-5"}
    assert steps_in(tmp_path) == {"step-3", "step-4", "step-5"}
    flip(data_file(tmp_path / "step-3"), 100_000)
    assert dcp("prune", tmp_path, "--keep", 1, "--yes")[0] == 0  # none is sound
    assert steps_in(tmp_path) == {"step-3", "step-4", "step-5"}
    assert dcp("prune", tmp_path, "--keep", 1, "--yes", "--no-verify")[0] == 0
    assert steps_in(tmp_path) == {"step-5"}


def test_prune_reads_nothing_if_nothing_would_be_removed(
    tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile
) -> None:
    for step in (1, 2):
        flip(data_file(write(tmp_path / f"step-{step}")), 100_000)
    said = json.loads(dcp("prune", tmp_path, "--keep", 2, "--yes", "--json")[1])
    assert (len(said["kept"]), said["damaged"]) == (2, {})


@pytest.mark.parametrize("damaged", [False, True])
def test_prune_keeps_the_best_of_the_run(
    tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile, damaged: bool
) -> None:
    catalogue = Catalogue(LocalStore(tmp_path), stale_after_seconds=60)
    for step, loss in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.8), (5, 0.7)):
        catalogue.prepare(step, {"val_loss": loss}, best=[KeepBest(1, "val_loss")])
        write(tmp_path / f"step-{step}")
    if damaged:  # then the second best is the best
        flip(data_file(tmp_path / "step-2"), 100_000)
    code, out, _ = dcp("prune", tmp_path, "--keep", 1, "--yes")
    assert code == 0
    assert "the best by KeepBest(1, 'val_loss', 'min')" in out
    assert "step-1  257 KiB  val_loss=0.9" in out  # what goes is named with its metrics
    assert steps_in(tmp_path) == {"step-5", "step-2"} | ({"step-3"} if damaged else set())


@pytest.mark.parametrize("text", ["nonsense", "KeepAll()", "KeepBest(0, 'x')", "KeepBest(1, 'x', 'y')", "(" * 300, 5])
def test_a_strange_policy_in_a_note_keeps_nothing(tmp_path: Path, dcp: Dcp, write: Write, text: object) -> None:
    for step in (1, 2):
        write(tmp_path / f"step-{step}")
        note = {"step": step, "created": 1.0, "metrics": {"x": 1.0}, "process": None, "keeps_best": text}
        (tmp_path / f"step-{step}" / ".dcp-note.json").write_text(json.dumps(note))
    assert dcp("prune", tmp_path, "--keep", 1, "--yes")[0] == 0
    assert steps_in(tmp_path) == {"step-2"}
