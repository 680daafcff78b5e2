"""Messages name the package that opens a scheme."""

from __future__ import annotations

import pytest

from dcp_base.schemes import OBJECT_STORE_SCHEMES, package_for


@pytest.mark.parametrize(
    ("scheme", "package"),
    [
        ("file", "dcp-fs"),
        *((scheme, "dcp-object") for scheme in OBJECT_STORE_SCHEMES),
        ("memory", "dcp-fsspec"),
        ("https", "dcp-object"),
        ("sftp", "dcp-fsspec"),
    ],
)
def test_the_package_of_a_scheme(scheme: str, package: str) -> None:
    assert package_for(scheme) == package
