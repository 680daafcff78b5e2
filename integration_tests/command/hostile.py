"""Checkpoints and files whose names, values and messages would do something to a terminal, and commands on them.

`python -m integration_tests.command.hostile FOLDER` runs every command on what `make` has made there.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

import dcp_all as dcp
from dcp_manifest import index_of
from dcp_manifest.file.manifest_write import encode

__all__ = ["COMMANDS", "EVIL", "MARK", "NAMES", "make", "run_all"]

EVIL = "\x1b]0;title\x07\x1b[95mred\x1b[2J\x9b31m\r\x08\x7f\u202e\u2066\u2028\u2029\u200b"
"""Sets a terminal's title, colours and clears it, returns, deletes, reorders."""
MARK = "FAKE LINE sound everything"
_CONTROLS = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0))]
NAMES = [
    EVIL + "t",
    f"a\n{MARK}",
    *(f"c{ord(each):02x}{each}" for each in _CONTROLS if each != "\0"),
    "[bold red]markup[/]",
    "[link=http://evil]x[/link]",
    "[/]",
    "[",
    "\\[x]",
    ":skull:",
    "<script>alert(1)</script>&amp;",
    "$(touch pwned)",
]
FOLDER = f"run{EVIL}\n{MARK}"


def make(root: Path) -> None:
    """Checkpoints, sound and damaged, and files of other formats, in a folder that is named like their values."""
    here = root / FOLDER
    state = {name: torch.ones(2) for name in NAMES}
    values = {
        "text": EVIL,
        "mapping": {EVIL: [EVIL]},
        f"object{EVIL}": {"inner": EVIL},
        "nan": torch.tensor([float("nan")]),
    }
    dcp.save({**state, **values}, checkpoint_id=here / "good", no_dist=True)
    changed = {**state, NAMES[0]: torch.zeros(2), NAMES[1]: torch.zeros(3), "text": EVIL + EVIL}
    dcp.save(changed, checkpoint_id=here / "other", no_dist=True)
    _damage(here)
    index = index_of(here / "good")
    assert index.info is not None
    files = tuple(name.replace("__0_0", f"__0_{EVIL}") for name in index.files)
    info = replace(index.info, writer=EVIL, user=((EVIL, EVIL),))
    shutil.copytree(here / "good", here / "lost")
    (here / "lost" / ".metadata").write_bytes(encode(replace(index, files=files, info=info)))
    save_file({name: torch.ones(1) for name in NAMES}, here / f"w{EVIL}.safetensors")
    torch.save({**state, "x": EVIL}, here / f"w{EVIL}.pt")
    (here / f"bad{EVIL}.pt").write_bytes(_hostile_pickle())
    (here / f"text{EVIL}").write_text(EVIL)
    shutil.copytree(here / "good", here / os.fsdecode(b"raw\x9b31m\xff"))


def _damage(here: Path) -> None:
    shutil.copytree(here / "good", here / "flipped")
    (data,) = (here / "flipped").glob("*.distcp")
    content = bytearray(data.read_bytes())
    for at in range(64, len(content), 50):
        content[at] ^= 255
    data.write_bytes(content)
    shutil.copytree(here / "good", here / "cut")
    index = here / "cut" / ".metadata"
    index.write_bytes(index.read_bytes()[:-40])


def _hostile_pickle() -> bytes:
    """A `torch.save` file that names a class with escapes in its name."""
    plain, changed = io.BytesIO(), io.BytesIO()
    torch.save({}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):
                data = b"\x80\x02cos\n\xc2\x9b31m\x1b[2J\x1b[95mred\n)R."
            new.writestr(name, data)
    return changed.getvalue()


COMMANDS = [
    ("ls", "."), ("ls", ".", "--json"), ("ls", "nowhere"), ("ls", EVIL), ("ls", f"s3://{EVIL}"), ("ls", f"x{EVIL}://y"),
    *((*arguments, place) for place in ("good", "lost", "flipped", "cut", f"w{EVIL}.safetensors", f"w{EVIL}.pt",
        f"bad{EVIL}.pt", f"text{EVIL}", f"nothing{EVIL}", "raw") for arguments in (("show",), ("verify",))),
    ("show", "good", "--flat"), ("show", "good", "--depth", "1"), ("show", "good", "--json"), ("show", "good", EVIL),
    ("show", "good", "--stats"), ("show", "good", "--stats", "--json"), ("show", "lost", "--json"),
    *(("cat", "good", name) for name in (*NAMES[:8], "text", f"mapping.{EVIL}", f"object{EVIL}.inner", EVIL + "u")),
    ("cat", "good", "text", "--json"), ("cat", "good", "nan", "--json"), ("cat", "good", f"{EVIL}[a]"),
    ("cat", "flipped", NAMES[0]), ("cat", f"bad{EVIL}.pt", "x"),
    ("verify", "flipped", "--json"), ("verify", "lost", "--json"),
    ("diff", "good", "other"), ("diff", "good", "other", "--json"), ("diff", "good", "flipped"), ("diff", "good", EVIL),
    ("convert", "good", f"out{EVIL}.safetensors"), ("convert", "good", f"out{EVIL}.pt"), ("convert", "good", "good"),
    ("convert", "good", f"out{EVIL}.pt"), ("convert", "good", f"out{EVIL}"), ("convert", f"bad{EVIL}.pt", "x"),
    ("convert", "good", f"s3://x{EVIL}/y.pt"), ("convert", "good", "x", "--include", EVIL),
    ("convert", "good", "x", "--rename", EVIL), ("convert", "good", "x", "--dtype", EVIL), ("convert", "flipped", "x"),
    ("plan", "good", "--world", "2"), ("plan", "good", "--world", "2", "--json"), ("plan", "cut", "--world", "2"),
    ("plan", "lost", "--world", "2", "--html", "page.html", "--svg", "picture.svg"),
    ("plan", "good", "--world", EVIL), ("plan", "good", "--world", "2", "--svg", f"no{EVIL}/x.svg"),
    ("rm", "good", "--dry-run"), ("rm", "good"), ("rm", "cut", "--dry-run"), ("rm", f"none{EVIL}", "--yes"),
    ("rm", "good", "--dry-run", "--json"), ("rm", "lost", "--dry-run", "--json"), ("rm", "flipped", "--yes"),
    ("prune", ".", "--keep", "1", "--dry-run"), ("prune", ".", "--keep", "1"), ("prune", f"none{EVIL}", "--keep", "1"),
    ("prune", ".", "--keep", "1", "--dry-run", "--json"), ("prune", ".", "--keep", "9", "--yes"),
    ("plugins",), ("plugins", "--json"), (EVIL,), ("show", f"--{EVIL}"), ("completion", EVIL), ("completion", "bash"),
    ("--help",), ("show", "--help"),
]  # fmt: skip
"""Places are relative to the hostile folder; `raw` is the one whose name is no text."""


def run_all(here: Path) -> None:
    """Run every command with its paths whole; a line with the exit code follows each on stdout."""
    from dcp_inspect import cli

    present = {path.name for path in here.iterdir()}
    raw = next(each for each in present if each.startswith("raw"))
    # As the command's own entry point does; it would end the process.
    sys.excepthook = cli._print_traceback
    for command in COMMANDS:
        places = {each: str(here / (raw if each == "raw" else each)) for each in (*present, ".", "raw")}
        arguments = [places.get(each, each) for each in command]
        code = cli.run(arguments)
        sys.stderr.flush()
        print(f"[{code}]", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("error")
    run_all(Path(sys.argv[1]) / FOLDER)
