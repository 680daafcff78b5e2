"""Options and states that cannot be exported, and what options leave as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dcp_core.errors import CheckpointNotFoundError, MissingKeyError, UnsupportedValueError
from dcp_core.testing.trees import same
from dcp_format import save_safetensors

TIED = torch.ones(2)
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "object": ({"w": torch.ones(2), "step": 3}, {}, UnsupportedValueError, "'step'"),
    "dtype": ({"w": torch.ones(2, dtype=torch.complex128)}, {}, UnsupportedValueError, "'w' has dtype complex128"),
    "one name": ({"a": torch.ones(2), "b": torch.ones(2)}, {"rename": {"a": "b"}}, UnsupportedValueError, "'a' and"),
    "no such name": ({"a": torch.ones(2)}, {"rename": {"x": "b"}}, MissingKeyError, "'x'"),
    "no configuration": ({"a": torch.ones(2)}, {"config_from": "nowhere"}, CheckpointNotFoundError, "config.json"),
    "no such stack": ({"a": torch.ones(2)}, {"split": {"x": "x.{}"}}, MissingKeyError, "'x'"),
    "no number": ({"a": torch.ones(2)}, {"split": {"a": "b"}}, ValueError, "one {}"),
    "slices of one name": (
        {"a": torch.ones(2), "b.1": torch.ones(2)},
        {"split": {"a": "b.{}"}},
        UnsupportedValueError,
        "'a'",
    ),
    "no bytes": ({"a": torch.ones(2)}, {"max_file_bytes": 0}, ValueError, "max_file_bytes=0"),
    "name of a tied tensor": (
        {"a": TIED, "b": TIED, "c": torch.ones(2)},
        {"rename": {"b": "c"}},
        UnsupportedValueError,
        "'c' and 'b'",
    ),
    "name of its own tensor": ({"a": TIED, "b": TIED}, {"rename": {"b": "a"}}, UnsupportedValueError, "'a' and 'b'"),
    "function for names": ({"a": torch.ones(2)}, {"rename": str.upper}, TypeError, "rename maps strings"),
    "name that is no string": ({"a": torch.ones(2)}, {"rename": {"a": 1}}, TypeError, "rename maps strings"),
    "half a character": ({"a\ud800": torch.ones(2)}, {}, UnsupportedValueError, r"'a\\ud800' is no text"),
    "half a character more": (
        {"a": torch.ones(2)},
        {"metadata": {"x": "\udfff"}},
        UnsupportedValueError,
        "no text",
    ),
    "metadata that is no string": ({"a": torch.ones(2)}, {"metadata": {"x": 1}}, TypeError, "metadata maps strings"),
    "metadata of our own": ({"a": torch.ones(2)}, {"metadata": {"DCP_SAVE_ID": "x"}}, ValueError, "DCP_SAVE_ID"),
    "integers as dtype": ({"a": torch.ones(2)}, {"dtype": torch.int8}, ValueError, "dtype=torch.int8"),
    "packed dtype": ({"a": torch.ones(2)}, {"dtype": torch.float4_e2m1fn_x2}, ValueError, "not packed"),
    "name of a dtype": ({"a": torch.ones(2)}, {"dtype": "bfloat16"}, TypeError, "torch.bfloat16"),
    "slices of a number": (
        {"a": torch.tensor(2.0)},
        {"split": {"a": "a.{}"}},
        UnsupportedValueError,
        "'a' is one",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_leaves_the_earlier_export(tmp_path: Path, case: str) -> None:
    save_safetensors({"w": torch.ones(3)}, tmp_path)
    state, options, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        save_safetensors(state, tmp_path, **options)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert same(load_file(tmp_path / "model.safetensors"), {"w": torch.ones(3)})


def test_packed_elements_are_not_cast(tmp_path: Path) -> None:
    packed = torch.arange(8, dtype=torch.uint8).view(2, 4).view(torch.float4_e2m1fn_x2)
    save_safetensors({"packed": packed, "w": torch.ones(3)}, tmp_path, dtype=torch.float16)
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["packed"].view(torch.uint8), packed.view(torch.uint8))
    assert found["w"].dtype is torch.float16
