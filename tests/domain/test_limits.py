"""What does not fit into 32 bits: said in one sentence, before any number is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import cases

import mattermill as mm
from mattermill.domain import aboard, tables
from mattermill.domain.admission import check_arrivals
from mattermill.domain.frame import Frame


def runner_of(mesh=None, **kwargs):
    kwargs = {"skin": cases.SKIN, "split_atoms": 30, **kwargs}
    return mm.DomainParallel(cases.model(), cases.propagator("nve"), mesh, **kwargs)


def test_systems_whose_pairs_cannot_be_numbered_together(monkeypatch):
    batch = cases.batch(["cubic", "slab", "tiny"])

    def most(names):
        """The largest number of rows or pairs."""
        with runner_of() as runner:
            runner.partition(batch.select([batch.index(n) for n in names]))
            nb = runner._aboard.tables.nb
            return max(nb.n_total, len(nb.neighbors))

    whole = most(["cubic", "slab", "tiny"])
    monkeypatch.setattr(tables, "_MOST", whole)
    assert most(["cubic", "slab", "tiny"]) == whole
    monkeypatch.setattr(tables, "_MOST", whole - 1)
    with pytest.raises(ValueError, match=rf"at most {whole - 1} pairs together.*have {whole}: take fewer.*max_atoms"):
        most(["cubic", "slab", "tiny"])
    assert most(["cubic"]) < whole


def test_atoms_too_many_cells_away():
    batch = cases.batch(["cubic", "cluster"])
    ptr = batch.ptr
    batch.positions[ptr[1] :] += 1e12  # no axis is periodic: no cells to be away from
    check_arrivals(batch, [])
    batch.positions[3, 1] += 3e9 * float(batch.cell[0, 1, 1])
    with pytest.raises(ValueError, match=r"system 'cubic': atoms must be within 1e\+08 cells.*3e\+09 away: wrap"):
        check_arrivals(batch, [])
    with pytest.raises(ValueError, match="1e\\+08 cells"):
        Frame.of(np.eye(3), np.ones(3, dtype=bool)).wrap(np.array([[0.0, -3e9, 0.0]]))


# --- a system whose lists can no longer be made -------------------------------------------------------------------


def _collapses(mesh, who, where, split_atoms):
    """From the 5th step on, `where` fails for the slab, on these ranks, unless it is where it was when that began."""
    sound = None
    original = getattr(aboard, where)

    def failing(resident, layout, *args):
        fails = mesh is None or mesh.rank in who
        at = layout if where == "lay_out" else layout.wrapped
        if resident.id == "slab" and armed and fails and not any(np.array_equal(at, x) for x in sound):
            raise ValueError(f"far too dense, says rank {0 if mesh is None else mesh.rank}")
        if resident.id == "slab" and not armed:
            sound.append(at.copy())
        return original(resident, layout, *args)

    armed, sound = False, []
    setattr(aboard, where, failing)
    try:
        with runner_of(mesh, skin=0.1, split_atoms=split_atoms) as runner:
            runner.partition(cases.batch(["cubic", "slab", "tiny"]) if runner.mesh.is_lead else None)
            runner.run(5)
            armed = True
            runner.run(35)
            broken = dict(runner.broken)
            gone = runner.release(["slab"])
            return broken, gone, runner.gather()
    finally:
        setattr(aboard, where, original)


@pytest.mark.parametrize(
    ("size", "who", "where", "split_atoms"),
    [(1, (0,), "build_lists", 30), (1, (0,), "lay_out", 30), (2, (0,), "build_lists", 30), (2, (1,), "build_lists", 30),
     (2, (0, 1), "build_lists", 30), (2, (0, 1), "lay_out", 30), (2, (0, 1), "build_lists", 10_000),
     (2, (0, 1), "lay_out", 10_000)],
)  # fmt: skip
def test_a_system_without_lists_stands_still_and_others_go_on(ranks, size, who, where, split_atoms):
    with runner_of(skin=0.1) as runner:
        runner.partition(cases.batch(["cubic", "slab", "tiny"]))
        runner.run(40)
        expected = runner.gather(["cubic", "tiny"])
    results = (
        [_collapses(None, who, where, split_atoms)]
        if size == 1
        else ranks.run(_collapses, size, who, where, split_atoms)
    )
    assert all(r[0] == results[0][0] for r in results)
    ((name, why),) = results[0][0].items()
    assert name == "slab"
    assert why.startswith("its neighbour list can no longer be made: far too dense, says rank")
    # A system that lies whole on one rank fails there, wherever that is.
    assert int(why[-1]) == who[0] or split_atoms > 30
    _, gone, got = results[0]
    assert torch.equal(gone.positions, gone.reference)
    assert torch.isfinite(gone.energy).all()
    assert not gone.velocities.any()
    assert max(cases.differences(got, expected).values()) < (1e-9 if size > 1 else 1e-300)
