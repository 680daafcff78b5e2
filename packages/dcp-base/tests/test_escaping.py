"""What is shown of names that somebody else chose, and which places are none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_base import DcpError, InvalidPlaceError, PluginNotFoundError
from dcp_base.escaping import printable
from dcp_base.schemes import file_path, scheme_of, without_end_slash

ANY_TEXT = st.text(st.characters(exclude_categories=()))


@given(ANY_TEXT)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()
    quoted = shown.replace('"', '\\"')
    if "\\" not in text:
        assert ast.literal_eval(f'"{quoted}"') == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.weight", "model.weight"),
        ("käse 重み", "käse 重み"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\r\t\x7f\x9b", "a\\nb\\r\\t\\x7f\\x9b"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("a\u2028b\u2029c\u200bd", "a\\u2028b\\u2029c\\u200bd"),
        ("\udc9b", "\\udc9b"),
        ("[bold]x[/]", "[bold]x[/]"),
    ],
)
def test_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(ANY_TEXT)
def test_messages_of_errors_are_safe_for_logs(name: str) -> None:
    for error in (
        DcpError(f"there is nothing at {name}"),
        PluginNotFoundError(f"{name} is not installed"),
        InvalidPlaceError(name),
    ):
        assert str(error).replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ("a/b", "a/b"),
        ("/a", "/a"),
        (Path("/a/b"), "/a/b"),
        ("a:b", "a:b"),
        ("C:\\a", "C:\\a"),
        ("./s3:/b", "./s3:/b"),
        ("./a://b", "./a://b"),
        ("file:///a", "/a"),
        ("FILE:///a", "/a"),
        ("file://a/b", "a/b"),
        ("file://localhost/a", "/a"),
        ("FILE://LOCALHOST/a", "/a"),
    ],
)
def test_paths(place: str, path: str) -> None:
    assert (scheme_of(place), file_path(place)) == ("file", path)


@pytest.mark.parametrize("place", ["", "file://", "s3:/bucket/x", Path("s3://bucket/x"), "file:/a", "s3://b", "C://a"])
def test_places_that_are_no_paths(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidPlaceError):
        file_path(place)


@pytest.mark.parametrize(
    ("place", "bare"), [("a//", "a"), ("/", "/"), ("s3://b/x/", "s3://b/x"), ("memory://", "memory://")]
)
def test_slashes_at_the_end(place: str, bare: str) -> None:
    assert without_end_slash(place) == bare


def test_a_folder_named_like_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    assert file_path("s3:/bucket") == "s3:/bucket"


def test_an_empty_place_is_not_the_root_directory() -> None:
    with pytest.raises(InvalidPlaceError, match=r"write \. for the current directory"):
        without_end_slash("")
