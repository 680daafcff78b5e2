"""The secret of the job by which ranks authenticate each other: from the environment, or one that is given.

Not in this module: drawing a secret, the authentication itself (see `dcp_ranks.transport.handshake`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from dcp_ranks.errors import JobSecretError

__all__ = ["job_secret"]

_VALUE: Final = "DCP_JOB_SECRET"
_FILE: Final = "DCP_JOB_SECRET_FILE"
_LEAST_BYTES: Final = 16


def job_secret(default: bytes) -> bytes:
    """Return the secret of the job: that of the environment where there is one, else `default`.

    `DCP_JOB_SECRET` holds the secret itself, `DCP_JOB_SECRET_FILE` the path of a file with it, whose last line break
    does not count. Who can read the store of the process group knows a `default` that was sent through it, but not a
    secret from the environment. All ranks must have the same one.

    Args:
        default: Secret to use without one in the environment, such as one that the coordinator drew.

    Raises:
        JobSecretError: Both variables are set, the file cannot be read, or the secret has fewer than 16 bytes.

    Example:
        ```python
        import os, secrets
        from dcp_ranks import job_secret

        drawn = secrets.token_bytes(32)
        assert job_secret(drawn) == drawn
        os.environ["DCP_JOB_SECRET"] = "6f1c0e0d9a4b4c6c"
        assert job_secret(drawn) == b"6f1c0e0d9a4b4c6c"
        del os.environ["DCP_JOB_SECRET"]
        ```
    """
    value, path = os.environ.get(_VALUE), os.environ.get(_FILE)
    if value is not None and path is not None:
        raise JobSecretError(f"{_VALUE} and {_FILE} are both set; unset one of them, the same on all ranks")
    if value is not None:
        return _checked(os.fsencode(value), _VALUE)
    if path is not None:
        return _checked(_content(path), f"the file {path} that {_FILE} names")
    return default


def _content(path: str) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise JobSecretError(
            f"the secret of the job cannot be read: {path}: {error.strerror or error}; make the file that "
            f"{_FILE} names readable for this process, or unset the variable on all ranks"
        ) from error
    return data.removesuffix(b"\n").removesuffix(b"\r")


def _checked(secret: bytes, source: str) -> bytes:
    if len(secret) < _LEAST_BYTES:
        raise JobSecretError(
            f"{source} holds a secret of {len(secret)} bytes; at least {_LEAST_BYTES} are needed, of random ones: "
            "`openssl rand -hex 32` makes some"
        )
    return secret
