"""torchao's tensors: low-bit optimizer states, float8 training, quantized weights; the same bits as with stock.

`torch.compile` is replaced by the function itself: it changes neither states nor what is saved.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
import torch.distributed.checkpoint.state_dict as stock_state
from click.testing import CliRunner
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import dcp_all as dcp
import dcp_all.state_dict as our_state
from dcp_async import AsyncSaver
from dcp_core.errors import UnsafeCheckpointError, UnsupportedValueError
from dcp_core.state_dict.flatten import flatten
from dcp_format import save_safetensors
from dcp_inspect.commands.show import command as show

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None, reason="needs torchao: `nox -s frameworks` installs it"
    ),
    pytest.mark.filterwarnings("ignore"),
]


def _net(seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False), torch.nn.Linear(128, 256, bias=False)).to(dtype)


def _low_bit(name: str) -> Callable[[int], tuple[Any, Any]]:
    def build(seed: int) -> tuple[Any, Any]:
        import torchao.optim

        model = fully_shard(_net(seed), mesh=_mesh())
        return model, getattr(torchao.optim, name)(model.parameters(), lr=1e-2)

    return build


def _float8(seed: int) -> tuple[Any, Any]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model: Any = fully_shard(convert_to_float8_training(_net(seed), config=config), mesh=_mesh())
    model.set_custom_all_gather(_GatherBytes())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


class _GatherBytes(DefaultAllGather):
    """All-gather of FSDP for gloo, which has no float8: `all_gather_single` raises "Invalid scalar type"."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        return super().__call__(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), group, async_op)


def _mesh() -> Any:
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


TRAININGS: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "AdamW8bit": _low_bit("AdamW8bit"),
    "AdamW4bit": _low_bit("AdamW4bit"),
    "AdamWFp8": _low_bit("AdamWFp8"),
    "float8": _float8,
}


def _train(model: Any, optimizer: Any, steps: range) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
    from torchao.float8.float8_linear import Float8Linear

    for step in steps:
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        model(torch.randn(16, 256)).square().mean().backward()
        optimizer.step()
        if any(isinstance(each, Float8Linear) for each in model.modules()):
            precompute_float8_dynamic_scale_for_fsdp(model)


def _bits(model: Any, optimizer: Any) -> bytes:
    """Everything that this rank holds of the training."""
    buffer = io.BytesIO()
    states = [optimizer.state[each] for each in model.parameters()]
    torch.save(
        [[_inner(each) for each in model.parameters()], [{k: _inner(v) for k, v in s.items()} for s in states]], buffer
    )
    return buffer.getvalue()


def _inner(tensor: torch.Tensor) -> Any:
    local: Any = getattr(tensor, "_local_tensor", tensor).detach()
    if not hasattr(local, "__tensor_flatten__"):
        return local.clone()
    return {name: getattr(local, name).clone() for name in local.__tensor_flatten__()[0]}


LIBRARIES: dict[str, tuple[Any, Any]] = {"ours": (dcp, our_state), "stock": (stock, stock_state)}


def _resume(training: str, saver: str, loader: str, folder: str) -> bool:
    with _not_compiled():
        model, optimizer = TRAININGS[training](0)
        _train(model, optimizer, range(3))
        _save(saver, model, optimizer, folder)
        _train(model, optimizer, range(3, 5))
        wanted = _bits(model, optimizer)
        model, optimizer = TRAININGS[training](1)
        states = LIBRARIES[loader][1]
        state = _loaded(loader, states, model, optimizer, folder)
        states.set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
        _train(model, optimizer, range(3, 5))
        return _bits(model, optimizer) == wanted


@contextlib.contextmanager
def _not_compiled() -> Iterator[None]:
    compiled, torch.compile = torch.compile, lambda function, **_: function  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.compile = compiled


def _loaded(loader: str, states: Any, model: Any, optimizer: Any, folder: str) -> dict[str, Any]:
    of_model, of_optimizer = states.get_state_dict(model, optimizer)
    state = {"m": of_model, "o": of_optimizer}
    if loader == "stock":
        stock.load(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder, cooperative=loader == "together")
    return state


def _save(saver: str, model: Any, optimizer: Any, folder: str) -> None:
    module, states = LIBRARIES.get(saver, LIBRARIES["ours"])
    of_model, of_optimizer = states.get_state_dict(model, optimizer)
    state = {"m": of_model, "o": of_optimizer}
    if saver in LIBRARIES:
        module.save(state, checkpoint_id=folder)
        return
    with AsyncSaver(saver) as background:  # type: ignore[arg-type]
        background.save(state, checkpoint_id=folder).result()


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ("ours", "ours"),
        ("stock", "ours"),
        ("ours", "stock"),
        ("thread", "ours"),
        ("process", "ours"),
        ("stock", "stock"),
    ],
)
def test_a_training_resumes_bit_equal(ranks: Any, training: str, saver: str, loader: str, tmp_path: Path) -> None:
    assert ranks.run(2, _resume, training, saver, loader, str(tmp_path)) == [True] * 2


def _begin(training: str, folder: str) -> None:
    with _not_compiled():
        model, optimizer = TRAININGS[training](0)
        _train(model, optimizer, range(2))
        _save("ours", model, optimizer, folder)


def _reshard(training: str, source: str, target: str) -> list[dict[str, Any]]:
    """What this rank gets from each loader; saves what we loaded."""
    with _not_compiled():
        model, optimizer = TRAININGS[training](1)
        found = [
            _loaded(loader, LIBRARIES["stock"][1], model, optimizer, source) for loader in ("stock", "together", "ours")
        ]
        dcp.save(found[-1], checkpoint_id=target)
        return [{key: _text(_inner(value)) for key, value in _flat(each).items()} for each in found]


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flatten(state).values.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("training", TRAININGS)
def test_another_number_of_ranks_gets_what_stock_gives(ranks: Any, training: str, tmp_path: Path) -> None:
    """From 2 ranks to 1, then to 4."""
    ranks.run(2, _begin, training, str(tmp_path / "2"))
    for before, now in ((2, 1), (1, 4)):
        for by_stock, together, alone in ranks.run(
            now, _reshard, training, str(tmp_path / str(before)), str(tmp_path / str(now))
        ):
            assert any(key.endswith("exp_avg") for key in by_stock)
            assert by_stock == together == alone


def _full(training: str, folder: str) -> list[Any]:
    """The full state dict of each library; rank 0 saves ours."""
    with _not_compiled():
        model, optimizer = TRAININGS[training](0)
        _train(model, optimizer, range(2))
        found = []
        for _, states in LIBRARIES.values():
            options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
            of_model, of_optimizer = states.get_state_dict(model, optimizer, options=options)
            found.append({"m": of_model, "o": of_optimizer})
        if dist.get_rank() == 0:
            dcp.save(found[0], checkpoint_id=folder, no_dist=True)
        return [_texts(each) for each in found]


def _texts(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _text(_inner(_dequantized(value))) for key, value in _flat(state).items()}


def _dequantized(tensor: Any) -> torch.Tensor:
    return tensor.dequantize() if hasattr(tensor, "codes") else tensor  # type: ignore[no-any-return]


@pytest.mark.parametrize("training", TRAININGS)
def test_full_state_dicts_are_those_of_stock(ranks: Any, training: str, tmp_path: Path) -> None:
    if training == "AdamWFp8":
        pytest.skip('gloo has no float8: `all_gather_into_tensor` in `full_tensor()` raises "Invalid scalar type"')
    folder = str(tmp_path / "c")
    ours, by_stock = ranks.run(2, _full, training, folder)[0]
    assert ours
    assert ours == by_stock == _texts(dcp.load_keys(checkpoint_id=folder))
    dcp.convert(folder, f"{folder}.pt")
    assert _texts(torch.load(f"{folder}.pt")) == ours


def _weight(config: Callable[[], Any]) -> Callable[[int], torch.Tensor]:
    def build(seed: int) -> torch.Tensor:
        from torchao.quantization import quantize_

        model = _net(seed, torch.bfloat16)
        quantize_(model, config())
        return model[0].weight  # type: ignore[return-value]

    return build


def _of(path: str, **options: Any) -> Callable[[], Any]:
    module, _, name = path.rpartition(".")
    return lambda: getattr(importlib.import_module(f"torchao.{module}"), name)(**options)


def _nf4(seed: int) -> torch.Tensor:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return to_nf4(_net(seed)[0].weight.detach())  # type: ignore[no-any-return]


def _float8_with_activations(seed: int) -> torch.Tensor:
    """What `Float8DynamicActivationFloat8WeightConfig` makes; it asks for a GPU, which only multiplying needs."""
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
        Float8Tensor,
        QuantizeTensorToFloat8Kwargs,
    )

    weight = _net(seed, torch.bfloat16)[0].weight.detach()
    return Float8Tensor.from_hp(weight, act_quant_kwargs=QuantizeTensorToFloat8Kwargs())  # type: ignore[no-any-return]


def _int4(seed: int) -> torch.Tensor:
    """A tensor as `Int4WeightOnlyConfig` makes it with the library mslk, which needs a GPU."""
    from torchao.quantization.quantize_.workflows.int4.int4_tensor import Int4Tensor

    torch.manual_seed(seed)
    codes = torch.randint(-128, 128, (128, 128), dtype=torch.int8)
    scale, zero_point = torch.rand(2, 256 // 32, 128).to(torch.bfloat16)
    return Int4Tensor(codes, scale, zero_point, [1, 32], torch.Size((128, 256)))  # type: ignore[no-any-return]


WEIGHTS: dict[str, Callable[[int], torch.Tensor]] = {
    "int8": _weight(_of("quantization.Int8WeightOnlyConfig")),
    "int8, activations": _weight(_of("quantization.Int8DynamicActivationInt8WeightConfig")),
    "int4": _int4,
    "int4, opaque": _weight(_of("prototype.quantization.int4.inference_workflow.PrototypeInt4WeightOnlyConfig")),
    "float8": _weight(_of("quantization.Float8WeightOnlyConfig")),
    "float8, activations": _float8_with_activations,
    "intx": _weight(_of("quantization.IntxWeightOnlyConfig")),
    "MX": _weight(_of("prototype.mx_formats.MXDynamicActivationMXWeightConfig")),
    "NVFP4": _weight(_of("prototype.mx_formats.NVFP4WeightOnlyConfig")),
    "NF4": _nf4,
    "GGUF": _weight(_of("prototype.quantization.gguf.api.GGUFWeightOnlyConfig")),
    "bitnet": _weight(_of("prototype.quantized_training.bitnet.BitNetTrainingConfig")),
    "int8 mixed": _weight(_of("prototype.quantized_training.int8_mixed_precision.Int8MixedPrecisionTrainingConfig")),
}
TRANSPARENT = {"bitnet", "int8 mixed"}
STOCK_CANNOT_SAVE = {"int4", "intx", "int4, opaque", "GGUF"}  # it calls `is_pinned`, which these classes lack
NO_VALUES = {"int4", "int4, opaque", "NF4"}  # their classes convert neither by `copy_` nor by a method `dequantize`
STOCK_CANNOT_LOAD = {"GGUF"}  # it calls `copy_`, which this class lacks


def _made(name: str, seed: int) -> torch.Tensor:
    try:
        return WEIGHTS[name](seed).detach()
    except (AssertionError, RuntimeError, NotImplementedError, ImportError) as error:
        pytest.skip(f"this machine cannot make them: {error}")


@pytest.mark.parametrize(("saver", "loader"), [("ours", "ours"), ("stock", "ours"), ("ours", "stock")])
@pytest.mark.parametrize("name", WEIGHTS)
def test_quantized_weights_come_back_exactly(name: str, saver: str, loader: str, tmp_path: Path) -> None:
    saved, template = _made(name, 0), _made(name, 1)
    if saver == "stock" and name in STOCK_CANNOT_SAVE:
        with pytest.raises(stock.CheckpointException, match=r"NotImplementedError(.|\n)*aten\.is_pinned"):
            stock.save({"m": {"w": saved}}, checkpoint_id=tmp_path)
        return
    LIBRARIES[saver][0].save({"m": {"w": saved}}, checkpoint_id=tmp_path)
    if loader == "stock" and name in STOCK_CANNOT_LOAD:
        with pytest.raises(stock.CheckpointException, match=r"NotImplementedError(.|\n)*aten\.copy_"):
            stock.load({"m": {"w": template}}, checkpoint_id=tmp_path)
        return
    if saver == "stock" and name in TRANSPARENT:  # torchao does not register these classes: PyTorch refuses, too
        with pytest.raises(UnsafeCheckpointError, match=r"'m\.w'.*allow_globals="):
            dcp.load({"m": {"w": template}}, checkpoint_id=tmp_path)
        return
    state = {"m": {"w": template}}
    LIBRARIES[loader][0].load(state, checkpoint_id=tmp_path)
    assert _text(_inner(state["m"]["w"])) == _text(_inner(saved))
    found = dcp.load_keys("m", checkpoint_id=tmp_path)["m"]["w"]
    assert _text(_inner(found)) == _text(_inner(_transparent(saved)))


def _transparent(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor as which a weight is stored; the weight itself if its class is stored."""
    return tensor._data if ".quantized_training." in type(tensor).__module__ else tensor  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", WEIGHTS)
def test_quantized_weights_on_the_meta_device_are_made(name: str, tmp_path: Path) -> None:
    saved = _made(name, 0)
    dcp.save({"m": {"w": saved}}, checkpoint_id=tmp_path)
    try:
        template = {"m": {"w": saved.to("meta")}}
    except (NotImplementedError, RuntimeError, TypeError) as error:
        pytest.skip(f"the class cannot be on the meta device: {error}")
    if not template["m"]["w"].is_meta:
        pytest.skip("the class cannot be on the meta device")
    if name == "NF4":  # its context has the device
        with pytest.raises(UnsupportedValueError, match=r"'m\.w' is a NF4Tensor on the meta device.*assign=True"):
            dcp.load(template, checkpoint_id=tmp_path)
        return
    dcp.load(template, checkpoint_id=tmp_path)
    assert _text(_inner(template["m"]["w"])) == _text(_inner(saved))


@pytest.mark.parametrize("name", WEIGHTS)
def test_other_formats_hold_the_values(name: str, tmp_path: Path) -> None:
    saved = _made(name, 0)
    dcp.save({"w": saved}, checkpoint_id=tmp_path / "c")
    if name in NO_VALUES:
        with pytest.raises(UnsupportedValueError, match=f"'w' is stored as a {type(saved).__qualname__}"):
            dcp.convert(tmp_path / "c", tmp_path / "w.safetensors")
        return
    dcp.convert(tmp_path / "c", tmp_path / "w.safetensors")
    save_safetensors({"w": saved}, tmp_path / "export")
    wanted = _transparent(saved)
    if wanted is saved:
        wanted = saved.dequantize()
    for file in (tmp_path / "w.safetensors", tmp_path / "export" / "model.safetensors"):
        assert torch.equal(load_file(file)["w"], wanted.to(saved.dtype))


@pytest.mark.parametrize("name", WEIGHTS)
def test_show_names_class_and_inner_tensors(name: str, tmp_path: Path) -> None:
    saved = _made(name, 0)
    dcp.save({"w": saved}, checkpoint_id=tmp_path / "c")
    shown = " ".join(CliRunner().invoke(show, [str(tmp_path / "c")], standalone_mode=False).output.split())
    inner = [] if name in TRANSPARENT else saved.__tensor_flatten__()[0]
    assert all(word in shown for word in (*inner, *([] if name in TRANSPARENT else [type(saved).__qualname__]))), shown


def _text(inner: Any) -> Any:
    if isinstance(inner, dict):
        return {name: _text(value) for name, value in inner.items()}
    return inner.dtype, tuple(inner.shape), bytes(inner.contiguous().flatten().view(torch.uint8).tolist())
