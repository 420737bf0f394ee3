"""What a worker runs for a campaign: a plugin that holds its seat, and the tasks of a gang.

Tasks are plain functions, pinned to their worker. Each begins with the epoch: Dask may run a task late or once more
after a death, and then it must not do anything (`StaleClaim`). Nothing is global: the plugin hangs on the worker.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from distributed import Worker, WorkerPlugin, get_worker
from distributed.comm import get_address_host

from .claims import Claim
from .errors import StaleClaim
from .folder import Folder
from .orders import Arrival, Order, Post, Report, StateFile
from .seat import Seat, meet, pick_device, serve_store

if TYPE_CHECKING:
    from ..domain.batch import Batch

logger = logging.getLogger(__name__)


class RankPlugin(WorkerPlugin):
    """A campaign's hold on one worker.

    Args:
        session: of this run of the campaign; names the plugin, so that campaigns side by side do not meet.
        folder: where leads write.
        work: a pickled `Work`: what the stages are. Pickled here, because a user's own classes go by value.
        device: see `pick_device`.
        own: whether the cluster is the campaign's own. Its workers ignore Ctrl-C, which they get from the terminal as
            well, as they must live to drain; and they end without ceremony.
    """

    def __init__(self, session: str, folder: str, work: bytes, device: str = "auto", *, own: bool = False) -> None:
        self.session, self.folder, self.device, self.own = session, Folder(folder), device, own
        self.name = plugin_name(session)
        self._work = work
        self.seat: Seat | None = None
        self.stores: dict[str, Any] = {}
        self.over: set[str] = set()

    def setup(self, worker: Worker) -> None:
        self.host = get_address_host(worker.address)
        if self.own and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # Registered before torch and Warp are imported, so that it runs after whatever they register. To take
            # them apart object by object takes seconds, after which Dask would kill the process anyway.
            atexit.register(os._exit, 0)

    def teardown(self, worker: Worker) -> None:
        # Called on the event loop: closing waits for nobody.
        if self.seat is not None:
            self.seat.abandon()
        self.seat, self.stores = None, {}

    @property
    def work(self) -> Any:
        import pickle

        return pickle.loads(self._work)

    def seat_of(self, claim: Claim) -> Seat:
        """The first line of every task: the seat, if this claim and epoch have it."""
        if self.seat is None or self.seat.post.claim != claim or claim.key in self.over:
            raise StaleClaim(claim.id, claim.epoch, self.seat.post.claim.epoch if self.seat else None)
        return self.seat

    def end(self, claim: Claim) -> None:
        """The claim is over on this rank, whatever comes later in its name."""
        self.over.add(claim.key)
        self.stores.pop(claim.key, None)
        if self.seat is not None and self.seat.post.claim == claim:
            seat, self.seat = self.seat, None
            seat.abandon()


def plugin_name(session: str) -> str:
    return f"mattermill-{session}"


def _plugin(session: str) -> RankPlugin:
    worker = get_worker()
    assert threading.current_thread() is not threading.main_thread(), "a task must not run on the event loop"
    plugin = worker.plugins.get(plugin_name(session))
    if plugin is None:
        raise StaleClaim(0, 0, None)  # the campaign is over: its plugin has gone
    assert isinstance(plugin, RankPlugin)
    return plugin


# --- tasks ---------------------------------------------------------------------------------------------------------


def serve(session: str, claim: Claim, timeout: float) -> tuple[str, int]:
    """On the lead of a gang of several: open the store where the gang meets."""
    plugin = _plugin(session)
    if claim.key in plugin.over:
        raise StaleClaim(claim.id, claim.epoch, None)
    plugin.stores[claim.key], meeting = serve_store(plugin.host, len(claim.ranks), timeout)
    return meeting


def join(session: str, post: Post) -> None:
    """On every rank: take the seat. Waits for the others, at most the post's timeout.

    Raises:
        StaleClaim: the claim is over.
        MeshError: the others did not come.
    """
    import torch

    plugin = _plugin(session)
    claim = post.claim
    if claim.key in plugin.over:
        raise StaleClaim(claim.id, claim.epoch, None)
    if plugin.seat is not None:
        # The campaign gives a rank back before it gives it away again; this is a claim whose end got lost.
        logger.warning("claim %s takes the seat of %s", claim.key, plugin.seat.post.claim.key)
        plugin.end(plugin.seat.post.claim)
    torch.set_num_threads(1)
    mesh, store = meet(post, pick_device(plugin.device), plugin.stores.pop(claim.key, None))
    try:
        plugin.seat = Seat(post, plugin.work, plugin.folder, plugin.session, mesh, store)
    except BaseException:
        mesh.close()
        raise


def receive(session: str, claim: Claim, arrivals: list[Arrival], batches: list[Batch | None]) -> None:
    """On the lead: take systems into the inbox. `batches` are what Dask brought for each arrival, peer to peer."""
    from dataclasses import replace

    seat = _plugin(session).seat_of(claim)
    seat.receive([replace(a, batch=b) for a, b in zip(arrivals, batches, strict=True)])


def advance(session: str, claim: Claim, order: Order) -> Report | None:
    """On every rank: one segment. The lead reports."""
    return _plugin(session).seat_of(claim).advance(order)


def collect(session: str, claim: Claim, number: int) -> Batch:
    """On the lead: hand the batch that a segment finished to Dask."""
    return _plugin(session).seat_of(claim).collect(number)


def dissolve(session: str, claim: Claim, checkpoint: bool) -> StateFile | None:
    """On every rank: leave together, with a checkpoint if asked."""
    plugin = _plugin(session)
    seat = plugin.seat_of(claim)
    kept = seat.leave(checkpoint)
    plugin.end(claim)
    return kept


def abandon(session: str, claim: Claim) -> None:
    """On one rank by itself: the claim is over. Runs when the rank is free again, which its end therefore proves."""
    _plugin(session).end(claim)


__all__ = [
    "RankPlugin",
    "abandon",
    "advance",
    "collect",
    "dissolve",
    "join",
    "plugin_name",
    "receive",
    "serve",
]
