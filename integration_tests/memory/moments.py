"""Moments at which faults strike: calls of functions of the libraries, in a rank or in the promoter of its host."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

__all__ = ["MOMENTS", "Moment", "striking"]


@dataclass(frozen=True)
class Moment:
    """Calls of one function."""

    places: tuple[str, ...]
    """`module:Class.name` of the functions, of which only those that are there count."""
    calls: int
    """Among so many calls the one is drawn that meets the fault; about as many as a life has."""
    where: Literal["rank", "promoter"] = "rank"
    near: Literal["", "partner"] = ""
    """The near tier that has such calls; empty for all."""
    after: bool = False
    """Whether it strikes when the function returns, not before it is called."""

    @property
    def stages(self) -> bool:
        """Whether it only comes in saves in the background."""
        return self.places[0].startswith("dcp_async")


_LOCAL, _KEEPER = "dcp_io.stores.local_store:LocalStore", "dcp_memory.client.store:KeeperStore"
_SINKS = ("dcp_io.stores.local_store:_LocalSink", "dcp_memory.client.objects:KeeperSink")
_COPY, _INTAKE = "dcp_memory.partners.copying:_Copy", "dcp_memory.partners.courier:Intake"
MOMENTS = {
    "restore": Moment(("dcp_manager.manager:_load_from",), 1),
    "restored": Moment(("dcp_manager.manager:_load_from",), 1, after=True),
    "stage": Moment(("dcp_async.staging.copy_state:Copier.copy",), 3),
    "staged": Moment(("dcp_async.staging.copy_state:Copier.copy",), 3, after=True),
    "lend": Moment(("dcp_async.staging.arenas:LentArenas.take",), 3),
    "lent": Moment(("dcp_async.staging.arenas:LentArenas.take",), 3, after=True),
    "give back": Moment(("dcp_async.staging.arenas:LentArenas.give_back",), 3),
    "create": Moment((f"{_LOCAL}.create", f"{_KEEPER}.create"), 4),
    "write": Moment(tuple(f"{sink}.write" for sink in _SINKS), 8),
    "close": Moment(tuple(f"{sink}.close" for sink in _SINKS), 4),
    "closed": Moment(tuple(f"{sink}.close" for sink in _SINKS), 4, after=True),
    "publish": Moment((f"{_LOCAL}.publish", f"{_KEEPER}.publish"), 16),
    "published": Moment((f"{_LOCAL}.publish", f"{_KEEPER}.publish"), 16, after=True),
    "commit": Moment(("dcp_core.hosts.host_storage:HostStorageWriter.follow_commit",), 3),
    "delete": Moment((f"{_LOCAL}.delete", f"{_KEEPER}.delete"), 20),
    "remove": Moment(("dcp_io.roots.catalogue:Catalogue.remove",), 2),
    "look for parts": Moment((f"{_COPY}._look",), 2, near="partner"),
    "connect": Moment((f"{_COPY}._connect",), 2, near="partner"),
    "send": Moment(("dcp_memory.partners.courier:Courier._send_file",), 3, near="partner"),
    "take": Moment((f"{_INTAKE}.begin",), 2, near="partner"),
    "take a piece": Moment((f"{_INTAKE}.take",), 4, near="partner"),
    "taken": Moment((f"{_INTAKE}.end",), 2, near="partner"),
    "note": Moment((f"{_COPY}._note",), 2, near="partner"),
    "noted": Moment((f"{_COPY}._note",), 2, near="partner", after=True),
    "bring": Moment(("dcp_tiers.copying:send_file",), 6, "promoter"),
    "brought": Moment(("dcp_tiers.copying:send_file",), 6, "promoter", after=True),
    "promote": Moment(("dcp_io.saves.save_session:SaveSession.publish",), 1, "promoter"),
    "promoted": Moment(("dcp_io.saves.save_session:SaveSession.publish",), 1, "promoter", after=True),
}


@contextlib.contextmanager
def striking(moment: Moment, count: int, strike: Callable[[], object]) -> Iterator[None]:
    """Context manager: calls `strike` at a moment, once, after so many calls that go well."""
    left, lock = [count], threading.Lock()

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with lock:
                left[0] -= 1
                strikes = left[0] == -1
            if strikes and not moment.after:
                strike()
            result = function(*args, **options)
            if strikes and moment.after:
                strike()
            return result

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in _find(moment.places):
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield


def _find(places: tuple[str, ...]) -> list[tuple[Any, str]]:
    found = []
    for place in places:
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        with contextlib.suppress(ModuleNotFoundError):
            owner: Any = importlib.import_module(module)
            for each in owners:
                owner = getattr(owner, each)
            found.append((owner, name))
    return found
