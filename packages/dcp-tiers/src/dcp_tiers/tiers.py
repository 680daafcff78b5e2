"""`Tiers`: a root of several storages. Names checkpoints for saves and loads; `promotion` copies them between tiers."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from dcp_io import (
    STALE_AFTER_SECONDS,
    Catalogue,
    HostCopies,
    HostStore,
    KeepPolicy,
    LocalStore,
    Store,
    ask_places,
    check_checkpoint,
    file_at,
    host_id,
    open_store,
)
from dcp_manifest import CheckpointNotFoundError, DcpError, library_logger
from dcp_tiers.budget import make_room
from dcp_tiers.description import DESCRIPTION, Description, check_owner, decode_tiers, encode_tiers
from dcp_tiers.draining import lacking_steps, report_lacking, wait_for_promoter
from dcp_tiers.errors import TiersError
from dcp_tiers.listing import TieredStep, list_steps
from dcp_tiers.promoter_process import PromoterProcess
from dcp_tiers.tier import Tier, is_number
from dcp_tiers.waiting import KeepWaiting

__all__ = ["Tiers"]

_log = library_logger(__name__)

_PATIENCE_SECONDS = 24 * 3600.0


class Tiers:
    """Root of a training run whose checkpoints lie on several storages, the nearest first.

    Saves go to the first tier; a promoter copies to the others what their policies keep. A tier has a folder for each
    checkpoint, which is complete in itself: any tool can read it alone.

    Args:
        tiers: The tiers, at least one, nearest first.
        folder_prefix: Prefix of checkpoint folder names, before the step.
        stale_after_seconds: Age of a save marker or lease at which its process, if on another host, counts as dead.
        patience_seconds: Time without progress after which the promoter gives up, once the trainer has ended; the
            default outlasts an outage of a storage for the night. While the trainer runs it never gives up.

    Raises:
        TiersError: There is no tier, one is given twice, one but the first is of each host, or `per_host` is set for
            the URI of a store that all hosts share, or `copies` for such a store; or a time is not above 0.
        ValueError: No tool would read the step from folder names with this prefix.

    Example:
        ```python
        import dcp_all as dcp
        from dcp_io import KeepLast
        from dcp_tiers import Tier, Tiers

        tiers = Tiers([Tier("near", keep=KeepLast(2)), Tier("far")])
        dcp.save({"step": 40}, checkpoint_id=tiers.step(40))
        state = {"step": 0}
        dcp.load(state, checkpoint_id=tiers.find(tiers.latest()))
        assert state["step"] == 40
        ```
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        folder_prefix: str = "step-",
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        tiers = _list_of(tiers)
        for name, seconds in (("stale_after_seconds", stale_after_seconds), ("patience_seconds", patience_seconds)):
            if not (is_number(seconds) and seconds > 0):  # NaN, too
                raise TiersError(f"{name} is {seconds!r}; it must be a number of more than 0")
        urls = [tier.url for tier in tiers]
        self._stores = tuple(map(open_store, urls))
        self.tiers = tuple(map(_checked, tiers, self._stores))
        self.folder_prefix = folder_prefix
        self.stale_after_seconds = stale_after_seconds
        if not urls:
            raise TiersError("there are no tiers; give at least one, such as Tier('/nvme/run')")
        for tier in self.tiers[1:]:
            if tier.per_host:
                raise TiersError(f"{tier.root}: only the first tier may be one of each host (per_host)")
        # The folder of each host may be that of another tier.
        places = [
            os.path.realpath(store.path) if isinstance(store, LocalStore) else store.url for store in self._stores
        ]
        if twice := {place for place in places if places.count(place) > 1}:
            raise TiersError(f"{min(twice)} is in the list of tiers twice; each tier needs a folder of its own")
        self.catalogues = tuple(
            Catalogue(store, stale_after_seconds=stale_after_seconds, folder_prefix=folder_prefix)
            for store in self._stores
        )
        """Catalogue of each tier, nearest first."""
        self.largest_bytes = 0
        """Size of the largest checkpoint in the first tier when it was listed last; 0 if it was not."""
        self._described = Description(self.tiers, folder_prefix, stale_after_seconds)
        self._promoter = PromoterProcess(urls[0], patience_seconds)

    @classmethod
    def read(cls, place: str | os.PathLike[str], *, own: bool = False) -> Tiers:
        """Return the tiers that a file describes.

        Args:
            place: Path or URI of a file `run.tiers.toml`, or of the folder of one of its tiers.
            own: Whether to refuse a local file that another user owns: who promotes writes and removes checkpoints
                where the file says.

        Raises:
            CheckpointNotFoundError: There is no such file.
            TiersError: The file does not describe tiers, or belongs to another user.
            OSError: The storage failed.
        """
        text = os.fspath(place)
        is_file = text.endswith(".toml") and not os.path.isdir(text)
        known = file_at(text) if is_file else (open_store(text), DESCRIPTION)
        if known is None:
            raise CheckpointNotFoundError(
                f"there is no file {text}; Tiers.write() and the promoter write {DESCRIPTION}"
            )
        store, name = known
        try:
            data = store.read(name)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{store.url} has no {DESCRIPTION}: it is not a tier, or Tiers.write() was never called"
            ) from error
        if own and isinstance(store, LocalStore):
            check_owner(os.path.join(store.path, name))
        found = decode_tiers(data, f"{store.url}/{name}")
        try:
            return cls(found.tiers, folder_prefix=found.folder_prefix, stale_after_seconds=found.stale_after_seconds)
        except ValueError as error:
            raise TiersError(f"{store.url}/{name}: {error}") from error

    def write(self) -> None:
        """Write `run.tiers.toml` into the first tier, which other processes read; a promoter writes it to the others.

        Raises:
            ValueError: A policy is of a class of your own, which other processes cannot read.
            OSError: The storage failed.

        Ranks: one.
        """
        self.write_to(0)

    def write_to(self, number: int) -> None:
        """Write the description into the tier with this number, unless it is there already. Errors: see `write`."""
        store, data = self._stores[number], encode_tiers(self._described)
        if store.exists(DESCRIPTION) and store.read(DESCRIPTION) == data:
            return
        store.make()
        store.publish(DESCRIPTION, data)

    def host_id(self) -> str:
        """Return the id of this host's folder of the first tier, 16 hexadecimal digits; it is made if it is missing."""
        return host_id(self._stores[0])

    @property
    def copies(self) -> HostCopies | None:
        """Copies of each host's part of a checkpoint on other hosts, which a manager makes; None for none."""
        return self.tiers[0].copies

    @property
    def places(self) -> tuple[Store, ...]:
        """The store of each tier, nearest first."""
        return self._stores

    def step(self, step: int) -> str:
        """Return the checkpoint id by which a step is saved: its folder in the first tier.

        Raises:
            TiersError: The step is not an integer of at least 0: no tool would list its checkpoint.
        """
        try:
            number = -1 if isinstance(step, bool) else operator.index(step)
        except TypeError:
            number = -1
        if number < 0:
            raise TiersError(f"step is {step!r}; it must be a whole number of at least 0")
        return self._id(0, number)

    def _id(self, number: int, step: int) -> str:
        return f"{self.tiers[number].url}/{self.catalogues[number].folder_name(step)}"

    def find(self, step: int | None) -> str:
        """Return the checkpoint id by which a step is loaded: its folder in the nearest tier with a complete copy.

        With a tier of each host, the id stands for all hosts' folders, and for the other tiers, from which a load reads
        what no host has; the load finds out whether the step is complete.

        Args:
            step: The step; None, which `latest` returns if there is no checkpoint, raises an error.

        Raises:
            CheckpointNotFoundError: No tier has a complete copy; the message says what each of them lacks.
        """
        near = self._stores[0]
        if step is not None and isinstance(near, HostStore):
            store = near.child(self.catalogues[0].folder_name(step))
            return store.uri([self._id(number, step) for number in range(1, len(self.tiers))])
        problems = []
        for number, catalogue in enumerate(self.catalogues):
            try:
                if step is None:
                    raise CheckpointNotFoundError("there is no complete checkpoint")
                if catalogue.is_good(step):
                    catalogue.check(step)
                    return self._id(number, step)
                problems.append(f"{self.tiers[number].url} does not have it")
            except (OSError, DcpError) as error:
                problems.append(f"{self.tiers[number].url}: {error}")
        raise CheckpointNotFoundError(f"step {step} is complete in no tier: {'; '.join(problems)}")

    def latest(self) -> int | None:
        """Return the highest step that is complete in some tier; None if there is none.

        Complete: its index and its files are there in full length. Of a tier of each host, only this host's folder is
        seen, and a step counts if its index is there. A tier that cannot be read, or does not answer for half a minute,
        is passed over with a warning, if others have checkpoints; so is a higher step that is not complete, with what
        is there and where the original was.

        Raises:
            OSError: A tier could not be read, and the others have no checkpoint.

        Ranks: one; not collective.
        """
        catalogues = {catalogue.store.url: catalogue for catalogue in self.catalogues}
        found = ask_places(self._stores, lambda store: catalogues[store.url].records())
        good = [{record.step for record in records if record.quarantined is None} for records in found]
        candidates = [(step, number) for number, steps in enumerate(good) for step in steps]
        ordered = sorted(candidates, key=lambda one: (-one[0], one[1]))
        newest = next((step for step, number in ordered if self._is_complete(number, step)), None)
        above = -1 if newest is None else newest
        left = ask_places(self._stores, lambda store: catalogues[store.url].unfinished(above), optional=True)
        for one in chain(*left):
            level = logging.INFO if one.is_running else logging.WARNING
            _log.log(level, "step %d is not complete: %s", one.step, one.text)
        return newest

    def _is_complete(self, number: int, step: int) -> bool:
        if self.tiers[number].per_host:
            return True
        try:
            check_checkpoint(self._stores[number].child(self.catalogues[number].folder_name(step)))
        except (OSError, DcpError) as error:
            _log.warning("step %d in %s is passed over: %s", step, self.tiers[number].url, error)
            return False
        return True

    def steps(self) -> list[TieredStep]:
        """Return all steps by ascending number, and the state of their copies in each tier; reads all indexes.

        Raises:
            OSError: The storage of a tier failed.

        Ranks: one; not collective.
        """
        return list_steps(self.catalogues)

    @property
    def keep_waiting(self) -> KeepPolicy:
        """Policy that keeps in the first tier what further tiers must still get, and nothing else."""
        return KeepWaiting(self)

    @property
    def keep_policy(self) -> KeepPolicy:
        """Policy of a manager for the first tier: that of the tier, and what further tiers must still get."""
        return self.tiers[0].keep | self.keep_waiting

    def make_room(self, step: int, *, hurry: bool) -> bool:
        """Bring the first tier within its budget before a step is saved; returns False if the save should wait.

        The storage's failures are logged, not raised: the save goes on.

        Args:
            step: The step that is about to be saved, taken to be as large as the largest checkpoint there.
            hurry: Whether the save cannot wait, so that a full tier drops what further tiers must still get.

        Ranks: one.
        """
        try:
            return make_room(self, 0, step, drop=hurry)
        except (OSError, DcpError) as error:
            _log.warning("%s is not brought within its budget: %s", self.tiers[0].url, error)
            return True

    def start_promoter(self) -> None:
        """Write the description and start the promoter process, unless it runs; a failure is logged, not raised.

        The process finds what waits from earlier runs. It ends by itself after this process, when everything has
        arrived. `CheckpointManager` calls this.

        Ranks: one.
        """
        if len(self.tiers) == 1:
            return
        try:
            self.write()
            self._promoter.start()
        except (OSError, ValueError) as error:
            _log.warning("no promoter of %s was started: %s", self.tiers[0].url, error)

    def wake_promoter(self) -> None:
        """Make the promoter look for new checkpoints; starts it if it has ended. Ranks: one."""
        if not self._promoter.wake():
            self.start_promoter()
            self._promoter.wake()

    def end_promoter(self, seconds: float | None = None) -> None:
        """Wait for the promoter, at most `seconds`; an event and a warning say what further tiers lack.

        Another trainer's promoter, which works for both, is waited for only if this one has saved something. If the
        first tier cannot be read, that is logged, not raised: the saves have ended.

        Ranks: one.
        """
        try:
            if lacking_steps(self):
                self.start_promoter()
            report_lacking(self, wait_for_promoter(self, self._promoter, seconds))
        except (OSError, DcpError) as error:
            self._promoter.leave()
            _log.warning("what further tiers lack of %s is not known: %s", self.tiers[0].url, error)

    def drain(self, seconds: float | None = None) -> dict[str, list[int]]:
        """Wait until further tiers have all that their policies keep, and return what they lack after that.

        A promoter process is started if none runs; after the time it goes on alone.

        Args:
            seconds: Maximum time to wait; None waits until the promoter has ended: when everything has arrived, or what
                has not cannot be promoted.

        Returns:
            Path or URI of a tier → steps that it lacks, ascending; empty if everything has arrived.

        Raises:
            OSError: The first tier cannot be read.

        Ranks: one.

        Example:
            ```python
            import dcp_all as dcp
            from dcp_tiers import Tier, Tiers

            tiers = Tiers([Tier("near"), Tier("far")])
            dcp.save({"step": 40}, checkpoint_id=tiers.step(40))
            assert tiers.drain(seconds=120) == {}
            ```
        """
        # Without a step that lacks, too: a further tier may have lost what it had.
        if len(self.tiers) > 1 and self.catalogues[0].folders():
            self.wake_promoter()
        return wait_for_promoter(self, self._promoter, seconds)


def _list_of(tiers: Sequence[Tier]) -> list[Tier]:
    """Return a list of tiers; raises TiersError if they are something else, such as paths."""
    found = [*tiers] if isinstance(tiers, Iterable) else [tiers]
    if not (isinstance(tiers, Iterable) and all(isinstance(tier, Tier) for tier in found)):
        raise TiersError(f"tiers are {tiers!r}; give a list such as [Tier('/nvme/run'), Tier('/slow/run')]")
    return found


def _checked(tier: Tier, store: Store) -> Tier:
    """Return the tier, marked as one of each host if its store is; raises TiersError if only the mark says so."""
    if isinstance(store, HostStore):
        return tier if tier.per_host else replace(tier, per_host=True)
    if tier.copies is not None and not tier.per_host:
        raise TiersError(f"tier {tier.root}: only a tier of each host (per_host) has copies on other hosts (copies)")
    if tier.per_host:
        raise TiersError(
            f"tier {tier.root}: all hosts share the store of this URI, so it cannot be one of each host (per_host); "
            "give the path of a folder, or the URI of a store that each host has for itself"
        )
    return tier
