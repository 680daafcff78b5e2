from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dcp_core import save
from dcp_inspect.commands.show import command
from dcp_io.archives.stored_objects import outline_of_tensor
from integration_tests.kits.wrapper_tensors import WRAPPER_GLOBALS, BlockTensor, MethodTensor


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (BlockTensor.of(torch.ones(8, 4)), ("BlockTensor(codes=int8 8 × 4, scale=float32 8", "block_size=4")),
        (MethodTensor.of(torch.ones(8, 4)), ("MethodTensor(uint8 8 × 4, float32 1", "MethodDtype(7)")),
    ],
)
def test_show_prints_class_and_inner_tensors(tensor: torch.Tensor, words: tuple[str, ...], tmp_path: Path) -> None:
    with torch.serialization.safe_globals(WRAPPER_GLOBALS):
        save({"m": {"w": tensor, "plain": torch.ones(3)}}, checkpoint_id=tmp_path / "c")
    for arguments in ([str(tmp_path / "c")], [str(tmp_path / "c"), "m.*", "--json"]):
        shown = CliRunner().invoke(command, arguments, standalone_mode=False)
        assert shown.exception is None
        text = " ".join(shown.output.split())
        assert all(word in text or word.replace("×", "\\u00d7") in text for word in words), text


def test_an_archive_that_repeats_itself_is_described_in_few_letters() -> None:
    nested: tuple[object, ...] = (1,)
    for _ in range(40):
        nested = (nested,) * 40
    tensor = torch.ones(2).as_subclass(Tagged)
    tensor.nested = nested  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    text = outline_of_tensor(buffer.getvalue())
    assert text is not None
    assert "Tagged" in text
    assert len(text) <= 1000


class Tagged(torch.Tensor):
    """A class with attributes."""
