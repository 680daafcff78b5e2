from __future__ import annotations

import pickle
import pickletools

import pytest

from dcp_manifest.stock.stock_write import is_stub, stub_head


@pytest.mark.parametrize("reason", ["of this", "ü" * 500])
@pytest.mark.parametrize("load", [pickle.loads, pickle._loads])
def test_loading_it_raises_the_reason(reason, load):
    with pytest.raises(RuntimeError, match=f"because {reason}; load it with dcp_all.load"):
        load(stub_head(reason))


def test_it_is_one_whole_pickle_and_known_as_a_stub():
    data = stub_head("x")
    *_, (last, _, place) = pickletools.genops(data)
    assert (last.name, place) == ("STOP", len(data) - 1)
    assert is_stub(data)
    assert is_stub(memoryview(data))
    assert not is_stub(data[:10])
    assert not is_stub(pickle.dumps({}))
