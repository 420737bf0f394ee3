"""The systems aboard one rank: their rows, their lists, and how both follow the dynamics.

Everything a system's lists and owners depend on is its own: reference positions, reference cell, the number of ranks.
So an answer never depends on who else is aboard, or on how a run was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .admission import check_arrivals, complete, in_order_of_arrival, keep_rows, new_resident
from .balance import Loads, cost_of, plan_moves
from .batch import Batch
from .density import mean_neighbors
from .exchange import Exchange
from .frame import Frame
from .memory import Budget
from .mesh import Mesh
from .migrate import gather_system, migrate_rows, row_bytes
from .refresh import refresh
from .resident import Layout, Resident, Splitting, build_lists, drop_lists, lay_out
from .skin import Skin
from .tables import Tables

WHY_BROKEN = "positions or cell became non-finite, or an atom moved beyond all reason"
WHY_NO_LISTS = "its neighbour list can no longer be made"


class Aboard:
    """Owned atoms and lists of all residents on this rank. Methods are collective unless they say otherwise.

    Attributes:
        batch: owned atoms, as `State.batch`.
        residents: one record per system, in the batch's order, alike on every rank.
        tables: the assembled neighbourhood.
        rebuilds: how often lists of a system were rebuilt in flight (arrivals not counted).
        broken: systems that can't go on, and why; the same on every rank.
        budget: the memory there is; None: nobody has asked yet.
    """

    def __init__(self, mesh: Mesh, splitting: Splitting) -> None:
        self.mesh, self.splitting = mesh, splitting
        self.batch = Batch.empty()
        self.residents: list[Resident] = []
        self.skin = Skin(splitting.strategy, mesh.device)
        self.tables = Tables([], mesh.rank, mesh.device, splitting.strategy.name)
        self.exchange: Exchange | None = None
        self._header = np.zeros(0)
        self.rebuilds = 0
        self._uneven = False
        self.budget: Budget | None = None
        self.broken: dict[str, str] = {}

    # --- coming and going --------------------------------------------------------------------------------------

    def add(self, whole: Batch) -> None:
        """Take whole systems aboard, which every rank holds in full; each rank keeps its part."""
        whole = complete(whole.to(self.mesh.device))
        arrivals = [new_resident(whole, s, self.splitting) for s in range(len(whole))]
        layouts = [self._arriving(whole, s, resident) for s, resident in enumerate(arrivals)]
        loads = Loads(self.mesh.size)
        for resident in self.residents:
            loads.add(resident.cost, resident.owners)
        # The costly ones choose first: small ones then fill up what is left uneven.
        for resident, layout in sorted(zip(arrivals, layouts, strict=True), key=lambda arrival: -arrival[0].cost):
            resident.ranks = loads.order()
            ranks = np.array(resident.domain_ranks(layout.grid.n_domains), dtype=np.int32)
            resident.owners = ranks[layout.domains]
            build_lists(resident, layout, self.splitting, self.mesh.rank)
            loads.add(resident.cost, resident.owners)
        if "memory_grid" in whole or any(resident.forced is not None for resident in arrivals):
            grids = torch.tensor([r.forced or (0, 0, 0) for r in arrivals], dtype=torch.int32, device=whole.device)
            whole = whole.with_fields(systems={"memory_grid": grids})
        mine = keep_rows(whole, arrivals, self.mesh.rank)
        self.batch = Batch.concat([self.batch, mine])
        self.residents += arrivals
        self._uneven = True
        self._lay_out_anew()

    def _arriving(self, whole: Batch, s: int, resident: Resident) -> Layout:
        """Where the atoms of an arrival belong, so that they fit into memory; sets its cost.

        A system that was divided for memory before, and may be so here, goes on with the grid it had.

        Raises:
            ValueError: it does not fit, however it is divided.
        """
        span = slice(int(whole.ptr[s]), int(whole.ptr[s + 1]))
        reference = whole.reference[span].cpu().numpy()[resident.order]
        cell = whole.reference_cell[s].cpu().numpy()
        kept = self._kept(whole, s, resident, reference, cell)
        layout = lay_out(resident, reference, cell, self.splitting) if kept is None else kept
        if self.budget is not None and kept is None:
            dims = self.budget.grid(layout.frame, layout.fractional, row_bytes(whole.atoms), layout.grid)
            if dims is not None:
                resident.forced, resident.divisible = dims, dims != (1, 1, 1)
                layout = lay_out(resident, reference, cell, self.splitting)
        if self.mesh.size > 1:
            strategy = self.splitting.strategy
            near = mean_neighbors(layout.frame, layout.fractional, strategy.cutoff + strategy.skin)
            resident.cost = cost_of(resident.n_atoms, near)
        return layout

    def _kept(self, whole: Batch, s: int, resident: Resident, reference: np.ndarray, cell: np.ndarray) -> Layout | None:
        """The layout on the grid that was chosen for memory before; None if there was none, or it is none for here."""
        if "memory_grid" not in whole or self.splitting.grid is not None:
            return None
        x, y, z = whole.memory_grid[s].tolist()
        if min(x, y, z) < 1 or x * y * z > self.mesh.size:
            return None
        chosen_freely = resident.divisible
        resident.forced, resident.divisible = (x, y, z), (x, y, z) != (1, 1, 1)
        layout = lay_out(resident, reference, cell, self.splitting)
        if layout.grid.dims == (x, y, z) and (
            self.budget is None
            or self.budget.bears(layout.frame, layout.fractional, row_bytes(whole.atoms), layout.grid)
        ):
            return layout
        resident.forced, resident.divisible = None, chosen_freely
        return None

    def too_large(self, batch: Batch) -> dict[str, str]:
        """By id, why systems do not fit into the memory there is, however they are divided. Not collective.

        Each is judged as if it were alone: who else is aboard or comes along does not count.
        """
        if self.budget is None or not batch:
            return {}
        size = row_bytes(complete(batch.select([0])).atoms)
        cells, pbc = batch.cell.cpu().numpy(), batch.pbc.cpu().numpy()
        reasons: dict[str, str] = {}
        doubtful = []
        for s, system_id in enumerate(batch.ids):
            try:
                if not self.budget.is_ample(Frame.of(cells[s], pbc[s]), int(batch.counts[s]), size):
                    doubtful.append(s)
            except ValueError as error:  # a cell that is none: the fault of this system alone
                reasons[system_id] = str(error)
        rest = complete(batch.select(doubtful))
        for s, system_id in enumerate(rest.ids):
            try:
                self._arriving(rest, s, new_resident(rest, s, self.splitting))
            except ValueError as error:
                reasons[system_id] = str(error)
        return reasons

    def drop(self, ids: Sequence[str]) -> None:
        """Forget these systems. Not collective, but every rank must do it."""
        gone = set(ids)
        keep = [s for s, r in enumerate(self.residents) if r.id not in gone]
        # Rows are copied: a view would keep the memory of those that left.
        self.batch = self.batch.select(keep).clone() if keep else Batch.empty()
        self.residents = [self.residents[s] for s in keep]
        self.broken = {i: why for i, why in self.broken.items() if i not in gone}
        self._uneven = True
        self._lay_out_anew()

    def level(self) -> bool:
        """Move whole systems between ranks where arrivals and departures have left the work uneven.

        Their lists are made again from the reference they were made from: nothing about them changes but the place.

        Returns:
            Whether any has moved: rows, and so the state, are others then. The same on every rank.
        """
        if not self._uneven or self.mesh.size == 1:
            return False
        self._uneven = False
        divided, whole = Loads(self.mesh.size), []
        for s, resident in enumerate(self.residents):
            if resident.grid.n_domains > 1:
                divided.add(resident.cost, resident.owners)
            else:
                whole.append(s)
        residents = [self.residents[s] for s in whole]
        moves = plan_moves([r.cost for r in residents], [r.ranks[0] for r in residents], divided.work)
        for k, rank in sorted(moves.items()):
            self._move(whole[k], rank)
        if moves:
            self._lay_out_anew()
        return bool(moves)

    def _move(self, s: int, rank: int) -> None:
        """Take a whole system to another rank, atoms, lists and all."""
        resident = self.residents[s]
        self._migrate(s, np.full(resident.n_atoms, rank, dtype=np.int32))
        resident.ranks = (rank, *(r for r in resident.ranks if r != rank))
        if rank != self.mesh.rank:
            drop_lists(resident)
            return
        reference = self.batch.reference[self._rows(s)].cpu().numpy()
        layout = lay_out(resident, reference, self.batch.reference_cell[s].cpu().numpy(), self.splitting)
        build_lists(resident, layout, self.splitting, rank)

    def gather(self, ids: Sequence[str], fields: Sequence[str] | None = None) -> Batch | None:
        """Whole systems on the lead, atoms in the order in which they came in; None elsewhere."""
        places = {r.id: s for s, r in enumerate(self.residents)}
        index = [places[i] if i in places else self.index(i) for i in ids]
        chosen = self.batch.select(index)
        if fields is not None:
            chosen = chosen.without([n for n in (*chosen.atoms, *chosen.systems) if n not in fields])
        residents = [self.residents[s] for s in index]
        atoms = chosen.atoms
        if self.mesh.size > 1 and atoms:
            owners = np.concatenate([r.owners for r in residents]) if residents else np.zeros(0, dtype=np.int32)
            gathered = gather_system(self.mesh, atoms, owners)
            if gathered is None:
                return None
            atoms = gathered
        elif not self.mesh.is_lead:
            return None
        atoms = in_order_of_arrival(atoms, residents)
        systems = {k: v.clone() for k, v in chosen.systems.items()}
        return Batch(chosen.ids, [r.n_atoms for r in residents], atoms, systems, [dict(i) for i in chosen.info])

    def index(self, system_id: str) -> int:
        for s, resident in enumerate(self.residents):
            if resident.id == system_id:
                return s
        raise ValueError(f"no system {system_id!r} is aboard; there are: {', '.join(r.id for r in self.residents)}")

    def check(self, batch: Batch) -> None:
        """ValueError for systems that can't come aboard. Not collective."""
        check_arrivals(batch, [r.id for r in self.residents])

    # --- following the dynamics --------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Model positions from the state; what other ranks see of it is sent. False if lists are used up for sure."""
        b = self.batch
        self._thaw()
        self.skin.update(b.cell, b.reference_cell, b.pbc)
        worst = self.skin.start.clone()
        t = self.tables
        refresh(
            t.n_owned, b.positions, b.reference, b.cell, self.skin.deformation, self.skin.scale, t.system, t.source,
            t.net, t.nb.positions, worst,
        )  # fmt: skip
        t.nb.cells, t.nb.pbc = b.cell, b.pbc
        # On a device this waits for it: the decision must be made before ghosts are used.
        self._header = worst.cpu().numpy()
        if self.exchange is not None:
            self.exchange.begin(b.positions, b.cell, self._header)
        return bool((self._header <= 1.0).all())

    def finish(self) -> bool:
        """Ghosts arrive from their owners; lists that are used up are rebuilt, and atoms may change rank.

        Returns:
            Whether the neighbourhood is the one of `begin`; False after a rebuild, with positions brought up to date.
        """
        worst = self._arrived()
        if not (worst <= 1.0).all():
            due = np.flatnonzero(~(worst <= 1.0)).tolist()
            for s in due:
                if not np.isfinite(worst[s]):
                    self.broken.setdefault(self.residents[s].id, WHY_BROKEN)
            self._thaw()
            self._rebuild(due)
            return False
        return True

    def _arrived(self) -> np.ndarray:
        """The worst displacement of each system anywhere, once the ghosts are here."""
        if self.exchange is None:
            return self._header
        return self.exchange.finish(self.batch.cell, self._header)

    def _thaw(self) -> None:
        """Broken systems stand at their reference, the last configuration that was sound, until they are released."""
        for s, resident in enumerate(self.residents if self.broken else ()):
            if resident.id in self.broken:
                rows = slice(int(self.tables.owned_at[s]), int(self.tables.owned_at[s] + self.tables.owned[s]))
                self.batch.positions[rows] = self.batch.reference[rows]
                self.batch.cell[s] = self.batch.reference_cell[s]
                self.hush(s)

    def hush(self, s: int) -> None:
        """Nothing moves a broken system."""
        rows = slice(int(self.tables.owned_at[s]), int(self.tables.owned_at[s] + self.tables.owned[s]))
        for name in ("velocities", "forces"):
            self.batch.atoms[name][rows] = 0.0

    def _rebuild(self, due: Sequence[int]) -> None:
        """New reference, owners and lists for these systems; then positions and ghosts over again."""
        fits, failed = True, {}
        for s in due:
            try:
                fits &= self._rebuild_one(s)
            except ValueError as error:
                # No other rank waits for this one: what all do together comes before what can fail on one alone.
                failed[s] = str(error) or repr(error)
        failed = self._failed_anywhere(due, failed)
        for s in due:
            rows = self._rows(s)
            if s not in failed:
                self.batch.reference[rows] = self.batch.positions[rows]
                self.batch.reference_cell[s] = self.batch.cell[s]
                continue
            # Back to where the lists could be made, and there it stays.
            self.broken.setdefault(self.residents[s].id, f"{WHY_NO_LISTS}: {failed[s]}")
            self.batch.positions[rows] = self.batch.reference[rows]
            self.batch.cell[s] = self.batch.reference_cell[s]
            fits &= self._rebuild_one(s)
        self.rebuilds += len(due)
        self.skin.forget()
        if not fits:
            self._lay_out_anew()
        elif any(self.residents[s].divisible for s in due):
            self._lists_changed()
        else:
            # Systems that lie whole on one rank take no part in the exchange.
            self._renew()
        # Those whose lists need rebuilding at once again (no skin at all) have just had it.
        self.begin()
        self._arrived()

    def _failed_anywhere(self, due: Sequence[int], mine: dict[int, str]) -> dict[int, str]:
        """Of these systems those that failed on any rank, and how: in the words of the first rank on which they did."""
        if self.mesh.size == 1:
            return mine
        flags = self.mesh.max(torch.tensor([s in mine for s in due], dtype=torch.uint8)).tolist()
        failed = {}
        for s in (s for s, flag in zip(due, flags, strict=True) if flag):
            words = np.frombuffer(mine.get(s, "").encode(), dtype=np.uint8).copy()
            told = [bytes(part.tolist()).decode() for part in self.mesh.all_gather_rows(torch.from_numpy(words))]
            failed[s] = next(text for text in told if text)
        return failed

    def _rebuild_one(self, s: int) -> bool:
        """Owners and lists from the positions; False if the tables must be laid out anew.

        Raises:
            ValueError: no cell any more, or more pairs than can be numbered; perhaps on this rank only.
        """
        resident = self.residents[s]
        rows = self._rows(s)
        cell = self.batch.cell[s].cpu().numpy()
        rank = self.mesh.rank
        fits = True
        if not resident.divisible:
            if resident.ranks[0] != rank:
                drop_lists(resident)
                return True
            layout = lay_out(resident, self.batch.positions[rows].cpu().numpy(), cell, self.splitting)
        else:
            layout = lay_out(resident, self._positions_everywhere(s), cell, self.splitting)
            ranks = np.array(resident.domain_ranks(layout.grid.n_domains), dtype=np.int32)
            owners = ranks[layout.domains]
            if not np.array_equal(owners, resident.owners):
                fits = not self._migrate(s, owners)
        build_lists(resident, layout, self.splitting, rank)
        return fits and self.tables.write(s, resident)

    def _rows(self, s: int) -> slice:
        start = int(self.batch.counts[:s].sum())
        return slice(start, start + int(self.batch.counts[s]))

    def _positions_everywhere(self, s: int) -> np.ndarray:
        """Positions of all atoms of a system, by place, (n, 3)."""
        resident = self.residents[s]
        counts = np.bincount(resident.owners, minlength=self.mesh.size).tolist()
        parts = self.mesh.gather_known_rows(self.batch.positions[self._rows(s)].cpu(), counts)
        whole = np.empty((resident.n_atoms, 3))
        whole[np.argsort(resident.owners, kind="stable")] = torch.cat(parts).numpy()
        return whole

    def _migrate(self, s: int, owners: np.ndarray) -> bool:
        """Move atoms to their new owners; True, since rows here may have changed even if their number did not."""
        resident, b = self.residents[s], self.batch
        rows = self._rows(s)
        moved = migrate_rows(self.mesh, {k: v[rows] for k, v in b.atoms.items()}, resident.owners, owners)
        resident.owners = owners
        counts = b.counts.copy()
        counts[s] = int(np.count_nonzero(owners == self.mesh.rank))
        atoms = {k: torch.cat([v[: rows.start], moved[k], v[rows.stop :]]) for k, v in b.atoms.items()}
        self.batch = Batch(b.ids, counts, atoms, b.systems, b.info)
        return True

    def _lay_out_anew(self) -> None:
        self.tables = Tables(self.residents, self.mesh.rank, self.mesh.device, self.splitting.strategy.name)
        self.skin.forget()
        self._lists_changed()

    def _lists_changed(self) -> None:
        if self.mesh.size > 1 and self.residents:
            self.exchange = Exchange(self.mesh, self.residents, self.tables)
        else:
            self.exchange = None
        self._renew()

    def _renew(self) -> None:
        """A fresh neighbourhood for the model: whatever it has cached about the lists is out of date."""
        self.tables.renew()
        nb = self.tables.nb
        nb.split = self.any_halo
        if self.exchange is not None and nb.split and self.splitting.strategy.refreshes:
            nb.features = self.exchange.features()

    @property
    def any_halo(self) -> bool:
        """Whether any system lies on several ranks, the same on all of them."""
        return any(r.grid.n_domains > 1 for r in self.residents if r.divisible)


__all__ = ["Aboard"]
