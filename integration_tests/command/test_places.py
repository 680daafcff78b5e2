"""Every command with every kind of argument that names a place: done there or refused by name, never elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp
import dcp_all.format_utils
from integration_tests.kits.s3_server import S3Server

pytest.importorskip("moto", reason="needs moto[s3]")

STATE: dict[str, Any] = {"w": torch.arange(6.0).reshape(3, 2), "step": 7}
WORKS = 0
# Kind → a place with {here} for the folder and {bucket} for the bucket, and the exit code of what it is given to.
KINDS: dict[str, tuple[str, int]] = {
    "relative": ("ck", WORKS),
    "dotted": ("./ck", WORKS),
    "absolute": ("{here}/ck", WORKS),
    "trailing slash": ("ck/", WORKS),
    "colon": ("a:b", WORKS),
    "windows": ("C:\\runs\\ck", WORKS),
    "not ASCII": ("k\u00e4se/\u91cd\u307f", WORKS),
    "escapes": ("\x1b[2J\nck", WORKS),
    "brackets": ("[bold]ck[/]", WORKS),
    "file URI": ("file://{here}/ck", WORKS),
    "FILE URI": ("FILE://{here}/ck", WORKS),
    "file URI with host": ("file://localhost{here}/ck", WORKS),
    "file URI, relative": ("file://ck", WORKS),
    "a path with slashes like a URI's": ("./s3://ck", WORKS),
    "memory": ("memory://places/ck", WORKS),
    "object store": ("s3://{bucket}/ck", WORKS),
    "object store, trailing slash": ("s3://{bucket}/ck/", WORKS),
    "object store, capitals": ("S3://{bucket}/ck", WORKS),
    "empty": ("", 2),
    "file URI of nothing": ("file://", 2),
    "lost slash": ("s3:/bucket/ck", 2),
    "lost slash of a file URI": ("file:/ck", 2),
    "scheme alone": ("s3://", 2),
    "windows URI": ("C://runs/ck", 5),
    "no package": ("nosuch://x/ck", 5),
    "no scheme": ("://x/ck", 5),
    "chained": ("simplecache::nosuch://x", 5),
    "no bucket": ("s3://there-is-none/ck", 4),
}
GOOD = [kind for kind, (_, code) in KINDS.items() if code == WORKS]
BAD = [kind for kind in KINDS if kind not in GOOD]
READERS: dict[str, Callable[[str], list[str]]] = {
    "ls": lambda place: ["ls", place],
    "show": lambda place: ["show", place],
    "show --stats": lambda place: ["show", place, "--stats"],
    "cat": lambda place: ["cat", place, "w[1]"],
    "verify": lambda place: ["verify", place],
    "diff": lambda place: ["diff", place, "good"],
    "diff, second": lambda place: ["diff", "good", place],
    "plan": lambda place: ["plan", place, "--world", "2"],
    "convert": lambda place: ["convert", place, "out.pt", "--overwrite"],
    "rm": lambda place: ["rm", place, "--dry-run"],
    "prune": lambda place: ["prune", place, "--keep", "1", "--dry-run"],
}
ALL: dict[str, Callable[[str], list[str]]] = {**READERS, "to": lambda place: ["convert", "good", place]}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    dcp.save(STATE, checkpoint_id=tmp_path / "good", no_dist=True)
    return tmp_path


def place_of(kind: str, here: Path, s3: S3Server) -> str:
    return KINDS[kind][0].format(here=here, bucket=s3.bucket)


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def is_there(place: str) -> bool:
    with contextlib.suppress(dcp.CheckpointNotFoundError):
        return bool(dcp.load_keys(["step"], checkpoint_id=place, no_dist=True)["step"] == 7)
    return False


@pytest.mark.parametrize("kind", GOOD)
def test_places_that_work(here: Path, s3: S3Server, kind: str, capsys: Any) -> None:
    place = place_of(kind, here, s3)
    before = below(here)
    assert dcp.run_command(["convert", "good", place, "--overwrite"]) == 0
    local = "memory" not in kind and "object" not in kind
    assert (below(here) > before) == local
    assert dcp.open_store(place).exists(".metadata")
    for name, arguments in READERS.items():
        code = 2 if name == "prune" else 0  # it takes the directory of a run
        assert dcp.run_command(arguments(place)) == code, (name, capsys.readouterr())
    assert dcp.run_command(["rm", place, "--yes"]) == 0
    assert not dcp.open_store(place).exists(".metadata")
    for name in ("show", "cat", "verify", "diff", "plan", "convert", "rm"):
        assert dcp.run_command(READERS[name](place)) == 3, (name, capsys.readouterr())


@pytest.mark.parametrize("kind", BAD)
def test_places_that_are_refused(here: Path, s3: S3Server, kind: str, capsys: Any) -> None:
    place, code = place_of(kind, here, s3), KINDS[kind][1]
    before = below(here)
    for name, arguments in ALL.items():
        assert dcp.run_command(arguments(place)) == code, (name, capsys.readouterr())
        said = capsys.readouterr()
        assert said.out == "", name
        assert place in said.err, name
        assert "Traceback" not in said.err, name
    assert below(here) == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["convert", "good", "s3://bucket/w.pt"], 5),
        (["convert", "good", "s3://bucket/w.safetensors", "--objects", "skip"], 5),
        (["convert", "good", "s3://bucket/w.hf", "--objects", "skip"], 5),
        (["convert", "good", "memory://x/w", "--to", "torch"], 5),
        (["convert", "good", "https://127.0.0.1:9/x"], 5),
        (["rm", "https://127.0.0.1:9/x", "--dry-run"], 4),
        (["plan", "good", "--world", "2", "--svg", "s3://bucket/x.svg"], 2),
        (["plan", "good", "--world", "2", "--html", ""], 2),
        (["prune", "s3://bucket/nothing-here", "--keep", "1", "--yes"], 3),
    ],
)
def test_what_cannot_be_written_to_a_uri(
    here: Path, s3: S3Server, arguments: list[str], code: int, capsys: Any
) -> None:
    before = below(here)
    assert dcp.run_command(arguments) == code
    said = capsys.readouterr()
    assert all(each in said.err for each in arguments if "://" in each)
    assert below(here) == before
    assert not {"w.pt", "w.safetensors", "x.svg"} & {entry.name for entry in dcp.open_store("s3://bucket").list()}


def test_files_of_other_formats_at_a_uri(here: Path, s3: S3Server, capsys: Any) -> None:
    from safetensors.torch import save_file

    root = f"s3://{s3.bucket}/files"
    torch.save(STATE, here / "a.pt")
    save_file({"w": STATE["w"]}, here / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        dcp.open_store(root).publish(name, (here / name).read_bytes())
    for place in (f"{root}/a.pt", f"{root}/a.safetensors", root):
        assert dcp.run_command(["cat", place, "w[1]"]) == 0
        assert "[2., 3.]" in capsys.readouterr().out
        assert dcp.run_command(["show", place]) == 0
        assert dcp.run_command(["verify", place]) == 5
        assert dcp.run_command(["convert", place, f"memory://{place.partition('://')[2]}", "--to", "checkpoint"]) == 0
    assert dcp.run_command(["diff", f"{root}/a.pt", "good"]) == 0
    assert dcp.run_command(["cat", f"{root}/b.pt", "w"]) == 3


def test_prune_at_a_uri(here: Path, s3: S3Server, capsys: Any) -> None:
    root = f"s3://{s3.bucket}/pruned"
    for step in (1, 2, 3):
        assert dcp.run_command(["convert", "good", f"{root}/step-{step}"]) == 0
    dcp.open_store(f"{root}/step-1").publish("mine.txt", b"stays")
    assert dcp.run_command(["prune", root, "--keep", "2", "--yes"]) == 0
    assert [is_there(f"{root}/step-{step}") for step in (1, 2, 3)] == [False, True, True]
    assert [entry.name for entry in dcp.open_store(f"{root}/step-1").list()] == ["mine.txt"]


def test_rm_at_a_uri_leaves_what_is_read_alone(here: Path, s3: S3Server, capsys: Any) -> None:
    place = f"s3://{s3.bucket}/read"
    assert dcp.run_command(["convert", "good", place]) == 0
    from dcp_io.checkpoints.remove_checkpoint import ReadingSign

    with ReadingSign(dcp.open_store(place), stale_after_seconds=3600):
        assert dcp.run_command(["rm", place, "--yes"]) == 4
        assert "a process is reading" in capsys.readouterr().err
        assert is_there(place)
    assert dcp.run_command(["rm", place, "--yes"]) == 0


class _Refuse(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        body = b"<?xml version='1.0'?><Error><Code>InvalidAccessKeyId</Code><Message>who are you</Message></Error>"
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refuse)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def test_wrong_credentials(here: Path, s3: S3Server, refusing: None, capsys: Any) -> None:
    before = below(here)
    place = f"s3://{s3.bucket}/ck"
    for name, arguments in ALL.items():
        assert dcp.run_command(arguments(place)) == 4, name
        said = capsys.readouterr()
        assert "credentials" in said.err, (name, said)
        assert "test-secret" not in said.err
    assert below(here) == before


LIBRARY: dict[str, Callable[[Any], object]] = {
    "save": lambda place: dcp.save(STATE, checkpoint_id=place, no_dist=True),
    "convert": lambda place: dcp.convert("good", place),
    "FileSystemWriter": lambda place: dcp.save(STATE, storage_writer=dcp.FileSystemWriter(place), no_dist=True),
    "dcp_to_torch_save": lambda place: dcp_all.format_utils.dcp_to_torch_save("good", place),
    "HuggingFaceStorageWriter": lambda place: dcp.save(
        {"w": STATE["w"]}, storage_writer=dcp.HuggingFaceStorageWriter(place), no_dist=True
    ),
    "open_store": lambda place: dcp.open_store(place).make(),
}


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("place", ["", "file://", "s3:/bucket/x", Path("s3://bucket/x"), "nosuch://x/y"])
def test_the_library_writes_nowhere_else(here: Path, name: str, place: Any) -> None:
    before = below(here)
    with pytest.raises((dcp.DcpError, dcp.CheckpointException)):
        LIBRARY[name](place)
    assert below(here) == before


@pytest.mark.parametrize("place", ["s3://bucket/from-the-library", "memory://from/the/library"])
def test_the_library_converts_to_uris(here: Path, s3: S3Server, place: str) -> None:
    before = below(here)
    assert dcp.convert("good", place).format == "checkpoint"
    assert below(here) == before
    assert is_there(place)
    dcp.convert(place, "back.pt")
    assert torch.equal(torch.load("back.pt")["w"], STATE["w"])
    with pytest.raises(dcp.UnsupportedFormatError, match="into itself"):
        dcp.convert(place, f"{place}/")
    with pytest.raises(dcp.UnsupportedFormatError, match=r"memory://x/y\.pt: the format 'torch'"):
        dcp.convert("good", "memory://x/y.pt")
