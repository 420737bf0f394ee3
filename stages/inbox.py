"""Systems that wait to board. The lead has their states; every rank knows who waits, and so who boards next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..domain.batch import Batch
from .ensembles import require_count
from .intake import is_under_way, reasons_to_refuse

if TYPE_CHECKING:
    from ..domain.mesh import Mesh
    from ..domain.models.base import Model
    from .stage import Stage

Refused = tuple[str, str, int]


class Inbox:
    """First come, first served, within the room there is.

    Args:
        mesh: this rank's mesh.
        max_atoms, max_systems: room aboard; None is no limit.
    """

    def __init__(self, mesh: Mesh, max_atoms: int | None, max_systems: int | None) -> None:
        for name, limit in (("max_atoms", max_atoms), ("max_systems", max_systems)):
            if limit is not None:
                require_count(limit, name)
        self.mesh, self.max_atoms, self.max_systems = mesh, max_atoms, max_systems
        self._sizes: dict[str, int] = {}
        self._states: dict[str, Batch] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._sizes)

    def states(self) -> list[Batch]:
        """What waits, one batch per system; on the lead."""
        return list(self._states.values())

    def put(
        self,
        batch: Batch | None,
        stage: Stage,
        model: Model,
        key: int,
        aboard: Sequence[str],
        too_large: Callable[[Batch], dict[str, str]] = lambda batch: {},
    ) -> tuple[list[Refused], Batch]:
        """Take these systems in; collective. Returns (id, reason, atoms) of those refused; on the lead their states.

        Systems in the middle of a visit have passed the checks before, but for that of their size: memory may be less
        here. `too_large` says by id what does not fit, and why; it is asked on the lead, of each system by itself.
        """
        told: tuple[list[Refused], dict[str, int]] | Exception | None = None
        states: dict[str, Batch] = {}
        if self.mesh.is_lead and batch:
            states = dict(zip(batch.ids, batch.split(), strict=True))
            told = self._sorted_out(batch, stage, model, key, aboard, too_large)
        elif self.mesh.is_lead:
            told = ([], {})
        refused, sizes = self.mesh.broadcast_object(told)
        self._sizes.update(sizes)
        self._states.update({i: states[i] for i in sizes if i in states})
        return refused, Batch.concat([states[i] for i, _, _ in refused if i in states])

    def _sorted_out(
        self,
        batch: Batch,
        stage: Stage,
        model: Model,
        key: int,
        aboard: Sequence[str],
        too_large: Callable[[Batch], dict[str, str]],
    ) -> tuple[list[Refused], dict[str, int]] | Exception:
        twice = sorted(set(batch.ids) & {*aboard, *self._sizes})
        if twice:
            return ValueError(f"aboard or waiting already: {', '.join(twice)}; an id stands for one system")
        sizes = dict(zip(batch.ids, batch.counts.tolist(), strict=True))
        fresh = batch.select(np.flatnonzero(~is_under_way(batch, key)))
        try:
            reasons = reasons_to_refuse(fresh, stage, model)
            reasons |= too_large(batch.select([s for s, i in enumerate(batch.ids) if i not in reasons]))
        except Exception as error:  # a stage of the user's own may raise anything: every rank is told
            return error
        refused = [(i, reason, sizes.pop(i)) for i, reason in reasons.items()]
        return refused, sizes

    def next(self, aboard: np.ndarray) -> list[str]:
        """Who boards now, given the sizes of those aboard: the same on every rank, without asking."""
        if not self._sizes:
            return []
        n_systems, n_atoms, chosen = len(aboard), int(aboard.sum()), []
        for system_id, size in self._sizes.items():
            if self.max_systems is not None and n_systems >= self.max_systems:
                break
            if self.max_atoms is not None and n_systems and n_atoms + size > self.max_atoms:
                break
            chosen.append(system_id)
            n_systems, n_atoms = n_systems + 1, n_atoms + size
        return chosen

    def look(self, ids: Sequence[str]) -> Batch | None:
        """The states of these, which wait on; on the lead, None elsewhere."""
        return Batch.concat([self._states[i] for i in ids]) if self.mesh.is_lead else None

    def drop(self, ids: Sequence[str]) -> None:
        """These have left the inbox."""
        for system_id in ids:
            del self._sizes[system_id]
            self._states.pop(system_id, None)


__all__ = ["Inbox", "Refused"]
