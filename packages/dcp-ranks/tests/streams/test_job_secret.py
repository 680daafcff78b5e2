"""The secret of the job comes from one place, and is none that is easily guessed."""

from __future__ import annotations

import pytest

from dcp_ranks import job_secret

LONG = "0123456789abcdef"


def test_without_one_in_the_environment_the_given_one_counts(monkeypatch):
    monkeypatch.delenv("DCP_JOB_SECRET", raising=False)
    monkeypatch.delenv("DCP_JOB_SECRET_FILE", raising=False)
    assert job_secret(b"drawn") == b"drawn"


def test_the_environment_goes_first(monkeypatch):
    monkeypatch.setenv("DCP_JOB_SECRET", LONG)
    assert job_secret(b"drawn") == LONG.encode()


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_file(monkeypatch, tmp_path, end):
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(128, 160)) + end)
    monkeypatch.setenv("DCP_JOB_SECRET_FILE", str(path))
    assert job_secret(b"drawn") == bytes(range(128, 160))


@pytest.mark.parametrize(
    ("value", "content", "said"),
    [
        ("", None, "DCP_JOB_SECRET holds a secret of 0 bytes"),
        (LONG[1:], None, "at least 16"),
        (None, b"\n", "secret that DCP_JOB_SECRET_FILE names holds a secret of 0 bytes"),
        (LONG, LONG.encode(), "both set"),
        (None, None, "secret: No such file or directory"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_names_the_place(monkeypatch, tmp_path, value, content, said):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    if value is not None:
        monkeypatch.setenv("DCP_JOB_SECRET", value)
    if content is not None or value is None:
        monkeypatch.setenv("DCP_JOB_SECRET_FILE", str(path))
    with pytest.raises(ValueError, match=said) as caught:
        job_secret(b"drawn")
    assert LONG not in str(caught.value)
