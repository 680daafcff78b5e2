"""The commands `dcp tiers` and `dcp promote`: what they show, promote, remove and return."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dcp_io import KeepLast, find_checkpoints, latest_valid
from dcp_tiers import Tier, Tiers, TiersError
from dcp_tiers.commands import promote_tiers, show_tiers
from dcp_tiers.promote import main, only_one, promote


def run(command: click.Command, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(each) for each in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def run_json(command: click.Command, *arguments: str) -> tuple[int, Any]:
    code, text = run(command, *arguments, "--json")
    return code, json.loads(text)


def test_which_step_is_in_which_tier(helpers, near, far):
    tiers = helpers.tiers(KeepLast(2))
    tiers.write()
    for step in (10, 20):
        helpers.save(near, step)
        promote(tiers)
    helpers.save(near, 30)
    size = sum(map(len, helpers.contents(30).values()))
    code, (found,) = run_json(show_tiers, near)
    assert code == 0
    states = {step["step"]: [copy["state"] for copy in step["copies"]] for step in found["steps"]}
    assert states == {10: ["complete"] * 2, 20: ["complete"] * 2, 30: ["complete", "waits"]}
    assert (found["tiers"][1]["steps_to_go"], found["tiers"][1]["bytes_to_go"] >= size) == ([30], True)
    code, text = run(show_tiers, near / "run.tiers.toml", far)
    assert text.count(f"tier 1  {far}: ") == 2
    assert [line for line in text.splitlines() if line.startswith("30 ") and line.endswith(" to go")]


def test_half_of_a_copy_damage_and_a_tier_that_is_away(helpers, near, far):
    tiers = helpers.tiers()
    tiers.write()
    helpers.save(near, 10)
    helpers.save(near, 20)
    promote(tiers)
    (far / "step-10" / ".metadata").unlink()
    next((near / "step-10").glob(".dcp-promoted-*")).unlink()
    kept = min((far / "step-10").glob("*.distcp"))
    for path in set((far / "step-10").glob("*.distcp")) - {kept}:
        path.unlink()
    next((far / "step-20").glob("*.distcp")).unlink()
    code, (found,) = run_json(show_tiers, near)
    first, second = (step["copies"][1] for step in found["steps"])
    assert (code, first["state"], second["state"]) == (1, "incomplete", "damaged")
    whole = found["steps"][0]["copies"][0]["bytes"]
    assert first["bytes_to_go"] == whole - kept.stat().st_size
    far.rename(far.parent / "gone")
    far.write_text("not a folder")
    code, text = run(show_tiers, near)
    assert (code, "cannot be read" in text, "\n10 " in text) == (1, True, True)


def test_clean_leaves_what_will_be_finished(helpers, near, far):
    tiers = helpers.tiers(KeepLast(1))
    tiers.write()
    helpers.save(near, 10)
    helpers.save(near, 20)
    for step in (10, 20):
        shutil.copytree(near / f"step-{step}", far / f"step-{step}")
        (far / f"step-{step}" / ".metadata").unlink()
    code, (found,) = run_json(show_tiers, near, "--clean")
    assert (code, found["removed"]) == (0, {str(far): [10]})
    assert {path.name for path in far.iterdir()} == {"step-20"}


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_a_row_has_room_in_the_terminal(helpers, near, far, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    helpers.tiers().write()
    for step in (10, 20):
        helpers.save(near, step)
    promote(helpers.tiers())
    next((near / "step-10").glob("*.distcp")).unlink()
    helpers.save(near, 1_000_000)
    _, text = run(show_tiers, near)
    _, *rest = text.partition("\nstep ")[2].splitlines()
    rows, (damage,) = rest[:3], rest[3:]
    assert max(map(len, rows)) <= columns
    assert [row.split()[0] for row in rows] == ["10", "20", "1000000"]
    assert rows[2].endswith(" to go")
    assert rows[1].count("\u2588") == 2 * (4 if columns == 50 else 10)
    assert damage.startswith("step 10 in tier 0 is damaged: ")
    assert "is missing" in damage


def half(helpers, near, far, step: int):
    """Save a step to the near tier, and a part of it to the far one; returns the folder of the part."""
    helpers.save(near, step)
    folder = far / f"step-{step}"
    shutil.copytree(near / f"step-{step}", folder, ignore=shutil.ignore_patterns(".metadata"))
    return folder


def test_nothing_is_cleaned_where_another_user_says(helpers, near, far, monkeypatch):
    helpers.tiers().write()
    left = half(helpers, near, far, 10)
    shutil.rmtree(near / "step-10")
    if os.getuid() == 0:
        os.chown(near / "run.tiers.toml", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(TiersError, match="belongs to another user"):
        run(show_tiers, near, "--clean")
    assert left.exists()
    assert run(show_tiers, near)[0] == 0


def test_nothing_is_cleaned_while_nobody_knows_what_will_be_finished(helpers, near, far):
    helpers.tiers().write_to(1)
    left = half(helpers, near, far, 10)
    near.rename(near.parent / "away")
    near.write_text("not a folder")
    code, (found,) = run_json(show_tiers, far, "--clean")
    assert (code, found["removed"], left.exists()) == (1, {}, True)


def test_what_hosts_bring_is_not_cleaned_on_another_machine(tmp_path, far, hosts):
    hosts.save_apart(tmp_path, 1)
    hosts.bring(tmp_path, far, "a", "b")
    left = far / "step-1"
    with hosts.on_host(tmp_path, "login"):
        tiers = Tiers([Tier(hosts.near, per_host=True), Tier(far)], stale_after_seconds=600)
        tiers.write_to(1)
        assert run_json(show_tiers, far, "--clean")[1][0]["removed"] == {}
        assert left.exists()
        for journal in left.glob(".dcp-promoting-*"):
            os.utime(journal, (time.time() - 700,) * 2)
        assert run_json(show_tiers, far, "--clean")[1][0]["removed"] == {str(far): [1]}


def test_promote_says_what_arrived(helpers, near, far):
    tiers = helpers.tiers(KeepLast(2))
    tiers.write()
    for step in (10, 20, 30):
        helpers.save(near, step)
    code, (found,) = run_json(promote_tiers, near)
    assert (code, found["left"], found["busy"]) == (0, {}, False)
    assert found["arrived"] == [f"{far}/step-20", f"{far}/step-30"]
    assert found["skipped"] == [f"{far}/step-10"]
    assert helpers.loaded(far) == {step: helpers.contents(step) for step in (20, 30)}
    code, text = run(promote_tiers, near)
    assert (code, text.splitlines()[-1]) == (0, f"{near}: everything has arrived already")
    helpers.save(near, 40)
    code, text = run(promote_tiers, far)
    assert (code, f"arrived  {far}/step-40  " in text) == (0, True)


def test_promote_says_what_has_not_arrived(helpers, near, far):
    tiers = helpers.tiers()
    tiers.write()
    helpers.save(near, 10)
    with only_one(tiers):
        assert run(promote_tiers, near)[0] == 1
    far.write_text("not a folder")
    code, text = run(promote_tiers, near, "--progress-timeout-seconds", "0.3")
    assert (code, f"not in {far}: steps 10" in text) == (1, True)


@pytest.mark.parametrize("seconds", ["nan", "-5"])
def test_a_time_that_is_none_is_refused(helpers, near, seconds):
    helpers.tiers().write()
    with pytest.raises(click.UsageError, match="is not"):
        run(promote_tiers, near, "--progress-timeout-seconds", seconds)
    with pytest.raises(SystemExit):
        main([str(near), "--progress-timeout-seconds", seconds])


def test_the_description_is_a_root(helpers, near, far):
    tiers = helpers.tiers()
    tiers.write()
    helpers.save(near, 10)
    promote(tiers)
    place = near / "run.tiers.toml"
    found = {one.store.url for one in find_checkpoints(place)}
    assert found == {f"{near}/step-10", f"{far}/step-10"}
    helpers.save(far, 20)
    assert latest_valid(place).store.url == f"{far}/step-20"
    assert Tiers.read(place).latest() == 20
