"""What does not fit into 32 bits: said in one sentence, before any number is wrong."""

from __future__ import annotations

import pytest
from parity import cases

import mattermill as mm
from mattermill.domain import tables


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
