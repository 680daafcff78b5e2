"""Which group each option belongs to, and that no option is printed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dcp_object import ObjectStoreReader, ObjectStoreWriter
from dcp_object.options import RETRY_TIMEOUT_SECONDS, Options


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ALLOW_HTTP", "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


def test_groups_and_the_rest() -> None:
    options = Options.of({"region": "r", "client_options": {"timeout": "1s"}, "retry_config": {"max_retries": 2}})
    assert options.config == {"region": "r"}
    assert options.client_options["timeout"] == "1s"
    assert "connect_timeout" in options.client_options
    assert options.retry_config["max_retries"] == 2
    assert options.retry_timeout_seconds == RETRY_TIMEOUT_SECONDS
    assert Options.of({"retry_config": {"retry_timeout": timedelta(seconds=5)}}).retry_timeout_seconds == 5


@pytest.mark.parametrize("endpoint", ["http://h:1", "https://h:1"])
def test_plain_http_is_allowed_where_it_is_asked_for(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = endpoint.startswith("http://")
    assert ("allow_http" in Options.of({"endpoint": endpoint}).client_options) == wanted
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert ("allow_http" in Options.of(None).client_options) == wanted


def test_nothing_is_shown() -> None:
    options = Options.of({"secret_access_key": "hidden", "client_options": {"proxy_url": "http://user:hidden@p"}})
    assert "hidden" not in repr(options)
    assert "hidden" not in str(options)
    assert options.identity() != Options.of({"secret_access_key": "other"}).identity()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"client_options": "x"}, TypeError, "client_options"),
        ({3: "x"}, TypeError, "names"),
        ({"endpoint": "host:9000"}, ValueError, "https://host:port"),
    ],
)
def test_nonsense_is_refused(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Options.of(given)


@pytest.mark.parametrize(
    ("budget", "threads", "uploads", "expected"),
    [(256 << 20, 4, 4, (4, 4)), (30 << 20, 4, 4, (2, 1)), (15 << 20, 8, 8, (1, 1)), (1 << 30, 1, 8, (1, 8))],
)
def test_parts_keep_to_the_budget(budget: int, threads: int, uploads: int, expected: tuple[int, int]) -> None:
    writer = ObjectStoreWriter("s3://b/c", max_inflight_bytes=budget, thread_count=threads, uploads=uploads)
    assert (writer.thread_count, writer.uploads) == expected
    assert writer.thread_count * (writer.uploads + 2) * writer.part_bytes <= budget
    assert writer.part_bytes >= 5 << 20


@pytest.mark.parametrize(
    "options", [{"thread_count": 0}, {"uploads": 0}, {"spread": 257}, {"spread": -1}, {"max_inflight_bytes": 1000}]
)
def test_writers_refuse_nonsense(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ObjectStoreWriter("s3://b/c", **options)  # type: ignore[arg-type]


def test_readers_refuse_nonsense() -> None:
    for options in ({"verify": "maybe"}, {"thread_count": 0}, {"max_inflight_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ObjectStoreReader("s3://b/c", **options)  # type: ignore[arg-type]


def test_spreading_needs_a_coordinator() -> None:
    writer = ObjectStoreWriter("s3://b/c", spread=4)
    with pytest.raises(ValueError, match="use_collectives"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False, save_id="x", world_size=1)
