"""Found by entry point alone, and what its ids look like."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from dcp_core import CheckpointNotFoundError, UnsafeCheckpointError, load, plugins
from dcp_http_example import HttpStore, HttpWriter
from dcp_http_example.address import parse_address
from dcp_http_example.server import ObjectServer

_SAVE = """
import sys, torch, dcp_core
assert not any(name.startswith("dcp_http_example") for name in sys.modules)
dcp_core.save({"weight": torch.arange(5.0)}, checkpoint_id=sys.argv[1])
"""


def test_needs_nothing_but_the_id(server: ObjectServer) -> None:
    url = server.url("alone/step-1")
    subprocess.run([sys.executable, "-W", "error", "-c", _SAVE, url], check=True, timeout=250)
    state = {"weight": torch.zeros(5)}
    load(state, checkpoint_id=url)
    assert torch.equal(state["weight"], torch.arange(5.0))


def test_says_what_it_guarantees() -> None:
    assert "http+dcp" in plugins.names("storage")
    backend = plugins.storage_for("HTTP+DCP://127.0.0.1:1/x")
    assert backend.load_writer() is HttpWriter
    assert "durable" not in backend.spec.guarantees


def test_listings_have_pages(server: ObjectServer) -> None:
    store = HttpStore(parse_address(server.url("paged")))
    for number in range(45):
        store.publish(f"{number:02}", b"")
    before = server.pages_sent
    assert len(store.list()) == 45
    assert server.pages_sent - before == 3


def test_ids_that_mean_the_same(server: ObjectServer) -> None:
    wanted = parse_address(f"http+dcp://localhost:{server.port}/a/b c")
    for text in (f"HTTP+DCP://LocalHost:{server.port}/a/b c/", f"http+dcp://localhost:{server.port}/a/b c//"):
        assert parse_address(text) == wanted
    assert wanted.url == f"http+dcp://localhost:{server.port}/a/b c"


@pytest.mark.parametrize(
    "text",
    ["", "http://h:1/x", *(f"http+dcp:{rest}" for rest in ("//h/x", "//h:0/x", "//h:99999/x", "//h:1/", "/h:1/x"))],
)
def test_other_ids_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"http\+dcp://host:port/folder"):
        parse_address(text)
    with pytest.raises(UnsafeCheckpointError):
        parse_address("http+dcp://h:1/a/../b")


def test_a_server_that_is_not_there_is_named() -> None:
    with ObjectServer() as gone:
        url = gone.url("x")
    with pytest.raises(ConnectionError, match=re.escape(url)) as caught:
        load({"weight": torch.zeros(1)}, checkpoint_id=url)
    assert not isinstance(caught.value, CheckpointNotFoundError)
