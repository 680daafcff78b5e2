"""No control character of what a checkpoint, a file or a folder is named, holds or provokes reaches a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from xml.dom import minidom

import pytest

from dcp_base.escaping import printable
from integration_tests.command.hostile import COMMANDS, MARK, NAMES, make

ROOT = Path(__file__).parents[2]
# What our own output may do to a terminal: style (of other colours than the names'), the bar of long work, the cursor.
OWN = re.compile(r"\x1b\[(?!95m)[\d;]*m|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\r(?=\x1b|\n|$)")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(root)
    return root


@pytest.fixture
def hostile(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "copy")


def start(hostile: Path, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "integration_tests.command.hostile", str(hostile)],
        cwd=hostile,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
    )


def check(text: str) -> None:
    assert len(re.findall(r"^\[\d+\]$", text, re.MULTILINE)) == len(COMMANDS), text[-2000:]
    bad = [line for line in text.split("\n") if not line.isprintable()]
    assert not bad, bad[:3]
    forged = [line for line in text.split("\n") if line.strip().startswith(MARK)]
    assert not forged, forged[:3]
    assert "Traceback" not in text


def test_in_pipes(hostile: Path) -> None:
    ran = start(hostile, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = (each.decode("utf-8") for each in ran.communicate(timeout=240))
    assert ran.returncode == 0, err[-2000:]
    check(out)
    assert all(line.isprintable() for line in err.split("\n")), err
    assert "Traceback" not in err
    assert not any(line.startswith(MARK) for line in err.split("\n"))
    assert all(printable(name) in out for name in NAMES)
    answers = re.split(r"^\[\d+\]\n", out, flags=re.MULTILINE)
    documents = [answer for answer, command in zip(answers, COMMANDS, strict=False) if "--json" in command and answer]
    assert len(documents) > 8
    for document in documents:
        assert document.isascii()
        json.loads(document, parse_constant=pytest.fail)
    assert set(NAMES) <= {value["name"] for value in json.loads(documents[1])["values"]}
    _check_pictures(hostile)


def _check_pictures(folder: Path) -> None:
    for name in ("page.html", "picture.svg"):
        text = (folder / name).read_text("utf-8")
        assert all(line.isprintable() for line in text.split("\n"))
        assert "<script>" not in text
        assert printable(NAMES[0]) in text
    minidom.parseString((folder / "picture.svg").read_text("utf-8"))


def test_on_a_terminal(hostile: Path) -> None:
    ours, theirs = pty.openpty()
    ran = start(hostile, stdout=theirs, stderr=theirs)
    os.close(theirs)
    found = bytearray()
    try:
        while data := os.read(ours, 1 << 16):
            found += data
    except OSError:  # all have closed it
        pass
    os.close(ours)
    assert ran.wait(60) == 0, found[-2000:]
    text = found.decode("utf-8").replace("\r\n", "\n")
    assert "\x1b[" in text  # styles are on
    check(OWN.sub("", text))
