"""A run on some mesh, and what is seen of it on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import mattermill as mm
from mattermill.domain.batch import Batch


class Seen(NamedTuple):
    """What one rank saw.

    Attributes:
        grids: domains per axis of each system. owned: atoms owned here after each step. rebuilds: of lists, in flight.
        came: atoms owned here at the end that were another's at the start.
    """

    grids: dict[str, tuple[int, int, int]]
    owned: list[int]
    rebuilds: int
    came: int


def travel(
    mesh: Any,
    model: Any,
    batch: Batch,
    propagator: Any,
    *,
    steps: int = 100,
    on_step: Callable[[Any, int], None] | None = None,
    **kwargs: Any,
) -> tuple[Batch, Seen]:
    """Run on a mesh; the lead's final batch (None elsewhere).

    Args:
        batch: every rank makes it, the lead's is used.
        on_step: called with the state and the number of the step before each but the first.
        kwargs: of `DomainParallel`.

    Raises:
        AssertionError: in some step owned atoms did not add up to all atoms.
    """
    lead = mesh is None or mesh.is_lead
    with mm.DomainParallel(model, propagator, mesh, **kwargs) as runner:
        runner.partition(batch if lead else None)
        owned, start = [], atoms_here(runner.state)
        for k in range(steps):
            if on_step is not None and k:
                on_step(runner.state, k)
            runner.step()
            owned.append(runner.state.n_owned)
        everywhere = runner.mesh.sum(torch.tensor(owned, dtype=torch.float64))
        assert bool((everywhere == batch.n_atoms).all()), "owned atoms do not add up to all atoms"
        return runner.gather(), Seen(runner.grids, owned, runner.rebuilds, len(atoms_here(runner.state) - start))


def atoms_here(state: Any) -> set[tuple[int, int]]:
    """(system, atom id) of every atom owned here."""
    return set(zip(state.system.tolist(), state.batch.atom_id.tolist(), strict=True))
