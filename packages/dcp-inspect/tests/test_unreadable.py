"""What cannot be read is never passed over in silence: a row, exit code 4, and the rest is still looked at."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_base import StoreSpec, hookimpl, installed
from dcp_io import latest_valid
from integration_tests.kits.damage import flip
from integration_tests.kits.permissions import modes_count

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
DataFile = Callable[[Path], Path]


@pytest.fixture
def shared(tmp_path: Path, write: Write) -> Path:
    """A run of three steps."""
    for step in (1, 2, 3):
        write(tmp_path / "run" / f"step-{step}")
    return tmp_path


def no_folder(path: Path) -> None:
    path.chmod(0)


def no_search(path: Path) -> None:
    path.chmod(0o444)


def no_index(path: Path) -> None:
    (path / ".metadata").chmod(0)


def no_data(path: Path) -> None:
    (data,) = path.glob("*.distcp")
    data.chmod(0)


# What is wrong with the newest step → does a command that reads no data see it?
UNREADABLE = {no_folder: True, no_search: True, no_index: True, no_data: False}


@pytest.mark.parametrize("deny", UNREADABLE)
def test_a_step_that_may_not_be_read(shared: Path, dcp: Dcp, deny: Callable[[Path], None]) -> None:
    deny(shared / "run" / "step-3")
    is_seen = UNREADABLE[deny]
    with modes_count():
        code, out, _ = dcp("ls", shared)
        rows = out.splitlines()[1:]
        assert (code, len(rows)) == (4 if is_seen else 0, 3)
        assert ("cannot be read" in rows[0], "step-3" in rows[0]) == (is_seen, True)
        code, out, _ = dcp("ls", shared, "--json")
        assert [each["unreadable"] for each in json.loads(out)] == [is_seen, False, False]
        code, out, _ = dcp("verify", "-r", shared)
        assert (code, out.count("sound     ")) == (4, 2)
        assert "2 of 3 checkpoints sound, 1 cannot be read" in out.splitlines()[-1]
        code, out, err = dcp("latest", shared)
        assert (code, out) == (0, f"{shared}/run/step-{2 if is_seen else 3}\n")
        assert ("cannot be read" in err) == is_seen
        code, out, err = dcp("latest", shared, "--deep")
        assert (code, out) == (0, f"{shared}/run/step-2\n")
        assert "cannot be read" in err
        for command in (("show", shared / "run" / "step-3"), ("verify", shared / "run" / "step-3")):
            code, _, err = dcp(*command)
            assert (code, "Traceback" in err) == (4 if is_seen or command[0] == "verify" else 0, False)


def test_a_run_of_which_nothing_can_be_read(shared: Path, dcp: Dcp) -> None:
    for step in (1, 2, 3):
        no_folder(shared / "run" / f"step-{step}")
    with modes_count():
        assert dcp("latest", shared)[0] == 4
        assert dcp("ls", shared)[0] == 4
        assert dcp("prune", shared, "--keep", 1, "--yes")[0] == 4
    assert len([*(shared / "run").iterdir()]) == 3


def test_latest_valid_warns(shared: Path, data_file: DataFile, caplog: pytest.LogCaptureFixture) -> None:
    no_folder(shared / "run" / "step-3")
    os.truncate(data_file(shared / "run" / "step-2"), 100)
    with modes_count():
        found = latest_valid(shared)
    assert found is not None
    assert found.step == 1
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert ["step-3" in warned[0], "step-2" in warned[1], len(warned)] == [True, True, 2]


def test_a_folder_of_the_file_system_itself_is_no_reason_to_fail(shared: Path, dcp: Dcp) -> None:
    (shared / "lost+found").mkdir(mode=0o000)
    with modes_count():
        assert dcp("verify", "-r", shared)[0] == 0


class Acme:
    """A plug-in whose store fails in its own way."""

    @hookimpl
    def dcp_register_stores(self) -> list[StoreSpec]:
        return [StoreSpec("vault", "acme_vault:open_vault")]


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Install a plug-in of another package, whose code is in the module `acme_vault`."""
    (tmp_path / "acme_vault.py").write_text(
        "import os\n"
        "from dcp_io import LocalStore\n"
        "class Vault(LocalStore):\n"
        "    @property\n"
        "    def url(self):\n"
        "        return 'vault://' + str(self.path)\n"
        "    def child(self, name):\n"
        "        return Vault(os.path.join(self.path, name))\n"
        "    def list(self):\n"
        "        if str(self.path).endswith('step-2'):\n"
        "            raise KeyError('token')\n"
        "        return super().list()\n"
        "def open_vault(uri, *, storage_options=None):\n"
        "    if 'ACME_KEY' not in os.environ:\n"
        "        raise ValueError('ACME_KEY is not set')\n"
        "    return Vault(uri.removeprefix('vault://'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    installed.register(Acme(), "vault")
    yield tmp_path
    installed.unregister("vault")


@pytest.mark.parametrize("command", ["ls", "verify", "verify -r", "show", "rm --yes", "latest", "prune --keep 1"])
@pytest.mark.parametrize("json_", [(), ("--json",)])
def test_an_exception_of_a_plug_in_is_a_message(acme: Path, dcp: Dcp, command: str, json_: tuple[str, ...]) -> None:
    del acme
    code, out, err = dcp(*command.split(), "vault:///vault/run", *json_)
    assert code == 4
    assert err == "dcp: plug-in vault: ValueError: ACME_KEY is not set\n"
    if json_:
        assert json.loads(out)["error"]["exit_code"] == 4


def test_a_store_that_fails_for_one_folder(
    acme: Path, monkeypatch: pytest.MonkeyPatch, dcp: Dcp, write: Write, data_file: DataFile
) -> None:
    monkeypatch.setenv("ACME_KEY", "1")
    for step in (1, 2, 3):
        write(acme / "run" / f"step-{step}")
    flip(data_file(acme / "run" / "step-3"), 100_000)
    uri = f"vault://{acme}/run"
    code, out, _ = dcp("ls", uri)
    assert (code, "KeyError: 'token'" in out) == (4, True)
    code, out, _ = dcp("verify", "-r", uri, "--json")
    states = {os.path.basename(each["path"]): each["state"] for each in json.loads(out)["checkpoints"]}
    assert (code, states) == (4, {"step-3": "damaged", "step-2": "unreadable", "step-1": "sound"})
    code, out, err = dcp("latest", uri, "--deep")
    assert (code, out) == (0, f"{uri}/step-1\n")
    assert err.count("passed over") == 2


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, dcp: Dcp, tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("dcp_inspect.commands.list_checkpoints.find", fail)
    with pytest.raises(ZeroDivisionError):
        dcp("ls", tmp_path)
