"""What the counter counts: each function once, calls, modules, depth; threads too, and nothing that an import runs."""

from __future__ import annotations

import threading

import pytest

from integration_tests.call_paths.counting import counted
from integration_tests.call_paths.operations import operations
from integration_tests.call_paths.sources import Module


def leaf(number):
    return [value + number for value in range(3)]


def branch():
    return leaf(1) + leaf(2)


def here(file):
    return file == __file__


def test_functions_calls_and_depth():
    with counted(here) as found:
        branch()
        leaf(3)
    assert found.calls == {(__name__, "branch"): 1, (__name__, "leaf"): 3}
    assert found.figures() == {"functions": 2, "modules": 1, "calls": 4, "depth": 2, "switches": 0}


def test_threads_that_are_started_inside_are_counted():
    with counted(here) as found:
        thread = threading.Thread(target=branch)
        thread.start()
        thread.join()
    leaf(1)
    assert found.calls == {(__name__, "branch"): 1, (__name__, "leaf"): 2}


def test_what_an_import_runs_is_not_counted(tmp_path, monkeypatch):
    (tmp_path / "imported_here.py").write_text("def called(): pass\ncalled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with counted(lambda file: file == str(tmp_path / "imported_here.py")) as found:
        import imported_here

        once = imported_here.called
        assert found.calls == {}
        once()
    assert found.figures()["functions"] == 1


@pytest.mark.slow
def test_every_operation_is_counted(ranks, tmp_path):
    for found in ranks.run(2, operations, tmp_path):
        ours = {name: path.figures()["functions"] for name, path in found.items() if not name.endswith("stock")}
        assert all(functions > 50 for functions in ours.values())
        assert ours["second save"] < ours["first save"]


def test_switches_between_modules(tmp_path, monkeypatch):
    (tmp_path / "other_here.py").write_text("def called(*inner):\n    for each in inner: each()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import other_here

    with counted(lambda file: file in (__file__, str(tmp_path / "other_here.py"))) as found:
        branch()
        other_here.called(branch, other_here.called)
    assert found.switches == 3
    assert found.modules == [__name__, "other_here"]


def test_sources_are_counted():
    module = Module("a.b", '"""One two."""\nimport a.c  # x\n\n# y\nTEXT = """\nz"""\n"""Three."""\n')
    assert (module.code_lines, len(module.docstrings), "a.c" in module.imported()) == (3, 2, True)
