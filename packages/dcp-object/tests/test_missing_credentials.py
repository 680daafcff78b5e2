"""Without credentials, the message says so first: not the request to a metadata service that is not there."""

from __future__ import annotations

import pytest

from dcp_base.errors import InvalidPlaceError
from dcp_io import open_store
from dcp_object.client import explained


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("PUT http://169.254.169.254/latest/api/token", "AWS_ACCESS_KEY_ID"),
        ("GET http://169.254.169.254/latest/meta-data/iam/security-credentials/", "AWS_ACCESS_KEY_ID"),
        ("GET http://metadata.google.internal/computeMetadata/v1/instance", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("GET http://169.254.169.254/metadata/identity/oauth2/token", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("GET https://bucket.example/object", None),
    ],
)
def test_what_is_missing_comes_first(request_: str, said: str | None) -> None:
    text = explained(OSError(f"Generic error: Error performing {request_} in 1s"))
    assert text.startswith("no credentials found") == (said is not None)
    assert said is None or said in text


def test_a_store_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    options = {
        "metadata_endpoint": "http://127.0.0.1:9",
        "region": "us-east-1",
        "retry_config": {"max_retries": 0},
        "client_options": {"allow_http": True},
    }
    store = open_store("s3://bucket/run", storage_options=options)
    with pytest.raises(OSError, match="no credentials found: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        store.list()


@pytest.mark.parametrize("uri", ["az://container/run", "azure://container/run"])
def test_an_account_is_missing(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidPlaceError, match="no credentials found: AZURE_STORAGE_ACCOUNT_NAME is not set"):
        open_store(uri)
