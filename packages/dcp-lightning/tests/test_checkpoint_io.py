"""The plug-in in a real Trainer of one process, and by itself: resume, retention, saves in the background, files."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_io
from dcp_core import CheckpointNotFoundError, UnsafeCheckpointError

pytest.importorskip("lightning", reason="needs Lightning: `nox -s frameworks` installs it")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on speed


class Config:
    """A class of the user's own."""

    width = 3


@pytest.fixture(autouse=True)
def _clean_memory_file_system() -> Iterator[None]:
    yield
    import fsspec

    fsspec.filesystem("memory").store.clear()


def fit(
    pl: Any, folder: str, steps: int, plugins: list[Any], resumed_from: str | None = None, **saving: Any
) -> list[Any]:
    """Train a model; returns all that has to be as in an uninterrupted run, and the folder's contents."""

    class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, width)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).square().sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
        seen = 0

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=4)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.seen += 1
            return batch

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = state_dict["seen"]

    settings = {"every_n_train_steps": 2, "save_last": True, "save_top_k": 2, "monitor": "step", "mode": "max"}
    keeping = pl.callbacks.ModelCheckpoint(folder, **{**settings, **saving})
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        plugins=plugins,
        callbacks=[keeping],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = Model(), Data()
    trainer.fit(model, data, ckpt_path=resumed_from)
    (optimizer,) = trainer.optimizers
    kept = {name: path.removeprefix(folder) for name, path in vars(keeping).items() if name.endswith("_path")}
    state = [value.tolist() for each in optimizer.state.values() for value in each.values()]
    values = [value.tolist() for value in model.state_dict().values()]
    return [
        *(values, state, optimizer.param_groups[0]["lr"], trainer.global_step, trainer.current_epoch, data.seen, kept),
        trainer.fit_loop.state_dict(),
    ]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("background", "name"),
    [
        (None, "lightning.pytorch"),
        (None, "pytorch_lightning"),
        ("thread", "lightning.pytorch"),
        ("process", "lightning.pytorch"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(background: str | None, name: str, tmp_path: Path) -> None:
    pl = importlib.import_module(name)
    from dcp_lightning import DcpCheckpointIO

    whole = fit(pl, str(tmp_path / "whole"), 12, [DcpCheckpointIO()])
    fit(pl, str(tmp_path / "parts"), 8, [DcpCheckpointIO(background=background)])
    assert names(tmp_path / "parts") == ["epoch=1-step=6.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]
    resumed = fit(pl, str(tmp_path / "parts"), 12, [DcpCheckpointIO(background=background)], "last")
    assert resumed[:-1] == whole[:-1]
    assert names(tmp_path / "parts") == ["epoch=2-step=10.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"]
    newest = dcp_io.latest_valid(tmp_path / "parts")
    assert newest is not None
    assert newest.step == 12


def test_loops_are_as_after_a_resume_from_lightnings_own(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from dcp_lightning import DcpCheckpointIO

    found = []
    for plugins in ([DcpCheckpointIO()], []):
        folder = str(tmp_path / str(len(plugins)))
        fit(pl, folder, 6, plugins)  # in an epoch
        found.append(fit(pl, folder, 14, plugins, "last"))
    assert found[0] == found[1]


def test_a_run_goes_on_from_the_files_that_lightning_has_saved(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from dcp_lightning import DcpCheckpointIO

    whole = fit(pl, str(tmp_path / "whole"), 12, [])
    fit(pl, str(tmp_path / "parts"), 8, [])
    assert (tmp_path / "parts" / "last.ckpt").is_file()
    resumed = fit(pl, str(tmp_path / "parts"), 12, [DcpCheckpointIO(background="thread")], "last")
    assert resumed[:-1] == whole[:-1]
    assert (tmp_path / "parts" / "last.ckpt").is_dir()
    assert names(tmp_path / "parts") == ["epoch=2-step=10.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"]


def test_a_link_as_last_checkpoint(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from dcp_lightning import DcpCheckpointIO

    whole = fit(pl, str(tmp_path / "whole"), 12, [DcpCheckpointIO()], save_last="link")
    fit(pl, str(tmp_path / "parts"), 8, [DcpCheckpointIO(background="thread")], save_last="link")
    assert (tmp_path / "parts" / "last.ckpt").is_symlink()
    assert fit(pl, str(tmp_path / "parts"), 12, [DcpCheckpointIO()], "last", save_last="link")[:-1] == whole[:-1]


def test_a_run_in_another_storage(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from dcp_lightning import DcpCheckpointIO

    fit(pl, "memory://run", 8, [DcpCheckpointIO()])
    found = fit(pl, "memory://run", 12, [DcpCheckpointIO()], "last")
    assert found[3] == 12
    assert dcp_io.open_store("memory://run/last.ckpt").list()
    assert not dcp_io.open_store("memory://run/epoch=0-step=2.ckpt").list()


def test_a_failed_save_in_the_background_ends_the_training_and_keeps_what_there_was(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from dcp_fs import FileSystemWriter
    from dcp_lightning import DcpCheckpointIO

    class FailingWriter(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            raise OSError("disk full")

    class Failing(DcpCheckpointIO):
        def storage(self, path: Any, role: Any, extra: Any = None) -> Any:
            return FailingWriter(path) if "step=4" in str(path) else super().storage(path, role, extra)

    with pytest.raises(OSError, match="disk full"):
        fit(pl, str(tmp_path / "run"), 12, [Failing(background="thread")], save_top_k=1, save_last=False)
    newest = dcp_io.latest_valid(tmp_path / "run")
    assert newest is not None
    assert newest.step == 2
    assert DcpCheckpointIO().load_checkpoint(tmp_path / "run" / "epoch=0-step=2.ckpt")["global_step"] == 2


@pytest.mark.parametrize("error", [None, OSError("disk full")])
def test_nothing_is_removed_before_the_save_that_is_to_replace_it(error: Exception | None, tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO

    plugin = DcpCheckpointIO()
    plugin.save_checkpoint({"step": 1}, tmp_path / "old.ckpt")
    running: Future[Any] = Future()
    plugin._pending.append(running)
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    assert (tmp_path / "old.ckpt").is_dir()
    if error is None:
        running.set_result(None)
        plugin.teardown()
        assert not (tmp_path / "old.ckpt").exists()
    else:
        running.set_exception(error)
        with pytest.raises(OSError, match="disk full"):
            plugin.teardown()
        assert DcpCheckpointIO().load_checkpoint(tmp_path / "old.ckpt") == {"step": 1}


def test_a_checkpoint_saved_again_before_its_removal_stays(tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO

    plugin = DcpCheckpointIO(background="thread")
    plugin.save_checkpoint({"step": 1}, tmp_path / "one.ckpt")
    plugin._pending.append(Future())
    plugin.remove_checkpoint(tmp_path / "one.ckpt")
    plugin._pending.pop()
    plugin.save_checkpoint({"step": 2}, tmp_path / "one.ckpt")
    plugin.teardown()
    assert plugin.load_checkpoint(tmp_path / "one.ckpt") == {"step": 2}


@pytest.mark.parametrize(
    "map_location",
    ["meta", torch.device("meta"), {"cpu": "meta"}, lambda storage, location: torch.UntypedStorage(0, device="meta")],
    ids=["name", "device", "mapping", "function"],
)
def test_map_location(map_location: Any, tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO

    saved = {"weight": torch.ones(2), "list": [torch.ones(1)], "step": 1}
    DcpCheckpointIO().save_checkpoint(saved, tmp_path / "one")
    found = DcpCheckpointIO().load_checkpoint(tmp_path / "one", map_location=map_location)
    assert found["weight"].device.type == found["list"][0].device.type == "meta"
    assert found["step"] == 1
    found = DcpCheckpointIO().load_checkpoint(tmp_path / "one", map_location=lambda storage, location: storage)
    assert found["weight"].tolist() == [1, 1]


def test_objects_of_unknown_classes_are_loaded_only_on_request(tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO

    with warnings.catch_warnings(action="ignore"):
        DcpCheckpointIO().save_checkpoint({"hyper_parameters": {"config": Config()}}, tmp_path / "one")
    for weights_only in (None, True):
        with pytest.raises(UnsafeCheckpointError, match="Config"):
            DcpCheckpointIO().load_checkpoint(tmp_path / "one", weights_only=weights_only)
    trusted = DcpCheckpointIO().load_checkpoint(tmp_path / "one", weights_only=False)
    assert trusted["hyper_parameters"]["config"].width == 3
    DcpCheckpointIO(allow_globals=[Config]).load_checkpoint(tmp_path / "one")
    with torch.serialization.safe_globals([Config]):
        DcpCheckpointIO().load_checkpoint(tmp_path / "one")


def test_settings_reach_the_storage(tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO

    state = {"weight": torch.zeros(100_000)}
    for name, plugin in (
        ("plain", DcpCheckpointIO()),
        ("small", DcpCheckpointIO(writer_options={"compression": "zstd"})),
    ):
        plugin.save_checkpoint(state, tmp_path / name)
        assert plugin.load_checkpoint(tmp_path / name)["weight"].shape == (100_000,)
    plain, small = (sum(each.stat().st_size for each in (tmp_path / name).iterdir()) for name in ("plain", "small"))
    assert small < plain / 10
    (tmp_path / "file").write_text("of Lightning")
    for name in ("plain", "file"):
        with pytest.raises(ValueError, match=f"{name}: a directory .* takes no storage_options"):
            DcpCheckpointIO().save_checkpoint(state, tmp_path / name, storage_options={"endpoint": "here"})
    assert (tmp_path / "file").read_text() == "of Lightning"


def test_what_there_is_not(tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO

    with pytest.raises(CheckpointNotFoundError, match=os.fspath(tmp_path / "nothing")):
        DcpCheckpointIO().load_checkpoint(tmp_path / "nothing")
    DcpCheckpointIO().remove_checkpoint(tmp_path / "nothing")  # as Lightning's own


def test_a_strategy_refuses_another_plugin() -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from dcp_lightning.strategies import DcpDDPStrategy

    with pytest.raises(TypeError, match="background='process'"):
        Trainer(accelerator="cpu", strategy=DcpDDPStrategy(), plugins=[AsyncCheckpointIO()], logger=False)
