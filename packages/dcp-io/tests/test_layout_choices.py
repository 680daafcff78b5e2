"""Options with named choices are checked, and the error message lists the choices."""

from __future__ import annotations

import pytest

from dcp_io.requests import check_options


@pytest.mark.parametrize("verify", ["blocks", "full", "before", True, False])
def test_what_is_known_passes(verify: object) -> None:
    check_options(verify=verify)


@pytest.mark.parametrize("layout", ["torch", "raw"])
def test_layouts_pass(layout: object) -> None:
    check_options(layout=layout)


@pytest.mark.parametrize("value", ["", "block", None, 2])
def test_what_is_not_known_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"verify=.* is not known; choose one of 'blocks', 'full', 'before', True"):
        check_options(verify=value)
    with pytest.raises(ValueError, match=r"layout=.* is not known; choose one of 'torch', 'raw'"):
        check_options(layout=value)
