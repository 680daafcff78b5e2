"""Names of a template and names in a checkpoint."""

import pytest

from dcp_core.state_dict.flatten import KeyMap


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("model.weight", "weight"),
        ("model", "model"),
        ("model.encoder.0.bias", "enc.0.bias"),
        ("model.encoder.norm", "enc_norm"),
        ("model.encoders.0", "encoders.0"),
        ("layers_3.w", "layers.3.w"),
        ("x", "x"),
    ],
)
def test_paths_come_before_patterns_and_the_longest_path_first(name, stored):
    names = KeyMap(
        {"model.encoder": "enc", "model.encoder.norm": "enc_norm"},
        [(r"^model\.", ""), (r"^layers_(\d+)", r"layers.\1")],
    )
    assert names.stored(name) == stored


@pytest.mark.parametrize(
    ("rename", "name", "stored"),
    [
        ({"model": ""}, "model.weight", "weight"),
        ({"model": ""}, "model", "model"),  # nothing would be left
        ({"model": ""}, "models.weight", "models.weight"),
        ({"model": "", "model.a": "b"}, "model.a.x", "b.x"),
        ({"": "model"}, "weight", "model.weight"),
        ({"": "model", "step": "epoch"}, "step", "epoch"),
    ],
)
def test_prefixes_are_dropped_and_added(rename, name, stored):
    names = KeyMap(rename)
    assert names.stored(name) == stored
    assert names.unused([name, "models.x", "model.x", "model.a", "step"]) == []


def test_what_is_never_used_is_known():
    names = KeyMap({"a": "b", "a.b": "c", "z": "y", "q.r": "s"})
    assert names.unused(["a.b.c", "q"]) == ["z", "q.r"]
    assert not KeyMap()
    assert KeyMap(patterns=[("a", "b")])


@pytest.mark.parametrize("pattern", [("(", "x"), ("a", r"\2")])
def test_bad_patterns_are_refused_at_once(pattern):
    with pytest.raises(ValueError, match="rename_regex"):
        KeyMap(patterns=[pattern])
