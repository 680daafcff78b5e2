"""What `torch.distributed.checkpoint` means during a replacement and after it, in one process and on ranks."""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_core
import dcp_fs
from dcp_bridge import original_stock, replace_stock
from dcp_bridge.replacement import replacement
from dcp_bridge.replacement.replacement import Replacement

STOCK = "torch.distributed.checkpoint"
STATE = {"w": torch.arange(4.0), "step": 1}


def run(code: str, name: str = "user_of_stock") -> Any:
    """Run code as a module that stays loaded until the test ends, and return it."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, name, "exec"), vars(module))
    return module


@pytest.fixture(autouse=True)
def _no_modules_stay():
    before = set(sys.modules)
    yield
    assert not replacement._running
    for name in set(sys.modules) - before:
        if name.startswith("user_of_stock"):
            del sys.modules[name]


def picture() -> dict[str, Any]:
    """Everything that a replacement may touch: modules of stock, their globals, and who has bound them."""
    loaded = {name: module for name, module in sys.modules.items() if f"{name}.".startswith(f"{STOCK}.")}
    return {
        "loaded": {name: id(module) for name, module in loaded.items()},
        "globals": {name: {key: id(value) for key, value in vars(module).items()} for name, module in loaded.items()},
        "attribute": id(torch.distributed.checkpoint),
        "hooks": [*sys.meta_path],
    }


def is_ours(folder: Path) -> bool:
    meta = dcp_fs.FileSystemReader(folder).read_metadata().storage_meta
    return meta is not None and meta.modules == ["dcp-manifest/1"]


MODULES = ["api", "default_planner", "filesystem", "format_utils", "hf_storage", "metadata", "optimizer", "planner"]
MODULES += ["staging", "state_dict", "state_dict_loader", "state_dict_saver", "stateful", "storage"]
USES = {
    "import as": f"import {STOCK} as dcp\nsave, Writer = dcp.save, dcp.FileSystemWriter",
    "from": f"from {STOCK} import save, FileSystemWriter as Writer",
    "from torch.distributed": "from torch.distributed import checkpoint\n"
    "save, Writer = checkpoint.save, checkpoint.filesystem.FileSystemWriter",
    "submodules": f"from {STOCK}.state_dict_saver import save\n"
    f"from {STOCK}.filesystem import FileSystemWriter as Writer",
    "attributes": "import torch\nsave = torch.distributed.checkpoint.state_dict_saver.save\n"
    "Writer = torch.distributed.checkpoint.FileSystemWriter",
    "star": f"from {STOCK} import *\nWriter = FileSystemWriter\nfrom {STOCK}.state_dict_saver import *",
    "by name": "import importlib\n"
    f"save, Writer = (getattr(importlib.import_module('{STOCK}'), name) for name in ('save', 'FileSystemWriter'))",
}


@pytest.mark.parametrize("use", USES)
def test_names_that_are_looked_up_during_a_replacement_are_ours(tmp_path, use):
    with replace_stock():
        module = run(USES[use])
        assert module.save is dcp_core.save
        assert module.Writer is dcp_fs.FileSystemWriter
        module.save(STATE, storage_writer=module.Writer(tmp_path))
    assert is_ours(tmp_path)


@pytest.mark.parametrize("use", USES)
def test_names_that_were_bound_before_are_ours_and_stocks_again_after_it(tmp_path, use):
    module = run(USES[use])
    before = {name: id(value) for name, value in vars(module).items()}
    with replace_stock() as made:
        assert module.save is dcp_core.save
        module.save(STATE, storage_writer=module.Writer(tmp_path))
        assert {"user_of_stock.save", "user_of_stock.Writer"} <= {*made.rebound}
    assert is_ours(tmp_path)
    assert {name: id(value) for name, value in vars(module).items()} == before


@pytest.mark.parametrize("use", ["import as", "from", "from torch.distributed", "submodules", "star"])
def test_modules_that_were_imported_meanwhile_have_stocks_names_after_it(use):
    with replace_stock():
        module = run(USES[use])
    assert module.save is stock.save
    assert module.Writer is stock.FileSystemWriter
    assert all(type(value) is not replacement._StandInModule for value in vars(module).values())


@pytest.mark.parametrize("short", MODULES)
def test_every_name_of_the_mirror_is_what_the_module_has(short):
    if f"{STOCK}.{short}" not in sys.modules:
        pytest.skip(f"torch {torch.__version__} has no {short}")
    ours = importlib.import_module(f"dcp_all.{short}")
    theirs = original_stock(short)
    with replace_stock():
        found = importlib.import_module(f"{STOCK}.{short}")
        assert getattr(sys.modules[STOCK], short) is found
        for name in (name for name in vars(ours) if not name.startswith("__")):
            if hasattr(theirs, name):
                assert getattr(found, name) is getattr(ours, name), name
            else:
                assert not hasattr(found, name)
        assert found.__name__ == theirs.__name__
        assert dir(found) == dir(theirs)
    assert importlib.import_module(f"{STOCK}.{short}") is theirs


def test_what_we_do_not_have_stays_stocks_and_is_said():
    with replace_stock() as made:
        helper = importlib.import_module(f"{STOCK}.planner_helpers")
        assert helper._init_state_dict is original_stock("planner_helpers")._init_state_dict
        private = importlib.import_module(f"{STOCK}._sharded_tensor_utils")
        assert private is original_stock("_sharded_tensor_utils")
        with pytest.raises(AttributeError, match=f"module '{STOCK}' has no attribute 'CheckpointManager'"):
            sys.modules[STOCK].CheckpointManager  # noqa: B018 - ours has it, stock has not
        assert "dedup_tensors" in made.kept[f"{STOCK}._dedup_tensors"]
    assert "save" in made.replaced[f"{STOCK}.state_dict_saver"]
    assert "save" not in made.kept.get(f"{STOCK}.state_dict_saver", ())


def test_records_that_stocks_private_functions_make_are_understood_by_ours():
    with replace_stock():
        planning = importlib.import_module(f"{STOCK}.default_planner")
        metadata = planning._create_default_local_metadata(STATE)
        assert type(metadata) is original_stock("metadata").Metadata
        plan = planning.create_default_local_load_plan(dict(STATE), metadata)
    assert type(plan) is dcp_core.LoadPlan
    assert [item.dest_index.fqn for item in plan.items] == ["w", "step"]


def test_planners_understand_metadata_that_stocks_private_functions_make():
    """Tests of other projects make metadata by a private function, beside our planners."""
    state = {"w": torch.ones(3), "steps": [1, 2]}
    with replace_stock():
        from torch.distributed.checkpoint import default_planner

        flat, _ = default_planner.flatten_state_dict(state)
        metadata = default_planner._create_default_local_metadata(flat)
        planner = default_planner.DefaultLoadPlanner()
        planner.set_up_planner({"w": torch.zeros(3), "steps": [0, 0]}, metadata, True)
        assert {item.dest_index.fqn for item in planner.create_local_plan().items} == {*flat}
        empty = default_planner._EmptyStateDictLoadPlanner()
        empty.set_up_planner(filled := {}, metadata, True)
        assert filled["w"].shape == (3,)
        assert {item.dest_index.fqn for item in empty.create_local_plan().items} == {*flat}


def test_everything_is_as_before_also_after_an_error():
    replace_stock().undo()  # which imports what stock had not imported yet
    before = picture()
    made = replace_stock()
    assert picture() != before
    with pytest.raises(KeyboardInterrupt), made:
        raise KeyboardInterrupt
    assert picture() == before
    assert not made.active


def test_a_replacement_that_fails_half_way_leaves_nothing(monkeypatch):
    replace_stock().undo()
    before = picture()
    monkeypatch.setattr(replacement, "_rebind", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replace_stock()
    assert picture() == before


def test_the_call_lasts_until_it_is_undone():
    made = replace_stock()
    try:
        assert sys.modules[STOCK].save is dcp_core.save
    finally:
        made.undo()
    made.undo()
    assert sys.modules[STOCK] is original_stock()
    assert "undone" in repr(made)
    with pytest.raises(RuntimeError, match="has been undone"), made:
        pass


def test_it_ends_with_the_last_of_several_in_whatever_order():
    first = replace_stock()
    with replace_stock() as second:
        first.undo()
        assert sys.modules[STOCK].save is dcp_core.save
        assert second.replaced == first.replaced
    assert sys.modules[STOCK].save.__module__ == f"{STOCK}.state_dict_saver"


def test_several_threads():
    started, failures = threading.Barrier(6), []

    def work() -> None:
        started.wait()
        for _ in range(5):
            with replace_stock():
                if importlib.import_module(STOCK).load is not dcp_core.load:
                    failures.append("not ours")

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    started.wait()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sys.modules[STOCK] is original_stock()


def test_what_is_kept_beyond_the_end_becomes_stocks():
    with replace_stock():
        kept = sys.modules[STOCK]
        assert kept.save is dcp_core.save
    assert kept.save is stock.save
    assert kept.state_dict is original_stock("state_dict")


def test_names_that_somebody_else_has_bound_meanwhile_stay():
    module = run(f"from {STOCK} import save, load")
    with replace_stock():
        module.save = "mine"
    assert (module.save, module.load) == ("mine", stock.load)


def test_a_name_can_be_patched_meanwhile(monkeypatch):
    with replace_stock(), monkeypatch.context() as patched:
        patched.setattr(f"{STOCK}.save", "patched")
        assert sys.modules[STOCK].save == "patched"
        patched.undo()
        assert sys.modules[STOCK].save is dcp_core.save
    assert stock.save.__module__ == f"{STOCK}.state_dict_saver"


DERIVED = f"""
import {STOCK} as dcp
from {STOCK} import DefaultSavePlanner, FileSystemWriter, save
from {STOCK}.planner import SavePlan

class Planner(DefaultSavePlanner):
    def create_local_plan(self):
        plan = DefaultSavePlanner.create_local_plan(self)
        assert isinstance(plan, SavePlan)
        assert dcp.SavePlan is SavePlan
        self.planned = len(plan.items)
        return plan
"""


def test_classes_that_were_derived_from_stocks_before_go_on_through_the_bridge(tmp_path):
    module = run(DERIVED)
    with replace_stock() as made:
        planner = module.Planner()
        assert isinstance(planner, module.DefaultSavePlanner)
        assert module.save is dcp_core.save
        module.save(STATE, checkpoint_id=tmp_path / "a", planner=planner)
        assert planner.planned == 2
        module.save(STATE, storage_writer=module.FileSystemWriter(tmp_path / "b"), planner=module.Planner())
    assert is_ours(tmp_path / "a")
    assert not is_ours(tmp_path / "b")
    assert {"user_of_stock.DefaultSavePlanner", "user_of_stock.SavePlan"} <= {*made.left}
    assert "user_of_stock.save" in made.rebound


def test_classes_that_are_derived_from_it_meanwhile_are_ours(tmp_path):
    with replace_stock():
        module = run(DERIVED)
        planner = module.Planner()
        assert isinstance(planner, dcp_core.SavePlanner)
        module.save(STATE, storage_writer=module.FileSystemWriter(tmp_path), planner=planner)
        assert planner.planned == 2
    assert is_ours(tmp_path)


STATEFUL = f"""
from {STOCK} import FileSystemWriter, save, load
from {STOCK}.stateful import Stateful

class App(Stateful):
    step = 1
    def state_dict(self): return {{"step": self.step}}
    def load_state_dict(self, state_dict): self.step = state_dict["step"]
"""


def test_stateful_objects_count_whenever_their_class_was_made(tmp_path):
    before = run(STATEFUL)
    with replace_stock():
        meanwhile = run(STATEFUL, "user_of_stock_2")
        for module, name in ((before, "a"), (meanwhile, "b")):
            assert isinstance(before.App(), module.Stateful)
            assert isinstance(meanwhile.App(), module.Stateful)
            app = module.App()
            app.step = 7
            module.save({"app": app}, storage_writer=module.FileSystemWriter(tmp_path / name))
            app.step = 0
            module.load({"app": app}, checkpoint_id=tmp_path / name)
            assert app.step == 7
            assert is_ours(tmp_path / name)


@pytest.mark.filterwarnings("ignore")
def test_stock_works_meanwhile_and_is_not_mixed_with_ours(tmp_path):
    with replace_stock():
        theirs = original_stock()
        theirs.save(STATE, storage_writer=theirs.FileSystemWriter(tmp_path / "theirs"))
        state = {"w": torch.zeros(4), "step": 0}
        theirs.load(state, storage_reader=theirs.FileSystemReader(tmp_path / "theirs"))
        torch.testing.assert_close(state["w"], STATE["w"])
        metadata = theirs.FileSystemReader(tmp_path / "theirs").read_metadata()
        assert type(metadata) is original_stock("metadata").Metadata
        # The bridge adapts stock's objects, ours adapt to stock's calls, and ours read stock's files.
        dcp_core.save(STATE, storage_writer=theirs.FileSystemWriter(tmp_path / "by bridge"), no_dist=True)
        theirs.load(state, storage_reader=theirs.FileSystemReader(tmp_path / "by bridge"))
        sys.modules[STOCK].load(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert not is_ours(tmp_path / "theirs")


def test_functions_that_use_it_can_be_sent_to_other_processes():
    with replace_stock():
        names = {"__name__": "__main__"}
        exec("import torch.distributed.checkpoint as dcp\ndef save(): return dcp.save", names)
        sent = cloudpickle.dumps(names["save"])
        assert cloudpickle.loads(sent)() is dcp_core.save
        assert copy.deepcopy(names["dcp"]) is names["dcp"]
    assert cloudpickle.loads(sent)() is original_stock().save


@pytest.mark.parametrize("short", ["", *MODULES])
def test_a_reload_meanwhile_is_refused(short):
    name = f"{STOCK}.{short}".rstrip(".")
    if name not in sys.modules:
        pytest.skip(f"torch {torch.__version__} has no {short}")
    with replace_stock():
        before = {**vars(sys.modules[name])}
        with pytest.raises(ImportError, match=f"{name} is replaced and cannot be reloaded: undo"):
            importlib.reload(sys.modules[name])
        assert vars(sys.modules[name]) == before
        module = run(USES["import as"])
        assert module.save is dcp_core.save


def test_metadata_pickles_and_comes_back_as_ours():
    with replace_stock():
        made = sys.modules[STOCK].metadata.Metadata({}, planner_data={"a": 1})
        assert pickle.loads(pickle.dumps(made)) == made
    assert type(pickle.loads(pickle.dumps(made))) is original_stock("metadata").Metadata


def test_it_says_what_it_did(caplog):
    run(f"from {STOCK} import save, load")
    run(DERIVED, "user_of_stock_2")
    with caplog.at_level(logging.INFO, "dcp_bridge"), replace_stock() as made, replace_stock():
        pass
    (record,) = [record for record in caplog.records if record.name.startswith("dcp_bridge")]
    text = record.getMessage()
    assert isinstance(made, Replacement)
    assert text in repr(made).replace("; undone", "")
    assert f"{STOCK} of torch {torch.__version__} means dcp_all: " in text
    assert "stay PyTorch's" in text
    assert "bound before and replaced: " in text
    assert "bound before and left: " in text
    assert any(name.startswith("user_of_stock_2.") for name in made.left)


def _save_and_load(folder: str) -> tuple[bool, bool]:
    import torch.distributed as dist

    rank = dist.get_rank()
    with replace_stock():
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        dcp.save({"model": get_model_state_dict(model), "rank": {str(rank): rank}}, checkpoint_id=folder)
        dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=folder + "-async").result(60)
        torch.nn.init.zeros_(model.weight)
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        # Stock's own save sends its plans to the other rank, pickled by name.
        original_stock().save({"w": torch.ones(2)}, checkpoint_id=folder + "-stock")
    return all(torch.equal(before[name], value) for name, value in model.state_dict().items()), is_ours(Path(folder))


@pytest.mark.filterwarnings("ignore")
def test_ranks(ranks, tmp_path):
    assert ranks.run(2, _save_and_load, str(tmp_path / "a")) == [(True, True)] * 2
    assert is_ours(tmp_path / "a-async")
    assert not is_ours(tmp_path / "a-stock")
