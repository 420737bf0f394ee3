"""A rank's seat in a gang: the state that lives on a worker between two segments."""

from __future__ import annotations

import itertools
import logging
import math
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .filter import judge
from .folder import Folder
from .handoff import read_batch, write_batch
from .orders import Arrival, Order, Post, Report, StateFile
from .reporter import TrajectoryReporter

if TYPE_CHECKING:
    from ..domain.batch import Batch
    from ..domain.mesh import Mesh
    from ..stages.reporter import SegmentReport
    from ..stages.run import StageRun
    from .work import Work

logger = logging.getLogger(__name__)

# Of a Dask worker's limit so much is planned with: Dask pauses a worker at 80 per cent, and its process has a size of
# its own.
_SHARE = 0.6


class Seat:
    """One rank's part in one gang: its mesh, its stage run and, on the lead, the files.

    Every method but `abandon` is collective over the gang. Only the lead (rank 0) returns reports.
    """

    def __init__(self, post: Post, work: Work, folder: Folder, session: str, mesh: Mesh, store: Any = None) -> None:
        from ..stages.run import StageRun

        self.post, self.folder, self.session = post, folder, session
        self.mesh = mesh
        self._store = store  # the lead's serves the others: it must live as long as the gang
        node = work.stages[post.stage]
        self.filters = work.filters_behind(post.stage)
        keep = node.stage.frame_fields
        self.reporter = TrajectoryReporter(folder, post.stage, velocities="velocities" in keep, forces="forces" in keep)
        self.run: StageRun = StageRun(
            node.stage,
            node.model,
            mesh,
            self.reporter if self.is_lead else None,
            seed=work.seed,
            max_atoms=post.max_atoms,
            memory=room(mesh, worker_limit()),
        )
        self.inbox: list[Batch] = []
        self.outbox: dict[int, Batch] = {}
        self._progress: dict[str, int] = {}
        self._files = itertools.count()

    @property
    def is_lead(self) -> bool:
        return self.post.rank == 0

    # --- what the tasks do -----------------------------------------------------------------------------------

    def receive(self, arrivals: list[Arrival]) -> None:
        """Put states into the inbox; on the lead. Those that came along are used, the rest is read.

        They replace what is there: what is received a second time (the campaign had given the first up, and it came
        through none the less) must not be aboard twice.

        Raises:
            DamagedFile: a file cannot be trusted; nothing was taken in.
        """
        batches = []
        for arrival in arrivals:
            if arrival.batch is not None:
                batches.append(arrival.batch.select(arrival.ids))
            else:
                batches.append(read_batch(self.folder.resolve(arrival.file), arrival.ids, expect=arrival.digest))
        self.inbox = batches

    def advance(self, order: Order) -> Report | None:
        """One segment: take the inbox in, step, write what finished, and a checkpoint if asked."""
        from ..domain.batch import Batch

        # What was handed on is in the next lead's hands by now, or will be read from its file.
        self.outbox = {}
        with self.mesh.guard():
            if order.admits:
                arrived, self.inbox = self.inbox, []
                self.run.admit(Batch.concat(arrived) if self.is_lead else None)
            segment = self.run.advance(seconds=order.seconds)
            resident = self.run.resident() if order.checkpoint else None
        if not self.is_lead:
            return None
        self._progress = segment.progress
        if segment.finished:
            self.outbox[order.number] = segment.finished
        return Report(
            number=order.number,
            outcomes=tuple(segment.outcomes),
            finished=self._write(segment.finished),
            failed=self._write(segment.failed, "-failed"),
            verdicts=self._judge(segment),
            checkpoint=self._checkpoint(resident),
            aboard={i: segment.progress.get(i, 0) for i in (*segment.resident, *segment.waiting)},
            atom_steps=segment.atom_steps,
            seconds=segment.seconds,
            thermo_ids=segment.thermo_ids,
            thermo=segment.thermo,
        )

    def collect(self, number: int) -> Batch:
        """The finished batch of a segment, for Dask to keep here until others have pulled it; on the lead."""
        return self.outbox.pop(number)

    def leave(self, checkpoint: bool) -> StateFile | None:
        """The last collective act: a checkpoint if asked, then everything is let go."""
        kept = None
        if checkpoint:
            resident = self.run.resident()
            if resident is not None and self.is_lead:
                kept = self._checkpoint(resident)
        self.abandon()
        return kept

    def abandon(self) -> None:
        """Let go of everything without a word to the others: they may be dead. Idempotent."""
        from ..domain.mesh import MeshError

        try:
            self.run.close()
        except MeshError:
            logger.info("claim %s: closed after its mesh had broken", self.post.claim.key)
        finally:
            self.reporter.abandon()
            self.mesh.close()
            self._store = None
            self.inbox, self.outbox = [], {}

    # --- files -------------------------------------------------------------------------------------------------

    def _write(self, batch: Batch | None, suffix: str = "") -> StateFile | None:
        if not batch:
            return None
        path = self.folder.handoff_file(self.post.stage, self._key() + suffix)
        return self._file(path, batch)

    def _checkpoint(self, resident: Batch | None) -> StateFile | None:
        if not resident:
            return None
        self.reporter.sync()
        path = self.folder.checkpoint_file(self.post.stage, self._key())
        return self._file(path, resident, {i: self._progress.get(i, 0) for i in resident.ids})

    def _file(self, path: Path, batch: Batch, steps: dict[str, int] | None = None) -> StateFile:
        digest = write_batch(path, batch)
        return StateFile(self.folder.relative(path), digest, batch.ids, steps or {})

    def _key(self) -> str:
        """A name no other segment of any gang of any session of this campaign has: a late writer spoils nothing."""
        return f"{self.session}-{self.post.claim.key}-{next(self._files)}"

    def _judge(self, segment: SegmentReport) -> dict[str, dict[str, bool | str]]:
        if not self.filters:
            return {}
        return {o.id: judge(self.filters, o) for o in segment.outcomes if o.status.goes_on}


def worker_limit() -> float | None:
    """Bytes at which Dask stops the worker that runs this task; None: it has no limit, or this is no task."""
    from distributed import get_worker

    try:
        worker = get_worker()
    except ValueError:
        return None
    return worker.memory_manager.memory_limit or None


def room(mesh: Mesh, limit: float | None) -> float | None:
    """Bytes that each rank may use for a system, so that no worker of the gang exceeds its limit; collective.

    None leaves it to the runner: no worker has a limit, or atoms live on a GPU, for which Dask's limit is none.
    """
    import torch

    bound = math.inf if limit is None or mesh.device.type != "cpu" else float(limit)
    every = mesh.all_gather_rows(torch.tensor([[bound]], dtype=torch.float64))
    least = float(torch.cat(every).min())
    return None if math.isinf(least) else _SHARE * least


def meet(post: Post, device: str, store: Any = None) -> tuple[Mesh, Any]:
    """Form the gang's mesh, on every rank at the same time; the lead passes the store that it serves."""
    from torch.distributed import PrefixStore, TCPStore

    from ..domain.mesh import Mesh

    if post.meeting is None:
        return Mesh.single(device), None
    if store is None:
        host, port = post.meeting
        store = TCPStore(host, port, post.size, is_master=False, timeout=timedelta(seconds=post.timeout))
    prefixed = PrefixStore(f"{post.claim.id}/{post.claim.epoch}", store)
    return Mesh.join(prefixed, post.rank, post.size, device, post.timeout), store


def serve_store(host: str, size: int, timeout: float) -> tuple[Any, tuple[str, int]]:
    """A TCPStore on this host's given interface only, at a port that the system chose.

    Returns:
        The store and where it is. The socket is bound before the store gets it, so the port cannot be taken by
        another in between, and the store listens on no other interface.
    """
    from torch.distributed import TCPStore

    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(address)
        listener.listen(128)
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            size,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store owns it now
    return store, (host, port)


def pick_device(asked: str) -> str:
    """``auto`` is the first CUDA device this process sees (dask-cuda puts a rank's own first), else the CPU."""
    import torch

    if asked != "auto":
        return asked
    return "cuda:0" if torch.cuda.is_available() else "cpu"


__all__ = ["Seat", "meet", "pick_device", "room", "serve_store", "worker_limit"]
